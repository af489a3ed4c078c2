"""The sets that planners are compared on: chains of 24 to 1000 layers, and memory that grows.

    python -m benchmarks.planning.sets chains plans.json      # write what this version plans
    python -m benchmarks.planning.sets chains new.json --beside plans.json
    python -m benchmarks.planning.sets memory

It needs nothing of syncpipe but ``plan``, so an older checkout can run it (``PYTHONPATH=CHECKOUT``
and this file by its path); ``plans_507340f.json`` holds what commit 507340f planned. Limits on
memory are parts of what the largest stage takes without a limit, and are read from that file, so
that both versions have the same. Seconds are those of the processor (``time.process_time``).
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import syncpipe
from benchmarks.planning.profiles import random_profile
from syncpipe.balance import Profile
from syncpipe.planner import Machine

BATCH, RATE, SKIPS = 512, 12e9, 20
#: Parts of what the largest stage of the plan without a limit takes.
PARTS = (math.inf, 0.7, 0.5, 0.35)
LAYERS = (24, 50, 100, 200, 400, 1000)
#: The tolerance of the comparisons of memory, relative.
TOLERANCE = 5e-3


def chains() -> Iterator[tuple[str, Profile, int, int | None]]:
    """Name, profile, number of devices, micro-batches (None: free)."""
    for layers in LAYERS:
        for seed in range(3 if layers < 400 else 1):
            for skips in (0, SKIPS):
                draw = random.Random(f"{layers} {seed}")
                n, chunks = draw.choice((4, 8, 16)), draw.choice((None, 16))
                profile = random_profile(layers, f"x{seed}", skips=skips)
                yield f"{layers} layers, {skips} skips, x{seed}", profile, n, chunks


def planned(profile: Profile, n: int, memory: float, **more: Any) -> tuple[float, float, float]:
    """Step time, the most memory of a stage, seconds of the processor; infinite if none fits."""
    begin = time.process_time()
    try:
        found = syncpipe.plan(profile, devices=Machine.even(n, memory, RATE), **more)
    except ValueError:
        return math.inf, math.inf, time.process_time() - begin
    most = max(stage.memory for stage in found.stages)
    return found.step_time, most, time.process_time() - begin


def compare_chains(path: Path, beside: Path | None) -> None:
    """Plans all chains, writes the plans, and compares them with others."""
    old = json.loads(beside.read_text()) if beside else {}
    made: dict[str, dict[str, float]] = {}
    ratios = []
    for name, profile, n, chunks in chains():
        free = old.get(f"{name}, {PARTS[0]}", {}).get("memory")
        for part in PARTS:
            memory = math.inf if part == math.inf else part * free
            step, most, seconds = planned(profile, n, memory, batch_size=BATCH, chunks=chunks)
            free = most if free is None else free
            key = f"{name}, {part}"
            made[key] = {"step": step, "memory": most, "seconds": seconds}
            then = old.get(key, {}).get("step", math.nan)
            ratio = 1.0 if step == then else step / then
            ratios.append((ratio, key))
            print(f"{key:42} n={n:2} {step:9.4f} s {seconds:7.2f} s cpu {ratio:8.4f}", flush=True)
            path.write_text(json.dumps(made, indent=1) + "\n")
    known = sorted(pair for pair in ratios if not math.isnan(pair[0]))
    if known:
        numbers = [ratio for ratio, _ in known]
        worse = sum(ratio > 1.01 for ratio in numbers)
        print(
            f"{len(known)} cases: median {statistics.median(numbers):.4f}, slower by more than "
            f"1 %: {worse} ({worse / len(known):.1%}), worst {known[-1]}, best {known[0]}"
        )


def grows(count: int = 25) -> Iterator[tuple[str, Profile, int, int | None]]:
    """Small chains, a third with skips, for which memory grows in small steps."""
    for seed in range(count):
        draw = random.Random(f"memory {seed}")
        layers, skips = draw.randint(12, 40), 5 * (seed % 3 == 0)
        profile = random_profile(layers, f"memory {seed}", skips=skips)
        yield (
            f"{layers} layers, {skips} skips, {seed}",
            profile,
            draw.choice((3, 4, 6)),
            (draw.choice((None, 8, 16))),
        )


def compare_memory(steps: int = 37) -> None:
    """Counts plans that are slower though they have more memory."""
    worse, compared = [], 0
    for name, profile, n, chunks in grows():
        free = planned(profile, n, math.inf, batch_size=128, chunks=chunks)[1]
        limits = [free * 0.15 * 1.06**k for k in range(steps)]
        times = [planned(profile, n, m, batch_size=128, chunks=chunks)[0] for m in limits]
        for (a, b), limit in zip(pairwise(times), limits[1:], strict=True):
            compared += 1
            if b > a * (1 + TOLERANCE):
                worse.append((b / a, name, limit / free))
                print(f"{b / a:.4f} {name} at {limit / free:.3f}", flush=True)
    print(f"{compared} comparisons: {len(worse)} worse with more memory, {max(worse, default='')}")


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="what", required=True)
    one = commands.add_parser("chains")
    one.add_argument("path", type=Path)
    one.add_argument("--beside", type=Path)
    commands.add_parser("memory")
    args = parser.parse_args()
    if args.what == "chains":
        compare_chains(args.path, args.beside)
    else:
        compare_memory()


if __name__ == "__main__":
    main()
