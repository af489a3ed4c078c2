"""``@skippable``: layers with skips, written as generators that yield ``stash`` and ``pop``."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import nn

from . import store
from .store import Namespace, SkipKey, describe

M = TypeVar("M", bound=nn.Module)
_SKIPS = "_syncpipe_skips"  #: the attribute of a class, or a module, with its Declaration


@dataclass(slots=True, eq=False)
class stash:
    """Send any value to the later layer that pops this name: ``yield stash(name, value)``.

    The name must be declared: ``@skippable(stash=[name])``.
    """

    name: str
    value: Any = field(repr=False)


@dataclass(slots=True, eq=False)
class pop:
    """Take the value that an earlier layer stashed: ``value = yield pop(name)``.

    The name must be declared: ``@skippable(pop=[name])``.
    """

    name: str


@dataclass(frozen=True)
class Declaration:
    """The names that a forward stashes and pops, in declaration order."""

    stash: tuple[str, ...] = ()
    pop: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.stash + self.pop))


def skippable(stash: Iterable[str] = (), pop: Iterable[str] = ()) -> Callable[[type[M]], type[M]]:
    """Declare which skips a layer stashes and pops.

    The forward of the decorated class is a generator function. It sends a value past the layers
    that follow by ``yield stash(name, value)``, receives one by ``value = yield pop(name)``, and
    returns its output. Each forward must stash or pop each declared name exactly once. Stash None
    if there is nothing to send.

    The class is changed in place and returned: its ``forward`` is called as that of any other
    layer, and it gets a method ``isolate(namespace, *, only=None)``. A subclass inherits the skips
    and the forward. If it overrides forward, decorate it again with the names of all its skips,
    including those of ``super().forward`` if it calls that.

    Args:
        stash: names of the skips that the layer sends.
        pop: names of the skips that the layer receives.

    Raises:
        TypeError, ValueError: a name is not a string or is listed twice, or the class does not fit.
    """
    declaration = Declaration(_checked_names(stash, "stash"), _checked_names(pop, "pop"))

    def decorate(cls: type[M]) -> type[M]:
        _check_class(cls, declaration)
        forward, own = cls.forward, "forward" in cls.__dict__
        if hasattr(cls, _SKIPS) and not own:
            forward = getattr(forward, "__wrapped__", forward)  # the base's, under new names
        if inspect.isgeneratorfunction(forward):
            cls.forward = _wrap_generator(forward, declaration, _inherited(cls))
        for name, value in ((_SKIPS, declaration), ("isolate", _isolate)):
            setattr(cls, name, value)
        return cls

    return decorate


def is_skippable(module: nn.Module) -> bool:
    return _SKIPS in module.__dict__ or hasattr(type(module), _SKIPS)


def stashes(module: nn.Module) -> list[SkipKey]:
    """The skips that this module, without its submodules, stashes, in order."""
    return [_key_of(module, name) for name in _declared_by(module).stash]


def pops(module: nn.Module) -> list[SkipKey]:
    """The skips that this module, without its submodules, pops, in order."""
    return [_key_of(module, name) for name in _declared_by(module).pop]


def overrides_undeclared(module: nn.Module) -> bool:
    """Whether a forward that is not decorated overrides one with skips."""
    classes = type(module).__mro__
    first = next(cls for cls in classes if "forward" in cls.__dict__ or _SKIPS in cls.__dict__)
    own = _SKIPS in module.__dict__ or _SKIPS in first.__dict__
    return not own and bool(_declared_by(module).names)


def _declared_by(module: nn.Module) -> Declaration:
    declared: Declaration | None = module.__dict__.get(_SKIPS)
    return getattr(type(module), _SKIPS, Declaration()) if declared is None else declared


def _inherited(cls: type) -> set[str]:
    return {name for base in cls.__mro__[1:] for name in getattr(base, _SKIPS, Declaration()).names}


def _key_of(module: nn.Module, name: str) -> SkipKey:
    """The skip of a name in a layer: the name, with the namespace it was isolated in."""
    namespaces: Mapping[str, Namespace] = module.__dict__.get("_skip_namespaces", {})
    return namespaces.get(name), name


def _checked_names(names: Iterable[str], argument: str) -> tuple[str, ...]:
    if isinstance(names, str):
        raise TypeError(f"{argument}={names!r}: write {argument}=[{names!r}], a list of names")
    fits = isinstance(names, Iterable) and not isinstance(names, type)
    checked: tuple[Any, ...] = tuple(names) if fits else (names,)
    if not all(isinstance(name, str) for name in checked):
        raise TypeError(f"{argument} must be a list of names, such as ['skip'], not {names!r}")
    for name in checked:
        if checked.count(name) > 1:
            raise ValueError(f"{argument} lists {name!r} more than once: leave one")
    return checked


def _check_class(cls: object, declaration: Declaration) -> None:
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise TypeError(f"@skippable decorates subclasses of nn.Module, not {cls!r}")
    forward = cls.forward
    if _SKIPS in cls.__dict__:
        raise TypeError(f"{cls.__name__} is skippable already: write all names in one @skippable")
    if getattr(cls, "isolate", _isolate) is not _isolate:
        raise TypeError(
            f"{cls.__name__} has an isolate of its own, which @skippable would replace: rename it"
        )
    if declaration.names and not (inspect.isgeneratorfunction(forward) or hasattr(cls, _SKIPS)):
        raise TypeError(
            f"{cls.__name__} declares the skips {list(declaration.names)}, but its forward is "
            "not a generator function: write 'yield stash(name, value)' and "
            "'value = yield pop(name)' in forward"
        )


def _isolate(self: M, namespace: Namespace, *, only: Iterable[str] | None = None) -> M:
    """Puts skips of this layer into a namespace, and returns the layer.

    ``only`` lists the names of the skips to put there, None all of the layer. Later calls add
    skips, and move a skip that is in another namespace.
    """
    if not isinstance(namespace, Namespace):
        raise TypeError(f"isolate() takes a Namespace(), not {namespace!r}")
    declared = _declared_by(self).names
    chosen = declared if only is None else _checked_names(only, "only")
    unknown = [name for name in chosen if name not in declared]
    if unknown:
        raise ValueError(
            f"only={list(chosen)!r}: {type(self).__name__} does not declare {unknown}; "
            f"its skips are {list(declared)}"
        )
    # A new dictionary, because a shallow copy of the layer may share the old one.
    old: Mapping[str, Namespace] = self.__dict__.get("_skip_namespaces", {})
    self.__dict__["_skip_namespaces"] = {**old, **dict.fromkeys(chosen, namespace)}
    return self


_isolate.__name__, _isolate.__qualname__ = "isolate", "skippable.isolate"


def _wrap_generator(
    generator_forward: Callable[..., Generator[Any, Any, Any]],
    declaration: Declaration,
    inherited: set[str],
) -> Callable[..., Any]:
    """The forward to call: runs the generator, and stashes and pops what it yields.

    The forward of a base class may stash or pop the ``inherited`` names itself.
    """

    @functools.wraps(generator_forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        left = [("stash", name) for name in declaration.stash]
        left += [("pop", name) for name in declaration.pop]
        generator, reply = generator_forward(self, *args, **kwargs), None
        try:
            while True:
                command = generator.send(reply)
                _cross_off(self, command, declaration, left)
                key, reply = _key_of(self, command.name), None
                if type(command) is stash:
                    store.put(key, command.value, self)
                else:
                    reply = store.take(key, self)
        except StopIteration as stop:
            output = stop.value
        finally:
            generator.close()  # leaves the 'with' blocks of the generator now, also after an error
        if missed := [f"{verb} {name!r}" for verb, name in left if name not in inherited]:
            raise RuntimeError(
                f"{type(self).__name__} declares skips, but its forward did not "
                f"{' nor '.join(missed)}: stash None if there is nothing to send, and pop values "
                "that are not used"
            )
        return output

    return forward


def _cross_off(
    layer: nn.Module, command: Any, declaration: Declaration, left: list[tuple[str, str]]
) -> None:
    cls, verb = type(layer).__name__, type(command).__name__
    if type(command) not in (stash, pop):
        raise TypeError(
            f"{cls}.forward yielded an object of type {verb}: a skippable layer yields "
            "stash(name, value) or pop(name), and returns its output"
        )
    if (verb, command.name) in left:
        left.remove((verb, command.name))
        return
    does, declared = {stash: "stashes", pop: "pops"}[type(command)], getattr(declaration, verb)
    if command.name in declared:
        what = describe(_key_of(layer, command.name))
        raise RuntimeError(f"{cls} {does} {what} twice in one forward: do it once")
    raise RuntimeError(
        f"{cls} {does} {command.name!r} without having declared it: "
        f"add it to the decorator, @skippable({verb}={[*declared, command.name]!r})"
    )
