"""Backward in two halves leaves what one whole backward leaves, whatever the layers are."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils import parametrizations, weight_norm
from torch.utils.checkpoint import checkpoint

from syncpipe import Pipe
from syncpipe.runtime.weight_gradients import WeightGradients
from tests.support.running import Using, on_gradient


def run(module, x, gy=None, *, dtype=None, split):
    """Output, gradients of input and parameters; and the weight halves that were put aside."""
    torch.manual_seed(1)
    module.zero_grad()
    x = x.detach().requires_grad_(x.requires_grad)
    with contextlib.nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype):
        y = module(x)
    gy, count = torch.cos(y.detach()) if gy is None else gy, None
    if split:
        weights = WeightGradients()
        weights.go_back([y], [gy])
        count = len(weights.pending)
        assert count <= sum(p.grad is None for p in module.parameters())
        for _ in range(2):  # the second time there is nothing to add
            weights.accumulate()
    else:
        torch.autograd.backward(y, gy)
    return (y.detach(), x.grad, {name: p.grad for name, p in module.named_parameters()}), count


def assert_splits(module, x, count, gy=None, dtype=None):
    """The halves of a backward leave what the whole leaves, with ``count`` of them put aside."""
    expected, _ = run(module, x, gy, dtype=dtype, split=False)
    actual, put_aside = run(module, x, gy, dtype=dtype, split=True)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, check_stride=True)
    assert put_aside == count


def input_half(module, x, loss=torch.sum):
    """What a forward and the input half of its backward put aside."""
    weights, y = WeightGradients(), loss(module(x))
    weights.go_back([y], [torch.ones_like(y)])
    return weights


def cosine(y):
    """A loss with the gradient that `run` starts from."""
    return (y * torch.cos(y.detach())).sum()


def own(x, a, b):
    """By keyword, and with computed biases."""
    x = F.linear(input=x, weight=a.weight, bias=a.bias * 2)
    return F.linear(x.tanh(), b.weight, bias=b.bias[:1])


def in_full(x, layer):
    with torch.autocast("cpu", enabled=False):
        return layer(x.float())


def stored_transposed():
    layer = nn.Linear(5, 4)
    layer.weight = nn.Parameter(torch.randn(5, 4).t())
    return layer


def tied():
    embedding, head = nn.Embedding(7, 5), nn.Linear(5, 7, bias=False)
    head.weight = embedding.weight
    return Using(lambda x, e, h: h(e(x.abs()[:, 0].long() % 7).tanh()), embedding, head)


def attention(*, kdim=None, **options):
    def attend(x, layer):
        other = x[..., :6] if kdim else x
        y, weights = layer(x, other, other)
        return y + weights.mean()

    return Using(attend, nn.MultiheadAttention(8, 2, kdim=kdim, vdim=kdim, **options))


def decoder():
    # Other keys than queries: they go through views of one weight, which is no leaf then.
    return Using(lambda x, d: d(x, x.flip(0).tanh()), nn.TransformerDecoderLayer(8, 2, 16))


def checkpointed(reentrant):
    def forward(x, before, inner, after):
        return after(checkpoint(inner, before(x), use_reentrant=reentrant))

    inner = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, 4))
    return Using(forward, nn.Linear(5, 5), inner, nn.Linear(4, 3))


class Stop(torch.autograd.Function):
    """Leaves one of its inputs without a gradient."""

    @staticmethod
    def forward(ctx, y, x):
        return y + x

    @staticmethod
    def backward(ctx, gy):
        return None, gy


def counted(x, layer):
    """With saved-tensor hooks of the layer's own, which see what they would."""
    seen = []
    with saved_tensors_hooks(lambda t: seen.append(1) or t, lambda t: t):
        return layer(x)


def conv(*args, **options):
    return lambda: nn.Conv2d(4, 6, *args, **options)


