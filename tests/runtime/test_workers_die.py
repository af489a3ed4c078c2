"""A worker thread that somebody kills: the call fails, and the next one has a new thread."""

from __future__ import annotations

import ctypes
import random
import subprocess
import sys
import textwrap
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


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


@pytest.mark.parametrize("w", range(3))
def test_a_thread_that_was_killed_while_it_had_nothing_to_do(w):
    model = layers()
    pipe = pipe_of(model)
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
            threads = our_threads()
            if threads:
                kill(delays.choice(threads))

    killer = threading.Thread(target=kills)
    killer.start()
    failed = 0
    for _ in range(30):
        try:
            if train:
                pipe.train_batch(x, loss_fn=torch.mean)
            else:
                assert torch.equal(pipe(x), plain(model, x))
        except (Killed, RuntimeError):
            failed += 1
    over.set()
    killer.join()
    while failed:  # whoever was killed last finds out
        try:
            pipe(x)
            break
        except (Killed, RuntimeError):
            pass
    assert torch.equal(pipe(x), plain(model, x))
    assert len(our_threads()) == 3


@pytest.mark.skipif(FREE_THREADED, reason="modules are empty there before their objects die")
def test_a_pipe_that_is_called_while_the_interpreter_ends():
    code = textwrap.dedent("""
        import torch
        from tests.support.running import pipe_of

        class Last:
            def __init__(self):
                self.pipe = pipe_of(torch.nn.Sequential(torch.nn.Tanh(), torch.nn.Tanh()))
                self.x = torch.zeros(4, 2)
                self.pipe(self.x)

            def __del__(self, print=print):
                print(float(self.pipe(self.x).sum()), flush=True)

        last = Last()
    """)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=260, check=False
    )
    # Where torch's own modules are gone first, no module of its can be called any more.
    gone = "torch/nn/modules/module.py" in done.stderr and "'NoneType' object" in done.stderr
    assert done.stdout == "0.0\n" or gone, done.stderr
