"""``pipe(x)`` and ``backward()`` in all processes.

Backward is the caller's, and runs in threads of autograd. It begins with the gradient of what the
pipe returned; there hooks are put on the parameters that this backward adds to, and taken away when
it is over: no other backward and no ``train_batch`` meets them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from syncpipe.distributed.averaging import Averaging
from syncpipe.distributed.reduction import Reduction
from syncpipe.runtime.engine import RUNNING
from syncpipe.tree import tensors_in

__all__ = ["average_backward"]

_C: Any = torch._C
_engine: Any = torch.autograd.Variable._execution_engine


def average_backward(averaging: Averaging, partitions: Sequence[nn.Module], output: Any) -> None:
    """Lets a backward through an output of ``pipe(x)`` end with gradients of all processes."""
    if not (averaging.syncs and torch.is_grad_enabled()):
        return
    found = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
    if not found:
        return
    if RUNNING.get():
        raise RuntimeError(
            "a data-parallel pipe is used inside of another pipe, whose backward goes through it "
            "once for each micro-batch: make the outer pipe data-parallel instead"
        )

    def begin(grad: Tensor) -> None:
        _Backward.begin(averaging, partitions)

    for tensor in found:
        tensor.register_hook(begin)  # type: ignore[no-untyped-call]


class _Backward:
    """What autograd calls when a backward is over; if it is dropped uncalled, that has failed."""

    def __init__(self, averaging: Averaging, reduction: Reduction) -> None:
        self._averaging, self._reduction = averaging, reduction
        self._handles: list[Any] = []

    @classmethod
    def begin(cls, averaging: Averaging, partitions: Sequence[nn.Module]) -> None:
        """Call in a backward, before it comes to any parameter."""
        task = _C._current_graph_task_id()
        if averaging.backward == task:  # of several outputs, perhaps of several calls
            return
        buckets = averaging.buckets(_own(partitions))
        used = [{id(leaf) for leaf in bucket.leaves if _adds_to(leaf)} for bucket in buckets.all]
        if not any(used):  # autograd.grad, which leaves .grad alone
            return
        if torch.is_grad_enabled():
            raise RuntimeError(
                "backward(create_graph=True) through a data-parallel pipe: gradients of other "
                "processes have no graph here. Use torch.autograd.grad, which averages nothing"
            )
        reduction = averaging.start("backward() of pipe(x)")
        self = cls(averaging, reduction)
        averaging.backward = task
        reduction.signature += (("what its parameters are", buckets.signature),)
        reduction.buckets = buckets.all
        for k, left in enumerate(used):
            self._follow(k, buckets.all[k].leaves, left)
        reduction.ready([k for k, left in enumerate(used) if not left])
        reduction.begin(1, True)
        _engine.queue_callback(self)

    def _follow(self, k: int, leaves: Sequence[Tensor], left: set[int]) -> None:
        """Waits for the gradients of a bucket, of which those in ``left`` are to come."""
        reduction = self._reduction

        def added(leaf: Tensor) -> None:
            if id(leaf) not in left:
                raise RuntimeError(
                    f"backward added to a parameter of a data-parallel pipe (shape "
                    f"{list(leaf.shape)}) behind its back: a layer has a backward inside of its "
                    "own (torch.utils.checkpoint with use_reentrant=True). Use train_batch, or "
                    "use_reentrant=False"
                )
            left.remove(id(leaf))
            if not left:
                reduction.ready([k])

        for leaf in leaves:
            handle = leaf.register_post_accumulate_grad_hook(added)  # type: ignore[no-untyped-call]
            self._handles.append(handle)

    def __call__(self) -> None:
        self._remove()
        try:
            self._averaging.finish(self._reduction)
        except BaseException as error:
            self._reduction.close(error)
            raise

    def __del__(self) -> None:
        self._remove()
        if not self._reduction.closed:
            self._reduction.fail(RuntimeError("backward() of pipe(x) raised there"))

    def _remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _own(partitions: Sequence[nn.Module]) -> list[list[Tensor]]:
    """For each stage the parameters that it has first."""
    seen: dict[int, Tensor] = {}
    found: list[list[Tensor]] = []
    for partition in partitions:
        new = {id(p): p for p in partition.parameters() if id(p) not in seen}
        seen.update(new)
        found.append([*new.values()])
    return found


def _adds_to(leaf: Tensor) -> bool:
    """Whether the backward that runs adds to ``.grad`` of a leaf."""
    try:
        return bool(_C._will_engine_execute_node(torch.autograd.graph.get_gradient_edge(leaf).node))
    except RuntimeError:  # raised for a leaf that autograd.grad was asked for
        return False
