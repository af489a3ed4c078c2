"""What the input half puts aside, what is stored until the weight half, and what that does."""

from __future__ import annotations

import copy
import gc
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu

from syncpipe.training.weight_gradients import WeightGradients
from tests.support.running import on_gradient
from tests.training.weight_gradients.halves import (
    assert_same,
    assert_splits,
    cosine,
    fresh,
    halves,
    input_half,
    left,
    whole,
)


def test_the_weight_gradient_comes_with_the_weight_half():
    module, x = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)), torch.randn(2, 5)
    weights = input_half(module, x)
    assert weights.pending == 2
    assert [p.grad is None for p in module.parameters()] == [True, False, True, False]
    weights.accumulate()
    assert all(p.grad is not None for p in module.parameters())
    before = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    weights.accumulate()
    torch.testing.assert_close([p.grad for p in module.parameters()], before, rtol=0, atol=0)


@pytest.mark.parametrize("layer", [nn.Linear(5, 4), nn.Conv1d(2, 4, 3)], ids=["linear", "conv"])
def test_an_existing_gradient_is_added_to_in_place(layer):
    x = torch.randn(2, 2, 5)
    _, _, once = whole(layer, x)
    module = copy.deepcopy(layer)
    module.zero_grad()
    grads = []
    for p in module.parameters():
        p.grad = torch.full_like(p, 0.5)
        grads.append(p.grad)
    input_half(module, x, cosine).accumulate()
    for (name, p), grad in zip(module.named_parameters(), grads, strict=True):
        assert p.grad is grad
        assert not grad.requires_grad
        wanted = once[name]
        assert wanted is not None
        torch.testing.assert_close(grad, wanted + 0.5)


def odd_gradients():
    return {
        "transposed": lambda p: torch.ones_like(p.T).T,
        "strided": lambda p: torch.ones(*p.shape, 2)[..., 0],
        "sparse": lambda p: torch.ones_like(p).to_sparse(),
        "with a graph": lambda p: torch.ones_like(p, requires_grad=True) * 1,
    }


@pytest.mark.parametrize("kind", odd_gradients())
def test_an_odd_existing_gradient(kind):
    layer, x = nn.Linear(5, 4), torch.randn(3, 5)
    _, _, once = whole(layer, x)
    layer.zero_grad()
    layer.weight.grad = odd_gradients()[kind](layer.weight.detach())
    input_half(layer, x, cosine).accumulate()
    torch.testing.assert_close(layer.weight.grad.to_dense(), once["weight"] + 1)


def test_many_cells_add_up():
    layers = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4))
    xs = torch.randn(4, 3, 5)
    cells = [input_half(layers, x, torch.norm) for x in xs]
    for cell in cells:
        cell.accumulate()
    actual = [p.grad for p in layers.parameters()]
    layers.zero_grad(set_to_none=True)
    for x in xs:
        layers(x).norm().backward()
    torch.testing.assert_close(actual, [p.grad for p in layers.parameters()])


@pytest.mark.parametrize("accumulate", [True, False])
def test_what_was_put_aside_is_let_go(accumulate):
    gc.disable()  # nothing of it may be part of a cycle
    try:
        weights, layers = WeightGradients(), [nn.Linear(5, 6), nn.Linear(6, 4)]
        x = on_gradient(torch.randn(3, 5, requires_grad=True), lambda grad: None)
        y, node = nn.Sequential(*layers)(x).sum(), weakref.ref(x.grad_fn)
        weights.go_back([y], [torch.ones(())])
        tensors = [tensor for half in weights._halves for tensor in (half.x, half.gy)]
        references = [weakref.ref(tensor) for tensor in tensors]
        del x, y, tensors
        assert node() is None
        assert all(reference() is not None for reference in references)
        if accumulate:
            weights.accumulate()
        else:  # as after an error
            del weights
        assert all(reference() is None for reference in references)
    finally:
        gc.enable()


def test_an_input_that_is_put_aside_holds_no_graph():
    module = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4))
    held = input_half(module, torch.randn(3, 5))._halves
    assert len(held) == 2
    assert all(half.x.grad_fn is None and half.gy.grad_fn is None for half in held)


# -- what is stored


def test_saved_tensor_hooks_from_outside():
    for module, x in [
        (nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 4)), torch.randn(3, 5)),
        (nn.Sequential(nn.Conv1d(2, 3, 2), nn.ReLU(), nn.Conv1d(3, 2, 2)), torch.randn(3, 2, 5)),
    ]:
        expected = whole(module, x.requires_grad_())
        with save_on_cpu():
            actual, _ = halves(module, x)
        assert_same(actual, expected)


def test_saved_tensor_hooks_of_a_layer_see_what_they_would():
    packed = []

    class Counts(nn.Linear):
        def forward(self, x):
            packed.append(0)

            def pack(tensor):
                packed[-1] += 1
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                return super().forward(x)

    module = nn.Sequential(Counts(5, 4), nn.Linear(4, 3))
    assert_splits(module, torch.randn(3, 5, requires_grad=True), 1)
    assert packed[0] == packed[1]


@pytest.mark.parametrize("what", ["weight", "input"])
def test_a_modification_before_the_input_half_is_noticed(what):
    layer, weights = nn.Linear(5, 4), WeightGradients()
    x = torch.randn(3, 5, requires_grad=True) * 1
    y = layer(x).sum()
    with torch.no_grad():
        (layer.weight if what == "weight" else x).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        weights.go_back([y], [torch.ones(())])


def test_a_modification_before_the_weight_half_is_noticed():
    x = torch.randn(3, 5)
    weights = input_half(nn.Linear(5, 4), x)
    x.mul_(2)
    with pytest.raises(RuntimeError, match=r"\[3, 5\].*\[4, 5\].*modified in place between"):
        weights.accumulate()


def test_a_gradient_that_a_backward_writes_into_before_the_weight_half_is_noticed():
    layer, x = nn.Linear(5, 5), torch.randn(3, 5, requires_grad=True)
    first = on_gradient(x, lambda grad: grad.mul_(2))  # goes back after the layer
    weights, y = WeightGradients(), first + layer(x)
    weights.go_back([y], [torch.ones(3, 5)])
    with pytest.raises(RuntimeError, match=r"gradient of the output .*\[3, 5\].*modified in place"):
        weights.accumulate()


def test_the_first_layers_weight_may_change_as_ever():
    layer, weights = nn.Linear(5, 4), WeightGradients()
    y = layer(torch.ones(3, 5)).sum()
    with torch.no_grad():
        layer.weight.mul_(2)  # nothing asks for the gradient of the input
    weights.go_back([y], [torch.ones(())])
    weights.accumulate()
    torch.testing.assert_close(layer.weight.grad, torch.full((4, 5), 3.0))


# -- threads, errors, state


def test_the_halves_may_run_on_different_threads():
    module, x = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4)), torch.randn(3, 5)
    expected = whole(module, x)
    x, weights, ys = fresh(module, x), WeightGradients(), []

    def forward():
        ys.append(module(x))

    def backward():
        weights.go_back(ys, [torch.cos(ys[0].detach())])

    for job in (forward, backward, weights.accumulate):
        thread = threading.Thread(target=job)
        thread.start()
        thread.join()
    assert_same(left(module, x, ys[0]), expected)


def test_module_hooks_see_the_same_gradients():
    seen = []
    module = nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 4))
    module[1].register_full_backward_hook(lambda m, gx, gy: seen.extend([*gx, *gy]))
    assert_splits(module, torch.randn(3, 5, requires_grad=True), 2)
    torch.testing.assert_close(seen[2:], seen[:2], rtol=0, atol=0)
