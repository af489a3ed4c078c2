"""How good cuts are beside the best ones; and plans, in ``planning_plans``."""

from __future__ import annotations

import builtins
import importlib
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any

from benchmarks.common import Part, version
from benchmarks.planning import plans as planning_plans
from benchmarks.planning.profiles import (
    PlanningOptions,
    Table,
    quantiles,
)
from syncpipe.balance import balance_cost
from syncpipe.planner.alternatives import block_partitions

Costs = list[int]
#: Gives a balance, or None where it ends without one.
Method = Callable[[Costs, int], Sequence[int] | None]


def run(options: PlanningOptions) -> list[Part]:
    """Computes it; nothing here is measured."""
    return [_cuts(options), *planning_plans.run(options)]


# -- cuts -----------------------------------------------------------------------------------------


def _cuts(options: PlanningOptions) -> Part:
    from tqdm import tqdm

    count = 30 if options.quick else 1000
    part = Table(
        "Cuts",
        f"{count} random chains of 10 to 200 layers for 2 to 16 stages, a fifth of them of each "
        "kind, and the profiles given, for every number of stages from 2 to 16. Costs are whole "
        "microseconds, as torchgpipe has them.",
        {
            "mean, p95, worst": "computed from the costs: the largest stage over that of the best "
            "cut (syncpipe.balance.balance_cost, exact); of the chains that have a cut.",
            "optimal": "counted: the share of them where it is the best.",
            "no cut": "counted: it runs for ever, or leaves a stage without layers.",
            "cnn-like": "blocks of a convolution, a normalization and an activation, the first of "
            "them ten times as much as the others, with jumps where the size of the image changes; "
            "to 10 us, so some are equal.",
            "transformer-like": "equal blocks between a cheap embedding and a head that costs half "
            "a block to ten of them.",
            "few values": "three times in five 1 ms, else 2 or 5 ms.",
        },
        over="Over all chains.",
    )
    methods: dict[str, Method] = {}
    theirs = torchgpipe()
    if theirs is None:
        part.notes.append("torchgpipe is not installed here, so its own code was not run.")
    else:
        methods[f"torchgpipe {version('torchgpipe') or ''}".strip()] = theirs
    methods["block partitions, as syncpipe has them"] = block_partitions
    methods["equal numbers of layers"] = lambda costs, n: balance_cost([1] * len(costs), n)
    kinds = list(KINDS)
    instances = [
        (kinds[k % len(kinds)], *_instance(kinds[k % len(kinds)], k)) for k in range(count)
    ]
    for name, profile in options.loaded().items():
        size = profile.sizes[-1]
        costs = [round(1e6 * (la.forward[size] + la.backward[size])) for la in profile.layers]
        most = min(16, len(costs))
        instances += [(f"profile {name}", costs, n) for n in range(2, most + 1)]
    ratios: dict[tuple[str, str], list[float | None]] = {}
    with tqdm(total=len(instances), desc="cuts", disable=None) as bar:
        for kind, costs, n in instances:
            best = _largest(costs, balance_cost(costs, n))
            of = ("all profiles" if kind.startswith("profile") else "all random", kind)
            for what, method in methods.items():
                balance = method(costs, n)
                ratio = None if balance is None else _largest(costs, balance) / best
                for group in of:
                    ratios.setdefault((group, what), []).append(ratio)
            bar.update()
    groups = ("all random", *KINDS, "all profiles")
    for group in (*groups, *dict.fromkeys(group for group, _ in ratios if group not in groups)):
        part.rows += [
            _row(group, what, ratios[group, what]) for what in methods if (group, what) in ratios
        ]
    return part


def _row(group: str, what: str, ratios: Sequence[float | None]) -> dict[str, Any]:
    known = [ratio for ratio in ratios if ratio is not None]
    row: dict[str, Any] = {"chains": group, "what": what, "number": len(ratios)}
    if known:
        optimal = sum(ratio <= 1 for ratio in known) / len(known)
        row |= {**quantiles(known), "optimal": f"{optimal:.0%}"}
    return row | {"no cut": len(ratios) - len(known)}


def _lognormal(draw: random.Random, layers: int) -> Costs:
    return [max(1, round(1e3 * draw.lognormvariate(0, 1))) for _ in range(layers)]


def _uniform(draw: random.Random, layers: int) -> Costs:
    return [draw.randint(1, 10_000) for _ in range(layers)]


def _cnn(draw: random.Random, layers: int) -> Costs:
    costs: Costs = []
    level = draw.uniform(1e3, 1e4)
    while len(costs) < layers:
        if draw.random() < 0.1:
            level *= draw.uniform(0.4, 1.5)
        costs += [round(level * draw.uniform(0.7, 1.3), -1), round(level / 10, -1)]
        costs += [round(level / 10 * draw.uniform(0.8, 1.0), -1)]
    return [max(10, int(cost)) for cost in costs[:layers]]


def _transformer(draw: random.Random, layers: int) -> Costs:
    block = draw.randint(1000, 10_000)
    costs = [block] * layers
    costs[0], costs[-1] = block // 20, round(block * draw.uniform(0.5, 10))
    return costs


def _few(draw: random.Random, layers: int) -> Costs:
    return [1000 * draw.choice((1, 1, 1, 2, 5)) for _ in range(layers)]


KINDS: dict[str, Callable[[random.Random, int], Costs]] = {
    "lognormal": _lognormal,
    "uniform": _uniform,
    "cnn-like": _cnn,
    "transformer-like": _transformer,
    "few values": _few,
}


def _instance(kind: str, seed: int) -> tuple[Costs, int]:
    draw = random.Random(f"cuts {seed}")
    layers = draw.randint(10, 200)
    return KINDS[kind](draw, layers), draw.randint(2, min(16, layers))


def _largest(costs: Costs, balance: Sequence[int]) -> int:
    return max(sum(costs[a:b]) for a, b in pairwise(accumulate(balance, initial=0)))


def torchgpipe() -> Method | None:
    """torchgpipe's own cut, stopped where it would not stop; None if it is not installed."""
    try:
        module = importlib.import_module("torchgpipe.balance.blockpartition")
    except ImportError:
        return None

    def cut(costs: Costs, n: int) -> list[int] | None:
        with _limited(module, 2 * len(costs) * n + 1000):
            try:
                balance = [len(block) for block in module.solve(costs, n)]
            except (_Endless, IndexError):
                return None
        return balance if min(balance) > 0 and sum(balance) == len(costs) else None

    return cut


class _Endless(Exception):
    """It took more steps than a cut can need."""


@contextmanager
def _limited(module: Any, steps: int) -> Iterator[None]:
    """Counts the steps of ``module.solve``: each looks for the smallest block."""
    left = steps

    def counted(*args: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise _Endless
        return builtins.min(*args)

    module.min = counted
    try:
        yield
    finally:
        del module.min
