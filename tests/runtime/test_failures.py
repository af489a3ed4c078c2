"""What fails in a layer reaches the caller as it is, nothing hangs, and the pipe works again."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import sys
import threading
import traceback
import weakref
from collections import deque

import pytest
import torch
from torch import nn

from syncpipe.runtime.worker import FREE_THREADED
from syncpipe.skip import skippable, stash
from tests.conftest import our_threads
from tests.support.running import Do, assert_same, pipe_of, plain, trained, weigh
from tests.support.skips import Receive
from tests.support.watched import Fails, Odd, numbered
from tests.training.failures.failing import notes_of

STAGES, CHUNKS = 3, 3
ERRORS = [
    lambda: ValueError("bad"),
    lambda: SystemExit(3),
    lambda: KeyboardInterrupt("now"),
    lambda: StopIteration(5),
    lambda: GeneratorExit("gone"),
    lambda: Odd(1, 2),
]
PHASES = ["forward", "recompute", "backward"]


def failing_pipe():
    return pipe_of(nn.Sequential(*(Fails() for _ in range(STAGES))), checkpoint="always", chunks=3)


@pytest.mark.parametrize("i", range(CHUNKS))
@pytest.mark.parametrize("j", range(STAGES))
@pytest.mark.parametrize("phase", PHASES)
def test_an_exception_anywhere_reaches_the_caller_and_the_next_call_works(phase, j, i):
    pipe, x = failing_pipe(), numbered(CHUNKS)
    layer, reference = pipe[j], nn.Sequential(*pipe)
    for error in [make() for make in ERRORS]:
        layer.error, layer.phase, layer.i = error, phase, i
        with pytest.raises(type(error)) as caught:
            weigh(pipe(x.clone().requires_grad_())).backward()
        assert caught.value is error
        assert error.__cause__ is None
        assert "the line of the layer" in "".join(traceback.format_exception(error))
        notes = notes_of(error)
        assert re.search(rf"stage {j} \(layer {j}\), micro-batch {i}", notes), notes
        assert ("while recomputing" in notes) == (phase == "recompute")
        assert ("in backward of" in notes) == (phase == "backward")
        layer.error = None
        assert_same(trained(pipe, pipe, x), trained(lambda x: plain(reference, x, 3), reference, x))


@pytest.mark.parametrize("inlined", [False, True])
def test_the_note_names_the_layer(inlined):
    layers = nn.Sequential(nn.Tanh(), nn.Tanh())
    layers.add_module("third", Do(lambda x: 1 / 0))
    with pytest.raises(ZeroDivisionError) as caught:
        pipe_of(layers, [3] if inlined else [1, 2])(torch.ones(4, 2))
    stage = "stage 0 (layers 0 to 2)" if inlined else "stage 1 (layers 1 to 2)"
    assert notes_of(caught.value) == f"in layer 2 ('third': Do) of {stage}, micro-batch 0"


def test_other_workers_stop_at_their_next_action():
    reached = threading.Event()
    seen, failing = [], []

    def slow(x):
        seen.append(int(x[0, 0]))
        if len(seen) == 2:
            reached.set()
            while not failing or is_busy(failing[0]):
                os.sched_yield()

    def fail(x):
        failing.append(threading.get_ident())
        reached.wait()
        raise ValueError("bad")

    pipe = pipe_of(nn.Sequential(Do(slow), Do(fail)), chunks=50)
    with pytest.raises(ValueError, match="bad"):
        pipe(torch.arange(50.0)[:, None])
    assert seen == [0, 1]


def is_busy(thread):
    """Whether a worker runs anything but the loop in which it waits for work."""
    frame, ours = sys._current_frames()[thread], 0
    while frame is not None:
        ours += frame.f_globals["__name__"].startswith("syncpipe")
        frame = frame.f_back
    return ours > 1


# Nothing is left behind


def assert_freed(references):
    gc.collect()
    assert [reference for reference in references if reference() is not None] == []


@pytest.mark.parametrize("where", [1, 2, 3], ids=["stash", "between", "pop"])
def test_skips_are_freed_when_a_layer_fails(where):
    stashed = []

    @skippable(stash=["skip"])
    class Stash(nn.Module):
        def forward(self, x):
            skip = x + 1
            stashed.append(weakref.ref(skip))
            yield stash("skip", skip)
            return x

    fail = Do(lambda x: 1 / 0)
    layers, balance = [Stash(), nn.Identity(), Receive()], [1, 1, 1]
    layers.insert(min(where, 2), fail)
    balance[where - 1] = 2
    pipe = pipe_of(nn.Sequential(*layers), balance)
    with pytest.raises(ZeroDivisionError):
        pipe(torch.ones(4, 2, requires_grad=True))
    assert stashed
    assert_freed(stashed)
    fail.function = lambda x: None
    assert torch.equal(pipe(torch.ones(4, 2)), torch.full((4, 2), 3.0))


@pytest.mark.parametrize("phase", PHASES)
def test_an_exception_keeps_nothing_alive_once_it_is_dropped(phase):
    pipe = failing_pipe()
    layer = pipe[1]
    alive = []

    def run():
        layer.error, layer.phase, layer.i = Odd(1, 2), phase, 1
        x = numbered(CHUNKS).requires_grad_()
        alive.extend([weakref.ref(x), weakref.ref(layer.error)])
        try:
            weigh(pipe(x)).backward()
        except Odd:
            layer.error = None
        else:
            pytest.fail("nothing was raised")

    run()
    # PyTorch itself keeps the roots of a backward that failed until the next one.
    weigh(pipe(numbered(CHUNKS).requires_grad_())).backward()
    assert_freed(alive)


# Threads that somebody kills: the call fails, and the next one has a new thread


class Killed(BaseException):
    """Nothing that anybody expects."""


def kill(thread: threading.Thread) -> None:
    """Raises an exception in a thread, wherever it is, as debuggers and time limits do."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread.ident), ctypes.py_object(Killed)
    )


@pytest.fixture
def hooks_in_c(monkeypatch):
    """pytest's own, in Python, may be killed while they look at a thread that is dying."""
    monkeypatch.setattr(threading, "excepthook", deque(maxlen=0).append)
    monkeypatch.setattr(sys, "unraisablehook", deque(maxlen=0).append)


@pytest.mark.usefixtures("hooks_in_c")
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
