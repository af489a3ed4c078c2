"""``@skippable``: layers with skips, written as generators that yield ``stash`` and ``pop``."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn

from . import store
from .namespace import Namespace, SkipKey, describe

M = TypeVar("M", bound=nn.Module)
_SKIPS = "_syncpipe_skips"  #: what a forward, or a module, declares


class stash:
    """Send a value to the later layer that pops this name: ``yield stash(name, value)``.

    By itself it does nothing, the ``yield`` hands it over.

    Args:
        name: one of the names declared as ``@skippable(stash=[...])``.
        value: a tensor, None, or anything else that the popping layer understands.
    """

    __slots__ = ("name", "value")

    def __init__(self, name: str, value: Any) -> None:
        self.name = name
        self.value = value

    def __repr__(self) -> str:
        return f"stash({self.name!r})"


class pop:
    """Take the value that an earlier layer stashed: ``value = yield pop(name)``.

    By itself it does nothing, the ``yield`` hands it over.

    Args:
        name: one of the names declared as ``@skippable(pop=[...])``.
    """

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"pop({self.name!r})"


@dataclass(frozen=True)
class Declaration:
    """The names that a forward stashes and pops, in the order in which they were declared."""

    stash: tuple[str, ...] = ()
    pop: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All names, each once."""
        return tuple(dict.fromkeys(self.stash + self.pop))


def skippable(stash: Iterable[str] = (), pop: Iterable[str] = ()) -> Callable[[type[M]], type[M]]:
    """Declare which skips a layer stashes and pops.

    The forward of the decorated class is a generator function. It says ``yield stash(name,
    value)`` to send a value past the layers that follow, ``value = yield pop(name)`` to receive
    one, and returns its output. Each declared name has to be stashed or popped exactly once in
    every forward; where there is nothing to send, stash None.

    The class is changed in place and returned: its ``forward`` can be called like that of any
    other layer, and it gets a method ``isolate(namespace, *, only=None)``. A subclass inherits
    the skips along with the forward. If it overrides forward, decorate it again, with the names of
    all skips that then happen: those of ``super().forward``, if it calls that, as well.

    Args:
        stash: names of the skips that the layer sends.
        pop: names of the skips that the layer receives.

    Raises:
        TypeError: not a list of names, not a subclass of ``nn.Module``, decorated already, or
            names were declared and forward is not a generator function.
        ValueError: a name is listed twice.
    """
    declaration = Declaration(_checked_names(stash, "stash"), _checked_names(pop, "pop"))

    def decorate(cls: type[M]) -> type[M]:
        _refuse_unfit(cls, declaration)
        forward = cls.forward
        if "forward" not in cls.__dict__ and hasattr(forward, _SKIPS):
            forward = vars(forward)["__wrapped__"]  # the base's generator, under new names
        if inspect.isgeneratorfunction(forward):
            _set(cls, "forward", _driven(forward, declaration, _inherited(cls)))
        elif "forward" in cls.__dict__ and is_skippable(cls):
            _set(cls, "forward", _declared(forward, declaration))
        if not is_skippable(cls):
            _set(cls, "isolate", _isolate)
        _accept_old_keys(cls)
        _set(cls, "_syncpipe_skippable", True)
        return cls

    return decorate


def is_skippable(module: nn.Module | type) -> bool:
    """Whether a module, or a class, was decorated, itself or by inheritance."""
    cls = module if isinstance(module, type) else type(module)
    return getattr(cls, "_syncpipe_skippable", False) is True


def stashes(module: nn.Module) -> list[SkipKey]:
    """The skips that this very module stashes, in order; submodules are not asked."""
    return [_key_of(module, name) for name in _declaration_of(module).stash]


def pops(module: nn.Module) -> list[SkipKey]:
    """The skips that this very module pops, in order; submodules are not asked."""
    return [_key_of(module, name) for name in _declaration_of(module).pop]


def overrides_undeclared(module: nn.Module) -> bool:
    """Whether a forward that is not decorated overrides one with skips."""
    if not is_skippable(module) or _SKIPS in module.__dict__:
        return False
    return not hasattr(type(module).forward, _SKIPS) and bool(_inherited(type(module)))


def _declaration_of(module: nn.Module) -> Declaration:
    """What a module says for itself, or else its forward."""
    if not is_skippable(module):
        return Declaration()
    own: Declaration | None = module.__dict__.get(_SKIPS)
    found: Declaration = getattr(type(module).forward, _SKIPS, Declaration())
    return found if own is None else own


def _inherited(cls: type) -> set[str]:
    """The names of skips of all forwards that a class overrides."""
    forwards = [base.__dict__.get("forward") for base in cls.__mro__[1:]]
    return {name for each in forwards for name in getattr(each, _SKIPS, Declaration()).names}


