"""What is told of a plan: the plan, its page, and what else one could do."""
