"""Balances by the cost of layers, measured on a sample, or by their parameters, number or type.

The latter three are the methods of DeepSpeed's ``PipelineModule``, with exact cuts. Bisection finds
the smallest cost that no stage has to exceed. Among the cuts within this bound, a dynamic program
over (stage, border) finds the most even one, in a window for each border::

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
    "balance_by_parameters", "balance_by_size", "balance_by_time", "balance_by_type",
    "balance_cost", "balance_named", "balance_uniform", "param_scale_of",
]  # fmt: skip

#: Makes an optimizer from a list of parameters: ``torch.optim.Adam``, or a ``functools.partial``.
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

_GRADIENT_AND_ITSELF = 2.0
#: With more possible borders, stages are filled up to the bound, without evening out.
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
    """Return the balance that minimizes the time of the slowest stage, forward and backward.

    Example::

        balance = balance_by_time(4, model, torch.rand(64, 3, 224, 224))
        pipe = Pipe(model, balance, chunks=8)

    Args:
        partitions: number of stages.
        sample: a batch, ideally of the size of a micro-batch.
        module, timeout, device, progress: see :func:`syncpipe.balance.profile`.

    Raises:
        TypeError, ValueError: as :func:`syncpipe.balance.profile` and :func:`balance_cost`; or the
            model is on ``meta``, where times are 0.
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
    """Return the balance that minimizes the memory of the largest stage.

    That is parameters, buffers and what layers store for one micro-batch. A model on ``meta``, or
    with ``device="meta"``, may be too large for this machine.

    Args:
        partitions: number of stages.
        input: a mini-batch of the size used in training.
        chunks: its number of micro-batches.
        param_scale: bytes per byte of a trained parameter. Default: 2, for itself and its gradient;
            SGD with momentum needs 3, Adam 4.
        optimizer: measure ``param_scale``, see :func:`param_scale_of`.
        module, device, progress: see :func:`syncpipe.balance.profile`.

    Raises:
        TypeError, ValueError: as :func:`syncpipe.balance.profile`, :func:`balance_cost` and
            :func:`param_scale_of`; or both ``param_scale`` and ``optimizer`` are given.
    """
    module, chunks = _checked_layers(partitions, module), checked_chunks(chunks)
    scale, _ = scales_of(param_scale, optimizer, _GRADIENT_AND_ITSELF)
    size = -(-samples_in(input) // chunks)
    found = profile(module, input, sizes=[size], device=device, time=False, progress=progress)
    # Memory that earlier layers store is counted once.
    cost = [x.memory(scale) + x.stored_bytes[size] - x.shared_bytes[size] for x in found.layers]
    return balance_cost(cost, partitions)


def scales_of(
    param_scale: float | None, optimizer: MakeOptimizer | None, usual: float
) -> tuple[float, float | None]:
    """Bytes per byte of a trained parameter: given, of an optimizer, or ``usual``; and the
    additional ones of the optimizer's step, None if unknown.
    """
    if optimizer is not None:
        if param_scale is not None:
            raise ValueError(
                f"param_scale={param_scale} and optimizer are both given: leave one of them out"
            )
        return _measured_scales(optimizer)
    scale = usual if param_scale is None else param_scale
    if isinstance(scale, bool) or not (isinstance(scale, Real) and 1 <= scale < math.inf):
        raise ValueError(
            f"param_scale={scale!r}: must be a number from 1: 1 for a parameter, 2 with its "
            "gradient, 4 with Adam"
        )
    return float(scale), None


def param_scale_of(optimizer: MakeOptimizer) -> float:
    """Return bytes in training per byte of a parameter: itself, gradient, optimizer state.

    ``optimizer`` is a class, or ``functools.partial(torch.optim.SGD, momentum=0.9)``; it is tried
    on a small parameter. SGD: 2, with momentum 3, Adam: 4.

    Raises:
        TypeError: it makes no optimizer, or one whose step needs more than gradients.
    """
    return _measured_scales(optimizer)[0]


def _measured_scales(optimizer: MakeOptimizer) -> tuple[float, float]:
    """The same, and the temporary bytes of a step with PyTorch's kernels for lists of tensors,
    which are the default on accelerators.
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
            f"{error}): give a class with its arguments, functools.partial(torch.optim.SGD, lr=0.1)"
            ", or param_scale as a number"
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
    """The layers as a module; checks the number of partitions before anything is measured."""
    module = as_sequential(layers)
    if len(module):
        balance_cost([0.0] * len(module), partitions)
    return module


def balance_by_parameters(partitions: int, module: Layers) -> list[int]:
    """Return the balance that minimizes the trained parameters of the largest stage.

    Layers may be on ``meta``; specs are built there. A tied parameter counts in its first layer.

    Raises:
        TypeError: ``module`` is neither an ``nn.Sequential`` nor a list of layers.
        ValueError: fewer layers than partitions, or a layer whose parameters have no shape yet.
    """
    seen: set[int] = set()
    cost = []
    for name, layer in on_meta(module)._modules.items():  # named_children() skips repeated layers
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
    """Return the balance with equally many layers per stage, one more in the first ones."""
    return balance_cost([1] * len(as_sequential(module)), partitions)


def balance_by_type(partitions: int, module: Layers, regex: str) -> list[int]:
    """Return the balance with equally many layers of some type per stage.

    ``regex`` is searched in the class name of a layer (in a callable's own name), ignoring case,
    for example ``"block"`` or ``"^Linear$"``. Other layers count as 0.

    Raises:
        TypeError, ValueError: as :func:`balance_by_parameters`; or no layer matches ``regex``.
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
    """The balance for a string ``Pipe(balance=how)``; ``sample`` and ``device`` are for ``"time"``.

    Raises:
        ValueError: an unknown string, a missing or an extra sample, or as the functions above.
    """
    if (sample is None) == (how == "time"):
        raise ValueError(
            "balance='time' measures with sample=, an input of the size of a micro-batch: "
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
        f"balance={how!r}: must be 'parameters', 'uniform', 'type:regex' or 'time', or a list: the "
        "number of layers of each partition"
    )


# --- the cut ------------------------------------------------------------------------------------


def balance_cost(cost: Iterable[float], partitions: int) -> list[int]:
    """Cut a chain of layers so that the largest stage costs as little as possible.

    The minimum is exact. Of the cuts that reach it, the one with the smallest sum of squared stage
    costs is returned, unless there are more than 300,000 possible borders (thousands of layers). A
    layer of cost 0 stays with the previous one where possible.

    Args:
        cost: of each layer, in any unit; finite and not negative.
        partitions: number of stages, each of at least one layer.

    Raises:
        TypeError, ValueError: there are fewer layers than stages, or a cost is invalid.
    """
    n = counted(partitions, f"partitions={partitions!r}", "the number of stages")
    costs = list(map(float, cost))
    for index, number in enumerate(costs):
        if not 0 <= number < math.inf:
            raise ValueError(f"cost[{index}]={number}: costs must be finite and not negative")
    if len(costs) < n:
        raise ValueError(
            f"partitions={n}, but there are only {len(costs)} layers: every partition needs one, "
            f"so ask for at most {len(costs)}"
        )
    # Integers with exact sums: a float is an integer times a power of two.
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
    # When filling up to the mean, a stage ends within one layer of it.
    low, high = max(largest, mean), mean + largest
    while low < high:
        middle = (low + high) // 2
        enough = _fill_stages(sums, n, middle)[-1] == len(sums) - 1
        low, high = (low, middle) if enough else (middle + 1, high)
    return low


def _most_even(sums: list[int], windows: list[range], bound: int) -> list[int]:
    """The borders with the smallest sum of squares, in their windows and within a bound.

    The best previous border moves right with the border (the squares satisfy the quadrangle
    inequality, Yao 1980), so halving the range leaves few borders to try.
    """
    #: For each border, by its place: the sum of squares to its left, and the previous border.
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
