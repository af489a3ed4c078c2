"""A model with its batch normalisations deferred: the same model, or a refusal."""

from __future__ import annotations

import copy
import functools
import pickle
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from syncpipe.layers.batchnorm import (
    DeferredBatchNorm,
    DeferredBatchNorm2d,
)
from syncpipe.layers.batchnorm_convert import defer_batch_norm, from_plain
from tests.support.batchnorm import assert_same_buffers, assert_unchanged, run, snapshot


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
    assert deferred is not model
    assert type(deferred) is nn.Sequential
    assert deferred[0] is not model[0]
    assert deferred[0][0] is model[0][0]
    assert deferred[1] is model[1]
    assert deferred[2] is model[2]
    assert defer_batch_norm(model[2]) is model[2]


def test_converted_layers_are_still_of_the_plain_class() -> None:
    deferred = defer_batch_norm(make_model())
    assert isinstance(deferred[0][1], nn.BatchNorm2d)
    assert isinstance(deferred[3], nn.BatchNorm1d)
    assert isinstance(deferred[0][1], DeferredBatchNorm)


def test_from_plain() -> None:
    bn = nn.BatchNorm3d(2, eps=0.1, momentum=None, affine=False)
    deferred = from_plain(bn)
    assert isinstance(deferred, nn.BatchNorm3d)
    assert deferred.extra_repr() == bn.extra_repr()
    assert deferred.running_mean is bn.running_mean
    with pytest.raises(TypeError, match=r"torch\.nn\.modules\.linear\.Linear"):
        from_plain(nn.Linear(1, 1))


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
    assert deferred[0] is deferred[3]
    assert deferred[1] is deferred[4]
    assert deferred[0] is not bn
    assert deferred[1] is not block
    run(deferred, *torch.randn(8, 3).split(4))
    assert bn.num_batches_tracked == 1


def test_training_flags_are_kept_and_then_independent() -> None:
    model = make_model()
    model[0][1].eval()
    deferred = defer_batch_norm(model)
    flags = [module.training for module in model.modules()]
    assert [module.training for module in deferred.modules()] == flags
    deferred.eval()
    assert model.training
    assert model[0].training
    assert model[3].training


def test_registering_on_the_result_leaves_the_model_alone() -> None:
    model = make_model()
    deferred = defer_batch_norm(model)
    deferred.register_buffer("extra", torch.zeros(1))
    deferred.register_buffer("hidden", torch.zeros(1), persistent=False)
    deferred.register_forward_hook(lambda *_: pytest.fail("not on this one"))
    deferred[3].register_forward_hook(lambda *_: pytest.fail("not on this one"))
    deferred.add_module("more", nn.ReLU())
    model(torch.randn(4, 3, 2, 2))
    assert len(model) == 4
    assert "extra" not in model.state_dict()
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


# --- hooks and references ------------------------------------------------------------------------


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
    assert len(observer.seen) == 1
    assert observer.seen[0] is observer


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
    assert deferred[0] is not child
    assert deferred[0].parent[0] is deferred
    run(deferred[0], *torch.randn(8, 2).split(2))
    assert model.bn.num_batches_tracked == 1


# --- refusals ------------------------------------------------------------------------------------


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


def compiled_in_place(module: nn.Module) -> nn.Module:
    module.compile(backend="eager")
    return module


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.compile(nn.Sequential(nn.BatchNorm1d(2)), backend="eager"),
        lambda: torch.compile(nn.BatchNorm1d(2), backend="eager"),
        lambda: compiled_in_place(nn.Sequential(nn.BatchNorm1d(2))),
        lambda: compiled_in_place(nn.BatchNorm1d(2)),
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
