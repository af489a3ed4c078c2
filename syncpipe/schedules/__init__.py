"""Schedules: what one is, those with names, how to read and write others, how long they take, and
one made to measure."""

from syncpipe.schedules.build import SCHEDULES, build
from syncpipe.schedules.builtin import (
    dualpipev,
    gpipe,
    interleaved_1f1b,
    interleaved_zero_bubble,
    looped_bfs,
    naive,
    one_f_one_b,
    v_half,
    v_min,
    zb_h1,
    zb_h2,
    zbv,
)
from syncpipe.schedules.kinds import Kind
from syncpipe.schedules.merge import dealt
from syncpipe.schedules.player import validate
from syncpipe.schedules.schedule import Action, Schedule
from syncpipe.schedules.search.auto import auto
from syncpipe.schedules.search.report import AutoSchedule
from syncpipe.schedules.simulation import Costs, Simulation, simulate
from syncpipe.schedules.text import from_csv, to_csv

__all__ = [
    "SCHEDULES",
    "Action",
    "AutoSchedule",
    "Costs",
    "Kind",
    "Schedule",
    "Simulation",
    "auto",
    "build",
    "dealt",
    "dualpipev",
    "from_csv",
    "gpipe",
    "interleaved_1f1b",
    "interleaved_zero_bubble",
    "looped_bfs",
    "naive",
    "one_f_one_b",
    "simulate",
    "to_csv",
    "v_half",
    "v_min",
    "validate",
    "zb_h1",
    "zb_h2",
    "zbv",
]
