"""The loss of a mini-batch, put together from those of its micro-batches.

A mean loss ``l_i`` counts by its weight ``w_i``: the number of samples, or of targets that are
not masked. The mini-batch's is ``sum(w_i l_i) / W``, ``W`` the sum of weights, so micro-batch ``i``
goes back from ``(w_i / W) l_i``; one without any weight has no part, whatever its mean (``0 / 0``).
``F.cross_entropy`` divides by what can be counted from the target alone, so its weights are known
before anything runs; for losses that nobody knows the caller says how to count (``weight=``).
Where ``W`` is known only in the end, because the weights come with the losses or the micro-batches
from an iterator, ``m w`` stands in for it, ``w`` the first weight. In the end all gradients are
multiplied by ``m w / W``; which is 1, and nothing to be done, when all weights are equal. (Where
several workers compute losses nobody knows which weight is the first, and so ``w`` is the number of
samples in micro-batch 0, or 1.)

A mean over what is not masked, a loss that compares samples with each other, a mean over something
else than samples: put together by the sizes of micro-batches, all of these come out wrong, and so
do the gradients. So the outputs of some micro-batches are kept until the end of a call, and
``loss_fn`` is called once more, with all of them at once. This is done in calls 1, 2, 4, 8, ...
with a loss function: the first batches may have no padding.
"""

from __future__ import annotations

import math
import numbers
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from syncpipe.data import (
    compact,
    described,
    distinct,
    flatten,
    gather,
    map_tensors,
    tensors_in,
    unflatten,
)
from syncpipe.hints import outside
from syncpipe.runtime.errors import annotate
from syncpipe.runtime.random_numbers import undisturbed
from syncpipe.runtime.streams import moved
from syncpipe.stages.call import Call
from syncpipe.state import SIMPLE, unchanged
from syncpipe.training.cell import FOREIGN, Cell, cut, detached, ends_of
from syncpipe.training.sources import Source

Weight = float | Tensor
_REDUCTIONS = ("mean", "sum")
_COUNTED = {nn.CrossEntropyLoss: F.cross_entropy, nn.NLLLoss: F.nll_loss}
#: Means (or sums) over all elements, or over all samples.
_PLAIN = (
    nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCELoss, nn.BCEWithLogitsLoss,
    nn.KLDivLoss, F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits,
)  # fmt: skip
_BACKWARD = (
    "loss_fn must not call backward(): train_batch runs it, once for each micro-batch. Return the "
    "loss. (torch.autograd.grad of the loss by the output is possible)"
)
_BY_THE_MODEL = (
    "the loss is made by the model (output.loss), for each micro-batch by itself: with masked "
    "targets their mean is not that of the mini-batch, and gradients are off likewise. Let the "
    "model return its logits and compute the loss of them (F.cross_entropy counts masked targets "
    "right), or return (loss, weight). If all count the same: verify=False"
)
_MOST = 2**26  #: so many bytes of outputs are kept at most, but two micro-batches in any case
_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4}  #: relative to the loss
_MOST_COUNTS = 32  #: so many are remembered, two for each loss function


@dataclass(frozen=True)
class Loss:
    """A loss function, and how the losses of micro-batches become that of the mini-batch.

    ``weigh`` tells by the target of a micro-batch how much it counts, or has a number for each
    micro-batch; None: by samples. ``exact``: it is known that the result is the mini-batch's.
    """

    function: Callable[..., Any]
    reduction: str = "mean"
    weigh: Callable[[Any], Any] | tuple[Any, ...] | None = None
    exact: bool = False

    def call(self, given: tuple[Any, Any]) -> Any:
        output, target = given
        return self.function(output) if target is None else self.function(output, target)

    @property
    def draws(self) -> int | None:
        """0 if it is one of PyTorch's that never draw, without hooks, which might; else None."""
        function: Any = self.function
        hooked = isinstance(function, nn.Module) and (
            function._forward_hooks or function._forward_pre_hooks
        )
        return 0 if self.exact and not hooked else None

    def weight(self, i: int, target: Any) -> Weight | None:
        """How much micro-batch ``i`` counts; None: by its samples."""
        if self.weigh is None:
            return None
        if isinstance(self.weigh, tuple):
            return _number(self.weigh[i], "weight gave")
        try:
            with torch.no_grad():
                found = self.weigh(target)
        except BaseException as error:
            annotate(error, f"in weight, for the target of micro-batch {i}")
            raise
        return None if found is None and self.exact else _number(found, "weight returned")


