"""``pipe.train_batch(...)`` and ``pipe.eval_batch(...)``, and the engine's task for all drivers.

The loss is computed inside the pipeline, so a micro-batch can run backward while others still run
forward. Every cell (micro-batch ``i``, stage ``j``) has a small graph of its own. Only the worker
of stage ``j`` touches its cells: a forward stores one, the backward removes it, and a call that
fails drops all of them. A replica counts as a stage of its own (see ``Call``).
"""

from __future__ import annotations

import math
import warnings
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from copy import copy
from functools import partial
from itertools import chain, islice, repeat
from numbers import Real
from operator import attrgetter, itemgetter, setitem
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import profiler

from syncpipe.data import gather, own_storage, samples_elsewhere, tensors_in
from syncpipe.hints import caller_stacklevel
from syncpipe.layers.conversion.signature import common_outputs
from syncpipe.runtime.engine import Run
from syncpipe.runtime.errors import annotate
from syncpipe.runtime.interrupts import run_and_undo
from syncpipe.runtime.random_numbers import with_cpu_generator
from syncpipe.runtime.recorder import as_range
from syncpipe.runtime.streams import moved
from syncpipe.runtime.thread_state import backward_here, without_autocast
from syncpipe.schedules.named import ScheduleLike, build
from syncpipe.schedules.schedule import Kind
from syncpipe.schedules.steps import forward_steps, training_steps
from syncpipe.stages.call import Call, send_tree
from syncpipe.stages.inplace import own_memory, passthrough_flags, sent_flags
from syncpipe.stages.pipeline import Pipeline
from syncpipe.stages.run import Inputs
from syncpipe.training.cell import Accumulated, Cell, GraphCut, detached, ends_of
from syncpipe.training.loss import LossHead, Objective
from syncpipe.training.loss_check import LossCounts
from syncpipe.training.loss_function import known_loss
from syncpipe.training.sources import Source
from syncpipe.training.weight_gradients import WeightGradients

#: Wraps the function that runs one kind of action on a stage.
Watch = Callable[[Kind, int, Run], Run]


class Message(NamedTuple):
    """The value sent over an edge: a tree of tensors, or a list of gradients on the way back.

    For each tensor ``owners`` has its ownership flags (see ``inplace``), and ``flags`` whether it
    needs a gradient. ``event`` is recorded when the value is complete.
    """

    value: Any
    event: Any = None
    owners: Sequence[int] = ()
    flags: Sequence[bool] = ()


#: :class:`Message` from the tuple of its fields, without a Python call.
_message: Callable[[tuple[Any, ...]], Message] = partial(tuple.__new__, Message)
_value_of = itemgetter(0)
_requires_grad = attrgetter("requires_grad")


