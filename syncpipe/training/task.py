"""What the training driver does for each action of a schedule.

Every cell (micro-batch ``i``, stage ``j``) has a small graph of its own. Who owns it: what is kept
of a cell is in the list of its stage, which only the worker of that stage touches. Performing the
backward takes it out; a call that fails drops all of them. (A replica counts as a stage of its own,
see ``Call``.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from itertools import chain, islice
from operator import itemgetter
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd import profiler

from syncpipe.data import compact, map_tensors, tensors_in
from syncpipe.runtime.engine import Run
from syncpipe.runtime.errors import annotate
from syncpipe.runtime.random_numbers import undisturbed
from syncpipe.runtime.recorder import as_range
from syncpipe.runtime.thread_state import without_autocast
from syncpipe.schedules.schedule import Kind
from syncpipe.stages.call import Call, sent
from syncpipe.stages.inplace import handed_on, sent_marks
from syncpipe.stages.run import Inputs
from syncpipe.training.cell import Border, Cell, ends_of
from syncpipe.training.sources import Source
from syncpipe.training.weight_gradients import WeightGradients

__all__ = ["Parcel", "TrainingTask", "Watch"]


#: Puts something around what performs the actions of a kind on a stage.
Watch = Callable[[Kind, int, Run], Run]


class Parcel(NamedTuple):
    """What travels over an edge.

    Attributes:
        value: a tree of tensors, or on the way back a list of gradients.
        event: tells when it is there.
        marks: for each tensor of the value who else it belongs to (see ``inplace``).
        flags: for each whether it needs a gradient.
    """

    value: Any
    event: Any = None
    marks: Sequence[int] = ()
    flags: Sequence[bool] = ()


#: A :class:`Parcel` from a tuple of all that is in it, without a way through Python.
_parcel: Callable[[tuple[Any, ...]], Parcel] = partial(tuple.__new__, Parcel)
_VALUE = itemgetter(0)


class TrainingTask:
    """One mini-batch, as a task for the engine.

    Args:
        call: the call.
        source: where the micro-batches come from.
        head: takes the outputs.
        splits: the cells whose backward comes in two halves.
        leaves: what gets gradients; None if nothing does.
        watch: is shown what performs the actions of a kind on a stage, and may put something around
            it.

    Attributes:
        targets_travel: whether the first stage sends targets to the last one.
        entered: for each micro-batch the gradients of the tensors that entered the first stage.
    """

    def __init__(
        self,
        call: Call,
        source: Source,
        head: Any,
        *,
        splits: frozenset[tuple[int, int]] = frozenset(),
        leaves: Any = None,
        watch: Watch | None = None,
    ) -> None:
        stages = call.pipeline.stages
        self.call, self._pipeline, self._ties = call, call.pipeline, call.ties
        self._source, self._head, self._leaves = source, head, leaves
        self._splits, self._watch = splits, watch
        self._first = [stage.j == 0 for stage in stages]
        self._last = [stage.j == call.pipeline.n - 1 for stage in stages]
        self._several = len(call.pipeline.numbers[-1]) > 1  # compute losses of a mini-batch
        self.targets_travel = source.lazy and call.pipeline.n > 1
        self._cells: list[dict[int, Cell]] = [{} for _ in stages]
        self._halves: list[dict[int, WeightGradients]] = [{} for _ in stages]
        #: By identity of a leaf whether its gradient may wait for the weight half.
        self._ordinary: list[dict[int, bool]] = [{} for _ in stages]
        if call.ties is not None:  # their gradients go on with the input half
            self._ordinary = [{id(leaf): False for leaf in leaves} for leaves in call.ties.leaves]
        self._keep = False
        self._targets: list[list[tuple[Tensor, Tensor]]] = [[] for _ in stages]
        self.entered: dict[int, list[Tensor | None]] = {}

    @property
    def returned(self) -> list[tuple[Tensor, Tensor]]:
        """Tensors of the caller, with the gradients that go on into the caller's graph."""
        pairs = [
            (tensor, grad)
            for i, grads in sorted(self.entered.items())
            for tensor, grad in zip(self._source.inputs(i), grads, strict=True)
            if grad is not None
        ]
        return [*pairs, *chain.from_iterable(self._targets)]

    def going_back(self, leaves: Any, head: Any, *, keep: bool) -> TrainingTask:
        """The task of the second half alone: for one of several backwards, if they are kept."""
        other = copy(self)
        other._leaves, other._head, other._keep, other.entered = leaves, head, keep, {}
        if keep:
            other._cells = [{i: cell.copy() for i, cell in row.items()} for row in self._cells]
        return other

    def bind(self, kind: Kind, j: int) -> Run:
        run: Run = partial(_METHODS[kind], self, j)
        if kind.startswith("backward"):
            run = without_autocast(self.call.state, run)
        if self._watch is not None:
            run = self._watch(kind, j, run)
        return self.call.bound(run, kind, j)

    # -- forward

    def _forward(self, j: int, i: int, parcels: list[Parcel]) -> list[Parcel]:
        call, run = self.call, self.call.runs[j]
        target = came = None  # the target; on its way, where it comes to light with the input
        marks: Sequence[int] = ()
        if self._last[j] and self.targets_travel:
            came = parcels.pop()
        if self._first[j]:
            inputs, flags, target, came = self._pulled(j, i)
        else:
            inputs, marks, flags = _unpacked(parcels)
        cell = Cell(flags)
        given = cell.border.cross(inputs)
        rematerialize = i < call.rematerialized[j]
        if rematerialize:
            outputs, recomputation = run.forward_without_storing(i, given, inputs, marks, target)
            if call.state.grad and _goes_back(outputs):  # else nothing does: it is frozen
                cell.recomputation = recomputation
            del recomputation
        else:
            outputs = run.forward(i, given, marks, target)
        if self._leaves is not None and self._leaves.looks:  # one micro-batch alone may use a leaf
            self._leaves.look(j, outputs, cell.border)
        lent: Sequence[int] = ()
        if marks or rematerialize or self._first[j]:
            all_lent = rematerialize or self._first[j]
            lent = handed_on(inputs, marks, outputs, all_lent=all_lent)
        del given, inputs, target
        if call.state.grad:
            self._cells[j][i] = cell
        if self._last[j]:
            self._take(j, i, outputs[0], came, cell)
            return []
        made = self._packed(j, i, outputs, lent, cell)
        if self._ties is not None:
            receivers = self._ties.receivers[j]
            if cell.recomputation is None:
                cell.ends += map(ends_of, receivers)
            else:
                cell.expected += tuple(map(len, receivers))
        return made if came is None else [*made, came]

    def _pulled(self, j: int, i: int) -> tuple[Inputs, list[Sequence[bool]], Any, Parcel | None]:
        """The input of the first stage, its flags; the target, if it is here, or has to travel."""
        came = None
        if self._source.lazy:
            value, target, ready = undisturbed(partial(self._taken, i))
            value = self.call.to_stage(value, j, ready)
            came = Parcel((target, ready))
        else:
            value, target = self._source.pull(i), self._source.peek_target(i)
        grad = self.call.state.grad
        if type(value) is Tensor:
            flags: Sequence[bool] = (grad and value.requires_grad,)
            inputs: Any = value.detach()
        else:
            flags = [grad and tensor.requires_grad for tensor in tensors_in(value)]
            inputs = map_tensors(lambda tensors: [t.detach() for t in tensors], value)
        if j > 0 and not self._source.lazy:
            inputs = self.call.to_stage(inputs, j)
        return (inputs, ()), [flags], target, came

    def _taken(self, i: int) -> tuple[Any, Any, Any]:
        """Input and target from the caller's iterator, and when they are there."""
        with self.call.as_caller():
            value, target = self._source.pull(i), self._source.target(i)
            return value, target, self.call.ready((value, target))

    def _packed(
        self, j: int, i: int, outputs: Inputs, lent: Sequence[int], cell: Cell
    ) -> list[Parcel]:
        """The outputs of a cell for the stages that need them, in the order of the edges."""
        output, skips = outputs
        marks: Sequence[Sequence[int]] = ((),)
        if lent or skips or type(output) is not Tensor:
            marks = sent_marks(outputs, lent)
        parcels: list[Parcel] = []
        for edge in self._pipeline.outgoing[j]:
            value, k = (output, 0) if edge.skip is None else (skips[edge.skip], 1 + edge.skip)
            value, flags = cell.detached(value)
            event = None
            if not (self.call.quiet and type(value) is Tensor):
                value, event = self.call.send(edge, i, value)
            parcels.append(_parcel((value, event, marks[k], flags)))
        return parcels

    def _take(self, j: int, i: int, output: Any, came: Parcel | None, cell: Cell) -> None:
        """Gives the output of the last stage to the head, with its target."""
        target, ready = (self._source.target(i), None) if came is None else came.value
        if target is not None:
            target = self.call.to_stage(target, j, ready)
        if self._several:
            self._head.first_size(self._source.size(0))
        self._head.take(j, i, output, target, self._source.size(i), cell)

    # -- backward

    def _recompute(self, j: int, i: int, parcels: list[Parcel]) -> list[Parcel]:
        cell, run = self._cells[j][i], self.call.runs[j]
        recomputation, cell.recomputation = cell.recomputation, None
        if recomputation is None:
            return []
        given = cell.border.cross(recomputation.inputs)
        output, skips = run.recompute(recomputation, given, self.call.moment, keep=self._keep)
        if self._last[j]:
            cell.ends.append(ends_of(self._head.given(output)))
        for edge in self._pipeline.outgoing[j]:
            cell.ends.append(ends_of(output if edge.skip is None else skips[edge.skip]))
        if self._ties is not None:
            cell.ends += map(ends_of, self._ties.receivers[j])
        if tuple(map(len, cell.ends)) != cell.expected:
            raise RuntimeError(
                f"{run.words} {i} gave other outputs when it was recomputed. Its layers "
                "must do the same both times; if one depends on a global or counts its calls, let "
                "it ask syncpipe.is_recomputing(), or use checkpoint='never'."
            )
        return []

    def _backward(self, j: int, i: int, parcels: list[Parcel]) -> list[Parcel]:
        cell, run = self._cells[j].pop(i), self.call.runs[j]
        grads: list[Any] = list(map(_VALUE, parcels))
        parcels.clear()
        go_back = self._go_back
        if (i, j) in self._splits:
            lane = self.call.lane_of[j]
            cell.halves = self._halves[j][i] = WeightGradients(lane, self._ordinary[j])
        if profiler._is_profiler_enabled:
            go_back = partial(as_range, f"syncpipe backward stage {j} micro-batch {i}", go_back)
        try:
            if run.backward_draws == 0:
                go_back(j, i, cell, grads)
            else:
                run.backward(i, go_back, j, i, cell, grads)
            if self._leaves.waits[j]:
                self._leaves.got(j)
        except BaseException as error:
            annotate(error, f"in backward of {run.words} {i}")
            raise
        border = cell.border
        if cell.target is not None:
            found = zip(cell.targets, self._returned(j, cell.target), strict=True)
            self._targets[j] += [(tensor, grad) for tensor, grad in found if grad is not None]
        if self._first[j] and border.grads:
            self.entered[i] = self._returned(j, border)
        parts: list[Any] = [border.grads]  # for each incoming edge
        if len(cell.flags) > 1:
            following = iter(border.grads)
            parts = [list(islice(following, sum(flags))) for flags in cell.flags]
        back = list(zip(self._pipeline.incoming[j], parts, strict=False))
        if self._ties is not None:
            back += [(e, self._leaves.taken(j, leaves)) for e, leaves in self._ties.senders[j]]
        made: list[Parcel] = []
        for edge, part in back:
            event = None
            if not self.call.quiet:
                part, event = self.call.send(edge, i, part, backward=True)
            made.append(_parcel((part, event, (), ())))
        return made

    def _go_back(self, j: int, i: int, cell: Cell, grads: list[Any]) -> None:
        """Backward through the graph of a cell.

        Args:
            j: the stage.
            i: the micro-batch.
            cell: what is kept of it.
            grads: for each outgoing edge the gradients of the outputs that need one; emptied.
        """
        cell.border.begin()
        if self._last[j]:
            grads += self._head.go_back(j, i, cell)
        roots, given = cell.roots(grads)
        grads.clear()
        if roots:
            self._leaves.go_back(j, roots, given, cell)

    def _backward_weight(self, j: int, i: int, parcels: list[Parcel]) -> list[Parcel]:
        halves = self._halves[j].pop(i, None)
        if halves is not None:
            halves.accumulate()
            if self._leaves.waits[j]:
                self._leaves.got(j)
        return []

    def _reduce(self, j: int, i: int, parcels: list[Parcel]) -> list[Parcel]:
        """Sends the gradients of a replica to the first one, who adds them to its own."""
        replicas, lane_of = self.call.replicas, self.call.lane_of
        assert replicas is not None
        trained = replicas.trained[j]
        if i > 0:
            grads = self._leaves.taken(j, trained)
            return [Parcel(*sent(lane_of[j], lane_of[self._pipeline.stages[j].j], grads))]
        for parcel in parcels:  # replica 1, 2, ...
            self._leaves.add(j, trained, parcel.value)
        return []

    def _returned(self, j: int, border: Border) -> list[Tensor | None]:
        """The gradients of what came from the caller."""
        grads = [None if grad is None else compact(grad) for grad in border.grads]
        self.call.release_to_caller(j, grads)
        return grads


