"""Layers that write into their inputs, and those who must not see it.

* The mini-batch is the caller's, and its micro-batches share one version counter; and what a cell
  is computed again from must stay what it was. Such a tensor is *lent*, also to later stages that
  it was handed on to: a cell that writes into it works on a copy.
* What was sent twice is *aliased*, and so are inputs in overlapping memory: others should see what
  is written, but would not, and so it is refused. So it is in all stages for what is the *target*.
* What a layer hands on and keeps (a buffer, a state, a queue) may change with the next micro-batch
  before the next stage reads it. So a copy is sent, and that is *aliased*, too.

All other inputs are the cell's own. A layer may write in one call of a thousand, so what is lent is
copied in each call, unless the layers that see it are of kinds that never write. ``inference_mode``
counts no versions: there what is aliased is compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from sys import getrefcount
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as global_hooks

from syncpipe.data import (
    clones,
    map_tensors,
    overlap,
    place_of,
    storage_of,
    storage_users,
    tensors_in,
)
from syncpipe.runtime.recomputation import version_of

#: Marks of a tensor; 0 for one that belongs to the cell alone. No marks at all: all are 0.
SHARED, BORROWED, TARGET = 1, 2, 4


def may_write(partition: nn.Sequential, *, pops: bool) -> bool:
    """Whether layers may write into what their stage is given.

    PyTorch's own layers do so if they say ``inplace``, and of others nobody knows. Any of them may
    see a skip that the stage ``pops``.
    """
    if _hooked(partition) or global_hooks._global_forward_pre_hooks:
        return True
    for layer in _one_by_one(partition):
        if not all(map(_never_writes, layer.modules())) or global_hooks._global_forward_hooks:
            return True
        if not pops and any(p is not None for p in layer._parameters.values()):
            return False  # what it returns is new, and those behind it see that
    return False


def _one_by_one(layers: Iterable[nn.Module]) -> Iterator[nn.Module]:
    for layer in layers:
        if type(layer) is nn.Sequential and _never_writes(layer):
            yield from _one_by_one(layer)
        else:
            yield layer


def _never_writes(layer: nn.Module) -> bool:
    own = vars(layer)
    return not (
        not type(layer).__module__.startswith(("torch.nn.modules.", "syncpipe.layers.batchnorm"))
        or getattr(layer, "inplace", False)
        or "forward" in own
        or own.get("_compiled_call_impl")
        or _hooked(layer)
    )


def _hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def input_flags(inputs: Any, target: Any) -> list[int]:
    """The marks of what comes from the caller, with its target."""
    goals, tensors = tensors_in(target), tensors_in(inputs)
    return [
        BORROWED | flag | (TARGET if any(overlap(tensor, goal) for goal in goals) else 0)
        for tensor, flag in zip(tensors, overlap_flags(inputs), strict=True)
    ]


def overlap_flags(inputs: Any) -> list[int]:
    """The marks of tensors that overlap with each other."""
    tensors = tensors_in(inputs)

    def overlaps(tensor: Tensor) -> bool:
        views = (t for t in tensors if t is not tensor and place_of(t) != place_of(tensor))
        return any(overlap(tensor, other) for other in views)

    return [SHARED if overlaps(tensor) else 0 for tensor in tensors]


def passthrough_flags(
    inputs: Any, owners: Sequence[int], outputs: Any, *, all_borrowed: bool, target: Any = None
) -> list[int]:
    """The marks of a cell's outputs, for those that are what it was lent; nothing if all are 0.

    It was lent ``all_borrowed`` inputs if they are the caller's, or it is recomputed from them.
    """
    given, made = inputs[0], outputs[0]
    alone = type(given) is type(made) is Tensor and not (inputs[1] or outputs[1])
    if alone and storage_of(given) != storage_of(made):  # mostly it is so
        return []
    borrowed: dict[Any, int] = {}
    flags = owners or input_flags(inputs, target)
    for tensor, flag in zip(tensors_in(inputs), flags, strict=True):
        storage = storage_of(tensor)
        own = (flag | BORROWED if all_borrowed else flag) & (BORROWED | TARGET)
        borrowed[storage] = borrowed.get(storage, 0) | own
    found = [borrowed.get(storage_of(tensor), 0) for tensor in tensors_in(outputs)]
    return found if any(found) else []


def sent_flags(outputs: tuple[Any, Sequence[Any]], passed: Sequence[int]) -> list[Sequence[int]]:
    """The marks of a cell's activation, and of each of its skips, on their way to other stages.

    ``passed`` is what :func:`passthrough_flags` says of them.
    """
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
    """The outputs of a cell to send, copies of those that something else holds; and their marks.

    What has a graph was made in the cell, and no parameter changes before the optimizer's step
    (unless ``all_leaves`` may). What the cell was given is marked already.
    """
    alone = type(outputs[0]) is Tensor and not outputs[1]
    tensors = [outputs[0]] if alone else tensors_in(outputs)
    held = [
        (references > _ALONE or _is_held(tensor))
        and tensor.grad_fn is None
        and (all_leaves or not tensor.requires_grad)
        for references, tensor in zip(map(getrefcount, tensors), tensors, strict=True)
    ]
    if True not in held:
        return outputs, passed
    given = set(map(storage_of, tensors_in(inputs)))
    held = [each and storage_of(t) not in given for each, t in zip(held, tensors, strict=True)]
    made = iter(clones([tensor for tensor, each in zip(tensors, held, strict=True) if each]))
    sent = [next(made) if each else t for t, each in zip(tensors, held, strict=True)]
    owners = [
        flag | SHARED * each for flag, each in zip(passed or [0] * len(sent), held, strict=True)
    ]
    return map_tensors(lambda _: sent, outputs), owners


def _is_held(tensor: Tensor) -> bool:
    """Whether other tensors use its memory, or something else the tensor of which it is a view."""
    view = tensor._base is not None
    return (
        tensor._use_count() > 1  # type: ignore[attr-defined]
        or storage_users(tensor) > 1 + view
        or (view and _references_to_base(tensor) > _ALONE_BASE)
    )


def _references_to_base(tensor: Tensor) -> int:
    return getrefcount(tensor._base)


_OUTPUTS = torch.empty(1), ()
_ALONE = next(map(getrefcount, tensors_in(_OUTPUTS)))  # the outputs, and who asks
_ALONE_BASE = _references_to_base(torch.empty(2)[:1])


class GuardedInputs:
    """The inputs of a cell that may write into them (``copy``), and a ``tree`` that it gets.

    Whatever the marks are, all are lent if the cell is computed ``again`` from them.
    """

    def __init__(
        self, inputs: Any, owners: Sequence[int], *, copy: bool, kept: bool = False
    ) -> None:
        tensors, grad = tensors_in(inputs), torch.is_grad_enabled()
        owners = owners or [0] * len(tensors)
        self._flags = [flag | BORROWED for flag in owners] if kept else owners
        # What is aliased will be refused. PyTorch refuses to write into a leaf, and autocast knows
        # it from a copy.
        to_copy = [
            copy and flag == BORROWED and not (grad and tensor.is_leaf and tensor.requires_grad)
            for flag, tensor in zip(self._flags, tensors, strict=True)
        ]
        made = iter(clones([tensor for tensor, each in zip(tensors, to_copy, strict=True) if each]))
        self._tensors = [
            next(made) if each else tensor for tensor, each in zip(tensors, to_copy, strict=True)
        ]
        self.tree = map_tensors(lambda _: self._tensors, inputs)  # containers are copied, too
        compare = torch.is_inference_mode_enabled()
        self._before: list[Any] = [
            tensor.clone() if compare and flag & (SHARED | TARGET) else version_of(tensor)
            for flag, tensor in zip(self._flags, self._tensors, strict=True)
        ]

    def written(self, where: str) -> bool:
        """Whether the cell has written into any of them.

        Raises:
            RuntimeError: somebody else should have seen it.
        """
        written = [
            bool(((now != then) & (now == now)).any())  # what is no number equals nothing
            if isinstance(then, Tensor)
            else version_of(now) != then
            for now, then in zip(self._tensors, self._before, strict=True)
        ]
        shared = [flag & (SHARED | TARGET) for flag in self._flags]
        if any(each and flag for each, flag in zip(written, shared, strict=True)):
            raise RuntimeError(
                f"{where} modified in place a tensor whose memory others use as well (another "
                "input or the target that is a view of it; or it crossed a stage boundary more "
                "than once, as a skip for example; or a layer keeps it): they would not see it. "
                "Let the layer work on a copy (for an activation: inplace=False)"
            )
        return True in written
