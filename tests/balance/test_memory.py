"""What is counted: what layers keep for backward and the most that is alive, also on ``meta``, and
times and memory of devices that are not here.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from syncpipe import LayerSpec
from syncpipe.balance import DeviceSpec, Profile, estimated, profile
from syncpipe.balance.estimate import AsOnGPU
from syncpipe.data.trees import map_tensors
from syncpipe.skip import pop, skippable
from syncpipe.skip.store import use_store
from syncpipe.storage import clones
from tests.fuzz.models import drawn_model
from tests.support.models import Receive, Send
from tests.support.running import Do

FLOAT = 4
KINDS = ["linear", "conv", "batch_norm", "momentum_none", "layer_norm", "tanh", "frozen", "tied"]
KINDS += ["counter", "send", "send_int", "send_none", "receive", "receive_unused", "fork", "join"]
KINDS += ["relu_", "dropout"]


def measured(*layers: nn.Module, sample: Any, **arguments: Any) -> Profile:
    return profile(nn.Sequential(*layers), sample, time=False, **arguments)


def kept(found: Profile) -> list[tuple[float, float]]:
    """Stored and shared bytes of each layer, for the largest micro-batch, as numbers of floats."""
    size = found.sizes[-1]
    return [(x.stored_bytes[size] / FLOAT, x.shared_bytes[size] / FLOAT) for x in found.layers]


# --- layers of which one knows ------------------------------------------------------------------


def parts(x: Tensor) -> Tensor:
    """Stores two views of what it computed, and drops a graph that stored something else."""
    (x * x.exp()).sum()
    a, b = (x + 1).chunk(2, dim=1)
    return a * b


def column(x: Tensor) -> Tensor:
    """Stores more than it shows: the column that exp returned, and all of x."""
    return (x + 1)[:, :1].exp()[:, :1] * x[:, :1]


@skippable(pop=["skip"])
class Square(nn.Module):
    def forward(self, value: Tensor) -> Any:
        return value + (yield pop("skip")).pow(2)


FROZEN = nn.Linear(3, 3).requires_grad_(False)
LEAF = torch.rand(4, 3, requires_grad=True)


@pytest.mark.parametrize(
    ("layers", "sample", "expected"),
    [
        ([nn.Conv1d(2, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(6, 1)], torch.rand(4, 2, 3),
         [(24, 0), (24, 0), (24, 24), (24, 24)]),
        ([nn.Linear(4, 4), Do(parts)], torch.rand(8, 4), [(32, 0), (32, 0)]),
        ([nn.Linear(4, 4), Do(column)], torch.rand(8, 4), [(32, 0), (8 + 32, 0)]),
        ([FROZEN, nn.Sigmoid(), nn.Linear(3, 3), nn.Sigmoid()], torch.rand(4, 3),
         [(0, 0), (0, 0), (12, 0), (12, 0)]),
        ([nn.Sigmoid(), FROZEN], LEAF, [(12, 0), (0, 0)]),
        ([nn.Tanh(), Send(), nn.Linear(3, 3), nn.Linear(3, 3), Square()], LEAF,
         [(12, 0), (12, 12), (12, 12), (24, 12), (12, 12)]),
    ],
    ids=["a view that is passed on", "views of one storage", "storages hold more", "frozen",
         "a leaf", "a skip"],
)  # fmt: skip
def test_what_layers_store(layers: list[nn.Module], sample: Tensor, expected: Any) -> None:
    assert kept(measured(*layers, sample=sample)) == expected


def test_a_part_of_the_sample_counts_as_the_part() -> None:
    found = measured(nn.Linear(3, 3), sample=torch.rand(8, 3), sizes=[1, 2, 8])
    assert found.layers[0].stored_bytes == {1: 12, 2: 24, 8: 96}
    assert found.input_bytes == {1: 12, 2: 24, 8: 96}


# --- any stage of any model ---------------------------------------------------------------------


def stored_by_stage(model: nn.Sequential, i: int, j: int, x: Tensor) -> int:
    """Bytes that autograd keeps for the layers from i to j - 1, counted here and now."""
    own = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)  # kept alive, so that no storage is used twice
        return tensor

    def cut(tensors: list[Tensor]) -> list[Tensor]:
        return clones([t.detach().requires_grad_(t.requires_grad) for t in tensors])

    value: Any = x
    with use_store({}) as store:
        for index, layer in enumerate(model[:j]):
            if index == i:
                value, skips = map_tensors(cut, (value, dict(enumerate(store.values()))))
                store.update(zip(list(store), skips.values(), strict=True))
            if index < i:
                value = layer(value)
            else:
                with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                    value = layer(value)
    pieces = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in saved}
    return sum(size for key, size in pieces.items() if key not in own)


@given(chance=st.randoms(use_true_random=False))
def test_the_sum_for_a_stage(chance: random.Random) -> None:
    spec = drawn_model(chance, most=5, kinds=KINDS)
    x = torch.rand(4, 4, 3)
    layers = profile(spec.build(), x, sizes=[4], time=False).layers
    stored = [layer.stored_bytes[4] for layer in layers]
    shared = [layer.shared_bytes[4] for layer in layers]
    for i in range(len(layers)):
        for j in range(i + 1, len(layers) + 1):
            found = sum(stored[i:j]) - sum(shared[i:j]) + shared[i]
            truth = stored_by_stage(spec.build(), i, j, x)
            assert found >= truth
            if i == 0 or j == len(layers):  # else it may lie between two that store the same
                assert found == truth, (i, j)


# --- the most that is alive ---------------------------------------------------------------------


def peaks(*layers: nn.Module, x: Tensor) -> list[float]:
    found = measured(*layers, sample=x, sizes=[len(x)])
    both = [(layer.forward_peak_bytes, layer.backward_peak_bytes) for layer in found.layers]
    return [max(forward[len(x)], backward[len(x)]) / FLOAT for forward, backward in both]


def test_a_linear_layer_has_both_gradients_and_that_of_its_weight() -> None:
    first, second = nn.Linear(30, 50, bias=False), nn.Linear(50, 70, bias=False)
    first.weight.grad = torch.ones(50, 30)  # of earlier micro-batches, and not of this one
    assert peaks(first, second, x=torch.rand(8, 30)) == [
        8 * 30 + 8 * 50 + 30 * 50,  # nothing goes back to the sample
        8 * 50 + 8 * 70 + 8 * 50 + 50 * 70,
    ]
    assert torch.equal(first.weight.grad, torch.ones(50, 30))


def test_what_else_is_alive_meanwhile() -> None:
    leaf = torch.rand(8, 30).requires_grad_()
    wide = Do(lambda x: x + x.detach().repeat(1, 10)[:, : x.shape[1]])
    stops = Do(lambda x: x.detach()[:, :1] * 1.0)  # nothing goes back through it
    assert peaks(wide, x=leaf) == [8 * 30 * (1 + 10 + 1)]  # what goes and comes for a moment
    x = torch.rand(8, 5, 6).requires_grad_()
    # Output, its gradient, and that of the input; then only one of these: it is stored before.
    assert peaks(nn.Sigmoid(), nn.Flatten(), x=x) == [8 * 30 * 3, 8 * 30]
    # The input of the second is the first one's, which stores it.
    assert peaks(nn.Sigmoid(), stops, x=leaf) == [8 * 30 * 3, 8]
    # Input, hidden values, both gradients, and that of one weight at a time: it is added to.
    two = nn.Sequential(nn.Linear(30, 50, bias=False), nn.Linear(50, 30, bias=False))
    assert peaks(two, x=leaf) == [2 * 8 * 30 + 2 * 8 * 50 + 30 * 50]
    assert peaks(nn.Embedding(9, 5), x=torch.ones(8, 3, dtype=torch.long))[0] > 0
    assert peaks(nn.ReLU(), x=torch.rand(8, 3)) == [2 * 8 * 3]  # nothing goes back


def test_a_backward_in_halves() -> None:
    layer, x = nn.Linear(30, 50, bias=False), torch.rand(8, 30).requires_grad_()
    (found,) = measured(layer, sample=x, sizes=[8]).layers
    kept = 8 * 30 + 8 * 50  # the input, and the gradient of the output
    assert found.halves_bytes[8] == FLOAT * kept
    assert found.input_peak_bytes[8] == FLOAT * (kept + 8 * 30)
    assert found.weight_peak_bytes[8] == FLOAT * kept  # added to the gradient at once
    twice = Do(lambda x: layer(layer(x[:, :30]).repeat(1, 2)[:, :30]))
    twice.layer = layer
    (found,) = measured(twice, sample=x, sizes=[8]).layers  # a weight used twice is not split
    assert found.halves_bytes[8] == found.weight_peak_bytes[8] == 0
    assert found.input_peak_bytes == found.backward_peak_bytes
    assert layer.weight.grad is None


# --- sizes without memory -----------------------------------------------------------------------


def everything() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False),
        nn.BatchNorm2d(8),
        Send(),
        nn.ReLU(inplace=True),
        nn.Dropout(0.0),
        Receive(),
        nn.Flatten(),
        nn.Linear(8 * 36, 5),
    )


def sizes_only(found: Profile) -> list[Any]:
    layers = [
        (
            x.name, x.output_bytes, x.stored_bytes, x.shared_bytes, x.memory(3.0),
            x.forward_peak_bytes, x.backward_peak_bytes, x.input_peak_bytes, x.halves_bytes,
        )
        for x in found.layers
    ]  # fmt: skip
    return [layers, found.skips, found.input_bytes]


def test_meta_measures_the_same_sizes() -> None:
    x = torch.rand(8, 3, 8, 8)
    real = profile(everything(), x, timeout=0.0)
    with torch.device("meta"):
        model = everything()
    for found in (
        profile(model, x),
        profile(everything(), x, device="meta"),
        profile(everything(), x.to("meta")),
    ):
        assert sizes_only(found) == sizes_only(real)
        assert (found.device, found.source) == ("meta", "sizes")
        assert all({*x.forward.values(), *x.backward.values()} == {0.0} for x in found.layers)


# --- devices that are not here ------------------------------------------------------------------

#: Arithmetic alone takes time; memory traffic alone; operators alone.
COMPUTES = DeviceSpec("computes", half=4e12, single=1e12, bandwidth=1e30, launch=0.0)
MOVES = DeviceSpec("moves", half=1e30, single=1e30, bandwidth=1e9, launch=0.0)
LAUNCHES = DeviceSpec("launches", half=1e30, single=1e30, bandwidth=1e30, launch=1.0)


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(*shape, device="meta", dtype=dtype)


def test_matrix_products_take_their_flops_at_a_part_of_the_peak() -> None:
    model = nn.Sequential(nn.Identity(), nn.Linear(300, 500), nn.Linear(500, 300))
    found = estimated(model, meta(8, 300), on=COMPUTES, efficiency=0.25)
    flops = 2 * 8 * 300 * 500
    assert found.layers[2].forward[8] == pytest.approx(flops / 0.25e12)
    assert found.layers[2].backward[8] == pytest.approx(2 * flops / 0.25e12)
    assert found.layers[1].backward[8] == pytest.approx(flops / 0.25e12)  # not to the sample
    assert found.layers[0].forward == {2: 0, 4: 0, 8: 0}
    half = meta(8, 300, dtype=torch.bfloat16)
    found = estimated(model.bfloat16(), half, on=COMPUTES, efficiency=0.25)
    assert found.layers[2].forward[8] == pytest.approx(flops / 1e12)


def test_other_operators_take_what_they_read_and_write_or_a_launch() -> None:
    model = nn.Sequential(nn.Flatten(), nn.ReLU(), nn.Sequential(nn.ReLU(), nn.Sigmoid()))
    times = {
        device.name: [x.forward[8] for x in estimated(model, meta(8, 5, 100), on=device).layers]
        for device in (MOVES, LAUNCHES)
    }
    assert times["moves"] == pytest.approx([0, 2 * 8 * 500 * 4 / 1e9, 4 * 8 * 500 * 4 / 1e9])
    assert times["launches"] == [0, 1, 2]


def test_what_is_estimated_says_so_and_sizes_are_those_of_meta(tmp_path: Any) -> None:
    layers = [LayerSpec(nn.Linear, 40, 50), nn.Dropout(), LayerSpec(nn.Linear, 50, 40)]
    found = estimated(layers, torch.rand(8, 40), on="A100-80GB")
    assert found.source == "estimated"
    assert found.how.startswith("times estimated for A100-80GB, 50 % of its peak")
    found.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == found
    sizes = profile(layers, torch.rand(8, 40), device="meta")
    assert (sizes.source, sizes.how) == ("sizes", "sizes counted on meta")
    for one, other in zip(found.layers, sizes.layers, strict=True):
        assert one.stored_bytes == other.stored_bytes
        assert one.backward_peak_bytes == other.backward_peak_bytes
        assert one.forward[8] > 0 == other.forward[8]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"on": "H1000"}, "on='H1000' is unknown; known are V100-16GB, "),
        ({"on": 80}, "on=80 is unknown"),
        ({"on": "H100", "efficiency": 0}, "efficiency=0"),
        ({"on": "H100", "efficiency": 1.5}, "efficiency=1.5"),
        ({"on": "H100", "dtype": torch.float64}, "speed of H100 in torch.float64 is unknown"),
    ],
)
def test_what_is_unknown_is_refused(arguments: dict[str, Any], message: str) -> None:
    dtype = arguments.pop("dtype", torch.float32)
    with pytest.raises(ValueError, match=message):
        estimated(nn.Sequential(nn.Linear(2, 2, dtype=dtype)), meta(2, 2, dtype=dtype), **arguments)
    for wrong in ({"bandwidth": 0}, {"launch": -1}):
        with pytest.raises(ValueError, match="of mine must be positive"):
            DeviceSpec("mine", **{"half": 1e12, "single": 1e12, "bandwidth": 1e9, **wrong})


# --- meta stores what a GPU does ----------------------------------------------------------------


class Attention(nn.Module):
    """Attention of a tensor to itself, eight heads."""

    def __init__(self, dropout: float = 0.0, mask: bool = False) -> None:
        super().__init__()
        self.dropout, self.mask = dropout, mask

    def forward(self, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (8, -1)).transpose(1, 2)
        tokens = x.shape[1]
        mask = x.new_ones(tokens, tokens, dtype=torch.bool).tril() if self.mask else None
        return F.scaled_dot_product_attention(
            heads, heads, heads, mask, self.dropout, is_causal=not self.mask
        )


def stored(layer: nn.Module, x: Tensor, device: str = "meta") -> float:
    (found,) = measured(layer, sample=x.requires_grad_(), device=device).layers
    return found.stored_bytes[len(x)]


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_stores_nothing_for_each_pair_of_tokens(
    dtype: torch.dtype, dropout: float
) -> None:
    x = torch.empty(2, 512, 64, dtype=dtype)
    # Input and output, and for each head and token the logarithm of a sum; two random numbers.
    expected = 2 * x.numel() * x.element_size() + 2 * 8 * 512 * 4
    assert 0 <= stored(Attention(dropout), x) - expected <= 32


def test_attention_of_other_kinds() -> None:
    x = torch.empty(2, 512, 64)
    pairs = 2 * 8 * 512 * 512 * 4
    fused = stored(Attention(), x)
    assert 0 <= fused - stored(Attention(), torch.rand(2, 512, 64), "cpu") <= 32
    assert 0 <= stored(Attention(mask=True), x) - fused - 512 * 512 * 4 <= 32  # keeps the mask
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert stored(Attention(), x) > pairs
    assert stored(Attention(), torch.empty(2, 512, 64, dtype=torch.float64)) > pairs
    encoder = nn.TransformerEncoderLayer(64, 8, 128, batch_first=True)
    assert stored(encoder, torch.empty(2, 512, 64)) < pairs


def test_dropout_and_normalization() -> None:
    assert stored(nn.Dropout(), torch.empty(4, 100)) == 400  # a byte for each number
    # Its input and two numbers for each row, where a GPU stores one.
    assert stored(nn.RMSNorm(50), torch.empty(4, 50)) == 4 * 50 * 4 + 2 * 4 * 4


def test_what_is_not_on_meta_is_as_it_was() -> None:
    q = torch.rand(2, 8, 16, 8)
    for function in (
        lambda: F.scaled_dot_product_attention(q, q, q),
        lambda: F.dropout(q, 0.5, True),
        lambda: F.rms_norm(q, [8]),
        lambda: F.multi_head_attention_forward(
            q[0], q[0], q[0], 8, 2, torch.ones(24, 8), None, None, None, False, 0.0,
            torch.eye(8), None,
        )[0],
    ):  # fmt: skip
        torch.manual_seed(0)
        expected = function()
        torch.manual_seed(0)
        with AsOnGPU():
            assert torch.equal(function(), expected)
