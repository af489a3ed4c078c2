"""Deferred batch normalisation on its own, without a pipe."""

from __future__ import annotations

import copy
import functools
import pickle
import threading
import time
import weakref
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from syncpipe.batchnorm import (
    DeferredBatchNorm,
    DeferredBatchNorm1d,
    DeferredBatchNorm2d,
    MiniBatchStatistics,
    collect,
    defer_batch_norm,
)

KINDS: dict[int, type[nn.Module]] = {
    0: nn.BatchNorm1d,
    1: nn.BatchNorm1d,
    2: nn.BatchNorm2d,
    3: nn.BatchNorm3d,
}


def run(module: nn.Module, *micro_batches: Tensor) -> list[Tensor]:
    """One mini-batch, committed."""
    stats = MiniBatchStatistics()
    outputs = []
    for x in micro_batches:
        with collect(stats):
            outputs.append(module(x))
    stats.commit()
    return outputs


def assert_same_buffers(a: nn.Module, b: nn.Module) -> None:
    left, right = dict(a.named_buffers()), dict(b.named_buffers())
    assert left.keys() == right.keys()
    for key in left:
        torch.testing.assert_close(left[key], right[key], msg=lambda m, k=key: f"{k}: {m}")


def snapshot(module: nn.Module) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in module.state_dict().items()}


def assert_unchanged(module: nn.Module, before: dict[str, Tensor]) -> None:
    after = module.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[key], before[key]) for key in before)


# -- running statistics ---------------------------------------------------------------------------


@settings(deadline=None, max_examples=80)
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
    deferred = defer_batch_norm(copy.deepcopy(plain))
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
    assert bn.running_mean is running and running.dtype is torch.bfloat16
    assert running.abs().sum() > 0


def test_autocast_accumulates_in_single_precision() -> None:
    conv, x = nn.Conv2d(1, 3, 1), torch.randn(16, 1, 4, 4)
    model = defer_batch_norm(nn.Sequential(conv, nn.BatchNorm2d(3, momentum=1.0)))
    with torch.autocast("cpu", torch.bfloat16):
        run(model, *x.split(4))
        seen = conv(x)
    assert seen.dtype is torch.bfloat16
    torch.testing.assert_close(
        model[1].running_var, seen.float().var([0, 2, 3]), rtol=1e-5, atol=1e-7
    )


# -- forward and backward -------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
def test_outside_of_collect_it_is_the_plain_layer(training: bool) -> None:
    plain = nn.BatchNorm2d(3).train(training)
    bn = defer_batch_norm(copy.deepcopy(plain))
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
    bn = defer_batch_norm(copy.deepcopy(plain))
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


