"""A plan as one picture: the model, the cut, the step, the memory, and what else was considered."""
