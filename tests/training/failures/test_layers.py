"""P4 of ``train_batch``: a failure in a layer arrives as itself, and ``.grad`` is as it was."""

from __future__ import annotations

import random
import re
import traceback
from contextlib import nullcontext
from itertools import product

import pytest
from torch import nn

from syncpipe import Pipe, inline
from tests.support.models import CHECKPOINT_MODES
from tests.support.training import FOUR, KINDS, RUNS, any_schedule, device_of
from tests.support.watched import Fails, Odd, numbered
from tests.training.failures.failing import (
    CHUNKS,
    Grads,
    assert_works,
    failing_pipe,
    mean,
    notes_of,
)


@pytest.mark.parametrize("phase", ["forward", "recompute", "backward", "hook"])
@pytest.mark.parametrize("run", KINDS)
def test_an_exception_in_any_cell_arrives_as_itself_and_changes_nothing(run, phase):
    pipe = failing_pipe(run)
    grads = Grads(pipe)
    for j, i in product(range(4), range(CHUNKS)):
        error = Odd(i, j) if (i + j) % 2 else ValueError("bad")
        layer = pipe[j]
        layer.error, layer.phase, layer.i = error, phase, i
        x = numbered(CHUNKS).requires_grad_()
        with pytest.raises(type(error)) as caught:
            pipe.train_batch(x, loss_fn=mean, **RUNS[run][0])
        assert caught.value is error
        assert error.__cause__ is None
        assert "the line of the layer" in "".join(traceback.format_exception(error))
        assert grads.unchanged(), (i, j)
        assert x.grad is None
        notes = notes_of(error)
        assert re.search(rf"stage {j} \(layer {j}\), micro-batch {i}", notes), notes
        assert ("while recomputing" in notes) == (phase == "recompute")
        assert ("in backward of" in notes) == (phase in ("backward", "hook"))
        if (j, i) == (1, 1):
            assert_works(pipe, run)
            grads = Grads(pipe)
    assert_works(pipe, run)


@pytest.mark.parametrize("checkpoint", ["never", "except_last"])
@pytest.mark.parametrize("phase", ["forward", "backward", "hook"])
@pytest.mark.parametrize("by_hand", [False, True], ids=["workers", "inline"])
def test_the_same_without_re_materialization_and_inline(by_hand, phase, checkpoint):
    pipe = failing_pipe("1f1b", checkpoint)
    grads = Grads(pipe)
    for j in range(4):
        error = ValueError("bad")
        pipe[j].error, pipe[j].phase, pipe[j].i = error, phase, CHUNKS - 1
        context = inline() if by_hand else nullcontext()
        with context, pytest.raises(ValueError, match="bad") as caught:
            pipe.train_batch(numbered(CHUNKS), loss_fn=mean)
        assert caught.value is error
        assert re.search(rf"stage {j} \(layer {j}\), micro-batch {CHUNKS - 1}", notes_of(error))
        assert grads.unchanged()
        pipe[j].error = None
    assert_works(pipe, "1f1b")


@pytest.mark.parametrize("balance", [[4], [2, 2]])
def test_an_exception_on_few_workers(balance):
    layers = nn.Sequential(*(Fails() for _ in range(4)))
    pipe = Pipe(layers, balance, devices=FOUR, chunks=CHUNKS)
    grads = Grads(pipe)
    for phase in ("forward", "recompute", "backward"):
        pipe[1].error, pipe[1].phase, pipe[1].i = ValueError("bad"), phase, 1
        with pytest.raises(ValueError, match="bad"):
            pipe.train_batch(numbered(CHUNKS), loss_fn=mean)
        assert grads.unchanged()


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, StopIteration, GeneratorExit])
@pytest.mark.parametrize("phase", ["forward", "recompute", "backward"])
def test_exceptions_of_any_type_arrive_as_themselves(phase, kind):
    pipe, error = failing_pipe("1f1b"), kind(3)
    grads = Grads(pipe)
    pipe[2].error, pipe[2].phase, pipe[2].i = error, phase, 1
    with pytest.raises(kind) as caught:
        pipe.train_batch(numbered(CHUNKS), loss_fn=mean)
    assert caught.value is error
    assert grads.unchanged()
    assert_works(pipe, "1f1b")


@pytest.mark.parametrize("seed", range(20))
def test_a_failure_in_any_place_of_any_schedule(seed):
    chance = random.Random(seed)
    devices = [chance.choice(FOUR) for _ in range(4)]
    checkpoint = chance.choice(CHECKPOINT_MODES)
    layers = nn.Sequential(*(Fails() for _ in range(4)))
    pipe = Pipe(layers, [1] * 4, devices=devices, chunks=CHUNKS, checkpoint=checkpoint)
    schedule = any_schedule(CHUNKS, device_of(pipe), seed=seed, halves=True, in_order=True)
    grads = Grads(pipe)
    for phase in ("forward", "recompute", "backward", "hook"):
        layer, error = pipe[chance.randrange(4)], ValueError("bad")
        layer.error, layer.phase, layer.i = error, phase, 0
        if phase == "recompute" and checkpoint == "never":
            layer.phase = "forward"
        with pytest.raises(ValueError, match="bad") as caught:
            pipe.train_batch(numbered(CHUNKS).requires_grad_(), loss_fn=mean, schedule=schedule)
        assert caught.value is error
        assert grads.unchanged()
    assert_works(pipe, "1f1b")