def _goes_back(outputs: Inputs) -> bool:
    """Whether any output needs a gradient."""
    if type(outputs[0]) is Tensor and not outputs[1]:
        return outputs[0].requires_grad
    return any(tensor.requires_grad for tensor in tensors_in(outputs))


def _unpacked(parcels: list[Parcel]) -> tuple[Inputs, Sequence[int], list[Sequence[bool]]]:
    """The inputs of a stage that is not the first, their marks, and which need a gradient.

    The list is used up.
    """
    if len(parcels) == 1:
        value, _, marks, flags = parcels.pop()
        return (value, ()), marks, [flags]
    value, *skips = [parcel.value for parcel in parcels]
    all_flags = [parcel.flags for parcel in parcels]
    all_marks: list[int] = []
    if any(parcel.marks for parcel in parcels):
        for parcel in parcels:
            all_marks += parcel.marks or [0] * len(parcel.flags)
    parcels.clear()
    return (value, tuple(skips)), all_marks, all_flags


# Not bound to an object, which would then hold itself.
_METHODS: dict[Kind, Callable[[TrainingTask, int, int, list[Parcel]], list[Parcel]]] = {
    "forward": TrainingTask._forward,
    "recompute": TrainingTask._recompute,
    "backward": TrainingTask._backward,
    "backward_input": TrainingTask._backward,
    "backward_weight": TrainingTask._backward_weight,
    "reduce": TrainingTask._reduce,
}
