"""A check that a user can run: the pipe beside the user's own layers, run plainly."""
