"""What layers keep for backward, counted once, and the most that is alive; sizes on ``meta``."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from syncpipe.balance import Profile, profile
from syncpipe.data import clones, map_tensors
from syncpipe.skip import pop, skippable
from syncpipe.skip.store import use_store
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
    return [layer.peak_bytes[len(x)] / FLOAT for layer in found.layers]


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
        (x.name, x.output_bytes, x.stored_bytes, x.shared_bytes, x.peak_bytes, x.memory(3.0))
        for x in found.layers
    ]
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


def in_fake_mode() -> nn.Module:
    with FakeTensorMode():
        return nn.Linear(3, 3)


@pytest.mark.parametrize(
    ("layer", "arguments", "error", "message"),
    [
        (Do(lambda x: x * x.sum().item()), {"device": "meta"}, RuntimeError,
         r"layer '1' \(Do\) needs the values.*a GPU"),
        (Do(lambda x: x[x > 0.5]), {"device": "meta"}, RuntimeError, r"'1' \(Do\) needs the value"),
        (nn.Linear(4, 4), {"device": "meta"}, RuntimeError, r"shape|size|dim"),
        (nn.ReLU(), {"device": "cpu", "sample": torch.rand(4, 3, device="meta")}, ValueError,
         r"device='cpu'.*sample is on meta"),
        (in_fake_mode(), {}, ValueError, r"FakeTensorMode.*torch.device\('meta'\)"),
    ],
)  # fmt: skip
def test_what_cannot_be_measured_without_values(
    layer: nn.Module, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    model = nn.Sequential(nn.Linear(3, 3), layer)
    with pytest.raises(error, match=message):
        profile(model, **{"sample": torch.rand(4, 3), **arguments})
