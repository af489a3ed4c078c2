"""Identifiers of skips, and the store of their values between stash and pop.

A pipe makes a dictionary for each stage and micro-batch the current store while the stage runs.
Without a current store (skippable layers in an ``nn.Sequential``) each thread keeps values, at most
as long as the module that stashed them lives.
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
    """A token that separates the skips of some layers from all other skips.

    Two skips are the same only if they have the same name and the same namespace. To use a block
    with skips several times in a model, isolate each use in a namespace of its own.

    Every ``Namespace()`` differs from every other. A copy (``copy``, ``deepcopy``, pickle) equals
    its original, so copies of layers that share a namespace still share one.
    """

    # uuid4 draws from the operating system, and so advances no seeded generator.
    _id: UUID = field(default_factory=uuid4, init=False)

    def __repr__(self) -> str:
        return f"Namespace({self._id.hex[:8]})"


SkipKey = tuple[Namespace | None, str]
"""The identifier of a skip: its namespace, None for the common one, and its name."""


def describe(key: SkipKey) -> str:
    namespace, name = key
    return repr(name) if namespace is None else f"{name!r} in {namespace!r}"


Store = dict[SkipKey, Any]

_current: ContextVar[Store | None] = ContextVar("syncpipe_skip_store", default=None)


class use_store:
    """Makes ``store`` the current store of this thread within a ``with`` block.

    A stash writes ``store[key]``, a pop removes it. The innermost of nested blocks counts.
    """

    __slots__ = ("_store", "_token")

    def __init__(self, store: Store) -> None:
        self._store = store

    def __enter__(self) -> Store:
        self._token: Token[Store | None] = _current.set(self._store)
        return self._store

    def __exit__(self, *exc_info: object) -> None:
        _current.reset(self._token)


class _ThreadStores(threading.local):
    """The stores of one thread outside of pipes, by the module that stashed."""

    def __init__(self) -> None:
        self.stores: WeakKeyDictionary[nn.Module, Store] = WeakKeyDictionary()

    def pop(self, key: SkipKey) -> Any:
        stores = [store for store in self.stores.values() if key in store] or [{}]
        return stores[0].pop(key)


_thread_stores = _ThreadStores()


def current_store() -> Store | None:
    return _current.get()


def put(key: SkipKey, value: Any, layer: nn.Module) -> None:
    """Stashes a value for ``layer``, in place of one that another layer stashed."""
    store = _current.get()
    if store is None:
        for other in _thread_stores.stores.values():
            other.pop(key, None)
        store = _thread_stores.stores.setdefault(layer, {})
    store[key] = value


def take(key: SkipKey, layer: nn.Module) -> Any:
    """Removes and returns a value for ``layer``.

    Raises:
        RuntimeError: nothing is stashed under this key.
    """
    store = _current.get()
    try:
        return (_thread_stores if store is None else store).pop(key)
    except KeyError:
        pass
    raise RuntimeError(
        f"{type(layer).__name__} pops skip {describe(key)}, but no layer before it stashed that "
        "(a stash can be popped once): put a layer that stashes it before this one, in the same "
        "namespace. verify_skippables(model) reports every skip without a partner"
    )
