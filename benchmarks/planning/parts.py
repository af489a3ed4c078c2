"""Planning: how long it takes, how good plans are, and whether predictions come true.

Five parts: ``time`` (of planning), ``brute`` (plans beside the best of all, in small cases),
``predicted`` (predicted beside measured step times of pipes on CPU workers, and of layers that
sleep), ``memory`` (planned beside counted) and ``large`` (a transformer of 7 billion parameters,
estimated and planned). Whole sets of chains are compared by ``python -m benchmarks.planning.sets``.
Cuts and plans beside torchgpipe's, and sweeps along bandwidth, devices and parameters, stood here
until commit c42da67; what they found is in ``benchmarks/results/planning.md``.
"""

from __future__ import annotations

from benchmarks.common import Group
from benchmarks.planning import brute, held, predicted, time

GROUP = Group(
    "planning",
    "What planning takes, and what plans are worth",
    __doc__,
    {
        "time": time.run,
        "brute": brute.run,
        "predicted": predicted.run,
        "memory": held.memory,
        "large": held.large,
    },
)
