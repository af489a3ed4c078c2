"""Small cases in which everything can be tried: how often the search finds the best."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from itertools import combinations, combinations_with_replacement, pairwise

from benchmarks.common import Options, Part
from benchmarks.planning.profiles import PARAM_SCALE, Table, quantiles
from syncpipe.balance.profile import LayerProfile, Profile
from syncpipe.planner.draft import Terms, one_f_one_b_form
from syncpipe.planner.machine import Machine
from syncpipe.planner.search import search
from syncpipe.planner.sizes import chunk_counts

#: Differences below this, relative, are rounding.
TOLERANCE = 1e-9
KINDS = ("no limit", "tight", "tight, slow links", "tight, unlike devices", "prime mini-batches")


def case(kind: str, seed: int) -> tuple[Profile, Machine, int]:
    """A random one: 2 to 6 layers, 2 to 4 devices, a mini-batch of up to 12 samples."""
    draw = random.Random(f"brute {kind} {seed}")
    several = draw.random() < 0.5  # sizes of micro-batches that were measured

    def linear(each: float, fixed: float) -> dict[int, float]:
        return {1: fixed + each, 16: fixed + 16 * each} if several else {4: 4 * each}

    layers = []
    for index in range(draw.randint(2, 6)):
        forward, size = draw.lognormvariate(0, 0.7), draw.lognormvariate(0, 0.7)
        back = draw.uniform(1, 2.5)
        layers.append(
            LayerProfile(
                name=str(index),
                forward=linear(forward, draw.uniform(0, 0.5)),
                backward=linear(back * forward, draw.uniform(0, 0.5)),
                output_bytes=linear(size, 0),
                stored_bytes=linear(draw.uniform(1, 4) * size, 0),
                parameter_bytes=draw.randint(0, 2),
            )
        )
    batch = draw.choice((5, 7, 11)) if kind == "prime mini-batches" else draw.choice((4, 6, 8, 12))
    profile, n = Profile(tuple(layers)), draw.randint(2, 4)
    whole = sum(layer.stored_bytes[profile.sizes[-1]] for layer in layers) / profile.sizes[-1]
    fixed = sum(layer.memory(PARAM_SCALE) for layer in layers)
    limit = math.inf
    if kind != "no limit":
        limit = (whole * batch * draw.uniform(0.1, 0.8) + fixed * draw.uniform(1, 2)) / n
    rate = draw.uniform(0.3, 3) if kind == "tight, slow links" else draw.uniform(2, 20)
    machine = Machine.even(n, limit, rate)
    if kind == "tight, unlike devices":
        memory = [limit * draw.choice((0.7, 1, 2)) for _ in range(n)]
        speed = tuple(draw.choice((0.5, 1.0, 2.0)) for _ in range(n))
        machine = Machine(tuple(memory), machine.bandwidth, speed=speed)
    return profile, machine, batch


def everything(profile: Profile, machine: Machine, batch: int) -> Iterator[float]:
    """The step times of all plans that fit: any cut, number of micro-batches and slots."""
    terms = Terms(profile, machine, batch, PARAM_SCALE)
    usual, extra = chunk_counts(terms.profile, len(machine), batch)
    count = len(profile.layers)
    for m in (*usual, *extra):
        for n in range(1, min(count, len(machine)) + 1):
            for borders in combinations(range(1, count), n - 1):
                balance = tuple(b - a for a, b in pairwise((0, *borders, count)))
                some = combinations_with_replacement(range(m, 0, -1), n)
                for slots in some if n > 1 else [(1,)]:
                    draft = terms.draft(one_f_one_b_form(m, slots), balance)
                    if draft is not None and draft.excess <= 1:
                        yield draft.time


def run(options: Options) -> list[Part]:
    """Counts how often it is the best."""
    from tqdm import tqdm

    count = 3 if options.quick else 100
    table = Table(
        "Plans beside the best of all",
        f"{count} random profiles of each kind: 2 to 6 layers, 2 to 4 devices, mini-batches of 4 "
        "to 12 samples, half of them measured with one size and half with two. All are tried: "
        "every cut, number of stages and of micro-batches, 1F1B with any slots, no stage with more "
        "than the one before it. Everything is predicted, nothing measured.",
        {
            "plans": "counted: the cases where something fits.",
            "optimal": "counted: the plan is as fast as the best of all.",
            "mean, p95, worst": "predicted: step time of the plan over that of the best of all.",
        },
        over="Over all cases where something fits.",
    )
    every: list[float] = []
    with tqdm(total=count * len(KINDS), desc="brute force", disable=None) as bar:
        for kind in KINDS:
            ratios = []
            for seed in range(count):
                ratio = compared(*case(kind, seed))
                if ratio is not None:
                    ratios.append(ratio)
                bar.update()
            every += ratios
            table.rows.append(_row(kind, ratios))
    table.rows.append(_row("all", every))
    optimal = _optimal(every)
    table.aim("99 % of them optimal", optimal >= 0.99, f"{optimal:.2%}")
    table.aim("the worst 1.02", max(every) <= 1.02, f"{max(every):.4f}")
    return [table]


def compared(profile: Profile, machine: Machine, batch: int) -> float | None:
    """The time of the plan over the best; None if nothing fits."""
    best = min(everything(profile, machine, batch), default=math.inf)
    found = search(Terms(profile, machine, batch, PARAM_SCALE))
    assert bool(found) == (best < math.inf)
    return found[0].time / best if found else None


def _optimal(ratios: list[float]) -> float:
    return sum(ratio <= 1 + TOLERANCE for ratio in ratios) / len(ratios)


def _row(kind: str, ratios: list[float]) -> dict[str, object]:
    return {
        "cases": kind,
        "plans": len(ratios),
        "optimal": f"{_optimal(ratios):.2%}",
        **quantiles(ratios),
    }
