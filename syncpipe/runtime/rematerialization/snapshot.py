"""What a cell depends on besides its inputs and buffers: the parameters, the modules, their modes.

A cell that is computed again has to be computed from what the forward used. One snapshot of each
stage, taken in each call before its first re-materialized cell, says what that was:

* A module that has another parameter now (``functional_call`` puts its own in for the forward
  only), or another mode (``eval()``), and a parameter that has been frozen since, get the forward's
  back for the recomputation, which works on the same as the graph then.
* A parameter that was modified, and a layer that was put in, replaced or taken out, cannot be
  undone and are refused.

Walking all modules takes time. So it is done once per call, and once in each backward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from operator import setitem
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from syncpipe.objects import attributes_of
from syncpipe.tree import described, objects_in, tensors_in

__all__ = ["Snapshot", "Swap", "Unchanged", "Untouched", "swapped", "version_of", "versions"]

#: ``(setter, owner, name, value)``: what to put where for a while, and by setitem or setattr.
Swap = tuple[Callable[[Any, str, Any], None], Any, str, Any]

_WAY_OUT = "call backward before the optimizer's step, and modify copies"
_NEVER = "use checkpoint='never' if a layer itself does this"


def version_of(tensor: Tensor) -> int:
    """How often a tensor has been modified in place."""
    return 0 if tensor.is_inference() else tensor._version


def versions(tree: Any) -> list[int]:
    """How often each tensor of a tree has been modified in place."""
    return [0 if t.is_inference() else t._version for t in tensors_in(tree)]


class Untouched:
    """Sees to it that the inputs that a recomputation starts from are still as they were.

    Args:
        inputs: a tree.
        where: the cell in words.
    """

    __slots__ = ("_tensors", "_versions", "_where")

    def __init__(self, inputs: Any, where: str) -> None:
        self._tensors = tensors_in(inputs)
        self._versions = versions(self._tensors)
        self._where = where

    def check(self) -> None:
        """Raises a ``RuntimeError`` if any of them was modified in place meanwhile."""
        current = versions(self._tensors)
        for tensor, now, then in zip(self._tensors, current, self._versions, strict=True):
            if now != then:
                kind = "a parameter" if isinstance(tensor, nn.Parameter) else "an input"
                raise modified(f"{kind} ({described(tensor)})", self._where, then, now)


class Unchanged:
    """Sees to it that a cell does not change objects in its inputs: they cannot be copied.

    Args:
        inputs: a tree.
    """

    __slots__ = ("_objects",)

    def __init__(self, inputs: Any) -> None:
        self._objects = [(thing, _attributes(thing)) for thing in objects_in(inputs)]

    def check(self, where: str) -> None:
        """Raises a ``RuntimeError`` if the forward set an attribute, or modified one's tensor."""
        for thing, then in self._objects:
            now = _attributes(thing)
            for name in then.keys() | now.keys():
                if then.get(name, ())[1:] != now.get(name, ())[1:]:
                    raise RuntimeError(
                        f"{where} changed the attribute {name!r} of the {type(thing).__name__} "
                        "that it was given, so that it cannot be recomputed: let the layer return "
                        "a new object, pass tensors in tuples or dicts (or in a class registered "
                        "with torch.utils._pytree), or use checkpoint='never'"
                    )


def _attributes(thing: Any) -> dict[str, tuple[Any, ...]]:
    """The attributes of an object (which keeps them alive), and what tells whether they changed."""
    return {
        name: (value, id(value), version_of(value) if isinstance(value, Tensor) else 0)
        for name, value in attributes_of(thing).items()
    }


def modified(what: str, where: str, then: int, now: int) -> RuntimeError:
    """The error for a tensor that has another version now than in the forward."""
    return RuntimeError(
        f"{what} of {where} was modified in place between forward and backward (version {then} "
        f"became {now}), so that the cell cannot be recomputed: {_WAY_OUT}; or {_NEVER}"
    )