#: The module, the shape of its input, and how many weight halves are put aside.
CASES = {
    "linear": (lambda: nn.Linear(33, 41), (7, 33), 1),
    "one row, no bias": (lambda: nn.Linear(33, 41, bias=False), (1, 33), 1),
    "no rows": (lambda: nn.Linear(33, 41), (0, 33), 1),
    "vector": (lambda: nn.Linear(33, 41), (33,), 1),
    "more dimensions": (lambda: nn.Linear(33, 41), (2, 3, 5, 33), 1),
    "permuted": (lambda: Using(lambda x, a: a(x.mT), nn.Linear(7, 4)), (5, 7, 3), 1),
    "stored transposed": (stored_transposed, (2, 3, 5), 1),
    "double": (lambda: nn.Linear(5, 4, dtype=torch.float64), (3, 5), 1),
    "bfloat16": (lambda: nn.Linear(5, 4, dtype=torch.bfloat16), (3, 5), 1),
    "frozen weight": (lambda: nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)), (3, 5), 2),
    "of one's own": (lambda: Using(own, nn.Linear(4, 4), nn.Linear(4, 4)), (3, 4), 2),
    "in place": (lambda: nn.Sequential(nn.Linear(5, 6), nn.ReLU(True), nn.Linear(6, 4)), (3, 5), 2),
    "twice": (lambda: Using(lambda x, a: a(a(x).tanh()), nn.Linear(5, 5)), (4, 5), 0),
    "tied": (tied, (4, 2), 0),
    "weight_norm": (lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(5, 4)), nn.Tanh(),
                                          nn.Linear(4, 3)), (3, 5), 1),
    "old weight_norm": (lambda: weight_norm(nn.Linear(5, 4)), (3, 5), 0),
    "bilinear": (lambda: Using(lambda x, b: b(x, x), nn.Bilinear(8, 8, 3)), (4, 8), 0),
    "1d": (lambda: nn.Conv1d(4, 6, 3, stride=2, padding=1), (3, 4, 11), 1),
    "one sample": (lambda: nn.Conv1d(4, 6, 3), (4, 11), 1),
    "lopsided same": (lambda: nn.Conv1d(4, 6, 4, padding="same"), (3, 4, 11), 1),
    "2d": (conv((3, 5), (2, 1), (1, 2)), (3, 4, 9, 8), 1),
    "2d, no bias": (conv(3, bias=False), (3, 4, 7, 6), 1),
    "groups": (conv(3, groups=2), (3, 4, 7, 6), 1),
    "circular": (conv(3, padding=1, padding_mode="circular"), (3, 4, 7, 6), 1),
    "channels last": (lambda: conv(3)().to(memory_format=torch.channels_last), (3, 4, 7, 6), 1),
    "empty": (conv(3), (0, 4, 7, 6), 1),
    "2d, bfloat16": (conv(3, dtype=torch.bfloat16), (3, 4, 7, 6), 1),
    "complex": (lambda: nn.Conv1d(2, 3, 2, dtype=torch.complex64), (3, 2, 5), 0),
    "cast to complex": (lambda: Using(lambda x, a: (x + 0j) @ a.weight.to(torch.complex64),
                                      nn.Linear(4, 4, bias=False)), (3, 4), 1),
    "3d": (lambda: nn.Conv3d(2, 3, 3, dilation=(1, 2, 1)), (2, 2, 5, 6, 5), 1),
    "transposed": (lambda: nn.ConvTranspose2d(4, 6, 3, 2, 1, groups=2), (3, 4, 7, 6), 1),
    "computed bias": (lambda: Using(lambda x, c: F.conv2d(x, c.weight, c.bias * 2), conv(3)()),
                      (3, 4, 7, 6), 0),  # oneDNN has no gradient of the bias alone
    "cnn": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(True),
                                  nn.Flatten(), nn.Linear(144, 5)), (5, 3, 8, 8), 2),
    "mlp": (lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Dropout(0.3),
                                  nn.Linear(16, 3)), (3, 4, 8), 2),
    "attention": (lambda: attention(dropout=0.3, batch_first=True), (3, 5, 8), 2),
    "attention, no bias": (lambda: attention(bias=False, add_zero_attn=True), (3, 5, 8), 2),
    "attention, other keys": (lambda: attention(kdim=6, add_bias_kv=True), (3, 5, 8), 4),
    "encoder": (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (3, 5, 8), 4),
    "decoder": (decoder, (3, 2, 8), 5),
    "lstm": (lambda: Using(lambda x, a, b: b(a(x)[0]), nn.LSTM(8, 5, 2), nn.Linear(5, 3)),
             (4, 2, 8), 1),
    "checkpoint": (lambda: checkpointed(False), (3, 5), 2),
    "reentrant checkpoint": (lambda: checkpointed(True), (3, 5), 0),  # wants no chosen leaves
    "stopped": (lambda: Using(lambda x, a: Stop.apply(a(x), x), nn.Linear(4, 4)), (3, 4), 0),
    "hooks of a layer": (lambda: nn.Sequential(Using(counted, nn.Linear(5, 4)), nn.Linear(4, 3)),
                         (3, 5), 1),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning", "error:Casting complex")
