"""Profiles of devices that are not here: what is computed and moved, by the figures of a device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from syncpipe import LayerSpec
from syncpipe.balance import DEVICES, DeviceSpec, Profile, estimated, profile
from syncpipe.balance.estimate import AsOnGPU

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
    found = estimated(layers, torch.rand(8, 40), on="a100 80gb")
    assert found.source == "estimated"
    assert found.how.startswith("times estimated for A100-80GB, 50 % of its peak")
    found.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == found
    sizes = profile(layers, torch.rand(8, 40), device="meta")
    assert (sizes.source, sizes.how) == ("sizes", "sizes counted on meta")
    for one, other in zip(found.layers, sizes.layers, strict=True):
        assert one.stored_bytes == other.stored_bytes
        assert one.peak_bytes == other.peak_bytes
        assert one.forward[8] > 0 == other.forward[8]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"on": "H1000"}, "on='H1000' is unknown; there are V100-16GB, "),
        ({"on": 80}, "on=80 is unknown"),
        ({"on": "H100", "efficiency": 0}, "efficiency=0"),
        ({"on": "H100", "efficiency": 1.5}, "efficiency=1.5"),
        ({"on": "H100", "dtype": torch.float64}, "H100 computes in torch.float64 is unknown"),
    ],
)
def test_what_is_unknown_is_refused(arguments: dict[str, Any], message: str) -> None:
    dtype = arguments.pop("dtype", torch.float32)
    with pytest.raises(ValueError, match=message):
        estimated(nn.Sequential(nn.Linear(2, 2, dtype=dtype)), meta(2, 2, dtype=dtype), **arguments)


def test_figures_of_devices_are_checked() -> None:
    for wrong in ({"bandwidth": 0}, {"launch": -1}):
        with pytest.raises(ValueError, match="of mine is no such figure"):
            DeviceSpec("mine", **{"half": 1e12, "single": 1e12, "bandwidth": 1e9, **wrong})
    assert all(spec.half >= spec.single and spec.name == name for name, spec in DEVICES.items())


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


def stored(layer: nn.Module, x: Tensor, device: str | None = "meta") -> int:
    (found,) = profile(
        nn.Sequential(layer), x.requires_grad_(), sizes=[len(x)], device=device, time=False
    ).layers
    return int(found.stored_bytes[len(x)])


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
