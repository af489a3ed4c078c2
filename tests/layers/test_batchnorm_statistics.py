"""Deferred batch normalisation on its own: what it computes and collects."""

from __future__ import annotations

import copy
import time
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from syncpipe.layers.batchnorm import (
    DeferredBatchNorm1d,
    DeferredBatchNorm2d,
    MiniBatchStatistics,
    collect,
    defer_batch_norm,
)
from tests.support.batchnorm import assert_same_buffers, assert_unchanged, run, snapshot
from tests.support.running import in_threads

KINDS: dict[int, type[nn.Module]] = {
    0: nn.BatchNorm1d,
    1: nn.BatchNorm1d,
    2: nn.BatchNorm2d,
    3: nn.BatchNorm3d,
}


def deferred_copy(plain: nn.Module) -> nn.Module:
    bn = copy.deepcopy(plain)
    defer_batch_norm(bn)
    return bn


# --- running statistics --------------------------------------------------------------------------


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
    splits: list[list[int]],
    dims: int,
    channels: int,
    momentum: float | None,
    affine: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    plain = KINDS[dims](channels, momentum=momentum, affine=affine, dtype=dtype)
    deferred = deferred_copy(plain)
    for split in splits:
        # One value per channel cannot be normalised, by the plain layer neither.
        sizes = [2 if size == 1 and dims < 2 else size for size in split]
        if sum(sizes) == 0:
            continue
        spatial = (2, 3, 2)[:dims]
        x = torch.randn(sum(sizes), channels, *spatial, dtype=dtype) * 3 + 1
        run(deferred, *x.split(sizes))
        plain(x)
    assert_same_buffers(plain, deferred)


