"""What a pipe is given: trees of tensors, and how they are cut into micro-batches."""