def known_loss(
    loss_fn: Any, reduction: str | None, weight: Callable[[Any], Any] | Sequence[Any] | None
) -> Loss:
    """What is known of a loss function before it is called, from the arguments of the same names.

    Raises:
        TypeError: ``loss_fn`` or ``weight`` is nothing of the kind.
        ValueError: they contradict each other.
    """
    if loss_fn is None:
        raise TypeError("loss_fn is missing: write train_batch(input, target, loss_fn=...)")
    if isinstance(loss_fn, type) and issubclass(loss_fn, nn.Module):
        raise TypeError(
            f"loss_fn={loss_fn.__name__} is a class, and calling it makes a module: give an "
            f"instance, loss_fn={loss_fn.__name__}(...)"
        )
    if not callable(loss_fn):
        raise TypeError(
            f"loss_fn must be callable, as loss_fn(output, target), not {type(loss_fn).__name__}"
        )
    if reduction is not None and reduction not in _REDUCTIONS:
        raise ValueError(
            f"loss_reduction={reduction!r}: must be one of 'mean', 'sum', "
            "whichever loss_fn does over the samples of a micro-batch"
        )
    function, options = _opened(loss_fn)
    said = options.get("reduction")
    of_torch = type(loss_fn).__module__.startswith("torch.nn.modules")
    if said == "none" and (of_torch or isinstance(loss_fn, partial)):
        raise ValueError(
            "loss_fn has reduction='none', which gives a loss for each sample, and a loss is one "
            "number: use reduction='mean' or reduction='sum'"
        )
    if said not in _REDUCTIONS:
        said = None
    if reduction is not None and said is not None and reduction != said:
        raise ValueError(
            f"loss_reduction={reduction!r}, but loss_fn has reduction={said!r}: leave out "
            "loss_reduction, or make both the same"
        )
    reduction = reduction or said or "mean"
    if weight is None:
        counted = function in _COUNTED.values()
        exact = (counted or function in _PLAIN) and not {"size_average", "reduce"} & set(options)
        weigh = None
        if counted and exact and reduction == "mean":
            weigh = partial(_kept, options.get("weight"), options.get("ignore_index"))
        return Loss(loss_fn, reduction, weigh, exact)
    if reduction == "sum":
        raise ValueError(
            "weight is for losses that are means, but that of loss_fn is a sum (loss_reduction or "
            "its own reduction is 'sum'), which micro-batches add up to: leave one of them out"
        )
    if callable(weight):
        return Loss(loss_fn, reduction, weight)
    if isinstance(weight, Sequence | Tensor) and not isinstance(weight, str):
        return Loss(loss_fn, reduction, tuple(weight))
    raise TypeError(
        "weight must be a function of the target, or a number for each micro-batch, not "
        f"{type(weight).__name__}"
    )


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
    return _COUNTED.get(kind, kind), options


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


def _number(weight: Any, what: str) -> Weight:
    """A weight as a number, or as a tensor if it is on a device that should not be waited for."""
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


