"""Ownership of tensors: layers that write into their inputs.

* BORROWED: the caller's mini-batch, whose micro-batches share one version counter, and the inputs
  of a cell that is recomputed; also in later stages to which a layer passes such a tensor. A cell
  that may write into it works on a copy.
* SHARED: a tensor that was sent twice, or inputs in overlapping memory. Writing is refused, since
  other users would not see it.
* TARGET: the target's memory. Writing is refused in all stages.

A tensor that a layer both returns and keeps (a buffer, a state, a queue) may change with the next
micro-batch before the next stage reads it. So a copy is sent, flagged SHARED.

The cell owns all other inputs. A layer may write in one call of a thousand, so each call copies
borrowed tensors, unless all layers that see them are of kinds that never write. Under
``inference_mode``, which counts no versions, values of shared tensors are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from sys import getrefcount
from typing import Any

import torch
from torch import Tensor

from syncpipe.data.trees import map_tensors, tensors_in
from syncpipe.runtime.recomputation import version_of
from syncpipe.storage import clones, overlap, place_of, storage_of, storage_users

#: Ownership flags of a tensor; 0: the cell owns it. An empty list of flags: all are 0.
SHARED, BORROWED, TARGET = 1, 2, 4


def in_place(task: Any, r: int, inner: Any) -> Any:
    """Passes ownership flags from the inputs of a cell to the outputs that it sends."""
    call, run, first, last = task.call, task.call.runs[r], task.first[r], task.last[r]
    recomputed = call.recomputed[r]
    if last and not first:
        return inner

    def outer(i: int, cell: Any, inputs: Any) -> Any:
        if first and run.writes:
            cell.owners = input_flags(inputs[0], task.source.peek_target(i))
        outputs = inner(i, cell, inputs)
        if last:
            return outputs
        sent: Sequence[int] = ()
        borrowed = first or i < recomputed
        if cell.owners or borrowed:
            target = partial(task.source.peek_target, i) if first else None
            sent = passthrough_flags(
                inputs, cell.owners, outputs, all_borrowed=borrowed, target=target
            )
        single = type(outputs[0]) is Tensor and not outputs[1]
        if not single or outputs[0].grad_fn is None:
            outputs, sent = own_memory(inputs, outputs, sent, all_leaves=run.stage.renorms)
        if sent or not single:
            cell.sent_owners = sent_flags(outputs, sent)
        return outputs

    return outer


def input_flags(inputs: Any, target: Any) -> list[int]:
    """The ownership flags of inputs that come from the caller, with their target."""
    goals, tensors = tensors_in(target), tensors_in(inputs)
    return [
        BORROWED | flag | (TARGET if any(overlap(tensor, goal) for goal in goals) else 0)
        for tensor, flag in zip(tensors, overlap_flags(inputs), strict=True)
    ]


def overlap_flags(inputs: Any) -> list[int]:
    """The ownership flags of inputs, SHARED where two tensors overlap."""
    tensors = tensors_in(inputs)

    def overlaps(tensor: Tensor) -> bool:
        views = (t for t in tensors if t is not tensor and place_of(t) != place_of(tensor))
        return any(overlap(tensor, other) for other in views)

    return [SHARED if overlaps(tensor) else 0 for tensor in tensors]


def passthrough_flags(
    inputs: Any,
    owners: Sequence[int],
    outputs: Any,
    *,
    all_borrowed: bool,
    target: Callable[[], Any] | None = None,
) -> list[int]:
    """The ownership flags of outputs that are borrowed inputs passed through; empty if all are 0.

    ``all_borrowed``: the inputs are the caller's, or the cell is recomputed from them. ``target``
    returns the target of an input of the first stage; None on other stages.
    """
    given, made = inputs[0], outputs[0]
    alone = type(given) is type(made) is Tensor and not (inputs[1] or outputs[1])
    if alone and storage_of(given) != storage_of(made):  # the common case
        return []
    passed = BORROWED | TARGET  # inputs of the first stage that overlap need not both go on
    passed |= SHARED if target is None else 0
    borrowed: dict[Any, int] = {}
    flags = owners or input_flags(inputs, None if target is None else target())
    for tensor, flag in zip(tensors_in(inputs), flags, strict=True):
        storage = storage_of(tensor)
        own = (flag | BORROWED if all_borrowed else flag) & passed
        borrowed[storage] = borrowed.get(storage, 0) | own
    found = [borrowed.get(storage_of(tensor), 0) for tensor in tensors_in(outputs)]
    return found if any(found) else []


def sent_flags(outputs: tuple[Any, Sequence[Any]], passed: Sequence[int]) -> list[Sequence[int]]:
    """The ownership flags of a sent activation and of each skip, from :func:`passthrough_flags`."""
    parts = [tensors_in(part) for part in (outputs[0], *outputs[1])]
    all_parts = [tensor for part in parts for tensor in part]
    storages = [storage_of(tensor) for tensor in all_parts]
    owners = list(passed) or [0] * len(storages)
    for k, storage in enumerate(storages):
        if storages.count(storage) > 1 and any(
            overlap(all_parts[k], other) for n, other in enumerate(all_parts) if n != k
        ):
            owners[k] |= SHARED
    following = iter(owners)
    return [[next(following) for _ in part] for part in parts]


def own_memory(
    inputs: Any, outputs: Any, passed: Sequence[int], *, all_leaves: bool
) -> tuple[Any, Sequence[int]]:
    """The outputs of a cell, with copies of those that a layer keeps; and their ownership flags.

    Outputs with a graph are new, and parameters change in the optimizer's step only (unless
    ``all_leaves`` may change). Inputs that are passed through have their flags already.
    """
    tensors = tensors_in(outputs)
    kept = [
        (references > _ALONE or _is_held(tensor))
        and tensor.grad_fn is None
        and (all_leaves or not tensor.requires_grad)
        for references, tensor in zip(map(getrefcount, tensors), tensors, strict=True)
    ]
    if True not in kept:
        return outputs, passed
    given = set(map(storage_of, tensors_in(inputs)))
    kept = [each and storage_of(t) not in given for each, t in zip(kept, tensors, strict=True)]
    sent = _with_copies(tensors, kept)
    owners = [
        flag | SHARED * each for flag, each in zip(passed or [0] * len(sent), kept, strict=True)
    ]
    return map_tensors(lambda _: sent, outputs), owners


def _with_copies(tensors: Sequence[Tensor], to_copy: Sequence[bool]) -> list[Tensor]:
    made = iter(clones([tensor for tensor, copy in zip(tensors, to_copy, strict=True) if copy]))
    return [next(made) if copy else t for t, copy in zip(tensors, to_copy, strict=True)]


def _is_held(tensor: Tensor) -> bool:
    """Whether other tensors use the tensor's memory, or other references its base."""
    view = tensor._base is not None
    return (
        tensor._use_count() > 1  # type: ignore[attr-defined]
        or storage_users(tensor) > 1 + view
        or (view and _references_to_base(tensor) > _ALONE_BASE)
    )


