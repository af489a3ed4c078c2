"""Numbers that remember where they came from: sizes of tensors while a model is recorded.

They are numbers like any other, so the model's code takes its way. Arithmetic on them is written
down; where Python decides by one, or takes it for a plain number, that is written down as a check.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from syncpipe.layers.conversion.recording.nodes import Node

__all__ = ["Notes", "TracedFloat", "TracedInt", "plain"]


class Notes(Protocol):
    """Where what happens to a number is written down."""

    def computed(self, fn: Callable[..., Any], args: tuple[Any, ...], value: Any) -> Any:
        """A number was computed of others; returns it as one that is traced."""
        ...

    def decided(self, node: Any, value: Any) -> None:
        """Python used the value of a node."""
        ...


class _Traced:
    """What traced numbers of both kinds do."""

    node: Node
    notes: Notes

    if not TYPE_CHECKING:

        def __reduce_ex__(self, protocol):
            return type(plain(self)), (plain(self),)

        def __deepcopy__(self, memo):
            return plain(self)


class TracedInt(int, _Traced):
    """An integer with the node that gave it."""


class TracedFloat(float, _Traced):
    """A float with the node that gave it."""


def plain(value: Any) -> Any:
    """A number without its past; anything else as it is."""
    if isinstance(value, TracedInt):
        return int.__int__(value)
    return float.__float__(value) if isinstance(value, TracedFloat) else value


def _computes(fn: Callable[..., Any], *, reflected: bool = False) -> Callable[..., Any]:
    def method(self: Any, *others: Any) -> Any:
        if not all(isinstance(other, (int, float)) for other in others):
            return NotImplemented
        args = (*others, self) if reflected else (self, *others)
        return self.notes.computed(fn, args, fn(*map(plain, args)))

    return method


def _compares(fn: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Any, other: Any) -> Any:
        if not isinstance(other, (int, float)):
            return NotImplemented
        result = fn(plain(self), plain(other))
        self.notes.decided((fn, (self, other)), result)
        return result

    return method


def _uses(fn: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Any, *args: Any) -> Any:
        self.notes.decided(self.node, plain(self))
        return fn(plain(self), *args)

    return method


def _shows(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *args: fn(plain(self), *args)


_BINARY = ("add", "sub", "mul", "floordiv", "truediv", "mod", "pow", "and_", "or_", "xor",
           "lshift", "rshift")  # fmt: skip

for _cls in (TracedInt, TracedFloat):
    for _name in _BINARY:
        _fn, _bare = getattr(operator, _name), _name.rstrip("_")
        if hasattr(_cls, f"__{_bare}__"):
            setattr(_cls, f"__{_bare}__", _computes(_fn))
            setattr(_cls, f"__r{_bare}__", _computes(_fn, reflected=True))
    for _name in ("neg", "abs", "pos"):
        setattr(_cls, f"__{_name}__", _computes(getattr(operator, _name)))
    for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
        setattr(_cls, f"__{_name}__", _compares(getattr(operator, _name)))
    for _name, _use in (
        ("hash", hash), ("bool", bool), ("int", int), ("float", float), ("round", round),
        ("divmod", divmod), ("trunc", int),
    ):  # fmt: skip
        setattr(_cls, f"__{_name}__", _uses(_use))
    for _name, _show in (("repr", repr), ("str", str), ("format", format)):
        setattr(_cls, f"__{_name}__", _shows(_show))
