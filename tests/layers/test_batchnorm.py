"""Deferred batch normalisation: running statistics of whole mini-batches."""

from __future__ import annotations

import copy
import pickle
import weakref
from operator import is_
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from syncpipe.layers import batchnorm
from syncpipe.layers.batchnorm import (
    DeferredBatchNorm,
    DeferredBatchNorm1d,
    DeferredBatchNorm2d,
    MiniBatchStatistics,
    collect,
    defer_batch_norm,
)
from tests.support.compare import assert_same
from tests.support.models import step
from tests.support.running import MODES, in_threads, pipe_of

KINDS = {0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


def run(module: nn.Module, *micro_batches: Tensor) -> list[Tensor]:
    """One mini-batch, committed."""
    stats, outputs = MiniBatchStatistics(), []
    for x in micro_batches:
        with collect(stats):
            outputs.append(module(x))
    stats.commit()
    return outputs


def assert_same_buffers(a: nn.Module, b: nn.Module, *, exact: bool = False) -> None:
    assert_same(dict(a.named_buffers()), dict(b.named_buffers()), rounded=not exact)


def deferred_copy(plain: nn.Module) -> nn.Module:
    bn = copy.deepcopy(plain)
    defer_batch_norm(bn)
    return bn


# --- on its own ----------------------------------------------------------------------------------


@settings(max_examples=80)
@given(
    splits=st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=6), min_size=1, max_size=3),
    dims=st.sampled_from(sorted(KINDS)),
    channels=st.integers(1, 4),
    momentum=st.sampled_from([None, 0.1, 0.0, 0.7, 1.0]),
    affine=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 2**16),
)
def test_running_statistics_are_those_of_the_whole_mini_batch(
    splits, dims, channels, momentum, affine, dtype, seed
) -> None:
    torch.manual_seed(seed)
    plain = KINDS[dims](channels, momentum=momentum, affine=affine, dtype=dtype)
    deferred = deferred_copy(plain)
    for split in splits:
        # One value per channel cannot be normalised, by the plain layer neither.
        sizes = [2 if size == 1 and dims < 2 else size for size in split]
        if sum(sizes) == 0:
            continue
        x = torch.randn(sum(sizes), channels, *(2, 3, 2)[:dims], dtype=dtype) * 3 + 1
        run(deferred, *x.split(sizes))
        plain(x)
    assert_same_buffers(plain, deferred)


@pytest.mark.parametrize("sizes", [(100, 100, 100), (1, 7, 300, 2, 90)])
@pytest.mark.parametrize(
    ("dtype", "mean", "rtol"),
    [(torch.float32, 10_000, 1e-3), (torch.float16, 30, 1e-5), (torch.bfloat16, 30, 1e-5)],
)
def test_single_precision_is_enough_for_a_large_mean_and_half_types(dtype, mean, rtol, sizes):
    x = (torch.randn(sum(sizes), 3, 2) + mean).to(dtype)
    bn = DeferredBatchNorm1d(3, momentum=1.0)
    run(bn, *x.split(sizes))
    var, mean = torch.var_mean(x.double(), dim=[0, 2])
    torch.testing.assert_close(bn.running_var, var.float(), rtol=rtol, atol=1e-7)
    torch.testing.assert_close(bn.running_mean, mean.float(), rtol=1e-5, atol=0)
    own = DeferredBatchNorm1d(3).to(dtype)
    running = own.running_mean
    run(own, *x.split(sizes))
    assert own.running_mean is running
    assert running.dtype is dtype
    assert (running > 0).all()


def test_single_values_are_accumulated_and_one_alone_is_refused_for_all() -> None:
    bn, stats = DeferredBatchNorm1d(1, momentum=1.0), MiniBatchStatistics()
    for value in torch.tensor([[1.0], [2.0], [6.0]]).split(1):
        stats.add(bn, value)
    stats.commit()
    assert bn.running_mean.item() == pytest.approx(3)
    assert bn.running_var.item() == pytest.approx(7)
    before = copy.deepcopy(bn)
    stats.add(bn, torch.tensor([[1.0], [2.0]]))
    stats.add(DeferredBatchNorm1d(1), torch.tensor([[1.0]]))
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        stats.commit()
    assert_same_buffers(bn, before, exact=True)


def test_what_does_not_count() -> None:
    plain, bn = nn.BatchNorm1d(2), DeferredBatchNorm1d(2)
    before, x, stats = copy.deepcopy(bn), torch.randn(4, 2), MiniBatchStatistics()
    run(bn, torch.empty(0, 2))  # nothing
    with collect(MiniBatchStatistics()):
        bn(x)  # a mini-batch that was given up
    with pytest.raises(KeyError), collect(stats):
        raise KeyError
    with collect(None):
        assert torch.equal(bn(x + 1), nn.BatchNorm1d(2)(x + 1))  # recomputation
    assert_same_buffers(bn, before, exact=True)
    with torch.inference_mode(), collect(stats):
        bn(x)
        with collect(None):
            bn(x + 1)
    plain(x)
    for _ in range(2):  # the second one has nothing to commit
        stats.commit()
        assert_same_buffers(plain, bn)
    bn.track_running_stats, before = False, copy.deepcopy(bn)
    run(bn, x)
    assert_same_buffers(bn, before, exact=True)
    plain, bn = nn.BatchNorm1d(2, momentum=None), DeferredBatchNorm1d(2, momentum=None)
    for module in (plain, bn):
        module.num_batches_tracked = None  # a cumulative average without a counter stands still
    plain(x)
    run(bn, x)
    assert_same_buffers(plain, bn, exact=True)


