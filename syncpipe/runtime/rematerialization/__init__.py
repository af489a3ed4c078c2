"""Cells that store nothing for backward, and are computed again."""
