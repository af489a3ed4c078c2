"""Loss functions: how their micro-batches are weighted, and what they return.

``F.mse_loss`` and other means over elements are weighted by the elements of the output,
``F.cross_entropy`` by the targets that are not ignored. For other functions the caller gives
``weight=`` or ``loss_reduction=``; the default is the number of samples.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from syncpipe.data.trees import described
from syncpipe.runtime.errors import annotate

Weight = float | Tensor
_REDUCTIONS = ("mean", "sum")
#: Loss modules and their functions; the first kind is weighted by its target alone.
_COUNTED = {nn.CrossEntropyLoss: F.cross_entropy, nn.NLLLoss: F.nll_loss}
_BY_ELEMENTS = {
    nn.MSELoss: F.mse_loss, nn.L1Loss: F.l1_loss, nn.SmoothL1Loss: F.smooth_l1_loss,
    nn.HuberLoss: F.huber_loss, nn.BCELoss: F.binary_cross_entropy,
    nn.BCEWithLogitsLoss: F.binary_cross_entropy_with_logits, nn.KLDivLoss: F.kl_div,
    nn.PoissonNLLLoss: F.poisson_nll_loss, nn.SoftMarginLoss: F.soft_margin_loss,
    nn.HingeEmbeddingLoss: F.hinge_embedding_loss,
}  # fmt: skip
_FUNCTIONS = _COUNTED | _BY_ELEMENTS


@dataclass(frozen=True)
class Loss:
    """A loss function, and how the losses of micro-batches are combined.

    ``weigh`` returns the weight of a micro-batch, given its target, or has a number for each. If it
    is None, ``count`` returns the weight, given output and target; without both, the number of
    samples. ``exact``: the combined loss is known to be the loss of the mini-batch.
    """

    function: Callable[..., Any]
    reduction: str = "mean"
    weigh: Callable[[Any], Any] | tuple[Any, ...] | None = None
    count: Callable[[Any, Any], int | None] | None = None
    exact: bool = False

    def call(self, given: tuple[Any, Any]) -> Any:
        output, target = given
        return self.function(output) if target is None else self.function(output, target)

    @property
    def draws(self) -> int | None:
        """0 if it draws no random numbers: PyTorch's own without hooks. Else None: unknown."""
        function: Any = self.function
        hooked = isinstance(function, nn.Module) and (
            function._forward_hooks or function._forward_pre_hooks
        )
        return 0 if self.exact and not hooked else None

    def weight(self, i: int, target: Any, output: Any = None) -> Weight | None:
        """The weight of micro-batch ``i``; None if it is the number of samples."""
        if self.weigh is None:
            return None if self.count is None else self.count(output, target)
        if isinstance(self.weigh, tuple):
            return _number(self.weigh[i], "weight gave")
        try:
            with torch.no_grad():
                found = self.weigh(target)
        except BaseException as error:
            annotate(error, f"in weight, for the target of micro-batch {i}")
            raise
        return None if found is None and self.exact else _number(found, "weight returned")

    def total(self, targets: Sequence[Any] | None, samples: int | None) -> int | None:
        """The weight of a mini-batch without ``weigh``; None if its targets do not determine it."""
        if self.count is None:
            return samples
        counts = [self.count(target, target) for target in targets or ()]
        return sum(filter(None, counts)) or None


def known_loss(
    loss_fn: Any, reduction: str | None, weight: Callable[[Any], Any] | Sequence[Any] | None
) -> Loss:
    """A ``Loss``, from the arguments ``loss_fn``, ``loss_reduction`` and ``weight``.

    Raises:
        TypeError: ``loss_fn`` is not callable, or ``weight`` is no function and no sequence.
        ValueError: the arguments contradict each other.
    """
    if isinstance(loss_fn, type) and issubclass(loss_fn, nn.Module):
        name = loss_fn.__name__
        raise TypeError(f"loss_fn={name} is a class: give an instance, loss_fn={name}(...)")
    if not callable(loss_fn):
        raise TypeError(
            f"loss_fn must be callable, as loss_fn(output, target), not {type(loss_fn).__name__}"
        )
    if reduction is not None and reduction not in _REDUCTIONS:
        raise ValueError(f"loss_reduction={reduction!r}: must be one of 'mean', 'sum'")
    function, options = _function_and_options(loss_fn)
    own_reduction = options.get("reduction")
    of_torch = type(loss_fn).__module__.startswith("torch.nn.modules")
    if own_reduction == "none" and (of_torch or isinstance(loss_fn, partial)):
        raise ValueError(
            "loss_fn has reduction='none', which returns a loss for each sample instead of one "
            "number: use reduction='mean' or reduction='sum'"
        )
    if own_reduction not in _REDUCTIONS:
        own_reduction = None
    if reduction is not None and own_reduction is not None and reduction != own_reduction:
        raise ValueError(
            f"loss_reduction={reduction!r}, but loss_fn has reduction={own_reduction!r}: leave out "
            "loss_reduction, or make both the same"
        )
    reduction = reduction or own_reduction or "mean"
    if weight is None:
        exact = function in _FUNCTIONS.values() and not {"size_average", "reduce"} & set(options)
        weigh = count = None
        if exact and reduction == "mean" and function in _COUNTED.values():
            weigh = partial(_count_targets, options.get("weight"), options.get("ignore_index"))
        elif exact and reduction == "mean":
            count = _count_rows if options.get("reduction") == "batchmean" else _count_elements
        return Loss(loss_fn, reduction, weigh, count, exact)
    if reduction == "sum":
        raise ValueError(
            "weight is for losses that are means, but loss_fn returns a sum (loss_reduction='sum', "
            "or its own reduction): leave out weight, or use a mean"
        )
    if callable(weight):
        return Loss(loss_fn, reduction, weight)
    if isinstance(weight, Sequence | Tensor) and not isinstance(weight, str):
        return Loss(loss_fn, reduction, tuple(weight))
    raise TypeError(
        "weight must be a function of the target, or a number for each micro-batch, not "
        f"{type(weight).__name__}"
    )


