"""Recomputation: a cell drops its graph after the forward and runs again just before its backward.

    forward     x --> [cell] --> y        y is sent, the graph is dropped, x is kept
    recompute   x --> [cell] --> y'       backward runs through this graph

Both runs record a graph: a forward without one may use other kernels, with other last bits. The
second run sees the modules as the first one did, and leaves no change in them:

* Modes, parameters and large buffers are noted by reference. The recomputation puts them back in
  place of later ones (``eval()``, a frozen parameter). It refuses tensors that were modified in
  place, and modules that were added or removed.
* Small buffers are copied before each forward, and the recomputation works on the copies: BatchNorm
  updates its statistics without a new version.
* Large buffers that the last call changed are copied, too. A cell that changes another large buffer
  keeps its graph, and earlier cells of the call, which read it, are refused. Changes without a new
  version are found in the first cell of a call, by sums over the buffer's memory.
* Embeddings with ``max_norm`` write into their weight in the forward: what holds one is not
  recomputed.

Modules are shared by all threads, so forwards and recomputations of such a stage take its lock. A
pipe inside a layer runs under the lock of the outermost stage, which is taken before the locks of
generators.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from itertools import filterfalse, zip_longest
from operator import attrgetter
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from syncpipe.data.trees import attributes_of, described, map_tensors, objects_in, tensors_in
from syncpipe.runtime.errors import annotate
from syncpipe.runtime.graph import nodes_of
from syncpipe.runtime.interrupts import Swap, forkable_lock, with_swaps
from syncpipe.storage import clones, is_slice, modules_of, with_class_of

_CHECKPOINTING: ContextVar[bool] = ContextVar("syncpipe_checkpointing", default=False)
_RECOMPUTING: ContextVar[bool] = ContextVar("syncpipe_recomputing", default=False)
#: The lock of the outermost stage that runs on this thread; covers the pipes inside its layers.
OUTERMOST: ContextVar[Any] = ContextVar("syncpipe_stage_lock", default=None)

_Place = tuple[nn.Module, str]
SMALL = 1 << 16  #: bytes; buffers up to this size are copied before each forward
_VERSION: Callable[[Tensor], int] = attrgetter("_version")
_LAZY = UninitializedBuffer, UninitializedParameter
_NUMBERS = "_numbers"  #: the attribute of a converted layer with values that it reads; immutable


def is_checkpointing() -> bool:
    """Return whether the calling layer runs in a forward whose activations are dropped.

    The layer will run once more, in backward, for the same micro-batch.
    """
    return _CHECKPOINTING.get()


def is_recomputing() -> bool:
    """Return whether the calling layer runs for the second time, in backward.

    A layer with a side effect (a counter, a log) asks this to run the effect only once. Buffers are
    safe: a recomputation neither sees nor leaves changes in them.
    """
    return _RECOMPUTING.get()


def version_of(tensor: Tensor | None) -> int:
    return 0 if tensor is None or tensor.is_inference() else tensor._version


def _modified(
    what: str, tensors: Sequence[Tensor], versions: Sequence[int], where: object
) -> RuntimeError:
    """The error for the first tensor that has another version now."""
    pairs = zip(tensors, versions, strict=True)
    tensor, then = next((t, then) for t, then in pairs if t._version != then)
    what = "a parameter" if isinstance(tensor, nn.Parameter) else what
    return RuntimeError(
        f"{what} ({described(tensor)}) of {where} was modified in place between forward and "
        f"backward (version {then} became {tensor._version}), so the cell cannot be recomputed: "
        "call backward before optimizer.step(), or modify a copy; if a layer itself modifies it, "
        "use checkpoint='never'"
    )


class Changes:
    """What the forwards of one stage change in its modules; lives as long as the pipe."""

    def __init__(self, root: nn.Module) -> None:
        self.lock = forkable_lock()  #: held during runs of the stage if ``needs_lock`` is set
        self.needs_lock = False  #: whether concurrent runs of the stage may disturb each other
        self.owners: list[nn.Module] = []  #: the modules with buffers
        self.changing: set[_Place] = set()  #: large buffers that the last call's forwards changed
        #: Large buffers whose change was once found too late; copied as small ones are.
        self.copied: set[_Place] = set()
        self.steady: set[_Place] = set()  #: large buffers that a forward did not change
        self.follow(list(root.modules()))

    def follow(self, modules: list[nn.Module]) -> None:
        """Updates the facts to the modules that there are now."""
        owners = [module for module in modules if module._buffers]
        if owners != self.owners:  # drop the references to removed modules
            places = {(module, name) for module in owners for name, _ in module._buffers.items()}
            self.owners, self.changing = owners, self.changing & places
            self.copied, self.steady = self.copied & places, self.steady & places
        self.needs_lock |= bool(self.owners)


class ModuleState:
    """The modes and parameters of a stage's modules in one call.

    Later cells need a new state if some parameters had no value yet (``lazy``). Buffers that have a
    substitute (``substitute_of``, by identity) are not copied.
    """

    def __init__(
        self, root: nn.Module, changes: Changes, substitute_of: Mapping[int, Tensor]
    ) -> None:
        self._root, self.changes, self.substitute_of = root, changes, substitute_of
        self._modules, self._signature = _walk(root)
        self._states = [
            (m, m.training, m.__dict__.get(_NUMBERS), dict(m._parameters)) for m in self._modules
        ]
        found = {p: None for *_, own in self._states for p in own.values() if p is not None}
        self._parameters = [p for p in found if not isinstance(p, _LAZY)]
        self.lazy = len(self._parameters) < len(found)
        self._flags = [p.requires_grad for p in self._parameters]
        self._computing = [
            substitute_of.get(id(p), p) for p in self._parameters if not p.is_inference()
        ]
        self.note_versions()
        self._checked: tuple[object, list[Swap]] | None = None
        self.first = True  # whether no cell has run forward yet
        self.expected = set(changes.changing)  #: the large buffers that forwards may change
        self._changed: set[_Place] = set()
        #: By identity, large buffers (so that they live), their latest versions, and copies.
        self._copies: dict[int, tuple[Tensor, int, Tensor]] = {}
        changes.follow(self._modules)

    def changed(self) -> bool:
        """Whether modes, parameters or modules differ; follows the buffers that there are now."""
        modules, signature = _walk(self._root)
        self.changes.follow(modules)
        return signature != self._signature

    def note_versions(self) -> None:
        """Accepts the current values of the parameters for cells that are not yet recomputed."""
        self._versions = list(map(_VERSION, self._computing))

    def copy_of_version(self, buffer: Tensor, version: int) -> Tensor:
        """The copy of a buffer in its current version, shared by the cells that begin with it."""
        if self._copies.get(id(buffer), (buffer, None))[1] != version:
            self._copies[id(buffer)] = buffer, version, copy_of(buffer, {})
        return self._copies[id(buffer)][2]

    def note_changed(self, changed: Iterable[_Place]) -> None:
        """Notes which large buffers a forward changed in place, for this call and the next one."""
        self.first = False
        self._changed.update(changed)
        self.expected |= self._changed
        self.changes.changing = self._changed

    def swaps(self, where: object, epoch: object) -> list[Swap]:
        """The swaps that restore modes and parameters for a recomputation; mostly empty.

        Modules are compared once per ``epoch``, in which no user code runs. Raises ``RuntimeError``
        if a parameter was modified in place, or if modules were added or removed.
        """
        if list(map(_VERSION, self._computing)) != self._versions:
            raise _modified("a parameter", self._computing, self._versions, where)
        if self._checked is None or self._checked[0] != epoch:
            self._checked = (epoch, self._differences(where))
        return self._checked[1]

    def _differences(self, where: object) -> list[Swap]:
        modules, signature = _walk(self._root)
        if signature == self._signature:
            return []
        swaps: list[Swap] = []
        same = list(map(id, modules)) == list(map(id, self._modules))
        for module, training, numbers, parameters in self._states:
            if not same or list(module._parameters) != list(parameters):
                raise RuntimeError(_other_modules(self._modules, modules, where))
            if module.training != training:
                plain = "training" in module.__dict__  # not in TorchScript modules
                swaps.append((module.__dict__ if plain else module, "training", training))
            if module.__dict__.get(_NUMBERS) is not numbers:
                swaps.append((module.__dict__, _NUMBERS, numbers))
            for name, parameter in parameters.items():
                if module._parameters[name] is not parameter:
                    swaps.append((module._parameters, name, parameter))
        for known, flag in zip(self._parameters, self._flags, strict=True):
            if known.requires_grad != flag:
                swaps.append((known, "requires_grad", flag))
        return swaps


def _walk(root: nn.Module) -> tuple[list[nn.Module], list[int]]:
    """All modules, and a list that differs if a mode, parameter or module was changed."""
    modules = modules_of(root)
    signature: list[int] = []
    for module in modules:
        signature += (id(module), module.training, id(module.__dict__.get(_NUMBERS)))
        for parameter in module._parameters.values():
            if parameter is not None:
                signature += (id(parameter), parameter.requires_grad)
    return modules, signature


def _other_modules(then: list[nn.Module], now: list[nn.Module], where: object) -> str:
    came = ", ".join(type(m).__name__ for m in now if m not in then)
    gone = ", ".join(type(m).__name__ for m in then if m not in now)
    return (
        f"the modules of {where} changed between forward and backward (new: {came}; gone: {gone}), "
        "so the cell cannot be recomputed: change them before the forward or after backward"
    )


def is_small(buffer: Tensor) -> bool:
    """Whether a buffer is copied before each forward; parts of a storage share its version."""
    size = buffer.numel() * buffer.itemsize
    return not buffer.requires_grad and (size <= SMALL or is_slice(buffer))


def copy_of(buffer: Tensor, made: dict[int, Tensor]) -> Tensor:
    """A copy of a buffer; one ``made`` gives modules that share a buffer one copy."""
    if id(buffer) not in made:
        copied = buffer.detach().clone()
        made[id(buffer)] = with_class_of(buffer, copied) if buffer.__dict__ else copied
    return made[id(buffer)]


def _sums(buffer: Tensor | None) -> Tensor | None:
    """Sums over the memory of a buffer, to see changes; None where no memory can be read."""
    if type(buffer) is not Tensor or not torch._C._has_storage(buffer) or buffer.is_meta:
        return None
    memory = torch.empty(0, dtype=torch.uint8, device=buffer.device)
    memory.set_(buffer.untyped_storage())
    end = len(memory) // 488 * 488
    return torch.cat([memory[:end].view(torch.int64).view(-1, 61).sum(0), memory[end:].long()])


class Recomputation:
    """The forward and recomputation of a cell, both under the stage's lock. Notes the buffers.

    ``run`` computes the cell from this object, whether it is recomputed, and a tree of inputs.
    """

    saved: Any = None  #: the results that a policy saves
    mutates_inputs = False  #: whether the cell writes into its inputs
    stored: Counter[Any] | None = None  #: what the forward stored; None: not compared
    keeps_graph = False  #: whether a buffer's old value is lost, so that backward needs the graph

    def __init__(
        self, modules: ModuleState, where: object, run: Any = None, *, may_keep: bool = False
    ) -> None:
        self.modules = self._first = modules  # replaced later if it is lazy
        self._where, self._run, self._may_keep = where, run, may_keep
        self.drawn: dict[int, Any] = {}  #: what layers drew (``drawing``)
        #: Large buffers and their versions. Without a copy old values are lost.
        self._noted: list[tuple[_Place, Tensor | None, int]] = []
        self._copies: dict[_Place, Tensor] = {}
        self._shared: dict[_Place, Tensor] = {}  # copies of large buffers, also of other cells
        self._changed: set[_Place] = set()  # the noted buffers that the forward changed
        self._lazy: list[_Place] = []
        self.inputs: Any = None
        made: dict[int, Tensor] = {}
        changes = modules.changes
        for module in changes.owners:
            for name, buffer in module._buffers.items():
                place = module, name
                if buffer is None:
                    self._noted.append((place, None, 0))
                elif id(buffer) in modules.substitute_of:
                    continue
                elif isinstance(buffer, _LAZY):
                    self._lazy.append(place)
                elif is_small(buffer) or (place in changes.copied and not buffer.requires_grad):
                    self._copies[place] = copy_of(buffer, made)
                else:
                    self._note(place, buffer, may_keep)

    def _note(self, place: _Place, buffer: Tensor, may_keep: bool) -> None:
        modules, version = self.modules, version_of(buffer)
        known = may_keep or place in modules.changes.steady
        if not buffer.requires_grad and (place in modules.expected or not known):
            self._shared[place] = modules.copy_of_version(buffer, version)
        self._noted.append((place, buffer, version))

    def forward(self, inputs: Any, shapes: bool | None, *, guard: bool) -> Any:
        """Runs the forward of the cell, and notes which buffers it changed.

        ``shapes``: whether to note the stored tensors with their shapes; None: not at all.
        ``guard``: whether to raise if the forward changes an object in its inputs, which cannot be
        copied.
        """
        begins = [] if shapes is None else [tensor.grad_fn for tensor in tensors_in(inputs)]
        objects = [(each, _attributes(each)) for each in objects_in(inputs)] if guard else []
        sums: list[Tensor | None] = []  # of large buffers
        if self._noted and self.modules.first:
            sums = [_sums(buffer) for _, buffer, _ in self._noted]
        token = _CHECKPOINTING.set(True)
        try:
            outputs = self._run(self, False, inputs)
        finally:
            _CHECKPOINTING.reset(token)
        for thing, then in objects:
            _check_object(thing, then, self._where)
        if shapes is not None:
            self.stored = _stored_by(outputs, begins, shapes=shapes)
        made: dict[int, Tensor] = {}
        if self._noted:
            self._note_changes(sums)
        for module, name in self._lazy:  # the forward gave it its first value
            if (buffer := module._buffers[name]) is not None:
                self._copies[module, name] = copy_of(buffer, made)
        return outputs

    def _note_changes(self, sums: list[Tensor | None]) -> None:
        changes, untraced = self._first.changes, set[_Place]()
        for (place, buffer, version), then in zip_longest(self._noted, sums):
            if version_of(buffer) != version:
                self._changed.add(place)
            elif then is None or torch.equal(then, cast("Tensor", _sums(buffer))):
                changes.steady.add(place)
                continue
            else:
                changes.copied.add(place)
                untraced.add(place)
            if place not in self._shared:
                if not self._may_keep:
                    raise self._lost(place, buffer)
                self.keeps_graph = True
        self._first.note_changed(self._changed)
        self._changed |= untraced

    def keep(self, inputs: Any) -> None:
        self.inputs = inputs
        self._tracked = list(filterfalse(Tensor.is_inference, tensors_in(inputs)))
        self._versions = list(map(_VERSION, self._tracked))

    def __call__(self, inputs: Any, epoch: object, keep: bool) -> Any:
        """Recomputes the cell's outputs with a new graph; ``keep`` allows another recomputation.

        ``epoch`` changes whenever user code may have changed modules.
        """
        begins: list[Any] = []
        if self.stored is not None:
            begins = [tensor.grad_fn for tensor in tensors_in(inputs)]
        token = _RECOMPUTING.set(True)
        try:
            if list(map(_VERSION, self._tracked)) != self._versions:
                raise _modified("an input", self._tracked, self._versions, self._where)
            swaps = self.swaps(epoch, keep)
            if self.mutates_inputs:
                inputs = map_tensors(clones, inputs)
            run = partial(self._run, self, True, inputs)
            outputs = with_swaps(swaps, run) if swaps else run()
        except BaseException as error:
            annotate(error, f"while recomputing {self._where}")
            raise
        finally:
            _RECOMPUTING.reset(token)
        if self.stored is not None:
            shapes = any(len(key) > 1 for key in self.stored)
            self._compare(self.stored, _stored_by(outputs, begins, shapes=shapes))
        return outputs

    def _lost(self, place: _Place, buffer: Any) -> RuntimeError:
        self.modules.changes.copied.add(place)
        return RuntimeError(
            f"the buffer {place[1]!r} ({described(buffer)}) of {self._where} was modified in "
            "place, so the cell cannot be recomputed. If a layer's forward modified it, call "
            "again: the next call expects it. If your code modified it between forward and "
            "backward, do that after backward, or use checkpoint='never'"
        )

    def swaps(self, epoch: object, keep: bool) -> list[Swap]:
        """The swaps that restore the stage to its state before the forward."""
        made: dict[int, Tensor] = {}
        changes = self.modules.changes
        swaps = list(self.modules.swaps(self._where, epoch))
        changes.needs_lock |= bool(swaps)
        for (module, name), buffer, version in self._noted:
            if (module, name) in self._shared:
                continue
            if version_of(buffer) != version:
                raise self._lost((module, name), buffer)
            if module._buffers.get(name, buffer) is not buffer:
                swaps.append((module._buffers, name, buffer))
        values = {k: copy_of(v, made) if keep else v for k, v in self._copies.items()}
        for place, value in self._shared.items():
            values[place] = copy_of(value, made) if place in self._changed else value
        for (module, name), value in values.items():
            if name in module._buffers:
                swaps.append((module._buffers, name, value))
        return swaps

    def _compare(self, then: Counter[Any], now: Counter[Any]) -> None:
        if now == then:
            return
        names = [", ".join(map(str, (a - b).elements())) for a, b in ((now, then), (then, now))]
        second, first = (name or "nothing more" for name in names)
        raise RuntimeError(
            f"{self._where} stored other tensors for backward when it was recomputed: results of "
            f"{second} instead of {first}. Its layers must do the same both times. A layer that "
            "depends on a global or counts its calls can ask syncpipe.is_recomputing(). If the "
            "forward ran in a context (sdpa_kernel, parametrize.cached), call backward in it, too. "
            "Or use checkpoint='never'"
        )


def _stored_by(outputs: Any, begins: list[Any], *, shapes: bool) -> Counter[Any]:
    """The operations in the graph of a cell, which determine the stored tensors.

    ``begins`` are the nodes of the cell's inputs. ``shapes`` adds shapes and dtypes, at a cost.
    """
    found: Counter[Any] = Counter()
    for node in nodes_of([t.grad_fn for t in tensors_in(outputs)], begins):
        kind = type(node).__name__
        if kind not in _NOT_COMPARED:
            metadata = node._input_metadata if shapes else ()
            found[kind, *[(_sizes(each.shape), each.dtype) for each in metadata]] += 1
    return found


def _sizes(shape: Any) -> tuple[int, ...]:
    """A shape, with -1 for a ragged dimension, whose symbol is new in each run."""
    return tuple([size if type(size) is int else -1 for size in shape])


#: Nodes that are not compared: inputs of a cell, and casts, which store nothing and whose number
#: depends on autocast's cache, which any thread may clear.
_NOT_COMPARED = {
    "_EnterBackward",
    "CloneBackward0",
    "_ExactBackward",
    "AccumulateGrad",
    "ToCopyBackward0",
}


def _check_object(thing: Any, then: dict[str, tuple[Any, ...]], where: object) -> None:
    """Raises ``RuntimeError`` if a forward set an attribute of an object or modified its tensor."""
    now = _attributes(thing)
    for name in then.keys() | now.keys():
        if then.get(name, ())[1:] != now.get(name, ())[1:]:
            raise RuntimeError(
                f"{where} changed the attribute {name!r} of the {type(thing).__name__} in its "
                "inputs, so it cannot be recomputed: let the layer return a new object, pass "
                "tensors in tuples or dicts (or in a class registered with torch.utils._pytree), "
                "or use checkpoint='never'"
            )


def _attributes(thing: Any) -> dict[str, tuple[Any, ...]]:
    """The attributes of an object, each with its identity and version, to see changes."""
    return {
        name: (value, id(value), version_of(value) if isinstance(value, Tensor) else 0)
        for name, value in attributes_of(thing).items()
    }
