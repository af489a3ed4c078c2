"""P4 of training: failures arrive as themselves, nothing hangs, ``.grad`` is as it was."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
import threading
import traceback
from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from syncpipe import Pipe, inline, is_recomputing
from tests.conftest import our_threads
from tests.support.running import Do, on_gradient, pipe_of, raising
from tests.support.training import ANY_RUNS, KINDS, RUNS
from tests.support.watched import Fails, Odd, numbered
from tests.training.failures.failing import (
    CHUNKS,
    Grads,
    assert_works,
    failing_pipe,
    mean,
    notes_of,
)
from tests.training.stream.models import WORKERS, mini_batches, mlp, sgd

STEPS = 5  # of a stream


def train(pipe: Pipe, run: str = "1f1b") -> Any:
    return pipe.train_batch(numbered(CHUNKS).requires_grad_(), loss_fn=mean, **ANY_RUNS[run][0])


def stream(pipe: Pipe, data_iter: Any = None, **options: Any) -> Any:
    if data_iter is None:
        data_iter = [(x, None) for x in numbered(STEPS).split(2)]
    return pipe.train_stream(data_iter, **{"optimizer": sgd, "loss_fn": mean, **options})


# -- in layers


ERRORS = [
    lambda: Odd(1, 2), lambda: ValueError("bad"), SystemExit, KeyboardInterrupt, StopIteration,
    GeneratorExit,
]  # fmt: skip


@pytest.mark.parametrize("context", [nullcontext, inline], ids=["workers", "inline"])
@pytest.mark.parametrize("phase", ["forward", "recompute", "backward", "hook"])
@pytest.mark.parametrize("run", [*KINDS, *(run for run in ANY_RUNS if run not in RUNS)])
def test_an_exception_in_any_cell_arrives_as_itself_and_changes_nothing(run, phase, context):
    pipe = failing_pipe(run)
    grads = Grads(pipe)
    for j, i in product(range(4), range(CHUNKS)):
        error = ERRORS[(CHUNKS * j + i) % len(ERRORS)]()
        pipe[j].error, pipe[j].phase, pipe[j].i = error, phase, i
        with context(), pytest.raises(type(error)) as caught:
            train(pipe, run)
        assert caught.value is error
        assert error.__cause__ is None
        assert "the line of the layer" in "".join(traceback.format_exception(error))
        assert grads.unchanged(), (i, j)
        notes = notes_of(error)
        assert re.search(rf"stage {j} \(layer {j}\), micro-batch {i}", notes), notes
        assert ("while recomputing" in notes) == (phase == "recompute")
        assert ("in backward of" in notes) == (phase in ("backward", "hook"))
    assert_works(pipe, run)


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("phase", ["forward", "recompute", "backward"])
@pytest.mark.parametrize("devices", [WORKERS, ["cpu"] * 4], ids=["workers", "one"])
def test_an_exception_in_any_cell_of_a_stream(devices, phase, checkpoint):
    if (phase, checkpoint) == ("recompute", "never"):
        pytest.skip("nothing is recomputed")
    layers = nn.Sequential(*(Fails() for _ in range(4)))
    pipe = Pipe(layers, [1] * 4, devices=devices, checkpoint=checkpoint)
    memory = [p.data_ptr() for p in pipe.parameters()]
    for j, i in product(range(4), range(STEPS)):
        error = ValueError("bad")
        pipe[j].error, pipe[j].phase, pipe[j].i = error, phase, i
        with pytest.raises(ValueError, match="bad") as caught:
            stream(pipe)
        assert caught.value is error
        assert f"stage {j} (layer {j}), micro-batch {i}" in notes_of(error)
        assert "updates of the stages' weights" in notes_of(error)
        assert [p.data_ptr() for p in pipe.parameters()] == memory
        assert all(p.grad is None for p in pipe.parameters())
        pipe[j].error = error.__traceback__ = None  # the layers of a version have it, too
    assert len(stream(pipe).losses) == STEPS


def test_after_a_failure_in_a_replica_of_a_stream_replicas_have_the_owners_weights():
    layers, plain = nn.Sequential(*(Fails() for _ in range(2))), nn.Sequential(Fails(), Fails())
    pipe = Pipe(layers, [1, 1], devices=WORKERS, replicas=2, checkpoint="always", chunks=2)
    for phase, j, i in product(("forward", "recompute", "backward"), range(2), range(STEPS)):
        pipe[j].error, pipe[j].phase, pipe[j].i = ValueError("bad"), phase, i
        with pytest.raises(ValueError, match="bad"):
            stream(pipe)
        pipe[j].error = None
        plain.load_state_dict(pipe.state_dict())
        x = numbered(1)
        pipe.train_batch(x, loss_fn=mean)
        mean(plain(x)).backward()
        for ours, theirs in zip(pipe.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)
        pipe.zero_grad()
        plain.zero_grad()


# -- elsewhere


@pytest.mark.parametrize("place", ["loss", "backward of the loss", "iterator"])
@pytest.mark.parametrize("run", [*KINDS, "eval_batch", "stream"])
def test_an_exception_outside_of_layers(run, place):
    if run in ("eval_batch", "stream") and place == "backward of the loss":
        pytest.skip("there is none, or no head that may be trained")
    schedule = run if run in KINDS else "1f1b"
    pipe, head, layer = failing_pipe(schedule), nn.Linear(5, 1), Fails()
    for k in range(CHUNKS):
        error = Odd(1, 2)

        def loss_fn(y, k=k, error=error):
            if place == "loss" and int(y[0, 0]) == k:
                raise error
            return head(layer(y)).mean() if place == "backward of the loss" else mean(y)

        def data(k=k, error=error):
            for x in numbered(CHUNKS).chunk(CHUNKS)[: k if place == "iterator" else CHUNKS]:
                yield x, None
            if place == "iterator":
                raise error

        if place == "backward of the loss":
            layer.error, layer.phase, layer.i = error, "backward", k
        grads, heads = Grads(pipe), Grads(head)
        call = {"stream": stream, "eval_batch": Pipe.eval_batch}.get(run, Pipe.train_batch)
        options = RUNS[run][0] if run in KINDS else {}
        with pytest.raises(Odd) as caught:
            call(pipe, data_iter=data(), loss_fn=loss_fn, **options)
        assert caught.value is error
        where = "mini-batch" if (run, place) == ("stream", "iterator") else "micro-batch"
        assert f"{where} {k}" in notes_of(error)
        assert run == "stream" or (grads.unchanged() and heads.unchanged())
        assert_works(pipe, schedule)


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
        stream(pipe, mini_batches(8), optimizer=optimizer, loss_fn=F.cross_entropy)
    assert "in the update of stage 1, after micro-batch 2" in notes_of(caught.value)
    assert len(stream(pipe, mini_batches(3), loss_fn=F.cross_entropy).losses) == 3


def test_a_failure_in_what_the_caller_computed_before():
    pipe = failing_pipe("1f1b")
    grads = Grads(pipe)
    x = numbered(CHUNKS).requires_grad_()
    with pytest.raises(ValueError, match="bad"):
        pipe.train_batch(on_gradient(x, raising(lambda: ValueError("bad"))), loss_fn=mean)
    assert grads.unchanged()
    assert x.grad is None


@pytest.mark.parametrize("schedule", ["naive", "1f1b", "zb_h1"])
def test_parameters_that_only_the_loss_knows_get_their_grad_back_too(schedule):
    outside = [torch.ones(5, requires_grad=True) for _ in range(2)]
    outside[0].grad = grad = torch.ones(5)
    calls = iter(range(CHUNKS - 1))

    def fail(y):
        next(calls)
        return (y * outside[0] * outside[1]).sum()

    pipe = pipe_of(nn.Sequential(Fails(), Fails()), chunks=CHUNKS)
    with pytest.raises(StopIteration):
        pipe.train_batch(numbered(CHUNKS), loss_fn=fail, schedule=schedule)
    assert outside[0].grad is grad
    assert torch.equal(grad, torch.ones(5))
    assert outside[1].grad is None


def test_a_recomputation_that_differs_is_an_error():
    unsteady = Do(lambda x: (x * 2).detach() if is_recomputing() else x * 2)
    pipe = pipe_of(nn.Sequential(nn.Linear(5, 5), unsteady), checkpoint="always")
    grads = Grads(pipe)
    message = r"stage 1 .* stored other tensors .* when it was recomputed"
    with pytest.raises(RuntimeError, match=message):
        pipe.train_batch(torch.randn(8, 5), loss_fn=mean)
    assert grads.unchanged()
    pipe = pipe_of(nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)), checkpoint="always")

    def step(y):
        with torch.no_grad():
            pipe[1].weight.add_(1)
        return mean(y)

    with pytest.raises(RuntimeError, match="modified in place"):
        pipe.train_batch(torch.randn(8, 5), loss_fn=step)


@pytest.mark.parametrize("how", ["eval_batch", "call", "train_batch"])
def test_calls_inside_of_a_stream_are_refused(how):
    """They would see weights of no one moment."""
    pipe, (x, target) = Pipe(mlp(), [3, 4], devices=WORKERS[:2]), mini_batches(1)[0]
    calls = {
        "eval_batch": lambda: pipe.eval_batch(x),
        "call": lambda: pipe(x),
        "train_batch": lambda: pipe.train_batch(x, target, loss_fn=F.cross_entropy),
    }

    def loss_fn(y, target):
        calls[how]()
        return F.cross_entropy(y, target)

    with pytest.raises(RuntimeError, match=r"train_stream calls this|_batch was called"):
        stream(pipe, mini_batches(3), loss_fn=loss_fn)
    assert len(pipe.eval_batch(x)) == 6
    with pytest.raises(RuntimeError, match="train_stream was called inside"):
        pipe.train_batch(x, target, loss_fn=lambda y, t: stream(pipe, []))


# -- threads


def test_failures_leave_no_threads_and_no_call_behind():
    before = set(our_threads())
    pipe = failing_pipe("1f1b")
    train(pipe)
    threads = set(our_threads()) - before
    assert len(threads) == 4
    pipe[1].phase, pipe[1].i = "backward", 1
    for _ in range(50):
        pipe[1].error = ValueError("bad")
        with pytest.raises(ValueError, match="bad"):
            train(pipe)
    assert set(our_threads()) - before == threads
    assert_works(pipe, "1f1b")


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
            train(pipe, "gpipe")


GARBAGE = """
    import faulthandler, gc, random, time
    faulthandler.dump_traceback_later(240, exit=True)  # comes without the interpreter's lock, too
    import torch
    from torch import nn
    from syncpipe import Pipe

    class Slow:
        def __del__(self):
            time.sleep(0.002)  # lets other threads run

    class Litter(nn.Module):
        # Leaves a cycle, for which the garbage collector comes soon after.
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x):
            cycle = [Slow()]
            cycle.append(cycle)
            gc.set_threshold(gc.get_count()[0] + random.randrange(10), 1000, 1000)
            return x * self.weight

    torch.set_num_threads(1)
    layers = nn.Sequential(*[Litter() for _ in range(12)])
    devices = ["cpu:0", "cpu:1", "cpu:2"]
    pipe = Pipe(layers, [4, 4, 4], devices=devices, chunks=4, checkpoint="always")
    for _ in range(10):
        pipe.train_batch(torch.randn(8, 5), loss_fn=lambda y: y.pow(2).mean(), schedule="gpipe")
    print("done")
"""


def test_the_garbage_collector_may_come_at_any_time():
    # PyTorch makes the result of `Generator.get_state` with the generator's mutex held. Whoever
    # waits for that must not hold the interpreter's lock.
    code = textwrap.dedent(GARBAGE)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=260, check=False
    )
    assert done.stdout == "done\n", done.stderr[-3000:]
