"""Runs a schedule: workers, streams, random numbers, recomputation, offload."""
