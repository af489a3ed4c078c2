"""The search over cuts, micro-batches, stages, schedules and slots; and why nothing fits."""
