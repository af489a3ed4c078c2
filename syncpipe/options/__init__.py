"""What the arguments of a pipe may be."""
