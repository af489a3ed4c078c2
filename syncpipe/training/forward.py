"""``pipe(x)``: the forward half of the "gpipe" program, and a node of autograd that runs the other.

    x, parameters --> [ node ] --> outputs --> the caller's graph --> loss
                         |
                         backward: gradients of the outputs in, the workers go back cell by cell,
                         gradients of x and of the parameters out

So the caller's graph has one gradient for each tensor, as of any module: hooks of parameters,
``inputs=`` and ``DistributedDataParallel`` see nothing of micro-batches. Who needs the graph of the
layers itself gets it from :func:`plain`.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from syncpipe.data import gather, map_tensors, scatter, tensors_in
from syncpipe.options import StageMode
from syncpipe.runtime.recorder import Recorder
from syncpipe.runtime.streams import moved
from syncpipe.schedules.build import build
from syncpipe.schedules.schedule import Devices
from syncpipe.schedules.steps import Edge, Steps, forward_steps, numbers_of, training_steps
from syncpipe.stages.call import Call, needs_graph
from syncpipe.stages.pipeline import Pipeline
from syncpipe.stages.plain import plain
from syncpipe.training.captured import Captured
from syncpipe.training.cell import Cell
from syncpipe.training.sources import Source
from syncpipe.training.task import TrainingTask

__all__ = ["forward"]


def forward(
    pipeline: Pipeline,
    input: Any,
    *,
    chunks: int,
    checkpoint: Sequence[StageMode],
    inline: Any,
    recorder: Recorder | None,
) -> Any:
    """Runs a mini-batch through a pipeline.

    Args:
        pipeline: the pipeline.
        input: a tree of tensors and other values, on the first device.
        chunks: at most so many micro-batches.
        checkpoint: for each stage its mode.
        inline: run on the calling thread; ``"graph"``: and leave the graph of the layers.
        recorder: writes down what runs when, for a trace.
    """
    micro_batches = scatter(input, chunks)
    if inline == "graph" or needs_graph():
        return gather(plain(pipeline, micro_batches, checkpoint))
    call = Call(
        pipeline, len(micro_batches), checkpoint=checkpoint, inline=bool(inline),
        recorder=recorder, graph=True,
    )  # fmt: skip
    source, head = _MicroBatches(micro_batches), _Outputs(call)
    leaves = Captured(call) if call.state.grad else None
    task = TrainingTask(call, source, head, leaves=leaves)
    steps = forward_steps(pipeline.edges, call.m, pipeline.placement)
    call.run(steps, task, micro_batches[0])
    outputs, head.outputs = call.collected(head.outputs), []
    if leaves is not None and any(map(any, head.flags)):
        outputs = _with_graph(_Backward(task, leaves, head, source, micro_batches), outputs)
    return gather(outputs)


class _MicroBatches(Source):
    """The parts of an input that is there."""

    def __init__(self, micro_batches: list[Any]) -> None:
        super().__init__(len(micro_batches))
        self._waiting = list(micro_batches)

    def pull(self, i: int) -> Any:
        value, self._waiting[i] = self._waiting[i], None
        return self._pulled(i, value)


class _Outputs:
    """The head of a task that gives outputs back, and whose gradients come from outside.

    Attributes:
        outputs: for each micro-batch its output, detached.
        flags: for each micro-batch which of its tensors need a gradient.
        grads: for each micro-batch the gradients of these, on the way back.
        after: when they are there.
    """

    def __init__(self, call: Call) -> None:
        self._call = call
        m = call.m
        self.outputs: list[Any] = [None] * m
        self.flags: list[Sequence[bool]] = [()] * m
        self.grads: list[list[Tensor | None]] = [[] for _ in range(m)]
        self.after: Any = None

    def first_size(self, size: int) -> None:
        """The head of ``train_batch`` asks for it."""

    def take(self, j: int, i: int, output: Any, target: Any, size: int, cell: Cell) -> None:
        """Takes the output of a micro-batch."""
        self.outputs[i], self.flags[i] = cell.detached(output)

    def given(self, output: Any) -> Any:
        """The tensors of an output whose gradients come from outside."""
        return output

    def go_back(self, j: int, i: int, cell: Cell) -> list[list[Tensor | None]]:
        """The gradients of the outputs of a micro-batch, in a list."""
        grads, self.grads[i] = self.grads[i], []
        there = [grad for grad in grads if grad is not None]
        brought = iter(self._call.to_stage(there, j, self.after))
        return [[None if grad is None else next(brought) for grad in grads]]


class _Backward:
    """What the node of a call runs.

    Args:
        task: the mini-batch, which has gone forward.
        leaves: what gets gradients.
        head: took the outputs.
        source: gave the inputs.
        micro_batches: the inputs with their graph.
    """

    def __init__(
        self,
        task: TrainingTask,
        leaves: Captured,
        head: _Outputs,
        source: _MicroBatches,
        micro_batches: list[Any],
    ) -> None:
        self.task, self.leaves, self.head = task, leaves, head
        self.micro_batches = micro_batches
        self.flags = head.flags
        # In the order in which the gradients of one tensor are added up: last micro-batch first.
        self.order = range(len(micro_batches))[::-1]
        self.entered = [tensor for i in self.order for tensor in source.inputs(i)]
        self.trained = leaves.close()

    def run(
        self, grads: Sequence[Tensor | None], needed: Sequence[bool], *, keep: bool
    ) -> list[Tensor | None]:
        """Goes back through all cells.

        Args:
            grads: of the outputs that need one.
            needed: which of the gradients are.
            keep: let it be done again.

        Returns:
            The gradients of ``entered`` and of ``trained``.
        """
        head, leaves = copy(self.head), self.leaves.begun(keep)
        lowest = (
            0 if any(needed[: len(self.entered)]) else leaves.lowest(needed[len(self.entered) :])
        )
        task = self.task.going_back(leaves, head, keep=keep)
        call = task.call
        following = iter(grads)
        head.grads = [[next(following) for flag in flags if flag] for flags in self.flags]
        head.after = call.ready([grad for grad in grads if grad is not None])
        del grads
        steps = _backward_steps(
            call.pipeline.edges,
            call.m,
            call.pipeline.placement,
            call.rematerialized[: call.pipeline.n],
            () if call.ties is None else call.ties.edges,
            lowest,
        )
        call.run_backward(steps, task)
        entered = [grad for i in self.order for grad in task.entered.get(i, ())]
        if not entered:
            entered = [None] * len(self.entered)
        with call.as_caller():  # a thread of autograd uses the default streams of other devices
            returned = [  # by a replica on a device of its own, perhaps
                None if grad is None else moved(grad, tensor.device)
                for tensor, grad in zip(self.entered, entered, strict=True)
            ]
            return [*returned, *leaves.sums()]

    def recorded(self, grads: Sequence[Tensor | None], inputs: Sequence[Tensor]) -> list[Any]:
        """The same with a graph of its own: of the layers, which run again."""
        call = self.task.call
        with torch.enable_grad():
            outputs = plain(
                call.pipeline, self.micro_batches, ("never",) * call.pipeline.n,
                seed=call.seed, swaps=self.leaves.swaps(),
            )  # fmt: skip
            tensors = [
                t
                for output, flags in zip(outputs, self.flags, strict=True)
                for t, flag in zip(tensors_in(output), flags, strict=True)
                if flag
            ]
            pairs = [(t, g) for t, g in zip(tensors, grads, strict=True) if g is not None]
            found = torch.autograd.grad(
                [t for t, _ in pairs], inputs, [g for _, g in pairs],
                create_graph=True, allow_unused=True,
            )  # fmt: skip
        return list(found)


class _Node(torch.autograd.Function):
    """``apply(backward, outputs, *tensors)``: the outputs as results of the tensors."""

    @staticmethod
    def forward(
        ctx: Any, backward: _Backward, outputs: list[Tensor], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.work = backward
        ctx.save_for_backward(*backward.entered, *backward.trained)
        return tuple([output.detach() for output in outputs])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        work: _Backward | None = ctx.work
        if work is None:
            raise RuntimeError(_TWICE)
        if torch.is_grad_enabled():
            return None, None, *work.recorded(grads, ctx.saved_tensors)
        keep = _graph_stays()
        if not keep:
            ctx.work = None
        needed = [_is_needed(node) for node, _ in ctx.next_functions]
        return None, None, *work.run(grads, needed, keep=keep)


class _Pass(torch.autograd.Function):
    """``apply(*tensors)``: what takes gradients to the tensors of one stage, on its device.

    The engine lets a node wait for another one of the same device only, on the stream on which that
    was made.
    """

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple([tensor.detach() for tensor in tensors])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return grads


def _is_needed(node: Any) -> bool:
    """Whether the backward that runs has a use for the gradient of an input."""
    try:
        return node is not None and bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # raised for a leaf that autograd.grad was asked for
        return True


def _with_graph(backward: _Backward, outputs: list[Any]) -> list[Any]:
    """The outputs, as results of the node."""
    flat = tensors_in(outputs)
    flags = [flag for flags in backward.flags for flag in flags]
    needed = [tensor for tensor, flag in zip(flat, flags, strict=True) if flag]
    tensors = backward.leaves.passed(backward.entered, backward.trained, _Pass.apply)
    made = iter(_Node.apply(backward, needed, *tensors))  # type: ignore[no-untyped-call]

    def joined(tensors: list[Tensor]) -> list[Tensor]:
        return [next(made) if flag else t for t, flag in zip(tensors, flags, strict=True)]

    joined_outputs: list[Any] = map_tensors(joined, outputs)
    return joined_outputs


@lru_cache(maxsize=128)
def _backward_steps(
    edges: tuple[Edge, ...],
    m: int,
    placement: Devices,
    rematerialized: tuple[int, ...],
    returns: tuple[Edge, ...],
    lowest: int,
) -> Steps:
    """The second half of the "gpipe" program, down to a stage."""
    steps = training_steps(edges, build("gpipe", m, placement), rematerialized, returns=returns)
    numbers = numbers_of(placement)
    there = {number for those in numbers[lowest:] for number in those}
    rows = [
        [step for step in row if step.what[0] != "forward" and step.what[1] in there]
        for row in steps.of
    ]
    return Steps(tuple(map(tuple, rows)))


_TWICE = (
    "Trying to backward through a mini-batch of a pipe a second time: what its layers stored is "
    "freed by the first backward. Give that one retain_graph=True"
)
_graph_stays = torch._C._autograd._get_current_graph_task_keep_graph  # as for retain_graph=True
