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
from typing import Any

from torch import Tensor
from torch.autograd import profiler

from syncpipe.data import compact, map_tensors, tensors_in
from syncpipe.runtime.engine import Run
from syncpipe.runtime.errors import annotate
from syncpipe.runtime.random_numbers import undisturbed
from syncpipe.runtime.recorder import as_range
from syncpipe.runtime.thread_state import without_autocast
from syncpipe.schedules.kinds import Kind
from syncpipe.stages.call import Call
from syncpipe.stages.parcel import Parcel, new_parcel, packed, unpacked
from syncpipe.stages.transfer import sent
from syncpipe.training.border import Border, ends_of
from syncpipe.training.pending_backward import PendingBackward
from syncpipe.training.sources import Source
from syncpipe.training.weight_gradients import WeightGradients

__all__ = ["TrainingTask", "Watch"]


#: Puts something around what performs the actions of a kind on a stage.
Watch = Callable[[Kind, int, Run], Run]


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
        self.call = call
        self._pipeline = call.pipeline
        self._source = source
        self._splits = splits
        self._watch = watch
        self._head = head
        self._first = [stage.j == 0 for stage in stages]
        self._last = [stage.j == call.pipeline.n - 1 for stage in stages]
        self._several = len(call.pipeline.numbers[-1]) > 1
        self.targets_travel = source.lazy and call.pipeline.n > 1
        self._leaves: Any = leaves
        self._pending: list[dict[int, PendingBackward]] = [{} for _ in stages]
        self._halves: list[dict[int, WeightGradients]] = [{} for _ in stages]
        self._ordinary: list[dict[int, bool]] = [{} for _ in stages]
        self._ties = call.ties
        if call.ties is not None:  # their gradients go on with the input half
            self._ordinary = [{id(leaf): False for leaf in leaves} for leaves in call.ties.leaves]
        self._keep = False
        self._targets: list[list[tuple[Tensor, Tensor]]] = [[] for _ in stages]
        #: For each micro-batch the gradients of the tensors that entered the first stage.
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
            other._pending = [{i: p.copy() for i, p in cells.items()} for cells in self._pending]
        return other

    def bind(self, kind: Kind, j: int) -> Run:
        run: Run = partial(_METHODS[kind], self, j)
        if kind.startswith("backward"):
            run = without_autocast(self.call.context.state, run)
        if self._watch is not None:
            run = self._watch(kind, j, run)
        return self.call.bound(run, kind, j)

    # -- forward

    def _forward(self, j: int, i: int, parcels: list[Parcel]) -> list[Parcel]:
        came: Parcel | None = None  # the target, where it comes to light with the input
        last = self._last[j]
        if last and self.targets_travel:
            came = parcels.pop()
        if self._first[j]:
            inputs, needed, marks, target, came = self._pulled(j, i)
        else:
            inputs, marks, needed = unpacked(parcels)  # which tensors need a gradient
            target = None
        flags = needed[0] if len(needed) == 1 else list(chain.from_iterable(needed))
        pending = PendingBackward(Border(flags), needed)
        outputs = self._computed(i, j, inputs, pending, marks, target)
        lent = self._pipeline.stages[j].handed_on(
            inputs,
            marks,
            outputs,
            self.call.context,
            rematerialize=i < self.call.rematerialized[j],
        )
        del inputs, target
        if self.call.context.state.grad:
            self._pending[j][i] = pending
        if not last:
            made = packed(self.call, i, j, outputs, lent, pending.detached)
            if self._ties is not None:
                self._expect_tied(j, pending)
            return made if came is None else [*made, came]
        if came is None:
            target = self.call.to_stage(self._source.target(i), j)
        else:
            target = self.call.to_stage(came.value[0], j, came.value[1])
        if self._several:
            self._head.first_size(self._source.size(0))
        self._head.take(j, i, outputs[0], target, self._source.size(i), pending)
        return []

    def _pulled(
        self, j: int, i: int
    ) -> tuple[Any, list[Sequence[bool]], Sequence[int], Any, Parcel | None]:
        """The input of the first stage, its flags and marks; the target, if it is here."""
        came = None
        if self._source.lazy:
            value, target, ready = undisturbed(partial(self._taken, i))
            value = self.call.to_stage(value, j, ready)
            came = Parcel((target, ready), None)
        else:
            value, target = self._source.pull(i), self._source.peek_target(i)
        grad = self.call.context.state.grad
        flags = [grad and tensor.requires_grad for tensor in tensors_in(value)]
        inputs = map_tensors(lambda tensors: [t.detach() for t in tensors], value)
        if j > 0 and not self._source.lazy:
            inputs = self.call.to_stage(inputs, j)
        return (inputs, ()), [flags], (), target, came

    def _taken(self, i: int) -> tuple[Any, Any, Any]:
        """Input and target from the caller's iterator, and when they are there."""
        with self.call.as_caller():
            value, target = self._source.pull(i), self._source.target(i)
            return value, target, self.call.ready((value, target))

    def _computed(
        self,
        i: int,
        j: int,
        inputs: Any,
        pending: PendingBackward,
        marks: Sequence[int],
        target: Any,
    ) -> Any:
        """The outputs of a cell; ``pending`` learns how it goes back."""
        given = pending.border.cross(inputs)
        outputs = self._made(i, j, given, inputs, pending, marks, target)
        if self._leaves is not None:  # a leaf may be used by one micro-batch alone
            nodes = [t.grad_fn for t in tensors_in(outputs) if t.requires_grad]
            self._leaves.look(j, nodes, pending.border)
        return outputs

    def _made(
        self,
        i: int,
        j: int,
        given: Any,
        inputs: Any,
        pending: PendingBackward,
        marks: Sequence[int],
        target: Any,
    ) -> Any:
        stage, context = self._pipeline.stages[j], self.call.context
        if i < self.call.rematerialized[j]:
            outputs, recomputation = stage.forward_without_storing(
                i, given, context, detached=inputs, marks=marks, target=target
            )
            if any(tensor.requires_grad for tensor in tensors_in(outputs)):
                pending.recomputation = recomputation  # else nothing goes back: it is frozen
            return outputs
        return stage.forward(i, given, context, marks=marks, target=target)

    # -- backward

    def _recompute(self, j: int, i: int, parcels: list[Parcel]) -> list[Parcel]:
        pending, stage = self._pending[j][i], self._pipeline.stages[j]
        recomputation, pending.recomputation = pending.recomputation, None
        if recomputation is None:
            return []
        given = pending.border.cross(recomputation.inputs)
        moment = self.call.context.moment
        output, skips = stage.recompute(recomputation, given, moment, keep=self._keep)
        if self._last[j]:
            pending.ends.append(ends_of(self._head.given(output)))
        for edge in self._pipeline.outgoing[j]:
            pending.ends.append(ends_of(output if edge.skip is None else skips[edge.skip]))
        if self._ties is not None:
            pending.ends += map(ends_of, self._ties.receivers(j))
        if tuple(map(len, pending.ends)) != pending.expected:
            raise RuntimeError(
                f"{stage.describe(i)} gave other outputs when it was recomputed. Its layers must "
                "do the same both times; if one depends on a global or counts its calls, let it "
                "ask syncpipe.is_recomputing(), or use checkpoint='never'."
            )
        return []

    def _backward(self, j: int, i: int, parcels: list[Parcel]) -> list[Parcel]:
        pending, stage = self._pending[j].pop(i), self._pipeline.stages[j]
        grads: list[Any] = [parcel.value for parcel in parcels]
        parcels.clear()
        run = self._go_back
        if (i, j) in self._splits:
            lane = self.call.lane_of(j)
            pending.halves = self._halves[j][i] = WeightGradients(lane, self._ordinary[j])
        if profiler._is_profiler_enabled:
            run = partial(as_range, f"syncpipe backward stage {j} micro-batch {i}", run)
        try:
            stage.backward(i, self.call.context, run, j, i, pending, grads)
            self._leaves.got(j)
        except BaseException as error:
            annotate(error, f"in backward of {stage.describe(i)}")
            raise
        if pending.target is not None:
            found = zip(pending.targets, self._returned(j, pending.target), strict=True)
            self._targets[j] += [(tensor, grad) for tensor, grad in found if grad is not None]
        if self._first[j] and pending.border.grads:
            self.entered[i] = self._returned(j, pending.border)
        parts: list[Any] = [pending.border.grads]  # for each incoming edge
        if len(pending.flags) > 1:
            following = iter(pending.border.grads)
            parts = [list(islice(following, sum(flags))) for flags in pending.flags]
        back = list(zip(self._pipeline.incoming[j], parts, strict=False))
        if self._ties is not None:
            senders = self._ties.senders(j)
            back += [(edge, self._leaves.taken(j, leaves)) for edge, leaves in senders]
        send = self.call.send
        return [new_parcel((*send(edge, i, part, backward=True), (), ())) for edge, part in back]

    def _expect_tied(self, j: int, pending: PendingBackward) -> None:
        """Lets the gradients that later stages have for tied weights go back with a cell."""
        assert self._ties is not None
        receivers = self._ties.receivers(j)
        if pending.recomputation is None:
            pending.ends += map(ends_of, receivers)
        else:
            pending.expected += tuple(map(len, receivers))

    def _go_back(self, j: int, i: int, pending: PendingBackward, grads: list[Any]) -> None:
        """Backward through the graph of a cell.

        Args:
            j: the stage.
            i: the micro-batch.
            pending: what is kept of the cell.
            grads: for each outgoing edge the gradients of the outputs that need one; emptied.
        """
        pending.border.begin()
        if self._last[j]:
            grads += self._head.go_back(j, i, pending)
        roots, given = pending.roots(grads)
        grads.clear()
        if roots:
            self._leaves.go_back(j, roots, given, pending)

    def _backward_weight(self, j: int, i: int, parcels: list[Parcel]) -> list[Parcel]:
        halves = self._halves[j].pop(i, None)
        if halves is not None:
            halves.accumulate()
            self._leaves.got(j)
        return []

    def _reduce(self, j: int, i: int, parcels: list[Parcel]) -> list[Parcel]:
        """Sends the gradients of a replica to the first one, who adds them to its own."""
        replicas = self.call.replicas
        assert replicas is not None
        if i > 0:
            owner = self.call.lane_of(self._pipeline.stages[j].j)
            grads = self._leaves.taken(j, replicas.trained(j))
            return [Parcel(*sent(self.call.lane_of(j), owner, grads))]
        for parcel in parcels:  # replica 1, 2, ...
            self._leaves.add(j, replicas.trained(j), parcel.value)
        return []

    def _returned(self, j: int, border: Border) -> list[Tensor | None]:
        """The gradients of what came from the caller."""
        grads = [None if grad is None else compact(grad) for grad in border.grads]
        self.call.release_to_caller(j, grads)
        return grads


# Not bound to an object, which would then hold itself.
_METHODS: dict[Kind, Callable[[TrainingTask, int, int, list[Parcel]], list[Parcel]]] = {
    "forward": TrainingTask._forward,
    "recompute": TrainingTask._recompute,
    "backward": TrainingTask._backward,
    "backward_input": TrainingTask._backward,
    "backward_weight": TrainingTask._backward_weight,
    "reduce": TrainingTask._reduce,
}
