"""A worker thread that somebody kills: the call fails, and the next one has a new thread."""

from __future__ import annotations

import ctypes
import random
import sys
import threading
from collections import deque

import pytest
import torch
from torch import nn

from syncpipe.runtime.worker import FREE_THREADED
from tests.conftest import our_threads
from tests.support.running import Dawdle, Do, pipe_of, plain


class Killed(BaseException):
    """Nothing that anybody expects."""


def kill(thread: threading.Thread) -> None:
    """Raises an exception in a thread, wherever it is, as debuggers and time limits do."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread.ident), ctypes.py_object(Killed)
    )


@pytest.fixture(autouse=True)
def hooks_in_c(monkeypatch):
    """pytest's own, in Python, may be killed while they look at a thread that is dying."""
    monkeypatch.setattr(threading, "excepthook", deque(maxlen=0).append)
    monkeypatch.setattr(sys, "unraisablehook", deque(maxlen=0).append)


@pytest.mark.parametrize("w", range(3))
def test_a_thread_that_was_killed_while_it_had_nothing_to_do(w):
    pipe = pipe_of(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)))
    x = torch.randn(8, 4)
    expected = pipe(x)
    before = our_threads()
    kill(before[w])
    if FREE_THREADED:  # there idle threads look around, and so it finds out before the next call
        before[w].join()
    else:
        with pytest.raises(RuntimeError, match=rf"cpu:{w}.*died"):
            pipe(x)
    assert torch.equal(pipe(x), expected)
    assert len(our_threads()) == 3
    assert before[w] not in our_threads()


def test_what_kills_a_thread_in_a_layer_is_raised():
    pipe = pipe_of(nn.Sequential(nn.Linear(4, 4), Do(lambda x: kill(threading.current_thread()))))
    with pytest.raises(Killed):
        pipe(torch.randn(8, 4))


@pytest.mark.parametrize("train", [False, True])
def test_threads_that_are_killed_at_any_time(train):
    model = nn.Sequential(nn.Linear(4, 4), Dawdle(), nn.Linear(4, 4), Dawdle(), nn.Linear(4, 4))
    pipe = pipe_of(model, [1, 2, 2])
    x = torch.randn(8, 4)
    pipe.train_batch(x, loss_fn=torch.mean)  # nothing is imported half from now on
    over, delays = threading.Event(), random.Random(1)

    def kills():
        while not over.is_set():
            over.wait(delays.random() / 25)
            if threads := our_threads():
                kill(delays.choice(threads))

    killer = threading.Thread(target=kills)
    killer.start()
    for _ in range(30):
        try:
            if train:
                pipe.train_batch(x, loss_fn=torch.mean)
            else:
                assert torch.equal(pipe(x), plain(model, x))
        except (Killed, RuntimeError):
            pass
    over.set()
    killer.join()
    for _ in range(3):  # whoever was killed last finds out
        try:
            pipe(x)
            break
        except (Killed, RuntimeError):
            pass
    assert torch.equal(pipe(x), plain(model, x))
    assert len(our_threads()) == 3