class Objective:
    """The losses of one mini-batch. Used by one thread at a time, perhaps of ``several`` workers.

    Attributes:
        known: the weights and their sum, where these are known before anything runs; they may be on
            another device than the last stage.
        adds_up: whether losses are sums over samples, and so is that of several mini-batches.
        came_with_weights: whether the loss function returned a weight with each loss.
    """

    def __init__(
        self, loss: Loss, source: Source, several: bool = False, scaler: Any = None,
        accumulate: float = 1,
    ) -> None:  # fmt: skip
        self._loss, self._scaler, self._accumulate = loss, scaler, accumulate
        self.m = m = source.m
        self.came_with_weights = False
        if isinstance(loss.weigh, tuple) and len(loss.weigh) != m:
            raise ValueError(
                f"weight has {len(loss.weigh)} numbers, but there are {m} micro-batches: give "
                "one for each of them, or a function of the target"
            )
        self.function, self.exact = loss.function, loss.exact
        self.call, self.draws = loss.call, loss.draws
        self.adds_up = loss.reduction == "sum"
        self.known: tuple[list[Weight], Weight] | None = None
        self._sizes, self._several = source.sizes, several
        self._losses: list[Any] = [None] * m
        self._weights: list[Weight] = [1] * m
        self._metrics: list[dict[str, Any]] = [{} for _ in range(m)]
        self._by_size = loss.weigh is None  # until the loss comes with a weight
        self._total = source.total if self._by_size else None
        self._assumed: Weight | None = self._total
        self._returned: str | None = None  # what loss_fn returns, in words
        if loss.weigh is not None and source.targets is not None:
            found = [loss.weight(i, target) for i, target in enumerate(source.targets)]
            weights = [source.sizes[i] if w is None else w for i, w in enumerate(found)]
            self.known = weights, sum(weights)

    def root(self, *args: Any) -> Tensor:
        """Notes a loss as :meth:`root_and_gradient` does; what goes back from a gradient of one."""
        loss, share = self.root_and_gradient(*args)
        return loss if share == 1 else loss * share

    def root_and_gradient(
        self, i: int, result: Any, output: Any, target: Any, known: Any = None
    ) -> tuple[Tensor, float]:
        """Notes the loss of a micro-batch: the ``result`` of the loss function.

        ``known`` is that attribute, brought to where the loss is; it stays there. It returns what
        the micro-batch goes back from, and the gradient of that.
        """
        if known is not None:
            self.known = known
        if self.known is not None:
            self._assumed = self.known[1]
        loss, weight, metrics = self._checked(i, result, target)
        self._losses[i], self._weights[i] = compact(loss.detach()), weight
        if metrics:
            self._metrics[i] = map_tensors(
                lambda ts: [compact(t.detach()) for t in ts], dict(metrics)
            )
        if self._assumed is None:
            first = weight if not self._several else self._by_size * self._sizes[0]
            if isinstance(first, Tensor):
                self._assumed = self.m * torch.where(first == 0, torch.ones_like(first), first)
            else:
                self._assumed = self.m * (first or 1)
        if not (self._by_size or (self.exact and isinstance(weight, Tensor))):
            loss = _with_a_part(loss, weight, output)
        share = self._share(weight, self._assumed)
        if not isinstance(share, Tensor) and self._accumulate == 1 and self._scaler is None:
            return loss, share  # the bits are those of going back from `loss * share`
        part: Tensor = self._part(loss, weight, self._assumed)
        if self._accumulate != 1:
            part = part / self._accumulate
        return part if self._scaler is None else self._scaler.scale(part), 1.0

    def noted(self, i: int) -> tuple[Any, ...]:
        return self._losses[i], self._weights[i], self._assumed, self._metrics[i]

    def bring(self, device: torch.device) -> None:
        self._losses, self._weights, self._metrics, self._assumed = map_tensors(
            lambda tensors: [moved(tensor, device) for tensor in tensors],
            [self._losses, self._weights, self._metrics, self._assumed],
        )

    @property
    def assumed(self) -> tuple[Weight, Weight | None] | None:
        """The weight by which micro-batches are divided, and the mini-batch's if that is another.

        None as long as it depends on the first loss.
        """
        if self.adds_up or self.known is not None:
            return (1.0 if self.known is None else self.known[1]), None
        if self._assumed is None or (self._returned is None and not self.exact):
            return None
        return self._assumed, self._sum() if self._total is None else None

    def factor(self) -> Weight | None:
        """What all gradients have yet to be multiplied by; None for nothing."""
        total, assumed = self._sum(), self._assumed
        if self.adds_up or assumed is None or self.known is not None:
            return None
        if isinstance(total, Tensor):  # where nothing counts all gradients are zero already
            return torch.where(total == 0, 1.0, assumed / total)
        if not isinstance(assumed, Tensor) and total == assumed:
            return None
        return assumed / total if total else None

    def loss(self, of: Sequence[int] | None = None, losses: list[Any] | None = None) -> Tensor:
        """The loss of some or all micro-batches, detached, or what other ``losses`` make."""
        weights = self._weights if of is None else [self._weights[i] for i in of]
        if losses is None:
            losses = self._losses if of is None else [self._losses[i] for i in of]
        loss: Tensor = self._combined(losses, weights, self._sum() if of is None else sum(weights))
        return loss

    def metrics(self) -> dict[str, Any] | None:
        """What came beside the losses, detached; None if nothing did.

        Numbers are combined as the losses are, all else is in lists, a value for each micro-batch.
        """
        if not any(self._metrics):
            return None
        found: dict[str, Any] = {}
        for name in self._metrics[0]:
            values = [metrics[name] for metrics in self._metrics]
            single = all(
                v.dim() == 0 and not v.is_complex() if isinstance(v, Tensor)
                else isinstance(v, numbers.Real)
                for v in values
            )  # fmt: skip
            found[name] = self._combined(values, self._weights, self._sum()) if single else values
        return found

    def _combined(self, values: list[Any], weights: list[Weight], whole: Weight) -> Any:
        parts = [
            self._part(value, weight, whole)
            for value, weight in zip(values, weights, strict=True)
            if self._by_size or isinstance(weight, Tensor) or weight
        ]
        return sum(parts[1:], parts[0]) if parts else values[0] * math.nan

    def _part(self, value: Any, weight: Weight, whole: Weight) -> Any:
        share: Any = self._share(weight, whole)
        if not isinstance(share, Tensor):
            return value if share == 1 else value * share
        if isinstance(value, Tensor):
            share = share.to(value.dtype) if value.is_floating_point() else share
        return torch.where(share == 0, 0.0, value * share)

    def _share(self, weight: Weight, whole: Weight) -> Weight:
        if self.adds_up:
            return 1.0
        if not isinstance(weight, Tensor) and not isinstance(whole, Tensor) and not whole:
            return math.nan
        return weight / whole

    def _sum(self) -> Weight:
        return sum(self._weights) if self._total is None else self._total

    def _checked(self, i: int, result: Any, target: Any) -> tuple[Tensor, Weight, Any]:
        metrics: Any = None
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
        names, weighted = sorted(map(str, metrics or ())), len(parts) == 2
        kind = "a loss" + " with a weight" * weighted + (f" and metrics {names}" if names else "")
        if self._returned is None:
            self._returned, self.came_with_weights = kind, weighted
            if weighted:
                self._by_size, self._total, self._assumed = False, None, None
        if kind != self._returned:
            raise ValueError(
                f"loss_fn returned {kind} for micro-batch {i}, and {self._returned} for the first "
                "one: return the same for each"
            )
        if weighted and (self.adds_up or self._loss.weigh is not None):
            given = "losses are sums (loss_reduction='sum')" if self.adds_up else "weight= is given"
            raise ValueError(f"loss_fn returned (loss, weight), but {given}: return the loss alone")
        found: Weight | None
        if weighted:
            found = _number(parts[1], "loss_fn returned")
        else:
            found = self._loss.weight(i, target) if self.known is None else self.known[0][i]
        weight = self._sizes[i] if found is None else found
        if isinstance(weight, Tensor):  # counts are often too large for half precision
            dtype = torch.promote_types(loss.dtype, torch.float32)
            weight = compact(moved(weight, loss.device, dtype))
        return loss if loss.dim() == 0 else loss.reshape(()), weight, metrics


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


