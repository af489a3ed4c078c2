"""Where train_batch gets its micro-batches from."""
