"""What a cell depends on besides its inputs: the modules of its stage, and all that is in them.

A cell that is computed again has to be computed from what the forward used, and must leave no
trace: nobody can see that it ran twice. What is in a module is of two kinds:

* What forwards only read: modes, parameters, most buffers. It is noted. If there is something else
  in its place at the recomputation (``functional_call``, ``eval()``, a parameter that was frozen),
  the old one is put back meanwhile. A tensor that was modified in place is lost, and refused, and
  so is a module that was put in, replaced or taken out.
* What forwards change: BatchNorm's statistics, spectral norm's vectors, a codebook. It is copied
  before each forward, and the recomputation works on copies of the copies. Which buffers these are
  is seen at the first forward, and anew when the mode of a module or any other buffer of it has
  changed. Their values tell, for not every change leaves a trace in the version.

One parameter is changed by forwards, too: that of ``nn.Embedding(max_norm=...)``. It may be, for
the rows that a cell used stay what they were; its recomputation changes no row again.

Walking all modules takes time. So it is done once per call, and once in each backward; buffers are
looked at before each cell.

What is in a module is seen by all threads, so whoever recomputes such a stage has it to itself:
forwards and recomputations take its lock. A pipe inside a layer is covered by the lock of the
outermost stage, which makes one order of locks: stage before random state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from contextvars import ContextVar
from itertools import chain
from operator import getitem, setitem
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakTensorKeyDictionary

from syncpipe.data import described
from syncpipe.runtime.interrupts import undone
from syncpipe.runtime.locks import forkable
from syncpipe.runtime.rematerialization.guards import modified, version_of, versions

__all__ = ["OUTERMOST", "CellState", "Changes", "ModuleState"]

_Lock = Any  # threading.RLock is a function
#: The lock of the outermost stage that runs here; it covers the pipes inside.
OUTERMOST: ContextVar[_Lock] = ContextVar("syncpipe_stage_lock", default=None)

#: ``(setter, owner, name, value)``: what to put where for a while, and by setitem or setattr.
_Swap = tuple[Callable[[Any, str, Any], None], Any, str, Any]
#: A name, the tensor that was there, and its version.
_Noted = tuple[str, Tensor | None, int]
_Place = tuple[nn.Module, str]


class Changes:
    """What the forwards of one stage change, as far as is known; from call to call.

    Args:
        root: the partition.

    Attributes:
        lock: to be held by whoever runs the stage, if there is ``any`` reason for it.
        any: whether there ever was anything that two runs of the stage at a time would disturb.
        renorming: the embeddings that keep their rows short.
        renormed: for each of their parameters that is alive how often forwards modified it.
    """

    def __init__(self, root: nn.Module) -> None:
        self.lock: _Lock = forkable()
        self.renorming: list[nn.Module] = []
        self.renormed: MutableMapping[Tensor, int] = WeakTensorKeyDictionary()
        self.any = False
        self._owners: list[nn.Module] = []  # of buffers
        self._modes: list[bool] = []
        self._changing: set[_Place] = set()
        #: For each module the other buffers, as they were in a forward that did not change them.
        self._constant: dict[nn.Module, list[_Noted]] = {}
        self._follow(list(root.modules()))

    def renorm(self, run: Callable[[], Any]) -> Any:
        """Runs a forward, and counts how often it modified the parameters of embeddings."""
        weights: list[Any] = [module.weight for module in self.renorming]
        before = versions(weights)
        result = run()
        for weight, then, now in zip(weights, before, versions(weights), strict=True):
            self.renormed[weight] = self.renormed.get(weight, 0) + now - then
        return result

    def _follow(self, modules: list[nn.Module]) -> None:
        """Goes by the modules that there are now: some may have come in since the last call."""
        owners = [module for module in modules if module._buffers]
        if owners != self._owners:
            self._owners = owners
            for module in owners:
                if isinstance(module, _NormBase):  # writes through functions that leave no trace
                    self._changing.update((module, name) for name in module._buffers)
            self._changing &= {(module, name) for module in owners for name in module._buffers}
        modes = [module.training for module in owners]
        if modes != self._modes or len(self._constant) > len(owners):
            self._modes, self._constant = modes, {}
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
    """

    __slots__ = (
        "_checked", "_flags", "_marks", "_modules", "_originals", "_parameters", "_renormed",
        "_root", "_states", "_versions", "changes", "lazy",
    )  # fmt: skip

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
        #: Buffers that no forward has changed so far: a copy of each, and the version that it has.
        self._originals: dict[_Place, tuple[int, Tensor | None]] = {}
        changes._follow(self._modules)

    def like(self, other: ModuleState) -> bool:
        """Whether the modules, their modes and parameters are the same ones."""
        return self._marks == other._marks

    def keep(self, module: nn.Module, noted: list[_Noted]) -> None:
        """Copies buffers of a module, once a call: one of them may yet be changed."""
        copy = _Copies()
        for name, buffer, version in noted:
            if (module, name) not in self._originals:
                self._originals[module, name] = version, copy(buffer)

    def original(self, module: nn.Module, name: str, version: int) -> Tensor | None:
        """A buffer as it was in some version; None if that is not known."""
        then, copy = self._originals.get((module, name), (version, None))
        return copy if then == version else None

    def note_versions(self) -> None:
        """The parameters are as they should be: cells that do not compute with them as they were
        before may be in flight."""
        self._versions = [version_of(p) for p in self._parameters]
        self._renormed = dict(self.changes.renormed.items())

    def _swaps(self, where: object, moment: object) -> list[_Swap]:
        """What to put back for a recomputation, nearly always nothing.

        Args:
            where: the cell, which as a string is its name in messages.
            moment: the same as long as the user's code cannot have changed any module.

        Raises:
            RuntimeError: a parameter was modified in place, or the layers are other ones.
        """
        now = [version_of(p) for p in self._parameters]
        if now != self._versions:
            renormed = self.changes.renormed
            for p, version, then in zip(self._parameters, now, self._versions, strict=True):
                version -= renormed.get(p, 0) - self._renormed.get(p, 0)  # by the forward itself
                if version != then:
                    raise modified(f"a parameter ({described(p)})", where, then, version)
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
                own = "training" in module.__dict__  # not so in TorchScript's
                swaps.append(
                    (setitem, module.__dict__, "training", training)
                    if own
                    else (setattr, module, "training", training)
                )
            for name, parameter in parameters.items():
                if module._parameters[name] is not parameter:
                    swaps.append((setitem, module._parameters, name, parameter))
        for known, flag in zip(self._parameters, self._flags, strict=True):
            if known.requires_grad != flag:
                swaps.append((setattr, known, "requires_grad", flag))
        return swaps


