"""``pipe(x)``: the forward half of the "gpipe" program, and an autograd node that runs the other.

    x, parameters --> [ node ] --> outputs --> the caller's graph --> loss
                         |
                         backward: takes gradients of the outputs, runs all cells backward on the
                         workers, returns gradients of x and of the parameters

The node returns one gradient for each tensor, as any module does, so hooks of parameters,
``inputs=`` and ``DistributedDataParallel`` work as usual. Gradients are captured in each cell and
summed for each stage; autograd adds the sums to ``.grad``. :func:`plain` gives the graph of the
layers themselves where that is needed.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence
from copy import copy
from functools import lru_cache, partial
from itertools import chain, compress, islice, repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from syncpipe.data.batches import gather, scatter_sized
from syncpipe.data.trees import described, map_tensors, tensors_in
from syncpipe.data.uncut import samples_elsewhere
from syncpipe.hints import caller_stacklevel
from syncpipe.layers.conversion.signature import common_outputs
from syncpipe.runtime.errors import annotate
from syncpipe.runtime.graph import captured_grads, go_back
from syncpipe.runtime.interrupts import run_and_undo, with_swaps
from syncpipe.runtime.recomputation import ModuleState, Recomputation
from syncpipe.runtime.streams import moved
from syncpipe.schedules.named import build
from syncpipe.schedules.schedule import Devices
from syncpipe.schedules.steps import Edge, Steps, forward_steps, training_steps
from syncpipe.stages.call import Call
from syncpipe.stages.pipeline import Pipeline
from syncpipe.stages.plain_graph import needs_graph, plain
from syncpipe.stages.sharing import CallReplicas
from syncpipe.storage import modules_of, storage_users
from syncpipe.training.cell import ANCHOR, Cell, with_own_storage
from syncpipe.training.leaves import Leaves
from syncpipe.training.sources import Source
from syncpipe.training.task import TrainingTask

_TWICE = (
    "Trying to backward through a mini-batch of a pipe a second time: the first backward frees "
    "what its layers stored. Call the first one with retain_graph=True"
)
_retains_graph = torch._C._autograd._get_current_graph_task_keep_graph

_alias: Any = torch.ops.aten.alias.default


def forward(
    pipeline: Pipeline, input: Any, *, chunks: int, checkpoint: Any, inline: Any, recorder: Any
) -> Any:
    """Runs ``pipe(input)``; with ``inline="graph"`` the outputs have the graph of the layers."""
    micro_batches, sizes = scatter_sized(input, chunks)
    if inline == "graph" or needs_graph():
        return gather(plain(pipeline, micro_batches, checkpoint), common_leaves_of(pipeline))
    call = Call(
        pipeline, len(micro_batches), checkpoint=checkpoint, inline=bool(inline),
        recorder=recorder, graph=True,
    )  # fmt: skip
    source = Source(micro_batches, [None] * call.m, sizes)
    return outputs_of(call, source, Captured(call, micro_batches) if call.state.grad else None)


def outputs_of(call: Call, source: Source, leaves: Captured | None = None) -> Any:
    """Runs a forward; its outputs hang on a node if ``leaves`` get gradients."""
    pipeline, head = call.pipeline, _Outputs(call)
    task = TrainingTask(call, source, head, leaves)
    call.run(forward_steps(pipeline.edges, call.m, pipeline.placement), task)
    outputs, head.outputs = call.collect_outputs(head.outputs), []
    if leaves is not None and any(map(any, head.flags)):
        entered = [tensor for i in range(call.m) for tensor in source.differentiable_inputs(i)]
        outputs = leaves.attach_node(task, head, entered, outputs)
    return join_outputs(pipeline, outputs, source)


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


class _Outputs:
    """The head of a task that returns outputs; the caller's backward gives their gradients."""

    graph_outputs = staticmethod(tensors_in)  #: the tensors of an output that may get gradients

    def __init__(self, call: Call) -> None:
        self._call = call
        self.outputs: list[Any] = [None] * call.m  # detached
        self.flags: list[Sequence[bool]] = [()] * call.m  # which tensors need a gradient
        self.grads: list[list[Tensor | None]] = []  # of these tensors
        self.grads_ready: Any = None  # the event of all gradients

    def take(self, r: int, i: int, output: Any, target: Any, cell: Cell) -> None:
        self.outputs[i], self.flags[i] = cell.detach_output(output)
        if self._call.m > 1 and not self._call.state.grad:
            self.outputs[i] = with_own_storage(self.outputs[i])

    def go_back(self, r: int, i: int, cell: Cell) -> list[list[Tensor | None]]:
        grads, self.grads[i] = self.grads[i], []
        return [self._call.to_stage(grads, r, self.grads_ready)]


