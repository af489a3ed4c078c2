"""What is known of a loss function before it is called.

A mean over kept targets is no mean over samples: ``F.cross_entropy`` divides by the number of
targets that are not ``ignore_index``, or by the sum of their class weights. Both can be counted
from the target alone, so the weight of each micro-batch is known before anything runs, and nothing
has to be estimated or scaled afterwards. For losses that nobody knows the caller says how to count.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from syncpipe.data import described
from syncpipe.runtime.errors import annotate

__all__ = ["REDUCTIONS", "Loss", "Weight", "check_loss_fn", "known_loss", "number"]

REDUCTIONS = ("mean", "sum")

Weight = float | Tensor
_MODULES = (nn.CrossEntropyLoss, nn.NLLLoss)
_FUNCTIONS = (F.cross_entropy, F.nll_loss)
#: Means (or sums) over all elements, or over all samples.
_PLAIN = (
    nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCELoss, nn.BCEWithLogitsLoss,
    nn.KLDivLoss, F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits,
)  # fmt: skip


@dataclass(frozen=True)
class Loss:
    """A loss function, and how the losses of micro-batches become that of the mini-batch.

    Attributes:
        function: ``loss_fn(output, target)``.
        reduction: what it does over the samples of a micro-batch, ``"mean"`` or ``"sum"``.
        weigh: tells by the target of a micro-batch how much it counts; None if it counts by its
            samples, or if ``numbers`` say.
        numbers: for each micro-batch how much it counts.
        exact: it is known that the result is the mini-batch's.
    """

    function: Callable[..., Any]
    reduction: str = "mean"
    weigh: Callable[[Any], Any] | None = None
    numbers: tuple[Any, ...] | None = None
    exact: bool = False

    @property
    def weighted(self) -> bool:
        """Whether weights are known without the loss function."""
        return self.weigh is not None or self.numbers is not None

    def weight(self, i: int, target: Any) -> Weight | None:
        """How much a micro-batch counts; None: by its samples.

        Args:
            i: the micro-batch.
            target: its target.

        Raises:
            TypeError, ValueError: that is no weight.
        """
        if self.numbers is not None:
            return number(self.numbers[i], "weight gave")
        if self.weigh is None:
            return None
        try:
            with torch.no_grad():
                found = self.weigh(target)
        except BaseException as error:
            annotate(error, f"in weight, for the target of micro-batch {i}")
            raise
        return None if found is None and self.exact else number(found, "weight returned")


def check_loss_fn(loss_fn: Any) -> Callable[..., Any]:
    """The loss function.

    Raises:
        TypeError: there is none.
    """
    if loss_fn is None:
        raise TypeError("loss_fn is missing: write train_batch(input, target, loss_fn=...)")
    return loss_fn  # type: ignore[no-any-return]


def known_loss(
    loss_fn: Any, reduction: str | None, weight: Callable[[Any], Any] | Sequence[Any] | None
) -> Loss:
    """What there is to know of a loss function.

    Args:
        loss_fn: what ``train_batch`` was given.
        reduction: what it is said to do; None for what it says itself, or else ``"mean"``.
        weight: how much micro-batches count: a function of the target, or a number for each.

    Raises:
        TypeError: ``loss_fn`` or ``weight`` is nothing of the kind.
        ValueError: they contradict each other.
    """
    if isinstance(loss_fn, type) and issubclass(loss_fn, nn.Module):
        raise TypeError(
            f"loss_fn={loss_fn.__name__} is a class, and calling it makes a module: give an "
            f"instance, loss_fn={loss_fn.__name__}(...)"
        )
    if not callable(loss_fn):
        raise TypeError(
            f"loss_fn must be callable, as loss_fn(output, target), not {type(loss_fn).__name__}"
        )
    if reduction is not None and reduction not in REDUCTIONS:
        raise ValueError(
            f"loss_reduction={reduction!r}: must be one of {', '.join(map(repr, REDUCTIONS))}, "
            "whichever loss_fn does over the samples of a micro-batch"
        )
    function, options = _opened(loss_fn)
    reduction = _reduction(reduction, loss_fn, options.get("reduction"))
    weigh: Callable[[Any], Any] | None = None
    counts: tuple[Any, ...] | None = None
    exact = False
    if weight is None:
        exact = _exact(function, options)
        if function in _FUNCTIONS and exact and reduction == "mean":
            weigh = partial(_kept, options.get("weight"), options.get("ignore_index"))
    elif reduction == "sum":
        raise ValueError(
            "weight is for losses that are means, but that of loss_fn is a sum (loss_reduction or "
            "its own reduction is 'sum'), which micro-batches add up to: leave one of them out"
        )
    elif callable(weight):
        weigh = weight
    elif isinstance(weight, Sequence | Tensor) and not isinstance(weight, str):
        counts = tuple(weight)
    else:
        raise TypeError(
            f"weight must be a function of the target, or a number for each micro-batch, not "
            f"{type(weight).__name__}"
        )
    return Loss(loss_fn, reduction, weigh, counts, exact)


def _opened(loss_fn: Any) -> tuple[Any, dict[str, Any]]:
    """What computes a loss, a function or a class of modules, and its options."""
    while (compiled := getattr(loss_fn, "_orig_mod", None)) is not None:
        loss_fn = compiled
    if isinstance(loss_fn, partial):
        return (loss_fn.func if not loss_fn.args else None), loss_fn.keywords
    if not isinstance(loss_fn, nn.Module):
        return loss_fn, {}
    options = vars(loss_fn) | loss_fn._buffers
    kind: Any = type(loss_fn) if "forward" not in options else None
    return dict[Any, Any](zip(_MODULES, _FUNCTIONS, strict=True)).get(kind, kind), options


def _exact(function: Any, options: dict[str, Any]) -> bool:
    """Whether PyTorch's own loss is known to be a mean, or a sum, over what there is to count."""
    return function in (*_FUNCTIONS, *_PLAIN) and not {"size_average", "reduce"} & set(options)


