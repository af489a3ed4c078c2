"""Backward in two halves leaves what one whole backward leaves."""

from __future__ import annotations

import copy
import gc
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.nn.utils import parametrizations, weight_norm
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from syncpipe.training.weight_gradients import WeightGradients, can_split

Step = tuple[Tensor, Tensor | None, dict[str, Tensor | None]]


def left(module, x, y):
    return y.detach(), x.grad, {name: p.grad for name, p in module.named_parameters()}


def fresh(module, x):
    torch.manual_seed(1)
    module.zero_grad()
    return x.detach().requires_grad_(x.requires_grad)


def whole(module, x, gy=None):
    x = fresh(module, x)
    y = module(x)
    torch.autograd.backward(y, torch.cos(y.detach()) if gy is None else gy)
    return left(module, x, y)


def halves(module, x, gy=None):
    """The same in two halves, and how many weight halves were put aside."""
    x = fresh(module, x)
    weights = WeightGradients()
    with weights.recording():
        y = module(x)
    with weights.splitting():
        torch.autograd.backward(y, torch.cos(y.detach()) if gy is None else gy)
    count = weights.pending
    weights.accumulate()
    assert weights.pending == 0
    return left(module, x, y), count


def input_half(module, x, loss=torch.sum):
    """What a forward and the input half of its backward put aside."""
    weights = WeightGradients()
    with weights.recording():
        y = module(x)
    with weights.splitting():
        loss(y).backward()
    return weights


def cosine(y):
    """A loss with the gradient that `whole` starts from."""
    return (y * torch.cos(y.detach())).sum()


def assert_same(actual, expected, *, exact=True):
    tolerance = {"rtol": 0, "atol": 0} if exact else {}
    torch.testing.assert_close(actual[:2], expected[:2], rtol=0, atol=0, check_stride=True)
    for name, wanted in expected[2].items():
        got = actual[2][name]
        assert (got is None) == (wanted is None), name
        if got is not None:
            torch.testing.assert_close(got, wanted, check_stride=True, **tolerance)


def assert_splits(module, x, count, *, exact=True):
    expected = whole(module, x)
    actual, put_aside = halves(module, x)
    assert_same(actual, expected, exact=exact)
    assert put_aside == count


# -- linear maps


SHAPES = [
    ((33,), (0,)),
    ((7, 33), (0, 1)),
    ((1, 33), (0, 1)),
    ((0, 33), (0, 1)),
    ((33, 7), (1, 0)),
    ((33, 1), (1, 0)),
    ((5, 7, 33), (0, 1, 2)),
    ((7, 5, 33), (1, 0, 2)),
    ((33, 5, 7), (2, 1, 0)),
    ((33, 2, 3), (1, 2, 0)),
    ((0, 4, 33), (0, 1, 2)),
    ((2, 3, 5, 33), (0, 1, 2, 3)),
    ((3, 2, 5, 33), (1, 0, 2, 3)),
]


@pytest.mark.parametrize("needs_gradient", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("shape", "order"), SHAPES)
def test_a_linear_layer(shape, order, bias, needs_gradient):
    x = torch.randn(shape).permute(order).requires_grad_(needs_gradient)
    layer = nn.Linear(33, 41, bias=bias)
    assert_splits(layer, x, 1)
    y = layer(x)
    for gy in (
        torch.ones(()).expand(y.shape),
        torch.randn(y.shape[::-1]).permute(*reversed(range(y.dim()))),
    ):
        assert_same(halves(layer, x, gy)[0], whole(layer, x, gy))


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_frozen_parameter_gets_no_gradient(name):
    layer = nn.Linear(5, 4)
    layer.get_parameter(name).requires_grad_(False)
    assert_splits(layer, torch.randn(3, 5, requires_grad=True), 1 if name == "bias" else 0)
    assert layer.get_parameter(name).grad is None


@pytest.mark.parametrize("shape", [(7, 5), (2, 3, 5)])
def test_a_weight_that_is_stored_transposed(shape):
    layer = nn.Linear(5, 4)
    layer.weight = nn.Parameter(torch.randn(5, 4).t())
    assert_splits(layer, torch.randn(shape, requires_grad=True), 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64])
