"""P4 of ``train_stream``: failures arrive as themselves, nothing hangs, the pipe goes on."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from syncpipe import Pipe
from tests.support.interrupts import interrupted
from tests.support.running import Dawdle, Do
from tests.support.watched import Fails, numbered
from tests.training.failures.failing import notes_of
from tests.training.stream.models import WORKERS, mini_batches, mlp, sgd
from tests.training.stream.reference import reference

STEPS = 5
DEVICES = {"workers": WORKERS, "one": ["cpu"] * 4}


def mean(y):
    return y.pow(2).mean()


def failing(devices, **options):
    layers = nn.Sequential(*(Fails() for _ in range(4)))
    return Pipe(layers, [1] * 4, devices=devices, **options)


def data():
    """Mini-batch ``i`` begins with ``i``."""
    return [(x, None) for x in numbered(STEPS).split(2)]


def updates_of(pipe, before):
    return [not torch.equal(a, b) for a, b in zip(pipe.parameters(), before, strict=True)]


@pytest.mark.parametrize("phase", ["forward", "recompute", "backward"])
def test_an_exception_in_any_replica_arrives_as_itself(phase):
    """The pipe goes on: what replicas have is the owner's again, and there is no gradient."""
    layers, plain = nn.Sequential(*(Fails() for _ in range(2))), nn.Sequential(Fails(), Fails())
    pipe = Pipe(layers, [1, 1], devices=WORKERS, replicas=2, checkpoint="always", chunks=2)
    for j, i in product(range(2), range(STEPS)):
        error = ValueError("bad")
        pipe[j].error, pipe[j].phase, pipe[j].i = error, phase, i
        with pytest.raises(ValueError, match="bad") as caught:
            pipe.train_stream(data(), optimizer=sgd, loss_fn=mean)
        assert caught.value is error
        assert "updates of the stages' weights" in notes_of(error)
        pipe[j].error = None
        plain.load_state_dict(pipe.state_dict())
        x = data()[0][0]
        pipe.train_batch(x, loss_fn=mean)
        mean(plain(x)).backward()
        for ours, theirs in zip(pipe.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)
        pipe.zero_grad()
        plain.zero_grad()
    assert pipe.train_stream(data(), optimizer=sgd, loss_fn=mean).losses.shape == (STEPS,)


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("phase", ["forward", "recompute", "backward"])
@pytest.mark.parametrize("devices", DEVICES)
def test_an_exception_in_any_cell_arrives_as_itself(devices, phase, checkpoint):
    if (phase, checkpoint) == ("recompute", "never"):
        pytest.skip("nothing is recomputed")
    pipe = failing(DEVICES[devices], checkpoint=checkpoint)
    memory = [p.data_ptr() for p in pipe.parameters()]
    for j, i in product(range(4), range(STEPS)):
        error = ValueError("bad")
        pipe[j].error, pipe[j].phase, pipe[j].i = error, phase, i
        with pytest.raises(ValueError, match="bad") as caught:
            pipe.train_stream(data(), optimizer=sgd, loss_fn=mean)
        assert caught.value is error
        assert f"stage {j} (layer {j}), micro-batch {i}" in notes_of(error)
        assert [p.data_ptr() for p in pipe.parameters()] == memory
        assert all(p.grad is None for p in pipe.parameters())
        pipe[j].error = error.__traceback__ = None  # the layers of a version have it, too
    assert len(pipe.train_stream(data(), optimizer=sgd, loss_fn=mean).losses) == STEPS


class Stops(torch.optim.SGD):
    """Fails in its third step."""

    def step(self, closure=None):
        self.steps = getattr(self, "steps", 0) + 1
        if self.steps == 3:
            raise ArithmeticError("no step")
        return super().step(closure)


