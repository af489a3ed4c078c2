"""``@skippable``: layers with skips, written as generators."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from torch import nn

from .declaration import Declaration, check_names, declaration_of, key_of, says_all
from .driver import driven
from .namespace import Namespace, SkipKey
from .old_keys import accept_old_keys

M = TypeVar("M", bound=nn.Module)


def skippable(stash: Iterable[str] = (), pop: Iterable[str] = ()) -> Callable[[type[M]], type[M]]:
    """Declares which skips a layer stashes and pops.

    The forward of the decorated class is a generator function. It says ``yield stash(name,
    value)`` to send a value past the layers that follow, ``value = yield pop(name)`` to receive
    one, and returns its output. Each declared name has to be stashed or popped exactly once in
    every forward; where there is nothing to send, stash None.

    The class is changed in place and returned: its ``forward`` can be called like that of any
    other layer, and it gets a method ``isolate(namespace, *, only=None)``. A subclass inherits
    the skips along with the forward. If it overrides forward with another generator, decorate it
    again; the skips of a base class count only where the new forward calls ``super().forward``. If
    it overrides forward with one that is no generator, and calls the base's in a way that cannot
    be seen in its code (or names it and does not call it), decorate it with the names of all skips
    that then happen.

    Args:
        stash: names of the skips that the layer sends.
        pop: names of the skips that the layer receives.

    Raises:
        TypeError: not a list of names, not a subclass of ``nn.Module``, decorated already, or
            names were declared and forward is not a generator function.
        ValueError: a name is listed twice.
    """
    declaration = Declaration(check_names(stash, "stash"), check_names(pop, "pop"))

    def decorate(cls: type[M]) -> type[M]:
        _refuse_unfit(cls, declaration)
        forward = cls.forward
        if "forward" not in cls.__dict__ and hasattr(forward, "_syncpipe_skips"):
            forward = vars(forward)["__wrapped__"]  # the base's generator, under new names
        if inspect.isgeneratorfunction(forward):
            _set(cls, "forward", driven(forward, declaration))
        elif "forward" in cls.__dict__ and is_skippable(cls):
            _set(cls, "forward", says_all(forward, declaration))
        if not is_skippable(cls):
            _set(cls, "isolate", _isolate)
        accept_old_keys(cls)
        _set(cls, "_syncpipe_skippable", True)
        return cls

    return decorate


def is_skippable(module: nn.Module | type) -> bool:
    """Whether a module, or a class, was decorated, itself or by inheritance."""
    cls = module if isinstance(module, type) else type(module)
    return getattr(cls, "_syncpipe_skippable", False) is True


def stashes(module: nn.Module) -> list[SkipKey]:
    """The skips that this very module stashes, in order; submodules are not asked."""
    return [key_of(module, name) for name in _declared(module).stash]


def pops(module: nn.Module) -> list[SkipKey]:
    """The skips that this very module pops, in order; submodules are not asked."""
    return [key_of(module, name) for name in _declared(module).pop]


def _declared(module: nn.Module) -> Declaration:
    """What a module says for itself, or else its class."""
    own: Declaration | None = module.__dict__.get("skips") if is_skippable(module) else None
    return declaration_of(type(module)) if own is None else own


def _set(cls: type, name: str, value: object) -> None:
    setattr(cls, name, value)


def _refuse_unfit(cls: object, declaration: Declaration) -> None:
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise TypeError(f"@skippable decorates subclasses of nn.Module, not {cls!r}")
    forward = cls.forward
    if hasattr(cls.__dict__.get("forward"), "_syncpipe_skips"):
        raise TypeError(f"{cls.__name__} is skippable already: write all names in one @skippable")
    if not is_skippable(cls) and hasattr(cls, "isolate"):
        raise TypeError(
            f"{cls.__name__} has its own attribute 'isolate', which @skippable adds: rename it"
        )
    if declaration.names and not (
        inspect.isgeneratorfunction(forward)
        or hasattr(forward, "_syncpipe_skips")
        or is_skippable(cls)
    ):
        raise TypeError(
            f"{cls.__name__} declares the skips {list(declaration.names)}, but its forward is "
            "not a generator function: write 'yield stash(name, value)' and "
            "'value = yield pop(name)' in forward"
        )


def _isolate(
    self: M, namespace: Namespace, *, only: Iterable[str] | None = None
) -> M:  # becomes the method ``isolate`` of skippable classes
    """Puts the skips of this layer into a namespace.

    Args:
        namespace: the namespace. A skip that is in one already moves to this one.
        only: the names to put there, all skips of the layer if None. Later calls add to it.

    Returns:
        The layer itself.

    Raises:
        TypeError: not a :class:`Namespace`, or ``only`` is not a list of names.
        ValueError: a name in ``only`` that the layer does not declare.
    """
    if not isinstance(namespace, Namespace):
        raise TypeError(f"isolate() takes a Namespace(), not {namespace!r}")
    declared = declaration_of(type(self)).names
    chosen = declared if only is None else check_names(only, "only")
    unknown = [name for name in chosen if name not in declared]
    if unknown:
        raise ValueError(
            f"only={list(chosen)!r}: {type(self).__name__} does not declare {unknown}; "
            f"its skips are {list(declared)}"
        )
    # A new dictionary each time: a shallow copy of the layer may share the old one.
    old: Mapping[str, Namespace] = self.__dict__.get("_skip_namespaces", {})
    self.__dict__["_skip_namespaces"] = {**old, **dict.fromkeys(chosen, namespace)}
    return self


_isolate.__name__ = "isolate"
_isolate.__qualname__ = "skippable.isolate"
