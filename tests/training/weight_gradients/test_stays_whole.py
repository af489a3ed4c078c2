"""Where a layer stays whole: hooks, computed weights, subclasses, modes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, weight_norm
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from syncpipe.training.weight_gradients import WeightGradients
from tests.training.weight_gradients.halves import assert_same, assert_splits, halves, whole


@pytest.mark.parametrize("when", ["before forward", "after forward"])
@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_a_weight_see_its_gradient_once(kind, when):
    layer, x = nn.Linear(5, 4), torch.randn(3, 5)
    seen = []

    def see(tensor):
        assert (tensor is layer.weight) == (kind != "register_hook")
        seen.append(tensor)

    def hook():
        getattr(layer.weight, kind)(see)

    weights = WeightGradients()
    if when == "before forward":
        hook()
    with weights.recording():
        y = layer(x)
    if when == "after forward":
        hook()
    with weights.splitting():
        y.sum().backward()
    assert weights.pending == 0
    assert len(seen) == 1
    assert layer.weight.grad is not None


@pytest.mark.parametrize(
    "wrap",
    [parametrizations.weight_norm, parametrizations.spectral_norm, weight_norm],
    ids=["weight_norm", "spectral_norm", "old weight_norm"],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_a_computed_weight(wrap):
    module = nn.Sequential(wrap(nn.Linear(5, 4)), nn.Tanh(), nn.Linear(4, 3))
    assert_splits(module.eval(), torch.randn(3, 5, requires_grad=True), 1)


class Sub(Tensor):
    pass


def test_tensor_subclasses():
    layer = nn.Linear(5, 4)
    x = torch.randn(3, 5).as_subclass(Sub)
    assert halves(layer, x)[1] == 0
    layer.weight = nn.Parameter(torch.randn(4, 5).as_subclass(Sub))
    assert_splits(layer, torch.randn(3, 5), 0)


class Own(Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is F.multi_head_attention_forward:
            return "mine", None
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_subclass_that_means_something_else_by_attention():
    x = torch.randn(3, 2, 8).as_subclass(Own)
    with WeightGradients().recording():
        assert nn.MultiheadAttention(8, 2)(x, x, x)[0] == "mine"


def test_under_a_dispatch_mode_everything_stays_whole():
    module, x = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)), torch.randn(3, 5)
    expected = whole(module, x)
    with FlopCounterMode(display=False) as counter:
        assert_splits(module, x, 0)
    assert_same(halves(module, x)[0], expected)
    assert counter.get_total_flops() > 0


def test_no_grad_and_other_states():
    layer, x = nn.Linear(5, 4), torch.randn(3, 5)
    with WeightGradients().recording():
        with torch.no_grad():
            assert layer(x).grad_fn is None
        with torch.inference_mode():
            assert layer(x).is_inference()
        mapped = torch.vmap(layer)(x)
        grads = torch.func.grad(lambda w: F.linear(x, w).sum())(layer.weight)
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
            tangent = torch.autograd.forward_ad.unpack_dual(layer(dual)).tangent
    torch.testing.assert_close(mapped, layer(x))
    torch.testing.assert_close(grads, x.sum(0).expand(4, 5))
    torch.testing.assert_close(tangent, layer.weight.sum(1).expand(3, 4))


class Watching(TorchFunctionMode):
    """Doubles every product."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is F.linear else result


def test_a_mode_of_the_users_own_keeps_its_say():
    layer, x = nn.Linear(5, 4), torch.randn(3, 5, requires_grad=True)

    class Doubled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            with Watching():
                return self.layer(x)

    assert_splits(Doubled(), x, 1)  # inside: it sees our function and what comes of it
    with Watching():
        assert_splits(layer, x, 0)  # outside: it sees none of the functions as they were called


@pytest.mark.parametrize("position", ["outside", "inside"])
def test_a_default_device_is_no_obstacle(position):
    class Layer(nn.Linear):
        def forward(self, x):
            if position == "outside":
                return super().forward(x)
            with torch.device("cpu"):
                return super().forward(x)

    layer, x = Layer(5, 4), torch.randn(3, 5, requires_grad=True)
    if position == "inside":
        return assert_splits(layer, x, 1)
    with torch.device("cpu"):
        return assert_splits(layer, x, 1)


def test_meta_tensors():
    layer = nn.Sequential(nn.Conv1d(2, 3, 2), nn.Linear(4, 3)).to("meta")
    (_, gx, grads), count = halves(layer, torch.empty(2, 2, 5, device="meta", requires_grad=True))
    assert count == 2
    assert gx is not None
    assert all(grad is not None and grad.is_meta for grad in grads.values())
