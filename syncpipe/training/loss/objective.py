"""The loss of a mini-batch, put together from those of its micro-batches.

A mean loss ``l_i`` counts by its weight ``w_i``: the number of samples, or of targets that are
not masked. The mini-batch's is ``sum(w_i l_i) / W``, ``W`` the sum of weights, so micro-batch ``i``
goes back from ``(w_i / W) l_i``; one without any weight has no part, whatever its mean (``0 / 0``).
Where ``W`` is known only in the end, because the weights come with the losses or the micro-batches
from an iterator, ``m w`` stands in for it, ``w`` the first weight. In the end all gradients are
multiplied by ``m w / W``; which is 1, and nothing to be done, when all weights are equal. (Where
several workers compute losses nobody knows which weight is the first, and so ``w`` is the number of
samples in micro-batch 0, or 1.)
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from syncpipe.data import compact, described, distinct, map_tensors
from syncpipe.runtime.streams import moved
from syncpipe.training.loss.known import Loss, Weight, number

__all__ = ["Objective"]


class Objective:
    """The losses of one mini-batch. Used by one thread at a time.

    Args:
        loss: the loss function, and how much micro-batches count.
        m: number of micro-batches.
        total: the number of samples in the mini-batch, where it is known.
        weights: for each micro-batch how much it counts, where that is known before it runs.
        scaler: a ``GradScaler``.
        accumulate: what gradients are divided by.

    Attributes:
        known: these weights and their sum, which may be on another device than the last stage.
        first_size: the samples in micro-batch 0, where several workers compute losses.
    """

    def __init__(
        self,
        loss: Loss,
        *,
        m: int,
        total: int | None,
        weights: list[Weight] | None = None,
        scaler: Any = None,
        accumulate: float = 1,
    ) -> None:
        self._loss = loss
        self._m = m
        self._scaler = scaler
        self._accumulate = accumulate
        self._losses: list[Any] = [None] * m
        self._weights: list[Weight] = [1] * m
        self._metrics: list[dict[str, Any]] = [{} for _ in range(m)]
        self.first_size: int | None = None
        self.known: tuple[list[Weight], Weight] | None = None
        if weights is not None:
            self.known = weights, _sum(weights)
        self._by_size = not loss.weighted  # until the loss comes with a weight
        self._total = total if self._by_size else None
        self._assumed_total: Weight | None = self._total
        self._returned: tuple[bool, frozenset[str] | None] | None = None  # what loss_fn returns

    @property
    def function(self) -> Any:
        """The loss function."""
        return self._loss.function

    @property
    def quiet(self) -> bool:
        """Whether it is one of PyTorch's that never draw, without hooks, which might."""
        function: Any = self._loss.function
        hooked = isinstance(function, nn.Module) and (
            function._forward_hooks or function._forward_pre_hooks
        )
        return self._loss.exact and not hooked

    def call(self, given: tuple[Any, Any]) -> Any:
        """Calls the loss function with output and target."""
        output, target = given
        function = self._loss.function
        return function(output) if target is None else function(output, target)

    def root(self, *args: Any) -> Tensor:
        """Notes a loss as :meth:`root_and_gradient` does; what goes back from a gradient of one."""
        loss, share = self.root_and_gradient(*args)
        return loss if share == 1 else loss * share

    def root_and_gradient(
        self, i: int, result: Any, size: int, output: Any, target: Any, known: Any = None
    ) -> tuple[Tensor, float]:
        """Notes the loss of a micro-batch.

        Args:
            i: the micro-batch.
            result: what the loss function returned.
            size: how many samples there are in the micro-batch.
            output: what the loss function was given.
            target: the same.
            known: ``known``, where these are; they stay there.

        Returns:
            What the micro-batch goes back from, and the gradient of that.

        Raises:
            TypeError, ValueError: the result is no loss, or its weight is no weight.
        """
        if known is not None:
            self.known = known
            self._assumed_total = known[1]
        loss, weight, metrics = self._checked(i, result, size, target)
        self._losses[i], self._weights[i] = compact(loss.detach()), weight
        if metrics:
            self._metrics[i] = {name: _detached(value) for name, value in metrics.items()}
        if self._assumed_total is None:
            assumed = weight if self.first_size is None else self._by_size * self.first_size or 1
            self._assumed_total = self._m * _not_zero(assumed)
        if not (self._by_size or (self._loss.exact and isinstance(weight, Tensor))):
            loss = _with_a_part(loss, weight, output)
        share = self._share(weight, self._assumed_total)
        if not isinstance(share, Tensor) and self._accumulate == 1 and self._scaler is None:
            return loss, share  # the bits are those of going back from `loss * share`
        part: Tensor = self._part(loss, weight, self._assumed_total)
        if self._accumulate != 1:
            part = part / self._accumulate
        return part if self._scaler is None else self._scaler.scale(part), 1.0

    @property
    def came_with_weights(self) -> bool:
        """Whether the loss function returned a weight with each loss."""
        return self._returned is not None and self._returned[0]

    def noted(self, i: int) -> tuple[Any, ...]:
        """What was noted of a micro-batch, with which the caller goes on."""
        return self._losses[i], self._weights[i], self._assumed_total, self._metrics[i]

    def bring(self, device: torch.device) -> None:
        """Brings what was noted to one device, once all of it is there."""

        def there(tensors: list[Tensor]) -> list[Tensor]:
            return [moved(tensor, device) for tensor in tensors]

        for noted in (self._losses, self._weights, self._metrics):
            noted[:] = map_tensors(there, list(noted))
        self._assumed_total = map_tensors(there, self._assumed_total)

    @property
    def assumed(self) -> tuple[Weight, bool] | None:
        """The weight by which micro-batches are divided, and whether it is the mini-batch's.

        None as long as it depends on the first loss.
        """
        if self._loss.reduction == "sum":
            return 1.0, True
        if self.known is not None:
            return self.known[1], True
        if self._assumed_total is None or (self._returned is None and not self._loss.exact):
            return None
        return self._assumed_total, self._total is not None

    @property
    def total(self) -> Weight | None:
        """The weight of the mini-batch, in the end; None where that is what was assumed."""
        assumed = self.assumed
        return None if assumed is None or assumed[1] else self._sum()

    @property
    def adds_up(self) -> bool:
        """Whether losses are sums over samples, and so is that of several mini-batches."""
        return self._loss.reduction == "sum"

    def factor(self) -> Weight | None:
        """What all gradients have yet to be multiplied by; None for nothing."""
        total, assumed = self._sum(), self._assumed_total
        if self._loss.reduction == "sum" or assumed is None or self.known is not None:
            return None
        if not isinstance(total, Tensor) and total == assumed:
            return None
        # Where nothing counts all gradients are zero already.
        if isinstance(total, Tensor):
            return torch.where(total == 0, 1.0, assumed / total)
        return assumed / total if total else None

    def loss(self, of: Sequence[int] | None = None, losses: list[Any] | None = None) -> Tensor:
        """The loss of the mini-batch, detached.

        Args:
            of: some of its micro-batches; None for all.
            losses: theirs, where others are meant than those that were noted.
        """
        weights = self._weights if of is None else [self._weights[i] for i in of]
        if losses is None:
            losses = self._losses if of is None else [self._losses[i] for i in of]
        loss: Tensor = self._combined(losses, weights, self._sum() if of is None else _sum(weights))
        return loss

    def metrics(self) -> dict[str, Any] | None:
        """What came beside the losses, detached; None if nothing did.

        Numbers are combined as the losses are, everything else is a list with a value for each
        micro-batch.
        """
        if self._returned is None or self._returned[1] is None:
            return None
        found: dict[str, Any] = {}
        for name in self._metrics[0]:
            values = [metrics[name] for metrics in self._metrics]
            single = all(_is_number(value) for value in values)
            found[name] = self._combined(values, self._weights, self._sum()) if single else values
        return found

    def _combined(self, values: list[Any], weights: list[Weight], whole: Weight) -> Any:
        if not self._by_size and not isinstance(whole, Tensor) and not whole:
            return values[0] * math.nan
        parts = [
            self._part(value, weight, whole)
            for value, weight in zip(values, weights, strict=True)
            if self._by_size or isinstance(weight, Tensor) or weight
        ]
        combined = parts[0]
        for part in parts[1:]:
            combined = combined + part
        return (
            torch.where(whole == 0, math.nan, combined) if isinstance(whole, Tensor) else combined
        )

    def _part(self, value: Any, weight: Weight, whole: Weight) -> Any:
        """What a micro-batch contributes."""
        share: Any = self._share(weight, whole)
        if not isinstance(share, Tensor):
            return value if share == 1 else value * share
        if isinstance(value, Tensor):
            share = share.to(value.dtype) if value.is_floating_point() else share
        return torch.where(share == 0, 0.0, value * share)

    def _share(self, weight: Weight, whole: Weight) -> Weight:
        """How much a micro-batch counts."""
        if self._loss.reduction == "sum":
            return 1.0
        if not isinstance(weight, Tensor) and not isinstance(whole, Tensor) and not whole:
            return math.nan
        return weight / whole

    def _sum(self) -> Weight:
        return _sum(self._weights) if self._total is None else self._total

    def _checked(
        self, i: int, result: Any, size: int, target: Any
    ) -> tuple[Tensor, Weight, dict[str, Any]]:
        """Loss, weight and metrics."""
        metrics: dict[str, Any] | None = None
        parts = list(result) if isinstance(result, tuple) else [result]
        if len(parts) > 1 and isinstance(parts[-1], dict):
            metrics = parts.pop()
        if len(parts) > 2:
            raise ValueError(
                f"loss_fn returned a tuple of {len(result)}; it returns a loss, (loss, weight), "
                "(loss, metrics) or (loss, weight, metrics), with metrics in a dict"
            )
        loss = _checked_loss(parts[0])
        self._check_kind(i, len(parts) == 2, metrics)
        if len(parts) == 2:
            weight = number(parts[1], "loss_fn returned")
        elif self.known is not None:
            weight = self.known[0][i]
        else:
            found = self._loss.weight(i, target) if self._loss.weighted else None
            weight = size if found is None else found
        if isinstance(weight, Tensor):
            weight = _beside(weight, loss)
        return loss, weight, metrics or {}

    def _check_kind(self, i: int, weighted: bool, metrics: dict[str, Any] | None) -> None:
        """Refuses results that differ, and weights from two sides."""
        names = None if metrics is None else frozenset(metrics)
        if self._returned is None:
            self._returned = weighted, names
            if self.known is not None:
                self._assumed_total = self.known[1]
            if weighted:
                self._by_size, self._total, self._assumed_total = False, None, None
        if weighted and self._loss.reduction == "sum":
            raise ValueError(
                "loss_fn returned (loss, weight), but its losses are sums (loss_reduction='sum'), "
                "which have no use for a weight: return the loss alone, or a mean"
            )
        if weighted and self._loss.weighted:
            raise ValueError(
                "loss_fn returned a weight, and train_batch was given one (weight=...): give either"
            )
        if weighted != self._returned[0]:
            raise ValueError(
                "loss_fn returned a weight for some micro-batches only: return (loss, weight) for "
                "each of them, or for none"
            )
        if names != self._returned[1]:
            raise ValueError(
                f"loss_fn returned metrics {_named(names)} for micro-batch {i}, and "
                f"{_named(self._returned[1])} for the first one: return the same for each"
            )


