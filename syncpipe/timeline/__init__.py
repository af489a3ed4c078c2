"""Timelines: what ran when, as data, as a table, as a picture, and as a trace for Perfetto."""

from syncpipe.timeline.timeline import Span, Timeline, compare

__all__ = ["Span", "Timeline", "compare"]
