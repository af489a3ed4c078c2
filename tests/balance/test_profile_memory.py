"""What layers keep for backward, counted once; and sizes without any memory, on meta and fake."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from syncpipe.balance.by_cost import balance_by_size, balance_by_time
from syncpipe.balance.measure import profile
from syncpipe.balance.profile import Profile
from syncpipe.data import clones, map_tensors, tensors_in
from syncpipe.skip import pop, skippable
from syncpipe.skip.store import use_store
from tests.support.models import LAYERS, SENDS, Receive, Send, Spec

FLOAT = 4
KINDS = [*LAYERS, *SENDS, "receive", "receive_unused", "fork", "join", "inplace", "dropout"]


def measured(*layers: nn.Module, sample: Any, **arguments: Any) -> Profile:
    return profile(nn.Sequential(*layers), sample, time=False, **arguments)


def kept(found: Profile) -> list[tuple[float, float]]:
    """Stored and shared bytes of each layer, for the largest micro-batch, as numbers of floats."""
    size = found.sizes[-1]
    return [(x.stored_bytes[size] / FLOAT, x.shared_bytes[size] / FLOAT) for x in found.layers]


# --- layers of which one knows ------------------------------------------------------------------


def test_linear_stores_its_input_and_relu_its_output() -> None:
    found = measured(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2), sample=torch.rand(4, 3))
    assert kept(found) == [(12, 0), (20, 0), (20, 20)]


def test_what_a_layer_passes_on_as_a_view() -> None:
    layers = [nn.Conv1d(2, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(6, 1)]
    found = measured(*layers, sample=torch.rand(4, 2, 3))
    assert kept(found) == [(24, 0), (24, 0), (24, 24), (24, 24)]


def test_a_view_at_the_end_passes_nothing_on() -> None:
    found = measured(nn.Linear(3, 3), nn.ReLU(), nn.Flatten(0), sample=torch.rand(4, 3))
    assert kept(found) == [(12, 0), (12, 0), (0, 0)]


def test_a_layer_in_place_stores_what_it_was_given() -> None:
    layers = [nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 3)]
    assert kept(measured(*layers, sample=torch.rand(4, 3))) == [(12, 0), (12, 0), (12, 12)]


class Parts(nn.Module):
    """Stores two views of what it computed, and drops a graph that stored something else."""

    def forward(self, x: Tensor) -> Tensor:
        (x * x.exp()).sum()
        a, b = (x + 1).chunk(2, dim=1)
        return a * b


def test_views_of_one_storage_count_once() -> None:
    found = measured(nn.Linear(4, 4), Parts(), sample=torch.rand(8, 4))
    assert kept(found)[1] == (32, 0)


def test_frozen_layers_store_nothing_before_one_that_is_trained() -> None:
    frozen = nn.Linear(3, 3).requires_grad_(False)
    found = measured(frozen, nn.Sigmoid(), nn.Linear(3, 3), nn.Sigmoid(), sample=torch.rand(4, 3))
    assert kept(found) == [(0, 0), (0, 0), (12, 0), (12, 0)]
    assert [layer.frozen_bytes for layer in found.layers] == [4 * 12, 0, 0, 0]


def test_an_input_that_needs_a_gradient() -> None:
    layer = nn.Linear(3, 3).requires_grad_(False)
    x = torch.rand(4, 3, requires_grad=True)
    assert kept(measured(nn.Sigmoid(), layer, sample=x)) == [(12, 0), (0, 0)]


def test_a_part_of_the_sample_counts_as_the_part() -> None:
    found = measured(nn.Linear(3, 3), sample=torch.rand(8, 3), sizes=[1, 2, 8])
    assert found.layers[0].stored_bytes == {1: 12, 2: 24, 8: 96}
    assert found.input_bytes == {1: 12, 2: 24, 8: 96}


def test_a_skip_that_is_stored_at_both_ends() -> None:
    @skippable(pop=["skip"])
    class Square(nn.Module):
        def forward(self, value: Tensor) -> Any:
            return value + (yield pop("skip")).pow(2)

    layers = [nn.Tanh(), Send(), nn.Linear(3, 3), nn.Linear(3, 3), Square()]
    found = measured(*layers, sample=torch.rand(4, 3, requires_grad=True))
    assert kept(found) == [(12, 0), (12, 12), (12, 12), (24, 12), (12, 12)]


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
    blocks = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in saved}
    return sum(size for block, size in blocks.items() if block not in own)


@given(st.builds(Spec, st.lists(st.sampled_from(KINDS), min_size=2, max_size=7).map(tuple)))
def test_the_sum_for_a_stage(spec: Spec) -> None:
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


# --- sizes without memory -----------------------------------------------------------------------


def everything(dropout: float = 0.5) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False),
        nn.BatchNorm2d(8),
        Send(),
        nn.ReLU(inplace=True),
        nn.Dropout(dropout),
        Receive(),
        nn.Flatten(),
        nn.Linear(8 * 36, 5),
    )


def sizes_only(found: Profile) -> list[Any]:
    layers = [
        (
            x.name,
            x.output_bytes,
            x.stored_bytes,
            x.shared_bytes,
            x.peak_bytes,
            x.memory(3.0),
        )
        for x in found.layers
    ]
    return [layers, found.skips, found.input_bytes]


def test_meta_measures_the_same_sizes() -> None:
    x = torch.rand(8, 3, 8, 8)
    real = profile(everything(0.0), x, timeout=0.0)
    with torch.device("meta"):
        model = everything(0.0)
    for found in (
        profile(model, x),
        profile(everything(0.0), x, device="meta"),
        profile(everything(0.0), x.to("meta")),
    ):
        assert sizes_only(found) == sizes_only(real)
        assert found.device == "meta"
        assert all({*x.forward.values(), *x.backward.values()} == {0.0} for x in found.layers)


def test_fake_tensors_measure_the_same_sizes() -> None:
    x = torch.rand(8, 3, 8, 8)
    mode = FakeTensorMode()
    with mode:
        model, fake = everything(), torch.rand(8, 3, 8, 8)
        inside = profile(model, fake)
    for found in (inside, profile(model, fake), profile(model, x)):
        assert sizes_only(found) == sizes_only(profile(everything(), x, time=False))
        assert found.device == "fake cpu"
    assert torch.rand(1).item() >= 0  # the mode is over


def test_a_model_of_a_hundred_billion_parameters() -> None:
    with torch.device("meta"):
        block = [nn.TransformerEncoderLayer(12288, 96, 49152, batch_first=True) for _ in range(56)]
        model = nn.Sequential(nn.Embedding(50000, 12288), *block)
        tokens = torch.zeros(8, 2048, dtype=torch.long)
    found = profile(model, tokens, sizes=[1])
    assert sum(layer.parameter_bytes for layer in found.layers) > 4 * 100e9
    assert balance_by_size(2, model, tokens, chunks=8, param_scale=4.0) in ([28, 29], [29, 28])


def test_no_time_is_measured_where_there_is_none() -> None:
    with pytest.raises(ValueError, match=r"on meta.*balance_by_size"):
        balance_by_time(2, everything(), torch.rand(8, 3, 8, 8), device="meta")


class Values(nn.Module):
    """Needs to know what is in a tensor."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        return x * x.sum().item() if self.how == "item" else x[x > 0.5]