@pytest.mark.parametrize("devices", DEVICES)
def test_an_optimizer_that_fails_is_named_with_its_stage(devices):
    pipe = Pipe(mlp(), [2, 2, 2, 1], devices=DEVICES[devices])
    made = []

    def optimizer(parameters):
        made.append((Stops if len(made) == 1 else torch.optim.SGD)(parameters, lr=0.1))
        return made[-1]

    with pytest.raises(ArithmeticError, match="no step") as caught:
        pipe.train_stream(mini_batches(8), optimizer=optimizer, loss_fn=F.cross_entropy)
    notes = notes_of(caught.value)
    assert "in the update of stage 1, after micro-batch 2" in notes
    assert "in train_stream, after [" in notes
    assert (
        len(pipe.train_stream(mini_batches(3), optimizer=sgd, loss_fn=F.cross_entropy).losses) == 3
    )


def test_an_iterator_that_fails_is_named_with_its_mini_batch():
    def some():
        yield from mini_batches(3)
        raise OSError("no disk")

    pipe = Pipe(mlp(), [2, 2, 2, 1], devices=WORKERS)
    with pytest.raises(OSError, match="no disk") as caught:
        pipe.train_stream(some(), optimizer=sgd, loss_fn=F.cross_entropy)
    assert "in data_iter, when asked for mini-batch 3" in notes_of(caught.value)


def test_a_loss_that_fails():
    calls = []

    def loss_fn(y, target):
        calls.append(1)
        if len(calls) == 4:
            raise ValueError("no loss")
        return F.cross_entropy(y, target)

    pipe = Pipe(mlp(), [2, 2, 2, 1], devices=WORKERS)
    with pytest.raises(ValueError, match="no loss") as caught:
        pipe.train_stream(mini_batches(8), optimizer=sgd, loss_fn=loss_fn)
    assert "in loss_fn, micro-batch 3" in notes_of(caught.value)


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
        pipe.train_stream(mini_batches(3), optimizer=sgd, loss_fn=loss_fn)
    assert len(pipe.eval_batch(x)) == 6


def test_a_stream_inside_of_a_call_is_refused():
    pipe = Pipe(mlp(), [3, 4], devices=WORKERS[:2])
    with pytest.raises(RuntimeError, match="train_stream was called inside"):
        pipe.train_batch(
            *mini_batches(1)[0],
            loss_fn=lambda y, t: pipe.train_stream([], optimizer=sgd, loss_fn=F.cross_entropy),
        )


def test_two_streams_of_one_pipe_take_turns():
    pipe = Pipe(mlp(), [3, 4], devices=WORKERS[:2])
    results, threads, data = [], [], mini_batches(4)
    for _ in range(3):
        call = lambda: results.append(  # noqa: E731
            pipe.train_stream(data, optimizer=sgd, loss_fn=F.cross_entropy)
        )
        threads.append(threading.Thread(target=call))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    model = mlp()
    losses = [torch.stack(reference(model, [3, 4], data, sgd, F.cross_entropy)) for _ in range(3)]
    found = {tuple(result.losses.tolist()) for result in results}
    assert found == {tuple(each.tolist()) for each in losses}


def test_whoever_is_late_nothing_changes():
    """Many runs with random delays in all layers, there and back."""
    model, data = mlp(), mini_batches(7)
    losses = torch.stack(reference(model, [2, 2, 1, 2], data, sgd, F.cross_entropy))
    for seed in range(25):
        late = [layer for k, each in enumerate(mlp()) for layer in (each, Dawdle(31 * seed + k))]
        pipe = Pipe(nn.Sequential(*late), [4, 4, 2, 4], devices=WORKERS, checkpoint="always")
        found = pipe.train_stream(data, optimizer=sgd, loss_fn=F.cross_entropy)
        assert torch.equal(found.losses, losses)
        for a, b in zip(pipe.parameters(), model.parameters(), strict=True):
            assert torch.equal(a, b)


