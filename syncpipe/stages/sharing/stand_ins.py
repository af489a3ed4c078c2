"""Modules that hold other tensors than the real ones do, for one run of a cell.

A stage that is not the owner of a tied weight computes with a tensor of its own: a copy on its
device, or the begin of its cell's graph; and so does a replica, with all of its tensors. The
modules themselves keep the one Parameter all the time: an optimizer, a loss function or another
thread that looks at them meanwhile must not see anything else, and one module may run in two stages
at the same time. So a cell runs on *stand-ins*
of the modules on the way to such a tensor: shallow copies, as ``torch.nn.parallel.replicate``
makes them, that share all else with the modules that they stand for.

    partition --> layer --> attention, head --> weight       the real ones
    partition'--> layer'--> attention, head'--> tensor       the stand-ins; attention is the same

What a forward sets on a stand-in (``self.calls += 1``) is set on the real module after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from syncpipe.layers.batchnorm import ORIGINAL

__all__ = ["Lasting", "StandIns"]

_MISSING: Any = object()
_CONTAINERS = ("_parameters", "_buffers", "_modules")
_BOUND = {MethodType, FunctionType, partial, list}  # what may know the module, or its tensors
_DEPTH = 4  # of functions in closures of functions; torch.compile makes two


class StandIns:
    """Makes the stand-ins of one stage in one call.

    Args:
        partition: the stage's.
        fixed: by the identity of a tensor what is in its place in all cells.
        linked: the tensors for which each cell gets one of its own.
    """

    def __init__(
        self, partition: nn.Module, fixed: dict[int, Tensor], linked: Sequence[Tensor] = ()
    ) -> None:
        self._partition = partition
        self.fixed = fixed
        self._linked = list(map(id, linked))
        replaced = {*fixed, *self._linked}
        holders = {
            id(module)
            for module in partition.modules()
            for tensor in chain(module._parameters.values(), module._buffers.values())
            if id(tensor) in replaced
        }
        self._on_the_way: set[int] = set()
        self._lead(partition, holders, set())

    def _lead(self, module: nn.Module, holders: set[int], seen: set[int]) -> bool:
        """Whether a module, or one inside of it, holds a tensor that is replaced."""
        if id(module) not in seen:
            seen.add(id(module))
            children = [c for c in module._modules.values() if c is not None]
            led = [self._lead(child, holders, seen) for child in children]  # all of them
            if any(led) or id(module) in holders:
                self._on_the_way.add(id(module))
        return id(module) in self._on_the_way

    @contextmanager
    def holding(self, tensors: Sequence[Tensor]) -> Iterator[Any]:
        """The partition with other tensors.

        Args:
            tensors: for each linked tensor what the cell uses.
        """
        others = {**self.fixed, **dict(zip(self._linked, tensors, strict=True))}
        made = _Made(others, self._on_the_way)
        try:
            yield made.of(self._partition)
        finally:
            made.give_back()


class _Made:
    """The stand-ins of one run."""

    def __init__(self, tensors: dict[int, Tensor], on_the_way: set[int]) -> None:
        self._tensors = tensors
        self._on_the_way = on_the_way
        self._own = set(map(id, tensors.values()))
        self._made: dict[int, nn.Module] = {}
        #: For each: the real module, the stand-in, and what the latter was at first.
        self.first: list[tuple[nn.Module, nn.Module, dict[str, dict[str, Any]]]] = []

    def of(self, module: nn.Module) -> nn.Module:
        """The stand-in of a module; itself if there is nothing to replace."""
        if id(module) not in self._on_the_way:
            return module
        if id(module) in self._made:
            return self._made[id(module)]
        other = self._made[id(module)] = self._new(module)
        state = {ORIGINAL: module, **module.__dict__}  # that of a stand-in stays
        state["_modules"] = {
            name: None if child is None else self.of(child)
            for name, child in module._modules.items()
        }
        for kind in ("_parameters", "_buffers"):
            held = module.__dict__[kind]
            if kind == "_parameters" or any(id(t) in self._tensors for t in held.values()):
                state[kind] = {name: self._tensors.get(id(t), t) for name, t in held.items()}
        for name, value in module.__dict__.items():
            if type(value) in _BOUND:
                state[name] = self._adapted(value, _DEPTH)
        object.__setattr__(other, "__dict__", state)  # `__setattr__` may be the user's
        first = {kind: dict(state[kind]) for kind in _CONTAINERS}
        self.first.append((module, other, {"": dict(state), **first}))
        return other

    def _new(self, module: nn.Module) -> nn.Module:
        """What stands in for a module, with nothing in it yet."""
        return object.__new__(type(module))

    def _adapted(self, value: Any, depth: int) -> Any:
        """An attribute as the stand-in has it: bound to it, and with its tensors.

        A ``forward`` that was compiled, or put in the place of the class's (accelerate does so),
        is in the module's ``__dict__``, and bound to the real module.
        """
        if isinstance(value, MethodType):
            other = self._made.get(id(value.__self__))
            return value if other is None else MethodType(value.__func__, other)
        if type(value) is list:  # the flat weights of an LSTM
            if any(id(item) in self._tensors for item in value):
                return [self._tensors.get(id(item), item) for item in value]
        elif type(value) is partial:
            return self._rebound_partial(value, depth)
        elif isinstance(value, FunctionType) and value.__closure__ and depth:
            return self._rebound_function(value, depth - 1)
        return value

    def _rebound_partial(self, value: partial[Any], depth: int) -> partial[Any]:
        args = [self._in_closure(item, depth) for item in value.args]
        keywords = {name: self._in_closure(item, depth) for name, item in value.keywords.items()}
        return partial(self._in_closure(value.func, depth), *args, **keywords)

    def _rebound_function(self, function: FunctionType, depth: int) -> Callable[..., Any]:
        cells = [self._rebound_cell(cell, depth) for cell in function.__closure__ or ()]
        if all(a is b for a, b in zip(cells, function.__closure__ or (), strict=True)):
            return function
        names = function.__code__, function.__globals__, function.__name__, function.__defaults__
        other = FunctionType(*names, tuple(cells))
        other.__kwdefaults__ = function.__kwdefaults__
        for name, value in function.__dict__.items():
            other.__dict__[name] = self._in_closure(value, depth)
        return other

    def _rebound_cell(self, cell: CellType, depth: int) -> CellType:
        try:
            value = cell.cell_contents
        except ValueError:  # empty
            return cell
        other = self._in_closure(value, depth)
        return cell if other is value else CellType(other)

    def _in_closure(self, value: Any, depth: int) -> Any:
        if isinstance(value, nn.Module):
            return self._made.get(id(value), value)
        return self._adapted(value, depth)

    def give_back(self) -> None:
        """Sets on the real modules what was set on their stand-ins."""
        for module, other, first in self.first:
            state = other.__dict__
            self._set(module.__dict__, first[""], state)
            for kind in _CONTAINERS:
                if state[kind] is not module.__dict__[kind]:
                    self._set(module.__dict__[kind], first[kind], state[kind])

    def _set(self, real: dict[str, Any], first: dict[str, Any], now: dict[str, Any]) -> None:
        for name, value in list(now.items()):
            if first.get(name, _MISSING) is not value and not self._is_ours(value):
                real[name] = value
        for name in first.keys() - now.keys():
            real.pop(name, None)

    def _is_ours(self, value: Any) -> bool:
        """Whether a value, or an item of a list, is a tensor of this run."""
        items = value if type(value) is list else [value]
        return any(id(item) in self._own for item in items)


class Lasting:
    """Stand-ins of all modules of a partition that stay from call to call, for a replica.

    Args:
        partition: the partition.
    """

    def __init__(self, partition: nn.Module) -> None:
        self._partition = partition
        self._made: list[tuple[nn.Module, nn.Module]] = []

    def follow(self, tensors: dict[int, Tensor]) -> nn.Module:
        """The partition as it is now.

        Args:
            tensors: by the identity of each tensor of the modules what is in its place.
        """
        made = _Followed(tensors, set(map(id, self._partition.modules())), self._made)
        other = made.of(self._partition)
        self._made = [(module, stand_in) for module, stand_in, _ in made.first]
        return other


class _Followed(_Made):
    """The stand-ins that there were before, as their modules are now."""

    def __init__(
        self,
        tensors: dict[int, Tensor],
        on_the_way: set[int],
        before: list[tuple[nn.Module, nn.Module]],
    ) -> None:
        super().__init__(tensors, on_the_way)
        self._before = {id(module): stand_in for module, stand_in in before}

    def _new(self, module: nn.Module) -> nn.Module:
        before = self._before.get(id(module))
        return before if type(before) is type(module) else super()._new(module)
