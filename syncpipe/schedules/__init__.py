"""The schedules that one can ask for by name, and how to read and write others."""

from syncpipe.schedules.build import SCHEDULES, build
from syncpipe.schedules.builtin import gpipe, interleaved_1f1b, naive, one_f_one_b, zb_h1
from syncpipe.schedules.text import from_csv, to_csv

__all__ = [
    "SCHEDULES",
    "build",
    "from_csv",
    "gpipe",
    "interleaved_1f1b",
    "naive",
    "one_f_one_b",
    "to_csv",
    "zb_h1",
]