@pytest.mark.parametrize("sizes", [(100, 100, 100), (1, 7, 300, 2, 90)])
def test_a_large_mean_does_not_drown_the_variance(sizes: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x = torch.randn(sum(sizes), 3, 2) + 10_000
    bn = DeferredBatchNorm1d(3, momentum=1.0)
    run(bn, *x.split(sizes))
    var, mean = torch.var_mean(x.double(), dim=[0, 2])
    torch.testing.assert_close(bn.running_var, var.float(), rtol=1e-3, atol=0)
    torch.testing.assert_close(bn.running_mean, mean.float(), rtol=2e-7, atol=0)


def test_single_values_are_accumulated() -> None:
    x = torch.tensor([[1.0], [2.0], [6.0]])
    bn, stats = DeferredBatchNorm1d(1, momentum=1.0), MiniBatchStatistics()
    for value in x.split(1):
        stats.add(bn, value)
    stats.commit()
    assert bn.running_mean.item() == pytest.approx(3)
    assert bn.running_var.item() == pytest.approx(7)


def test_a_mini_batch_of_one_value_is_refused_and_changes_nothing() -> None:
    good, bad = DeferredBatchNorm1d(1), DeferredBatchNorm1d(1)
    before, stats = snapshot(good), MiniBatchStatistics()
    stats.add(good, torch.tensor([[1.0], [2.0]]))
    stats.add(bad, torch.tensor([[1.0]]))
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        stats.commit()
    assert_unchanged(good, before)


def test_a_mini_batch_of_nothing_changes_nothing() -> None:
    bn = DeferredBatchNorm1d(2)
    before = snapshot(bn)
    run(bn, torch.empty(0, 2))
    assert_unchanged(bn, before)


def test_nothing_moves_before_the_commit() -> None:
    bn, stats = DeferredBatchNorm1d(2), MiniBatchStatistics()
    before = snapshot(bn)
    with collect(stats):
        bn(torch.randn(4, 2))
    del stats  # aborted
    assert_unchanged(bn, before)


def test_commit_forgets() -> None:
    bn, stats = DeferredBatchNorm1d(2), MiniBatchStatistics()
    with collect(stats):
        bn(torch.randn(4, 2))
    stats.commit()
    before = snapshot(bn)
    stats.commit()
    assert_unchanged(bn, before)


def test_recomputation_does_not_count() -> None:
    bn = DeferredBatchNorm1d(2)
    x, stats = torch.randn(4, 2), MiniBatchStatistics()
    plain = nn.BatchNorm1d(2)
    expected = plain(x)
    with collect(stats):
        bn(x)
        with collect(None):
            assert torch.equal(bn(x + 1), nn.BatchNorm1d(2)(x + 1))
    before = snapshot(bn)
    with collect(None):
        assert torch.equal(bn(x), expected)
    assert_unchanged(bn, before)
    stats.commit()
    assert_same_buffers(plain, bn)


def test_without_a_counter_a_cumulative_average_stands_still() -> None:
    plain, bn = nn.BatchNorm1d(2, momentum=None), DeferredBatchNorm1d(2, momentum=None)
    x = torch.randn(4, 2)
    for module in (plain, bn):
        module.num_batches_tracked = None
    plain(x)
    run(bn, x)
    assert_same_buffers(plain, bn)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_are_accumulated_in_single_precision(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = (torch.randn(64, 3, 8, 8) + 30).to(dtype)
    bn = DeferredBatchNorm2d(3, momentum=1.0)
    run(bn, *x.split(5))
    var, mean = torch.var_mean(x.double(), dim=[0, 2, 3])
    torch.testing.assert_close(bn.running_mean, mean.float(), rtol=1e-6, atol=0)
    torch.testing.assert_close(bn.running_var, var.float(), rtol=1e-5, atol=0)


def test_half_buffers_stay_half() -> None:
    bn = DeferredBatchNorm1d(2).to(torch.bfloat16)
    running = bn.running_mean
    run(bn, torch.randn(8, 2).bfloat16())
    assert bn.running_mean is running
    assert running.dtype is torch.bfloat16
    assert running.abs().sum() > 0


def test_autocast_accumulates_in_single_precision() -> None:
    conv, x = nn.Conv2d(1, 3, 1), torch.randn(16, 1, 4, 4)
    model = nn.Sequential(conv, DeferredBatchNorm2d(3, momentum=1.0))
    with torch.autocast("cpu", torch.bfloat16):
        run(model, *x.split(4))
        seen = conv(x)
    assert seen.dtype is torch.bfloat16
    torch.testing.assert_close(
        model[1].running_var, seen.float().var([0, 2, 3]), rtol=1e-5, atol=1e-7
    )


# --- forward and backward ------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
def test_outside_of_collect_it_is_the_plain_layer(training: bool) -> None:
    plain = nn.BatchNorm2d(3).train(training)
    bn = deferred_copy(plain)
    x = torch.randn(4, 3, 2, 2)
    assert torch.equal(plain(x), bn(x))
    assert_unchanged(bn, snapshot(plain))


def test_eval_mode_uses_running_statistics_and_leaves_them() -> None:
    bn = DeferredBatchNorm1d(2)
    run(bn, torch.randn(8, 2) + 5)
    bn.eval()
    before, x = snapshot(bn), torch.randn(4, 2)
    plain = nn.BatchNorm1d(2).eval()
    plain.load_state_dict(before)
    assert torch.equal(run(bn, x)[0], plain(x))
    assert_unchanged(bn, before)


def test_switching_tracking_off_later_is_respected() -> None:
    bn = DeferredBatchNorm1d(2)
    bn.track_running_stats = False
    before = snapshot(bn)
    run(bn, torch.randn(4, 2))
    assert_unchanged(bn, before)


def test_gradients_are_those_of_the_plain_layer_on_each_micro_batch() -> None:
    plain = nn.BatchNorm2d(3)
    bn = deferred_copy(plain)
    x = torch.randn(6, 3, 2, 2, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    for a, b in zip([plain(c) for c in x.split(2)], run(bn, *y.split(2)), strict=True):
        assert torch.equal(a, b)
        a.square().sum().backward()
        b.square().sum().backward()  # after the commit: it must not touch what was saved
    assert torch.equal(x.grad, y.grad)
    assert torch.equal(plain.weight.grad, bn.weight.grad)
    assert not bn.running_mean.requires_grad


def test_statistics_do_not_keep_the_graph() -> None:
    bn, stats = DeferredBatchNorm1d(2), MiniBatchStatistics()
    x = torch.randn(4, 2, requires_grad=True) * 1
    alive = weakref.ref(x)
    with collect(stats):
        bn(x)
    del x
    assert alive() is None


def test_inference_mode() -> None:
    plain, bn, x = nn.BatchNorm1d(2), DeferredBatchNorm1d(2), torch.randn(8, 2)
    stats = MiniBatchStatistics()
    with torch.inference_mode(), collect(stats):
        bn(x)
    stats.commit()
    plain(x)
    assert_same_buffers(plain, bn)


def test_a_wrong_dimension_is_refused_as_ever() -> None:
    with pytest.raises(ValueError, match="expected 4D input"):
        run(DeferredBatchNorm2d(3), torch.randn(4, 3))


def test_one_value_per_channel_is_refused_as_ever() -> None:
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        run(DeferredBatchNorm1d(3), torch.randn(1, 3))


# --- scopes and threads --------------------------------------------------------------------------


def test_an_error_leaves_the_scope() -> None:
    bn, stats = DeferredBatchNorm1d(2), MiniBatchStatistics()
    with pytest.raises(KeyError), collect(stats):
        raise KeyError
    bn(torch.randn(4, 2))
    assert bn.num_batches_tracked == 1


def test_a_scope_is_not_entered_twice_at_a_time() -> None:
    scope = collect(None)
    with scope, pytest.raises(RuntimeError, match="already entered"), scope:
        pass
    with scope:  # one after the other is fine
        pass


def test_concurrent_mini_batches_do_not_mix() -> None:
    torch.manual_seed(0)
    bn, steps = DeferredBatchNorm1d(2, momentum=None), 30
    inputs = [[torch.randn(8, 2) + t for _ in range(steps)] for t in range(4)]

    def work(xs: list[Tensor]) -> None:
        for x in xs:
            run(bn, *x.split(3))

    # 8 = 3 + 3 + 2, so a mini-batch that lost or gained a part would show.
    in_threads(work, *inputs)
    batches = [x for xs in inputs for x in xs]
    assert bn.num_batches_tracked == len(batches)
    mean = torch.stack([x.mean(0) for x in batches]).mean(0)
    var = torch.stack([x.var(0) for x in batches]).mean(0)
    torch.testing.assert_close(bn.running_mean, mean, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(bn.running_var, var, rtol=1e-4, atol=1e-4)


def test_commits_do_not_interleave() -> None:
    inside: list[int] = []
    overlaps: list[int] = []

    class Watched(DeferredBatchNorm1d):
        def _move_running_stats(self, mean: Tensor, var: Tensor) -> None:
            inside.append(1)
            time.sleep(0.02)
            overlaps.append(len(inside) - 1)
            inside.pop()

    bn = Watched(2)

    def work(_: int) -> None:
        stats = MiniBatchStatistics()
        stats.add(bn, torch.ones(4, 2))
        stats.commit()

    in_threads(work, *range(4))
    assert overlaps == [0, 0, 0, 0]


def test_micro_batches_may_come_from_several_threads() -> None:
    plain, bn = nn.BatchNorm1d(2), DeferredBatchNorm1d(2)
    x, stats = torch.randn(64, 2), MiniBatchStatistics()

    def work(part: Tensor) -> None:
        with collect(stats):
            bn(part)

    in_threads(work, *x.split(4))
    stats.commit()
    plain(x)
    assert_same_buffers(plain, bn)
