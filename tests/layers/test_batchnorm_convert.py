"""A model's batch normalisations are deferred where they are, or refused."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Callable
from operator import is_

import pytest
import torch
from torch import nn

from syncpipe.layers.batchnorm import (
    DeferredBatchNorm,
    DeferredBatchNorm2d,
    DeferredBatchNorm3d,
    defer_batch_norm,
)
from tests.support.batchnorm import assert_same_buffers, assert_unchanged, run, snapshot


def make_model() -> nn.Sequential:
    block = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU())
    return nn.Sequential(block, nn.Flatten(), nn.Linear(16, 5), nn.BatchNorm1d(5))


def test_only_the_classes_change() -> None:
    model = make_model()
    modules, tensors = list(model.modules()), [*model.parameters(), *model.buffers()]
    before = model.state_dict()
    defer_batch_norm(model)
    assert all(map(is_, modules, model.modules()))
    assert all(map(is_, tensors, [*model.parameters(), *model.buffers()]))
    assert list(before) == list(model.state_dict())
    assert before._metadata == model.state_dict()._metadata
    assert type(model[0][1]) is DeferredBatchNorm2d
    assert isinstance(model[3], nn.BatchNorm1d)
    assert isinstance(model[3], DeferredBatchNorm)
    assert type(model[2]) is nn.Linear


def test_options_are_kept() -> None:
    bn = nn.BatchNorm3d(2, eps=0.1, momentum=None, affine=False).eval()
    shown = bn.extra_repr()
    defer_batch_norm(bn)
    assert type(bn) is DeferredBatchNorm3d
    assert bn.extra_repr() == shown
    assert not bn.training


def test_converting_twice_changes_nothing_more() -> None:
    model = make_model()
    defer_batch_norm(model)
    kinds = [type(module) for module in model.modules()]
    defer_batch_norm(model)
    assert [type(module) for module in model.modules()] == kinds


@pytest.mark.parametrize("kind", [nn.BatchNorm2d, nn.SyncBatchNorm, nn.LazyBatchNorm2d])
def test_layers_without_running_statistics_are_left_alone(kind: type[nn.Module]) -> None:
    lazy = kind is nn.LazyBatchNorm2d
    bn = kind(track_running_stats=False) if lazy else kind(3, track_running_stats=False)
    defer_batch_norm(nn.Sequential(bn))
    assert type(bn) is kind


def test_a_layer_used_twice_counts_a_mini_batch_once() -> None:
    bn = nn.BatchNorm1d(3)
    model = nn.Sequential(bn, nn.Sequential(bn), nn.ReLU())
    defer_batch_norm(model)
    run(model, *torch.randn(8, 3).split(4))
    assert bn.num_batches_tracked == 1


@pytest.mark.parametrize("transfer", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_deepcopy_and_pickle(transfer: Callable[[nn.Module], nn.Module]) -> None:
    deferred = make_model()
    defer_batch_norm(deferred)
    moved = transfer(deferred)
    assert type(moved[0][1]) is DeferredBatchNorm2d
    x = torch.randn(8, 3, 2, 2)
    before = snapshot(deferred)
    run(moved, *x.split(3))
    assert_unchanged(deferred, before)
    run(deferred, *x.split(3))
    assert_unchanged(deferred, snapshot(moved))


def test_hooks_and_references_stay() -> None:
    bn, calls = nn.BatchNorm1d(2), []
    bn.register_forward_hook(lambda m, args, out: calls.append(m))
    bn.register_full_backward_hook(lambda m, gin, gout: calls.append(m))
    model = nn.Sequential(bn)
    model.order, model.weak = [("norm", bn)], weakref.ref(bn)
    defer_batch_norm(model)
    run(model, torch.randn(4, 2, requires_grad=True))[0].sum().backward()
    assert calls == [bn, bn]
    assert model.order[0][1] is model.weak() is model[0]


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
    defer_batch_norm(model)
    assert type(model[0]) is DeferredBatchNorm2d


def test_a_replaced_forward_is_refused() -> None:
    bn = nn.BatchNorm1d(2)
    bn.forward = bn.forward  # type: ignore[method-assign]
    with pytest.raises(TypeError, match=r"BatchNorm1d at '0'.*'forward' was replaced"):
        defer_batch_norm(nn.Sequential(bn))


def test_a_refusal_leaves_the_model_as_it_was() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.SyncBatchNorm(3))
    with pytest.raises(TypeError):
        defer_batch_norm(model)
    assert type(model[0]) is nn.BatchNorm1d


# --- torch.compile -------------------------------------------------------------------------------


class Block(nn.Sequential):
    pass


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")


def compiled_in_place(module: nn.Module) -> nn.Module:
    module.compile(backend="eager")
    return module


@pytest.mark.parametrize("when", ["after", "before", "before, and run"])
@pytest.mark.parametrize("compiling", [compiled, compiled_in_place])
@pytest.mark.parametrize("kind", ["container", "layer"])
def test_compiled_layers_collect(
    kind: str, compiling: Callable[[nn.Module], nn.Module], when: str
) -> None:
    torch.manual_seed(0)
    norm, plain = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    model: nn.Module = Block(norm) if kind == "container" else norm
    if when == "after":
        defer_batch_norm(model)
    model = compiling(model)
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
