"""Data-parallel pipes on accelerators: buckets are reduced on streams of their own.

There is one process here. The other one, which has the same gradients, is made up: a collective is
a kernel on the stream on which it was started, as with NCCL.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from syncpipe.distributed.attached import Attached
from tests.accelerators.four import LAYOUTS, data, model, pipe_of
from tests.support import accelerator as acc
from tests.support.running import on_gradient

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("four_devices")]


class Twins:
    """Two processes that do the same."""

    rank, size, ended, inherited = 0, 2, 0, False

    def exchange(self, numbers: list[float]) -> list[list[float]]:
        return [list(map(float, numbers))] * 2

    def all_reduce(self, tensor: Tensor) -> None:
        if tensor.device.type != "cpu":
            acc.sleep()
        tensor.mul_(2)

    def wait(self, work: Any, tensor: Tensor) -> None:
        pass


def _late(grad: Tensor) -> Tensor:
    if grad.device.type != "cpu":
        acc.sleep()
    return grad.clone()


class Late(nn.Linear):
    """Gradients are known late."""

    def forward(self, x: Tensor) -> Tensor:
        return on_gradient(super().forward(x), _late)


def trained(pipe: Any, how: str, x: Tensor, target: Tensor) -> list[Tensor]:
    if how == "pipe(x)":
        F.mse_loss(pipe(x), target).backward()
    else:
        pipe.train_batch(x, target, loss_fn=F.mse_loss, schedule=how)
    found = [2 * p.grad for p in pipe.parameters()]  # at once, on the caller's streams
    return [grad.cpu() for grad in found]


@pytest.mark.parametrize("how", ["1f1b", "zb_h1", "pipe(x)"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_there_for_the_caller(layout, how):
    layers = model()
    layers[4] = Late(*layers[4].weight.shape).double()
    x, target = data()
    plain = pipe_of(layers, layout)
    there, answer = x.to(plain.devices[0]), target.to(plain.devices[-1])
    expected = trained(plain, how, there, answer)
    pipe = pipe_of(layers, layout)
    pipe._averaging = Attached(Twins(), 2**20)
    for _ in range(2):
        for ours, theirs in zip(trained(pipe, how, there, answer), expected, strict=True):
            torch.testing.assert_close(ours, theirs)
        pipe.zero_grad()
