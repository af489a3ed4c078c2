"""What makes a schedule run: workers, streams, transfers, random state, re-materialization."""
