"""What ran when: as data, as a table, as a picture, and as a trace for Perfetto."""

from syncpipe.timeline.timeline import KINDS, Span, Timeline, compare, save_comparison

__all__ = ["KINDS", "Span", "Timeline", "compare", "save_comparison"]
