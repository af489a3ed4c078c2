"""What schedules reach: wall time beside the ideal and beside the simulation.

Two parts: ``ideal`` (gpipe, 1f1b and zb_h1 on two workers, beside the plain loop and the ideal) and
``emulated`` (layers that sleep, wall time beside the simulated makespan). Everything is measured in
every round, in an order that changes from round to round, after it was seen to give the plain
loop's gradients. What a cell costs beside its layers is ``overhead``.
"""

from __future__ import annotations

from benchmarks.common import Group
from benchmarks.schedules import ideal
from benchmarks.schedules.sleeping import emulated

GROUP = Group(
    "schedules",
    "What schedules reach",
    __doc__,
    {"ideal": ideal.run, "emulated": emulated.run},
)
