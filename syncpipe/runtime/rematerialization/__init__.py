"""Cells that forget what they stored for backward, and are computed again."""