class TrainingTask:
    """The actions of one mini-batch, for the engine.

    ``source`` gives the micro-batches, ``head`` takes the outputs, ``leaves`` get gradients (None:
    there is no backward). ``splits`` has the cells whose backward runs in two halves.
    """

    def __init__(
        self, call: Call, source: Source, head: Any, leaves: Any = None, *, splits: Any = (),
        watch: Watch | None = None,
    ) -> None:  # fmt: skip
        stages, self._pipeline = call.pipeline.stages, call.pipeline
        self.call, self._ties, self._source, self._head = call, call.ties, source, head
        self._leaves, self._splits, self._watch = leaves, splits, watch
        self._first = [stage.j == 0 for stage in stages]
        self._last = [stage.j == call.pipeline.n - 1 for stage in stages]
        self._ready: dict[int, Any] = {}  # by micro-batch of an iterator: events
        self._cells: list[dict[int, Cell]] = [{} for _ in stages]
        self._deferred: list[dict[int, WeightGradients]] = [{} for _ in stages]
        #: id(leaf) -> whether its gradient may wait for the weight half.
        self._may_defer: list[dict[int, bool]] = [{} for _ in stages]
        if call.ties is not None:  # gradients of tied leaves are sent after the input half
            self._may_defer = [{id(leaf): False for leaf in leaves} for leaves in call.ties.leaves]
        self._retain_graph = False
        self._targets: list[list[tuple[Tensor, Tensor | None]]] = [[] for _ in stages]
        #: For each micro-batch the gradients of its inputs.
        self.input_grads: dict[int, list[Tensor | None]] = {}

    def caller_grads(self) -> list[tuple[Tensor, Tensor]]:
        """(tensor, gradient) pairs for the caller's graph, in the order of summation."""
        every = len(self._pipeline.replica_indices[0])
        entered = (
            zip(self._source.inputs(i), grads, strict=True)
            for i, grads in sorted(self.input_grads.items(), key=lambda each: each[0] % every)
        )
        pairs = chain(*entered, *self._targets)
        return [(tensor, grad) for tensor, grad in pairs if grad is not None]

    def backward_task(self, leaves: Any, head: Any, *, keep: bool) -> TrainingTask:
        """The task of one backward; ``keep`` keeps the cells for another."""
        other = copy(self)
        other._leaves, other._head, other._retain_graph, other.input_grads = leaves, head, keep, {}
        if keep:
            other._cells = [{i: copy(cell) for i, cell in row.items()} for row in self._cells]
        return other

    def bind(self, kind: Kind, j: int) -> Run:
        """The function for one kind of action on a stage: the method of that name."""
        # From the class: a bound method stored on self would be a reference cycle.
        run: Run = partial(getattr(type(self), f"_{kind}"), self, j)
        if kind not in ("forward", "recompute"):
            run = without_autocast(self.call.state, run)
        if self._watch is not None:
            run = self._watch(kind, j, run)
        return self.call.bind_streams(run, kind, j)

    def _forward(self, j: int, i: int, messages: list[Message]) -> list[Message]:
        call, run = self.call, self.call.runs[j]
        target = None
        owners: Sequence[int] = ()
        if self._first[j]:
            inputs, flags, target = self._pull_inputs(j, i)
        elif len(messages) == 1:
            value, _, owners, only = messages.pop()
            inputs, flags, value = (value, ()), [only], None
        else:
            inputs, owners, flags = _unpacked(messages)
        cell = Cell(flags)
        given = cell.cut.enter(inputs)
        rematerialize = i < call.rematerialized[j]
        if rematerialize:
            outputs, recomputation = run.recomputation.forward(i, given, inputs, owners, target)
            if call.state.grad and any(map(_requires_grad, tensors_in(outputs))):
                cell.recomputation = recomputation  # a frozen stage has no backward
            del recomputation
        else:
            outputs = run.forward(i, given, owners, target)
        if self._leaves is not None and self._leaves.inspects:
            self._leaves.inspect(j, outputs, cell.cut)
        sent: Sequence[int] = ()
        borrowed = rematerialize or self._first[j]
        if owners or borrowed:
            sent = passthrough_flags(inputs, owners, outputs, all_borrowed=borrowed, target=target)
        renorms = run.stage.changes.renorming
        if not self._last[j] and (
            type(outputs[0]) is not Tensor or outputs[0].grad_fn is None or outputs[1] or renorms
        ):
            outputs, sent = own_memory(inputs, outputs, sent, all_leaves=bool(renorms))
        del given, inputs, target
        if call.state.grad:
            self._cells[j][i] = cell
        if self._last[j]:
            target, ready = self._source.target(i), self._ready.pop(i, None)
            if target is not None:
                target = call.to_stage(target, j, ready)
            self._head.take(j, i, outputs[0], target, cell)
            return []
        made = self._send_outputs(j, i, outputs, sent, cell)
        if self._ties is not None:
            receivers = self._ties.receivers[j]
            if cell.recomputation is None:
                cell.ends += map(ends_of, receivers)
            else:
                cell.expected_ends += tuple(map(len, receivers))
        return made

    def _pull_inputs(self, j: int, i: int) -> tuple[Inputs, list[Sequence[bool]], Any]:
        """Input, requires_grad flags and target of a micro-batch, on the first stage."""
        source, grad = self._source, self.call.state.grad
        if source.lazy:
            with source.lock:
                value = with_cpu_generator(partial(self._pull, i))
            value = self.call.to_stage(value, j, self._ready[i])
        else:
            value = source.pull(i)
        flags = [grad and tensor.requires_grad for tensor in tensors_in(value)]
        inputs = detached(value)
        if j > 0 and not source.lazy:
            inputs = self.call.to_stage(inputs, j)
        return (inputs, ()), [flags], source.peek_target(i)

    def _pull(self, i: int) -> Any:
        with self.call.as_caller():
            value = self._source.pull(i)
            self._ready[i] = self.call.ready((value, self._source.peek_target(i)))
            return value

    def _send_outputs(
        self, j: int, i: int, outputs: Inputs, sent: Sequence[int], cell: Cell
    ) -> list[Message]:
        """One message with an output or skip for each outgoing edge."""
        output, skips = outputs
        owners: Sequence[Sequence[int]] = ((),)
        if sent or skips or type(output) is not Tensor:
            owners = sent_flags(outputs, sent)
        messages: list[Message] = []
        for edge in self._pipeline.outgoing[j]:
            value, k = (output, 0) if edge.skip is None else (skips[edge.skip], 1 + edge.skip)
            value, flags = cell.detach_output(value)
            event = None
            if not (self.call.host_only and type(value) is Tensor):
                value, event = self.call.send(edge, i, value)
            messages.append(_message((value, event, owners[k], flags)))
        return messages

    def _recompute(self, j: int, i: int, messages: list[Message]) -> list[Message]:
        cell, run = self._cells[j][i], self.call.runs[j]
        recomputation, cell.recomputation = cell.recomputation, None
        if recomputation is None:
            return []
        given = cell.cut.enter(recomputation.inputs)
        keep = self._retain_graph
        output, skips = run.recompute(recomputation, given, self.call.user_code_epoch, keep=keep)
        values = [self._head.graph_outputs(output)] if self._last[j] else []
        for edge in self._pipeline.outgoing[j]:
            values.append(output if edge.skip is None else skips[edge.skip])
        if self._ties is not None:
            values += self._ties.receivers[j]
        cell.ends = list(map(ends_of, values))
        if tuple(map(len, cell.ends)) != cell.expected_ends:
            raise RuntimeError(
                f"{run.stage.describe(i)} gave other outputs when it was recomputed. Its layers "
                "must do the same both times. If one depends on a global or counts its calls, let "
                "it ask syncpipe.is_recomputing(), or use checkpoint='never'."
            )
        return []

    def _backward(self, j: int, i: int, messages: list[Message]) -> list[Message]:
        cell, run = self._cells[j].pop(i), self.call.runs[j]
        grads: list[Any] = list(map(_value_of, messages))
        messages.clear()
        go_back = self._go_back
        if (i, j) in self._splits:
            streams = self.call.streams_of[j]
            cell.deferred = self._deferred[j][i] = WeightGradients(streams, self._may_defer[j])
        if profiler._is_profiler_enabled:
            go_back = partial(as_range, f"syncpipe backward stage {j} micro-batch {i}", go_back)
        try:
            if run.drawing.backward_draws == 0:
                go_back(j, i, cell, grads)
            else:
                run.drawing.backward(i, go_back, j, i, cell, grads)
            if self._leaves.awaiting_grad[j]:
                self._leaves.own_first_grads(j)
        except BaseException as error:
            annotate(error, f"in backward of {run.stage.describe(i)}")
            raise
        if cell.target_cut is not None:
            grads = self._release_grads(j, cell.target_cut)
            self._targets[j] += zip(cell.targets, grads, strict=True)
        if self._first[j] and cell.cut.grads:
            self.input_grads[i] = self._release_grads(j, cell.cut)
        parts: list[Any] = [cell.cut.grads]  # for each incoming edge
        if len(cell.flags) > 1:
            following = iter(cell.cut.grads)
            parts = [list(islice(following, sum(flags))) for flags in cell.flags]
        back = list(zip(self._pipeline.incoming[j], parts, strict=False))
        if self._ties is not None:
            back += [(e, self._leaves.pop_grads(j, leaves)) for e, leaves in self._ties.senders[j]]
        made: list[Message] = []
        for edge, part in back:
            event = None
            if not self.call.host_only:
                part, event = self.call.send(edge, i, part, backward=True)
            made.append(_message((part, event, (), ())))
        return made

    _backward_input = _backward

    def _go_back(self, j: int, i: int, cell: Cell, grads: list[Any]) -> None:
        """Backward through a cell's graph; empties ``grads``, which has one item for each edge."""
        cut = cell.cut
        cut.open, cut.grads = True, [None] * len(cut.grads)
        if self._last[j]:
            grads += self._head.go_back(j, i, cell)
        roots, given = cell.roots(grads)
        grads.clear()
        if roots:
            self._leaves.go_back(j, roots, given, cell)

    def _backward_weight(self, j: int, i: int, messages: list[Message]) -> list[Message]:
        gradients = self._deferred[j].pop(i, None)
        if gradients is not None:
            gradients.accumulate()
            if self._leaves.awaiting_grad[j]:
                self._leaves.own_first_grads(j)
        return []

    def _reduce(self, j: int, i: int, messages: list[Message]) -> list[Message]:
        """Sends the gradients of a replica to the first one, which adds them to its own."""
        assert self.call.replicas is not None
        trained = self.call.replicas.trained[j]
        if i > 0:
            grads = self._leaves.pop_grads(j, trained)
            return [self._message_to(j, self._pipeline.stages[j].j, grads)]
        for message in messages:  # replica 1, 2, ...
            self._leaves.add(j, trained, message.value)
        return []

    def _message_to(self, j: int, other: int, value: Any) -> Message:
        return Message(*send_tree(self.call.streams_of[j], self.call.streams_of[other], value))

    def _release_grads(self, j: int, cut: GraphCut) -> list[Tensor | None]:
        grads = [None if grad is None else own_storage(grad) for grad in cut.grads]
        self.call.release_to_caller(j, grads)
        return grads


