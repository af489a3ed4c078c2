"""Which skips a class declares, its own and those of the forwards that it hands on to."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import CodeType
from typing import Any

from torch import nn

from .namespace import Namespace, SkipKey


@dataclass(frozen=True)
class Declaration:
    """The names that a forward stashes and pops, in the order in which they were declared."""

    stash: tuple[str, ...] = ()
    pop: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All names, each once."""
        return tuple(dict.fromkeys(self.stash + self.pop))

    def merged_with(self, other: Declaration) -> Declaration:
        """Both declarations as one."""
        return Declaration(
            tuple(dict.fromkeys(self.stash + other.stash)),
            tuple(dict.fromkeys(self.pop + other.pop)),
        )


def check_names(names: Iterable[str], argument: str) -> tuple[str, ...]:
    """Returns the names as a tuple, once it is sure that they are names.

    Raises:
        TypeError: a lone string, not an iterable, or something in it that is not a string.
        ValueError: a name that is listed twice.
    """
    if isinstance(names, str):
        raise TypeError(f"{argument}={names!r}: write {argument}=[{names!r}], a list of names")
    if isinstance(names, type) or not isinstance(names, Iterable):
        raise TypeError(f"{argument} must be a list of names, such as ['skip'], not {names!r}")
    checked = tuple(names)
    for name in checked:
        if not isinstance(name, str):
            raise TypeError(
                f"{argument} must be a list of names, but holds {name!r}, "
                f"of type {type(name).__name__}"
            )
        if checked.count(name) > 1:
            raise ValueError(f"{argument} lists {name!r} more than once: leave one")
    return checked


def declaration_of(cls: type) -> Declaration:
    """What instances of ``cls`` stash and pop when their forward runs.

    An overriding forward replaces the skips of the one it overrides, unless it calls it.
    """
    found = Declaration()
    for base in cls.__mro__:
        forward = base.__dict__.get("forward")
        if forward is None:
            continue
        found = getattr(forward, "_syncpipe_skips", Declaration()).merged_with(found)
        if not _hands_on(forward, base):
            break
    return found


def key_of(module: nn.Module, name: str) -> SkipKey:
    """The skip that a layer means by a name, given how it was isolated."""
    namespaces: Mapping[str, Namespace] = module.__dict__.get("_skip_namespaces", {})
    return namespaces.get(name), name


def _hands_on(forward: Any, cls: type) -> bool:
    """Whether the code says ``super().forward(...)`` or ``Base.forward(...)``."""
    code = getattr(inspect.unwrap(forward), "__code__", None)
    if code is None:
        return False
    used = set(_names_in(code))
    ways = {"super", *(base.__name__ for base in cls.__mro__[1:])}
    return "forward" in used and not used.isdisjoint(ways)


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    yield from code.co_freevars
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)
