"""A schedule made to measure: for costs and memory that are given, no named one is shorter."""
