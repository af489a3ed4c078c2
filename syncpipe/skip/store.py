"""What identifies a skip, and where its value lives between the layers that stash and pop it.

A pipe lays out a dictionary for each stage and micro-batch and makes it the current store while
the stage runs. Without a current store (skippable layers in a plain ``nn.Sequential``) values are
held per thread, and no longer than the module that stashed them lives.
"""

from __future__ import annotations

import threading
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID, uuid4
from weakref import WeakKeyDictionary

from torch import nn


@dataclass(frozen=True, repr=False)
class Namespace:
    """A token that sets the skips of some layers apart from all other skips.

    Two skips are the same only if they have the same name and the same namespace, so a block
    with skips inside can be used several times in a model: give every use a namespace of its own.

    Every ``Namespace()`` differs from every other. A copy (``copy``, ``deepcopy``, pickle) equals
    its original, so layers that share a namespace still share it after they were copied.
    """

    # uuid4 draws from the operating system: it moves no random generator that a user seeds.
    _id: UUID = field(default_factory=uuid4, init=False)

    def __repr__(self) -> str:
        return f"Namespace({self._id.hex[:8]})"


SkipKey = tuple[Namespace | None, str]
"""What identifies a skip: the namespace, None for the common one, and the name."""


def describe(key: SkipKey) -> str:
    """Writes a skip the way error messages show it."""
    namespace, name = key
    return repr(name) if namespace is None else f"{name!r} in {namespace!r}"


Store = dict[SkipKey, Any]

_current: ContextVar[Store | None] = ContextVar("syncpipe_skip_store", default=None)


class use_store:
    """Makes ``store`` the place of skips within a ``with`` block, on this thread only.

    A stash writes ``store[key]``, a pop removes it. Blocks can be nested: the innermost counts.
    """

    __slots__ = ("_store", "_token")

    def __init__(self, store: Store) -> None:
        self._store = store

    def __enter__(self) -> Store:
        self._token: Token[Store | None] = _current.set(self._store)
        return self._store

    def __exit__(self, *exc_info: object) -> None:
        _current.reset(self._token)


class _Held(threading.local):
    """The values of one thread outside any pipe, by the module that stashed them."""

    def __init__(self) -> None:
        self.stores: WeakKeyDictionary[nn.Module, Store] = WeakKeyDictionary()

    def pop(self, key: SkipKey) -> Any:
        """Raises KeyError if there is none."""
        stores = [store for store in self.stores.values() if key in store] or [{}]
        return stores[0].pop(key)


_held = _Held()


def current_store() -> Store | None:
    """The place of skips within the innermost ``use_store`` of this thread."""
    return _current.get()


def put(key: SkipKey, value: Any, layer: nn.Module) -> None:
    """Stashes a value on behalf of ``layer``; what another one stashed there is gone."""
    store = _current.get()
    if store is None:
        for other in _held.stores.values():
            other.pop(key, None)
        store = _held.stores.setdefault(layer, {})
    store[key] = value


def take(key: SkipKey, layer: nn.Module) -> Any:
    """Removes and returns a value on behalf of ``layer``.

    Raises:
        RuntimeError: nothing is stashed under this key.
    """
    store = _current.get()
    try:
        return (_held if store is None else store).pop(key)
    except KeyError:
        pass
    raise RuntimeError(
        f"{type(layer).__name__} pops skip {describe(key)}, but no layer before it stashed that "
        "(a stash can be popped once): put a layer that stashes it before this one, in the same "
        "namespace; verify_skippables(model) reports every skip without a partner"
    )