class LossHead:
    """Takes the outputs of the last stage. Used by the worker of that stage.

    If it has replicas, by several: what they have in common changes under a lock, and nothing that
    is computed depends on who comes first. The loss function itself runs outside of it. Without an
    ``objective`` the outputs are all that is wanted.
    """

    given = staticmethod(distinct)  #: the tensors of an output whose gradients come from the loss

    def __init__(
        self, call: Call, objective: Any, leaves: Any = None, *, keep_outputs: bool,
        check: LossCheck | None = None,
    ) -> None:  # fmt: skip
        self._call, self._objective, self._leaves, self._check = call, objective, leaves, check
        self._lock = threading.Lock()
        self._entering = None if objective is None else objective.known
        self._known: dict[int, Any] = {}  # where each worker is
        draws = None if objective is None else objective.draws
        #: For each worker the generators that the loss function draws from, if that is known.
        self.draws: dict[int, int | None] = dict.fromkeys(call.pipeline.numbers[-1], draws)
        #: For each a parameter whose gradient tells of a backward.
        self._probes: dict[int, Tensor | None] = {
            j: next((p for p in leaves.parameters[j] if p.requires_grad), None)
            for j in (self.draws if leaves is not None else ())
        }
        self.outputs: list[Any] | None = [None] * call.m if keep_outputs else None  # detached
        self.goes_back = False  # whether any loss needed a gradient

    def take(self, j: int, i: int, output: Any, target: Any, cell: Cell) -> None:
        """Takes the output of a micro-batch; the cell learns how to go back."""
        if self.outputs is not None:
            self.outputs[i] = detached(output)
        if self._objective is not None:
            if self._call.state.grad:
                output, target = self._begun(output, target, cell)
            root, share = self._loss(j, i, (output, target))
            if root.requires_grad:
                self.goes_back = True
                cell.root = ends_of(root)[0], torch.full_like(root, share)
        if self.outputs is not None and self._call.m > 1:  # loss_fn may have written into it
            self.outputs[i] = map_tensors(lambda ts: [compact(t) for t in ts], self.outputs[i])

    def _begun(self, output: Any, target: Any, cell: Cell) -> tuple[Any, Any]:
        """Begins the graph of the loss, which goes on into the cell's unless that is recomputed.

        The loss is not recomputed with it: it stores little, and may have side effects.
        """
        ends = ends_of(distinct(output))  # now, for the loss function may write into it
        if cell.recomputation is None:
            cell.ends.append(ends)
        else:
            cell.expected += (len(ends),)
            cell.output, output = cut(output)
        cell.targets = [tensor for tensor in distinct(target) if tensor.requires_grad]
        if cell.targets:
            cell.target, target = cut(target)
        return output, target

    def _loss(self, j: int, i: int, given: tuple[Any, Any]) -> tuple[Tensor, float]:
        objective = self._objective
        try:
            if self._check is not None and j == self._call.pipeline.numbers[-1][0]:
                self._call.release_to_caller(j, self._check.keep(i, *given))
            # No border may notice a backward by the loss. A version may be that of a flat buffer.
            before = None if (probe := self._probes.get(j)) is None else probe.grad
            if probe is not None:
                probe.grad = None
            result, self.draws[j] = self._call.runs[j].draws.loss(
                i, objective.call, given, self.draws[j]
            )
            if probe is not None:
                if probe.grad is not None:
                    raise RuntimeError(_BACKWARD)
                probe.grad = before
            if j not in self._known and self._entering is not None:
                self._known[j] = self._call.to_stage(self._entering, j)
            with self._lock:
                root: tuple[Tensor, float] = objective.root_and_gradient(
                    i, result, *given, self._known.get(j)
                )
            self._call.release_to_caller(j, objective.noted(i))
            return root
        except BaseException as error:
            annotate(error, f"in loss_fn, micro-batch {i}")
            if isinstance(error, RuntimeError) and FOREIGN in str(error):
                raise RuntimeError(_BACKWARD) from error
            raise

    def go_back(self, j: int, i: int, cell: Cell) -> list[list[Tensor | None]]:
        """Backward of the loss of a micro-batch, and of the cell where their graphs are one.

        Otherwise it returns the gradients of the outputs, in a list.
        """
        if cell.root is not None:
            (root, grad), cell.root = cell.root, None
            begin = cell.border if cell.output is None else cell.output
            if not begin.open:
                raise RuntimeError(_BACKWARD)
            self._leaves.go_back(j, [root], [grad], cell, begin, cell.target)
        return [] if cell.output is None else [cell.output.grads]


