"""Afterwards all is as it was, whatever happened."""

from __future__ import annotations

import random
import warnings
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from syncpipe import Pipe, verify
from tests.layers.test_time_first import FIRST
from tests.support.interrupts import interrupted
from tests.support.running import Do
from tests.support.untouched import snapshot
from tests.verification.models import (
    WIDTH,
    Counter,
    Memory,
    OwnGenerator,
    batch,
    linear,
    pipe_of,
    scale,
)


class Fails(nn.Module):
    """Raises in one of its forwards."""

    at, error = -1, ValueError

    def forward(self, x: Tensor) -> Tensor:
        Fails.at -= 1
        if Fails.at == 0:
            raise Fails.error("now")
        return x * 1


def a_pipe(**options: Any) -> Pipe:
    torch.manual_seed(0)
    layers = [linear(), nn.BatchNorm1d(WIDTH), nn.Dropout(), Counter(), OwnGenerator(), Memory()]
    pipe = pipe_of(scale(), *layers, Fails(), linear(), **options)
    pipe[2].eval()
    pipe[1].bias.requires_grad_(False)
    for p in pipe.parameters():
        p.grad = torch.randn_like(p) if p.requires_grad else None
    return pipe


@settings(max_examples=5)
@given(at=st.integers(1, 22), interrupt=st.booleans())
def test_after_errors_as_well(at: int, interrupt: bool) -> None:
    # Some of these layers compute something else each time. Where they are recomputed that is
    # noticed only if another worker draws meanwhile, and then there are fewer forwards.
    pipe, (x, y) = a_pipe(checkpoint="never"), batch(8)
    before = snapshot(pipe, x, y)
    Fails.at, Fails.error = at, KeyboardInterrupt if interrupt else ValueError
    raises = interrupt or at <= 2  # on the whole mini-batch
    try:
        with pytest.raises(Fails.error) if raises else nullcontext():
            verify(pipe, x, y, loss_fn=F.cross_entropy, schedules=["1f1b"])
        assert Fails.at <= 0
    finally:
        Fails.at = -1
    assert snapshot(pipe, x, y) == before


def test_leaves_of_no_layer_that_only_a_later_micro_batch_uses() -> None:
    dtypes = torch.float32, torch.complex64
    hidden = [torch.ones(WIDTH, dtype=dtype, requires_grad=True) for dtype in dtypes]
    hidden[1].grad = torch.full((WIDTH,), 5.0 + 1j)
    layer = Do(lambda x: (x * hidden[int(x[0, 0].item() > 0)]).real)
    pipe = pipe_of(layer, linear(), balance=[2], chunks=2)
    x, y = batch()
    x[:, 0] = torch.linspace(-1, 1, len(x))
    assert verify(pipe, x, y, loss_fn=F.cross_entropy).ok
    assert hidden[0].grad is None
    assert torch.equal(hidden[1].grad, torch.full((WIDTH,), 5.0 + 1j))


def test_hooks_that_count_do_not_and_neither_does_a_grad_mode() -> None:
    """Of gradients, in which an optimizer steps, of a loss that is a module, and around it."""
    pipe, loss_fn = pipe_of(), nn.CrossEntropyLoss()
    loss_fn.calls = calls = []
    loss_fn.register_forward_hook(lambda *_: loss_fn.calls.append(1))
    for p in pipe.parameters():
        p.register_post_accumulate_grad_hook(calls.append)
    with torch.no_grad():
        assert verify(pipe, *batch(), loss_fn=loss_fn).ok
        assert not torch.is_grad_enabled()
    assert all(p.grad is None for p in pipe.parameters())
    assert not calls
    pipe.train_batch(*batch(), loss_fn=F.cross_entropy)
    assert len(calls) == len(list(pipe.parameters()))


def test_the_first_call_after_it_is_the_first_call() -> None:
    pipe = Pipe(nn.Sequential(nn.GRU(4, 4), FIRST), [1, 1], devices=["cpu:0", "cpu:1"], chunks=2)
    x = torch.rand(10, 6, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        verify(pipe, x, loss_fn=lambda y: y.square().mean(), schedules=["1f1b"])
    with pytest.warns(UserWarning, match="batch_first=True"):
        pipe(x)


# A destructor, or the callback of a weak reference, cannot pass an exception on.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_at_any_place() -> None:
    pipe, (x, y) = a_pipe(), batch(8)
    check = partial(verify, pipe, x, y, loss_fn=F.cross_entropy, schedules=["gpipe"])
    check()
    before, (calls, _) = snapshot(pipe, x, y), interrupted(0, check)
    places = range(1, calls, max(1, calls // 20))
    stopped = 0
    for at in places:
        stopped += interrupted(at, check)[1]
        assert snapshot(pipe, x, y) == before
    assert stopped > 0.8 * len(places)


def test_generators_that_are_not_pytorch_s() -> None:
    numpy = pytest.importorskip("numpy")

    class Draws(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.python, self.numpy = random.Random(1), numpy.random.default_rng(1)
            self.table = numpy.zeros(2)

        def forward(self, x: Tensor) -> Tensor:
            self.table += 1
            numbers = [self.python.random(), self.numpy.random(), random.random()]
            return x * float(sum([*numbers, numpy.random.rand()]))

    layer = Draws()
    pipe, (x, y) = pipe_of(linear(), layer, linear()), batch()

    def state() -> str:
        outside = numpy.random.get_state()[1:3], random.getstate()
        own = layer.python.getstate(), layer.numpy.bit_generator.state, layer.table
        return str((outside, own))

    before = state()
    report = verify(pipe, x, y, loss_fn=F.cross_entropy)
    assert state() == before
    reason = "it draws from a generator of its own (that of Python's random,"
    assert report["1f1b"].reason.startswith(reason)
