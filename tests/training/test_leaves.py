"""Leaves that are no parameters of a layer: in a plain list, in a closure, tied later on."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from syncpipe import Pipe, inline
from syncpipe.runtime.graph import nodes_of
from syncpipe.training.cell import ANCHOR, Border
from tests.support.running import assert_same
from tests.support.training import FOUR, KINDS, RUNS

CHECKPOINTS = ["never", "except_last", "always"]
every_run = pytest.mark.parametrize("run", KINDS)
every_mode = pytest.mark.parametrize("checkpoint", CHECKPOINTS)


class Shift(nn.Module):
    """Adds a weight of its own, registered or in a plain list; both gradients are one memory."""

    def __init__(self, width: int, registered: bool) -> None:
        super().__init__()
        weight = nn.Parameter(torch.linspace(-1, 1, 2 * width))
        if registered:
            self.weight = weight
        self.unseen = [weight]

    def forward(self, x: Tensor) -> Tensor:
        return x + self.unseen[0].view(x.shape)


def shifted(registered: bool, width: int = 4) -> nn.Sequential:
    torch.manual_seed(3)
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(width, width), Shift(width, registered)]
    return nn.Sequential(*layers)


def unseen_in(module: nn.Module) -> list[nn.Parameter]:
    return [each.unseen[0] for each in module.modules() if isinstance(each, Shift)]


def pipe_of(module: nn.Sequential, run: str, chunks: int = 4, checkpoint: str = "never") -> Pipe:
    return Pipe(module, [2] * 4, devices=RUNS[run][1], chunks=chunks, checkpoint=checkpoint)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target)


def test_two_leaves_whose_first_gradients_are_one_tensor_get_one_each():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.unseen = [nn.Parameter(torch.zeros(2, 4)) for _ in range(2)]

        def forward(self, x):
            return x * sum(weight.view(-1) for weight in self.unseen).view(2, 4)

    layer = Both()
    pipe = Pipe(nn.Sequential(layer, nn.Identity()), [1, 1], chunks=3)
    pipe.train_batch(torch.ones(6, 4), loss_fn=torch.sum, loss_reduction="sum")
    for weight in layer.unseen:
        assert torch.equal(weight.grad, torch.full((2, 4), 3.0))


@every_run
@every_mode
@pytest.mark.parametrize("weights", [None, [1.0, 3.0, 2.0, 5.0]], ids=["mean", "weighted"])
@pytest.mark.parametrize("context", [torch.enable_grad, inline], ids=["threads", "inline"])
def test_unregistered_leaves_learn_as_parameters_do(run, checkpoint, weights, context):
    """With ``(loss, weight)`` the gradients are put right at the end of the call."""
    x, target = torch.randn(8, 4), torch.randn(8, 4)
    found = []
    for registered in (False, True):
        module, given = shifted(registered), iter(weights or ())

        def loss_fn(output: Tensor, target: Tensor, given: Any = given) -> Any:
            loss = F.mse_loss(output, target)
            return loss if weights is None else (loss, next(given))

        for weight in unseen_in(module) if weights else ():
            weight.grad = torch.full_like(weight, 0.25)  # is not weighted
        with context():
            pipe_of(module, run, checkpoint=checkpoint).train_batch(
                x, target, loss_fn=loss_fn, verify=False, **RUNS[run][0]
            )
        found.append([weight.grad for weight in unseen_in(module)])
    assert_same(*found)


def test_a_leaf_that_only_some_micro_batches_use_is_found():
    class Sometimes(nn.Module):
        def __init__(self):
            super().__init__()
            self.unseen = [nn.Parameter(torch.ones(2, 4)), nn.Parameter(torch.ones(2, 4))]

        def forward(self, x):
            return x + self.unseen[int(x[0, 0])].view(2, 4)

    layer = Sometimes()
    pipe = Pipe(nn.Sequential(nn.Identity(), layer), [1, 1], chunks=4, checkpoint="never")
    x = torch.tensor([0.0, 1.0, 1.0, 0.0]).repeat_interleave(2)[:, None].expand(8, 4).contiguous()
    given = iter([1.0, 3.0, 3.0, 1.0])
    pipe.train_batch(x, loss_fn=lambda y: (y.sum(), next(given)))
    torch.testing.assert_close(layer.unseen[0].grad, torch.full((2, 4), 2 / 8))
    torch.testing.assert_close(layer.unseen[1].grad, torch.full((2, 4), 6 / 8))
    for leaf in layer.unseen:
        leaf.grad = None
    pipe(x).sum().backward()
    assert [leaf.grad.sum().item() for leaf in layer.unseen] == [16.0, 16.0]


# -- ties that the pipe was not told of


class Borrows(nn.Module):
    """Uses a tensor that it got hold of somewhere."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight_of = lambda: weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight_of())


