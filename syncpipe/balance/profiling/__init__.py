"""Takes copies of layers through a forward and a backward, and notes what these cost."""
