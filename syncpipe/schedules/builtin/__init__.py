"""The schedules that one can ask for by name, by family."""

from syncpipe.schedules.builtin.by_stage import gpipe, naive, one_f_one_b, zb_h1, zb_h2
from syncpipe.schedules.builtin.looped import interleaved_1f1b, interleaved_zero_bubble, looped_bfs
from syncpipe.schedules.builtin.vshaped import dualpipev, v_half, v_min, zbv

__all__ = [
    "dualpipev",
    "gpipe",
    "interleaved_1f1b",
    "interleaved_zero_bubble",
    "looped_bfs",
    "naive",
    "one_f_one_b",
    "v_half",
    "v_min",
    "zb_h1",
    "zb_h2",
    "zbv",
]
