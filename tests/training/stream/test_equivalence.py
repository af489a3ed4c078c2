"""``train_stream`` computes what the papers say, bit for bit."""

import threading
from contextlib import nullcontext
from functools import partial

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from syncpipe import Pipe, inline
from syncpipe.schedules.stream import VERSIONS
from tests.support.running import Dawdle, Do, on_gradient
from tests.training.stream.models import (
    BALANCES,
    WORKERS,
    adam,
    assert_as_in_the_papers,
    mini_batches,
    mlp,
    sgd,
)

every_mode = st.sampled_from(["never", "always", "except_last"])


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 4),
    steps=st.integers(1, 9),
    versions=st.sampled_from(VERSIONS),
    checkpoint=every_mode,
    optimizer=st.sampled_from([sgd, adam]),
    normed=st.booleans(),
    threads=st.booleans(),
    size=st.sampled_from([8, 11]),
)
def test_as_in_the_papers(n, steps, versions, checkpoint, optimizer, normed, threads, size):
    if normed and versions == "2bw":
        size = 8  # micro-batches of two samples at least, for BatchNorm
    devices = WORKERS[:n] if threads else ["cpu"] * n
    pipe = Pipe(mlp(normed), BALANCES[n], devices=devices, chunks=4, checkpoint=checkpoint)
    assert_as_in_the_papers(
        pipe, mini_batches(steps, size), model=mlp(normed), optimizer=optimizer,
        versions=versions, chunks=4 if versions == "2bw" else 1,
    )  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    replicas=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    steps=st.integers(1, 13),
    known=st.booleans(),
    checkpoint=every_mode,
    optimizer=st.sampled_from([sgd, adam]),
    threads=st.booleans(),
)
def test_round_robin_over_replicas(replicas, steps, known, checkpoint, optimizer, threads):
    data, model, balance = mini_batches(steps), mlp(), BALANCES[len(replicas)]
    devices = [f"cpu:{w}" for w in range(sum(replicas))]
    pipe = Pipe(mlp(), balance, devices=devices, replicas=replicas, checkpoint=checkpoint)
    with nullcontext() if threads else inline():
        assert_as_in_the_papers(
            pipe, data, iter(data), model=model, optimizer=optimizer, replicas=replicas,
            steps=steps if known else None,
        )  # fmt: skip
    again = pipe.train_batch(*data[0], loss_fn=F.cross_entropy)  # replicas have the last weights
    torch.testing.assert_close(again, F.cross_entropy(model(data[0][0]), data[0][1]).detach())


def test_whoever_is_late_nothing_changes():
    """Many runs with random delays in all layers, there and back."""
    for seed in range(25):
        late = [nn.Sequential(each, Dawdle(31 * seed + k)) for k, each in enumerate(mlp())]
        pipe = Pipe(nn.Sequential(*late), BALANCES[4], devices=WORKERS, checkpoint="always")
        model = nn.Sequential(*[nn.Sequential(each, nn.Identity()) for each in mlp()])
        assert_as_in_the_papers(pipe, mini_batches(7), model=model)


class Shifts(nn.Module):
    """Its parameter's gradient and its input's are one memory, as autograd makes them."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(24))

    def forward(self, x):
        return x + self.shift.view(3, 8)


def test_gradients_on_their_way_are_not_those_that_are_added_up():
    """The third backward of a stage waits until the next stage has stepped twice."""

    def losses(devices, wait):
        came, steps, stepped = [], [], threading.Event()

        def late(grad):
            came.append(1)
            assert not wait or len(came) != 3 or stepped.wait(30)

        torch.manual_seed(0)
        first = [nn.Linear(8, 8), Do(lambda x: on_gradient(x, late))]
        layers = nn.Sequential(*first, Shifts(), nn.Linear(8, 4))
        pipe = Pipe(layers, [2, 2], devices=devices, chunks=2, checkpoint="never")
        shift = pipe[2].shift  # not `pipe`: classes live forever on free-threaded CPython 3.13

        class Tells(torch.optim.SGD):
            def step(self, closure=None):
                super().step(closure)
                if self.param_groups[0]["params"][0] is shift:
                    steps.append(1)
                    if len(steps) == 2:
                        stepped.set()

        return pipe.train_stream(
            mini_batches(5, 6), optimizer=partial(Tells, lr=0.1), loss_fn=F.cross_entropy,
            versions="2bw",
        ).losses  # fmt: skip

    assert torch.equal(losses(WORKERS[:2], True), losses(["cpu"] * 2, False))
