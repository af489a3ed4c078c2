"""The loss of a mini-batch, combined from the losses of its micro-batches.

A mean loss ``l_i`` has a weight ``w_i``: the number of samples, of elements, or of targets that are
not masked. The loss of the mini-batch is ``sum(w_i l_i) / W``, ``W`` the sum of weights, so the
backward of micro-batch ``i`` starts from ``(w_i / W) l_i``. A micro-batch of weight 0 adds nothing,
even if its mean is nan (``0 / 0``). A sum is a mean whose weights and ``W`` are 1.

Weights are **known** before anything runs, from the targets or ``weight=``, or **provisional**: the
loss function returns them. Provisional losses are divided by ``D``: ``W`` if samples and targets
determine it, else ``m w``, ``w`` the first weight (or the samples of micro-batch 0, if several
workers compute losses in any order). In the end all gradients are multiplied by ``D / W``.
"""

from __future__ import annotations

import math
import numbers
import threading
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from syncpipe.data.trees import distinct, map_tensors
from syncpipe.hints import warn_of_counts
from syncpipe.runtime.errors import annotate
from syncpipe.runtime.streams import moved
from syncpipe.stages.call import Call
from syncpipe.storage import own_storage
from syncpipe.training.cell import FOREIGN, Cell, cut_graph, detached, ends_of, with_own_storage
from syncpipe.training.loss_function import Loss, Returned, Weight, parse
from syncpipe.training.sources import Source

_BACKWARD = (
    "loss_fn must not call backward(): train_batch runs it, once for each micro-batch. Return the "
    "loss. (torch.autograd.grad of the loss by the output is possible)"
)


