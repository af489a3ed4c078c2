"""Cells that run without keeping their graph, and are computed again before they go back.

    forward     x --> [cell] --> y        y goes on, the graph is dropped, x is kept
    recompute   x --> [cell] --> y'       this graph goes back

Both runs record a graph: a forward without one may take other kernels, with other last bits. The
second one computes from what the first one used, and leaves no trace. Of what is in modules,

* modes, parameters and most buffers are only read. They are noted. What is in their place at the
  recomputation (``eval()``, a parameter that was frozen) gives way to them meanwhile. A tensor that
  was modified in place is lost, and refused, and so is another module.
* BatchNorm's statistics, a codebook, ... are changed by forwards, which are looked at for it. They
  are copied before each one, and the recomputation works on copies of the copies. Until a buffer
  changes, a copy in a call is enough.
* the weight of ``nn.Embedding(max_norm=...)`` may be changed by forwards, for the rows that a cell
  used stay what they were; its recomputation changes no row again.

All threads see what is in a module, so forwards and recomputations of such a stage take its lock. A
pipe inside a layer is covered by the lock of the outermost stage: that comes before random state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, MutableMapping
from contextvars import ContextVar
from functools import partial
from itertools import filterfalse
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakTensorKeyDictionary

from syncpipe.data import attributes_of, clones, described, map_tensors, objects_in, tensors_in
from syncpipe.runtime.errors import annotate
from syncpipe.runtime.graph import nodes_of
from syncpipe.runtime.interrupts import Swap, forkable, swapped

_CHECKPOINTING: ContextVar[bool] = ContextVar("syncpipe_checkpointing", default=False)
_RECOMPUTING: ContextVar[bool] = ContextVar("syncpipe_recomputing", default=False)
#: The lock of the outermost stage that runs here; it covers the pipes inside.
OUTERMOST: ContextVar[Any] = ContextVar("syncpipe_stage_lock", default=None)

_Place = tuple[nn.Module, str]
_Noted = tuple[str, Tensor | None, int]  # a name, the tensor that was there, and its version
_VERSION: Callable[[Tensor], int] = attrgetter("_version")


def is_checkpointing() -> bool:
    """Return whether the calling layer runs in a forward whose activations are dropped.

    It will run once more, in backward, for the same micro-batch.
    """
    return _CHECKPOINTING.get()


def is_recomputing() -> bool:
    """Return whether the calling layer runs for the second time, in backward.

    A layer with a side effect (a counter, a log) asks this to have it only once. Buffers need no
    such care: a recomputation neither sees nor leaves a change in them.
    """
    return _RECOMPUTING.get()


def version_of(tensor: Tensor | None) -> int:
    """How often a tensor has been modified in place."""
    return 0 if tensor is None or tensor.is_inference() else tensor._version


def _modified(what: str, where: object, then: int, now: int) -> RuntimeError:
    return RuntimeError(
        f"{what} of {where} was modified in place between forward and backward (version {then} "
        f"became {now}), so that the cell cannot be recomputed: call backward before the "
        "optimizer's step, and modify copies; or use checkpoint='never' if a layer itself does this"
    )


class Changes:
    """What the forwards of one stage change, as far as is known; from call to call."""

    def __init__(self, root: nn.Module) -> None:
        self.lock = forkable()  #: held by whoever runs the stage, if there is any reason for it:
        self.any = False  #: there ever was anything that two runs at a time would disturb
        self.renorming: list[nn.Module] = []  #: the embeddings that keep their rows short
        #: For each of their parameters that is alive how often forwards modified it.
        self.renormed: MutableMapping[Tensor, int] = WeakTensorKeyDictionary()
        self.owners: list[nn.Module] = []  #: the modules with buffers
        self.changing: set[_Place] = set()  #: the buffers that some forward has changed
        #: For each module the others, as they were in a forward that did not change them.
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

    If some parameters have no value yet (``lazy``), it is not good for later cells.
    """

    def __init__(self, root: nn.Module, changes: Changes) -> None:
        self._root, self.changes = root, changes
        self._modules, self._marks = _walk(root)
        self._states = [(m, m.training, _numbers(m), dict(m._parameters)) for m in self._modules]
        found = {p: None for *_, own in self._states for p in own.values() if p is not None}
        self._parameters = [p for p in found if not is_lazy(p)]
        self.lazy = len(self._parameters) < len(found)
        self._flags = [p.requires_grad for p in self._parameters]
        self._tracked = [p for p in self._parameters if not p.is_inference()]
        self.note_versions()
        self._checked: tuple[object, list[Swap]] | None = None
        self._originals: dict[tuple[int, int], tuple[Tensor, Tensor | None]] = {}
        changes.follow(self._modules)

    def like(self, other: ModuleState) -> bool:
        return self._marks == other._marks

    def note_versions(self) -> None:
        """The parameters are as they should be: cells that do not compute with them as they were
        before may be in flight."""
        self._versions = list(map(_VERSION, self._tracked))
        self._renormed = dict(self.changes.renormed.items())

    def original(self, buffer: Tensor | None, version: int) -> Tensor | None:
        """The copy of a buffer in a version, which it has when this is asked for the first time."""
        if buffer is None:
            return None
        key = id(buffer), version
        if key not in self._originals:
            self._originals[key] = buffer, _copy(buffer, {})  # it stays alive
        return self._originals[key][1]

    def swaps(self, where: object, moment: object) -> list[Swap]:
        """What to put back for a recomputation of ``where``, nearly always nothing.

        Modules are looked at once for each ``moment``. Raises a ``RuntimeError`` if a parameter was
        modified in place, or the layers are other ones.
        """
        if (versions := list(map(_VERSION, self._tracked))) != self._versions:
            renormed = self.changes.renormed
            for p, then, now in zip(self._tracked, self._versions, versions, strict=True):
                now -= renormed.get(p, 0) - self._renormed.get(p, 0)  # by the forward itself
                if now != then:
                    raise _modified(f"a parameter ({described(p)})", where, then, now)
        if self._checked is None or self._checked[0] != moment:
            self._checked = (moment, self._differences(where))
        return self._checked[1]

    def _differences(self, where: object) -> list[Swap]:
        modules, marks = _walk(self._root)
        if marks == self._marks:
            return []
        swaps: list[Swap] = []
        same = list(map(id, modules)) == list(map(id, self._modules))
        for module, training, numbers, parameters in self._states:
            if not same or list(module._parameters) != list(parameters):
                raise RuntimeError(_other_modules(self._modules, modules, where))
            if module.training != training:
                plain = "training" in module.__dict__  # not so in TorchScript's
                swaps.append((module.__dict__ if plain else module, "training", training))
            if _numbers(module) is not numbers:
                swaps.append((module.__dict__, "_numbers", numbers))
            for name, parameter in parameters.items():
                if module._parameters[name] is not parameter:
                    swaps.append((module._parameters, name, parameter))
        for known, flag in zip(self._parameters, self._flags, strict=True):
            if known.requires_grad != flag:
                swaps.append((known, "requires_grad", flag))
        return swaps


