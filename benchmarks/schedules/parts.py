"""What schedules reach: wall time beside the ideal and beside the simulation.

    python -m benchmarks.schedules [--quick] [--only NAME ...] [--json FILE] [--markdown FILE]

Two parts: ``ideal`` (gpipe, 1f1b and zb_h1 on two workers, beside the plain loop and the ideal) and
``emulated`` (layers that sleep, wall time beside the simulated makespan). Everything is measured in
every round, in an order that changes from round to round, after it was seen to give the plain
loop's gradients. What a cell costs beside its layers is ``benchmarks.overhead``.
"""

from __future__ import annotations

from benchmarks.group import Group
from benchmarks.schedules import ideal
from benchmarks.schedules.sleeping import emulated

GROUP = Group(
    "schedules",
    "What schedules reach",
    __doc__,
    {"ideal": ideal.run, "emulated": emulated.run},
    rounds="7 or 21",
)
