"""What a cell depends on besides its inputs: the modules of its stage, and all that is in them.

A cell that is recomputed has to be computed from what the forward used, and must leave no trace:
nobody can see that it ran twice. What is in a module is of two kinds:

* What forwards only read: modes, parameters, most buffers. It is noted. If there is something else
  in its place at the recomputation (``functional_call``, ``eval()``, a parameter that was frozen),
  the old one is put back meanwhile. A tensor that was modified in place is lost, and refused, and
  so is a module that was put in, replaced or taken out.
* What forwards change: BatchNorm's statistics, spectral norm's vectors, a codebook. It is copied
  before each forward, and the recomputation works on copies of the copies. Which buffers these are
  is seen after each forward. Until one changes, a copy of each in a call is enough: that is what it
  was before the forward that changes it.

One parameter is changed by forwards, too: that of ``nn.Embedding(max_norm=...)``. It may be, for
the rows that a cell used stay what they were; its recomputation changes no row again.

Walking all modules takes time. So it is done once per call, and once in each backward; buffers are
looked at before each cell.

What is in a module is seen by all threads, so whoever recomputes such a stage has it to itself:
forwards and recomputations take its lock. A pipe inside a layer is covered by the lock of the
outermost stage, which makes one order of locks: stage before random state.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakTensorKeyDictionary

from syncpipe.data import described
from syncpipe.runtime.interrupts import swapped
from syncpipe.runtime.locks import forkable

__all__ = ["OUTERMOST", "CellState", "Changes", "ModuleState", "modified", "version_of"]

_Lock = Any  # threading.RLock is a function
#: The lock of the outermost stage that runs here; it covers the pipes inside.
OUTERMOST: ContextVar[_Lock] = ContextVar("syncpipe_stage_lock", default=None)

#: What to put where for a while; see ``swapped``.
_Swap = tuple[Any, str, Any]
_Place = tuple[nn.Module, str]
#: A name, the tensor that was there, and its version.
_Noted = tuple[str, Tensor | None, int]


def version_of(tensor: Tensor | None) -> int:
    """How often a tensor has been modified in place."""
    return 0 if tensor is None or tensor.is_inference() else tensor._version


def modified(what: str, where: object, then: int, now: int) -> RuntimeError:
    """The error for a tensor that has another version now than in the forward."""
    return RuntimeError(
        f"{what} of {where} was modified in place between forward and backward (version {then} "
        f"became {now}), so that the cell cannot be recomputed: call backward before the "
        "optimizer's step, and modify copies; or use checkpoint='never' if a layer itself does this"
    )


class Changes:
    """What the forwards of one stage change, as far as is known; from call to call.

    Args:
        root: the partition.

    Attributes:
        lock: to be held by whoever runs the stage, if there is ``any`` reason for it.
        any: whether there ever was anything that two runs of the stage at a time would disturb.
        renorming: the embeddings that keep their rows short.
        renormed: for each of their parameters that is alive how often forwards modified it.
        owners: the modules with buffers.
        changing: the buffers that some forward has changed.
        constant: for each module the others, as they were in a forward that did not change them.
    """

    def __init__(self, root: nn.Module) -> None:
        self.lock: _Lock = forkable()
        self.renorming: list[nn.Module] = []
        self.renormed: MutableMapping[Tensor, int] = WeakTensorKeyDictionary()
        self.any = False
        self.owners: list[nn.Module] = []
        self.changing: set[_Place] = set()
        self.constant: dict[nn.Module, list[_Noted]] = {}
        self._modes: list[bool] = []
        self.follow(list(root.modules()))

    def renorm(self, run: Callable[[], Any]) -> Any:
        """Runs a forward, and counts how often it modified the parameters of embeddings."""
        weights: list[Any] = [module.weight for module in self.renorming]
        before = list(map(version_of, weights))
        result = run()
        for weight, then in zip(weights, before, strict=True):
            self.renormed[weight] = self.renormed.get(weight, 0) + version_of(weight) - then
        return result

    def follow(self, modules: list[nn.Module]) -> None:
        """Goes by the modules that there are now: some may have come in since the last call."""
        owners = [module for module in modules if module._buffers]
        modes = [module.training for module in owners]
        if owners != self.owners:
            # Batch norm writes through functions that leave no trace.
            norms = {(m, name) for m in owners if isinstance(m, _NormBase) for name in m._buffers}
            there = {(module, name) for module in owners for name in module._buffers}
            self.changing = self.changing & there | norms
        if owners != self.owners or modes != self._modes:
            self.owners, self._modes, self.constant = owners, modes, {}
        self.renorming = [
            module
            for module in modules
            if "max_norm" in module.__dict__
            and isinstance(module, (nn.Embedding, nn.EmbeddingBag))
            and module.max_norm is not None
        ]
        self.any |= bool(owners or self.renorming)


class ModuleState:
    """The modules of a stage as they are in one call: their modes and their parameters.

    Args:
        root: the partition.
        changes: what its forwards change.

    Attributes:
        lazy: whether some parameters have no value yet; then it is not good for later cells.
        copies: by identity and version copies of buffers that no forward has changed so far.
    """

    def __init__(self, root: nn.Module, changes: Changes) -> None:
        self._root = root
        self.changes = changes
        self._modules, self._marks = _walk(root)
        self._states = [(m, m.training, dict(m._parameters)) for m in self._modules]
        found = {p: None for _, _, own in self._states for p in own.values() if p is not None}
        self._parameters = [p for p in found if not is_lazy(p)]
        self.lazy = len(self._parameters) < len(found)
        self._flags = [p.requires_grad for p in self._parameters]
        self.note_versions()
        self._checked: tuple[object, list[_Swap]] | None = None
        self.copies = _Copies()
        changes.follow(self._modules)

    def like(self, other: ModuleState) -> bool:
        """Whether the modules, their modes and parameters are the same ones."""
        return self._marks == other._marks

    def note_versions(self) -> None:
        """The parameters are as they should be: cells that do not compute with them as they were
        before may be in flight."""
        self._versions = list(map(version_of, self._parameters))
        self._renormed = dict(self.changes.renormed.items())

    def swaps(self, where: object, moment: object) -> list[_Swap]:
        """What to put back for a recomputation, nearly always nothing.

        Args:
            where: the cell, which as a string is its name in messages.
            moment: the same as long as the user's code cannot have changed any module.

        Raises:
            RuntimeError: a parameter was modified in place, or the layers are other ones.
        """
        renormed = self.changes.renormed
        for p, then in zip(self._parameters, self._versions, strict=True):
            if (now := version_of(p)) != then:
                now -= renormed.get(p, 0) - self._renormed.get(p, 0)  # by the forward itself
                if now != then:
                    raise modified(f"a parameter ({described(p)})", where, then, now)
        if self._checked is None or self._checked[0] != moment:
            self._checked = (moment, self._differences(where))
        return self._checked[1]

    def _differences(self, where: object) -> list[_Swap]:
        modules, marks = _walk(self._root)
        if marks == self._marks:
            return []
        swaps: list[_Swap] = []
        same = list(map(id, modules)) == list(map(id, self._modules))
        for module, training, parameters in self._states:
            if not same or list(module._parameters) != list(parameters):
                raise RuntimeError(_other_modules(self._modules, modules, where))
            if module.training != training:
                plain = "training" in module.__dict__  # not so in TorchScript's
                swaps.append((module.__dict__ if plain else module, "training", training))
            for name, parameter in parameters.items():
                if module._parameters[name] is not parameter:
                    swaps.append((module._parameters, name, parameter))
        for known, flag in zip(self._parameters, self._flags, strict=True):
            if known.requires_grad != flag:
                swaps.append((known, "requires_grad", flag))
        return swaps


class CellState:
    """A stage as it is before the forward of one cell that will be recomputed; under the lock.

    Args:
        modules: the modules, as they are in this call.
        where: the cell, which as a string is its name in messages.

    Attributes:
        modules: to be replaced if it is lazy.
    """

    def __init__(self, modules: ModuleState, where: object) -> None:
        self.modules = modules
        self._where = where
        self._originals = modules.copies
        self._noted: list[tuple[nn.Module, list[_Noted]]] = []
        self._copies: dict[_Place, Tensor | None] = {}
        self._lazy: list[_Place] = []
        copy, changing = _Copies(), modules.changes.changing
        for module in modules.changes.owners:
            noted: list[_Noted] = []
            for name, buffer in module._buffers.items():
                if buffer is not None and is_lazy(buffer):
                    self._lazy.append((module, name))
                elif (module, name) in changing:
                    self._copies[module, name] = copy(buffer)
                else:
                    noted.append((name, buffer, version_of(buffer)))
                    modules.copies(buffer)
            self._noted.append((module, noted))

    def learn(self) -> None:
        """Call after the forward: sees which buffers it changed."""
        changes, copy = self.modules.changes, _Copies()
        for module, noted in self._noted:
            # What was not so before may have changed without a trace in its version.
            new = not _same_tensors(noted, changes.constant.get(module))
            for each in list(noted):
                name, buffer, version = each
                now, before = module._buffers.get(name), self._originals(buffer, version)
                if (
                    now is not buffer
                    or version_of(now) != version
                    or (new and _differ(now, before))
                ):
                    changes.changing.add((module, name))
                    self._copies[module, name] = copy(before)  # others may want it
                    noted.remove(each)
            changes.constant[module] = noted
        for module, name in self._lazy:  # it has its first value now, which is as good
            self._copies[module, name] = copy(module._buffers[name])

    def restored(self, run: Callable[[], None], moment: object, *, keep: bool) -> None:
        """Runs the stage again, from what it was before the forward; under the lock.

        Args:
            run: runs it.
            moment: the same as long as the user's code cannot have changed any module.
            keep: let it run once more.

        Raises:
            RuntimeError: it cannot be made what it was.
        """
        swaps, changes = list(self.modules.swaps(self._where, moment)), self.modules.changes
        changes.any |= bool(swaps)
        copy = _Copies()
        for module, noted in self._noted:
            for name, buffer, version in noted:
                if version_of(buffer) != version:
                    swaps.append((module._buffers, name, copy(self._originals(buffer, version))))
                elif module._buffers.get(name, buffer) is not buffer:
                    swaps.append((module._buffers, name, buffer))
        for (module, name), kept in self._copies.items():
            if name in module._buffers:
                swaps.append((module._buffers, name, copy(kept) if keep else kept))
        swaps += [(embedding.__dict__, "max_norm", None) for embedding in changes.renorming]
        if swaps:
            swapped(swaps, run)
        else:
            run()


class _Copies:
    """Copies of buffers in their versions; one that two modules share stays one."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def __call__(self, buffer: Tensor | None, version: int | None = None) -> Tensor | None:
        """The copy of a buffer.

        Args:
            buffer: the buffer, which stays alive.
            version: which it was made of; None: as it is now.
        """
        if buffer is None:
            return None
        key = id(buffer), version_of(buffer) if version is None else version
        if key not in self._made:
            source = buffer.detach() if buffer.requires_grad else buffer
            self._made[key] = buffer, source.clone()
        return self._made[key][1]


