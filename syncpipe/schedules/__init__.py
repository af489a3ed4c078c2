"""Schedules as data: the named ones, CSV files, simulation, and schedules made for given costs."""

from syncpipe.schedules.auto import AutoSchedule, auto
from syncpipe.schedules.greedy import round_robin
from syncpipe.schedules.named import (
    SCHEDULES,
    build,
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
)  # fmt: skip
from syncpipe.schedules.player import Costs, Simulation, simulate, validate
from syncpipe.schedules.schedule import Action, Kind, Schedule, from_csv, to_csv

__all__ = [
    "SCHEDULES", "Action", "AutoSchedule", "Costs", "Kind", "Schedule", "Simulation", "auto",
    "build", "dualpipev", "from_csv", "gpipe", "interleaved_1f1b", "interleaved_zero_bubble",
    "looped_bfs", "naive", "one_f_one_b", "round_robin", "simulate", "to_csv", "v_half", "v_min",
    "validate", "zb_h1", "zb_h2", "zbv",
]  # fmt: skip