def test_statistics_keep_no_graph() -> None:
    bn, stats = DeferredBatchNorm1d(3), MiniBatchStatistics()
    made = torch.randn(6, 3, requires_grad=True) * 1
    alive = weakref.ref(made)
    with collect(stats):
        bn(made)
    del made
    assert alive() is None


def test_mini_batches_of_several_threads_do_not_mix_and_their_parts_do() -> None:
    bn = DeferredBatchNorm1d(2, momentum=None)
    inputs = [torch.randn(30, 8, 2) + t for t in range(4)]
    # 8 = 3 + 3 + 2, so a mini-batch that lost or gained a part would show.
    in_threads(lambda batches: [run(bn, *x.split(3)) for x in batches], *inputs)
    batches = torch.cat(inputs)
    assert bn.num_batches_tracked == len(batches)
    for running, each in ((bn.running_mean, batches.mean(1)), (bn.running_var, batches.var(1))):
        torch.testing.assert_close(running, each.mean(0), rtol=1e-4, atol=1e-4)
    plain, bn, stats = nn.BatchNorm1d(2), DeferredBatchNorm1d(2), MiniBatchStatistics()

    def work(part: Tensor) -> None:
        with collect(stats):
            bn(part)

    x = batches[:8].flatten(0, 1)
    in_threads(work, *x.split(4))
    stats.commit()
    plain(x)
    assert_same_buffers(plain, bn)


def test_commits_do_not_interleave() -> None:
    """Nobody else gets the lock while running statistics move."""
    free: list[bool] = []

    class Watched(DeferredBatchNorm1d):
        def _update_running_stats(self, mean: Tensor, var: Tensor) -> None:
            free.extend(in_threads(lambda _: batchnorm._commit_lock.acquire(blocking=False), 0))

    run(Watched(2), torch.ones(4, 2))
    assert free == [False]


# --- converting ----------------------------------------------------------------------------------


def test_only_the_classes_change_and_once() -> None:
    block = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU())
    model = nn.Sequential(block, nn.Flatten(), nn.Linear(16, 5), nn.BatchNorm1d(5))
    calls: list[Any] = []
    model[3].register_forward_hook(lambda m, args, out: calls.append(m))
    modules, tensors = list(model.modules()), [*model.parameters(), *model.buffers()]
    before = model.state_dict()
    for _ in range(2):
        defer_batch_norm(model)
        assert all(map(is_, modules, model.modules()))
        assert all(map(is_, tensors, [*model.parameters(), *model.buffers()]))
        assert list(before) == list(model.state_dict())
        assert type(model[0][1]) is DeferredBatchNorm2d
        assert isinstance(model[3], nn.BatchNorm1d)
        assert isinstance(model[3], DeferredBatchNorm)
        assert type(model[2]) is nn.Linear
    run(model, torch.randn(4, 3, 2, 2))
    assert calls == [model[3]]


def test_layers_without_statistics_are_left_alone_and_lazy_ones_run_first() -> None:
    for kind in (nn.BatchNorm2d, nn.SyncBatchNorm, nn.LazyBatchNorm2d):
        sizes = () if kind is nn.LazyBatchNorm2d else (3,)
        bn = kind(*sizes, track_running_stats=False)
        defer_batch_norm(nn.Sequential(bn))
        assert type(bn) is kind
    norm = nn.LazyBatchNorm2d()
    model = nn.Sequential(norm, nn.Sequential(norm))
    model(torch.randn(2, 3, 2, 2))
    defer_batch_norm(model)
    assert type(norm) is DeferredBatchNorm2d
    run(model, *torch.randn(8, 3, 2, 2).split(4))
    assert norm.num_batches_tracked == 3  # a layer used twice counts a mini-batch once
    with pytest.raises(ValueError, match="expected 4D input"):
        run(norm, torch.randn(4, 3))


class OwnNorm(nn.BatchNorm2d):
    pass


def parametrized() -> nn.Module:
    bn = nn.BatchNorm2d(3)
    nn.utils.parametrize.register_parametrization(bn, "weight", nn.Identity())
    return bn