def _key_of(module: nn.Module, name: str) -> SkipKey:
    """The skip that a layer means by a name, given how it was isolated."""
    namespaces: Mapping[str, Namespace] = module.__dict__.get("_skip_namespaces", {})
    return namespaces.get(name), name


def _checked_names(names: Iterable[str], argument: str) -> tuple[str, ...]:
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


def _set(cls: type, name: str, value: object) -> None:
    setattr(cls, name, value)


def _refuse_unfit(cls: object, declaration: Declaration) -> None:
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise TypeError(f"@skippable decorates subclasses of nn.Module, not {cls!r}")
    forward = cls.forward
    if hasattr(cls.__dict__.get("forward"), _SKIPS):
        raise TypeError(f"{cls.__name__} is skippable already: write all names in one @skippable")
    if not is_skippable(cls) and hasattr(cls, "isolate"):
        raise TypeError(
            f"{cls.__name__} has its own attribute 'isolate', which @skippable adds: rename it"
        )
    if declaration.names and not (
        inspect.isgeneratorfunction(forward) or hasattr(forward, _SKIPS) or is_skippable(cls)
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
    declared = _declaration_of(self).names
    chosen = declared if only is None else _checked_names(only, "only")
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


def _declared(forward: Callable[..., Any], declaration: Declaration) -> Callable[..., Any]:
    """A forward that is no generator, with the skips of those that it calls."""

    @functools.wraps(forward)
    def declared(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    setattr(declared, _SKIPS, declaration)
    return declared


def _driven(
    generator_forward: Callable[..., Generator[Any, Any, Any]],
    declaration: Declaration,
    inherited: set[str],
) -> Callable[..., Any]:
    """The forward that callers see: it runs the generator and does what it yields.

    What a forward that it overrides stashes or pops, may be done by that one.
    """

    @functools.wraps(generator_forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        generator = generator_forward(self, *args, **kwargs)
        still_open = {"stash": list(declaration.stash), "pop": list(declaration.pop)}
        reply: Any = None
        try:
            while True:
                try:
                    command = generator.send(reply)
                except StopIteration as stop:
                    output = stop.value
                    break
                if type(command) is stash:
                    _cross_off(self, "stash", command.name, still_open, declaration.stash)
                    store.put(_key_of(self, command.name), command.value, self)
                    reply = None
                elif type(command) is pop:
                    _cross_off(self, "pop", command.name, still_open, declaration.pop)
                    reply = store.take(_key_of(self, command.name), self)
                else:
                    raise TypeError(
                        f"{type(self).__name__}.forward yielded an object of type "
                        f"{type(command).__name__}: a skippable layer yields stash(name, value) or "
                        "pop(name), and returns its output"
                    )
        finally:
            generator.close()  # leaves the 'with' blocks of the generator now, whatever happened
        left = [
            f"{verb} {those} ({_WAYS_OUT[verb]})"
            for verb, names in still_open.items()
            if (those := [name for name in names if name not in inherited])
        ]
        if left:
            raise RuntimeError(
                f"{type(self).__name__} declares skips, but its forward did not "
                f"{' nor '.join(left)}"
            )
        return output

    setattr(forward, _SKIPS, declaration)
    return forward


_VERBS = {"stash": "stashes", "pop": "pops"}
_WAYS_OUT = {
    "stash": "stash None if there is nothing to send",
    "pop": "pop it even if its value is not used",
}


def _cross_off(
    layer: nn.Module,
    verb: str,
    name: str,
    still_open: dict[str, list[str]],
    declared: tuple[str, ...],
) -> None:
    if name in still_open[verb]:
        still_open[verb].remove(name)
        return
    cls = type(layer).__name__
    if name in declared:
        what = describe(_key_of(layer, name))
        raise RuntimeError(f"{cls} {_VERBS[verb]} {what} twice in one forward: do it once")
    raise RuntimeError(
        f"{cls} {_VERBS[verb]} {name!r} without having declared it: "
        f"add it to the decorator, @skippable({verb}={[*declared, name]!r})"
    )


def _accept_old_keys(cls: type[nn.Module]) -> None:
    """Lets the layers of a class load what torchgpipe wrote, whose decorator put a wrapper around
    the layer: ``0.module.conv.weight`` where ours says ``0.conv.weight``."""
    load: Any = cls._load_from_state_dict

    @functools.wraps(load)
    def accepting(self: nn.Module, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        own = {*self._modules, *self._parameters, *self._buffers}
        for old in [key for key in state_dict if key.startswith(f"{prefix}module.")]:
            new = prefix + old.removeprefix(f"{prefix}module.")
            if "module" not in own and new not in state_dict:
                state_dict[new] = state_dict.pop(old)
        load(self, state_dict, prefix, *args)

    _set(cls, "_load_from_state_dict", accepting)
