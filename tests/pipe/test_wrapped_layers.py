"""Layers and pipes that others have wrapped: what ``train_batch`` would get wrong is refused."""

from __future__ import annotations

import copy
from types import MethodType

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


def sharded(layer: nn.Module) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
    return layer


WRAPPERS = {"DistributedDataParallel": nn.parallel.DistributedDataParallel, "FSDP": sharded}


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


def doubling(method: str):
    """A method that calls that of ``Pipe`` and doubles the result."""
    return lambda self, *args: 2 * getattr(Pipe, method)(self, *args)


@pytest.mark.parametrize(
    ("on", "method"),
    [*[("class", name) for name in ("forward", "__call__", "_call_impl")],
     ("instance", "forward"), ("instance", "_call_impl")],
)  # fmt: skip
def test_a_forward_of_its_own_is_refused_where_it_would_not_run(method, on):
    kind = type("Own", (Pipe,), {method: doubling(method)} if on == "class" else {})
    pipe = kind(layers(), [1] * 4, devices=FOUR)
    if on == "instance":
        setattr(pipe, method, MethodType(doubling(method), pipe))
    for call in pipe.train_batch, pipe.eval_batch:
        with pytest.raises(RuntimeError, match=rf"has a {method} of its own.*pipe\(x\)"):
            call(X, TARGET, loss_fn=F.mse_loss)
    assert torch.equal(pipe(X), 2 * pipe[:](X))


def test_a_subclass_without_a_forward_of_its_own_trains():
    class Named(Pipe):
        def step(self):
            return self.train_batch(X, TARGET, loss_fn=F.mse_loss)

    assert torch.isfinite(Named(layers(), [1] * 4, devices=FOUR).step())
