"""What a model does, written down while it runs: nodes, traced numbers, and how two runs differ."""
