"""Functions as layers: any callable that takes a value and returns one."""

from __future__ import annotations

import functools
import inspect
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import PurePath
from types import BuiltinFunctionType, CellType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

__all__ = ["Function", "function_name", "shown_arguments"]

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 40


class Function(nn.Module):
    """A callable as a layer, without parameters.

    It can be copied and pickled if the callable can; like any layer it may draw random numbers and
    write into its input. Its ``repr`` shows what it calls and the line where that is written.

    Args:
        function: called with what the layer before returned.

    Raises:
        TypeError: a class, or a function that is no layer: a generator, or a coroutine.
        ValueError: parameters or buffers go along inside, where the pipe would not see them.
    """

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
            raise TypeError(
                f"{_shown(function)} returns a generator or a coroutine, no output: for skips "
                "write a class with @skippable"
            )
        for where, owner in _owners_behind(function):
            raise ValueError(
                f"{_shown(function)} uses a {type(owner).__name__} ({where}), whose values would "
                "be none of the pipe's: they would stay on their device, out of its parameters() "
                "and state_dict(). Make it part of an nn.Module, and that the layer; for one "
                "weight in two layers there is TiedLayerSpec"
            )
        self.function = function

    def forward(self, input: Any) -> Any:
        """Calls the function."""
        return self.function(input)

    def extra_repr(self) -> str:
        return _shown(self.function)


def function_name(function: Any) -> str:
    """The name of a callable, without that of its module."""
    plain = _innermost(function)
    return str(getattr(plain, "__name__", type(plain).__name__))


def shown_arguments(args: Iterable[Any], kwargs: Mapping[str, Any]) -> list[str]:
    """Arguments of a call in words, each on one line."""
    return [*map(_brief, args), *(f"{name}={_brief(value)}" for name, value in kwargs.items())]


def _brief(value: Any) -> str:
    if isinstance(value, (Tensor, nn.Module)):
        return type(value).__name__
    return str(getattr(value, "__name__", "")) or _SHORT.repr(value)


def _innermost(function: Any) -> Any:
    """What a ``functools.partial`` calls."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _shown(function: Any) -> str:
    """A callable in words: its name, what a partial adds, and where it is written."""
    plain = _innermost(function)
    shown = function_name(function)
    if isinstance(plain, FunctionType | MethodType):
        shown = plain.__qualname__.rpartition("<locals>.")[2]
    if isinstance(function, functools.partial):
        shown = f"partial({', '.join([shown, *shown_arguments(function.args, function.keywords)])})"
    code = getattr(inspect.unwrap(plain), "__code__", None)
    if code is None and not isinstance(plain, BuiltinFunctionType):
        code = getattr(type(plain).__call__, "__code__", None)
    if code is not None:
        shown += f", {PurePath(code.co_filename).name}:{code.co_firstlineno}"
    return shown


def _owners_behind(function: Any) -> Iterator[tuple[str, Any]]:
    """Parameters, and modules that have any, which a callable holds as far as one can see."""
    own = [(f"its attribute {name!r}", value) for name, value in _attributes(function).items()]
    pending: list[tuple[str, Any]] = [*own, ("it is called", function)]
    seen: set[int] = set()
    while pending:
        where, thing = pending.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, nn.Parameter):
            yield where, thing
        elif isinstance(thing, nn.Module):
            if next(chain(thing.parameters(), thing.buffers()), None) is not None:
                yield where, thing
        elif isinstance(thing, functools.partial):
            held = [thing.func, *thing.args, *thing.keywords.values()]
            pending += [("an argument of the partial", value) for value in held]
        elif isinstance(thing, MethodType):
            pending += [("its method", thing.__self__), (where, thing.__func__)]
        elif isinstance(thing, FunctionType):
            names = thing.__code__.co_freevars
            for name, cell in zip(names, thing.__closure__ or (), strict=True):
                if cell != CellType():
                    pending.append((f"the variable {name!r}", cell.cell_contents))
            defaults = [*(thing.__defaults__ or ()), *(thing.__kwdefaults__ or {}).values()]
            pending += [("a default argument", value) for value in defaults]


def _attributes(thing: Any) -> dict[str, Any]:
    return dict(getattr(thing, "__dict__", {}))
