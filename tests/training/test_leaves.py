"""Leaves that are no parameters of a layer: in a plain list, in a closure, of the loss."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from syncpipe import Pipe
from syncpipe.runtime.graph import nodes_of
from syncpipe.training.cell import ANCHOR, Border
from tests.support.models import CHECKPOINT_MODES
from tests.support.running import Do
from tests.support.training import KINDS, RUNS


def borrowed(first: bool, last: bool, *, devices: Any = None, **options: Any) -> tuple[Pipe, Any]:
    """A pipe whose first and last layer may have one weight, in a closure; and its first layer."""
    owner = nn.Linear(4, 4, bias=False)
    borrows = Do(lambda x: F.linear(x, owner.weight))
    layers = [borrows if first else owner, nn.Tanh(), nn.Tanh(), borrows if last else nn.Tanh()]
    return Pipe(nn.Sequential(*layers), [1] * 4, devices=devices, **options), owner


@pytest.mark.parametrize("run", KINDS)
@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize(
    ("first", "last", "message"),
    [
        (False, True, r"float32\[4, 4\].*stage 0 \(layer 0, .*stage 3"),
        (True, True, r"float32\[4, 4\].*stage 0 \(layer 0, .*stage 3"),
        (False, False, "or loss_fn"),
    ],
)
def test_a_leaf_that_two_workers_use_is_refused(run, checkpoint, first, last, message):
    options, devices = RUNS[run]
    pipe, owner = borrowed(first, last, devices=devices, chunks=4, checkpoint=checkpoint)
    before = owner.weight.grad = torch.ones(4, 4)
    with pytest.raises(RuntimeError, match=message):
        pipe.train_batch(
            torch.randn(8, 4), loss_fn=lambda y: y.mean() + owner.weight.mean(), **options
        )
    assert owner.weight.grad is before
    assert torch.equal(before, torch.ones(4, 4))


def test_a_leaf_that_two_stages_of_one_worker_use_trains():
    """Stages and the loss; and the loss may have parameters of the last stage."""
    pipe, owner = borrowed(True, True, devices=["cpu:0"] * 4, chunks=4)
    x = torch.randn(8, 4)

    def loss_fn(y: Tensor) -> Tensor:
        return y.mean() + owner.weight.square().mean()

    pipe.train_batch(x, loss_fn=loss_fn)
    grad, owner.weight.grad = owner.weight.grad, None
    loss_fn(nn.Sequential(*pipe)(x)).backward()
    torch.testing.assert_close(grad, owner.weight.grad)


def test_workers_walk_graphs_that_end_in_one_node_at_the_same_time():
    """On free-threaded CPython two threads must not make the Python object of a node."""

    def walk(_):
        for _ in range(5000):
            y = Border([True]).cross(torch.ones(1))
            assert nodes_of([y.grad_fn])[-1].variable is ANCHOR

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(walk, range(4)))
