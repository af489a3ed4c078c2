"""Partitions on their workers: the pipeline, and the run of a stage for one micro-batch."""
