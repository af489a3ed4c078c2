"""The loss inside of the pipeline: micro-batch by micro-batch, and that of the mini-batch."""