def _walk(root: nn.Module) -> tuple[list[nn.Module], list[int]]:
    """All modules; and what tells whether anything that was noted of them has changed."""
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
        marks += (id(module), module.training, id(_numbers(module)))
        for parameter in module._parameters.values():
            if parameter is not None:
                marks += (id(parameter), parameter.requires_grad)
        pending.extend(module._modules.values())
    return modules, marks


def _numbers(module: nn.Module) -> Any:
    """What a converted layer reads of modules of its model; it is replaced as a whole."""
    return module.__dict__.get("_numbers")


def _other_modules(then: list[nn.Module], now: list[nn.Module], where: object) -> str:
    came = ", ".join(type(m).__name__ for m in now if m not in then)
    gone = ", ".join(type(m).__name__ for m in then if m not in now)
    return (
        f"the modules of {where} changed between forward and backward (new: {came}; gone: {gone}), "
        "so that the cell cannot be recomputed: change them before the forward or after backward"
    )


def _copy(buffer: Tensor | None, made: dict[int, Tensor]) -> Tensor | None:
    """A copy of a buffer; one that two modules share stays one."""
    if buffer is None:
        return None
    if id(buffer) not in made:
        made[id(buffer)] = (buffer.detach() if buffer.requires_grad else buffer).clone()
    return made[id(buffer)]


