"""The loss of a mini-batch, put together from those of its micro-batches.

With a mean loss ``l_i`` over ``s_i`` samples the mini-batch's is ``sum(s_i l_i) / sum(s_i)``, so
micro-batch ``i`` goes back from ``(s_i / S) l_i``, ``S`` the sum. Where ``S`` is known only in the
end, because the weights come with the losses or the micro-batches from an iterator, ``m s`` stands
in for it, ``s`` the first weight. In the end all gradients are multiplied by ``m s / S``; which is
1, and nothing to be done, when all weights are equal.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from syncpipe.runtime.streams import moved
from syncpipe.tree import compact, described

__all__ = ["REDUCTIONS", "Objective"]

REDUCTIONS = ("mean", "sum")
_Weight = float | Tensor


class Objective:
    """The losses of one mini-batch. Used by one thread at a time.

    Args:
        loss_fn: ``loss_fn(output, target)``, or ``loss_fn(output)`` where there is no target. It
            returns the loss, or the loss and its weight.
        reduction: ``"mean"`` or ``"sum"``.
        m: number of micro-batches.
        total: the number of samples in the mini-batch, where it is known.
        scaler: a ``GradScaler``.
    """

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        *,
        reduction: str,
        m: int,
        total: int | None,
        scaler: Any = None,
    ) -> None:
        self._loss_fn = loss_fn
        self._reduction = reduction
        self._m = m
        self._scaler = scaler
        self._losses: list[Any] = [None] * m
        self._weights: list[_Weight] = [1] * m
        self._total = total
        self._assumed_total: _Weight | None = total
        self._weighted: bool | None = None  # whether the loss comes with a weight; not known yet

    @property
    def name(self) -> Any:
        """Tells apart loss functions that do different things: their code, if they have any."""
        function = self._loss_fn
        function = getattr(function, "func", getattr(function, "__func__", function))
        return getattr(function, "__code__", type(function))

    def call(self, given: tuple[Any, Any]) -> Any:
        """Calls the loss function with output and target."""
        output, target = given
        return self._loss_fn(output) if target is None else self._loss_fn(output, target)

    def root(self, i: int, result: Any, size: int) -> Tensor:
        """Notes the loss of a micro-batch.

        Args:
            i: the micro-batch.
            result: what the loss function returned.
            size: how many samples there are in the micro-batch.

        Returns:
            What the micro-batch goes back from.

        Raises:
            TypeError, ValueError: the result is no loss, or its weight is no weight.
        """
        loss, weight = self._checked(result, size)
        self._losses[i], self._weights[i] = compact(loss.detach()), weight
        if self._assumed_total is None:
            self._assumed_total = self._m * _not_zero(weight)
        loss = self._part(loss, weight, self._assumed_total)
        return loss if self._scaler is None else self._scaler.scale(loss)

    def noted(self, i: int) -> tuple[Any, ...]:
        """What was noted of a micro-batch, with which the caller goes on."""
        return self._losses[i], self._weights[i], self._assumed_total

    def factor(self) -> _Weight | None:
        """What all gradients have yet to be multiplied by; None for nothing."""
        total, assumed = self._sum(), self._assumed_total
        if self._reduction == "sum" or assumed is None:
            return None
        if not isinstance(total, Tensor) and total == assumed:
            return None
        return _ratio(assumed, total)

    def loss(self) -> Tensor:
        """The loss of the mini-batch, detached."""
        whole = self._sum()
        parts = [
            self._part(loss, weight, whole)
            for loss, weight in zip(self._losses, self._weights, strict=True)
        ]
        loss = parts[0]
        for part in parts[1:]:
            loss = loss + part
        return loss

    def _part(self, loss: Tensor, weight: _Weight, whole: _Weight) -> Tensor:
        """What a micro-batch contributes."""
        if self._reduction == "sum":
            return loss
        share = _ratio(weight, whole)
        if isinstance(share, Tensor):
            return loss * share.to(loss.dtype)
        return loss if share == 1 else loss * share

    def _sum(self) -> _Weight:
        if self._total is not None:
            return self._total
        total: _Weight = 0
        for weight in self._weights:
            total = total + weight
        return total

    def _checked(self, result: Any, size: int) -> tuple[Tensor, _Weight]:
        """Loss and weight."""
        weighted = isinstance(result, tuple)
        if self._weighted is None:
            self._weighted = weighted
            if weighted:
                self._total = self._assumed_total = None
        if weighted != self._weighted:
            raise ValueError(
                "loss_fn returned a weight for some micro-batches only: return (loss, weight) for "
                "each of them, or for none"
            )
        if not weighted:
            return _checked_loss(result), size
        if self._reduction == "sum":
            raise ValueError(
                "loss_fn returned (loss, weight), but loss_reduction='sum' has no use for a "
                "weight: return the loss alone, or use loss_reduction='mean'"
            )
        if len(result) != 2:
            raise ValueError(
                f"loss_fn returned a tuple of {len(result)}; it returns a loss, or (loss, weight)"
            )
        loss = _checked_loss(result[0])
        return loss, _checked_weight(result[1], loss)


def _checked_loss(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor):
        raise TypeError(
            f"loss_fn returned {type(loss).__name__}; it returns the loss of the micro-batch as a "
            "tensor, or (loss, weight)"
        )
    if loss.numel() != 1 or not loss.is_floating_point():
        raise ValueError(
            f"loss_fn returned {described(loss)}; a loss is one floating-point number: reduce it "
            "by .mean(), or by .sum() together with loss_reduction='sum'"
        )
    return loss if loss.dim() == 0 else loss.reshape(())


def _checked_weight(weight: Any, loss: Tensor) -> _Weight:
    if isinstance(weight, numbers.Real):
        return float(weight)
    if not isinstance(weight, Tensor):
        raise TypeError(f"loss_fn returned a weight of type {type(weight).__name__}: not a number")
    if weight.numel() != 1 or weight.requires_grad:
        kind = "which requires grad" if weight.requires_grad else "not one number"
        raise ValueError(
            f"loss_fn returned a weight {described(weight)}, {kind}; a weight is one number, such "
            "as the number of tokens, and no gradient goes through it"
        )
    # Counts are often integers, and too large for half precision.
    dtype = torch.promote_types(loss.dtype, torch.float32)
    return compact(moved(weight.reshape(()), loss.device, dtype))


def _not_zero(weight: _Weight) -> _Weight:
    if isinstance(weight, Tensor):
        return torch.where(weight == 0, torch.ones_like(weight), weight)
    return weight or 1


def _ratio(a: _Weight, b: _Weight) -> _Weight:
    if isinstance(a, Tensor) or isinstance(b, Tensor) or b:
        return a / b
    return float("nan")