class Captured(Leaves):
    """Leaves of one call of ``pipe(x)``: gradients are captured in cells and summed by stage.

    The node of the call runs :meth:`backward`. ``_receivers`` are the tensors that get gradients,
    each with its leaves in the stages: ``(index of the stage, leaf)``.
    """

    _retain_graph = False

    def __init__(self, call: Call, micro_batches: list[Any]) -> None:
        stages = call.pipeline.stages
        self._tensors = [_tensors_of(stage.partition) for stage in stages]
        substitutes = [run.substitute_of.values() for run in call.runs]
        super().__init__(call, map(chain, self._tensors, substitutes))
        for known, elsewhere in zip(self._known, call.owned_elsewhere, strict=True):
            known -= elsewhere  # the stage computes with other leaves
        self._micro_batches = micro_batches
        self._other_leaves: list[dict[int, Tensor]] = [{} for _ in stages]  # of no module
        self._captured: list[list[Tensor]] = [[] for _ in stages]
        self._receivers: list[tuple[Tensor, list[tuple[int, Tensor]]]] = []
        #: The buffers before the first forward, and all else after the last, for ``create_graph``.
        self._before = Recomputation(self._module_state(), "the layers", may_keep=True)
        self.awaiting_grad = [() for _ in stages]  # no `.grad` is touched
        self._sums: list[dict[int, Tensor]] = []
        self._own_sums: list[set[int]] = []  # id(leaf), if its sum shares memory with no tensor

    def _module_state(self) -> ModuleState:
        return ModuleState(self._call.pipeline.partitions, self._call.pipeline.changes, {})

    def around_forward(self, r: int, inner: Any) -> Any:
        def outer(i: int, cell: Cell, inputs: Any) -> Any:
            outputs = inner(i, cell, inputs)
            nodes = []
            for end in tensors_in(outputs):
                if end.requires_grad:
                    nodes.append(end.grad_fn or get_gradient_edge(end).node)  # of a leaf
            if new := self.unknown_leaves(r, nodes, cell.cut):
                self._adopt(r, new)
            return outputs

        return outer

    def _adopt(self, r: int, new: list[Tensor]) -> None:
        """Notes leaves that stage ``r`` uses, and that are of no module."""
        for leaf in new:
            if leaf._backward_hooks:
                stage = self._call.pipeline.stages[r]
                what, way = "is no parameter of its layers", "Make it one"
                if any(leaf is tensor for tensor in _tensors_of(stage.partition)):
                    what, way = "was made in this call", "Call pipe(x) once under no_grad()"
                raise RuntimeError(
                    f"{described(leaf)}, which requires grad and has hooks, is used by "
                    f"{stage.describe(0)}, and {what}: its hooks would run once for each "
                    f"micro-batch. {way}, or use syncpipe.inline(graph=True)"
                )
            self._other_leaves[r][id(leaf)] = leaf

    def _find_receivers(self) -> None:
        """Lists the tensors that get gradients; hooks of tensors that no cell used do not run."""
        call, replicas = self._call, self._call.part(CallReplicas)
        receivers: dict[int, tuple[Tensor, list[tuple[int, Tensor]]]] = {}
        for r, stage in enumerate(call.pipeline.stages):
            others, inside, run = self._other_leaves[r], self._tensors[r], call.runs[r]
            if self.nested_backward[r]:  # a graph does not show what a forward has made
                inside = _tensors_of(stage.partition)
            pairs = [(call.original_of.get(key, leaf), leaf) for key, leaf in others.items()]
            if r < call.pipeline.n:
                foreign = call.owned_elsewhere[r] | others.keys()
                pairs += [
                    (t, run.substitute_of.get(id(t), t)) for t in inside if id(t) not in foreign
                ]
            for tensor, leaf in pairs:
                receivers.setdefault(id(tensor), (tensor, []))[1].append((r, leaf))
            self._captured[r] = [leaf for _, leaf in pairs] + call.extra_leaves[r]
            if replicas is not None and r >= call.pipeline.n:
                self._captured[r] += replicas.trained[r]
        if not any(self.nested_backward):  # else graphs do not show all leaves
            leaves = [
                *chain(*self._other_leaves),
                *[id(node.variable) for node in chain(*self._known_nodes)],
            ]
            used = {id(call.original_of[k]) if k in call.original_of else k for k in leaves}
            receivers = {k: found for k, found in receivers.items() if k in used}
        self._receivers = list(receivers.values())
        self._known_nodes, self._tensors = [], []

    def attach_node(
        self, task: TrainingTask, head: _Outputs, inputs: list[Tensor], outputs: list[Any]
    ) -> list[Any]:
        self._find_receivers()
        if self._before.modules.changed():  # forwards may make parameters
            self._before.modules = self._module_state()
        self._before.modules.note_versions()  # forwards may renormalise them
        self._head = head
        self._task = task.backward_task(None, None, keep=False)  # without a reference to self
        self.inputs, self.trained = inputs, [tensor for tensor, _ in self._receivers]
        # The inputs of the node are aliases, for three reasons:
        # - The last alias gets its gradient first, so the gradients of one tensor are added up last
        #   micro-batch first, and hooks of parameters run in the order of one plain backward.
        # - Function.apply waits for the lock of a leaf and holds the GIL, while an operator in
        #   another thread may hold the lock of the leaf and wait for the GIL: a deadlock.
        # - On accelerators the engine synchronizes a node with nodes of the same device only, on
        #   the stream on which these were made.
        tensors = map(_alias, [*inputs, *self.trained])
        flags = list(chain.from_iterable(head.flags))
        needed = list(compress(tensors_in(outputs), flags))
        nodes = _Node.apply(self, needed, *tensors)  # type: ignore[no-untyped-call]
        made = dict(zip(map(id, needed), nodes, strict=True))  # a repeated tensor stays one

        def chosen(tensors: list[Tensor]) -> list[Tensor]:
            return [made.get(id(tensor), tensor) for tensor in tensors]

        return list(map_tensors(chosen, outputs))

    def backward(self, grads: Sequence[Tensor | None], *, keep: bool) -> list[Tensor | None]:
        """Runs all cells backward, given gradients of the outputs that need one.

        Returns the gradients of ``inputs`` and of ``trained``. ``keep`` allows another backward.
        """
        head, leaves, call = copy(self._head), copy(self), self._call
        leaves._retain_graph = keep
        leaves._sums = [{} for _ in self._captured]
        leaves._own_sums = [set() for _ in self._captured]
        leaves._captured = [[leaf for leaf in own if leaf.requires_grad] for own in self._captured]
        task = self._task.backward_task(leaves, head, keep=keep)
        following = iter(grads)
        head.grads = [list(islice(following, sum(flags))) for flags in head.flags]
        head.grads_ready = call.ready([grad for grad in grads if grad is not None])
        del grads
        pipeline, recomputed = call.pipeline, call.recomputed[: call.pipeline.n]
        steps = _backward_steps(
            pipeline.edges, call.m, pipeline.placement, recomputed, call.returns
        )
        pipeline.with_modes(partial(call.run_backward, steps, task))
        entered = [grad for _, grads in sorted(task.input_grads.items()) for grad in grads]
        with (
            call.as_caller()
        ):  # else on the default streams of other devices, in autograd's threads
            returned = [  # a replica may be on another device
                None if grad is None else moved(grad, tensor.device)
                for tensor, grad in zip(self.inputs, entered, strict=True)
            ]
            return [*returned, *leaves.sums()]

    def differentiable(self, grads: Sequence[Tensor | None], inputs: Sequence[Any]) -> list[Any]:
        """:meth:`backward` for ``create_graph``: runs the layers again, as they were before."""
        call = self._call
        try:
            swaps = self._before.swaps(object(), True)
        except RuntimeError as error:
            annotate(
                error,
                "a backward with create_graph runs the layers once more, except under "
                "syncpipe.inline(graph=True) around the call and backward",
            )
            raise

        def run() -> Sequence[Tensor]:
            modes: Any = ("never",) * call.pipeline.n
            try:
                with call.state.applied():
                    outputs = plain(call.pipeline, self._micro_batches, modes, seed=call.seed)
            finally:
                if call.state.autocasts:  # the caller may have left the autocast
                    torch.clear_autocast_cache()
            tensors = compress(tensors_in(outputs), chain.from_iterable(self._head.flags))
            pairs = [(t, g) for t, g in zip(tensors, grads, strict=True) if g is not None]
            roots, given = [tensor for tensor, _ in pairs], [grad for _, grad in pairs]
            return torch.autograd.grad(roots, inputs, given, create_graph=True, allow_unused=True)

        return list(with_swaps(swaps, run))

    def go_back(self, r: int, roots: Sequence[Any], grads: Sequence[Tensor], cell: Cell) -> None:
        own, streams = self._captured[r], self._call.streams_of[r]
        found: Sequence[Tensor | None]
        if self.nested_backward[r]:
            found = self._capture_in_grad(own, roots, grads)
        else:
            found = captured_grads(roots, grads, (*own, ANCHOR), keep=self._retain_graph)[:-1]
        if streams.backend is not None:
            # In one cell the engine adds up the gradients of a leaf on the stream on which the leaf
            # was first used: the caller's, or another worker's, which then owns their memory.
            for grad in found:
                if grad is not None:
                    streams.backend.keep(grad, streams.compute)
        self.add(r, own, found)

    def _capture_in_grad(self, own: list[Tensor], roots: Any, grads: Any) -> list[Tensor | None]:
        """Reads gradients from ``.grad``, because a layer runs a backward inside its own."""
        before = [leaf.grad for leaf in own]

        def run() -> list[Tensor | None]:
            for leaf in own:
                leaf.grad = None
            go_back(roots, grads, keep=self._retain_graph)
            return [leaf.grad for leaf in own]

        return run_and_undo(run, map(setattr, own, repeat("grad"), before))

    def pop_grads(self, r: int, leaves: Sequence[Tensor]) -> list[Tensor | None]:
        self._own_sums[r].difference_update(map(id, leaves))
        return [self._sums[r].pop(id(leaf), None) for leaf in leaves]

    def add(self, r: int, leaves: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
        # A first gradient is never added to in place: in `x + p` it is also the gradient of x,
        # which another stage may still read.
        sums, summed = self._sums[r], self._own_sums[r]
        into: list[Tensor] = []
        added: list[Tensor] = []
        for leaf, grad in zip(leaves, grads, strict=True):
            key = id(leaf)
            if grad is None:
                continue
            grad = grad.detach() if grad.requires_grad else grad  # a function returned a parameter
            if key not in sums:
                sums[key] = grad
            elif key in summed and type(grad) is type(sums[key]) is Tensor:
                into.append(sums[key])
                added.append(grad)
            else:
                sums[key] = _sum(sums[key], grad)
                # Not in place: a dense gradient into a sparse sum, anything into a batched one.
                if torch._C._has_storage(sums[key]):
                    summed.add(key)
        if into:
            torch._foreach_add_(into, added)

    def sums(self) -> list[Tensor | None]:
        for r, sums in enumerate(self._sums):
            self._call.release_to_caller(r, list(sums.values()))
        found: list[Tensor | None] = []
        for _, places in self._receivers:
            total = None
            for r, leaf in reversed(places):
                part = self._sums[r].pop(id(leaf), None)
                if part is not None:
                    total = part if total is None else _sum(total, part)
            if total is not None and type(total) is Tensor and storage_users(total) > 1:
                total = total.clone()
            found.append(total)
        return found


def _sum(first: Tensor, second: Tensor) -> Tensor:
    """The sum in autograd's order: ``dense + sparse``, because ``sparse + dense`` is an error."""
    return second + first if first.is_sparse else first + second


def _tensors_of(partition: nn.Module) -> list[Tensor]:
    found = {
        id(tensor): tensor
        for module in modules_of(partition)
        for tensor in chain(module._parameters.values(), module._buffers.values())
        if tensor is not None and tensor.requires_grad
    }
    return list(found.values())


class _Node(torch.autograd.Function):
    """``apply(work, outputs, *tensors)`` returns the outputs, as results of the tensors."""

    @staticmethod
    def forward(
        ctx: Any, work: Captured, outputs: list[Tensor], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.work = work
        ctx.save_for_backward(*work.inputs, *work.trained)
        return tuple([output.detach() for output in outputs])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        work: Captured | None = ctx.work
        if work is None:
            raise RuntimeError(_TWICE)
        if torch.is_grad_enabled():
            return None, None, *work.differentiable(grads, ctx.saved_tensors)
        keep = _retains_graph()
        if not keep:
            ctx.work = None
        return None, None, *work.backward(grads, keep=keep)


@lru_cache(maxsize=128)
def _backward_steps(
    edges: tuple[Edge, ...], m: int, placement: Devices, recomputed: Any, returns: Any
) -> Steps:
    """The backward half of the "gpipe" program."""
    steps = training_steps(edges, build("gpipe", m, placement), recomputed, returns=returns)
    return Steps(tuple([tuple([s for s in row if s.key[0] != "forward"]) for row in steps.rows]))