def _unpacked(messages: list[Message]) -> tuple[Inputs, Sequence[int], list[Sequence[bool]]]:
    value, *skips = [message.value for message in messages]
    flags = [message.flags for message in messages]
    owners: list[int] = []
    if any(message.owners for message in messages):
        for message in messages:
            owners += message.owners or [0] * len(message.flags)
    messages.clear()
    return (value, tuple(skips)), owners, flags


def train(
    pipeline: Pipeline, source: Source, *, loss_fn: Any, schedule: ScheduleLike,
    loss_reduction: str | None, weight: Any, verify: bool | None, accumulate: float,
    grad_scaler: Any, return_outputs: bool, counts: LossCounts, averaging: Any = None,
    **running: Any,
) -> Any:  # fmt: skip
    """Forward and backward of a mini-batch; see ``Pipe.train_batch``.

    With several processes ``averaging.begin`` returns the ``watch`` of the task.
    ``averaging.finish`` averages the gradients of leaves over processes, and returns the factor
    for the gradients that go on into the caller's graph.
    """
    check_can_train(pipeline, "train_batch")
    loss = known_loss(loss_fn, loss_reduction, weight)
    if grad_scaler is not None and not callable(getattr(grad_scaler, "scale", None)):
        raise TypeError(
            f"grad_scaler must be a torch.amp.GradScaler, not {type(grad_scaler).__name__}"
        )
    built = build(schedule, source.m, pipeline.placement)
    number = isinstance(accumulate, Real) and not isinstance(accumulate, bool)
    if not (number and 0 < float(accumulate) < math.inf):
        raise ValueError(f"accumulate={accumulate!r}: must be the number of mini-batches, above 0")
    several = len(pipeline.replica_indices[-1]) > 1  # workers compute losses
    objective = Objective(loss, source, several, grad_scaler, float(accumulate))
    # One call at a time: a call that fails puts gradients back, which must be its own.
    with pipeline.training_lock:
        leaves = None
        try:
            call = Call(pipeline, source.m, **running)
            leaves = Accumulated(call)
            check = counts.check(objective, source.targets, verify)
            head = LossHead(call, objective, leaves, keep_outputs=return_outputs, check=check)
            watch = None
            if averaging is not None:
                watch = averaging.begin(built, leaves, objective)
            task = TrainingTask(call, source, head, leaves, splits=built.splits, watch=watch)
            returns = () if call.ties is None else call.ties.edges
            recomputed = call.rematerialized[: pipeline.n]
            steps = training_steps(pipeline.edges, built, recomputed, returns=returns)
            # Post-accumulate hooks (an optimizer step, for example) run once a call, at its end.
            hooked = [p for p in chain(*leaves.parameters) if p._post_accumulate_grad_hooks]
            places: list[Any] = [leaf._post_accumulate_grad_hooks for leaf in hooked]
            hooks = list(map(OrderedDict, places))

            def run() -> None:
                for place in places:
                    place.clear()
                call.run(steps, task)

            run_and_undo(run, map(OrderedDict.update, places, hooks))
            results = _results(call, head, objective, source, counts)
            _finish_gradients(task, head, objective, leaves, averaging)
            for leaf, saved in zip(hooked, hooks, strict=True):
                for hook in saved.values() if leaf.grad is not None else ():
                    hook(leaf)
        except BaseException:
            if leaves is not None:
                leaves.restore()
            raise
    return results


