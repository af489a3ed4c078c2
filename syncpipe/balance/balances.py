"""Balances: by what layers cost, measured on a sample, or by their parameters, number or type.

The latter three are the methods of DeepSpeed's ``PipelineModule``, with exact cuts. Bisection finds
the smallest bound that no stage has to exceed. Among the cuts within it a dynamic program over
(stage, border) finds the most even one, in a window for each border::

    stages, each filled up to the bound      the border after stage k is somewhere
      from the left     |----|----|---|-|    between the two
      from the right    |-|---|----|----|
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from contextlib import suppress
from fractions import Fraction
from itertools import accumulate, pairwise
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from syncpipe.balance.measure import profile, samples_in
from syncpipe.balance.stored import LiveMemory
from syncpipe.layers.listing import Layers, as_sequential, on_meta, type_name
from syncpipe.options import checked_chunks, counted

__all__ = [
    "balance_by_parameters",
    "balance_by_size",
    "balance_by_time",
    "balance_by_type",
    "balance_cost",
    "balance_named",
    "balance_uniform",
    "param_scale_of",
]

#: Makes an optimizer of a list of parameters: ``torch.optim.Adam``, or a ``functools.partial``.
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

_GRADIENT_AND_ITSELF = 2.0
#: With more places for borders, stages are filled up to the bound and no more evened out.
_MAX_PLACES = 300_000


def balance_by_time(
    partitions: int,
    module: Layers,
    sample: Any,
    *,
    timeout: float = 1.0,
    device: torch.device | str | int | None = None,
    progress: bool | None = None,
) -> list[int]:
    """Return the balance whose slowest stage takes as little time as can be, forward and backward.

    Example::

        balance = balance_by_time(4, model, torch.rand(64, 3, 224, 224))
        pipe = Pipe(model, balance, chunks=8)

    Args:
        partitions: number of stages.
        sample: a batch, best of the size of a micro-batch.
        module, timeout, device, progress: see :func:`syncpipe.balance.profile`.

    Raises:
        TypeError, ValueError: as :func:`syncpipe.balance.profile` and :func:`balance_cost`; or the
            model is on ``meta`` and takes no time.
    """
    module, size = _checked_layers(partitions, module), samples_in(sample)
    found = profile(
        module, sample, sizes=[size], timeout=timeout, device=device, progress=progress
    )  # fmt: skip
    if found.device == "meta":
        raise ValueError(
            "balance_by_time() measures time, but the model or the sample is on meta, where "
            "nothing is computed: use balance_by_size(), or a device that computes"
        )
    return balance_cost([x.forward[size] + x.backward[size] for x in found.layers], partitions)


def balance_by_size(
    partitions: int,
    module: Layers,
    input: Any,
    *,
    chunks: int = 1,
    param_scale: float | None = None,
    device: torch.device | str | int | None = None,
    optimizer: MakeOptimizer | None = None,
    progress: bool | None = None,
) -> list[int]:
    """Return the balance whose largest stage takes as little memory as can be.

    That is parameters, buffers and what layers store for one micro-batch. A model on ``meta``, or
    with ``device="meta"``, may be too large for this machine.

    Args:
        partitions: number of stages.
        input: a mini-batch of the size to train with.
        chunks: into how many micro-batches it will be cut.
        param_scale: bytes for each byte of a parameter that is trained. By default 2, for itself
            and its gradient; SGD with momentum needs 3, Adam 4.
        optimizer: measure ``param_scale``: as for :func:`param_scale_of`.
        module, device, progress: see :func:`syncpipe.balance.profile`.

    Raises:
        TypeError, ValueError: as :func:`syncpipe.balance.profile`, :func:`balance_cost` and
            :func:`param_scale_of`; or both ``param_scale`` and ``optimizer`` are given.
    """
    module, chunks = _checked_layers(partitions, module), checked_chunks(chunks)
    scale, _ = scales_of(param_scale, optimizer, _GRADIENT_AND_ITSELF)
    size = -(-samples_in(input) // chunks)
    found = profile(module, input, sizes=[size], device=device, time=False, progress=progress)
    # What the layers before one keep already takes no memory again.
    cost = [x.memory(scale) + x.stored_bytes[size] - x.shared_bytes[size] for x in found.layers]
    return balance_cost(cost, partitions)


def scales_of(
    param_scale: float | None, optimizer: MakeOptimizer | None, usual: float
) -> tuple[float, float | None]:
    """Bytes for each byte of a parameter that is trained: as it is given, or of an optimizer, or as
    usual; and how many more its step takes, None if unknown.
    """
    if optimizer is not None:
        if param_scale is not None:
            raise ValueError(
                f"param_scale={param_scale} and optimizer are both given, and both say what a "
                "parameter takes: leave one of them out"
            )
        return _measured_scales(optimizer)
    scale = usual if param_scale is None else param_scale
    if isinstance(scale, bool) or not (isinstance(scale, Real) and 1 <= scale < math.inf):
        raise ValueError(
            f"param_scale={scale!r}: must be a number, at least 1, for a parameter takes its own "
            "bytes; 2 with its gradient, 4 with Adam"
        )
    return float(scale), None


def param_scale_of(optimizer: MakeOptimizer) -> float:
    """Return bytes of training for a byte of a parameter: itself, gradient, optimizer's state.

    ``optimizer`` is a class, or ``functools.partial(torch.optim.SGD, momentum=0.9)``; it is tried
    on a small parameter. SGD: 2, with momentum 3, Adam: 4.

    Raises:
        TypeError: it does not make an optimizer, or one that cannot take a step by itself.
    """
    return _measured_scales(optimizer)[0]


def _measured_scales(optimizer: MakeOptimizer) -> tuple[float, float]:
    """The same, and the bytes that a step takes besides, by the kernels for lists of tensors that
    PyTorch uses on accelerators.
    """
    parameter = nn.Parameter(torch.zeros(256, 256, dtype=torch.float32, device="cpu"))
    parameter.grad = torch.ones_like(parameter)
    try:
        made = optimizer([parameter])
        made.step()
        state = made.state[parameter]
    except Exception as error:
        raise TypeError(
            f"optimizer={optimizer!r} could not be tried on one parameter ({type(error).__name__}: "
            f"{error}): give a class with all it needs (functools.partial(torch.optim.SGD, lr=0.1))"
            ", or give param_scale as a number instead"
        ) from error
    kept = {id(t): t for t in tree_leaves(state) if isinstance(t, Tensor)}
    held = sum(t.nbytes for t in kept.values() if t.numel() > 1) / parameter.nbytes
    lists = [group for group in made.param_groups if group.get("foreach", 0) is None]
    for group in lists:
        group["foreach"] = not group.get("fused")
    with suppress(Exception), LiveMemory() as live:
        made.step()
    return 2.0 + held, live.most / parameter.nbytes * bool(lists)


def _checked_layers(partitions: int, layers: Layers) -> nn.Sequential:
    """The layers; asks what cannot be right before anything is measured."""
    module = as_sequential(layers)
    if len(module):
        balance_cost([0.0] * len(module), partitions)
    return module


def balance_by_parameters(partitions: int, module: Layers) -> list[int]:
    """Return the balance whose largest stage has as few parameters to train as can be.

    The layers may be on ``meta``, and specs are looked at there. A tied parameter counts where it
    comes first.

    Raises:
        TypeError: ``module`` is no ``nn.Sequential`` and no list of layers.
        ValueError: fewer layers than partitions, or a layer whose parameters have no shape yet.
    """
    seen: set[int] = set()
    cost = []
    for name, layer in on_meta(module)._modules.items():  # named_children() has each once
        if any(map(nn.parameter.is_lazy, layer.parameters())):
            raise ValueError(
                f"layer {name!r} ({type(layer).__name__}) is lazy: its parameters have no "
                "shape before its first forward, so run the module once"
            )
        new = [p for p in layer.parameters() if p.requires_grad and id(p) not in seen]
        seen.update(map(id, new))
        cost.append(sum(parameter.numel() for parameter in new))
    return balance_cost(cost, partitions)


def balance_uniform(partitions: int, module: Layers) -> list[int]:
    """Return the balance in which stages have as many layers, the first ones one more."""
    return balance_cost([1] * len(as_sequential(module)), partitions)


def balance_by_type(partitions: int, module: Layers, regex: str) -> list[int]:
    """Return the balance in which stages have the same number of layers of some type.

    ``regex`` is matched anywhere in the name of a layer's class (of a callable in its own), upper
    or lower case alike, such as ``"block"`` or ``"^Linear$"``. Others count for nothing.

    Raises:
        TypeError, ValueError: as :func:`balance_by_parameters`; no layer matches ``regex``.
    """
    try:
        pattern = re.compile(regex, re.IGNORECASE)
    except (re.error, TypeError) as error:
        raise ValueError(f"regex={regex!r} is not a regular expression: {error}") from error
    names = [type_name(layer) for layer in as_sequential(module)]
    cost = [int(bool(pattern.search(name))) for name in names]
    if not any(cost):
        raise ValueError(
            f"regex={regex!r} matches no layer; the types are {', '.join(dict.fromkeys(names))}"
        )
    return balance_cost(cost, partitions)


def balance_named(
    how: str,
    module: Layers,
    partitions: int,
    *,
    sample: Any = None,
    device: torch.device | None = None,
) -> list[int]:
    """What ``Pipe(balance=...)`` takes as a string; ``sample`` and ``device`` are for ``"time"``.

    Raises:
        ValueError: another string, a sample too many or too few, or as the functions above.
    """
    if (sample is None) == (how == "time"):
        raise ValueError(
            "sample= is what balance='time' measures with, an input of the size of a micro-batch: "
            + ("give Pipe a sample=" if how == "time" else f"balance={how!r} takes none")
        )
    if how == "time":
        return balance_by_time(partitions, module, sample, device=device)
    if how == "parameters":
        return balance_by_parameters(partitions, module)
    if how == "uniform":
        return balance_uniform(partitions, module)
    if how.startswith("type:"):
        return balance_by_type(partitions, module, how.removeprefix("type:"))
    raise ValueError(
        f"balance={how!r}: as a string it is 'parameters', 'uniform', 'type:regex' or 'time'; "
        "otherwise give it a number of layers for each device"
    )


# --- the cut ------------------------------------------------------------------------------------


def balance_cost(cost: Iterable[float], partitions: int) -> list[int]:
    """Cut a chain of layers so that the largest stage costs as little as possible.

    The minimum is exact. Among the cuts that reach it, it is the one with the smallest sum of
    squares of all stages' costs, unless thousands of layers leave more than 300,000 places for
    borders. A layer that costs nothing stays with the one before it, where there is a choice.

    Args:
        cost: of each layer, in any unit; finite numbers, not negative.
        partitions: number of stages, each of which gets a layer at least.

    Raises:
        TypeError, ValueError: there are fewer layers than stages, or a cost is no such number.
    """
    n = counted(partitions, f"partitions={partitions!r}", "the number of stages")
    costs = list(map(float, cost))
    for index, number in enumerate(costs):
        if not 0 <= number < math.inf:
            raise ValueError(f"cost[{index}]={number}: costs are finite and not negative")
    if len(costs) < n:
        raise ValueError(
            f"partitions={n}, but there are only {len(costs)} layers: every partition needs one, "
            f"so ask for at most {len(costs)}"
        )
    # Whole numbers, as a float is one times a power of two: their sums are exact.
    exact = list(map(Fraction, costs))
    unit = math.lcm(*{number.denominator for number in exact})
    sums = [0, *accumulate(number.numerator * (unit // number.denominator) for number in exact)]
    bound = _smallest_bound(sums, n)
    borders = [min(end, len(costs) - n + k) for k, end in enumerate(_fill_stages(sums, n, bound))]
    lows = [len(costs)]
    for k in range(n - 1, -1, -1):
        lows.append(max(bisect_left(sums, sums[lows[-1]] - bound, 0, lows[-1]), k))
    windows = [range(low, end + 1) for low, end in zip(reversed(lows), borders, strict=True)]
    if sum(map(len, windows)) <= _MAX_PLACES:
        borders = _most_even(sums, windows, bound)
    return [b - a for a, b in pairwise(borders)]


def _fill_stages(sums: list[int], n: int, bound: int) -> list[int]:
    """Borders of stages that are filled up to a bound from the left."""
    borders = [0]
    for _ in range(n):
        borders.append(bisect_right(sums, sums[borders[-1]] + bound, borders[-1]) - 1)
    return borders


def _smallest_bound(sums: list[int], n: int) -> int:
    largest, mean = max(b - a for a, b in pairwise(sums)), -(-sums[-1] // n)
    # Filling up to the mean, a stage ends within one layer of it.
    low, high = max(largest, mean), mean + largest
    while low < high:
        middle = (low + high) // 2
        enough = _fill_stages(sums, n, middle)[-1] == len(sums) - 1
        low, high = (low, middle) if enough else (middle + 1, high)
    return low


def _most_even(sums: list[int], windows: list[range], bound: int) -> list[int]:
    """The borders with the smallest sum of squares, in their windows and within a bound.

    The further to the right a border, the further to the right the best one before it (the squares
    meet the quadrangle inequality, Yao 1980), so that halving the places leaves little to try.
    """
    #: For each border, by its place: the squares to its left, and where the border before it is.
    tables: list[dict[int, tuple[int, int]]] = [{0: (0, 0)}]

    def solve(places: range, starts: list[int], low: int, high: int) -> None:
        if not places:
            return
        middle = len(places) // 2
        end, before = places[middle], tables[-2]

        def squares(k: int) -> int:
            return before[starts[k]][0] + (sums[end] - sums[starts[k]]) ** 2

        least = max(low, bisect_left(starts, sums[end] - bound, key=sums.__getitem__))
        most = min(high, bisect_left(starts, end) - 1)
        left, right = high, low
        if least <= most:  # else no stage can end here
            left = right = min(range(most, least - 1, -1), key=squares)
            tables[-1][end] = squares(left), starts[left]
        solve(places[:middle], starts, low, left)
        solve(places[middle + 1 :], starts, right, high)

    for places in windows[1:]:
        starts = sorted(tables[-1])
        tables.append({})
        solve(places, starts, 0, len(starts) - 1)
    borders = [len(sums) - 1]
    for table in reversed(tables[1:]):
        borders.append(table[borders[-1]][1])
    return borders[::-1]
