"""Layers that sleep instead of computing, in the place of devices."""