# -- scopes and threads ---------------------------------------------------------------------------


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
    start = threading.Barrier(4)

    def work(xs: list[Tensor]) -> None:
        start.wait()
        for x in xs:
            run(bn, *x.split(3))

    # 8 = 3 + 3 + 2, so a mini-batch that lost or gained a part would show.
    threads = [threading.Thread(target=work, args=(xs,)) for xs in inputs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
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

    bn, start = Watched(2), threading.Barrier(4)

    def work() -> None:
        stats = MiniBatchStatistics()
        stats.add(bn, torch.ones(4, 2))
        start.wait()
        stats.commit()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert overlaps == [0, 0, 0, 0]


def test_micro_batches_may_come_from_several_threads() -> None:
    plain, bn = nn.BatchNorm1d(2), DeferredBatchNorm1d(2)
    x, stats = torch.randn(64, 2), MiniBatchStatistics()

    def work(part: Tensor) -> None:
        with collect(stats):
            bn(part)

    threads = [threading.Thread(target=work, args=(part,)) for part in x.split(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stats.commit()
    plain(x)
    assert_same_buffers(plain, bn)


# -- converting -----------------------------------------------------------------------------------


def make_model() -> nn.Sequential:
    block = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU())
    return nn.Sequential(block, nn.Flatten(), nn.Linear(16, 5), nn.BatchNorm1d(5))


def test_state_dict_is_the_same_and_shares_its_tensors() -> None:
    model = make_model()
    plain, deferred = model.state_dict(), defer_batch_norm(model).state_dict()
    assert list(plain) == list(deferred)
    assert plain._metadata == deferred._metadata
    assert all(plain[key].data_ptr() == deferred[key].data_ptr() for key in plain)


def test_the_users_module_stays_and_learns() -> None:
    model = make_model()
    kinds = [type(module) for module in model.modules()]
    parameters, buffers = list(model.parameters()), list(model.buffers())
    deferred = defer_batch_norm(model)
    run(deferred, *torch.randn(8, 3, 2, 2).split(2))
    assert [type(module) for module in model.modules()] == kinds
    for a, b in zip(parameters, deferred.parameters(), strict=True):
        assert a is b
    for a, b, c in zip(buffers, model.buffers(), deferred.buffers(), strict=True):
        assert a is b is c
    assert model[3].num_batches_tracked == 1


def test_what_has_no_batch_norm_is_the_same_object() -> None:
    model = make_model()
    deferred = defer_batch_norm(model)
    assert deferred is not model and type(deferred) is nn.Sequential
    assert deferred[0] is not model[0] and deferred[0][0] is model[0][0]
    assert deferred[1] is model[1] and deferred[2] is model[2]
    assert defer_batch_norm(model[2]) is model[2]


def test_converted_layers_are_still_of_the_plain_class() -> None:
    deferred = defer_batch_norm(make_model())
    assert isinstance(deferred[0][1], nn.BatchNorm2d) and isinstance(deferred[3], nn.BatchNorm1d)
    assert isinstance(deferred[0][1], DeferredBatchNorm)


def test_from_plain() -> None:
    bn = nn.BatchNorm3d(2, eps=0.1, momentum=None, affine=False)
    deferred = DeferredBatchNorm.from_plain(bn)
    assert isinstance(deferred, nn.BatchNorm3d)
    assert deferred.extra_repr() == bn.extra_repr()
    assert deferred.running_mean is bn.running_mean
    with pytest.raises(TypeError, match=r"torch\.nn\.modules\.linear\.Linear"):
        DeferredBatchNorm.from_plain(nn.Linear(1, 1))


def test_converting_twice_changes_nothing_more() -> None:
    deferred = defer_batch_norm(make_model())
    assert defer_batch_norm(deferred) is deferred


@pytest.mark.parametrize("kind", [nn.BatchNorm2d, nn.SyncBatchNorm, nn.LazyBatchNorm2d])
def test_layers_without_running_statistics_are_left_alone(kind: type[nn.Module]) -> None:
    lazy = kind is nn.LazyBatchNorm2d
    bn = kind(track_running_stats=False) if lazy else kind(3, track_running_stats=False)
    model = nn.Sequential(bn)
    assert defer_batch_norm(model) is model


def test_a_shared_layer_stays_shared() -> None:
    bn, block = nn.BatchNorm1d(3), nn.Sequential(nn.BatchNorm1d(3))
    deferred = defer_batch_norm(nn.Sequential(bn, block, nn.ReLU(), bn, block))
    assert deferred[0] is deferred[3] and deferred[1] is deferred[4]
    assert deferred[0] is not bn and deferred[1] is not block
    run(deferred, *torch.randn(8, 3).split(4))
    assert bn.num_batches_tracked == 1


def test_training_flags_are_kept_and_then_independent() -> None:
    model = make_model()
    model[0][1].eval()
    deferred = defer_batch_norm(model)
    flags = [module.training for module in model.modules()]
    assert [module.training for module in deferred.modules()] == flags
    deferred.eval()
    assert model.training and model[0].training and model[3].training


def test_registering_on_the_result_leaves_the_model_alone() -> None:
    model = make_model()
    deferred = defer_batch_norm(model)
    deferred.register_buffer("extra", torch.zeros(1))
    deferred.register_buffer("hidden", torch.zeros(1), persistent=False)
    deferred.register_forward_hook(lambda *_: pytest.fail("not on this one"))
    deferred[3].register_forward_hook(lambda *_: pytest.fail("not on this one"))
    deferred.add_module("more", nn.ReLU())
    model(torch.randn(4, 3, 2, 2))
    assert len(model) == 4 and "extra" not in model.state_dict()
    assert not model._non_persistent_buffers_set


@pytest.mark.parametrize("transfer", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_deepcopy_and_pickle(transfer: Callable[[nn.Module], nn.Module]) -> None:
    deferred = defer_batch_norm(make_model())
    moved = transfer(deferred)
    assert type(moved[0][1]) is DeferredBatchNorm2d
    x = torch.randn(8, 3, 2, 2)
    before = snapshot(deferred)
    run(moved, *x.split(3))
    assert_unchanged(deferred, before)
    run(deferred, *x.split(3))
    assert_unchanged(deferred, snapshot(moved))


# -- hooks and references -------------------------------------------------------------------------


def test_hooks_are_carried_over() -> None:
    bn, calls = nn.BatchNorm1d(2), []
    bn.register_forward_pre_hook(lambda m, args: calls.append(("pre", m)))
    bn.register_forward_hook(lambda m, args, kw, out: calls.append(("post", m)), with_kwargs=True)
    bn.register_full_backward_hook(lambda m, gin, gout: calls.append(("back", m)))
    bn.register_state_dict_post_hook(lambda m, *_: calls.append(("saved", m)))
    bn.register_load_state_dict_post_hook(lambda m, keys: calls.append(("loaded", m)))
    deferred = defer_batch_norm(nn.Sequential(bn))
    run(deferred, torch.randn(4, 2, requires_grad=True))[0].sum().backward()
    deferred.load_state_dict(deferred.state_dict())
    assert [name for name, _ in calls] == ["pre", "post", "back", "saved", "loaded"]
    assert all(module is deferred[0] for _, module in calls)


class Hooked(nn.Module):
    """Hooks itself with its own methods."""

    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.BatchNorm1d(2)
        self.owners: list[nn.Module] = []
        self.register_forward_hook(self.note)
        self.register_forward_hook(functools.partial(self.note))
        self.bn.register_forward_hook(self.note)
        self.register_load_state_dict_pre_hook(self.loading)

    def note(self, *_: object) -> None:
        self.owners.append(self)

    def loading(self, module: nn.Module, *_: object) -> None:
        assert module is self
        self.owners.append(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(x)


def test_hooks_that_are_methods_follow_to_the_clone() -> None:
    model = Hooked()
    deferred = defer_batch_norm(model)
    run(deferred, torch.randn(4, 2))
    deferred.load_state_dict(model.state_dict())
    assert len(deferred.owners) == 4
    assert all(owner is deferred for owner in deferred.owners)


def test_hooks_of_an_observer_outside_stay_the_observers() -> None:
    class Observer(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model, self.seen = model, []
            model[3].register_forward_hook(self.look)

        def look(self, *_: object) -> None:
            self.seen.append(self)

    model = make_model()
    observer = Observer(model)
    run(defer_batch_norm(model), torch.randn(4, 3, 2, 2))
    assert len(observer.seen) == 1 and observer.seen[0] is observer


class Listing(nn.Module):
    """Runs its layers from plain containers, one of which holds itself."""

    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.BatchNorm1d(2)
        self.order = [("norm", self.bn), ("act", nn.ReLU())]
        self.by_name = {"norm": [self.bn]}
        self.log: list[str] = []
        self.order.append(self.order)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        return self.by_name["norm"][0](self.order[0][1](x))


def test_references_in_plain_attributes_follow() -> None:
    model = Listing()
    deferred = defer_batch_norm(model)
    assert deferred.order[0][1] is deferred.by_name["norm"][0] is deferred.bn
    assert model.order[0][1] is model.by_name["norm"][0] is model.bn
    assert deferred.log is model.log
    run(deferred, *torch.randn(8, 2).split(2))
    assert model.bn.num_batches_tracked == 1


class Child(nn.Module):
    def __init__(self, parent: nn.Module) -> None:
        super().__init__()
        self.parent, self.weak = [parent], weakref.ref(parent)

    def forward(self, x: Tensor) -> Tensor:
        assert self.weak() is self.parent[0]
        return self.parent[0].bn(x)


def test_a_child_that_uses_its_parent_gets_the_clone() -> None:
    model = nn.Sequential()
    child = Child(model)
    model.append(child)
    model.bn = nn.BatchNorm1d(2)
    deferred = defer_batch_norm(model)
    assert deferred[0] is not child and deferred[0].parent[0] is deferred
    run(deferred[0], *torch.randn(8, 2).split(2))
    assert model.bn.num_batches_tracked == 1


# -- refusals -------------------------------------------------------------------------------------


class OwnNorm(nn.BatchNorm2d):
    pass


def parametrized() -> nn.Module:
    bn = nn.BatchNorm2d(3)
    nn.utils.parametrize.register_parametrization(bn, "weight", nn.Identity())
    return bn


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: nn.SyncBatchNorm(3), TypeError, "SyncBatchNorm at '1.norm'.*across processes"),
        (lambda: OwnNorm(3), TypeError, "OwnNorm at '1.norm'.*by hand"),
        (parametrized, TypeError, "ParametrizedBatchNorm2d at '1.norm'.*by hand"),
        (nn.LazyBatchNorm2d, ValueError, "LazyBatchNorm2d at '1.norm'.*run the model once"),
        (lambda: torch.jit.script(nn.BatchNorm2d(3)), TypeError, "scripted .* at '1.norm'"),
    ],
)
def test_what_cannot_be_converted_is_named(
    make: Callable[[], nn.Module], error: type[Exception], message: str
) -> None:
    model = nn.Sequential(nn.ReLU(), nn.ModuleDict({"norm": make()}))
    with pytest.raises(error, match=message):
        defer_batch_norm(model)


def test_a_lazy_layer_that_ran_is_converted() -> None:
    model = nn.Sequential(nn.LazyBatchNorm2d())
    model(torch.randn(2, 3, 2, 2))
    assert type(defer_batch_norm(model)[0]) is DeferredBatchNorm2d


def compiled_in_place() -> nn.Module:
    block = nn.Sequential(nn.BatchNorm1d(2))
    block.compile(backend="eager")
    return block


def compiled_norm_in_place() -> nn.Module:
    bn = nn.BatchNorm1d(2)
    bn.compile(backend="eager")
    return bn


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.compile(nn.Sequential(nn.BatchNorm1d(2)), backend="eager"),
        lambda: torch.compile(nn.BatchNorm1d(2), backend="eager"),
        compiled_in_place,
        compiled_norm_in_place,
    ],
)
def test_a_compiled_container_is_refused(make: Callable[[], nn.Module]) -> None:
    with pytest.raises(TypeError, match=r"at '0'.*compile its layers after"):
        defer_batch_norm(nn.Sequential(make()))


