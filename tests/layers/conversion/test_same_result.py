"""Converted models compute what the models compute, in pipes of any shape, bit for bit."""

from __future__ import annotations

import copy
import gc
import importlib
import pickle
import weakref
from collections import UserDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.converted import DOCUMENTED, compared
from syncpipe import Pipe, sequential
from syncpipe.data import tensors_in
from tests.layers.conversion.models import CASES, Pair, Transformer, padded, tokens
from tests.support import compare
from tests.support.models import in_turn, step


def values(output: Any) -> list[Tensor]:
    return [t for t in tensors_in(output) if t.is_floating_point()]


def converted(name: str, **options: Any) -> tuple[nn.Module, Pipe]:
    """A model, and a pipe of it, which was converted with a sample of three."""
    torch.manual_seed(3)
    model = CASES[name].build()
    plain = copy.deepcopy(model)
    layers = sequential(model, *CASES[name].sample(3))
    options = {"balance": "uniform", "devices": ["cpu:0", "cpu:1"], "chunks": 2, **options}
    return plain, Pipe(layers, **options)


def assert_same(plain: nn.Module, pipe: Pipe, inputs: tuple[Tensor, ...]) -> None:
    """Outputs, gradients and buffers, in the modes that both are in."""
    kinds = set()

    def run(model: nn.Module) -> Any:
        def call(given: Any) -> list[Tensor]:
            output = model(*(t.clone() for t in given))
            kinds.add(type(output))
            return values(output)

        return call

    # Gradients are summed in another order, or from other memory.
    theirs = step(in_turn(run(plain), pipe.chunks), plain, inputs)
    ours = step(run(pipe), pipe, inputs)
    compare.assert_same(ours, theirs, rounded={"parameter_grads"}, rtol=1.3e-6)
    assert len(kinds) == 1


def test_containers_of_a_sample_are_kept_without_its_tensors() -> None:
    model, x = nn.Module(), torch.rand(3, 4)
    model.layer = nn.Linear(4, 4)
    model.forward = lambda batch: model.layer(batch["x"])  # type: ignore[method-assign]
    layers, alive = sequential(model, UserDict(x=x)), weakref.ref(x)
    del x
    gc.collect()
    assert alive() is None
    assert layers(UserDict(x=torch.rand(2, 4))).shape == (2, 4)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:.*nested_tensor")
@pytest.mark.parametrize("name", CASES)
def test_outputs_gradients_buffers_and_names(name):
    case = CASES[name]
    plain, pipe = converted(name)
    assert len(pipe) == case.layers
    for names in ("named_parameters", "named_buffers"):
        for unique in (True, False):
            found, theirs = (getattr(m, names)(remove_duplicate=unique) for m in (pipe, plain))
            assert [name for name, _ in found] == [name for name, _ in theirs]
    assert list(pipe.state_dict()) == list(plain.state_dict())
    inputs = [case.sample(4), case.sample(3)]  # the last micro-batch of which is one sample
    if case.sample in (padded, tokens):
        inputs.append(case.sample(4, 5))
    if case.sample is padded:
        inputs.append(case.sample(4, 6, left=True))
    for given_inputs in inputs:
        norms = any(isinstance(m, nn.BatchNorm1d) for m in plain.modules())
        if not norms or len(given_inputs[0]) % 2 == 0:
            assert_same(plain.train(), pipe.train(), given_inputs)
        assert_same(plain.eval(), pipe.eval(), given_inputs)
        with torch.no_grad():  # PyTorch nests what is padded here
            assert_same(plain, pipe, given_inputs)


def test_dropout_obeys_the_mode():
    drops = Pair(lambda m, x: F.dropout(x, 0.5, training=m.training))
    for model, sample in ((Transformer(p=0.5), tokens(8)), (drops, (torch.randn(3, 4),))):
        layers = sequential(model.eval(), *sample)
        assert not layers.training
        found = [values(layers.train()(*sample))[0] for _ in range(2)]
        assert not torch.equal(*found)
        assert torch.equal(values(layers.eval()(*sample))[0], values(model.eval()(*sample))[0])


def test_copies_pickles_and_compiled_layers():
    _, pipe = converted("attributes")
    inputs = (torch.randn(8, 4),)
    expected = pipe(*inputs)
    for copied in (copy.deepcopy(pipe), pickle.loads(pickle.dumps(pipe))):
        assert torch.equal(copied(*inputs), expected)
        assert repr(copied) == repr(pipe)
    for layer in pipe:
        layer.forward = torch.compile(layer.forward, backend="eager")
    assert torch.equal(pipe(*inputs), expected)


def test_values_are_dropped_after_their_last_use():
    alive: list[weakref.ref[Tensor]] = []
    most = []

    class Counts(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            alive.append(weakref.ref(x))
            most.append(sum(ref() is not None for ref in alive))
            return x * 2

    def between(_: Pair, x: Tensor) -> Tensor:
        for k in range(20):
            x = Counts.apply(x) + k
        return x

    layers = sequential(Pair(between), x := torch.randn(3, 4), verify=False)
    alive.clear()
    most.clear()
    with torch.no_grad():
        layers(x)
    assert len(most) == 20
    assert max(most) <= 2


def test_gradients_are_on_again_after_an_error():
    def between(model: Pair, x: Tensor) -> Tensor:
        with torch.no_grad():
            other = model.b(x)
        return x + other

    layers = sequential(Pair(between), x := torch.randn(3, 4))
    dict(layers.named_modules())["b"].weight.data = torch.zeros(4, 5)
    with pytest.raises(RuntimeError):
        layers(x)
    assert torch.is_grad_enabled()


def test_a_value_is_told_from_one_that_is_the_same_object():
    model = Pair(lambda m, x: x - m.same(x))
    model.same = nn.Identity()
    layers = sequential(model, x := torch.randn(3, 4))
    names = dict(layers.named_modules())
    names["same"].register_forward_hook(lambda *given: given[2] * 2)
    assert torch.equal(layers(x), names["b"](-names["a"](x)))


def import_with_operators(package: str) -> None:
    """Imports torchvision, without its compiled operators if they are not for this PyTorch."""
    try:
        importlib.import_module(package)
    except RuntimeError:
        for operator in ("nms", "qnms"):
            torch.library.define(
                f"{package}::{operator}", "(Tensor a, Tensor b, float c) -> Tensor"
            )
        importlib.import_module(package)


@pytest.mark.parametrize("name", DOCUMENTED)
def test_models_of_packages_where_these_are_installed(name):
    made = DOCUMENTED[name]
    try:
        import_with_operators("torchvision")  # the others look at it
        importlib.import_module(made.package)
    except ImportError as error:
        pytest.skip(f"not installed: {error}")
    torch.manual_seed(1)
    model, args, kwargs = made.make(batch=2)
    layers = sequential(model, *args, **kwargs)
    assert list(layers.state_dict()) == list(model.state_dict())
    assert [n for n, _ in layers.named_parameters()] == [n for n, _ in model.named_parameters()]
    _, args, kwargs = made.make(batch=3)
    # Gradients of tied weights are summed in another order.
    assert (
        compared(model, layers, args, kwargs)
        in ("to the bit", "to rounding")[: 1 + ("tied" in name)]
    )
