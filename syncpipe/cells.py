"""What the training driver does for each action of a schedule.

Every cell (micro-batch ``i``, stage ``j``) has a small graph of its own:

    forward   x --> Border --> stage --> y            y goes on without a graph
    backward  gx <-- Border <-- stage <-- gy          gy comes from the stage (or stages) y went to

Who owns what: what is kept of a cell from its forward to its backward is a :class:`_Kept`, in the
list of its stage, which only the worker of that stage touches. It holds the ends of the graph (not
the outputs themselves, which are the next stage's business), or for a re-materialized cell its
inputs. Performing the backward takes it out; a call that fails drops them all.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from syncpipe.objective import Objective
from syncpipe.pipeline import Call, events_of
from syncpipe.runtime.again import Again
from syncpipe.runtime.border import Border
from syncpipe.runtime.engine import Message
from syncpipe.runtime.errors import annotate
from syncpipe.runtime.gradients import Gradients
from syncpipe.runtime.weight_gradients import Casts, WeightGradients, can_split
from syncpipe.schedule import Action, Kind
from syncpipe.sources import Source
from syncpipe.tree import aliased, map_tensors, tensors_in

__all__ = ["Cells"]

_Range = torch._C._profiler._RecordFunctionFast


class _Parcel(NamedTuple):
    """What travels over an edge: forward a value, backward its gradients.

    Attributes:
        value: a tree of tensors without a graph; backward a list.
        event: tells when it is there.
        flags: for each tensor whether it needs a gradient; nothing on the way back.
        alias: for each tensor whether it shares memory with another one that was sent.
    """

    value: Any
    event: Any
    flags: list[bool]
    alias: list[bool]


@dataclass(slots=True)
class _Kept:
    """What is kept of a cell until its backward.

    Attributes:
        border: the inputs of its graph.
        counts: for each incoming edge how many of the border's gradients go back over it.
        ends: for each outgoing edge the outputs that need a gradient, as ends of the graph.
        expected: how many of these there are, for each edge.
        again: recomputes the cell; then there are no ends yet.
        root: what a last stage goes back from.
        output: where the graph of the loss begins, if that is one of its own.
        target: the border of the targets, if they need a gradient.
        halves: keeps the weight gradients for later, if the backward is split.
    """

    border: Border
    counts: list[int]
    ends: list[list[GradientEdge]] = field(default_factory=list)
    expected: list[int] = field(default_factory=list)
    again: Again | None = None
    root: Tensor | None = None
    output: Border | None = None
    target: Border | None = None
    halves: WeightGradients | None = None


class Cells:
    """One mini-batch, as a task for the engine.

    Args:
        call: the call.
        source: where the micro-batches come from.
        objective: what to make of the outputs; None for nothing.
        gradients: what to put back if the call fails.
        splits: the cells whose backward comes in two halves.
        keep_outputs: whether the outputs are wanted.

    Attributes:
        keep_outputs: the same.
        outputs: for each micro-batch its output, detached.
        returned: tensors of the caller, with the gradients that go on into the caller's graph.
        goes_back: whether any loss needed a gradient.
    """

    def __init__(
        self,
        call: Call,
        source: Source,
        objective: Objective | None,
        gradients: Gradients | None,
        *,
        splits: frozenset[tuple[int, int]] = frozenset(),
        keep_outputs: bool,
    ) -> None:
        self._call = call
        self._pipeline = call.pipeline
        self._source = source
        self._objective = objective
        self._gradients = gradients
        self._splits = splits
        self.keep_outputs = keep_outputs
        self._last = len(call.pipeline.stages) - 1
        self._kept: list[dict[int, _Kept]] = [{} for _ in call.pipeline.stages]
        self._halves: list[dict[int, WeightGradients]] = [{} for _ in call.pipeline.stages]
        self._casts: list[Casts] = [{} for _ in call.pipeline.stages]
        self._can_split = [
            bool(splits) and can_split(stage.partition) for stage in call.pipeline.stages
        ]
        self._loss_draws: int | None = None  # generators that the loss function draws from
        self._perform: dict[Kind, Callable[[int, int, list[_Parcel]], list[Message]]] = {
            "forward": self._forward,
            "recompute": self._recompute,
            "backward": self._backward,
            "backward_input": self._backward,
            "backward_weight": self._backward_weight,
        }
        self.outputs: list[Any] = [None] * call.batch.m
        self.returned: list[tuple[Tensor, Tensor]] = []
        self.goes_back = False

    def needs(self, action: Action) -> Sequence[Hashable]:
        kind, i, j = action
        if kind == "forward":
            keys: list[Hashable] = [(edge.number, i) for edge in self._pipeline.incoming[j]]
            if j == self._last and self._source.sends_targets:
                keys.append(("target", i))
            return keys
        if kind in ("backward", "backward_input"):
            return [(~edge.number, i) for edge in self._pipeline.outgoing[j]]
        return ()

    def perform(self, action: Action, received: list[Any]) -> Iterable[Message]:
        kind, i, j = action
        with self._call.lane_of(j).active():
            return self._perform[kind](i, j, received)

    # -- forward

    def _forward(self, i: int, j: int, received: list[_Parcel]) -> list[Message]:
        messages: list[Message] = []
        target = None
        if j == self._last and self._source.sends_targets:
            target = self._call.bring(received[-1].value, j, received.pop().event)
        if j == 0:
            inputs, flags, counts, alias = self._pulled(i, messages)
        else:
            inputs, flags, counts, alias = self._unpacked(j, received)
        kept = _Kept(Border(flags), counts)
        outputs = self._computed(i, j, inputs, kept, alias)
        del inputs
        if j < self._last:
            return messages + self._packed(i, j, outputs, kept)
        if not self._source.sends_targets:
            target = self._call.bring(self._source.target(i), j)
        self._finish(i, j, outputs[0], target, kept)
        return messages

    def _pulled(
        self, i: int, messages: list[Message]
    ) -> tuple[Any, list[bool], list[int], list[bool]]:
        """The input of the first stage; adds to the messages what others need of it."""
        value, target = self._source.pull(i)
        if self._source.sends_targets:
            value = self._call.bring(value, 0, events_of(value))
            parcel = _Parcel(target, events_of(target), [], [])
            messages.append((self._pipeline.worker_of[self._last], ("target", i), parcel))
        grad = self._call.batch.state.grad
        flags = [grad and tensor.requires_grad for tensor in tensors_in(value)]
        inputs = map_tensors(lambda tensors: [t.detach() for t in tensors], value)
        return (inputs, ()), flags, [], []

    def _unpacked(
        self, j: int, received: list[_Parcel]
    ) -> tuple[Any, list[bool], list[int], list[bool]]:
        """The inputs of a stage that is not the first."""
        values: list[Any] = []
        flags: list[bool] = []
        counts: list[int] = []
        alias: list[bool] = []
        for parcel in received:
            values.append(self._arrived(j, parcel).value)
            flags += parcel.flags
            counts.append(sum(parcel.flags))
            alias += parcel.alias
        received.clear()
        return (values[0], tuple(values[1:])), flags, counts, alias

    def _computed(self, i: int, j: int, inputs: Any, kept: _Kept, alias: list[bool]) -> Any:
        """The outputs of a cell; ``kept`` learns how it goes back."""
        stage, batch = self._pipeline.stages[j], self._call.batch
        given = kept.border.cross(inputs)
        if i < self._call.rematerialized:
            outputs, kept.again = stage.forget(i, given, batch, kept=inputs, alias=alias)
            return outputs
        with self._recording(i, j, kept):
            outputs, _ = stage.forward(i, given, batch, rematerialize=False, alias=alias)
        return outputs

    def _recording(self, i: int, j: int, kept: _Kept) -> AbstractContextManager[Any]:
        """The context of the forward (the last one) of a cell that may go back in halves."""
        if (i, j) not in self._splits or not self._can_split[j]:
            return nullcontext()
        kept.halves = WeightGradients(self._casts[j])
        return kept.halves.recording()

    def _packed(self, i: int, j: int, outputs: Any, kept: _Kept) -> list[Message]:
        """The outputs as messages to the stages that need them."""
        output, skips = outputs
        alias = iter(aliased(outputs) if skips or not isinstance(output, Tensor) else [False])
        aliases = [list(islice(alias, len(tensors_in(part)))) for part in (output, *skips)]
        messages: list[Message] = []
        for edge in self._pipeline.outgoing[j]:
            value, which = (output, 0) if edge.skip is None else (skips[edge.skip], 1 + edge.skip)
            flags = [tensor.requires_grad for tensor in tensors_in(value)]
            kept.expected.append(sum(flags))
            if kept.again is None:
                kept.ends.append(_ends(value))
            value = map_tensors(lambda tensors: [t.detach() for t in tensors], value)
            value, event = self._call.over(edge, i, value)
            w = self._pipeline.worker_of[edge.target]
            messages.append((w, (edge.number, i), _Parcel(value, event, flags, aliases[which])))
        if self._call.batch.state.grad:
            self._kept[j][i] = kept
        return messages

    def _finish(self, i: int, j: int, output: Any, target: Any, kept: _Kept) -> None:
        """What the last stage does with its output."""
        if self.keep_outputs:
            self.outputs[i] = map_tensors(lambda tensors: [t.detach() for t in tensors], output)
        if self._objective is None:
            return
        grad = self._call.batch.state.grad
        if kept.again is not None:
            # The loss is not recomputed: what it stores is small, and it may have side effects.
            flags = [tensor.requires_grad for tensor in tensors_in(output)]
            kept.output = Border(flags)
            kept.expected.append(sum(flags))
            output = map_tensors(lambda tensors: [t.detach() for t in tensors], output)
            output = kept.output.cross(output)
        targets = [tensor for tensor in tensors_in(target) if tensor.requires_grad]
        if grad and targets:
            kept.target = Border([tensor.requires_grad for tensor in tensors_in(target)])
            detached = map_tensors(lambda tensors: [t.detach() for t in tensors], target)
            target = kept.target.cross(detached)
        root = self._loss(i, j, output, target)
        if not grad:
            return
        if root.requires_grad:
            self.goes_back = True
            kept.root = root
            assert self._gradients is not None
            for leaf in _leaves(root, (output, target)):
                self._gradients.watch(leaf)
        self._kept[j][i] = kept

    def _loss(self, i: int, j: int, output: Any, target: Any) -> Tensor:
        assert self._objective is not None
        stage = self._pipeline.stages[j]
        try:
            result, self._loss_draws = stage.beyond(
                i, self._call.batch, self._objective.call, (output, target), self._loss_draws
            )
            return self._objective.root(i, result, self._source.size(i))
        except BaseException as error:
            annotate(error, f"in loss_fn, micro-batch {i}")
            raise

    # -- backward

    def _recompute(self, i: int, j: int, received: list[_Parcel]) -> list[Message]:
        kept, stage = self._kept[j][i], self._pipeline.stages[j]
        again, kept.again = kept.again, None
        assert again is not None
        given = kept.border.cross(again.inputs)
        with self._recording(i, j, kept):
            output, skips = stage.again(again, given)
        if j == self._last:
            kept.ends.append(_ends(output))
        for edge in self._pipeline.outgoing[j]:
            kept.ends.append(_ends(output if edge.skip is None else skips[edge.skip]))
        if [len(ends) for ends in kept.ends] != kept.expected:
            raise RuntimeError(
                f"{stage.describe(i)} gave other outputs when it was recomputed. Its layers must "
                "do the same both times; if one depends on a global or counts its calls, let it "
                "ask syncpipe.is_recomputing(), or use checkpoint='never'."
            )
        return []

    def _backward(self, i: int, j: int, received: list[_Parcel]) -> list[Message]:
        kept = self._kept[j].pop(i)
        grads: list[Any] = [self._arrived(j, parcel).value for parcel in received]
        received.clear()
        try:
            with _Range(f"syncpipe backward stage {j} micro-batch {i}"), self._quiet():
                self._go_back(kept, grads)
        except BaseException as error:
            annotate(error, f"in backward of {self._pipeline.stages[j].describe(i)}")
            raise
        if kept.halves is not None:
            self._halves[j][i] = kept.halves
        if kept.target is not None:
            self._return(self._source.targets(i), kept.target)
        if j == 0:
            self._return(self._source.inputs(i), kept.border)
        messages: list[Message] = []
        following = iter(kept.border.grads)
        for edge, count in zip(self._pipeline.incoming[j], kept.counts, strict=False):
            grads_there = list(islice(following, count))
            value, event = self._call.over(edge, i, grads_there, backward=True)
            w = self._pipeline.worker_of[edge.source]
            messages.append((w, (~edge.number, i), _Parcel(value, event, [], [])))
        return messages

    def _go_back(self, kept: _Kept, grads: list[list[Tensor | None]]) -> None:
        """Backward through the graph of one cell."""
        roots: list[Any] = []
        given: list[Any] = []
        if kept.root is not None and kept.output is None:
            roots, given = [kept.root], [None]
        elif kept.root is not None and kept.output is not None:
            torch.autograd.backward(kept.root)
            grads = [kept.output.grads]
        for ends, arrived in zip(kept.ends, grads, strict=False):
            for end, grad in zip(ends, arrived, strict=True):
                if grad is not None:
                    roots.append(end)
                    given.append(grad)
        grads.clear()
        if not roots:
            return
        with nullcontext() if kept.halves is None else kept.halves.splitting():
            torch.autograd.backward(roots, given)

    def _backward_weight(self, i: int, j: int, received: list[_Parcel]) -> list[Message]:
        halves = self._halves[j].pop(i, None)
        if halves is not None:
            halves.accumulate()
        return []

    def _return(self, tensors: list[Tensor], border: Border) -> None:
        """Notes gradients of what came from the caller."""
        for tensor, grad in zip(tensors, border.grads, strict=True):
            if grad is not None:
                self.returned.append((tensor, grad))

    def _quiet(self) -> AbstractContextManager[Any]:
        """Backward as after ``with torch.autocast(...)``: it has no say in it."""
        enabled = [name for name, on, _ in self._call.batch.state.autocast.enabled if on]
        if not enabled:
            return nullcontext()
        stack = ExitStack()
        for name in enabled:
            stack.enter_context(torch.autocast(name, enabled=False))
        return stack

    # -- on the way

    def _arrived(self, j: int, parcel: _Parcel) -> _Parcel:
        """Has the stage's stream wait for what was sent to it."""
        if parcel.event is not None:
            self._call.lane_of(j).receive(parcel.event, tensors_in(parcel.value))
        return parcel


def _ends(value: Any) -> list[GradientEdge]:
    """Where the graph of the tensors of a tree ends; those that need no gradient have none."""
    return [get_gradient_edge(tensor) for tensor in tensors_in(value) if tensor.requires_grad]


def _leaves(root: Tensor, given: Any) -> list[Tensor]:
    """The leaves that a loss depends on, but for those behind what it was given."""
    seen = {tensor.grad_fn for tensor in tensors_in(given)}
    pending: list[Any] = [root.grad_fn]
    leaves = []
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == "torch::autograd::AccumulateGrad":
            leaves.append(node.variable)
        pending += [following for following, _ in node.next_functions]
    return leaves
