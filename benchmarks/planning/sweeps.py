"""Whether more is ever slower: memory, bandwidth, devices; or smaller parameters."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.common import Part
from benchmarks.planning.profiles import PARAM_SCALE, PlanningOptions, Table, random_profile
from syncpipe.balance.profile import LayerProfile, Profile
from syncpipe.planner.draft import Terms
from syncpipe.planner.machine import Machine
from syncpipe.planner.search import search

#: Differences below this, relative, are rounding.
TOLERANCE = 5e-3
AXES = ("memory", "bandwidth", "devices", "parameters")


@dataclass(frozen=True)
class Case:
    """What is planned for."""

    profile: Profile
    machine: Machine
    batch: int
    param_scale: float = PARAM_SCALE

    def time(self) -> float:
        """Seconds of the plan; infinite if nothing fits."""
        found = search(Terms(self.profile, self.machine, self.batch, self.param_scale))
        return found[0].time if found else math.inf


@dataclass(frozen=True)
class Sweep:
    """Cases, each with at least as much as the one before."""

    axis: str
    name: str
    cases: tuple[Case, ...]

    def worse(self) -> list[float]:
        """For each case but the first that has a plan: its time over that of the one before."""
        times = [case.time() for case in self.cases]
        return [b / a if a < math.inf else 0.0 for a, b in pairwise(times) if b < math.inf]


def sweeps(profiles: dict[str, Profile], batch: int, devices: int) -> Iterator[Sweep]:
    """Along all axes, around memory that is tight.

    Args:
        profiles: by name.
        batch: samples in a mini-batch.
        devices: at most.
    """
    rate = 12e9
    for name, profile in profiles.items():
        whole = held(profile, batch)
        for n in sorted({2, 4, devices}):
            # From where recomputation with one sample at a time just fits to where all fits.
            machines = [
                Machine.even(n, whole / n * 2.0 ** (k / 2), rate) for k in range(-10, 4)
            ]  # fmt: skip
            cases = (Case(profile, machine, batch) for machine in machines)
            yield Sweep("memory", f"{name}, {n} devices", tuple(cases))
        for share in (0.05, 0.2, 1.0):
            memory = whole * share / 4
            label = f"{name}, {memory / 1e9:.2f} GB"
            machines = [Machine.even(4, memory, 2.0**k * 1e9) for k in range(-2, 7)]
            cases = (Case(profile, machine, batch) for machine in machines)
            yield Sweep("bandwidth", label, tuple(cases))
            machines = [Machine.even(n, memory, rate) for n in range(1, devices + 1)]
            cases = (Case(profile, machine, batch) for machine in machines)
            yield Sweep("devices", label, tuple(cases))
            machine = Machine.even(4, memory, rate)
            scales = (8.0, 6.0, 4.0, 3.0, 2.0, 1.0, 0.5, 0.0)
            cases = (Case(profile, machine, batch, scale) for scale in scales)
            yield Sweep("parameters", label, tuple(cases))


def held(profile: Profile, batch: int) -> float:
    """Bytes of the whole model with all of a mini-batch in flight."""
    size = profile.sizes[-1]
    stored = math.fsum(layer.stored_bytes[size] for layer in profile.layers) * batch / size
    return stored + math.fsum(layer.memory(PARAM_SCALE) for layer in profile.layers)


def single(profile: Profile, size: int) -> Profile:
    """What is left of a profile that was measured with micro-batches of one size only."""
    layers = []
    for layer in profile.layers:
        one = {k: {size: v[size]} for k, v in vars(layer).items() if isinstance(v, dict) and v}
        layers.append(LayerProfile(**{**vars(layer), **one}))
    return Profile(tuple(layers))


def run(options: PlanningOptions) -> list[Part]:
    """Counts violations."""
    from tqdm import tqdm

    batch, devices, count = (24, 3, 1) if options.quick else (128, 5, 12)
    profiles = {}
    for k in range(count):
        drawn = random_profile(random.Random(k).randint(8, 24), f"sweep {k}")
        # Every third one was measured with micro-batches of one size only.
        profiles[f"random {k}"] = drawn if k % 3 else single(drawn, 512)
    cases = list(sweeps(profiles, batch, devices))
    loaded = {name: profile.of(512) for name, profile in options.loaded().items()}
    cases += sweeps(loaded, 512, 4)
    table = Table(
        "More is never slower",
        f"Plans along sweeps; {count} random profiles of 8 to 24 layers with batch {batch} and up "
        f"to {devices} devices, {len(loaded)} given ones with batch 512 and up to 4; Adam, 12 GB/s "
        "unless that is what rises. Each is compared with the one before it in its sweep, which "
        "had less memory, less bandwidth, one device less, or larger parameters (as the "
        "optimizer's state). Everything is predicted, nothing measured.",
        {
            "comparisons": "counted.",
            "slower": f"counted: with more, but predicted to take longer (by more than "
            f"{TOLERANCE:g}).",
            "worst": "predicted: the longer time over the shorter one, of the worst; 1 if none is.",
        },
        over="Over all comparisons where both or the second have a plan.",
    )
    found: dict[str, list[float]] = {axis: [] for axis in AXES}
    for sweep in tqdm(cases, desc="sweeps", disable=None):
        ratios = sweep.worse()
        found[sweep.axis] += ratios
        for ratio in ratios:
            if ratio > 1 + TOLERANCE:
                table.notes.append(f"{sweep.axis}, {sweep.name}: {ratio:.6f}")
    rows = {**found, "all": [ratio for ratios in found.values() for ratio in ratios]}
    for axis, ratios in rows.items():
        slower = [ratio for ratio in ratios if ratio > 1 + TOLERANCE]
        table.rows.append(
            {
                "more": axis,
                "comparisons": len(ratios),
                "slower": len(slower),
                "worst": max(slower, default=1.0),
            }
        )
    total, slower = len(rows["all"]), table.rows[-1]["slower"]
    table.aim("more is never slower", slower == 0, f"{slower} of {total}")
    return [table]