def check_can_train(pipeline: Pipeline, what: str) -> None:
    """Raises RuntimeError inside a call of the same pipe, or if grad mode is off."""
    check_not_running(pipeline, what)
    if not torch.is_grad_enabled():
        raise RuntimeError(
            f"{what} needs gradients, but grad mode is off (torch.no_grad or "
            "torch.inference_mode): call it outside of these, or use eval_batch"
        )


def check_not_running(pipeline: Pipeline, what: str) -> None:
    """Raises RuntimeError inside a call of the same pipe, whose gradients or modes would change."""
    if pipeline.engine.is_running():
        raise RuntimeError(
            f"{what} was called inside of a call of the same pipe (by its loss_fn, its data_iter "
            "or a layer), and would change its gradients and modes: call pipe(input) there instead"
        )


def _finish_gradients(
    task: TrainingTask, head: LossHead, objective: Objective, leaves: Accumulated, averaging: Any
) -> None:
    """Scales gradients to those of the mini-batch; runs the caller's graph backward."""
    if not head.loss_requires_grad:
        raise RuntimeError(
            "the loss does not require grad, so there is nothing to train: all parameters are "
            "frozen, or loss_fn detaches its arguments"
        )
    factor: float | Tensor | None
    if averaging is not None:
        factor = averaging.finish()
    elif (factor := objective.factor()) is not None:
        leaves.scale(factor)
    if pairs := task.caller_grads():
        tensors, grads = [tensor for tensor, _ in pairs], [g.to(t.device) for t, g in pairs]
        if isinstance(factor, Tensor):
            grads = [grad * moved(factor, grad.device) for grad in grads]
        elif factor is not None:
            grads = [grad * factor for grad in grads]
        # On this thread, because it holds the lock of the pipe, which a recomputation may need.
        backward_here(partial(torch.autograd.backward, tensors, grads))