class CellState:
    """A stage as it is before the forward of one cell that will be recomputed; under the lock.

    Args:
        modules: the modules, as they are in this call.
        where: the cell, which as a string is its name in messages.

    Attributes:
        modules: to be replaced if it is lazy.
    """

    __slots__ = ("_changes", "_constant", "_copies", "_lazy", "_unknown", "_where", "modules")

    def __init__(self, modules: ModuleState, where: object) -> None:
        self.modules = modules
        self._changes = changes = modules.changes
        self._where = where
        self._constant: list[tuple[nn.Module, list[_Noted]]] = []
        self._unknown: list[tuple[nn.Module, list[_Noted]]] = []
        self._copies: dict[_Place, Tensor | None] = {}
        self._lazy: list[_Place] = []
        copy = _Copies()
        for module in changes._owners:
            noted: list[_Noted] = []
            for name, buffer in module._buffers.items():
                if buffer is not None and is_lazy(buffer):
                    self._lazy.append((module, name))
                elif (module, name) in changes._changing:
                    self._copies[module, name] = copy(buffer)
                else:
                    noted.append((name, buffer, _version(buffer)))
            if noted and _same_tensors(noted, changes._constant.get(module)):
                self._constant.append((module, noted))
                modules.keep(module, noted)
            elif noted:
                self._unknown.append((module, noted))
                self._copies.update(((module, name), copy(buffer)) for name, buffer, _ in noted)

    def learn(self) -> None:
        """Call after the forward: sees which buffers it changed."""
        changes = self._changes
        for module, noted in self._constant:
            changed = []
            for name, buffer, version in noted:
                if not _same(module, name, buffer, version):  # which no forward did so far
                    changes._constant.pop(module, None)
                    changes._changing.add((module, name))
                    self._copies[module, name] = self.modules.original(module, name, version)
                    changed.append(name)
            noted[:] = [each for each in noted if each[0] not in changed]
        for module, noted in self._unknown:
            constant: list[_Noted] = []
            for name, buffer, version in noted:
                copy = self._copies[module, name]
                unchanged = buffer is None or copy is None or torch.equal(buffer, copy)
                if unchanged and _same(module, name, buffer, version):
                    constant.append((name, buffer, version))
                    del self._copies[module, name]
                else:
                    changes._changing.add((module, name))
            changes._constant[module] = constant
            self._constant.append((module, constant))
        self._unknown = []
        fresh = _Copies()
        for module, name in self._lazy:  # it has its first value now, which is as good
            self._copies[module, name] = fresh(module._buffers[name])

    def restored(self, run: Callable[[], None], moment: object, *, keep: bool) -> None:
        """Runs the stage again, from what it was before the forward; under the lock.

        Args:
            run: runs it.
            moment: the same as long as the user's code cannot have changed any module.
            keep: let it run once more.

        Raises:
            RuntimeError: it cannot be made what it was.
        """
        swaps = list(self.modules._swaps(self._where, moment))
        self._changes.any |= bool(swaps)
        for module, noted in self._constant:
            for name, buffer, version in noted:
                if _version(buffer) != version:
                    original = self.modules.original(module, name, version)
                    if original is None:
                        raise modified(_named(module, name), self._where, version, _version(buffer))
                    swaps.append((setitem, module._buffers, name, original.clone()))
                elif module._buffers.get(name, buffer) is not buffer:
                    swaps.append((setitem, module._buffers, name, buffer))
        copy = _Copies()
        for (module, name), kept in self._copies.items():
            if name in module._buffers:
                value = copy(kept) if keep else kept
                swaps.append((setitem, module._buffers, name, value))
        for embedding in self._changes.renorming:
            swaps.append((setitem, embedding.__dict__, "max_norm", None))
        if swaps:
            _swapped(swaps, run)
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