class LossCounts:
    """The number of calls with each loss function, told apart by object.

    A function that is made anew for each call is the same one if its code and all that it has
    closed over are the same objects, or equal numbers or strings. Nothing is kept alive.
    """

    def __init__(self) -> None:
        # By what identifies a function: references, whose own identities these are, and the count.
        self._counts: dict[Any, tuple[Any, float]] = {}

    def count(self, function: Any, more: float) -> float:
        """Adds to the number of calls with a function, and returns that."""
        found: float = 0
        keys = []
        for parts in ([function], _parts(function)):
            references = list(map(_reference, parts))
            key = tuple([(type(r), r) if isinstance(r, SIMPLE) else id(r) for r in references])
            keys.append((key, references))
            if key in self._counts:
                found = max(found, self._counts[key][1])
        for key, references in keys if more else ():
            self._counts.pop(key, None)  # to the end
            self._counts[key] = references, found + more
        while len(self._counts) > _MOST_COUNTS:
            del self._counts[next(iter(self._counts))]
        return found + more

    def check(
        self, objective: Objective, targets: list[Any] | None, m: int, verify: bool | None
    ) -> LossCheck | None:
        """What checks the loss function in this call, if that is due or asked for."""
        function, exact = objective.function, objective.exact
        if verify is False:
            self.count(function, math.inf)
        if verify is False or m == 1 or (verify is None and exact):
            return None
        following = self.count(function, 0) + 1
        if verify is None and (following == math.inf or int(following) & int(following) - 1):
            self.count(function, 1)
            return None
        return LossCheck(objective, targets, asked=bool(verify))

    def compare(self, check: LossCheck, head: LossHead) -> None:
        """Checks the loss function, unless it draws random numbers; after a warning never again."""
        warned = not any(head.draws.values()) and check.compare()
        self.count(check.objective.function, math.inf if warned else 1)


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