def test_other_dtypes(dtype):
    layer, x = nn.Linear(5, 4, dtype=dtype), torch.randn(3, 5, dtype=dtype, requires_grad=True)
    gy = torch.randn(3, 4, dtype=dtype)
    assert_same(halves(layer, x, gy)[0], whole(layer, x, gy))
    assert halves(layer, x, gy)[1] == 1


class OfMyOwn(nn.Module):
    """Calls functions in its own way: by keyword, with a computed bias, with a plain leaf."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.scale = nn.Parameter(torch.randn(4))
        self.leaf = torch.randn(4, 4, requires_grad=True)

    def forward(self, x):
        x = F.linear(input=x, weight=self.weight, bias=self.scale * 2)
        return F.linear(x.tanh(), self.leaf, bias=self.scale[:1])


def test_a_weight_that_is_a_vector():
    weight = nn.Parameter(torch.randn(5))
    with WeightGradients().recording():
        y = F.linear(torch.ones(3, 5), weight)
    y.sum().backward()
    torch.testing.assert_close(weight.grad, torch.full((5,), 3.0))


def test_calls_of_the_users_own():
    module = OfMyOwn()
    assert_splits(module, torch.randn(3, 4, requires_grad=True), 2)
    assert module.leaf.grad is not None


@pytest.mark.parametrize("where", ["first", "last"])
def test_activations_may_be_modified_in_place(where):
    relu = nn.ReLU(inplace=True)
    layers = [nn.Linear(5, 6), relu, nn.Linear(6, 4)] if where == "first" else [nn.Linear(5, 4)]
    for shape in [(3, 5), (2, 3, 5)]:
        module = nn.Sequential(*layers, nn.ReLU(inplace=True))
        assert_splits(module, torch.randn(shape, requires_grad=True), len(layers) // 2 + 1)


WRONG = {
    "shape": lambda w: F.linear(torch.ones(3, 6), w),
    "dimensions": lambda w: F.linear(torch.ones(()), w),
    "dtype": lambda w: F.linear(torch.ones(3, 5).double(), w),
    "type": lambda w: F.linear("x", w),
    "argument": lambda w: F.linear(torch.ones(3, 5), w, bais=None),
    "number": lambda w: F.linear(w),
    "stride": lambda w: F.conv1d(torch.ones(3, 4, 5), w, stride="x"),
    "padding": lambda w: F.conv1d(torch.ones(3, 5, 7), w, padding=(1, 2)),
    "lengths": lambda w: F.conv1d(torch.ones(3, 5, 7), w, padding="same", dilation=(1, 1)),
    "channels": lambda w: F.conv1d(torch.ones(3, 5, 7), w, groups=2),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_call_fails_as_it_always_does(kind):
    weight = nn.Parameter(torch.ones(4, 5) if kind in list(WRONG)[:6] else torch.ones(4, 5, 2))
    with pytest.raises((RuntimeError, TypeError)) as expected:
        WRONG[kind](weight)
    with WeightGradients().recording(), pytest.raises((RuntimeError, TypeError)) as actual:
        WRONG[kind](weight)
    assert (actual.type, str(actual.value)) == (expected.type, str(expected.value))


# -- convolutions


CONVOLUTIONS = {
    "1d": (lambda: nn.Conv1d(4, 6, 3, stride=2, padding=1), (3, 4, 11), 1),
    "one sample": (lambda: nn.Conv1d(4, 6, 3), (4, 11), 1),
    "same": (lambda: nn.Conv1d(4, 6, 3, padding="same", dilation=2), (3, 4, 11), 1),
    "lopsided same": (lambda: nn.Conv1d(4, 6, 4, padding="same"), (3, 4, 11), 0),
    "valid": (lambda: nn.Conv2d(4, 6, 3, padding="valid"), (3, 4, 7, 6), 1),
    "2d": (lambda: nn.Conv2d(4, 6, (3, 5), (2, 1), (1, 2)), (3, 4, 9, 8), 1),
    "no bias": (lambda: nn.Conv2d(4, 6, 3, bias=False), (3, 4, 7, 6), 1),
    "groups": (lambda: nn.Conv2d(4, 6, 3, groups=2), (3, 4, 7, 6), 1),
    "depthwise": (lambda: nn.Conv2d(4, 4, 3, groups=4), (3, 4, 7, 6), 1),
    "circular": (lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular"), (3, 4, 7, 6), 1),
    "reflected": (
        lambda: nn.Conv2d(4, 6, 3, padding="same", padding_mode="reflect"),
        (3, 4, 7, 6),
        1,
    ),
    "channels last": (
        lambda: nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last),
        (3, 4, 7, 6),
        1,
    ),
    "empty": (lambda: nn.Conv2d(4, 6, 3), (0, 4, 7, 6), 1),
    "3d": (lambda: nn.Conv3d(2, 3, 3, dilation=(1, 2, 1)), (2, 2, 5, 6, 5), 1),
    "bfloat16": (lambda: nn.Conv2d(4, 6, 3, dtype=torch.bfloat16), (3, 4, 7, 6), 1),
    "double": (lambda: nn.Conv2d(4, 6, 3, dtype=torch.float64), (3, 4, 7, 6), 1),
    "transposed 1d": (lambda: nn.ConvTranspose1d(4, 6, 3, 2, output_padding=1), (3, 4, 7), 1),
    "transposed 2d": (lambda: nn.ConvTranspose2d(4, 6, 3, 2, 1, groups=2), (3, 4, 7, 6), 1),
    "transposed 3d": (lambda: nn.ConvTranspose3d(2, 3, 2, dilation=2), (2, 2, 3, 4, 3), 1),
}


@pytest.mark.parametrize("needs_gradient", [True, False])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_convolution(name, needs_gradient):
    make, shape, count = CONVOLUTIONS[name]
    module = make()
    x = torch.randn(shape, dtype=next(module.parameters()).dtype)
    assert_splits(module, x.requires_grad_(needs_gradient), count)


def test_a_complex_convolution_stays_whole():
    module = nn.Conv1d(2, 3, 2, dtype=torch.complex64)
    x = torch.randn(3, 2, 5, dtype=torch.complex64, requires_grad=True)
    assert_splits(module, x, 0)


def test_an_input_in_channels_last_leaves_the_layout_of_the_weight():
    x = torch.randn(3, 4, 7, 6).to(memory_format=torch.channels_last)
    assert_splits(nn.Conv2d(4, 6, 3), x.requires_grad_(), 1)


@pytest.mark.parametrize("kind", ["hook", "computed", "frozen"])
def test_a_bias_of_a_convolution_that_cannot_wait(kind):
    class Layer(nn.Conv2d):
        def forward(self, x):
            assert self.bias is not None
            return F.conv2d(x, self.weight, self.bias * 2 if kind == "computed" else self.bias)

    layer = Layer(2, 3, 3)
    assert layer.bias is not None
    seen = []
    if kind == "hook":
        layer.bias.register_hook(seen.append)
    layer.bias.requires_grad_(kind != "frozen")
    count = 1 if kind == "frozen" else 0  # oneDNN has no gradient of the bias alone
    assert_splits(layer, torch.randn(2, 2, 5, 5, requires_grad=True), count)
    assert len(seen) == (2 if kind == "hook" else 0)


# -- whole modules


class Attention(nn.Module):
    def __init__(self, **arguments):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, **arguments)

    def forward(self, x):
        other = x[..., :6] if self.attention.kdim == 6 else x
        y, weights = self.attention(x, other, other)
        return y + weights.mean()


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 5, 2), nn.Linear(5, 3)

    def forward(self, x):
        y = self.head(self.lstm(x)[0])
        return y


MODULES = {
    "mlp": (
        lambda: nn.Sequential(
            nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Dropout(0.3), nn.Linear(16, 3)
        ),
        (3, 4, 8),
        2,
    ),
    "cnn": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(True), nn.Flatten(), nn.Linear(144, 5)
        ),
        (5, 3, 8, 8),
        2,
    ),
    "attention": (Attention, (3, 5, 8), 2),
    "attention, dropout": (lambda: Attention(dropout=0.3, batch_first=True), (3, 5, 8), 2),
    "attention, no bias": (lambda: Attention(bias=False, add_zero_attn=True), (3, 5, 8), 2),
    "attention, other keys": (lambda: Attention(kdim=6, vdim=6, add_bias_kv=True), (3, 5, 8), 4),
    "encoder": (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (3, 5, 8), 4),
    "encoder, eval": (lambda: nn.TransformerEncoderLayer(8, 2, 16).eval(), (3, 5, 8), 4),
    "lstm": (Recurrent, (4, 2, 8), 1),
    "bilinear": (lambda: OnItself(nn.Bilinear(8, 8, 3)), (4, 8), 0),
}


class OnItself(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x, x)


@pytest.mark.parametrize("needs_gradient", [True, False])
@pytest.mark.parametrize("name", MODULES)
def test_modules(name, needs_gradient):
    make, shape, count = MODULES[name]
    assert_splits(make(), torch.randn(shape, requires_grad=needs_gradient), count)


def test_attention_takes_its_keys_from_elsewhere():
    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.TransformerDecoderLayer(8, 2, 16)

        def forward(self, x):
            return self.layer(x, x.flip(0).tanh())

    # Other keys than queries: they go through views of one weight, which is no leaf then.
    assert_splits(Decoder(), torch.randn(3, 2, 8, requires_grad=True), 5)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_random_stacks(data):
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    images = data.draw(st.booleans())
    width = data.draw(st.integers(1, 5))
    shape = (data.draw(st.integers(0, 4)), width)
    shape += (6, 5) if images else ()
    layers = []
    count = 0
    for _ in range(data.draw(st.integers(1, 4))):
        wide, bias = data.draw(st.integers(1, 6)), data.draw(st.booleans())
        if images:
            kernel = data.draw(st.sampled_from([1, 3]))
            layers.append(nn.Conv2d(width, wide, kernel, padding=kernel // 2, bias=bias))
        else:
            layers.append(nn.Linear(width, wide, bias=bias))
        frozen = data.draw(st.booleans())
        next(layers[-1].parameters()).requires_grad_(not frozen)
        layers.append(data.draw(st.sampled_from([nn.ReLU(True), nn.Tanh(), nn.Identity()])))
        count, width = count + (not frozen), wide
    assert_splits(nn.Sequential(*layers), torch.randn(shape, requires_grad=True), count)


# -- what the weight half does


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
        with weights.recording():
            y = nn.Sequential(*layers)(torch.randn(3, 5))
        node = weakref.ref(y.grad_fn)
        with weights.splitting():
            y.sum().backward()
        tensors = [tensor for half in weights._halves for tensor in (half.x, half.gy)]
        references = [weakref.ref(tensor) for tensor in tensors]
        del y, tensors
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


# -- where a layer stays whole


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


# -- autograd in autograd


class Penalty(nn.Module):
    """Its output depends on a gradient of its own forward."""

    def __init__(self, layers, *, create_graph=True):
        super().__init__()
        self.layers, self.create_graph = layers, create_graph

    def forward(self, x):
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_()
            y = self.layers(x)
            wanted = (x, *self.layers.parameters())
            gx, *_ = torch.autograd.grad(y.square().sum(), wanted, create_graph=self.create_graph)
            if not self.create_graph:
                y = self.layers(x)
        return y.flatten(1).sum(1) + gx.flatten(1).square().sum(1)


@pytest.mark.parametrize("create_graph", [True, False])
@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_a_gradient_inside_of_a_forward(kind, create_graph):
    layers: nn.Module
    if kind == "linear":
        layers, shape = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4)), (3, 5)
    else:
        layers = nn.Sequential(nn.Conv1d(2, 3, 2), nn.Tanh(), nn.Conv1d(3, 2, 2))
        shape = (3, 2, 5)
    module, x = Penalty(layers, create_graph=create_graph), torch.randn(shape, requires_grad=True)
    expected, (actual, count) = whole(module, x), halves(module, x)
    assert count == 2
    torch.testing.assert_close(actual, expected)


def test_double_backward_through_autocast_reaches_the_weight():
    module = Penalty(nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4)))
    x = torch.randn(3, 5, requires_grad=True)

    def under_autocast(run):
        forward = module.forward

        def cast(x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return forward(x)

        module.forward = cast
        try:
            return run(module, x)
        finally:
            module.forward = forward

    expected, (actual, _) = under_autocast(whole), under_autocast(halves)
    torch.testing.assert_close(actual, expected, rtol=0.05, atol=0.05)
    for name, grad in expected[2].items():
        assert grad.abs().sum() > 0, name


def test_a_backward_with_create_graph_stays_whole():
    layer, weights = nn.Linear(5, 4), WeightGradients()
    with weights.recording():
        y = layer(torch.randn(3, 5))
    with weights.splitting():
        torch.autograd.backward(y.square().sum(), create_graph=True)
    assert weights.pending == 0
    assert layer.weight.grad is not None
    assert layer.weight.grad.requires_grad
    layer.zero_grad()  # the gradient and its graph are a cycle


@pytest.mark.parametrize("wanted", ["weight", "input", "both"])
def test_autograd_grad_stays_whole(wanted):
    layer, x, weights = nn.Linear(5, 4), torch.randn(3, 5, requires_grad=True), WeightGradients()
    tensors = {"weight": [layer.weight], "input": [x], "both": [layer.weight, x]}[wanted]
    expected = torch.autograd.grad(layer(x).square().sum(), tensors)
    with weights.recording():
        y = layer(x)
    with weights.splitting():
        actual = torch.autograd.grad(y.square().sum(), tensors)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    assert weights.pending == 0


class Wrapped(torch.autograd.Function):
    """A layer with a graph of its own, which its backward asks for gradients."""

    @staticmethod
    def forward(ctx, layer, x, *parameters):
        with torch.enable_grad():
            ctx.x = x.detach().requires_grad_()
            ctx.y = layer(ctx.x)
        ctx.parameters = parameters
        return ctx.y.detach()

    @staticmethod
    def backward(ctx, gy):
        return None, *torch.autograd.grad(ctx.y, (ctx.x, *ctx.parameters), gy)


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.inner = nn.Linear(5, 5), nn.Linear(5, 4)

    def forward(self, x):
        return Wrapped.apply(self.inner, self.before(x), *self.inner.parameters())


def test_a_backward_inside_of_backward_that_asks_for_the_gradients():
    assert_splits(Nested(), torch.randn(3, 5, requires_grad=True), 1)


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant
        self.before, self.after = nn.Linear(5, 5), nn.Linear(4, 3)
        self.inner = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, 4))

    def forward(self, x):
        y = checkpoint(self.inner, self.before(x), use_reentrant=self.reentrant)
        return self.after(y)


@pytest.mark.parametrize("reentrant", [True, False])
def test_layers_that_checkpoint(reentrant):
    assert_splits(Checkpointed(reentrant), torch.randn(3, 5, requires_grad=True), 2)


def test_backward_twice_over_a_retained_graph():
    layer, weights = nn.Linear(5, 4), WeightGradients()
    with weights.recording():
        y = layer(torch.ones(3, 5)).sum()
    for _ in range(2):
        with weights.splitting():
            y.backward(retain_graph=True)
    weights.accumulate()
    torch.testing.assert_close(layer.weight.grad, torch.full((4, 5), 6.0))


def test_without_splitting_the_backward_is_whole():
    layer, x, weights = nn.Linear(5, 4), torch.randn(3, 5, requires_grad=True), WeightGradients()
    expected = whole(layer, x)
    x = fresh(layer, x)
    with weights.recording():
        y = layer(x)
    torch.autograd.backward(y, torch.cos(y.detach()))
    assert weights.pending == 0
    assert_same(left(layer, x, y), expected)


def test_an_output_without_a_gradient_leaves_none():
    class Stop(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y, x):
            return y + x

        @staticmethod
        def backward(ctx, gy):
            return None, gy

    class Stopped(nn.Linear):
        def forward(self, x):
            return Stop.apply(super().forward(x), x)

    layer = Stopped(4, 4)
    assert_splits(layer, torch.randn(3, 4, requires_grad=True), 0)
    assert layer.weight.grad is None


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
    with weights.recording():
        y = layer(x)
    with torch.no_grad():
        (layer.weight if what == "weight" else x).mul_(2)
    with weights.splitting(), pytest.raises(RuntimeError, match="modified by an inplace"):
        y.sum().backward()


def test_a_modification_before_the_weight_half_is_noticed():
    x = torch.randn(3, 5)
    weights = input_half(nn.Linear(5, 4), x)
    x.mul_(2)
    with pytest.raises(RuntimeError, match=r"\[3, 5\].*\[4, 5\].*modified in place between"):
        weights.accumulate()


def test_the_first_layers_weight_may_change_as_ever():
    layer, weights = nn.Linear(5, 4), WeightGradients()
    with weights.recording():
        y = layer(torch.ones(3, 5))
    with torch.no_grad():
        layer.weight.mul_(2)  # nothing asks for the gradient of the input
    with weights.splitting():
        y.sum().backward()
    weights.accumulate()
    torch.testing.assert_close(layer.weight.grad, torch.full((4, 5), 3.0))


# -- parameters used more than once


class Twice(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(self.layer(x).tanh())


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(7, 5), nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(self.embedding(x[:, 0].long() % 7).tanh())


def test_a_parameter_used_more_than_once():
    x = torch.randn(4, 5, requires_grad=True)
    assert_splits(Twice(nn.Linear(5, 5)), x, 2, exact=False)
    assert_splits(Twice(nn.Conv1d(2, 2, 3, padding=1)), torch.randn(3, 2, 5), 2, exact=False)
    assert_splits(Tied(), torch.arange(8.0).view(4, 2), 1, exact=False)


# -- autocast


def autocast_halves(module, x, casts=None, dtype=torch.bfloat16):
    x = fresh(module, x)
    weights = WeightGradients(casts)
    with torch.autocast("cpu", dtype=dtype), weights.recording():
        y = module(x)
    with weights.splitting():
        torch.autograd.backward(y, torch.cos(y.detach()))
    count = weights.pending
    with torch.autocast("cpu", dtype=dtype):  # as on a worker
        weights.accumulate()
    return left(module, x, y), count


def autocast_whole(module, x, dtype=torch.bfloat16):
    x = fresh(module, x)
    with torch.autocast("cpu", dtype=dtype):
        y = module(x)
    torch.autograd.backward(y, torch.cos(y.detach()))
    return left(module, x, y)


class InFull(nn.Linear):
    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return super().forward(x.float())


AUTOCAST = {
    "linear": (lambda: nn.Sequential(nn.Linear(5, 6), nn.GELU(), nn.Linear(6, 4)), (2, 3, 5), 2),
    "full precision": (lambda: nn.Sequential(InFull(5, 6), nn.Linear(6, 4)), (7, 5), 2),
    "conv": (
        lambda: nn.Sequential(nn.Conv1d(2, 3, 2), nn.GELU(), nn.Conv1d(3, 2, 2)),
        (3, 2, 5),
        2,
    ),
    "transposed": (lambda: nn.Sequential(nn.ConvTranspose2d(2, 3, 2)), (3, 2, 5, 4), 1),
    "half module": (lambda: nn.Sequential(nn.Linear(5, 4).bfloat16(), nn.Linear(4, 3)), (7, 5), 2),
    "encoder": (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (3, 5, 8), 4),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("needs_gradient", [True, False])
@pytest.mark.parametrize("name", AUTOCAST)
def test_autocast(name, needs_gradient, dtype):
    make, shape, count = AUTOCAST[name]
    module = nn.Sequential(nn.Identity(), make()) if name != "encoder" else make()
    x = torch.randn(shape, requires_grad=needs_gradient)
    if needs_gradient:  # a leaf would be converted once for all
        module = nn.Sequential(Scaled(), module)
    expected, (actual, put_aside) = (
        autocast_whole(module, x, dtype),
        autocast_halves(module, x, dtype=dtype),
    )
    assert_same(actual, expected)
    assert put_aside == count
    for name, p in module.named_parameters():
        assert p.grad is not None, name
        assert p.grad.dtype == p.dtype


class Scaled(nn.Module):
    def forward(self, x):
        return x * 2


def test_autocast_on_a_leaf_that_two_layers_share():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(33, 33), nn.Linear(33, 33)

        def forward(self, x):
            return self.a(x) + self.b(x) * 0.3

    module, x = Both(), torch.randn(16, 33, requires_grad=True)
    assert_same(autocast_halves(module, x)[0], autocast_whole(module, x))


def test_autocast_in_doubles_fails_or_not_as_ever():
    layer, x = nn.Linear(5, 4).double(), torch.randn(3, 5).double()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = layer(x).dtype
        with WeightGradients().recording():
            assert layer(x).dtype == expected


def test_weights_are_cast_once_for_all_cells():
    module, casts = nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 4)), {}
    for _ in range(3):
        autocast_halves(module, torch.randn(3, 5), casts)
    assert len(casts) == 4
    copies = [copy for _, _, copy in casts.values()]
    autocast_halves(module, torch.randn(3, 5), casts)
    assert all(a is b for a, (_, _, b) in zip(copies, casts.values(), strict=True))


def test_a_cast_does_not_outlive_its_weight():
    module, casts, x = nn.Sequential(nn.Linear(5, 4)), {}, torch.randn(3, 5)
    autocast_halves(module, x, casts)
    with torch.no_grad():
        module[0].weight.mul_(2)
    assert_same(autocast_halves(module, x, casts)[0], autocast_whole(module, x))


# -- threads, errors, state


def test_the_halves_may_run_on_different_threads():
    module, x = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4)), torch.randn(3, 5)
    expected = whole(module, x)
    x, weights, ys = fresh(module, x), WeightGradients(), []

    def forward():
        with weights.recording():
            ys.append(module(x))

    def backward():
        with weights.splitting():
            torch.autograd.backward(ys[0], torch.cos(ys[0].detach()))

    for job in (forward, backward, weights.accumulate):
        thread = threading.Thread(target=job)
        thread.start()
        thread.join()
    assert_same(left(module, x, ys[0]), expected)


def test_a_thread_of_a_layers_own_sees_plain_functions():
    layer, names = nn.Linear(5, 4), []
    with WeightGradients().recording():
        thread = threading.Thread(target=lambda: names.append(layer(torch.ones(5)).grad_fn.name()))
        thread.start()
        thread.join()
    assert "Split" not in names[0]


def test_exceptions_leave_nothing_behind():
    layer, weights = nn.Linear(5, 4), WeightGradients()

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gy):
            raise ZeroDivisionError

    def failing_forward():
        layer(torch.ones(5))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), weights.recording():
        failing_forward()
    y = layer(torch.ones(5))
    assert y.grad_fn is not None
    assert "Split" not in y.grad_fn.name()
    with weights.recording():
        y = layer(Fails.apply(torch.ones(5, requires_grad=True)))
    with pytest.raises(ZeroDivisionError), weights.splitting():
        y.sum().backward()
    assert not weights._splitting


def test_module_hooks_see_the_same_gradients():
    seen = []
    module = nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 4))
    module[1].register_full_backward_hook(lambda m, gx, gy: seen.extend([*gx, *gy]))
    assert_splits(module, torch.randn(3, 5, requires_grad=True), 2)
    torch.testing.assert_close(seen[2:], seen[:2], rtol=0, atol=0)


# -- which modules are worth it


class Compiled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 4)

    def forward(self, x):
        return self.linear(x).relu()


def with_compiled_forward():
    module = Compiled()
    module.forward = torch.compile(module.forward, backend="eager")
    return module


def compiled_in_place():
    module = Compiled()
    module.compile(backend="eager")
    return module


def frozen(module):
    return module.requires_grad_(False)


CAN_SPLIT = {
    "linear": (lambda: nn.Linear(5, 4), True),
    "conv": (lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU()), True),
    "lazy": (lambda: nn.LazyLinear(4), True),
    "parameters of its own": (OfMyOwn, True),
    "tied embedding": (Tied, True),
    "frozen": (lambda: frozen(nn.Linear(5, 4)), False),
    "norm": (lambda: nn.Sequential(nn.LayerNorm(5), nn.GELU()), False),
    "embedding": (lambda: nn.Embedding(5, 4), False),
    "lstm": (lambda: nn.LSTM(5, 4), False),
    "nothing": (nn.Sequential, False),
    "compiled": (lambda: nn.Sequential(torch.compile(Compiled(), backend="eager")), False),
    "compiled in place": (compiled_in_place, False),
    "compiled forward": (with_compiled_forward, False),
    "scripted": (lambda: nn.Sequential(torch.jit.script(nn.Linear(5, 4))), False),
    "data parallel": (lambda: nn.DataParallel(nn.Linear(5, 4)), False),
    "encoder": (lambda: nn.TransformerEncoderLayer(8, 2, 16), True),
    "fast path": (
        lambda: nn.Sequential(frozen(nn.TransformerEncoderLayer(8, 2, 16).eval()), nn.Linear(8, 8)),
        False,
    ),
}


@pytest.mark.parametrize("name", CAN_SPLIT)
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_can_split(name):
    make, expected = CAN_SPLIT[name]
    assert can_split(make()) is expected


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_function_that_nobody_could_see(backend):
    linear = nn.Linear(5, 4)
    function = torch.compile(
        lambda x: F.linear(x, linear.weight, linear.bias).relu(), backend=backend
    )

    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.before, self.linear = nn.Linear(5, 5), linear

        def forward(self, x):
            return function(self.before(x))

    module, x = Hidden(), torch.randn(3, 5, requires_grad=True)
    for _ in range(2):
        torch.testing.assert_close(halves(module, x)[0], whole(module, x))
