"""Other libraries' training loops. Nothing in here is imported unless it is asked for."""