class Recomputation:
    """A cell that runs without keeping its graph, and how to run it again; under the stage's lock.

    Made before the forward, for it notes buffers as they are then.
    """

    cell: Callable[[Any], Any]  #: computes the cell again from a tree of inputs
    mutates_inputs = False  #: whether it writes into these
    stored: Counter[Any] | None = None  #: which tensors the forward stored; None: who cares

    def __init__(self, modules: ModuleState, where: object) -> None:
        self.modules = self._first = modules  # to be replaced if it is lazy
        self._where = where
        self._noted: list[tuple[nn.Module, list[_Noted]]] = []
        self._copies: dict[_Place, Tensor | None] = {}
        self._lazy: list[_Place] = []
        self.inputs: Any = None
        made: dict[int, Tensor] = {}
        changing = modules.changes.changing
        for module in modules.changes.owners:
            noted: list[_Noted] = []
            for name, buffer in module._buffers.items():
                if buffer is not None and is_lazy(buffer):
                    self._lazy.append((module, name))
                elif (module, name) in changing:
                    self._copies[module, name] = _copy(buffer, made)
                else:
                    noted.append((name, buffer, version_of(buffer)))
                    modules.original(buffer, version_of(buffer))
            self._noted.append((module, noted))

    def forward(
        self, run: Callable[[Any], Any], inputs: Any, shapes: bool | None, *, guard: bool = False
    ) -> Any:
        """Runs the cell for the first time; then sees which buffers that changed.

        What it stored is noted, with shapes or without (None: not at all). If it may write into its
        inputs, objects in these, which cannot be copied, are guarded.
        """
        begins = [] if shapes is None else [tensor.grad_fn for tensor in tensors_in(inputs)]
        objects = [(each, _attributes(each)) for each in objects_in(inputs)] if guard else []
        token = _CHECKPOINTING.set(True)
        try:
            outputs = run(inputs)
        finally:
            _CHECKPOINTING.reset(token)
        for thing, then in objects:
            _check_object(thing, then, self._where)
        if shapes is not None:
            self.stored = _stored_by(outputs, begins, shapes=shapes)
        made: dict[int, Tensor] = {}
        changes = self.modules.changes
        for module, noted in self._noted:
            # What was not so before may have changed without a trace in its version.
            new = not _same_tensors(noted, changes.constant.get(module))
            for each in list(noted):
                name, buffer, version = each
                now, before = module._buffers.get(name), self._first.original(buffer, version)
                if (
                    now is not buffer
                    or version_of(now) != version
                    or (new and now is not None and not torch.equal(now, before))  # type: ignore[arg-type]
                ):
                    changes.changing.add((module, name))
                    self._copies[module, name] = _copy(before, made)  # others may want it
                    noted.remove(each)
            changes.constant[module] = noted
        for module, name in self._lazy:  # it has its first value now, which is as good
            self._copies[module, name] = _copy(module._buffers[name], made)
        return outputs

    def note_all(self) -> None:
        """Takes every buffer for one that changes: the cell runs again before it is through."""
        made: dict[int, Tensor] = {}
        for module, noted in self._noted:
            for name, buffer, version in noted:
                self._copies[module, name] = _copy(self._first.original(buffer, version), made)

    def keep(self, cell: Callable[[Any], Any], inputs: Any) -> None:
        """Keeps the detached inputs until they are given to the cell again."""
        self.cell, self.inputs = cell, inputs
        self._tracked = list(filterfalse(Tensor.is_inference, tensors_in(inputs)))
        self._versions = list(map(_VERSION, self._tracked))

    def __call__(self, inputs: Any, moment: object, keep: bool) -> Any:
        """The cell's outputs once more, from the inputs with a new graph; ``keep``: and again.

        ``moment`` is the same as long as the user's code cannot have changed any module.
        """
        begins: list[Any] = []
        if self.stored is not None:
            begins = [tensor.grad_fn for tensor in tensors_in(inputs)]
        token = _RECOMPUTING.set(True)
        try:
            if list(map(_VERSION, self._tracked)) != self._versions:
                raise self._input_modified()
            swaps = self._swaps(moment, keep)
            if self.mutates_inputs:
                inputs = map_tensors(clones, inputs)
            outputs = swapped(swaps, partial(self.cell, inputs)) if swaps else self.cell(inputs)
        except BaseException as error:
            annotate(error, f"while recomputing {self._where}")
            raise
        finally:
            _RECOMPUTING.reset(token)
        if self.stored is not None:
            shapes = any(len(key) > 1 for key in self.stored)
            self._compare(self.stored, _stored_by(outputs, begins, shapes=shapes))
        return outputs

    def _input_modified(self) -> RuntimeError:
        pairs = zip(self._tracked, self._versions, strict=True)
        tensor, then = next((t, then) for t, then in pairs if t._version != then)
        kind = "a parameter" if isinstance(tensor, nn.Parameter) else "an input"
        return _modified(f"{kind} ({described(tensor)})", self._where, then, tensor._version)

    def _swaps(self, moment: object, keep: bool) -> list[Swap]:
        """What makes the stage what it was before the forward."""
        made: dict[int, Tensor] = {}
        changes = self.modules.changes
        swaps = list(self.modules.swaps(self._where, moment))
        changes.any |= bool(swaps)
        for module, noted in self._noted:
            for name, buffer, version in noted:
                if version_of(buffer) != version:
                    kept = _copy(self._first.original(buffer, version), made)
                    swaps.append((module._buffers, name, kept))
                elif module._buffers.get(name, buffer) is not buffer:
                    swaps.append((module._buffers, name, buffer))
        for (module, name), kept in self._copies.items():
            if name in module._buffers:
                swaps.append((module._buffers, name, _copy(kept, made) if keep else kept))
        for embedding in changes.renorming:
            swaps.append((embedding.__dict__, "max_norm", None))
        return swaps

    def _compare(self, then: Counter[Any], now: Counter[Any]) -> None:
        if now == then:
            return
        names = [", ".join(map(str, (a - b).elements())) for a, b in ((now, then), (then, now))]
        second, first = (name or "nothing more" for name in names)
        raise RuntimeError(
            f"{self._where} stored other tensors for backward when it was recomputed: those of "
            f"{second} instead of {first}. Its layers must do the same both times; if one depends "
            "on a global or counts its calls, let it ask syncpipe.is_recomputing(); if the forward "
            "ran in a context that backward does not (sdpa_kernel, parametrize.cached), call "
            "backward in it, too; or use checkpoint='never'."
        )


