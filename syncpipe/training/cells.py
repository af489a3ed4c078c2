"""What the training driver does for each action of a schedule.

Every cell (micro-batch ``i``, stage ``j``) has a small graph of its own. Who owns it: what is kept
of a cell is in the list of its stage, which only the worker of that stage touches. Performing the
backward takes it out; a call that fails drops all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from syncpipe.runtime.engine import Message
from syncpipe.runtime.errors import annotate
from syncpipe.runtime.randomness.random import undisturbed_draws
from syncpipe.runtime.thread_state import without_autocast
from syncpipe.schedules.kinds import Kind
from syncpipe.schedules.schedule import Action
from syncpipe.stages.inplace import sent
from syncpipe.stages.pipeline import Call
from syncpipe.training.border import Border
from syncpipe.training.kept import Kept, ends_of
from syncpipe.training.last_stage import LastStage
from syncpipe.training.leaves import Leaves
from syncpipe.training.sources import Source
from syncpipe.training.weight_gradients import Casts, WeightGradients, can_split
from syncpipe.tree import compact, distinct, map_tensors, tensors_in

__all__ = ["Cells"]

_MISSING = object()
_OWN = (0,)
_Range = torch._C._profiler._RecordFunctionFast


class _Parcel(NamedTuple):
    """What travels over an edge: forward a value, backward its gradients.

    Attributes:
        value: a tree of tensors without a graph; backward a list.
        event: tells when it is there.
        flags: for each tensor whether it needs a gradient; nothing on the way back.
        marks: for each tensor who else it belongs to; nothing on the way back.
    """

    value: Any
    event: Any
    flags: list[bool]
    marks: Sequence[int]


class Cells:
    """One mini-batch, as a task for the engine.

    Args:
        call: the call.
        source: where the micro-batches come from.
        last: takes the outputs.
        splits: the cells whose backward comes in two halves.
        leaves: what gets gradients; None if nothing does.

    Attributes:
        returned: tensors of the caller, with the gradients that go on into the caller's graph.
    """

    def __init__(
        self,
        call: Call,
        source: Source,
        last: LastStage,
        *,
        splits: frozenset[tuple[int, int]] = frozenset(),
        leaves: Leaves | None = None,
    ) -> None:
        stages = call.pipeline.stages
        self._call = call
        self._pipeline = call.pipeline
        self._source = source
        self._splits = splits
        self._last_stage = last
        self._last = len(stages) - 1
        self._targets_travel = source.comes and self._last > 0
        self._leaves: Any = leaves
        self._came: _Parcel | None = None  # a target that the first stage has for the last, itself
        self._kept: list[dict[int, Kept]] = [{} for _ in stages]
        self._halves: list[dict[int, WeightGradients]] = [{} for _ in stages]
        self._casts: list[Casts] = [{} for _ in stages]
        self._watched: list[dict[int, bool]] = [{} for _ in stages]
        self._can_split = [bool(splits) and can_split(stage.partition) for stage in stages]
        self.returned: list[tuple[Tensor, Tensor]] = []

    def needs(self, action: Action) -> Sequence[Hashable]:
        kind, i, j = action
        if kind == "forward":
            keys: list[Hashable] = [(edge.number, i) for edge in self._pipeline.incoming[j]]
            if j == self._last and self._targets_travel:
                keys.append(("target", i))
            return keys
        if kind in ("backward", "backward_input"):
            return [(~edge.number, i) for edge in self._pipeline.outgoing[j]]
        return ()

    def perform(self, action: Action, received: list[Any]) -> Iterable[Message]:
        kind, i, j = action
        lane = self._call.lane_of(j)
        with lane.active():
            for parcel in received:
                if parcel.event is not None:
                    lane.receive(parcel.event, tensors_in(parcel.value))
            with self._call.span(action):
                return _METHODS[kind](self, i, j, received)

    # -- forward

    def _forward(self, i: int, j: int, received: list[_Parcel]) -> list[Message]:
        messages: list[Message] = []
        target = _MISSING
        if j == self._last and self._targets_travel:
            target = self._call.bring(received[-1].value[0], j, received.pop().value[1])
        if j == 0:
            inputs, flags, counts, marks, beside = self._pulled(i, messages)
        else:
            inputs, flags, counts, marks = self._unpacked(j, received)
            beside = None
        kept = Kept(Border(flags), counts)
        outputs = self._computed(i, j, inputs, kept, marks, beside)
        lent: Sequence[int] = ()
        rematerialize = i < self._call.rematerialized[j]
        if j == 0 or rematerialize or any(marks):
            lent = self._pipeline.stages[j].handed_on(
                inputs, marks, outputs, self._call.batch, rematerialize=rematerialize
            )
        del inputs, beside
        if self._call.batch.state.grad:
            self._kept[j][i] = kept
        if j < self._last:
            return messages + self._packed(i, j, outputs, kept, lent)
        if self._came is not None:
            target = self._call.bring(self._came.value[0], j, self._came.value[1])
            self._came = None
        elif target is _MISSING:
            target = self._call.bring(self._source.target(i), j)
        self._last_stage.take(i, outputs[0], target, self._source.size(i), kept)
        return messages

    def _pulled(
        self, i: int, messages: list[Message]
    ) -> tuple[Any, list[bool], list[int], list[int], Any]:
        """The input of the first stage; adds to the messages what others need of it."""
        if self._source.comes:
            with undisturbed_draws(), self._call.as_caller():
                value, target = self._source.pull(i), self._source.target(i)
                ready = self._call.ready((value, target))
            value = self._call.bring(value, 0, ready)
            parcel = _Parcel((target, ready), None, [], [])
            if self._targets_travel:
                messages.append((self._pipeline.worker_of[self._last], ("target", i), parcel))
            else:
                self._came = parcel
        else:
            value, target = self._source.pull(i), self._source.beside(i)
        grad = self._call.batch.state.grad
        flags = [grad and tensor.requires_grad for tensor in tensors_in(value)]
        # Unlike detach(), `data` has a version counter of its own: the micro-batches are views of
        # one tensor, and what is done to one of them in place is nothing to the others.
        inputs = map_tensors(lambda tensors: [t.data for t in tensors], value)
        return (inputs, ()), flags, [], [], target

    def _unpacked(
        self, j: int, received: list[_Parcel]
    ) -> tuple[Any, list[bool], list[int], list[int]]:
        """The inputs of a stage that is not the first."""
        values: list[Any] = []
        flags: list[bool] = []
        counts: list[int] = []
        marks: list[int] = []
        for parcel in received:
            values.append(parcel.value)
            flags += parcel.flags
            counts.append(sum(parcel.flags))
            marks += parcel.marks
        received.clear()
        return (values[0], tuple(values[1:])), flags, counts, marks

    def _computed(
        self, i: int, j: int, inputs: Any, kept: Kept, marks: list[int], beside: Any
    ) -> Any:
        """The outputs of a cell; ``kept`` learns how it goes back."""
        stage, batch = self._pipeline.stages[j], self._call.batch
        given = kept.border.cross(inputs)
        if i < self._call.rematerialized[j]:
            outputs, kept.again = stage.forget(
                i, given, batch, kept=inputs, marks=marks, beside=beside
            )
            return outputs
        with self._recording(i, j, kept):
            outputs, _ = stage.forward(
                i, given, batch, rematerialize=False, marks=marks, beside=beside
            )
        return outputs

    def _recording(self, i: int, j: int, kept: Kept) -> AbstractContextManager[Any]:
        """The context of the forward (the last one) of a cell that may go back in halves."""
        if (i, j) not in self._splits or not self._can_split[j]:
            return nullcontext()
        kept.halves = WeightGradients(self._casts[j], self._watched[j])
        return kept.halves.recording()

    def _packed(
        self, i: int, j: int, outputs: Any, kept: Kept, lent: Sequence[int]
    ) -> list[Message]:
        """The outputs as messages to the stages that need them."""
        output, skips = outputs
        marks: list[Sequence[int]] = [_OWN]
        if lent or skips or not isinstance(output, Tensor):
            marks = sent(outputs, lent)
        messages: list[Message] = []
        for edge in self._pipeline.outgoing[j]:
            value, which = (output, 0) if edge.skip is None else (skips[edge.skip], 1 + edge.skip)
            flags = [tensor.requires_grad for tensor in tensors_in(value)]
            kept.expected.append(sum(flags))
            if kept.again is None:
                kept.ends.append(ends_of(value))
            value = map_tensors(lambda tensors: [t.detach() for t in tensors], value)
            value, event = self._call.over(edge, i, value)
            w = self._pipeline.worker_of[edge.target]
            messages.append((w, (edge.number, i), _Parcel(value, event, flags, marks[which])))
        return messages

    # -- backward

    def _recompute(self, i: int, j: int, received: list[_Parcel]) -> list[Message]:
        kept, stage = self._kept[j][i], self._pipeline.stages[j]
        again, kept.again = kept.again, None
        assert again is not None
        given = kept.border.cross(again.inputs)
        with self._recording(i, j, kept):
            output, skips = stage.again(again, given)
        if j == self._last:
            kept.ends.append(ends_of(distinct(output)))
        for edge in self._pipeline.outgoing[j]:
            kept.ends.append(ends_of(output if edge.skip is None else skips[edge.skip]))
        if [len(ends) for ends in kept.ends] != kept.expected:
            raise RuntimeError(
                f"{stage.describe(i)} gave other outputs when it was recomputed. Its layers must "
                "do the same both times; if one depends on a global or counts its calls, let it "
                "ask syncpipe.is_recomputing(), or use checkpoint='never'."
            )
        return []

    def _backward(self, i: int, j: int, received: list[_Parcel]) -> list[Message]:
        kept = self._kept[j].pop(i)
        grads: list[Any] = [parcel.value for parcel in received]
        received.clear()
        try:
            with (
                _Range(f"syncpipe backward stage {j} micro-batch {i}"),
                without_autocast(self._call.batch.state),
            ):
                self._pipeline.stages[j].backward(
                    i,
                    self._call.batch,
                    partial(kept.go_back, grads, partial(self._leaves.look, j)),
                )
                self._leaves.got(j)
        except BaseException as error:
            annotate(error, f"in backward of {self._pipeline.stages[j].describe(i)}")
            raise
        if kept.halves is not None:
            self._halves[j][i] = kept.halves
        if kept.target is not None:
            self._return(j, kept.targets, kept.target)
        if j == 0:
            self._return(j, self._source.inputs(i), kept.border)
        messages: list[Message] = []
        following = iter(kept.border.grads)
        for edge, count in zip(self._pipeline.incoming[j], kept.counts, strict=False):
            grads_there = list(islice(following, count))
            value, event = self._call.over(edge, i, grads_there, backward=True)
            w = self._pipeline.worker_of[edge.source]
            messages.append((w, (~edge.number, i), _Parcel(value, event, [], [])))
        return messages

    def _backward_weight(self, i: int, j: int, received: list[_Parcel]) -> list[Message]:
        halves = self._halves[j].pop(i, None)
        if halves is not None:
            halves.accumulate()
            self._leaves.got(j)
        return []

    def _return(self, j: int, tensors: list[Tensor], border: Border) -> None:
        """Notes gradients of what came from the caller."""
        for tensor, grad in zip(tensors, border.grads, strict=True):
            if grad is not None:
                grad = compact(grad)
                self._call.hand_over(j, grad)
                self.returned.append((tensor, grad))


# Not bound to an object, which would then hold itself.
_METHODS: dict[Kind, Callable[[Cells, int, int, list[_Parcel]], list[Message]]] = {
    "forward": Cells._forward,
    "recompute": Cells._recompute,
    "backward": Cells._backward,
    "backward_input": Cells._backward,
    "backward_weight": Cells._backward_weight,
}
