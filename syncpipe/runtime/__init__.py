"""What makes a schedule run: workers, streams, random state, re-materialization."""
