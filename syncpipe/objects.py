"""Containers that PyTorch's pytrees take for leaves: what is in them, and one like them.

Mappings (``UserDict``, and so what Hugging Face's tokenizers return; subclasses of ``dict``),
lists, tuples and dataclasses travel as trees: the same type comes out, a shallow copy with other
values.
"""

from __future__ import annotations

import array
import copy
import dataclasses
import gc
from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping, MutableSequence
from itertools import chain, islice
from types import FrameType, ModuleType, TracebackType
from typing import Any, NamedTuple

from torch import Tensor, nn

__all__ = ["Container", "attributes_of", "could_be_cut", "hidden_tensor", "opened"]


class Container(NamedTuple):
    """What is in a container.

    Attributes:
        like: the container.
        keys: of mappings and lists, or the fields of dataclasses.
        values: what is there.
    """

    like: Any
    keys: list[Any]
    values: list[Any]

    @property
    def _kind(self) -> str | None:
        return _kind(type(self.like))

    @property
    def kind(self) -> Any:
        """What two of them have in common that differ in their values only."""
        return type(self.like), self.keys

    def name(self, k: int) -> str:
        """How one gets to a value, in Python."""
        if self._kind == "dataclass":
            return f".{self.keys[k]}"
        return f"[{self.keys[k]!r}]"

    def filled(self, values: list[Any]) -> Any:
        """A container of the same type with other values.

        Raises:
            TypeError: it cannot be copied.
        """
        try:
            if self._kind == "tuple":
                return type(self.like)(values)
            made = copy.copy(self.like)
            for key, value in zip(self.keys, values, strict=True):
                if self._kind == "dataclass":
                    object.__setattr__(made, key, value)  # also if it is frozen
                else:
                    made[key] = value
        except Exception as error:
            raise TypeError(
                f"a {type(self.like).__name__} cannot be made anew with other tensors: pass them "
                "in tuples or dicts, or register the class by "
                "torch.utils._pytree.register_pytree_node"
            ) from error
        return made


_PLAIN = frozenset({type(None), bool, int, float, str})


def _kind(cls: type) -> str | None:
    if cls in _PLAIN:
        return None
    if issubclass(cls, MutableMapping):
        return "mapping"
    if dataclasses.is_dataclass(cls):
        return "dataclass"
    if issubclass(cls, tuple):
        return "tuple"
    if issubclass(cls, MutableSequence) and not issubclass(cls, (bytearray, array.array)):
        return "list"
    return None


def opened(leaf: Any) -> Container | None:
    """What is in a leaf of a pytree; None if it is a leaf indeed."""
    kind = _kind(type(leaf))
    if kind is None:
        return None
    if kind == "mapping":
        keys = list(leaf.keys())
        return Container(leaf, keys, [leaf[key] for key in keys])
    if kind == "dataclass":
        fields = [f.name for f in dataclasses.fields(leaf) if hasattr(leaf, f.name)]
        return Container(leaf, fields, [getattr(leaf, name) for name in fields])
    return Container(leaf, list(range(len(leaf))), list(leaf))


def could_be_cut(tensor: Tensor) -> bool:
    """Whether a tensor may have one entry a sample; a parameter has not."""
    return tensor.dim() > 0 and not isinstance(tensor, nn.Parameter)


def hidden_tensor(
    thing: Any,
    is_meant: Callable[[Tensor], bool] = could_be_cut,
    *,
    entries: Iterable[Any] = (),
) -> str | None:
    """Where an object holds a tensor that is not seen as part of a tree, if it does.

    However deep, by what the garbage collector knows of it, so that no code of the user's runs.
    What does something rather than being data (models, functions, iterators, datasets, optimizers)
    is not looked into, nor are more than two thousand objects.

    Args:
        thing: a leaf, or a container.
        is_meant: which tensors count.
        entries: what is seen of a container.

    Returns:
        How one gets from the object to the tensor, in Python.
    """
    if not gc.is_tracked(thing):  # a number, a string: nearly always it is so
        return None
    apparatus: dict[type, bool] = {}
    seen = {id(thing), *map(id, entries)}
    held: list[tuple[Any, int]] = [(thing, -1)]  # each with the number of what holds it
    for k, (holder, _) in enumerate(held):  # which grows
        kind = type(holder)
        if kind not in apparatus:
            apparatus[kind] = _is_apparatus(kind)
        if apparatus[kind]:
            continue
        attributes = _dictionary(holder)
        seen.add(id(attributes))
        for part in islice(chain(attributes.values(), gc.get_referents(holder)), _MOST):
            if not gc.is_tracked(part) or id(part) in seen:
                continue
            seen.add(id(part))
            if not isinstance(part, Tensor):
                if len(held) < _MOST:
                    held.append((part, k))
            elif is_meant(part):
                return _way(held, k, part)
    return None


_MOST = 2_000
_APPARATUS: Any = (Callable, Iterator, ModuleType, FrameType, TracebackType)


def _is_apparatus(kind: type) -> bool:
    """Whether objects of a class do something, so that what they hold is their own business."""
    return issubclass(kind, _APPARATUS) or any(
        base.__module__.startswith(("torch.utils.data", "torch.optim")) for base in kind.__mro__
    )


def _dictionary(thing: Any) -> dict[str, Any]:
    try:
        found = object.__getattribute__(thing, "__dict__")
    except AttributeError:
        return {}
    return found if isinstance(found, dict) else {}


def attributes_of(thing: Any) -> dict[str, Any]:
    """The attributes of an object, also where it has no dictionary."""
    names = [name for cls in type(thing).__mro__ for name in _slots(cls)]
    return {**{n: getattr(thing, n) for n in names if hasattr(thing, n)}, **_dictionary(thing)}


def _way(held: list[tuple[Any, int]], k: int, part: Any) -> str:
    names: list[str] = []
    while k >= 0:
        holder, above = held[k]
        names.append(_name(holder, part))
        part, k = holder, above
    return "".join(reversed(names))


def _name(holder: Any, part: Any) -> str:
    for name, value in attributes_of(holder).items():
        if value is part:
            return f".{name}"
    found: Iterable[tuple[Any, Any]] = ()
    if isinstance(holder, dict):
        found = dict.items(holder)
    elif isinstance(holder, (list, tuple, deque)):
        found = enumerate(holder)
    return next((f"[{key!r}]" for key, value in found if value is part), "[...]")


def _slots(cls: type) -> list[str]:
    slots = cls.__dict__.get("__slots__", ())
    return [slots] if isinstance(slots, str) else list(slots)
