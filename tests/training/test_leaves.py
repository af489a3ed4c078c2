"""Leaves that are no parameters of a layer: in a plain list, in a closure, of the loss."""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from syncpipe import Pipe
from syncpipe.runtime.graph import nodes_of
from syncpipe.training.cell import ANCHOR, GraphCut
from tests.support.models import CHECKPOINT_MODES
from tests.support.running import Do, assert_same, on_gradient
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
            y = GraphCut([True]).enter(torch.ones(1))
            assert nodes_of([y.grad_fn])[-1].variable is ANCHOR

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(walk, range(4)))


# --- views of one flat buffer, which count versions together ---------------------------------


def flatten(module: nn.Module, *, grads: bool) -> Tensor:
    """Makes the parameters of a module, or their gradients, views of one tensor."""
    held = [
        (m, name, p) for m in module.modules() for name, p in m._parameters.items() if p is not None
    ]
    flat = torch.cat([p.detach().flatten() for *_, p in held])
    parts = flat.split([p.numel() for *_, p in held])
    for (owner, name, p), part in zip(held, parts, strict=True):
        if grads:
            p.grad = part.zero_().view_as(p)
        else:
            setattr(owner, name, nn.Parameter(part.view_as(p), p.requires_grad))
    return flat


def test_gradients_in_one_flat_buffer_are_added_to_by_other_workers_during_a_loss():
    layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    went_back = threading.Event()
    begins = Do(lambda x: on_gradient(x, lambda grad: went_back.set()))
    pipe = Pipe([begins, *layers], [3, 1], devices=["cpu:0", "cpu:1"], chunks=4)
    flat = flatten(layers, grads=True)

    def loss_fn(y: Tensor, target: Tensor) -> Tensor:
        losses.append(y)
        assert len(losses) == 1 or went_back.wait(60)
        return F.mse_loss(y, target)

    found, x, target = [], torch.randn(8, 4, requires_grad=True), torch.randn(8, 4)
    for _ in range(3):
        losses: list[Tensor] = []
        flat.zero_()
        went_back.clear()
        pipe.train_batch(x, target, loss_fn=loss_fn)
        found.append(flat.clone())
    for parameter in layers.parameters():
        parameter.grad = None
    pipe.train_batch(x, target, loss_fn=F.mse_loss)
    assert_same(found, [torch.cat([p.grad.flatten() for p in layers.parameters()])] * 3)


@pytest.mark.parametrize("frozen", [(), (0,), (4,), (2, 4), (0, 2)])
@pytest.mark.parametrize("mode", ["never", "always"])
@pytest.mark.parametrize("versions", ["stashing", "vertical_sync"])
def test_a_stream_of_parameters_in_one_flat_buffer(versions, mode, frozen):
    torch.manual_seed(0)
    layers = nn.Sequential(*[nn.Tanh() if k % 2 else nn.Linear(4, 4) for k in range(6)])
    for k in frozen:
        layers[k].requires_grad_(False)
    found = []
    for flat in (False, True):
        copied = copy.deepcopy(layers)
        memory = flatten(copied, grads=False) if flat else None
        pipe = Pipe(copied, [2, 2, 2], devices=["cpu:0", "cpu:1", "cpu:2"], checkpoint=mode)
        torch.manual_seed(1)
        data = [(torch.randn(4, 4), torch.randn(4, 4)) for _ in range(30)]
        done = pipe.train_stream(
            iter(data), loss_fn=F.mse_loss, versions=versions,
            optimizer=lambda own: torch.optim.SGD(own, lr=0.1),
        )  # fmt: skip
        found.append([done.losses, torch.cat([p.detach().flatten() for p in copied.parameters()])])
        assert memory is None or torch.equal(memory, found[-1][1])
    assert_same(*found)
