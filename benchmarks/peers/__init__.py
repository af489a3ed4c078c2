"""Other libraries for pipeline parallelism, side by side with this one."""
