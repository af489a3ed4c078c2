"""Layers and pipes that others have wrapped: what ``train_batch`` would get wrong is refused."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import distributed, nn

from syncpipe import Pipe
from tests.support.training import FOUR, KINDS, RUNS

X, TARGET = torch.ones(8, 4), torch.zeros(8, 4)
needs_gloo = pytest.mark.skipif(
    not (distributed.is_available() and distributed.is_gloo_available()), reason="needs gloo"
)


def layers() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))


@pytest.fixture
def one_process(tmp_path):
    distributed.init_process_group("gloo", f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def ddp(layer: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(layer)


def sharded(layer: nn.Module) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
    return layer


WRAPPERS = {"DistributedDataParallel": ddp, "FSDP": sharded}


@needs_gloo
@pytest.mark.parametrize("run", KINDS)
@pytest.mark.parametrize("name", WRAPPERS)
@pytest.mark.parametrize("place", ["layer", "inside", "later"])
def test_layers_that_communicate_in_backward_are_refused(one_process, run, name, place):
    module, wrap = layers(), WRAPPERS[name]
    if place == "layer":
        module[1] = wrap(module[1])
    elif place == "inside":
        module[1] = nn.Sequential(wrap(module[1]))
    pipe = Pipe(module, [1] * 4, devices=RUNS[run][1], chunks=2)
    if place == "later":
        setattr(pipe, "1", wrap(pipe[1]))
    with pytest.raises(RuntimeError, match=rf"wrapped in {name}.*data_parallel\(pipe\)"):
        pipe.train_batch(X, TARGET, loss_fn=F.mse_loss, **RUNS[run][0])


@pytest.mark.parametrize("run", KINDS)
def test_layers_in_data_parallel_train(run):
    """It is one process: replicas come and go within the layer's own forward and backward."""
    module = layers()
    plain = copy.deepcopy(module)
    module[1] = nn.DataParallel(module[1])
    pipe = Pipe(module, [1] * 4, devices=RUNS[run][1], chunks=2)
    pipe.train_batch(X, TARGET, loss_fn=F.mse_loss, **RUNS[run][0])
    F.mse_loss(plain(X), TARGET).backward()
    for ours, theirs in zip(pipe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


class Twice(Pipe):
    """A pipe with a forward of its own."""

    def forward(self, input):
        return 2 * super().forward(input)


def of_a_subclass() -> Pipe:
    return Twice(layers(), [1] * 4, devices=FOUR)


def of_an_instance() -> Pipe:
    pipe = Pipe(layers(), [1] * 4, devices=FOUR)
    forward = pipe.forward
    pipe.forward = lambda input: 2 * forward(input)
    return pipe


class CalledTwice(Pipe):
    """One that is called in another way."""

    def __call__(self, input):
        return 2 * super().__call__(input)


class ImplementedTwice(Pipe):
    """By the method that PyTorch's tools override."""

    def _call_impl(self, *args):
        return 2 * super()._call_impl(*args)


def called() -> Pipe:
    return CalledTwice(layers(), [1] * 4, devices=FOUR)


def implemented() -> Pipe:
    return ImplementedTwice(layers(), [1] * 4, devices=FOUR)


def implemented_by_an_instance() -> Pipe:
    pipe = Pipe(layers(), [1] * 4, devices=FOUR)
    call = pipe._call_impl
    pipe._call_impl = lambda *args: 2 * call(*args)
    return pipe


@pytest.mark.parametrize(
    ("made", "method"),
    [
        (of_a_subclass, "forward"),
        (of_an_instance, "forward"),
        (called, "__call__"),
        (implemented, "_call_impl"),
        (implemented_by_an_instance, "_call_impl"),
    ],
)
@pytest.mark.parametrize("call", ["train_batch", "eval_batch"])
def test_a_forward_of_its_own_is_refused_where_it_would_not_run(made, method, call):
    pipe = made()
    with pytest.raises(RuntimeError, match=rf"has a {method} of its own.*pipe\(x\)"):
        getattr(pipe, call)(X, TARGET, loss_fn=F.mse_loss)
    assert torch.equal(pipe(X), 2 * pipe[:](X))


def test_a_subclass_without_a_forward_of_its_own_trains():
    class Named(Pipe):
        def step(self):
            return self.train_batch(X, TARGET, loss_fn=F.mse_loss)

    assert torch.isfinite(Named(layers(), [1] * 4, devices=FOUR).step())