@pytest.mark.parametrize("needs_gradient", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_halves_leave_what_the_whole_leaves(name, needs_gradient):
    make, shape, count = CASES[name]
    module = make()
    if name == "frozen weight":
        module[1].weight.requires_grad_(False)
        count = 1
    if needs_gradient is False and name in ("stopped", "reentrant checkpoint"):
        pytest.skip("nothing goes back")
    x = torch.randn(shape, dtype=next(module.parameters()).dtype)
    assert_splits(module, x.requires_grad_(needs_gradient), count)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["more dimensions", "mlp", "1d", "transposed", "encoder"])
def test_autocast(name, dtype):
    make, shape, count = CASES[name]
    x = torch.randn(shape, requires_grad=True)
    # (A leaf would be converted once for all.)
    module = Using(lambda x, a, b: a(x * 2) * in_full(x, b).sum(), make(), nn.Linear(shape[-1], 3))
    assert_splits(module, x, count + 1, dtype=dtype)


@pytest.mark.parametrize(
    "gy", [torch.ones(()).expand(7, 3, 4), torch.randn(4, 3, 7).permute(2, 1, 0)]
)
def test_gradients_of_any_layout(gy):
    assert_splits(nn.Linear(5, 4), torch.randn(7, 3, 5, requires_grad=True), 1, gy)


@pytest.mark.parametrize("when", ["before forward", "after forward"])
@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_a_weight_see_its_gradient_once(kind, when):
    layer, x, seen, weights = nn.Linear(5, 4), torch.randn(3, 5), [], WeightGradients()
    y = layer(x).sum() if when == "after forward" else None
    getattr(layer.weight, kind)(lambda tensor: seen.append(tensor) or None)
    weights.go_back([layer(x).sum() if y is None else y], [torch.ones(())])
    assert not weights.pending
    assert len(seen) == 1
    assert layer.weight.grad is not None


class Sub(Tensor):
    pass


def test_tensor_subclasses_and_meta_tensors():
    layer = nn.Linear(5, 4)
    assert_splits(layer, torch.randn(3, 5).as_subclass(Sub), 1)
    layer.weight = nn.Parameter(torch.randn(4, 5).as_subclass(Sub))
    assert_splits(layer, torch.randn(3, 5), 0)
    meta = nn.Sequential(nn.Conv1d(2, 3, 2), nn.Linear(4, 3)).to("meta")
    (_, _, grads), count = run(meta, torch.empty(2, 2, 5, device="meta"), split=True)
    assert count == 2
    assert all(grad.is_meta for grad in grads.values())


