"""Where the value of a skip lives between the layer that stashes it and the layer that pops it.

A pipe lays out a dictionary for each stage and micro-batch and makes it the current store while
the stage runs. Without a current store (skippable layers in a plain ``nn.Sequential``) values are
held per thread, and no longer than the module that stashed them lives.
"""

from __future__ import annotations

import threading
import weakref
from contextvars import ContextVar, Token
from typing import Any

from torch import nn

from .namespace import SkipKey, describe

Store = dict[SkipKey, Any]

_current: ContextVar[Store | None] = ContextVar("syncpipe_skip_store", default=None)


class use_store:
    """Makes ``store`` the place of skips within a ``with`` block, on this thread only.

    A stash writes ``store[key]``, a pop removes it. Blocks can be nested: the innermost counts.

    Args:
        store: values of the skips that come in; what is in it afterwards goes out.
    """

    __slots__ = ("_store", "_token")

    def __init__(self, store: Store) -> None:
        self._store = store

    def __enter__(self) -> Store:
        self._token: Token[Store | None] = _current.set(self._store)
        return self._store

    def __exit__(self, *exc_info: object) -> None:
        _current.reset(self._token)


class _HeldValues(threading.local):
    """The values of one thread outside any pipe.

    A value sits in a cell, a list of one. When the module that stashed it dies, a weak reference
    empties the cell. That may happen on any thread, therefore it leaves the dictionary alone,
    which only its own thread touches; the empty cells are swept out at the next stash.
    """

    def __init__(self) -> None:
        self._cells: dict[SkipKey, tuple[weakref.ref[nn.Module], list[Any]]] = {}

    def put(self, key: SkipKey, value: Any, layer: nn.Module) -> None:
        for stale in [k for k, (_, cell) in self._cells.items() if not cell]:
            del self._cells[stale]
        cell = [value]
        self._cells[key] = (weakref.ref(layer, lambda _: cell.clear()), cell)

    def take(self, key: SkipKey) -> Any:
        """Raises LookupError if there is none."""
        _, cell = self._cells.pop(key)
        return cell.pop()


_held = _HeldValues()


def current_store() -> Store | None:
    """The place of skips within the innermost ``use_store`` of this thread."""
    return _current.get()


def put(key: SkipKey, value: Any, layer: nn.Module) -> None:
    """Stashes a value on behalf of ``layer``."""
    store = _current.get()
    if store is None:
        _held.put(key, value, layer)
    else:
        store[key] = value


def take(key: SkipKey, layer: nn.Module) -> Any:
    """Removes and returns a value on behalf of ``layer``.

    Raises:
        RuntimeError: nothing is stashed under this key.
    """
    store = _current.get()
    try:
        return _held.take(key) if store is None else store.pop(key)
    except LookupError:
        pass
    raise RuntimeError(
        f"{type(layer).__name__} pops skip {describe(key)}, but no layer before it stashed that "
        "(a stash can be popped once): put a layer that stashes it before this one, in the same "
        "namespace; verify_skippables(model) reports every skip without a partner"
    )