class Objective:
    """The losses of one mini-batch. One thread uses it at a time, also with ``several`` workers.

    Attributes:
        loss_fn: the loss function and its weights.
        known_weights: the weights and their sum, if they are known before anything runs; perhaps
            on another device than the last stage.
        is_sum: whether losses are sums over samples, so micro-batches add up.
        returns_weights: whether the loss function returned a weight with each loss.
    """

    def __init__(
        self, loss_fn: Loss, source: Source, several: bool = False, scaler: Any = None,
        accumulate: float = 1,
    ) -> None:  # fmt: skip
        self.loss_fn, self._scaler, self._accumulate = loss_fn, scaler, accumulate
        self.m = m = source.m
        self.call_loss, self.draws = loss_fn.call, loss_fn.draws
        self.sizes, self._several = source.sizes, several
        self.is_sum = loss_fn.reduction == "sum"
        self.returns_weights = False
        self._kind: str | None = None  # what loss_fn returns, for messages
        self._losses: list[Any] = [None] * m
        self._weights: list[Weight] = [1] * m
        self._metrics: list[dict[str, Any]] = [{} for _ in range(m)]
        if isinstance(loss_fn.weigh, tuple) and len(loss_fn.weigh) != m:
            raise ValueError(
                f"weight has {len(loss_fn.weigh)} numbers, but there are {m} micro-batches: give "
                "one for each of them, or a function of the target"
            )
        self.known_weights: tuple[list[Weight], Weight] | None = None
        self._divisor: Weight | None = None
        if self.is_sum:
            self.known_weights = [1.0] * m, 1.0
        elif loss_fn.weigh is None:
            self._divisor = loss_fn.total(source.targets, source.total)
        elif source.targets is not None:
            found = [loss_fn.weight(i, target) for i, target in enumerate(source.targets)]
            weights = [source.sizes[i] if w is None else w for i, w in enumerate(found)]
            self.known_weights = weights, sum(weights)

    def root(self, *args: Any) -> Tensor:
        """As :meth:`root_and_gradient`; returns a root whose gradient is 1."""
        loss, share = self.root_and_gradient(*args)
        return loss if share == 1 else loss * share

    def root_and_gradient(
        self, i: int, result: Any, output: Any, target: Any, known: Any = None
    ) -> tuple[Tensor, float]:
        """Notes the ``result`` of the loss function; returns the root of backward and its gradient.

        ``known`` replaces ``known_weights``: the same on the device of the loss.
        """
        if known is not None:
            self.known_weights = known
        returned = self._check_kind(i, parse(result))
        loss, weight = returned.loss, self._weight(i, returned, output, target)
        self._losses[i], self._weights[i] = own_storage(loss.detach()), weight
        if returned.metrics:
            self._metrics[i] = with_own_storage(detached(dict(returned.metrics)))
        if self.known_weights is not None:
            self._divisor = self.known_weights[1]
        elif self._divisor is None:
            first = self.sizes[0] if self._several else weight
            if isinstance(first, Tensor):
                first = torch.where(first == 0, torch.ones_like(first), first)
            self._divisor = self.m * (first if isinstance(first, Tensor) else first or 1)
        if not self.loss_fn.exact if isinstance(weight, Tensor) else not weight:
            loss = _with_zero_gradient(loss, weight, output)
        share = self._share(weight, self._divisor)
        if not isinstance(share, Tensor) and self._accumulate == 1 and self._scaler is None:
            return loss, share  # the same bits as a backward from `loss * share`
        part: Tensor = self._part(loss, weight, self._divisor)
        if self._accumulate != 1:
            part = part / self._accumulate
        return part if self._scaler is None else self._scaler.scale(part), 1.0

    def records(self, i: int) -> tuple[Any, ...]:
        return self._losses[i], self._weights[i], self._divisor, self._metrics[i]

    def bring(self, device: torch.device) -> None:
        self._losses, self._weights, self._metrics, self._divisor, self.known_weights = map_tensors(
            lambda tensors: [moved(tensor, device) for tensor in tensors],
            [self._losses, self._weights, self._metrics, self._divisor, self.known_weights],
        )

    @property
    def divisor(self) -> Weight | None:
        """The number that losses are divided by; None while it depends on the first of them."""
        if self.known_weights is not None:
            return self.known_weights[1]
        return self._divisor if self._kind is not None or self.loss_fn.exact else None

    def total(self) -> Weight:
        """The sum of the weights."""
        return sum(self._weights) if self.known_weights is None else self.known_weights[1]

    def factor(self) -> Weight | None:
        """The factor that all gradients have yet to be multiplied by; None for 1."""
        total, divisor = self.total(), self._divisor
        if self.known_weights is not None or divisor is None:
            return None
        if isinstance(total, Tensor):  # with a total of 0 all gradients are zero already
            return torch.where(total == 0, 1.0, divisor / total)
        if not isinstance(divisor, Tensor) and total == divisor:
            return None
        return divisor / total if total else None

    def loss(self, indices: Sequence[int] | None = None, losses: list[Any] | None = None) -> Tensor:
        """The combined loss of micro-batches (None: all), detached; or other ``losses`` of them."""
        found = self._losses if indices is None else [self._losses[i] for i in indices]
        loss: Tensor = self.combine(losses or found, indices)
        return loss

    def metrics(self) -> dict[str, Any] | None:
        """The metrics, detached, or None: numbers combined as the losses are, others in lists."""
        if not any(self._metrics):
            return None
        found: dict[str, Any] = {}
        for name in self._metrics[0]:
            values = [metrics[name] for metrics in self._metrics]
            if not self.is_sum:
                warn_of_counts(name, values)
            single = all(
                v.dim() == 0 and not v.is_complex() if isinstance(v, Tensor)
                else isinstance(v, numbers.Real)
                for v in values
            )  # fmt: skip
            found[name] = self.combine(values) if single else values
        return found

    def combine(self, values: list[Any], indices: Sequence[int] | None = None) -> Any:
        """Combines values of all micro-batches, or some, as their losses are combined."""
        weights = self._weights if indices is None else [self._weights[i] for i in indices]
        total = self.total() if indices is None or self.is_sum else sum(weights)
        parts = [
            self._part(value, weight, total)
            for value, weight in zip(values, weights, strict=True)
            if isinstance(weight, Tensor) or weight
        ]
        return sum(parts[1:], parts[0]) if parts else values[0] * math.nan

    def _part(self, value: Any, weight: Weight, total: Weight) -> Any:
        share: Any = self._share(weight, total)
        if not isinstance(share, Tensor):
            return value if share == 1 else value * share
        if isinstance(value, Tensor):
            share = share.to(value.dtype) if value.is_floating_point() else share
        return torch.where(share == 0, 0.0, value * share)

    def _share(self, weight: Weight, total: Weight) -> Weight:
        if not isinstance(weight, Tensor) and not isinstance(total, Tensor) and not total:
            return math.nan
        return weight / total

    def _check_kind(self, i: int, returned: Returned) -> Returned:
        """The result, unless it contradicts the first one or an argument (ValueError)."""
        weighted, kind = returned.weight is not None, returned.kind
        if self._kind is None:
            self._kind, self.returns_weights = kind, weighted
            if weighted:
                self._divisor = None
        if kind != self._kind:
            raise ValueError(
                f"loss_fn returned {kind} for micro-batch {i}, and {self._kind} for the first"
            )
        if weighted and (self.is_sum or self.loss_fn.weigh is not None):
            given = "losses are sums (loss_reduction='sum')" if self.is_sum else "weight= is given"
            raise ValueError(f"loss_fn returned (loss, weight), but {given}: return the loss alone")
        return returned

    def _weight(self, i: int, returned: Returned, output: Any, target: Any) -> Weight:
        """The weight of a micro-batch; a tensor is on the device of the loss."""
        weight, loss = returned.weight, returned.loss
        if self.known_weights is not None:
            weight = self.known_weights[0][i]
        elif weight is None:
            weight = self.loss_fn.weight(i, target, output)
        if weight is None:
            weight = self.sizes[i]
        if isinstance(weight, Tensor):  # counts overflow in half precision
            dtype = torch.promote_types(loss.dtype, torch.float32)
            weight = own_storage(moved(weight, loss.device, dtype))
        return weight