class LossCheck:
    """Compares the loss of a mini-batch with that of its micro-batches.

    If it was ``asked`` for, an exception of ``loss_fn``, or outputs that cannot be put together, is
    the caller's to know; otherwise nothing is checked then.
    """

    def __init__(self, objective: Objective, targets: list[Any] | None, *, asked: bool) -> None:
        self.objective, self._asked = objective, asked
        self._kept: dict[int, tuple[Any, Any]] = {}
        self._bytes = 0
        # What all micro-batches have in common was not cut, and is not to be put together.
        first, second = [flatten(target)[0] for target in (targets or [(), ()])[:2]]
        self._common = [a is b for a, b in zip(first, second, strict=False)]

    def keep(self, i: int, output: Any, target: Any) -> tuple[Any, Any] | None:
        """Keeps what the loss function is going to be given, as long as there is room."""
        size = sum(tensor.nbytes for tensor in tensors_in(output))
        if len(self._kept) < 2 or self._bytes + size <= _MOST:
            self._bytes += size
            self._kept[i] = map_tensors(lambda ts: [t.detach().clone() for t in ts], output), target
        return self._kept.get(i)

    @torch.no_grad()
    def compare(self) -> bool:
        """Warns if the losses differ by more than rounding; whether it did."""
        objective = self.objective
        if objective.came_with_weights and not self._asked:
            return False  # somebody has thought about it
        try:
            found = self._whole()
        except Exception:
            # Perhaps the losses are in the outputs already, as means over each micro-batch.
            (i, (output, _)), *_ = self._kept.items()
            loss = objective.noted(i)[0]
            if any(tensor.dim() == 0 and tensor.equal(loss) for tensor in tensors_in(output)):
                warnings.warn(_BY_THE_MODEL, stacklevel=outside())
                return True
            if self._asked:
                raise
            return False
        if type(found) is not Tensor or found.device.type == "meta":
            return False
        whole, parts = float(found), float(objective.loss(list(self._kept)))
        rounding = _ROUNDING.get(found.dtype, 2e-2) * abs(whole)
        if not math.isfinite(whole) or abs(whole - parts) <= rounding:  # parts may be nan
            return False
        if self._goes_away(abs(whole - parts)):
            return False
        reason = (
            "it is no mean over samples. A mean over what is not masked needs weight=, such as "
            "weight=lambda target: (target != -100).sum(), or (loss, weight) from loss_fn; a sum "
            "over samples needs loss_reduction='sum'"
        )
        if objective.adds_up:
            reason = "it is no sum over samples. A mean over them needs loss_reduction='mean'"
        warnings.warn(
            f"loss_fn gives {whole:.6g} for {len(self._kept)} micro-batches at once, but put "
            f"together from each of them the loss is {parts:.6g}, and gradients are off likewise: "
            f"{reason}; a loss that compares samples needs them all, as loss_fn(pipe(input), "
            "target). If it is meant to be so: verify=False",
            stacklevel=outside(),
        )
        return True

    def _whole(self) -> Any:
        outputs, targets = zip(*self._kept.values(), strict=True)
        leaves, structure = flatten(gather(list(targets)))
        if any(self._common):
            shared = zip(self._common, flatten(targets[0])[0], leaves, strict=True)
            leaves = [first if common else joined for common, first, joined in shared]
        return self._called((gather(list(outputs)), unflatten(leaves, structure)))

    def _called(self, given: tuple[Any, Any]) -> Any:
        """What the loss function gives once more, which must not count."""
        function = self.objective.function
        module = function if isinstance(function, nn.Module) else nn.Module()
        call = torch.no_grad()(self.objective.call)
        result = undisturbed(lambda: unchanged(module, lambda: call(given)))
        return result[0] if isinstance(result, tuple) else result

    def _goes_away(self, difference: float) -> bool:
        """Whether a difference is rounding after all, which numbers of more digits have less of.

        A loss of about zero is the sum of larger numbers, and relative to itself it is far off.
        """
        try:
            self._kept = {i: map_tensors(_in_double, given) for i, given in self._kept.items()}
            losses = list(map(self._called, self._kept.values()))
            parts = self.objective.loss(list(self._kept), losses)
            return abs(float(self._whole()) - float(parts)) <= 1e-3 * difference
        except Exception:  # there are no such numbers on this device, or in this loss
            return False


def _in_double(tensors: list[Tensor]) -> list[Tensor]:
    return [t.to(torch.float64, copy=True) if t.is_floating_point() else t for t in tensors]
