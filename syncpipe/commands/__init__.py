"""``python -m syncpipe``: the demo and the planner on the command line."""