def _function_and_options(loss_fn: Any) -> tuple[Any, dict[str, Any]]:
    """The function or module class that computes a loss, and its options."""
    while (compiled := getattr(loss_fn, "_orig_mod", None)) is not None:
        loss_fn = compiled
    if isinstance(loss_fn, partial):
        return (loss_fn.func if not loss_fn.args else None), loss_fn.keywords
    if not isinstance(loss_fn, nn.Module):
        return loss_fn, {}
    options = vars(loss_fn) | loss_fn._buffers
    kind: Any = type(loss_fn) if "forward" not in options else None
    return _FUNCTIONS.get(kind, kind), options


def _count_targets(weight: Tensor | None, ignored: int | None, target: Any) -> Any:
    """The divisor of ``F.cross_entropy`` and ``F.nll_loss``; None: the number of samples."""
    if type(target) is not Tensor:
        return None
    if target.is_floating_point():  # probabilities of classes
        return target.numel() // max(1, target.shape[1 if target.dim() > 1 else 0])
    kept = target != (-100 if ignored is None else ignored)
    if weight is None:
        return kept.sum()
    target, kept = target.to(weight.device), kept.to(weight.device)
    valid = kept & (target >= 0) & (target < len(weight))  # for others the loss raises an error
    return (weight[torch.where(valid, target, 0)] * valid).sum()


def _count_elements(output: Any, target: Any) -> int | None:
    """The number of elements that a mean of PyTorch's averages."""
    if not isinstance(output, Tensor):
        return None
    if not isinstance(target, Tensor) or target.shape == output.shape:
        return output.numel()
    shape: Any = torch.broadcast_shapes(output.shape, target.shape)  # type: ignore[no-untyped-call]
    return int(math.prod(shape))


def _count_rows(output: Any, target: Any) -> int | None:
    return len(output) if isinstance(output, Tensor) and output.dim() else None


def _number(weight: Any, what: str) -> Weight:
    """A weight as a number; or as a tensor, if reading it would synchronize a device."""
    if isinstance(weight, Tensor):
        if weight.numel() != 1 or weight.requires_grad:
            kind = "which requires grad" if weight.requires_grad else "not one number"
            raise ValueError(
                f"{what} a weight {described(weight)}, {kind}: a weight must be one number without "
                "a gradient, for example the number of tokens"
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


class Returned(NamedTuple):
    """The result of a loss function for a micro-batch; ``kind`` describes it in messages."""

    loss: Tensor
    weight: Weight | None
    metrics: dict[str, Any]
    kind: str


def parse(result: Any) -> Returned:
    """Unpacks the result of a loss function (TypeError, ValueError if it is no loss)."""
    metrics: dict[str, Any] = {}
    parts = list(result) if isinstance(result, tuple) else [result]
    if len(parts) > 1 and isinstance(parts[-1], dict):
        metrics = parts.pop()
    if len(parts) > 2:
        raise ValueError(
            f"loss_fn returned a tuple of {len(result)}; it returns a loss, (loss, weight), "
            "(loss, metrics) or (loss, weight, metrics), with metrics in a dict"
        )
    loss = parts[0]
    if not isinstance(loss, Tensor):
        raise TypeError(
            f"loss_fn returned {type(loss).__name__}; it returns the loss of the micro-batch "
            "as a tensor, or (loss, weight)"
        )
    if loss.numel() != 1 or not loss.is_floating_point():
        raise ValueError(
            f"loss_fn returned {described(loss)}; a loss is one floating-point number: reduce "
            "it by .mean(), or by .sum() together with loss_reduction='sum'"
        )
    weight = _number(parts[1], "loss_fn returned") if len(parts) == 2 else None
    kind = "a loss" if weight is None else "a loss with a weight"
    if metrics:
        kind += f" and metrics {sorted(map(str, metrics))}"
    return Returned(loss if loss.dim() == 0 else loss.reshape(()), weight, metrics, kind)
