"""``train_batch`` and ``eval_batch``: forward and backward under any schedule, losses, sources."""
