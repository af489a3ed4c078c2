"""How long planning takes."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from typing import Any, TypeVar

import syncpipe
from benchmarks.common import Options, Part, Spread
from benchmarks.planning.profiles import PARAM_SCALE, random_profile
from syncpipe.planner.draft import Terms
from syncpipe.planner.machine import Machine
from syncpipe.planner.search import search

Result = TypeVar("Result")

BANDWIDTH = 12e9
#: The limit is this part of what the largest stage of the plan without a limit takes.
TIGHT = 0.6
#: The number of micro-batches where it is not free.
FIXED = 16


def run(options: Options) -> Part:
    """Measures it."""
    from tqdm import tqdm

    batch = 16 if options.quick else 512
    layers, devices = ((10,), (2, 4)) if options.quick else ((50, 200, 1000), (2, 8, 16))
    sizes = [(count, n) for count in layers for n in devices if n <= count]
    skips = {(200, 8): 20} if not options.quick else {(10, 4): 2}
    repeats = options.rounds(5)
    part = Part(
        "Time to plan",
        f"Random profiles (lognormal times, bytes linear in samples, measured sizes "
        f"{{1, 512}}), batch {batch}, {BANDWIDTH / 1e9:.0f} GB/s, Adam; {repeats} rounds, each "
        "with another profile, the same one in all columns.",
        {
            "memory": f"'tight' is {TIGHT} times what the largest stage of the plan without a "
            "limit takes.",
            "micro-batches": f"{FIXED}, or free: all divisors of the mini-batch that planning "
            "looks at by itself.",
            "search ms": "measured: syncpipe.planner.search.search, which gives the plan.",
            "plan ms": "measured: syncpipe.plan of the profile: the search, and what it is "
            "compared with (other cuts, one device, data parallelism).",
            "planned": "counted: rounds in which something fits.",
            "slowest search ms": "measured: of all rounds.",
        },
        notes=["Each spread is over different profiles, so it is not that of the clock alone."],
    )
    search(Terms(random_profile(20, "warm"), Machine.even(2), batch, PARAM_SCALE))
    cases = [(*size, crossing) for size in sizes for crossing in {0, skips.get(size, 0)}]
    cases.sort()
    with tqdm(total=4 * repeats * len(cases), desc="time", disable=None) as bar:
        for count, n, crossing in cases:
            for chunks in (FIXED, None):
                rows = [_Row(count, n, crossing, limited, chunks) for limited in (False, True)]
                for r in range(repeats):
                    gc.collect()
                    profile = random_profile(count, f"time {r}", skips=crossing)
                    limit = math.inf
                    for row in rows:
                        found = row.measure(profile, Machine.even(n, limit, BANDWIDTH), batch)
                        limit = TIGHT * max(found) if found else limit
                        bar.update()
                part.rows += [row.told() for row in rows]
    return part


class _Row:
    """One combination, and what was measured of it."""

    def __init__(self, layers: int, n: int, skips: int, limited: bool, chunks: int | None) -> None:
        self.about: dict[str, Any] = {
            "layers": layers,
            "devices": n,
            "skips": skips,
            "memory": "tight" if limited else "no limit",
            "micro-batches": chunks or "free",
        }
        self.chunks = chunks
        self.searched: list[float] = []
        self.planned: list[float] = []
        self.fits = 0

    def measure(self, profile: Any, machine: Machine, batch: int) -> tuple[float, ...]:
        """The memory of the best plan's stages; empty if there is none."""
        choice: dict[str, Any] = {"chunks": self.chunks, "param_scale": PARAM_SCALE}
        terms = Terms(profile, machine, batch, PARAM_SCALE)
        took, found = timed(lambda: search(terms, chunks=self.chunks))
        self.searched.append(1e3 * took)
        self.fits += bool(found)

        def plan() -> None:
            try:
                syncpipe.plan(profile, devices=machine, batch_size=batch, **choice)
            except ValueError:  # nothing fits; saying what would took time as well
                if found:
                    raise

        self.planned.append(1e3 * timed(plan)[0])
        return found[0].memory if found else ()

    def told(self) -> dict[str, Any]:
        """For the table."""
        return {
            **self.about,
            "search ms": Spread.of(self.searched),
            "slowest search ms": max(self.searched),
            "plan ms": Spread.of(self.planned),
            "planned": f"{self.fits} of {len(self.searched)}",
        }


def timed(job: Callable[[], Result]) -> tuple[float, Result]:
    """Seconds, and what it gave."""
    start = time.perf_counter()
    result = job()
    return time.perf_counter() - start, result
