"""Draws the schedules for the README: ``python -m benchmarks.schedules.pictures [FILE]``.

Simulated: four devices, eight micro-batches; a forward, an input half and a weight half of backward
take one unit of time each, a transfer a tenth of it. In the interleaved schedule each device has
two stages of half the size.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from syncpipe.schedules import build, one_f_one_b
from syncpipe.schedules.simulation import Costs, simulate
from syncpipe.timeline.timeline import Timeline, save_comparison

M, DEVICES, TRANSFER = 8, [0, 1, 2, 3], 0.1


def timelines() -> dict[str, Timeline]:
    whole = Costs.even(4, 1.0, 1.0, 1.0, TRANSFER)
    half = Costs.even(8, 0.5, 0.5, 0.5, TRANSFER)
    return {
        name: Timeline.of(simulate(build(schedule, M, devices), costs))
        for name, schedule, devices, costs in [
            ("gpipe", "gpipe", DEVICES, whole),
            ("1f1b", partial(one_f_one_b, slots="textbook"), DEVICES, whole),
            ("interleaved_1f1b", "interleaved_1f1b", DEVICES * 2, half),
            ("zb_h1", "zb_h1", DEVICES, whole),
        ]
    }


if __name__ == "__main__":
    default = Path(__file__).parents[1] / "results" / "schedules.svg"
    save_comparison(sys.argv[1] if len(sys.argv) > 1 else default, timelines())
