"""Buffers under re-materialization: a second forward that nobody can see in them.

A cell that runs twice must start twice from the same buffers, and leave them as after one run:

* Buffers that a stage changes (BatchNorm's statistics, spectral norm's vectors, a codebook) are
  copied before each forward. A recomputation works on copies of the copies, thrown away afterwards.
  Which ones they are is seen at the first forward, and anew when the mode of a module or any other
  buffer of it has changed. Their values tell, for not every change leaves a trace in the version.
* Buffers that a stage only reads are noted. Another one put in their place since the forward makes
  way for them; one that was modified in place is lost, and refused.
* One parameter is changed by forwards, too: that of ``nn.Embedding(max_norm=...)``. It may be, for
  the rows that a cell used stay what they were; its recomputation changes no row again.

Module attributes are shared by all threads, so whoever recomputes a stage with such buffers has the
stage to itself: forwards and recomputations take its lock. A pipe inside a layer is covered by the
lock of the outermost stage, which makes one order of locks: stage before random state.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from contextvars import ContextVar
from operator import setitem
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakTensorKeyDictionary

from syncpipe.runtime.locks import forkable
from syncpipe.runtime.rematerialization.snapshot import (
    Snapshot,
    Swap,
    swapped,
    version_of,
    versions,
)

__all__ = ["OUTERMOST", "Buffers", "Watch"]

_Lock = Any  # threading.RLock is a function
#: The lock of the outermost stage that runs here; it covers the pipes inside.
OUTERMOST: ContextVar[_Lock] = ContextVar("syncpipe_stage_lock", default=None)

Place = tuple[nn.Module, str]
#: The name of a buffer, the buffer and its version.
_Noted = tuple[str, Tensor | None, int]


class Buffers:
    """The buffers of one stage.

    Args:
        module: the partition.

    Attributes:
        lock: to be held by whoever runs the stage, if there is ``any`` reason for it.
        renorming: the embeddings that keep their rows short.
        renormed: how often they modified their parameters, for those that are still alive.
    """

    def __init__(self, module: nn.Module) -> None:
        self.lock: _Lock = forkable()
        self.renorming: list[nn.Module] = []
        self.renormed: MutableMapping[Tensor, int] = WeakTensorKeyDictionary()
        self._restores = False  # whether recomputations were seen to change the modules
        self._owners: list[nn.Module] = []
        self._modes: list[bool] = []
        self._changing: set[Place] = set()
        #: For each module the other buffers, as they were in a forward that did not change them.
        self._constant: dict[nn.Module, list[_Noted]] = {}
        self.follow(list(module.modules()))

    @property
    def any(self) -> bool:
        """Whether the stage has buffers, or what is like them, at all."""
        return bool(self._owners or self.renorming or self._restores)

    def follow(self, modules: list[nn.Module]) -> None:
        """Goes by the modules that there are now: some may have come in since the last call."""
        owners = [module for module in modules if module._buffers]
        if owners != self._owners:
            self._owners = owners
            for module in owners:
                if isinstance(module, _NormBase):  # writes through functions that leave no trace
                    self._changing.update((module, name) for name in module._buffers)
            places = {(module, name) for module in owners for name in module._buffers}
            self._changing &= places
        modes = [module.training for module in owners]
        if modes != self._modes or len(self._constant) > len(owners):
            self._modes = modes
            self._constant = {}
        self.renorming = [
            module
            for module in modules
            if "max_norm" in module.__dict__
            and isinstance(module, (nn.Embedding, nn.EmbeddingBag))
            and module.max_norm is not None
        ]

    def renorm(self, run: Callable[[], Any]) -> Any:
        """Runs a forward, and counts how often it modified the parameters of embeddings."""
        weights: list[Any] = [module.weight for module in self.renorming]
        before = versions(weights)
        result = run()
        for weight, then, now in zip(weights, before, versions(weights), strict=True):
            self.renormed[weight] = self.renormed.get(weight, 0) + now - then
        return result

    def watch(self, snapshot: Snapshot, where: str) -> Watch:
        """Call before a forward that will be recomputed, under the lock.

        Args:
            snapshot: the modules.
            where: the cell in words.
        """
        return Watch(self, snapshot, where)


class Watch:
    """A stage as it was before one forward.

    Attributes:
        snapshot: its modules; to be replaced if it is lazy.
    """

    __slots__ = ("_buffers", "_fixed", "_kept", "_lazy", "_unknown", "_where", "snapshot")

    def __init__(self, buffers: Buffers, snapshot: Snapshot, where: str) -> None:
        self._buffers = buffers
        self._where = where
        self.snapshot = snapshot
        self._fixed: list[tuple[nn.Module, list[_Noted]]] = []
        self._unknown: list[tuple[nn.Module, list[_Noted]]] = []
        self._kept: dict[Place, Tensor | None] = {}
        self._lazy: list[Place] = []
        copy = _Copies()
        for module in buffers._owners:
            self._look(module, copy)

    def _look(self, module: nn.Module, copy: _Copies) -> None:
        others: list[_Noted] = []
        for name, buffer in module._buffers.items():
            place = (module, name)
            if buffer is not None and is_lazy(buffer):
                self._lazy.append(place)
            elif place in self._buffers._changing:
                self._kept[place] = copy(buffer)
            else:
                others.append((name, buffer, _version(buffer)))
        if not others:
            return
        if _equal(others, self._buffers._constant.get(module)):
            self._fixed.append((module, others))
            return
        self._unknown.append((module, others))
        for name, buffer, _ in others:
            self._kept[module, name] = copy(buffer)

    def learn(self) -> None:
        """Call after the forward: sees which buffers it changed.

        Raises:
            RuntimeError: a buffer changed that never did before, so that there is no copy of it.
        """
        buffers = self._buffers
        for module, noted in self._unknown:
            constant: list[_Noted] = []
            for name, buffer, version in noted:
                copy = self._kept[module, name]
                if _same(module, name, buffer, version) and _same_values(buffer, copy):
                    constant.append((name, buffer, version))
                    del self._kept[module, name]
                else:
                    buffers._changing.add((module, name))
            buffers._constant[module] = constant
            self._fixed.append((module, constant))
        self._unknown = []
        fresh = _Copies()
        for module, name in self._lazy:  # it has its first value now, which is as good
            self._kept[module, name] = fresh(module._buffers[name])
        for module, noted in self._fixed:
            for name, buffer, version in noted:
                if not _same(module, name, buffer, version):
                    buffers._constant.pop(module, None)
                    buffers._changing.add((module, name))
                    raise RuntimeError(
                        f"{_named(module, name)} changed in a forward for the first time only now, "
                        "too late to recompute this micro-batch exactly. It is known from the next "
                        "call on; to have it known from the start, let the first forward change it"
                    )

    def sandboxed(self, run: Callable[[], None], *, once: bool = False) -> None:
        """Runs the stage again, from what it was before the forward; under the lock.

        Args:
            run: runs it.
            once: it will not run again, and nothing of the user's has run since the forward.

        Raises:
            RuntimeError: it cannot be made what it was.
        """
        self.snapshot.check(self._where)
        swaps: list[Swap] = list(self.snapshot.swaps(self._where, once=once))
        self._buffers._restores |= bool(swaps)
        for module, noted in self._fixed:
            for name, buffer, version in noted:
                if _version(buffer) != version:
                    raise RuntimeError(
                        f"{_named(module, name)} of {self._where} was modified in place between "
                        f"forward and backward (version {version} became {_version(buffer)}), so "
                        "that the cell cannot be recomputed: modify it after backward, or assign "
                        "another tensor"
                    )
                if name in module._buffers and module._buffers[name] is not buffer:
                    swaps.append((setitem, module._buffers, name, buffer))
        copy = _Copies()
        for (module, name), kept in self._kept.items():
            if name in module._buffers:
                value = kept if once else copy(kept)
                swaps.append((setitem, module._buffers, name, value))
        for embedding in self._buffers.renorming:
            swaps.append((setitem, embedding.__dict__, "max_norm", None))
        if swaps:
            swapped(swaps, run)
        else:
            run()


class _Copies:
    """Copies buffers; one that two modules share stays one."""

    __slots__ = ("_made",)

    def __init__(self) -> None:
        self._made: dict[int, Tensor] = {}

    def __call__(self, buffer: Tensor | None) -> Tensor | None:
        if buffer is None:
            return None
        copy = self._made.get(id(buffer))
        if copy is None:
            source = buffer.detach() if buffer.requires_grad else buffer
            copy = self._made[id(buffer)] = source.clone()
        return copy


def _version(buffer: Tensor | None) -> int:
    return 0 if buffer is None else version_of(buffer)


def _equal(now: list[_Noted], then: list[_Noted] | None) -> bool:
    """Whether they note the same, but for how a tensor compares to others."""
    return (
        then is not None
        and len(now) == len(then)
        and all(a[1] is b[1] and a[2] == b[2] for a, b in zip(now, then, strict=True))
    )


def _same(module: nn.Module, name: str, buffer: Tensor | None, version: int) -> bool:
    now = module._buffers.get(name)
    return now is buffer and _version(now) == version


def _same_values(buffer: Tensor | None, copy: Tensor | None) -> bool:
    return buffer is None or copy is None or torch.equal(buffer, copy)


def _named(module: nn.Module, name: str) -> str:
    return f"buffer {name!r} of a {type(module).__name__}"