def replaced() -> nn.Module:
    bn = nn.BatchNorm1d(2)
    bn.forward = bn.forward  # type: ignore[method-assign]
    return bn


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: nn.SyncBatchNorm(3), TypeError, "SyncBatchNorm at '1.norm'.*across processes"),
        (lambda: OwnNorm(3), TypeError, "OwnNorm at '1.norm'.*by hand"),
        (parametrized, TypeError, "ParametrizedBatchNorm2d at '1.norm'.*by hand"),
        (nn.LazyBatchNorm2d, ValueError, "LazyBatchNorm2d at '1.norm'.*run the model once"),
        (lambda: torch.jit.script(nn.BatchNorm2d(3)), TypeError, "at '1.norm': it is scripted"),
        (replaced, TypeError, "BatchNorm1d at '1.norm'.*'forward' was replaced"),
    ],
)
def test_what_cannot_be_converted_is_named_and_nothing_is_changed(make, error, message) -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.ModuleDict({"norm": make()}))
    for refused in (defer_batch_norm, lambda m: pipe_of(m, [1, 1], deferred_batch_norm=True)):
        with pytest.raises(error, match=message):
            refused(model)
        assert type(model[0]) is nn.BatchNorm1d


@pytest.mark.parametrize("when", ["after", "before", "before, and run"])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("container", [False, True])
def test_compiled_layers_collect(container: bool, in_place: bool, when: str) -> None:
    norm, plain = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    model: nn.Module = nn.Sequential(norm) if container else norm
    if when == "after":
        defer_batch_norm(model)
    if in_place:
        model.compile(backend="eager")
    else:
        model = torch.compile(model, backend="eager")
    if when == "before, and run":
        x = torch.randn(9, 2)
        model(x)
        plain(x)
    defer_batch_norm(model)
    for _ in range(12):  # more than the recompilations that dynamo puts up with
        x = torch.randn(9, 2)
        run(model, *x.split(3))
        plain(x)
    assert_same_buffers(plain, norm)


# --- in a pipe -----------------------------------------------------------------------------------


def layers(momentum: float | None = 0.1) -> nn.Sequential:
    norm = nn.BatchNorm1d(4, momentum=momentum)
    return nn.Sequential(nn.Linear(4, 4), norm, nn.Identity(), nn.Linear(4, 2))


def deferred(module: nn.Module, mode: str = "except_last", chunks: int = 4):
    return pipe_of(module, [2, 2], chunks=chunks, checkpoint=mode, deferred_batch_norm=True)


@pytest.mark.parametrize("batch", [16, 11, 6, 3])  # 6: three micro-batches for four chunks
@pytest.mark.parametrize("mode", MODES)
def test_a_pipe_has_the_statistics_of_the_mini_batch_and_the_same_gradients(mode, batch) -> None:
    module = layers(None if batch == 11 else 0.1)
    whole, chunks = copy.deepcopy(module), 4 if batch > 3 else 1
    plain = pipe_of(copy.deepcopy(module), [2, 2], chunks=chunks, checkpoint=mode)
    pipe = deferred(module, mode, chunks)
    for x in torch.randn(3, batch, 4) * 3 + 1:
        assert_same(step(pipe, pipe, x).parameter_grads, step(plain, plain, x).parameter_grads)
        whole(x)
    assert_same_buffers(pipe, whole)
    before, x = copy.deepcopy(pipe.eval()), torch.randn(5, 4)
    whole.load_state_dict(pipe.state_dict())
    torch.testing.assert_close(pipe(x), whole.eval()(x))
    assert_same_buffers(pipe, before, exact=True)


def test_outside_of_the_pipe_the_users_layers_do_as_before() -> None:
    module = layers()
    plain, norm = copy.deepcopy(module), module[1]
    pipe = deferred(module)
    assert module[1] is pipe[1] is norm
    not_deferred = pipe_of(module, [2, 2], chunks=4)
    for x in torch.randn(3, 16, 4):
        assert torch.equal(module(x), plain(x))
        assert torch.equal(not_deferred(x), torch.cat([plain(c) for c in x.chunk(4)]))
    assert_same_buffers(module, plain, exact=True)


@pytest.mark.parametrize(
    "change",
    [
        copy.deepcopy,
        lambda pipe: pickle.loads(pickle.dumps(pipe)),
        lambda pipe: setattr(pipe, "1", nn.BatchNorm1d(4)) or pipe,
        lambda pipe: setattr(pipe, "balance", [1, 3]) or pipe,
    ],
)
def test_copies_and_changed_pipes_defer(change) -> None:
    pipe = change(deferred(layers()))
    pipe(torch.randn(16, 4))
    assert pipe[1].num_batches_tracked == 1


def test_a_mini_batch_that_fails_leaves_no_trace() -> None:
    pipe = deferred(layers())
    before = copy.deepcopy(pipe)
    fail = pipe[0].register_forward_pre_hook(lambda _, args: 1 // (len(args[0]) - 3) and None)
    with pytest.raises(ZeroDivisionError):
        pipe(torch.randn(15, 4))  # the last micro-batch has three samples
    fail.remove()
    assert_same_buffers(pipe, before, exact=True)
    x = torch.randn(16, 4)
    pipe(x)
    before(x)
    assert_same_buffers(pipe, before, exact=True)
