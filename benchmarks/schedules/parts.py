"""What schedules reach: wall time beside the ideal, the simulation, and others.

    python -m benchmarks.schedules [--quick] [--only NAME ...] [--json FILE] [--markdown FILE]

Eight parts: ``ideal`` (gpipe and 1f1b beside the ideal of two workers), ``zero_bubble`` (zb_h1
beside 1f1b), ``emulated`` (layers that sleep, wall time beside the simulated makespan),
``replicas`` (the same with stages on several devices),
``overhead`` (microseconds per micro-batch and stage of tiny layers), ``interpreter_lock`` (layers
that work in Python, with CPython's lock and without it), ``distributed``
(torch.distributed.pipelining beside ours), ``auto`` (schedules made to measure beside those with
names, simulated) and ``machines`` (128 partitions over 16 machines, simulated). In all but the last
two everything is measured in every round,
in an order that changes from round to round, after it was seen to give the plain loop's gradients.
"""

from __future__ import annotations

from benchmarks.group import Group
from benchmarks.schedules import (
    auto,
    distributed,
    ideal,
    interpreter_lock,
    machines,
    overhead,
    zero_bubble,
)
from benchmarks.schedules.sleeping import emulated, replicas

GROUP = Group(
    "schedules",
    "What schedules reach",
    __doc__,
    {
        "ideal": ideal.run,
        "zero_bubble": zero_bubble.run,
        "emulated": emulated.run,
        "replicas": replicas.run,
        "overhead": overhead.run,
        "interpreter_lock": interpreter_lock.run,
        "distributed": distributed.run,
        "auto": auto.run,
        "machines": machines.run,
    },
    rounds="9 or 21",
)