def _reduction(asked: str | None, loss_fn: Any, own: Any) -> str:
    """What a loss does over samples, by what is asked for and what it says itself."""
    if own == "none" and (isinstance(loss_fn, partial) or _of_torch(loss_fn)):
        raise ValueError(
            "loss_fn has reduction='none', which gives a loss for each sample, and a loss is one "
            "number: use reduction='mean' or reduction='sum'"
        )
    said = own if own in REDUCTIONS else None
    if asked is not None and said is not None and asked != said:
        raise ValueError(
            f"loss_reduction={asked!r}, but loss_fn has reduction={said!r}: leave out "
            "loss_reduction, or make both the same"
        )
    return asked or said or "mean"


def _of_torch(loss_fn: Any) -> bool:
    return type(loss_fn).__module__.startswith("torch.nn.modules")


def _kept(weight: Tensor | None, ignored: int | None, target: Any) -> Any:
    """By what ``F.cross_entropy`` and ``F.nll_loss`` divide; None: by the number of places."""
    if type(target) is not Tensor or target.is_floating_point():
        return None  # probabilities of classes
    kept = target != (-100 if ignored is None else ignored)
    if weight is None:
        return kept.sum()
    target, kept = target.to(weight.device), kept.to(weight.device)
    there = kept & (target >= 0) & (target < len(weight))  # others the loss will refuse
    return (weight[torch.where(there, target, 0)] * there).sum()


def number(weight: Any, what: str) -> Weight:
    """A weight as a number, or as a tensor if it is on a device that should not be waited for.

    Args:
        weight: one number.
        what: who gave it.

    Raises:
        TypeError, ValueError: it is none.
    """
    if isinstance(weight, Tensor):
        if weight.numel() != 1 or weight.requires_grad:
            kind = "which requires grad" if weight.requires_grad else "not one number"
            raise ValueError(
                f"{what} a weight {described(weight)}, {kind}; a weight is one number, such as "
                "the number of tokens, and no gradient goes through it"
            )
        if type(weight) is not Tensor or weight.device.type != "cpu":
            return weight.detach().reshape(())
        weight = weight.item()
    if not isinstance(weight, numbers.Real):
        raise TypeError(f"{what} a weight of type {type(weight).__name__}: not a number")
    value = float(weight)
    if not 0 <= value < math.inf:
        raise ValueError(f"{what} a weight of {value}: it must be a finite number, at least 0")
    return value
