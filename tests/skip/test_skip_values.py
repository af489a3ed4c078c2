"""Where stashed values wait, and for how long."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
from torch import nn

from syncpipe.skip import Namespace
from syncpipe.skip.store import use_store
from tests.support.running import in_threads
from tests.support.skips import (
    Receive,
    Send,
    X,
)


def test_store_holds_what_is_stashed_and_loses_what_is_popped():
    store: dict[Any, Any] = {}
    with use_store(store) as entered:
        assert entered is store
        Send()(X)
        assert store == {(None, "skip"): X}
        Receive()(X)
    assert store == {}


def test_stores_nest():
    outer: dict[Any, Any] = {}
    inner: dict[Any, Any] = {}
    with use_store(outer):
        with use_store(inner):
            Send()(1)
        Send()(2)
    with pytest.raises(ZeroDivisionError), use_store(inner):
        raise ZeroDivisionError
    Send()(X)  # into no store
    with use_store({}), pytest.raises(RuntimeError):
        Receive()(X)
    assert inner == {(None, "skip"): 1}
    assert outer == {(None, "skip"): 2}


def test_threads_use_their_own_stores():
    send, receive = Send(), Receive()
    results: dict[int, int] = {}

    def work(number: int) -> None:
        store: Any = {} if number % 2 else None
        for _ in range(50):
            if store is None:
                send(number)
                results[number] = receive(0)
            else:
                with use_store(store):
                    send(number)
                    results[number] = receive(0)

    in_threads(work, *range(4))
    assert results == {0: 0, 1: 1, 2: 2, 3: 3}


class Value:
    """Something that can be weakly referenced."""


def test_value_outside_dies_with_the_layer():
    layer, value = Send().isolate(namespace := Namespace()), Value()
    layer(value)
    seen, name = weakref.ref(value), weakref.ref(namespace)
    del value, namespace
    gc.collect()
    assert seen() is not None
    del layer
    gc.collect()
    assert seen() is None
    with pytest.raises(RuntimeError, match="no layer before it"):
        Receive()(0)
    assert nn.Sequential(Send(), Receive())(1) == 2
    assert name() is None


def test_value_outside_is_replaced_by_the_next_one():
    first, second = Send(), Send()
    value = Value()
    seen = weakref.ref(value)
    first(value)
    second(1)
    del value
    gc.collect()
    assert seen() is None
    del first
    gc.collect()
    assert Receive()(0) == 1