def _swapped(swaps: list[_Swap], run: Callable[[], None]) -> None:
    """Calls ``run`` with other values in place."""

    def swap_and_run() -> None:
        for setter, owner, name, value in swaps:
            setter(owner, name, value)
        run()

    # Ctrl-C may come into a `setattr` of the user's, but not between items: these go back first.
    undo: list[Iterator[Any]] = []
    for kind, look in ((setitem, getitem), (setattr, getattr)):
        some = [(owner, name) for setter, owner, name, _ in swaps if setter is kind]
        before = [look(owner, name) for owner, name in some]
        undo.append(map(kind, [owner for owner, _ in some], [name for _, name in some], before))
    undone(swap_and_run, chain(*undo))


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
        marks.append(id(module))
        marks.append(module.training)
        for parameter in module._parameters.values():
            if parameter is not None:
                marks.append(id(parameter))
                marks.append(parameter.requires_grad)
        pending.extend(module._modules.values())
    return modules, marks


def _version(buffer: Tensor | None) -> int:
    return 0 if buffer is None else version_of(buffer)


def _same_tensors(now: list[_Noted], then: list[_Noted] | None) -> bool:
    """Whether both note the same tensors, by identity, in the same versions."""
    return (
        then is not None
        and len(now) == len(then)
        and all(a[1] is b[1] and a[2] == b[2] for a, b in zip(now, then, strict=True))
    )


def _same(module: nn.Module, name: str, buffer: Tensor | None, version: int) -> bool:
    now = module._buffers.get(name)
    return now is buffer and _version(now) == version


def _named(module: nn.Module, name: str) -> str:
    return f"buffer {name!r} of a {type(module).__name__}"


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
