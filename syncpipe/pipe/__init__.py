"""The class: its mini-batches, its layers, settings and state, and which layers run where."""

from syncpipe.pipe.pipe import Pipe

__all__ = ["Pipe"]