def test_compiled_layers_without_batch_norm_are_welcome() -> None:
    compiled = torch.compile(nn.Linear(2, 2), backend="eager")
    deferred = defer_batch_norm(nn.Sequential(compiled, nn.BatchNorm1d(2)))
    assert deferred[0] is compiled


def test_a_patched_forward_is_refused() -> None:
    block = nn.Sequential(nn.BatchNorm1d(2))
    block.forward = block.forward  # type: ignore[method-assign]
    with pytest.raises(TypeError, match=r"Sequential at '0'.*'forward'"):
        defer_batch_norm(nn.Sequential(block))


def test_a_refusal_leaves_the_model_as_it_was() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.SyncBatchNorm(3))
    with pytest.raises(TypeError):
        defer_batch_norm(model)
    assert type(model[0]) is nn.BatchNorm1d


def test_compiling_afterwards_still_collects() -> None:
    torch.manual_seed(0)
    plain = nn.BatchNorm1d(2)
    compiled = torch.compile(defer_batch_norm(copy.deepcopy(plain)), backend="eager")
    for _ in range(12):  # more than the recompilations that dynamo puts up with
        x = torch.randn(9, 2)
        run(compiled, *x.split(3))
        plain(x)
    assert_same_buffers(plain, compiled._orig_mod)
