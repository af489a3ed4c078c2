"""GPipe's 128 partitions over 16 machines: simulated, with the links inside and between them.

Nobody here has such machines. Costs are counted, and said below; what is shown is how much of a
step the slower links between machines take, and which schedule hides them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise

from benchmarks.common import Part
from benchmarks.group import Options
from syncpipe.planner.costs.devices import machine_of
from syncpipe.schedules import (
    Costs,
    Schedule,
    gpipe,
    interleaved_1f1b,
    one_f_one_b,
    simulate,
    zb_h1,
)
from syncpipe.schedules.simulation import Transfer

#: GPipe's table 1 has 1663 layers; one more, and each device has as many.
LAYERS_EACH = 13
#: GPipe's Transformer-L (Huang et al. 2019, table 1): width, hidden width, words in a sequence.
WIDTH, HIDDEN, LENGTH = 2048, 8192, 1024
#: Of one sequence: multiplications and additions of a layer, forward; and what leaves it, in half
#: precision.
OPERATIONS = 2 * LENGTH * (4 * WIDTH**2 + 2 * WIDTH * HIDDEN + 2 * LENGTH * WIDTH)
OUTPUT = 2 * LENGTH * WIDTH
#: What a device reaches: half of the 312 Tflop/s of the GPUs of such a machine.
SPEED = 156e12
#: Machines as there are; and, to compare with, one that there is not.
LINKS = ("16 x (8 x 80GB, 300GB/s), 25GB/s", "128 x 80GB, 300GB/s")
QUICK = ("2 x (2 x 80GB, 300GB/s), 25GB/s", "4 x 80GB, 300GB/s")
SCHEDULES: dict[str, tuple[int, Callable[..., Schedule]]] = {
    "gpipe": (1, gpipe),
    "1f1b, textbook slots": (1, partial(one_f_one_b, slots="textbook")),
    "1f1b, overlap slots": (1, partial(one_f_one_b, slots="overlap")),
    "interleaved_1f1b": (2, interleaved_1f1b),
    "zb_h1": (1, zb_h1),
}


def run(options: Options) -> Part:
    """Simulates it."""
    descriptions = QUICK if options.quick else LINKS
    devices = len(machine_of(descriptions[0]).memory)
    part = Part(
        "128 partitions over 16 machines",
        f"Transformer of {devices * LAYERS_EACH} layers, {devices} devices, micro-batches "
        f"of 4 sequences of {LENGTH}; simulated, every micro-batch re-materialized.",
        {
            "step": "seconds.",
            "bubble": "the part of the devices' time in which they are idle.",
            "over one machine": "the step over that with the fast links everywhere.",
            "on the way": "the part of the critical path that consists of transfers.",
            "in flight": "micro-batches alive on the first device, of all of its stages.",
            "inputs": "their inputs, which is what re-materialization keeps, in GB.",
        },
        notes=[
            f"Counted, not measured: a layer takes {4 * OPERATIONS / SPEED * 1e3:.2f} ms forward "
            f"at {SPEED / 1e12:.0f} Tflop/s and twice that backward; {4 * OUTPUT / 1e6:.1f} MB go "
            "from stage to stage for each micro-batch, in half precision, and as much back.",
            "A transfer takes its bytes over the rate of its link; latency, and other traffic on "
            "the same link, are left out.",
        ],
    )
    for m in (8,) if options.quick else (128, 512):
        for name, (each, build) in SCHEDULES.items():
            schedule = build(m, [*range(devices)] * each)
            again = [m] * schedule.n
            found = {links: simulate(schedule, costs(links, each), again) for links in descriptions}
            alone = found[descriptions[-1]].makespan
            held = sum(schedule.in_flight[::devices])
            for links, simulated in found.items():
                moving = [p for p in simulated.critical_path if isinstance(p, Transfer)]
                part.rows.append(
                    {
                        "m": m,
                        "schedule": name,
                        "devices": links,
                        "step": simulated.makespan,
                        "bubble": simulated.bubble,
                        "over one machine": simulated.makespan / alone,
                        "on the way": sum(p.end - p.start for p in moving) / simulated.makespan,
                        "in flight": held,
                        "inputs": held * 4 * OUTPUT / 1e9,
                    }
                )
    return part


def costs(links: str, each: int) -> Costs:
    """Of micro-batches of 4 sequences, for so many stages on each device."""
    bandwidth = machine_of(links).bandwidth
    places = [*range(len(bandwidth))] * each
    forward = (4 * LAYERS_EACH / each * OPERATIONS / SPEED,) * len(places)
    ways = tuple(4 * OUTPUT / bandwidth[a][b] for a, b in pairwise(places))
    return Costs(forward, forward, forward, ways)
