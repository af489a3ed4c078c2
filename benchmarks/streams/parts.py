"""PipeDream's stream of mini-batches beside 1F1B with a flush after each.

    python -m benchmarks.streams [--quick] [--only NAME ...] [--json FILE] [--markdown FILE]

Two parts: ``accuracy`` (the demo's model on handwritten digits, two CPU workers: how long, and how
many epochs, until it reads 97 % of new images) and ``bubble`` (layers that sleep on four
workers: time per mini-batch, beside its simulation).
"""

from __future__ import annotations

from benchmarks.group import Group
from benchmarks.streams import accuracy, bubble

GROUP = Group(
    "streams",
    "Streams: training without a flush",
    __doc__,
    {"accuracy": accuracy.run, "bubble": bubble.run},
    rounds="3 or 5",
    one_thread=True,
)
