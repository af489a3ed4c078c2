"""Which skips a class declares, its own and those of the forwards that it hands on to."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
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

    An overriding forward replaces the skips of the one it overrides, unless it calls it. Whether
    it does is for the class to say, by ``@skippable``; where it says nothing, its code is asked.
    """
    found = Declaration()
    for base in cls.__mro__:
        forward = base.__dict__.get("forward")
        if forward is None:
            continue
        found = getattr(forward, "_syncpipe_skips", Declaration()).merged_with(found)
        if hasattr(forward, "_syncpipe_says_all") or not _hands_on(forward, base):
            break
    return found


def says_all(forward: Callable[..., Any], declaration: Declaration) -> Callable[..., Any]:
    """A forward that is no generator, with the skips of all forwards that it hands on to."""

    @functools.wraps(forward)
    def declared(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    declared._syncpipe_skips = declaration  # type: ignore[attr-defined]
    declared._syncpipe_says_all = True  # type: ignore[attr-defined]
    return declared


def overrides(cls: type, name: str) -> bool:
    """Whether a forward of ``cls`` is taken not to call one with this skip that it overrides."""
    bases = [getattr(base.__dict__.get("forward"), "_syncpipe_skips", None) for base in cls.__mro__]
    known = [found for found in bases if found is not None]
    return any(name in found.names for found in known) and name not in declaration_of(cls).names


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
