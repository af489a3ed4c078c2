"""Bytes of a step, counted without values."""