class Late(torch.autograd.Function):
    """A stage whose third backward waits until the next stage has stepped twice."""

    @staticmethod
    def forward(ctx, x, counts, stepped):
        ctx.counts, ctx.stepped = counts, stepped
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.counts.append(1)
        if len(ctx.counts) == 3:
            assert ctx.stepped.wait(30)
        return grad, None, None


class Shifts(nn.Module):
    """Its parameter's gradient and its input's are one memory, as autograd makes them."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(24))

    def forward(self, x):
        return x + self.shift.view(3, 8)


def test_gradients_on_their_way_are_not_those_that_are_added_up():
    def losses(devices, wait):
        counts, stepped = [], threading.Event()
        if not wait:
            stepped.set()
        torch.manual_seed(0)
        late = Do(lambda x: Late.apply(x, counts, stepped))
        pipe = Pipe(
            nn.Sequential(nn.Linear(8, 8), late, Shifts(), nn.Linear(8, 4)),
            [2, 2], devices=devices, chunks=2, checkpoint="never",
        )  # fmt: skip

        shift = pipe[2].shift  # not `pipe`: classes live forever on free-threaded CPython 3.13

        class Tells(torch.optim.SGD):
            def step(self, closure=None):
                super().step(closure)
                self.steps = getattr(self, "steps", 0) + 1
                if self.steps == 2 and self.param_groups[0]["params"][0] is shift:
                    stepped.set()

        def optimizer(parameters):
            return Tells(parameters, lr=0.1)

        data = mini_batches(5, 6)
        return pipe.train_stream(
            data, optimizer=optimizer, loss_fn=F.cross_entropy, versions="2bw"
        ).losses

    assert torch.equal(losses(WORKERS[:2], True), losses(["cpu"] * 2, False))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in a generator
@pytest.mark.parametrize("versions", ["stashing", "vertical_sync"])
def test_ctrl_c_at_any_place_leaves_the_weights_where_they_were(versions):
    """Inline, where every function of a call begins on this thread."""
    pipe = Pipe(mlp(), [3, 4], devices=["cpu"] * 2)

    def train():
        return pipe.train_stream(
            mini_batches(3), optimizer=sgd, loss_fn=F.cross_entropy, versions=versions
        )

    train()
    memory = [p.data_ptr() for p in pipe.parameters()]
    calls, _ = interrupted(-1, train)
    for at in range(5, calls, max(1, calls // 60)):
        interrupted(at, train)
        assert [p.data_ptr() for p in pipe.parameters()] == memory, at
        assert torch.is_autocast_cache_enabled()
    assert len(train().losses) == 3


SIGNALS = """
    import faulthandler, signal, sys
    faulthandler.dump_traceback_later(240, exit=True)
    import torch, torch.nn.functional as F
    from syncpipe import Pipe
    from tests.training.stream.models import WORKERS, mini_batches, mlp, sgd

    torch.set_num_threads(1)
    pipe = Pipe(mlp(), [2, 2, 2, 1], devices=WORKERS)
    data, memory = mini_batches(30), [p.data_ptr() for p in pipe.parameters()]

    def train():
        return pipe.train_stream(data, optimizer=sgd, loss_fn=F.cross_entropy)

    train()
    came = 0
    for k in range(40):
        signal.setitimer(signal.ITIMER_REAL, 0.0005 * (k + 1))
        try:
            train()
        except KeyboardInterrupt:
            came += 1
        signal.setitimer(signal.ITIMER_REAL, 0)
        assert [p.data_ptr() for p in pipe.parameters()] == memory
        assert all(p.grad is None for p in pipe.parameters())
    assert len(train().losses) == 30
    print("came", came)
"""


def test_ctrl_c_while_workers_run():
    prefix = "import signal\nsignal.signal(signal.SIGALRM, signal.default_int_handler)\n"
    done = subprocess.run(
        [sys.executable, "-c", prefix + textwrap.dedent(SIGNALS)],
        capture_output=True, text=True, check=False, env=dict(os.environ),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) > 0
