"""Partitions on their workers: the pipeline, its stages, and their runs in one call."""