def _walk(root: nn.Module) -> tuple[list[nn.Module], list[int]]:
    """All modules; and numbers that tell whether anything that was noted of them has changed."""
    modules: list[nn.Module] = []
    marks: list[int] = []
    seen: set[int] = set()
    pending: list[nn.Module | None] = [root]
    while pending:
        module = pending.pop()
        if module is None or id(module) in seen:
            continue
        seen.add(id(module))
        modules.append(module)
        marks += (id(module), module.training)
        for parameter in module._parameters.values():
            if parameter is not None:
                marks += (id(parameter), parameter.requires_grad)
        pending.extend(module._modules.values())
    return modules, marks


def _same_tensors(now: list[_Noted], then: list[_Noted] | None) -> bool:
    """Whether both note the same tensors, by identity, in the same versions."""
    return (
        then is not None
        and len(now) == len(then)
        and all(a[1] is b[1] and a[2] == b[2] for a, b in zip(now, then, strict=True))
    )


def _differ(buffer: Tensor | None, before: Tensor | None) -> bool:
    return buffer is not None and before is not None and not torch.equal(buffer, before)


def _other_modules(then: list[nn.Module], now: list[nn.Module], where: object) -> str:
    came = [m for m in now if all(m is not other for other in then)][:1]
    gone = [m for m in then if all(m is not other for other in now)][:1]
    words = [f"a {type(m).__name__} came in" for m in came]
    words += [f"a {type(m).__name__} went out" for m in gone]
    what = " and ".join(words) or "in another order, or with parameters of other names"
    return (
        f"the modules of {where} changed between forward and backward ({what}), so that the cell "
        "cannot be recomputed: change them before the forward or after backward"
    )
