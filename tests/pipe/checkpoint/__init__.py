"""Re-materialization by layer, by operation, and to the host."""
