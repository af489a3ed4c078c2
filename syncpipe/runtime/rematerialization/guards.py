"""Guards: what a recomputation starts from must be what the forward started from."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from syncpipe.data import attributes_of, described, objects_in, tensors_in

__all__ = ["UnchangedObjects", "UnmodifiedTensors", "modified", "version_of", "versions"]


def version_of(tensor: Tensor) -> int:
    """How often a tensor has been modified in place."""
    return 0 if tensor.is_inference() else tensor._version


def versions(tree: Any) -> list[int]:
    """How often each tensor of a tree has been modified in place."""
    return [0 if t.is_inference() else t._version for t in tensors_in(tree)]


def modified(what: str, where: object, then: int, now: int) -> RuntimeError:
    """The error for a tensor that has another version now than in the forward."""
    return RuntimeError(
        f"{what} of {where} was modified in place between forward and backward (version {then} "
        f"became {now}), so that the cell cannot be recomputed: call backward before the "
        "optimizer's step, and modify copies; or use checkpoint='never' if a layer itself does this"
    )


class UnmodifiedTensors:
    """Guards the inputs of a cell until it is recomputed.

    Args:
        inputs: a tree.
        where: the cell, which as a string is its name in messages.
    """

    __slots__ = ("_tensors", "_versions", "_where")

    def __init__(self, inputs: Any, where: object) -> None:
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


class UnchangedObjects:
    """Guards objects in the inputs of a cell during its forward: they cannot be copied.

    Args:
        inputs: a tree.
    """

    __slots__ = ("_objects",)

    def __init__(self, inputs: Any) -> None:
        self._objects = [(thing, _attributes(thing)) for thing in objects_in(inputs)]

    def check(self, where: object) -> None:
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
