"""What fails in a layer reaches the caller as it is, nothing hangs, and the pipe works again."""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
import threading
import traceback
import weakref

import pytest
import torch
from torch import nn

from syncpipe.skip import skippable, stash
from tests.support.running import (
    MODES,
    Do,
    assert_same,
    on_gradient,
    pipe_of,
    plain,
    trained,
    weigh,
)
from tests.support.skips import Receive
from tests.support.watched import Fails, Odd, numbered
from tests.training.failures.failing import notes_of

STAGES, CHUNKS = 3, 3


ERRORS = {
    "ValueError": lambda: ValueError("bad"),
    "SystemExit": lambda: SystemExit(3),
    "KeyboardInterrupt": lambda: KeyboardInterrupt("now"),
    "StopIteration": lambda: StopIteration(5),
    "GeneratorExit": lambda: GeneratorExit("gone"),
    "Odd": lambda: Odd(1, 2),
}


def failing_pipe(checkpoint="always"):
    layers = nn.Sequential(*(Fails() for _ in range(STAGES)))
    return pipe_of(layers, checkpoint=checkpoint, chunks=CHUNKS)


def assert_works(pipe):
    for layer in pipe:
        layer.error = None
    x = numbered(CHUNKS)
    reference = nn.Sequential(*pipe)
    ours = trained(pipe, pipe, x)
    assert_same(ours, trained(lambda x: plain(reference, x, CHUNKS), reference, x))


@pytest.mark.parametrize("i", range(CHUNKS))
@pytest.mark.parametrize("j", range(STAGES))
@pytest.mark.parametrize("phase", ["forward", "recompute", "backward"])
def test_an_exception_anywhere_reaches_the_caller_and_the_next_call_works(phase, j, i):
    pipe = failing_pipe()
    layer = pipe[j]
    for kind in (ValueError("bad"), Odd(1, 2)):
        layer.error, layer.phase, layer.i = kind, phase, i
        with pytest.raises(type(kind)) as caught:
            weigh(pipe(numbered(CHUNKS).requires_grad_())).backward()
        assert caught.value is kind
        lines = "".join(traceback.format_exception(caught.value))
        assert "the line of the layer" in lines
        notes = notes_of(kind)
        assert re.search(rf"stage {j} \(layer {j}\), micro-batch {i}", notes), notes
        assert ("while recomputing" in notes) == (phase == "recompute")
        assert ("in backward of" in notes) == (phase == "backward")
        assert_works(pipe)


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("phase", ["forward", "recompute", "backward"])
@pytest.mark.parametrize("place", [(0, 0), (2, 2), (1, 1)])
def test_an_exception_of_any_type_arrives_as_itself(kind, phase, place):
    error = ERRORS[kind]()
    pipe = failing_pipe()
    layer = pipe[place[0]]
    layer.error, layer.phase, layer.i = error, phase, place[1]
    with pytest.raises(type(error)) as caught:
        weigh(pipe(numbered(CHUNKS).requires_grad_())).backward()
    assert caught.value is error
    assert error.__cause__ is None
    assert_works(pipe)


@pytest.mark.parametrize("inline_run", [False, True])
def test_the_note_names_the_layer(inline_run):
    class Breaks(nn.Module):
        def forward(self, x):
            raise ValueError("bad")

    layers = nn.Sequential()
    layers.add_module("first", nn.Tanh())
    layers.add_module("second", nn.Tanh())
    layers.add_module("third", Breaks())
    pipe = pipe_of(layers, [3] if inline_run else [1, 2])
    with pytest.raises(ValueError, match="bad") as caught:
        pipe(torch.ones(4, 2))
    stage = "stage 0 (layers 0 to 2)" if inline_run else "stage 1 (layers 1 to 2)"
    assert notes_of(caught.value) == f"in layer 2 ('third': Breaks) of {stage}, micro-batch 0"


def test_of_several_failures_that_of_the_earliest_clock_cycle_is_raised():
    both = threading.Barrier(2)

    def fail(message):
        def function(x):
            both.wait()
            raise ValueError(message)

        return Do(function)

    late, early = fail("late"), fail("early")
    layers = nn.Sequential(Do(lambda x: late(x) if x[0, 0] == 2 else x), Do(early))
    pipe = pipe_of(layers, chunks=CHUNKS)
    for _ in range(20):
        with pytest.raises(ValueError, match="early"):
            pipe(numbered(CHUNKS))


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


def call_for_ever(pipe):
    while True:
        pipe(torch.ones(4, 2))


@pytest.mark.parametrize("how", ["from a layer", "while waiting"])
def test_ctrl_c_while_the_caller_waits(how):
    main = threading.main_thread().ident
    seen = []

    def interrupt(x):
        seen.append(threading.get_ident())
        if len(seen) == 2:
            if how == "from a layer":
                signal.raise_signal(signal.SIGINT)
            else:
                signal.pthread_kill(main, signal.SIGINT)

    layer = Do(interrupt)
    pipe = pipe_of(nn.Sequential(nn.Linear(2, 2), layer, nn.Linear(2, 2)), chunks=4)
    with pytest.raises(KeyboardInterrupt):
        call_for_ever(pipe)
    assert main not in seen
    layer.function = lambda x: None
    x = torch.randn(4, 2)
    assert torch.equal(pipe(x), plain(nn.Sequential(*pipe), x))


@pytest.mark.parametrize("mode", MODES)
def test_ctrl_c_during_backward(mode):
    once = []

    def interrupt(grad):
        if not once:
            once.append(1)
            signal.raise_signal(signal.SIGINT)

    layer = Do(lambda x: on_gradient(x, interrupt))
    layers = nn.Sequential(nn.Linear(2, 2), layer, nn.Linear(2, 2))
    pipe = pipe_of(layers, checkpoint=mode)
    x = torch.randn(4, 2)
    with pytest.raises(KeyboardInterrupt):
        weigh(pipe(x)).backward()
    assert_same(trained(pipe, pipe, x), trained(lambda x: plain(layers, x), layers, x))


# Nothing is left behind


@skippable(stash=["skip"])
class Stash(nn.Module):
    def __init__(self):
        super().__init__()
        self.stashed = []

    def forward(self, x):
        skip = x + 1
        self.stashed.append(weakref.ref(skip))
        yield stash("skip", skip)
        return x


@pytest.mark.parametrize("where", ["stash", "between", "pop"])
def test_skips_are_freed_when_a_layer_fails(where):
    fail = Do(lambda x: 1 / 0)
    layers = [Stash(), nn.Identity(), Receive()]
    layers.insert({"stash": 1, "between": 2, "pop": 2}[where], fail)
    balance = {"stash": [2, 1, 1], "between": [1, 2, 1], "pop": [1, 1, 2]}[where]
    pipe = pipe_of(nn.Sequential(*layers), balance)
    with pytest.raises(ZeroDivisionError):
        pipe(torch.ones(4, 2, requires_grad=True))
    stashed = pipe[0].stashed
    assert stashed
    assert_freed(stashed)
    fail.function = lambda x: None
    assert torch.equal(pipe(torch.ones(4, 2)), torch.full((4, 2), 3.0))


def assert_freed(references):
    gc.collect()
    assert [ref for ref in references if ref() is not None] == []


@pytest.mark.parametrize("phase", ["forward", "recompute", "backward"])
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
