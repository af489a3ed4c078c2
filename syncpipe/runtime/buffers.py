"""Buffers under re-materialization: a second forward that nobody can see in them.

A cell that runs twice must start twice from the same buffers, and leave them as after one run:

* BatchNorm and its relatives update their statistics but in training do not read them. Their
  recomputation works on copies, thrown away afterwards.
* Other buffers that a stage changes (spectral norm's vectors, a codebook) are read as well, so they
  are copied before each forward; which ones they are is seen at the first.

Module attributes are shared by all threads, so whoever recomputes a stage with such buffers has the
stage to itself: forwards and recomputations take its lock. A pipe inside a layer is covered by the
lock of the outermost stage, which makes one order of locks: stage before random state.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from operator import setitem
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import SyncBatchNorm, _NormBase

from syncpipe.batchnorm import DeferredBatchNorm

__all__ = ["OUTERMOST", "Buffers"]

_Lock = Any  # threading.RLock is a function
#: The lock of the outermost stage that runs here; it covers the pipes inside.
OUTERMOST: ContextVar[_Lock] = ContextVar("syncpipe_stage_lock", default=None)

_WRITE_ONLY = frozenset(
    {
        nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.InstanceNorm1d, nn.InstanceNorm2d,
        nn.InstanceNorm3d, SyncBatchNorm,
    }
)  # fmt: skip

Place = tuple[nn.Module, str]


class Buffers:
    """The buffers of one stage.

    Args:
        module: the partition.
    """

    def __init__(self, module: nn.Module) -> None:
        self.lock: _Lock = threading.RLock()
        self._norms: list[nn.Module] = []
        self._others: list[nn.Module] = []
        self._changing: set[Place] = set()
        for child in module.modules():
            if not any(buffer is not None for buffer in child._buffers.values()):
                continue
            if type(child) in _WRITE_ONLY or isinstance(child, DeferredBatchNorm):
                self._norms.append(child)
                continue
            self._others.append(child)
            if isinstance(child, _NormBase):  # writes through functions that leave no trace
                self._changing.update((child, name) for name in child._buffers)
        self._known = not self._others

    @property
    def any(self) -> bool:
        """Whether the stage has buffers at all."""
        return bool(self._norms or self._others)

    def watch(self) -> Watch:
        """Call before a forward that will be recomputed, under the lock."""
        return Watch(self)

    def _current(self) -> dict[Place, Tensor]:
        return {
            (module, name): buffer
            for module in self._others
            for name, buffer in module._buffers.items()
            if buffer is not None
        }


class Watch:
    """The buffers of a stage as they were before one forward."""

    __slots__ = ("_before", "_buffers", "_copies")

    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers
        current = buffers._current()
        self._before = {place: (buffer, buffer._version) for place, buffer in current.items()}
        self._copies = {
            place: buffer.detach().clone()
            for place, buffer in current.items()
            if not buffers._known or place in buffers._changing
        }

    def learn(self) -> None:
        """Call after the forward: sees which buffers it changed.

        Raises:
            RuntimeError: a buffer changed that never did before, so that there is no copy of it.
        """
        buffers = self._buffers
        changed = set()
        for place, now in buffers._current().items():
            before, version = self._before.get(place, (None, 0))
            if before is not now or now._version != version:
                changed.add(place)
        surprises = changed - buffers._changing
        buffers._changing |= surprises
        self._before = {}
        if surprises and any(place not in self._copies for place in surprises):
            module, name = next(iter(surprises))
            raise RuntimeError(
                f"buffer {name!r} of a {type(module).__name__} changed in a forward for the first "
                "time only now, too late to recompute this micro-batch exactly. It is known from "
                "the next call on; to have it known from the start, let the first forward change it"
            )
        buffers._known = True
        self._copies = {place: self._copies[place] for place in buffers._changing}

    def sandboxed(self, run: Callable[[], None]) -> None:
        """Runs the stage again, on copies of its buffers; under the lock.

        Ctrl-C may come between any two lines. So one call puts the buffers back.
        """
        copies: dict[Place, Tensor] = {}
        with torch.no_grad():
            for norm in self._buffers._norms:
                if norm.training:
                    for name, buffer in norm._buffers.items():
                        if buffer is not None:
                            copies[norm, name] = buffer.clone()
            copies.update({place: copy.clone() for place, copy in self._copies.items()})
        owners = [module._buffers for module, _ in copies]
        names = [name for _, name in copies]
        originals = [owner[name] for owner, name in zip(owners, names, strict=True)]
        undo = map(setitem, owners, names, originals)
        try:
            deque(map(setitem, owners, names, copies.values()), maxlen=0)
            run()
        finally:
            deque(undo, maxlen=0)
