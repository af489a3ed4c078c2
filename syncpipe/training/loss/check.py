"""Whether the loss of a mini-batch is what the losses of its micro-batches were taken for.

A mean over what is not masked, a loss that compares samples with each other, a mean over something
else than samples: put together from micro-batches by their sizes, all of these come out wrong, and
so do the gradients. So the outputs of some micro-batches are kept until the end of a call, and
``loss_fn`` is called once more, with all of them at once. This is done in calls 1, 2, 4, 8, ...
with a loss function: the first batches may have no padding.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from syncpipe.data import flatten, gather, map_tensors, tensors_in, unflatten
from syncpipe.hints import outside
from syncpipe.state import SIMPLE, unchanged
from syncpipe.training.loss.objective import Objective

__all__ = ["LossCheck", "LossCounts"]

#: So many bytes of outputs are kept at most, but two micro-batches in any case.
_MOST = 2**26
#: Beyond that, relative to the loss, it is not rounding.
_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4}


#: So many loss functions are remembered.
_FUNCTIONS = 16


class LossCounts:
    """The number of calls with each loss function, told apart by object.

    A function that is made anew for each call is the same one if its code and all that it has
    closed over are the same objects, or equal numbers or strings. Nothing is kept alive.
    """

    def __init__(self) -> None:
        self._counts: list[tuple[_Held, float]] = []  # the latest one last

    def __getitem__(self, function: Callable[..., Any]) -> float:
        return next((count for held, count in self._counts if held.holds(function)), 0)

    def __setitem__(self, function: Callable[..., Any], count: float) -> None:
        others = [each for each in self._counts if not each[0].holds(function)]
        self._counts = [*others[1 - _FUNCTIONS :], (_Held(function), count)]

    def __copy__(self) -> LossCounts:
        copied = LossCounts()
        copied._counts = self._counts
        return copied

    def due(self, function: Callable[..., Any]) -> bool:
        """Whether the next call is number 1, 2, 4, 8, ...; never after a warning."""
        following = self[function] + 1
        return following < math.inf and int(following) & int(following) - 1 == 0


class _Held:
    """What is known of a loss function, to find it again."""

    def __init__(self, function: Any) -> None:
        self._function = _reference(function)
        self._parts = list(map(_reference, _parts(function)))

    def holds(self, function: Any) -> bool:
        parts = _parts(function)
        return _is(self._function, function) or (
            len(parts) == len(self._parts) and all(map(_is, self._parts, parts))
        )


def _parts(function: Any) -> list[Any]:
    """What makes a function that is defined anew another one, or the same."""
    if isinstance(function, FunctionType):
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
        defaults = (function.__kwdefaults__ or {}).values()
        return [function.__code__, *cells, *(function.__defaults__ or ()), *defaults]
    if isinstance(function, MethodType):
        return [*_parts(function.__func__), function.__self__]
    if isinstance(function, partial):
        return [*_parts(function.func), *function.args, *function.keywords.values()]
    return [function]


def _reference(part: Any) -> Any:
    if isinstance(part, SIMPLE):
        return part
    try:
        return weakref.ref(part)
    except TypeError:  # there are none to lists, say
        return object()


def _in_double(tensors: list[Tensor]) -> list[Tensor]:
    return [t.to(torch.float64, copy=True) if t.is_floating_point() else t for t in tensors]


def _is(reference: Any, part: Any) -> bool:
    if isinstance(reference, weakref.ref):
        return reference() is part
    return type(reference) is type(part) and bool(reference == part)


class LossCheck:
    """Compares the loss of a mini-batch with that of its micro-batches.

    Args:
        objective: of the call.
        targets: of all micro-batches, if they are known.
        asked: an exception of ``loss_fn``, or outputs that cannot be put together, is the caller's
            to know; otherwise nothing is checked then.
    """

    def __init__(self, objective: Objective, targets: list[Any] | None, *, asked: bool) -> None:
        self._objective = objective
        self._asked = asked
        self._kept: dict[int, tuple[Any, Any]] = {}
        self._bytes = 0
        first, second = [flatten(target)[0] for target in (targets or [None, None])[:2]]
        # What all micro-batches have in common was not cut, and is not to be put together.
        self._common = [a is b for a, b in zip(first, second, strict=False)]

    def keep(self, i: int, output: Any, target: Any) -> None:
        """Keeps what the loss function is going to be given, as long as there is room."""
        size = sum(tensor.nbytes for tensor in tensors_in(output))
        if len(self._kept) < 2 or self._bytes + size <= _MOST:
            self._bytes += size
            self._kept[i] = map_tensors(lambda ts: [t.detach().clone() for t in ts], output), target

    def compare(self) -> bool:
        """Warns if the losses differ by more than rounding; on the caller's thread.

        Returns:
            Whether it did.
        """
        if self._objective.came_with_weights and not self._asked:
            return False  # somebody has thought about it
        with torch.no_grad():
            try:
                found = self._whole()
            except Exception:
                by_the_model = self._made_by_the_model()
                if by_the_model:
                    warnings.warn(_BY_THE_MODEL, stacklevel=outside())
                elif self._asked:
                    raise
                return by_the_model
            if type(found) is not Tensor or found.device.type == "meta":
                return False
            combined = self._objective.loss(list(self._kept))
            whole, parts = float(found), float(combined)
            rounding = _ROUNDING.get(found.dtype, 2e-2) * abs(whole)
            wrong = math.isfinite(whole) and not abs(whole - parts) <= rounding  # parts may be nan
            wrong = wrong and not self._goes_away(abs(whole - parts))
        if wrong:
            warnings.warn(self._message(whole, parts), stacklevel=outside())
        return wrong

    def _whole(self) -> Any:
        """The loss of all micro-batches that were kept, at once."""
        outputs, targets = zip(*self._kept.values(), strict=True)
        return self._called((gather(list(outputs)), self._together(list(targets))))

    def _called(self, given: tuple[Any, Any]) -> Any:
        """What the loss function gives once more, which must not count."""
        function = self._objective.function
        module = function if isinstance(function, nn.Module) else nn.Module()
        call = torch.no_grad()(self._objective.call)
        result = unchanged(module, lambda: call(given))
        return result[0] if isinstance(result, tuple) else result

    def _goes_away(self, difference: float) -> bool:
        """Whether a difference is rounding after all, which numbers of more digits have less of.

        A loss of about zero is the sum of larger numbers, and relative to itself it is far off.
        """
        try:
            self._kept = {i: map_tensors(_in_double, given) for i, given in self._kept.items()}
            parts = self._objective.loss(
                list(self._kept), [*map(self._called, self._kept.values())]
            )
            return abs(float(self._whole()) - float(parts)) <= 1e-3 * difference
        except Exception:  # there are no such numbers on this device, or in this loss
            return False

    def _made_by_the_model(self) -> bool:
        """Whether the losses are in the outputs already, as means over each micro-batch."""
        (i, (output, _)), *_ = self._kept.items()
        loss = self._objective.noted(i)[0]
        return any(tensor.dim() == 0 and tensor.equal(loss) for tensor in tensors_in(output))

    def _together(self, targets: list[Any]) -> Any:
        together = gather(targets)
        if not any(self._common):
            return together
        leaves, structure = flatten(together)
        first = flatten(targets[0])[0]
        chosen = zip(self._common, first, leaves, strict=True)
        return unflatten([one if common else all for common, one, all in chosen], structure)

    def _message(self, whole: float, parts: float) -> str:
        return (
            f"loss_fn gives {whole:.6g} for {len(self._kept)} micro-batches at once, but put "
            f"together from each of them the loss is {parts:.6g}, and gradients are off likewise: "
            "it is no mean over samples. A mean over what is not masked needs weight=, such as "
            "weight=lambda target: (target != -100).sum(), or (loss, weight) from loss_fn; a sum "
            "over samples needs loss_reduction='sum'; a loss that compares samples needs them all, "
            "as loss_fn(pipe(input), target). If it is meant to be so: verify=False"
        )


_BY_THE_MODEL = (
    "the loss is made by the model (output.loss), for each micro-batch by itself: with masked "
    "targets their mean is not that of the mini-batch, and gradients are off likewise. Let the "
    "model return its logits and compute the loss of them (F.cross_entropy counts masked targets "
    "right), or return (loss, weight). If all count the same: verify=False"
)