@every_run
@every_mode
@pytest.mark.parametrize("registered", [True, False])
def test_a_leaf_that_two_workers_use_through_a_closure_is_refused(run, checkpoint, registered):
    owner = nn.Linear(4, 4, bias=False)
    first = owner if registered else Borrows(owner.weight)
    second = Borrows(owner.weight)
    module = nn.Sequential(first, nn.Tanh(), nn.Tanh(), second)
    pipe = Pipe(module, [1] * 4, devices=RUNS[run][1], chunks=4, checkpoint=checkpoint)
    before = owner.weight.grad = torch.ones(4, 4)
    with pytest.raises(RuntimeError, match=r"float32\[4, 4\].*stage 0 \(layer 0, .*stage 3"):
        pipe.train_batch(torch.randn(8, 4), torch.randn(8, 4), loss_fn=loss_of, **RUNS[run][0])
    assert owner.weight.grad is before
    assert torch.equal(before, torch.ones(4, 4))


def test_a_leaf_that_two_stages_of_one_worker_use_through_a_closure_trains():
    weight = nn.Parameter(torch.eye(4))
    layers = [Borrows(weight), nn.Tanh(), nn.Tanh(), Borrows(weight)]
    pipe = Pipe(nn.Sequential(*layers), [1] * 4, devices=["cpu:0"] * 4, chunks=4)
    x, target = torch.randn(8, 4), torch.randn(8, 4)
    pipe.train_batch(x, target, loss_fn=loss_of)
    grad, weight.grad = weight.grad, None
    loss_of(nn.Sequential(*layers)(x), target).backward()
    torch.testing.assert_close(grad, weight.grad)


def test_parameters_that_the_loss_borrows_from_another_worker_are_refused():
    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    pipe = Pipe(layers, [1] * 4, devices=FOUR, chunks=4)
    for k in (0, 3):  # those of the last stage are fine
        grads = contextlib.nullcontext() if k == 3 else pytest.raises(RuntimeError, match="loss_fn")
        with grads:
            pipe.train_batch(
                torch.randn(8, 4), loss_fn=lambda y, k=k: y.mean() + pipe[k].weight.square().mean()
            )
        assert (pipe[0].weight.grad is None) == (k == 0)


def test_a_parameter_of_the_loss_is_refused_where_several_workers_compute_it():
    layers, scale = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Parameter(torch.ones(4))
    pipe = Pipe(layers, [1, 1], devices=FOUR, replicas=[1, 3], chunks=6)
    with pytest.raises(RuntimeError, match="or loss_fn, on cpu"):
        pipe.train_batch(torch.randn(12, 4), loss_fn=lambda y: (y * scale).mean())
    assert scale.grad is None


def test_workers_walk_graphs_that_end_in_one_node_at_the_same_time():
    """On free-threaded CPython two threads must not make the Python object of a node."""

    def walk(_):
        for _ in range(5000):
            y = Border([True]).cross(torch.ones(1))
            assert nodes_of([y.grad_fn])[-1].variable is ANCHOR

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(walk, range(4)))
