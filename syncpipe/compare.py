"""Compares what two runs computed: equal to the bit, equal to rounding, or different, and where."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from syncpipe.data import described
from syncpipe.state import same_bits

__all__ = ["Comparison", "Status", "compare"]

Status = Literal["equal", "rounding", "different", "none"]

#: Differences up to this are rounding, relative to the largest value of a tensor; by dtype.
_ROUNDING = {torch.float64: 1e-8, torch.complex128: 1e-8, torch.float32: 1e-4}
_ROUNDING_BELOW_32_BITS = 5e-2
#: A gradient that cancels out has rounding errors of this share of the largest tensor.
_CANCELLED = 1e-2


class Comparison(NamedTuple):
    """The result of a comparison.

    Attributes:
        status: ``"equal"`` to the bit, equal to ``"rounding"``, ``"different"``; ``"none"`` if
            there was nothing to compare.
        distance: the largest difference, relative to the largest value of that tensor.
        at: the name of the tensor with that difference.
        names: of all tensors that are different.
        words: what differs at ``at``, where a distance does not say it.
    """

    status: Status = "none"
    distance: float = 0.0
    at: str = ""
    names: tuple[str, ...] = ()
    words: str = ""

    @property
    def same(self) -> bool:
        """Whether nothing is different, to rounding at least."""
        return self.status != "different"

    def __str__(self) -> str:
        if self.status == "rounding":
            return f"to {self.distance:.0e}"
        if self.status == "different":
            return f"OFF {self.distance:.0e}" if 0 < self.distance < math.inf else "OFF"
        return {"equal": "equal", "none": "-"}[self.status]


def compare(
    actual: Mapping[str, Any], expected: Mapping[str, Any], rounding: float = 0.0
) -> Comparison:
    """Compares values by name: tensors of any device, and other values by ``==``.

    A name that only one of the two has counts as None in the other. A relative difference up to
    ``rounding`` counts as rounding, where that of the dtype is smaller.
    """
    if not expected and not actual:
        return Comparison()
    names = dict.fromkeys([*expected, *actual])
    pairs = {name: (_on_cpu(actual.get(name)), _on_cpu(expected.get(name))) for name in names}
    largest = max(_largest(value) for _, value in pairs.values())
    found = {
        name: _difference(*pair, largest, rounding)
        for name, pair in pairs.items()
        if not same_bits(*pair)
    }
    if not found:
        return Comparison("equal")
    different = tuple([name for name, (far, limit, _) in found.items() if not far <= limit])
    at = max(different or found, key=lambda name: found[name][0])
    distance, _, words = found[at]
    return Comparison("different" if different else "rounding", distance, at, different, words)


def _difference(a: Any, b: Any, largest: float, rounding: float) -> tuple[float, float, str]:
    """The relative difference, what would be rounding, and words where there is no number."""
    both = isinstance(a, Tensor) and isinstance(b, Tensor)
    if not both or a.dtype != b.dtype or a.shape != b.shape:
        return math.inf, 0.0, f"{_words(a)} instead of {_words(b)}"
    if not (a.is_floating_point() or a.is_complex()):
        return math.inf, 0.0, f"{int((a != b).sum())} of {a.numel()} values"
    wide = torch.complex128 if a.is_complex() else torch.float64
    same = (a == b) | ((a != a) & (b != b))
    far = float(torch.where(same, 0.0, (a.to(wide) - b.to(wide)).abs()).max())
    scale = max(_largest(b), _CANCELLED * largest)
    distance = far / scale if scale and not math.isnan(far) else math.inf
    return distance, max(_ROUNDING.get(a.dtype, _ROUNDING_BELOW_32_BITS), rounding), ""


def _on_cpu(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    value = value.detach()
    return (value if value.layout is torch.strided else value.to_dense()).to("cpu")


def _largest(value: Any) -> float:
    """The largest finite size of a value in a floating-point tensor."""
    if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
        return 0.0
    return float(value.abs().nan_to_num(0.0, 0.0, 0.0).max()) if value.numel() else 0.0


def _words(value: Any) -> str:
    if isinstance(value, Tensor):
        return described(value)
    return "no value" if value is None else f"{value!r:.40}"
