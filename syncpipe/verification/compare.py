"""Compares what two runs computed: equal to the bit, equal to rounding, or different."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from syncpipe.state import same_bits
from syncpipe.tree import described, flatten, leaf_names

__all__ = ["NOTHING", "Comparison", "Status", "compare", "named"]

Status = Literal["equal", "rounding", "different", "none"]

#: Beyond that, relative to the largest value of a tensor, it is not rounding.
_ROUNDING = {torch.float64: 1e-8, torch.complex128: 1e-8, torch.float32: 1e-4}
_COARSE = 5e-2  # of anything with fewer bits
#: A gradient that cancels out is as large as what it cancelled; so much of the largest one.
_CANCELLED = 1e-2


class Comparison(NamedTuple):
    """What came out of a comparison.

    Attributes:
        status: ``"equal"`` to the bit, equal to ``"rounding"``, ``"different"``; ``"none"`` if
            there was nothing to compare.
        distance: the largest difference, relative to the largest value of that tensor.
        at: the name of the tensor where that is.
        names: of all tensors that are different.
        words: what else there is to say.
    """

    status: Status
    distance: float = 0.0
    at: str = ""
    names: tuple[str, ...] = ()
    words: str = ""

    def __str__(self) -> str:
        """In a few characters."""
        if self.status == "rounding":
            return f"to {self.distance:.0e}"
        if self.status == "different":
            far = self.distance
            return f"OFF {far:.0e}" if 0 < far < math.inf else "OFF"
        return {"equal": "equal", "none": "-"}[self.status]


NOTHING = Comparison("none")


def named(root: str, tree: Any) -> dict[str, Any]:
    """The leaves of a tree by name, tensors detached and copied to the CPU's memory."""
    leaves = flatten(tree)[0]
    return dict(zip(leaf_names(root, tree), map(_copied, leaves), strict=True))


def _copied(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    dense = value.detach() if value.layout is torch.strided else value.detach().to_dense()
    return dense.to("cpu", copy=True)


def compare(
    actual: Mapping[str, Any], expected: Mapping[str, Any], rounding: float = 0.0
) -> Comparison:
    """Compares values by name.

    Args:
        actual: tensors in the CPU's memory, and other values.
        expected: what they should be.
        rounding: a relative difference that passes for rounding, if that of the dtype is smaller
            (of what was computed in another dtype).
    """
    if not expected and not actual:
        return NOTHING
    pairs = {n: (actual.get(n), expected.get(n)) for n in dict.fromkeys([*expected, *actual])}
    pairs = {name: pair for name, pair in pairs.items() if not same_bits(*pair)}
    if not pairs:
        return Comparison("equal")
    largest = max((_largest(value) for value in expected.values()), default=0.0)
    # For each the difference, what would be rounding, words.
    found = {name: _difference(*pair, largest, rounding) for name, pair in pairs.items()}
    names = tuple([name for name, (far, limit, _) in found.items() if not far <= limit])
    at = max(names or found, key=lambda name: found[name][0])
    status: Status = "different" if names else "rounding"
    return Comparison(status, found[at][0], at, names, found[at][2])


def _difference(a: Any, b: Any, largest: float, rounding: float) -> tuple[float, float, str]:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        words = [described(v) if isinstance(v, Tensor) else _short(v) for v in (a, b)]
        return math.inf, 0.0, f"{words[0]} instead of {words[1]}"
    if a.dtype != b.dtype or a.shape != b.shape:
        return math.inf, 0.0, f"{described(a)} instead of {described(b)}"
    if not (a.is_floating_point() or a.is_complex()):
        return math.inf, 0.0, f"{int((a != b).sum())} of {a.numel()} values"
    kind = torch.complex128 if a.is_complex() else torch.float64
    x, y = a.to(kind), b.to(kind)
    far = torch.where(a == b, 0.0, (x - y).abs())
    far = torch.where((a != a) & (b != b), 0.0, far)
    scale = max(_largest(b), _CANCELLED * largest)
    distance = float(far.max()) / scale if scale else math.inf
    limit = max(_ROUNDING.get(a.dtype, _COARSE), rounding)
    return (math.inf if distance != distance else distance), limit, ""


def _largest(value: Any) -> float:
    """The largest finite value of a tensor."""
    if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
        return 0.0
    if not value.numel():
        return 0.0
    sizes = value.abs()
    largest = float(sizes.max())
    return largest if math.isfinite(largest) else float(sizes.nan_to_num(0.0, 0.0, 0.0).max())


def _short(value: Any) -> str:
    text = "no value" if value is None else repr(value)
    return text if len(text) < 40 else f"{text[:37]}..."