def test_a_weight_that_is_given_a_gradient_of_its_own():
    layer, weights = nn.Linear(5, 4), WeightGradients()
    y = layer(torch.ones(3, 5)).sum()
    weights.go_back([y, layer.weight], [torch.ones(()), torch.ones(4, 5)])
    weights.accumulate()
    torch.testing.assert_close(layer.weight.grad, torch.full((4, 5), 4.0))


# -- what is put aside


EXISTING = {
    "plain": torch.ones_like,
    "transposed": lambda p: torch.ones_like(p.mT).mT,
    "strided": lambda p: torch.ones(*p.shape, 2)[..., 0],
    "sparse": lambda p: torch.ones_like(p).to_sparse(),
    "with a graph": lambda p: torch.ones_like(p, requires_grad=True) * 1,
}


@pytest.mark.parametrize("kind", EXISTING)
@pytest.mark.parametrize("layer", [nn.Linear(5, 4), nn.Conv1d(2, 4, 3)], ids=["linear", "conv"])
def test_an_existing_gradient_is_added_to(layer, kind):
    x, module = torch.randn(2, 2, 5), copy.deepcopy(layer)
    (_, _, once), _ = run(layer, x, split=False)
    module.weight.grad = grad = EXISTING[kind](module.weight.detach())
    input_half(module, x, cosine).accumulate()
    torch.testing.assert_close(module.weight.grad.to_dense(), once["weight"] + 1)
    assert module.weight.grad is grad or kind in ("sparse", "with a graph")


@pytest.mark.parametrize("accumulate", [True, False])
def test_what_was_put_aside_holds_no_graph_and_is_let_go(accumulate):
    gc.disable()  # nothing of it may be part of a cycle
    try:
        weights, layers = WeightGradients(), [nn.Linear(5, 6), nn.Linear(6, 4)]
        x = on_gradient(torch.randn(3, 5, requires_grad=True), lambda grad: None)
        y, node = nn.Sequential(*layers)(x).sum(), weakref.ref(x.grad_fn)
        weights.go_back([y], [torch.ones(())])
        held = [cell.cell_contents for half in weights.pending for cell in half.__closure__]
        held = [t for t in held if isinstance(t, Tensor) and not isinstance(t, nn.Parameter)]
        assert [factor.grad_fn for factor in held] == [None] * 4
        references = list(map(weakref.ref, held))
        del x, y, held
        assert node() is None
        assert all(reference() is not None for reference in references)
        if accumulate:
            weights.accumulate()
        else:  # as after an error
            del weights
        assert all(reference() is None for reference in references)
    finally:
        gc.enable()


def test_modifications_are_noticed_before_either_half():
    layer, ones = nn.Linear(5, 5), torch.ones(())
    for what in (layer.weight, x := torch.randn(3, 5, requires_grad=True) * 1):
        y = layer(x).sum()
        with torch.no_grad():
            what.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace"):
            WeightGradients().go_back([y], [ones])
    x = torch.randn(3, 5)
    weights = input_half(layer, x)
    x.mul_(2)
    with pytest.raises(RuntimeError, match=r"\[3, 5\].*\[5, 5\].*modified in place between"):
        weights.accumulate()
    x, weights = torch.randn(3, 5, requires_grad=True), WeightGradients()
    first = on_gradient(x, lambda grad: grad.mul_(2))  # goes back after the layer
    weights.go_back([first + layer(x)], [torch.ones(3, 5)])
    with pytest.raises(RuntimeError, match=r"gradient of the output .*\[3, 5\].*modified in place"):
        weights.accumulate()


def test_train_batch_leaves_products_to_the_weight_halves(monkeypatch):
    counts, accumulate = [], WeightGradients.accumulate

    def counting(self):
        counts.append(len(self.pending))
        accumulate(self)

    monkeypatch.setattr(WeightGradients, "accumulate", counting)
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    pipe = Pipe(layers, [1, 1], devices=["cpu", "cpu"], chunks=4, checkpoint="never")
    pipe.train_batch(torch.randn(8, 4), loss_fn=torch.mean, schedule="zb_h1")
    assert counts == [1] * 8
