"""What makes a schedule run: workers, streams, random state, recomputation."""
