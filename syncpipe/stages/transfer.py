"""The nodes that the pipeline itself puts into the autograd graph.

The graph of three micro-batches on stage j, with the order in which backward walks it:

    stage (2,j) --> Gate(2,j) --> Send --> stage (2,j+1)      backward starts on the right
                       ^
                       | token
    stage (1,j) --> Gate(1,j) --> Send --> stage (1,j+1)
                       ^
                       | token, through Early(0,j) where the cell is re-materialized
    stage (0,j) --> Gate(0,j) --> Send --> stage (0,j+1)

A gate passes the outputs of its cell. Its backward runs when their gradients are there *and* the
gate of the next micro-batch has run (by the token, an empty tensor whose gradient is never
anything but None). All nodes of a stage are made by one thread, so among nodes that are ready
autograd takes those of the later micro-batch first: stage j goes back micro-batch by micro-batch,
last one first, as the plain model does. ``Early`` hangs between two gates: when micro-batch 1 is
through, cell (0,j) is recomputed, while its gradient is still being computed by stage j+1.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from syncpipe.runtime.rematerialization.checkpoint import CheckpointFrame
from syncpipe.runtime.streams import Lane, same_memory
from syncpipe.tree import map_tensors

__all__ = ["Note", "early", "gate", "send", "sent"]


def gate(tokens: list[Tensor], outputs: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Passes the differentiable outputs of a cell on, and orders its backward.

    Args:
        tokens: those of the gates that go back before this one.
        outputs: what the cell computed.

    Returns:
        The cell's own token, and the outputs.
    """
    token, *passed = Gate.apply(len(tokens), *tokens, *outputs)  # type: ignore[no-untyped-call]
    return token, passed


def early(frame: CheckpointFrame, token: Tensor) -> Tensor:
    """A token whose backward recomputes a cell, if anything of it is still needed."""
    result: Tensor = Early.apply(frame, token)  # type: ignore[no-untyped-call]
    return result


#: Makes a context that records a transfer.
Note = Callable[..., AbstractContextManager[None]]


def send(
    source: Lane, target: Lane, tensors: list[Tensor], note: Note | None = None
) -> tuple[list[Tensor], Any]:
    """Sends tensors to another lane, and in backward their gradients the other way.

    Args:
        source: where they are.
        target: where they are needed.
        tensors: what to send.
        note: ``note(backward=True)`` is the context in which to send the gradients back.

    Returns:
        The tensors on the device of ``target``, and the event that says when they are there.
    """
    events: list[Any] = []
    # Autograd runs a node on the stream on which it was made. This one starts where gradients come
    # from: several of them are added there first, and what it sends waits for that stream.
    with target.active():
        sent = Send.apply(source, target, events, note, *tensors)  # type: ignore[no-untyped-call]
    return list(sent), events[0]


def sent(source: Lane, target: Lane, value: Any, graph: bool, note: Note | None) -> tuple[Any, Any]:
    """Sends a tree to another lane.

    Args:
        source: where it is.
        target: where it is needed.
        value: the tree.
        graph: let gradients come back the same way when autograd asks for them.
        note: as for :func:`send`.

    Returns:
        The tree on the device of ``target``, and the event that says when it is there.
    """
    if source.streams is None and same_memory(source.device, target.device):
        return value, None
    events: list[Any] = []

    def moved(tensors: list[Tensor]) -> list[Tensor]:
        if graph:
            there, event = send(source, target, tensors, note)
        else:
            there, event = source.send(tensors, target)
        events.append(event)
        return there

    value = map_tensors(moved, value)
    return value, events[0] if events else None


class Gate(torch.autograd.Function):
    """``apply(number of tokens, *tokens, *outputs)``; see :func:`gate`."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.count = count
        outputs = tensors[count:]
        return (outputs[0].new_empty(0, dtype=torch.float32), *(t.detach() for t in outputs))

    @staticmethod
    def backward(ctx: Any, _token: None, *grads: Tensor | None) -> Any:
        return None, *(None for _ in range(ctx.count)), *grads


class Early(torch.autograd.Function):
    """``apply(frame, token)``; see :func:`early`."""

    @staticmethod
    def forward(ctx: Any, frame: CheckpointFrame, token: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.frame = weakref.ref(frame)  # the nodes of the cell own it
        return token.detach()

    @staticmethod
    def backward(ctx: Any, _token: None) -> Any:
        frame = ctx.frame()
        if frame is not None:
            frame.recompute()
        return None, None


class Send(torch.autograd.Function):
    """``apply(source, target, events, note, *tensors)`` fills ``events``; see :func:`send`."""

    @staticmethod
    def forward(
        ctx: Any, source: Lane, target: Lane, events: list[Any], note: Any, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.source, ctx.target, ctx.note = source, target, note
        sent, event = source.send(list(tensors), target)
        events.append(event)
        outputs = [c.detach() if c is t else c for t, c in zip(tensors, sent, strict=True)]
        needed = ctx.needs_input_grad[4:]
        ctx.mark_non_differentiable(
            *(output for output, need in zip(outputs, needed, strict=True) if not need)
        )
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        there = [grad for grad in grads if grad is not None]
        if not there:
            return None, None, None, None, *grads
        with nullcontext() if ctx.note is None else ctx.note(backward=True):
            back, event = send(ctx.target, ctx.source, there)
        ctx.source.wait_for_caller()  # who may still read what is added to: .grad
        ctx.source.receive(event, back)
        ctx.target.keep_until_copied(there)
        arrived = iter(back)
        return None, None, None, None, *(None if grad is None else next(arrived) for grad in grads)


class Uses(torch.autograd.Function):
    """``apply(count, tensor)``: the tensor for one more, and for each of ``count`` uses.

    Backward adds up the gradients of these in a fixed order, whenever they come.
    """

    @staticmethod
    def forward(ctx: Any, count: int, tensor: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple([tensor.detach() for _ in range(1 + count)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        total = None
        for grad in grads:
            if grad is not None:
                total = grad if total is None else total + grad
        return None, total


class SendCopy(Send):
    """``apply(source, target, note, copy, tensor)``: a copy that is there already.

    Its gradient goes the way that those of :class:`Send` go.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, source: Lane, target: Lane, note: Any, copy: Tensor, tensor: Tensor
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.source, ctx.target, ctx.note = source, target, note
        return copy.detach()
