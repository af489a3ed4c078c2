"""Random numbers that do not depend on which thread comes first."""
