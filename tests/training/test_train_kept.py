"""What a call keeps of each micro-batch until its end is no larger than what it is."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from syncpipe import Pipe
from tests.support.running import Do, on_gradient
from tests.support.training import LAST_FIRST, RUNS
from tests.support.watched import Memory, alive

CHUNKS = 6
every_run = pytest.mark.parametrize(
    "run", [run for run in RUNS if run not in ("naive", *LAST_FIRST)]
)


def pipe_of(*layers: nn.Module, run: str = "1f1b", **options) -> Pipe:
    layers = (*layers, *(nn.Identity() for _ in range(4 - len(layers))))
    module = nn.Sequential(*layers)
    return Pipe(module, [1] * 4, devices=RUNS[run][1], chunks=CHUNKS, checkpoint="never", **options)


class Storages:
    """Counts how many of some storages are alive."""

    def __init__(self) -> None:
        self._made: list[Memory] = []
        self.most = 0

    def add(self, tensor: Tensor) -> Tensor:
        self._made.append(Memory(tensor))
        self.most = max(self.most, alive(self._made))
        return tensor


@every_run
@pytest.mark.parametrize(
    ("loss", "part"), [(F.mse_loss, "loss"), (F.mse_loss, "weight"), (F.smooth_l1_loss, "loss")]
)
def test_the_storage_of_an_unreduced_loss_goes_with_its_micro_batch(run, loss, part):
    storages = Storages()
    pipe = pipe_of(nn.Linear(4, 4), run=run)

    def loss_fn(output: Tensor, target: Tensor):
        if part == "loss":
            return storages.add(loss(output, target))
        return output.sum(), storages.add(loss(output.detach(), target))

    with torch.no_grad():
        scalar = loss(torch.randn(64, 4), torch.randn(64, 4))
    if scalar.untyped_storage().nbytes() == scalar.nbytes:
        pytest.skip("the scalar of this version has a storage of its own")
    x, target = torch.randn(64 * CHUNKS, 4), torch.randn(64 * CHUNKS, 4)
    pipe.train_batch(x, target, loss_fn=loss_fn, **RUNS[run][0])
    gc.collect()
    assert storages.most <= 4


def test_outputs_that_are_parts_of_larger_tensors_do_not_keep_them():
    storages = Storages()

    class First(nn.Module):
        def forward(self, x):
            return storages.add(x * 2)[:, :1]

    pipe = pipe_of(nn.Linear(4, 4), nn.Identity(), nn.Identity(), First())
    x = torch.randn(CHUNKS, 4)
    _, outputs = pipe.train_batch(x, loss_fn=torch.mean, return_outputs=True)
    assert torch.equal(outputs, torch.cat([pipe[0](row) * 2 for row in x.split(1)])[:, :1])
    assert storages.most <= 4
    pipe.eval_batch(x)
    assert storages.most <= 4


def test_gradients_of_inputs_that_are_parts_of_larger_tensors_do_not_keep_them():
    storages = Storages()

    def wide(grad):
        return storages.add(torch.cat([grad, torch.zeros(len(grad), 50)], 1))[:, :4]

    x = torch.randn(CHUNKS, 4, requires_grad=True)
    pipe = pipe_of(Do(lambda x: on_gradient(x, wide)), nn.Linear(4, 4))
    pipe.train_batch(x, loss_fn=torch.sum, loss_reduction="sum")
    assert storages.most <= 2
    assert x.grad is not None


def test_gradients_of_leaves_of_the_loss_are_summed_as_they_come():
    storages = Storages()

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y, weight):
            ctx.size = weight.shape
            return y.sum() + 0 * weight.sum()

        @staticmethod
        def backward(ctx, grad):
            return grad.expand(1, 4), storages.add(torch.ones(ctx.size))

    pipe = pipe_of(nn.Linear(4, 4))
    pipe.train_batch(
        torch.randn(CHUNKS, 4),
        loss_fn=lambda y: Scaled.apply(y, pipe[0].weight),
        loss_reduction="sum",
    )
    assert storages.most <= 2


def test_a_loss_is_what_it_was_when_loss_fn_writes_into_the_output():
    pipe = pipe_of(nn.Linear(4, 4))
    x = torch.randn(CHUNKS, 4)

    def loss_fn(output: Tensor) -> Tensor:
        loss = output.sum()
        with torch.no_grad():
            output.zero_()
        return loss

    loss, outputs = pipe.train_batch(x, loss_fn=loss_fn, return_outputs=True)
    assert torch.equal(outputs, torch.zeros(CHUNKS, 4))
    torch.testing.assert_close(loss, pipe[:](x).sum().detach() / CHUNKS)