class Snapshot:
    """The modules of a stage as they are in one call.

    Args:
        root: the partition.
        renormed: how often the forward itself has modified a parameter so far, for those that it
            does (see ``buffers.Buffers``); counts on while forwards run.

    Attributes:
        modules: the partition and all modules in it.
        lazy: whether some parameters have no value yet; then it is not good for later cells.
    """

    __slots__ = (
        "_checked", "_marks", "_parameters", "_renormed", "_renormed_then", "_root", "_states",
        "_versions", "lazy", "modules",
    )  # fmt: skip

    def __init__(self, root: nn.Module, renormed: Mapping[Tensor, int]) -> None:
        self._root = root
        self.modules, self._marks = _walk(root)
        self._states = [(m, m.training, dict(m._parameters.items())) for m in self.modules]
        found = {p: None for _, _, own in self._states for p in own.values() if p is not None}
        known = [p for p in found if not is_lazy(p)]
        self.lazy = len(known) < len(found)
        self._parameters: list[tuple[nn.Parameter, bool]] = [(p, p.requires_grad) for p in known]
        self._versions = [version_of(p) for p in known]
        self._renormed = renormed
        self._renormed_then = {p: renormed[p] for p in known if p in renormed}
        self._checked: tuple[object, list[Swap]] | None = None

    def like(self, other: Snapshot) -> bool:
        """Whether the modules, their modes and parameters are the same ones."""
        return self._marks == other._marks

    def check(self, where: str) -> None:
        """Sees to it that the parameters have the values that they had.

        Raises:
            RuntimeError: one was modified in place, by others than the forward itself.
        """
        now = [version_of(p) for p, _ in self._parameters]
        if now == self._versions:
            return
        for (p, _), version, then in zip(self._parameters, now, self._versions, strict=True):
            own = self._renormed.get(p, 0) - self._renormed_then.get(p, 0)
            if version - own != then:
                raise modified(f"a parameter ({described(p)})", where, then, version - own)

    def swaps(self, where: str, *, once: bool) -> list[Swap]:
        """What to put back for a recomputation, nearly always nothing.

        Args:
            where: the cell in words.
            once: look once and for all, for nothing of the user's has run since the forward.

        Raises:
            RuntimeError: the layers are other ones.
        """
        task = None if once else torch._C._current_graph_task_id()
        if self._checked is None or task == -1 or self._checked[0] != task:
            self._checked = (task, self._differences(where))
        return self._checked[1]

    def _differences(self, where: str) -> list[Swap]:
        modules, marks = _walk(self._root)
        if marks == self._marks:
            return []
        if list(map(id, modules)) != list(map(id, self.modules)):
            raise RuntimeError(_other_layers(modules, self.modules, where))
        swaps: list[Swap] = []
        for module, training, parameters in self._states:
            if module.training != training:
                swaps.append((setattr, module, "training", training))
            if list(module._parameters) != list(parameters):
                raise RuntimeError(_other_names(module, parameters, where))
            for name, parameter in parameters.items():
                if module._parameters[name] is not parameter:
                    swaps.append((setitem, module._parameters, name, parameter))
        for known, flag in self._parameters:
            if known.requires_grad != flag:
                swaps.append((setattr, known, "requires_grad", flag))
        return swaps


def swapped(swaps: Iterable[Swap], run: Callable[[], None]) -> None:
    """Calls ``run`` with other values in place.

    Ctrl-C may come between any two lines. So two calls put all of it back.
    """
    swaps = list(swaps)
    items = [swap for swap in swaps if swap[0] is setitem]
    others = [swap for swap in swaps if swap[0] is not setitem]
    before = [owner[name] for _, owner, name, _ in items]
    undo_items = map(setitem, [s[1] for s in items], [s[2] for s in items], before)
    attributes = [getattr(owner, name) for _, owner, name, _ in others]
    undo_others = map(setattr, [s[1] for s in others], [s[2] for s in others], attributes)
    try:
        for setter, owner, name, value in swaps:
            setter(owner, name, value)
        run()
    finally:
        try:
            deque(undo_items, maxlen=0)
        finally:
            deque(undo_others, maxlen=0)


def _walk(root: nn.Module) -> tuple[list[nn.Module], list[int]]:
    """All modules; and numbers that tell whether anything has changed that a snapshot holds."""
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


def _other_layers(now: list[nn.Module], then: list[nn.Module], where: str) -> str:
    new = next((m for m in now if all(m is not other for other in then)), None)
    gone = next((m for m in then if all(m is not other for other in now)), None)
    what = "in another order"
    if new is not None or gone is not None:
        what = " and ".join(
            f"a {type(module).__name__} {word}"
            for module, word in ((new, "came in"), (gone, "went out"))
            if module is not None
        )
    return (
        f"the modules of {where} changed between forward and backward ({what}), so that the cell "
        "cannot be recomputed: change them before the forward or after backward"
    )


def _other_names(module: nn.Module, then: Iterable[str], where: str) -> str:
    return (
        f"a {type(module).__name__} of {where} had parameters {list(then)} in the forward, and has "
        f"{list(module._parameters)} in backward, so that the cell cannot be recomputed: change "
        "them before the forward or after backward"
    )