def _with_a_part(loss: Tensor, weight: Weight, output: Any) -> Tensor:
    """A loss whose gradient is zero where its weight is, even if it is a mean over nothing."""
    given = [t for t in distinct(output) if t.requires_grad]
    if isinstance(weight, Tensor):  # nobody waits for its value

        def masked(grad: Tensor) -> Tensor:
            return torch.where(weight == 0, 0.0, grad)

        for tensor in given:
            tensor.register_hook(masked)  # type: ignore[no-untyped-call]
    elif not weight and loss.requires_grad:
        nothing = loss.detach() * 0
        for tensor in given:
            nothing = nothing + tensor.reshape(-1)[:0].abs().sum()
        return torch.nan_to_num(nothing)
    return loss


def _beside(weight: Tensor, loss: Tensor) -> Tensor:
    """A weight where the loss is. Counts are often integers, and too large for half precision."""
    return compact(moved(weight, loss.device, torch.promote_types(loss.dtype, torch.float32)))


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


def _detached(value: Any) -> Any:
    return map_tensors(lambda tensors: [compact(t.detach()) for t in tensors], value)


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.dim() == 0 and not value.is_complex()
    return isinstance(value, numbers.Real)


def _named(names: frozenset[str] | None) -> str:
    return "none" if names is None else str(sorted(map(str, names)))


def _sum(weights: list[Weight]) -> Weight:
    total: Weight = 0
    for weight in weights:
        total = total + weight
    return total


def _not_zero(weight: Weight) -> Weight:
    if isinstance(weight, Tensor):
        return torch.where(weight == 0, torch.ones_like(weight), weight)
    return weight or 1
