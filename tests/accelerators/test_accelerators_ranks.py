"""Data-parallel pipes on accelerators: sums of gradients are started on the workers' streams.

There is one process here. The other one, which has the same gradients, is made up: a collective is
a kernel on the stream on which it was started, and whoever waits for it waits with his own stream.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from syncpipe.distributed.data_parallel import Averaging
from syncpipe.distributed.peers import Peers
from tests.accelerators.four import LAYOUTS, data, model, pipe_of
from tests.support import accelerator as acc
from tests.support.running import on_gradient

pytestmark = pytest.mark.gpu


class Queued:
    """A kernel on a stream of its own, after what is on the stream that is the current one."""

    def __init__(self, tensor: Tensor) -> None:
        self._device = tensor.device
        stream = torch.Stream(self._device)
        stream.wait_stream(torch.accelerator.current_stream(self._device))
        with stream:
            acc.sleep()
            tensor.mul_(2)
        tensor.record_stream(stream)
        self._event = stream.record_event()

    def wait(self, *_: Any) -> None:
        torch.accelerator.current_stream(self._device).wait_event(self._event)


def all_reduce(tensor: Tensor, **_: Any) -> Any:
    if tensor.device.type != "cpu":
        return Queued(tensor)
    tensor.mul_(2)
    return SimpleNamespace(is_completed=lambda: True, wait=lambda: None)


class OfTwins(Peers):
    """Two processes that do the same."""

    def __init__(self) -> None:
        self.rank, self.size = 0, 2

    @contextmanager
    def call(self, name: str) -> Iterator[None]:
        """Nobody is told."""
        yield

    def agree(self, act: Any) -> list[Any]:
        return [act()[1]] * 2


class Twins(Averaging):
    """They are late: the caller starts all sums."""

    def __init__(self, stages: int, late: bool) -> None:
        self.groups: Any = [None] * stages
        self.peers = OfTwins()
        self.capacity, self.syncs, self._late, self._process = 2**20, True, late, os.getpid()
        self._busy = threading.Lock()

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "agreed" or not self._late:
            super().__setattr__(name, value)


def _late(grad: Tensor) -> Tensor:
    if grad.device.type != "cpu":
        acc.sleep()
    return grad.clone()


class Late(nn.Linear):
    """Gradients are known late."""

    def forward(self, x: Tensor) -> Tensor:
        return on_gradient(super().forward(x), _late)


def trained(pipe: Any, schedule: str, x: Tensor, target: Tensor) -> list[Tensor]:
    pipe.train_batch(x, target, loss_fn=F.mse_loss, schedule=schedule)
    found = [2 * p.grad for p in pipe.parameters()]  # at once, on the caller's streams
    return [grad.cpu() for grad in found]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_there_for_the_caller(layout, schedule, late, monkeypatch):
    layers = model()
    layers[4] = Late(*layers[4].weight.shape).double()
    x, target = data()
    plain = pipe_of(layers, layout)
    there, answer = x.to(plain.devices[0]), target.to(plain.devices[-1])
    expected = trained(plain, schedule, there, answer)
    pipe = pipe_of(layers, layout)
    pipe._averaging = Twins(len(pipe.balance), late)
    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    for _ in range(3):
        for ours, theirs in zip(trained(pipe, schedule, there, answer), expected, strict=True):
            torch.testing.assert_close(ours, theirs)
        pipe.zero_grad()