def _with_zero_gradient(loss: Tensor, weight: Weight, output: Any) -> Tensor:
    """A loss with a zero gradient if its weight is 0, even if its value is nan."""
    if isinstance(weight, Tensor):  # without a synchronization for its value

        def masked(grad: Tensor) -> Tensor:
            return torch.where(weight == 0, 0.0, grad)

        for tensor in distinct(output):
            if tensor.requires_grad:
                tensor.register_hook(masked)  # type: ignore[no-untyped-call]
    elif not weight and loss.requires_grad:
        nothing = loss.detach() * 0
        for tensor in distinct(output):
            if tensor.requires_grad:
                nothing = nothing + tensor.reshape(-1)[:0].abs().sum()
        return torch.nan_to_num(nothing)
    return loss


class LossHead:
    """Takes the outputs of the last stage, on the worker or workers that run it.

    They change the shared state under a lock, and no result depends on their order. The loss
    function runs outside the lock. A ``check`` keeps arguments of the loss function on the first
    of them.
    """

    graph_outputs = staticmethod(distinct)  #: the tensors of an output that may get gradients

    def __init__(
        self, call: Call, objective: Any, leaves: Any = None, *, keep_outputs: bool = False,
        check: Any = None,
    ) -> None:  # fmt: skip
        self._call, self._objective, self._leaves, self.check = call, objective, leaves, check
        self._lock = threading.Lock()
        #: The known weights on the device of a stage, after the work of the caller.
        self._weights_on = cache(partial(call.to_stage, objective.known_weights))
        #: For each worker the generators that the loss function draws from; None: unknown.
        self.draws: dict[int, int | None] = dict.fromkeys(
            call.pipeline.indices[-1], objective.draws
        )
        #: For each worker a parameter that shows whether the loss function called backward().
        self._probes: dict[int, Tensor | None] = {
            r: next((p for p in leaves.parameters[r] if p.requires_grad), None)
            for r in (self.draws if leaves is not None else ())
        }
        self.outputs: list[Any] | None = [None] * call.m if keep_outputs else None  # detached
        self.loss_requires_grad = False  # whether any loss does

    def take(self, r: int, i: int, output: Any, target: Any, cell: Cell) -> None:
        """Takes the output of a micro-batch, and gives its cell the root of backward."""
        if self.outputs is not None:
            self.outputs[i] = detached(output)
        if self._call.state.grad:
            output, target = self._begin_loss_graph(output, target, cell)
        root, share = self._loss(r, i, (output, target))
        if root.requires_grad:
            self.loss_requires_grad = True
            cell.root = ends_of(root)[0], torch.full_like(root, share)
        if self.outputs is not None and self._call.m > 1:  # now, as loss_fn may modify the output
            self.outputs[i] = with_own_storage(self.outputs[i])

    def _begin_loss_graph(self, output: Any, target: Any, cell: Cell) -> tuple[Any, Any]:
        """Connects the graph of the loss to the cell's; cuts it if only the cell is recomputed."""
        ends = ends_of(distinct(output))  # before the loss function modifies it in place
        if cell.recomputation is None:
            cell.ends.append(ends)
        else:
            cell.expected_ends += (len(ends),)
            cell.output_cut, output = cut_graph(output)
        cell.targets = [tensor for tensor in distinct(target) if tensor.requires_grad]
        if cell.targets:
            cell.target_cut, target = cut_graph(target)
        return output, target

    def _loss(self, r: int, i: int, given: tuple[Any, Any]) -> tuple[Tensor, float]:
        objective = self._objective
        try:
            if self.check is not None and r == self._call.pipeline.n - 1:
                self._call.release_to_caller(r, self.check.keep(i, *given))
            # A backward by loss_fn may reach no cut, so .grad of a parameter reveals it. (Its
            # version would not: that of a flat buffer counts other writes, too.)
            before = None if (probe := self._probes.get(r)) is None else probe.grad
            if probe is not None:
                probe.grad = None
            result, self.draws[r] = self._call.runs[r].drawing.loss(
                i, objective.call_loss, given, self.draws[r]
            )
            if probe is not None:
                if probe.grad is not None:
                    raise RuntimeError(_BACKWARD)
                probe.grad = before
            known = self._weights_on(r)
            with self._lock:
                root: tuple[Tensor, float] = objective.root_and_gradient(i, result, *given, known)
            self._call.release_to_caller(r, objective.records(i))
            return root
        except BaseException as error:
            annotate(error, f"in loss_fn, micro-batch {i}")
            if isinstance(error, RuntimeError) and FOREIGN in str(error):
                raise RuntimeError(_BACKWARD) from error
            raise

    def go_back(self, r: int, i: int, cell: Cell) -> list[list[Tensor | None]]:
        """Backward of a loss and, if connected, of its cell; else returns gradients of outputs."""
        if cell.root is not None:
            (root, grad), cell.root = cell.root, None
            begin = cell.cut if cell.output_cut is None else cell.output_cut
            if not begin.open:
                raise RuntimeError(_BACKWARD)
            self._leaves.go_back(r, [root], [grad], cell, begin, cell.target_cut)
        return [] if cell.output_cut is None else [cell.output_cut.grads]
