"""The actions of one mini-batch, for the engine.

The loss is computed inside the pipeline, so a micro-batch can run backward while others still run
forward. Every cell (micro-batch ``i``, stage ``j``) has a small graph of its own. Only the worker
of stage ``j`` touches its cells: a forward stores one, the backward removes it, and a call that
fails drops all of them.

Whatever else an action may do plugs in at three places (``extensions``), which are asked once for
each call and stage, so that what is not there costs nothing:

    FORWARD     (task, r, inner: Forward) -> Forward       around the forward of a cell
    BACKWARD    (task, r, inner: Backward) -> Backward     around the backward of a cell
    ACTIONS     kind -> ((task, r) -> Run)                 further kinds of action
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from itertools import chain, islice
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from syncpipe.data.trees import tensors_in
from syncpipe.runtime.engine import Run
from syncpipe.runtime.errors import annotate
from syncpipe.runtime.random_numbers import with_cpu_generator
from syncpipe.runtime.thread_state import without_autocast
from syncpipe.schedules.schedule import Kind
from syncpipe.stages.call import Call
from syncpipe.stages.run import Inputs
from syncpipe.storage import own_storage
from syncpipe.training.cell import Cell, GraphCut, Message, detached
from syncpipe.training.extensions import ACTIONS, BACKWARD, FORWARD

#: Runs the layers of a cell: micro-batch, cell, inputs without a graph; returns the outputs.
Forward = Callable[[int, Cell, Inputs], Inputs]
#: Runs a cell backward: micro-batch, cell, for each outgoing edge its gradients; empties the list.
#: Returns for each incoming edge its gradients.
Backward = Callable[[int, Cell, list[Any]], list[Any]]


#: :class:`Message` from the tuple of its fields, without a Python call.
_message: Callable[[tuple[Any, ...]], Message] = partial(tuple.__new__, Message)
_value_of = itemgetter(0)
_requires_grad = attrgetter("requires_grad")


class TrainingTask:
    """``source`` gives the micro-batches, ``head`` takes the outputs, ``leaves`` get gradients
    (None: there is no backward). ``splits`` has the cells whose backward runs in two parts.

    Attributes:
        cells: for each stage its cells between forward and backward, by micro-batch.
        deferred: for each stage what a backward left for a later action, by micro-batch.
        input_grads: for each micro-batch the gradients of its inputs.
        keeps_graph: whether another backward of the same cells may follow.
    """

    def __init__(
        self, call: Call, source: Any, head: Any, leaves: Any = None, *, splits: Any = ()
    ) -> None:
        stages, self.call, self.source, self.head = call.pipeline.stages, call, source, head
        self.leaves, self.splits = leaves, splits
        self.first = [stage.j == 0 for stage in stages]
        self.last = [stage.j == call.pipeline.n - 1 for stage in stages]
        self._ready: dict[int, Any] = {}  # by micro-batch of an iterator: events
        self.cells: list[dict[int, Cell]] = [{} for _ in stages]
        self.deferred: list[dict[int, Any]] = [{} for _ in stages]
        self.keeps_graph = False
        self._targets: list[list[tuple[Tensor, Tensor | None]]] = [[] for _ in stages]
        self.input_grads: dict[int, list[Tensor | None]] = {}

    def caller_grads(self) -> list[tuple[Tensor, Tensor]]:
        """(tensor, gradient) pairs for the caller's graph, in the order of summation."""
        turns = self.call.pipeline.turns[0]
        entered = (
            zip(self.source.differentiable_inputs(i), grads, strict=True)
            for i, grads in sorted(self.input_grads.items(), key=lambda each: each[0] % turns)
        )
        pairs = chain(*entered, *self._targets)
        return [(tensor, grad) for tensor, grad in pairs if grad is not None]

    def backward_task(self, leaves: Any, head: Any, *, keep: bool) -> TrainingTask:
        """The task of one backward; ``keep`` keeps the cells for another."""
        other = copy(self)
        other.leaves, other.head, other.keeps_graph, other.input_grads = leaves, head, keep, {}
        if keep:
            other.cells = [{i: copy(cell) for i, cell in row.items()} for row in self.cells]
        return other

    def bind(self, kind: Kind, r: int) -> Run:
        """The function that runs the actions of one kind on a stage, on its streams."""
        run = self.action(kind, r)
        if kind not in ("forward", "recompute"):
            run = without_autocast(self.call.state, run)
        return self.call.bind_action(run, kind, r)

    def action(self, kind: Kind, r: int) -> Run:
        if kind == "forward":
            forward: Forward = partial(self._layers, r)
            for extend in FORWARD:
                forward = extend(self, r, forward)
            return partial(self._forward, r, forward)
        if kind in ("backward", "backward_input"):
            backward: Backward = partial(self._go_back, r)
            for extend in BACKWARD:
                backward = extend(self, r, backward)
            return partial(self._backward, r, backward)
        return ACTIONS[kind](self, r)

    # --- forward ---------------------------------------------------------------------------------

    def _forward(
        self, r: int, layers: Forward, i: int, messages: list[Message]
    ) -> Sequence[Message]:
        call = self.call
        if self.first[r]:
            cell, inputs = self._pull_inputs(r, i)
        elif len(messages) == 1:
            value, _, flags, owners = messages.pop()
            cell, inputs, value = Cell([flags], owners), (value, ()), None
        else:
            cell, inputs = _received(messages)
        outputs = layers(i, cell, inputs)
        del inputs
        if call.state.grad:
            self.cells[r][i] = cell
        if self.last[r]:
            target, ready = self.source.target(i), self._ready.pop(i, None)
            if target is not None:
                target = call.to_stage(target, r, ready)
            self.head.take(r, i, outputs[0], target, cell)
            return []
        output, skips = outputs
        made: list[Message] = []
        for edge in call.outgoing[r]:
            value, k = (output, 0) if edge.skip is None else (skips[edge.skip], 1 + edge.skip)
            value, flags = cell.detach_output(value)
            event = None
            if not (call.host_only and type(value) is Tensor):
                value, event = call.send(edge, i, value)
            made.append(_message((value, event, flags, cell.sent_owners[k])))
        return made

    def _layers(self, r: int, i: int, cell: Cell, inputs: Inputs) -> Inputs:
        run, given = self.call.runs[r], cell.cut.enter(inputs)
        if cell.owners or run.stage.changes.needs_lock:
            return run.forward(i, given, cell.owners)
        outputs = run.wrapped_layers(i, given, None, False)  # the usual case
        run.forwards_done[0] += 1
        return outputs

    def _pull_inputs(self, r: int, i: int) -> tuple[Cell, Inputs]:
        """The cell of a micro-batch on the first stage, and its inputs."""
        source = self.source
        if source.lazy:
            with source.lock:
                value = with_cpu_generator(partial(self._pull, i))
        else:
            value = source.pull(i)
        flags = list(map(_requires_grad, tensors_in(value)))
        inputs = detached(value)
        if r > 0 or source.lazy:
            inputs = self.call.to_stage(inputs, r, self._ready.get(i))
        return Cell([flags if self.call.state.grad else [False] * len(flags)]), (inputs, ())

    def _pull(self, i: int) -> Any:
        with self.call.as_caller():
            value = self.source.pull(i)
            self._ready[i] = self.call.ready((value, self.source.peek_target(i)))
            return value

    # --- backward --------------------------------------------------------------------------------

    def _backward(
        self, r: int, go_back: Backward, i: int, messages: list[Message]
    ) -> Sequence[Message]:
        call, cell = self.call, self.cells[r].pop(i)
        grads: list[Any] = list(map(_value_of, messages))
        messages.clear()
        try:
            parts = go_back(i, cell, grads)
            if self.leaves.awaiting_grad[r]:
                self.leaves.own_first_grads(r)
        except BaseException as error:
            annotate(error, f"in backward of {call.runs[r].stage.describe(i)}")
            raise
        if cell.target_cut is not None:
            grads = self._release_grads(r, cell.target_cut)
            self._targets[r] += zip(cell.targets, grads, strict=True)
        if self.first[r] and cell.cut.grads:
            self.input_grads[i] = self._release_grads(r, cell.cut)
        made: list[Message] = []
        for edge, part in zip(call.incoming[r], parts, strict=False):  # none to the caller
            event = None
            if not call.host_only:
                part, event = call.send(edge, i, part, backward=True)
            made.append(_message((part, event, (), ())))
        return made

    def _go_back(self, r: int, i: int, cell: Cell, grads: list[Any]) -> list[Any]:
        cut = cell.cut
        cut.open, cut.grads = True, [None] * len(cut.grads)
        if self.last[r]:
            grads += self.head.go_back(r, i, cell)
        roots: list[GradientEdge] = []
        received: list[Tensor] = []
        # Skips, which are used last, come first: a tensor that is both skip and output then adds up
        # its gradients in the order of the plain model.
        for ends, arrived in reversed([*zip(cell.ends, grads, strict=bool(grads))]):
            for end, grad in zip(ends, arrived, strict=True):
                if grad is not None:
                    roots.append(end)
                    received.append(grad.values() if grad.layout is torch.jagged else grad)
        grads.clear()
        if roots:
            self.leaves.go_back(r, roots, received, cell)
        if len(cell.flags) == 1:
            return [cut.grads]
        following = iter(cut.grads)
        return [list(islice(following, sum(flags))) for flags in cell.flags]

    def _release_grads(self, r: int, cut: GraphCut) -> list[Tensor | None]:
        grads = [None if grad is None else own_storage(grad) for grad in cut.grads]
        self.call.release_to_caller(r, grads)
        return grads


def _received(messages: list[Message]) -> tuple[Cell, Inputs]:
    """A cell with several incoming edges, and its inputs: the activation, and skips."""
    value, *skips = [message.value for message in messages]
    owners: list[int] = []
    if any(message.owners for message in messages):
        for message in messages:
            owners += message.owners or [0] * len(message.flags)
    cell = Cell([message.flags for message in messages], owners)
    messages.clear()
    return cell, (value, tuple(skips))
