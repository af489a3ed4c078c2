"""P4: what fails arrives as itself, nothing hangs, ``.grad`` is as it was, the pipe works again."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import re
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from syncpipe import Pipe, inline
from syncpipe.runtime.worker import FREE_THREADED
from tests.conftest import our_threads
from tests.support.models import in_turn, step
from tests.support.running import Do, assert_same, on_gradient, pipe_of, raising
from tests.support.skips import Receive, Send
from tests.support.training import ANY_RUNS, FOUR, KINDS, RUNS, assert_trains_as
from tests.support.watched import Fails, Grads, Memory, Odd, alive, numbered
from tests.training.stream.models import WORKERS, mini_batches, mlp, sgd

CHUNKS, REPLICAS = 3, [2, 1, 3, 1]
STEPS = 5  # of a stream


def failing_pipe(run: str = "1f1b", checkpoint: Any = "always") -> Pipe:
    """Four stages on the devices of a schedule, or on a worker each, or on several."""
    layers = nn.Sequential(*(Fails() for _ in range(4)))
    options = {"devices": ANY_RUNS.get(run, ((), FOUR))[1], "chunks": CHUNKS}
    if "replicas" in run:
        options |= {"replicas": REPLICAS, "devices": [f"cpu:{k}" for k in range(sum(REPLICAS))]}
    return Pipe(layers, [1] * 4, checkpoint=checkpoint, **options)


def assert_works(pipe: Pipe, run: str = "1f1b") -> None:
    """The next calls are as if nothing had been."""
    pipe.zero_grad()
    plain = nn.Sequential(*(Fails() for _ in pipe))
    plain.load_state_dict(pipe.state_dict())
    x = numbered(CHUNKS).requires_grad_()
    options, _ = ANY_RUNS.get(run, ({}, ()))
    assert_trains_as(pipe, plain, x, loss_fn=mean, **options)
    there = step(in_turn(plain, CHUNKS), plain, x)
    assert_same(step(pipe, pipe, x), there, rounded="replicas" in run)


def mean(y: Tensor) -> Tensor:
    return y.pow(2).mean()


def notes_of(error: BaseException) -> str:
    return "\n".join(getattr(error, "__notes__", []))


def call(run: str, pipe: Pipe, loss_fn: Any = mean, data_iter: Any = None) -> None:
    """A mini-batch; or a stream of them."""
    x = numbered(CHUNKS).requires_grad_()
    given: dict[str, Any] = {"input": x} if data_iter is None else {"data_iter": data_iter}
    if run == "pipe(x)":
        loss_fn(pipe(x)).backward()
    elif run == "eval_batch":
        pipe.eval_batch(**given, loss_fn=loss_fn)
    elif run in STREAMS:
        data = data_iter or [(x, None) for x in numbered(STEPS).split(2)]
        pipe.train_stream(data, optimizer=sgd, loss_fn=loss_fn)
    else:
        pipe.train_batch(**given, loss_fn=loss_fn, **ANY_RUNS.get(run, ({}, ()))[0])


ERRORS = [
    lambda: Odd(1, 2), lambda: ValueError("bad"), SystemExit, KeyboardInterrupt, GeneratorExit,
    StopIteration,
]  # fmt: skip
BACK = ["recompute", "backward"]
ELSEWHERE = ["loss", "backward of the loss", "iterator"]
#: In layers, in hooks of their parameters, and elsewhere.
PLACES = {
    **{run: ["forward", *BACK, "hook", *ELSEWHERE] for run in KINDS},
    **{run: ["forward", *BACK, "hook"] for run in ANY_RUNS if run not in RUNS},
    "pipe(x)": ["forward", *BACK],
    "replicas": ["forward", *BACK],
    "eval_batch": ["forward", "loss", "iterator"],
    "stream": ["forward", *BACK, "loss", "iterator"],
    "stream, replicas": ["forward", *BACK],
}
STREAMS = ["stream", "stream, replicas"]


@pytest.mark.parametrize("context", [nullcontext, inline], ids=["workers", "inline"])
@pytest.mark.parametrize(("run", "place"), [(r, place) for r in PLACES for place in PLACES[r]])
def test_an_exception_anywhere_arrives_as_itself_and_changes_nothing(run, place, context):
    """In every fifth cell, of each run others; in all with SYNCPIPE_CELLS=1: ``tests.long``."""
    by_layer = context is inline and place == "recompute" and run not in STREAMS
    pipe = failing_pipe(run, [0, 1, 2, 3] if by_layer else "always")
    head, after = nn.Linear(5, 1), Fails()
    memory, threads, trains = [p.data_ptr() for p in pipe.parameters()], [], run in ANY_RUNS
    stages = [3] if place in ELSEWHERE else range(4)
    cells = [*product(stages, range(STEPS if run in STREAMS else CHUNKS))]
    if len(stages) > 1:
        apart = int(os.environ.get("SYNCPIPE_CELLS", "5"))
        cells = cells[[*PLACES].index(run) % apart :: apart]
    for k, (j, i) in enumerate(cells):
        error = ERRORS[k % len(ERRORS)]()
        fails = after if place == "backward of the loss" else pipe[j]
        fails.phase, fails.i = "backward" if place == "backward of the loss" else place, i
        fails.error = error

        def loss_fn(y, i=i, error=error):
            if place == "loss" and int(y[0, 0]) == i:
                raise error  # the line of the layer
            return head(after(y)).mean() if trains else mean(y)

        def data(i=i, error=error):
            for x in numbered(STEPS).split(2)[:i]:
                yield x, None
            raise error  # the line of the layer

        before = Grads(pipe, head)
        if run in STREAMS:
            pipe.zero_grad()
        with context(), pytest.raises(type(error)) as caught:
            call(run, pipe, loss_fn, data() if place == "iterator" else None)
        assert caught.value is error
        assert error.__cause__ is None
        assert "the line of the layer" in "".join(traceback.format_exception(error))
        notes = notes_of(error)
        if place in ELSEWHERE:
            assert re.search(rf"(micro|mini)-batch {i}", notes), notes
        else:
            assert f"stage {j} (layer {j}), micro-batch {i}" in notes
            assert ("while recomputing" in notes) == (place == "recompute")
            assert ("in backward of" in notes) == (place in ("backward", "hook") or by_layer)
        if run in STREAMS:
            assert place in ELSEWHERE or "updates of the stages' weights" in notes
            assert all(p.grad is None for p in pipe.parameters())
            assert [p.data_ptr() for p in pipe.parameters()] == memory
        else:
            assert before.unchanged(), (i, j)
        fails.error = error.__traceback__ = None  # the layers of a version have it, too
        with context():
            assert_works(pipe, run)
        assert threads in ([], our_threads())
        threads = our_threads()


class Stops(torch.optim.SGD):
    """Fails in its third step."""

    def step(self, closure=None):
        self.steps = getattr(self, "steps", 0) + 1
        if self.steps == 3:
            raise ArithmeticError("no step")
        return super().step(closure)


@pytest.mark.parametrize("devices", [WORKERS, ["cpu"] * 4], ids=["workers", "one"])
def test_an_optimizer_that_fails_is_named_with_its_stage(devices):
    pipe, made = Pipe(mlp(), [2, 2, 2, 1], devices=devices), []

    def optimizer(parameters):
        made.append((Stops if len(made) == 1 else torch.optim.SGD)(parameters, lr=0.1))
        return made[-1]

    with pytest.raises(ArithmeticError, match="no step") as caught:
        pipe.train_stream(mini_batches(8), optimizer=optimizer, loss_fn=F.cross_entropy)
    assert "in the update of stage 1, after micro-batch 2" in notes_of(caught.value)
    done = pipe.train_stream(mini_batches(3), optimizer=sgd, loss_fn=F.cross_entropy)
    assert len(done.losses) == 3


def test_a_failure_in_what_the_caller_computed_before():
    pipe, x = failing_pipe(), numbered(CHUNKS).requires_grad_()
    grads = Grads(pipe)
    with pytest.raises(ValueError, match="bad"):
        pipe.train_batch(on_gradient(x, raising(lambda: ValueError("bad"))), loss_fn=mean)
    assert grads.unchanged()
    assert x.grad is None


@pytest.mark.parametrize("inlined", [False, True])
def test_the_note_names_the_layer(inlined):
    layers = nn.Sequential(nn.Tanh(), nn.Tanh())
    layers.add_module("third", Do(lambda x: 1 / 0))
    with pytest.raises(ZeroDivisionError) as caught:
        pipe_of(layers, [3] if inlined else [1, 2])(torch.ones(4, 2))
    stage = "stage 0 (layers 0 to 2)" if inlined else "stage 1 (layers 1 to 2)"
    assert notes_of(caught.value) == f"in layer 2 ('third': Do) of {stage}, micro-batch 0"


@pytest.mark.parametrize("phase", ["forward", *BACK])
@pytest.mark.parametrize("j", range(3))
def test_an_exception_keeps_nothing_alive_once_it_is_dropped(j, phase):
    """Neither input nor error, nor a skip that nobody popped."""
    layers = nn.Sequential(Fails(), Send(), Fails(), Receive(), Fails())
    pipe, references = pipe_of(layers, [2, 1, 2], checkpoint="always", chunks=CHUNKS), []
    layers[0].register_forward_hook(lambda *seen: references.append(Memory(seen[-1])))
    layer = pipe[2 * j]

    def run() -> None:
        layer.error, layer.phase, layer.i = Odd(1, 2), phase, 2 if j == 2 else 1  # twice that
        x = numbered(CHUNKS).requires_grad_()
        references.extend([Memory(x), weakref.ref(layer.error)])
        with pytest.raises(Odd):
            mean(pipe(x)).backward()
        layer.error = None  # a module of a cell of its own has it, too

    run()
    # PyTorch itself keeps the roots of a backward that failed until the next one.
    mean(pipe(numbered(CHUNKS).requires_grad_())).backward()
    gc.collect()
    assert alive(references) == 0


# -- threads


def test_of_several_failures_that_of_the_earliest_action_is_raised():
    both = threading.Barrier(2)

    def fail(message: str, i: int) -> Any:
        def function(x):
            if int(x[0, 0]) == i:
                both.wait()
                raise ValueError(message)

        return Do(function)

    pipe = pipe_of(nn.Sequential(fail("late", 2), fail("early", 0)), chunks=CHUNKS)
    for _ in range(20):
        with pytest.raises(ValueError, match="early"):
            call("gpipe", pipe)


class Killed(BaseException):
    """Nothing that anybody expects."""


@pytest.mark.parametrize("w", range(3))
def test_a_thread_that_was_killed_while_it_had_nothing_to_do(w, monkeypatch):
    """The call fails, and the next one has a new thread."""
    # pytest's own hooks, in Python, may be killed while they look at a thread that is dying.
    monkeypatch.setattr(threading, "excepthook", deque(maxlen=0).append)
    monkeypatch.setattr(sys, "unraisablehook", deque(maxlen=0).append)
    pipe = pipe_of(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)))
    x = torch.randn(8, 4)
    expected = pipe(x)
    before = our_threads()
    # As debuggers and time limits do, wherever it is.
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(before[w].ident), ctypes.py_object(Killed)
    )
    if FREE_THREADED:  # there idle threads look around, and so it finds out before the next call
        before[w].join()
    else:
        with pytest.raises(RuntimeError, match=rf"cpu:{w}.*was killed"):
            pipe(x)
    assert torch.equal(pipe(x), expected)
    assert len(our_threads()) == 3
    assert before[w] not in our_threads()


class Slow:
    def __del__(self):
        time.sleep(0.002)  # lets other threads run


def test_the_garbage_collector_may_come_at_any_time():
    """PyTorch makes the result of ``Generator.get_state`` with the generator's mutex held.

    Whoever waits for that must not hold the interpreter's lock.
    """
    thresholds, chance = gc.get_threshold(), random.Random(0)

    def litter(x):
        cycle = [Slow()]
        cycle.append(cycle)  # for which the garbage collector comes soon after
        gc.set_threshold(gc.get_count()[0] + chance.randrange(10), 1000, 1000)

    layers = nn.Sequential(nn.Linear(5, 5), *[Do(litter) for _ in range(12)])
    pipe = pipe_of(layers, [5, 4, 4], checkpoint="always")
    try:
        for _ in range(10):
            pipe.train_batch(torch.randn(8, 5), loss_fn=mean, schedule="gpipe")
    finally:
        gc.set_threshold(*thresholds)
