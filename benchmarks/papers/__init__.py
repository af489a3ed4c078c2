"""The papers' tables of memory and speed, ours beside the published figures."""