@pytest.mark.parametrize("how", ["item", "mask"])
@pytest.mark.parametrize("where", ["meta", "fake"])
def test_a_layer_that_needs_values(how: str, where: str) -> None:
    if where == "fake":
        with FakeTensorMode():
            model = nn.Sequential(nn.Linear(3, 3), Values(how))
    else:
        model = nn.Sequential(nn.Linear(3, 3), Values(how)).to("meta")
    with pytest.raises(RuntimeError, match=rf"layer '1' \(Values\) needs the values.*{where}"):
        profile(model, torch.rand(4, 3))


def test_another_error_on_meta_stays_what_it_is() -> None:
    with pytest.raises(RuntimeError, match=r"shape|size|dim"):
        profile(nn.Sequential(nn.Linear(3, 3), nn.Linear(4, 4)), torch.rand(4, 3), device="meta")


def test_a_sample_without_values_cannot_be_given_any() -> None:
    with pytest.raises(ValueError, match=r"device='cpu'.*sample is on meta"):
        profile(everything(), torch.rand(8, 3, 8, 8, device="meta"), device="cpu")


def test_storages_hold_what_tensors_do_not_show() -> None:
    class Cut(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x + 1)[:, :1].exp()[:, :1] * tensors_in([x])[0][:, :1]

    found = measured(nn.Linear(4, 4), Cut(), sample=torch.rand(8, 4))
    assert kept(found)[1] == (8 + 32, 0)  # the column that exp returned, and all of x


def test_fake_and_real_tensors_are_not_mixed() -> None:
    with FakeTensorMode():
        fake, sample = nn.Linear(3, 3), torch.rand(4, 3)
    with FakeTensorMode():
        other = torch.rand(4, 3)
    with pytest.raises(ValueError, match="not all of the model are"):
        profile(nn.Sequential(fake, nn.Linear(3, 3)), sample)
    with pytest.raises(ValueError, match="two FakeTensorModes"):
        profile(nn.Sequential(fake), other)
