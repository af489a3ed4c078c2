"""Training without a flush beside training with one."""
