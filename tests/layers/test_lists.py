"""Pipes of lists: modules and callables, which become layers."""

from __future__ import annotations

import copy
import functools
import pickle
import re
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from syncpipe import Pipe, plan
from syncpipe.balance import balance_by_type, profile


def double(x: Tensor) -> Tensor:
    return x * 2


class Power:
    def __init__(self, exponent: int) -> None:
        self.exponent = exponent

    def __call__(self, x: Tensor) -> Tensor:
        return x**self.exponent


@pytest.mark.parametrize("kind", [list, tuple, iter, nn.ModuleList, dict, OrderedDict])
def test_what_yields_layers_is_a_list_and_a_mapping_names_them(kind: Any) -> None:
    layers = {"stem": nn.Linear(3, 3), "act": nn.ReLU(), "head": nn.Linear(3, 1, bias=False)}
    mapped = issubclass(kind, dict) if isinstance(kind, type) else False
    pipe = Pipe(kind(layers if mapped else layers.values()), [2, 1])
    assert list(pipe) == list(layers.values())
    names = ["stem", "stem", "head"] if mapped else ["0", "0", "2"]
    assert [key.partition(".")[0] for key in pipe.state_dict()] == names


def test_the_repr_shows_the_name_and_the_source_line_and_errors_name_the_layer() -> None:
    line = double.__code__.co_firstlineno
    shown = repr(Pipe([double, lambda x: x, functools.partial(double), torch.relu], [4]))
    assert f"(0): Function(double, test_lists.py:{line})" in shown
    assert re.search(r"\(1\): Function\(<lambda>, test_lists.py:\d+\)", shown)
    assert f"(2): Function(double, test_lists.py:{line})" in shown
    assert "(3): Function(relu)" in shown
    with pytest.raises(ZeroDivisionError) as caught:
        Pipe([nn.ReLU(), lambda x: 1 // 0], [1, 1])(torch.randn(2, 3))
    assert any("layer 1 ('1': Function)" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda pipe: pickle.loads(pickle.dumps(pipe))])
def test_a_pipe_of_callables_is_copied_and_pickled(again: Any) -> None:
    layer, gelu = nn.Linear(3, 3), functools.partial(F.gelu, approximate="tanh")
    pipe = Pipe([layer, double, gelu, nn.Tanh().forward, torch.relu, Power(3)], [2, 4])
    x = torch.randn(4, 3)
    assert torch.equal(pipe(x), gelu(layer(x) * 2).tanh().relu() ** 3)
    assert torch.equal(again(pipe)(x), pipe(x))


def test_callables_are_compiled_traced_measured_and_planned() -> None:
    compiled = torch.compile(double, backend="eager")
    layers = [nn.Linear(3, 3), compiled, nn.Linear(3, 3), lambda x: F.dropout(x, 0.1)]
    x = torch.randn(4, 3)
    pipe = Pipe(layers, [2, 2], chunks=2)
    assert "Function(double, test_lists.py" in repr(pipe)
    with pipe.trace() as trace:
        pipe.train_batch(x, loss_fn=lambda y: y.mean())
    assert trace.table()
    found = profile(layers, x, timeout=0.0)
    assert [layer.parameter_bytes for layer in found.layers] == [48, 0, 48, 0]
    sizes = profile(layers, x, device="meta")
    assert [layer.output_bytes[4] for layer in sizes.layers] == [48] * 4
    made = plan(layers, x, devices=["cpu:0", "cpu:1"], batch_size=4, memory="1GB", timeout=0.0)
    assert sum(made.balance) == 4
    layers = [nn.Linear(3, 3), double, double, nn.Linear(3, 3), double, double]
    assert balance_by_type(2, layers, "^double$") == [4, 2]


NO_LAYERS: dict[str, tuple[Any, str]] = {
    "class": (
        [nn.ReLU(), nn.Linear],
        r"layer 1 is the class Linear.*Linear\(\.\.\.\).*LayerSpec\(",
    ),
    "nested": ([[nn.ReLU()]], r"layer 0 is a list: unpack it.*nn\.Sequential\(\*layers\)"),
    "none": ([nn.ReLU(), None], r"layer 1 is a NoneType.*a module, a callable or a LayerSpec"),
    "number": ([3], r"layer 0 is a int \(3\)"),
    "generator": ([lambda x: (yield x)], r"layer 0: <lambda>.*generator.*@skippable"),
    "set": ({nn.ReLU()}, "not set"),
    "string": ("relu", "not str"),
    "tensor": (torch.ones(2), "not Tensor"),
    "pipe": (Pipe([nn.ReLU()], [1]), "not Pipe"),
}


@pytest.mark.parametrize("what", NO_LAYERS)
def test_what_is_no_layer_is_refused(what: str) -> None:
    layers, message = NO_LAYERS[what]
    with pytest.raises(TypeError, match=message):
        Pipe(layers, [1])


LINEAR = nn.Linear(3, 3)


class Holds:
    def __init__(self, inner: nn.Module) -> None:
        self.inner = inner

    def __call__(self, x: Tensor) -> Tensor:
        return self.inner(x)


def closure(layer: Any) -> Any:
    return lambda x: layer(x)


@pytest.mark.parametrize(
    "function",
    [
        closure(LINEAR),
        closure(LINEAR.weight),
        lambda x, layer=LINEAR: layer(x),
        Holds(LINEAR),
        LINEAR.forward,
        functools.partial(F.linear, weight=LINEAR.weight),
        functools.partial(LINEAR),
    ],
)
def test_parameters_that_the_pipe_would_not_see_are_refused(function: Any) -> None:
    with pytest.raises(ValueError, match=r"layer 1: .* uses a .*TiedLayerSpec"):
        Pipe([nn.ReLU(), function], [2])
