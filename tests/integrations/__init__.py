"""Pipes in other people's training loops."""