def _references_to_base(tensor: Tensor) -> int:
    return getrefcount(tensor._base)


_OUTPUTS = torch.empty(1), ()
_ALONE = next(map(getrefcount, tensors_in(_OUTPUTS)))  # references without other holders
_ALONE_BASE = _references_to_base(torch.empty(2)[:1])


class GuardedInputs:
    """The inputs of a cell (``tree``), with copies of borrowed tensors if it may write (``copy``).

    All count as borrowed if they are ``kept`` for recomputation.
    """

    def __init__(
        self, inputs: Any, owners: Sequence[int], *, copy: bool, kept: bool = False
    ) -> None:
        tensors, grad = tensors_in(inputs), torch.is_grad_enabled()
        owners = owners or [0] * len(tensors)
        self._flags = [flag | BORROWED for flag in owners] if kept else owners
        # Writing into shared tensors is refused later. PyTorch refuses to write into a leaf, and
        # autocast treats a leaf and its copy differently.
        to_copy = [
            copy and flag == BORROWED and not (grad and tensor.is_leaf and tensor.requires_grad)
            for flag, tensor in zip(self._flags, tensors, strict=True)
        ]
        self._tensors = _with_copies(tensors, to_copy)
        self.tree = map_tensors(lambda _: self._tensors, inputs)  # containers are copied, too
        compare = torch.is_inference_mode_enabled()
        self._before: list[Any] = [
            tensor.clone() if compare and flag & (SHARED | TARGET) else version_of(tensor)
            for flag, tensor in zip(self._flags, self._tensors, strict=True)
        ]

    def check_writes(self, where: str) -> bool:
        """Whether the cell has written into an input; ``RuntimeError`` if into a shared one."""
        written = [
            bool(((now != then) & (now == now)).any())  # NaN is unequal to itself
            if isinstance(then, Tensor)
            else version_of(now) != then
            for now, then in zip(self._tensors, self._before, strict=True)
        ]
        shared = [flag & (SHARED | TARGET) for flag in self._flags]
        if any(each and flag for each, flag in zip(written, shared, strict=True)):
            raise RuntimeError(
                f"{where} modified in place a tensor whose memory others use as well (another "
                "input or the target is a view of it; or it crossed a stage boundary more than "
                "once, for example as a skip; or a layer keeps it), and they would not see the "
                "change. Let the layer work on a copy (for an activation: inplace=False)"
            )
        return True in written
