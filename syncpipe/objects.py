"""Containers that PyTorch's pytrees take for leaves: what is in them, and one like them.

Mappings (``UserDict``, and so what Hugging Face's tokenizers return; subclasses of ``dict``),
lists, tuples and dataclasses travel as trees: the same type comes out, a shallow copy with other
values.
"""

from __future__ import annotations

import array
import copy
import dataclasses
from collections.abc import Mapping, MutableMapping, MutableSequence
from typing import Any, NamedTuple

from torch import Tensor, nn

__all__ = ["Container", "hidden_tensor", "opened"]


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


def hidden_tensor(leaf: Any) -> str | None:
    """Where an object that is no container holds a tensor that could be cut, if it does."""
    if isinstance(leaf, (Tensor, nn.Module)) or callable(leaf):
        return None
    if isinstance(leaf, Mapping):
        named = {f"[{key!r}]": value for key, value in leaf.items()}
    else:
        slots = [name for cls in type(leaf).__mro__ for name in _slots(cls)]
        names = [*getattr(leaf, "__dict__", ()), *slots]
        named = {f".{name}": getattr(leaf, name, None) for name in names}
    for name, value in named.items():
        if isinstance(value, Tensor) and value.dim() > 0:
            return name
    return None


def _slots(cls: type) -> list[str]:
    slots = cls.__dict__.get("__slots__", ())
    return [slots] if isinstance(slots, str) else list(slots)