def evaluate(
    pipeline: Pipeline, source: Source, *, module: nn.Module, modules: Sequence[nn.Module],
    loss_fn: Any, loss_reduction: str | None, weight: Any, verify: bool | None, counts: LossCounts,
    weighed: Callable[[Objective], None] | None = None, **running: Any,
) -> Any:  # fmt: skip
    objective = None
    if loss_fn is not None:
        several = len(pipeline.replica_indices[-1]) > 1
        objective = Objective(known_loss(loss_fn, loss_reduction, weight), source, several)

    def run() -> Any:
        call = Call(pipeline, source.m, **running)
        check = None if objective is None else counts.check(objective, source.targets, verify)
        head = LossHead(call, objective, keep_outputs=objective is None, check=check)
        task = TrainingTask(call, source, head)
        steps = forward_steps(pipeline.edges, source.m, pipeline.placement)
        call.run(steps, task)
        results = _results(call, head, objective, source, counts)
        if weighed is not None and objective is not None:
            weighed(objective)
        return results

    check_not_running(pipeline, "eval_batch")
    # Modes are shared by all users of the module, so other calls of the pipe wait.
    with pipeline.training_lock, torch.no_grad():
        if not any(each.training for each in modules):
            return run()
        return pipeline.modes_lock.changing(partial(_in_eval_mode, module, modules, run))


