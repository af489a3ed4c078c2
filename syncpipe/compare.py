"""Compare the tensors of two runs: equal bits, equal up to rounding, or different, and where."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from syncpipe.data.trees import described

__all__ = ["SIMPLE", "Comparison", "Status", "compare", "same_bits"]

#: Types that are compared by value.
SIMPLE = (int, float, complex, str, bytes, bool, type(None))

Status = Literal["equal", "rounding", "different", "none"]

#: The largest difference that counts as rounding, relative to a tensor's largest value, by dtype.
_ROUNDING = {torch.float64: 1e-8, torch.complex128: 1e-8, torch.float32: 1e-4}
_ROUNDING_BELOW_32_BITS = 5e-2
#: The scale of a tensor is at least this share of the largest value of all tensors, because terms
#: that cancel leave rounding errors of their own size.
_CANCELLED = 1e-2


class Comparison(NamedTuple):
    """The result of a comparison.

    Attributes:
        status: ``"equal"`` bits, equal up to ``"rounding"``, ``"different"``, or ``"none"`` if
            both runs are empty.
        distance: the largest difference, relative to the largest value of its tensor.
        at: the name of the tensor with the largest difference.
        names: the names of all tensors that differ by more than rounding.
        words: the difference at ``at``, if it is one of shape, dtype or kind.
    """

    status: Status = "none"
    distance: float = 0.0
    at: str = ""
    names: tuple[str, ...] = ()
    words: str = ""

    @property
    def same(self) -> bool:
        """Whether all values are equal up to rounding."""
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
    """Compare values by name: tensors on any device, and other values by ``==``.

    A name that is missing on one side counts as None there. ``rounding`` raises the relative
    difference that counts as rounding; it never lowers the limit of the dtype.
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
    """The relative difference, the limit for rounding, and words if the difference is no number."""
    both = isinstance(a, Tensor) and isinstance(b, Tensor)
    if not both or a.dtype != b.dtype or a.shape != b.shape:
        return math.inf, 0.0, f"{_describe(a)} instead of {_describe(b)}"
    if not (a.is_floating_point() or a.is_complex()):
        return math.inf, 0.0, f"{int((a != b).sum())} of {a.numel()} values"
    limit = max(_ROUNDING.get(a.dtype, _ROUNDING_BELOW_32_BITS), rounding)
    a, b = _wide(a), _wide(b)
    same = (a == b) | ((a != a) & (b != b))
    far = float(torch.where(same, 0.0, (a - b).abs()).max())
    scale = max(_largest(b), _CANCELLED * largest)
    return far / scale if scale and not math.isnan(far) else math.inf, limit, ""


def _on_cpu(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    value = value.detach()
    return (value if value.layout is torch.strided else value.to_dense()).to("cpu")


def _largest(value: Any) -> float:
    """The largest finite absolute value of a floating-point tensor."""
    if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
        return 0.0
    return float(_wide(value).abs().nan_to_num(0.0, 0.0, 0.0).max()) if value.numel() else 0.0


def _wide(tensor: Tensor) -> Tensor:
    """The tensor in a dtype that has all operations: float8 and complex32 lack most of them."""
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return described(value)
    return "no value" if value is None else f"{value!r:.40}"


def same_bits(a: Any, b: Any) -> bool:
    """Whether two values are equal to the last bit; of objects only types are compared."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        equal = not isinstance(a, SIMPLE) or a == b or (a != a and b != b)
        return type(a) is type(b) and equal
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    with suppress(NotImplementedError):  # for float8 and complex32
        if torch.equal(a, b):
            return True
    return bool(((a == b) | ((a != a) & (b != b))).all())
