"""The best cuts of a model for a schedule, exact; and other cuts to compare them with."""