def join_outputs(pipeline: Pipeline, outputs: list[Any], source: Source) -> Any:
    """The outputs of micro-batches as one; warns once if samples are not in dimension 0."""
    if len(outputs) > 1 and not pipeline.has_joined:
        pipeline.has_joined = True
        if found := samples_elsewhere(outputs, source.sizes, source.other_sizes):
            warnings.warn(
                f"{found}, it seems, and the outputs of micro-batches are put together along "
                "dimension 0: put samples first in the last layer, output.transpose(0, 1), or "
                "compute the loss in train_batch. Ignore this if samples are in dimension 0",
                stacklevel=caller_stacklevel(),
            )
    return gather(outputs, common_leaves_of(pipeline))


def common_leaves_of(pipeline: Pipeline) -> Collection[int]:
    """The indices of output leaves that are the same in every micro-batch."""
    return common_outputs(pipeline.stages[pipeline.n - 1].partition)


def _results(
    call: Call, head: LossHead, objective: Objective | None, source: Source, counts: LossCounts
) -> Any:
    """Checks the loss; returns loss, outputs, metrics, or a tuple of these."""
    pipeline = call.pipeline
    with torch.no_grad():
        loss = metrics = None
        if objective is not None:
            if len(pipeline.replica_indices[-1]) > 1:
                objective.bring(call.streams_of[pipeline.results_replica].device)
            loss, metrics = objective.loss(), objective.metrics()
        outputs = head.outputs
        if outputs is not None:
            outputs = join_outputs(pipeline, call.collect_outputs(outputs), source)
    if head.check is not None:
        counts.compare(head.check, common_leaves_of(pipeline), draws=any(head.draws.values()))
    if loss is None:
        return outputs
    present = (True, head.outputs is not None, bool(metrics))
    found = [value for value, flag in zip((loss, outputs, metrics), present, strict=True) if flag]
    return loss if len(found) == 1 else tuple(found)


def _in_eval_mode(module: nn.Module, modules: Sequence[nn.Module], run: Callable[[], Any]) -> Any:
    """Runs a function with a module in ``eval()`` mode, then puts back the mode of each submodule.

    The modules' own ``eval`` and ``train`` are called, because these may merge weights as well.
    """
    modes = [each.training for each in modules]
    plain = [each for each in modules if "training" in each.__dict__]
    script = [each for each in modules if "training" not in each.__dict__]  # TorchScript's
    undo = chain(  # not by `setattr`, where Ctrl-C could come in between
        map(setitem, [m.__dict__ for m in plain], repeat("training"), [m.training for m in plain]),
        map(setattr, script, repeat("training"), [m.training for m in script]),
    )

    def restore() -> None:
        # Parents first, which switch their children; twice, as a child may have two parents.
        for each, mode in [*zip(modules, modes, strict=True)] * 2:
            if each.training != mode:
                each.train(mode)

    def evaluated() -> Any:
        module.eval()
        return run()

    return run_and_undo(lambda: run_and_undo(evaluated, restore), undo)