def _same_tensors(now: list[_Noted], then: list[_Noted] | None) -> bool:
    return (
        then is not None
        and len(now) == len(then)
        and all(a[1] is b[1] and a[2] == b[2] for a, b in zip(now, then, strict=True))
    )


def _stored_by(outputs: Any, begins: list[Any], *, shapes: bool) -> Counter[Any]:
    """The operations in the graph of a cell, which say what was stored.

    It ends at its outputs, and begins after the nodes that its inputs had; ``shapes`` are those of
    what operations gave, with dtypes, which takes longer.
    """
    found: Counter[Any] = Counter()
    for node in nodes_of([t.grad_fn for t in tensors_in(outputs)], begins):
        kind = type(node).__name__
        if kind not in _OURS:
            metadata = node._input_metadata if shapes else ()
            found[kind, *[(tuple(each.shape), each.dtype) for each in metadata]] += 1
    return found


#: How inputs come in: a cell that writes into them is given copies. And casts, which store nothing:
#: how many there are hangs on autocast's cache, which any thread clears that leaves its autocast.
_OURS = {"_CrossBackward", "CloneBackward0", "_ExactBackward", "AccumulateGrad", "ToCopyBackward0"}


def _check_object(thing: Any, then: dict[str, tuple[Any, ...]], where: object) -> None:
    """Raises a ``RuntimeError`` if a forward set an attribute, or modified one's tensor."""
    now = _attributes(thing)
    for name in then.keys() | now.keys():
        if then.get(name, ())[1:] != now.get(name, ())[1:]:
            raise RuntimeError(
                f"{where} changed the attribute {name!r} of the {type(thing).__name__} that it was "
                "given, so that it cannot be recomputed: let the layer return a new object, pass "
                "tensors in tuples or dicts (or in a class registered with torch.utils._pytree), "
                "or use checkpoint='never'"
            )


def _attributes(thing: Any) -> dict[str, tuple[Any, ...]]:
    """The attributes of an object (which keeps them alive), and what tells whether they changed."""
    return {
        name: (value, id(value), version_of(value) if isinstance(value, Tensor) else 0)
        for name, value in attributes_of(thing).items()
    }
