"""The most that is alive while a layer runs: counted to the byte."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from syncpipe.balance import Profile, profile


def peaks(*layers: nn.Module, x: Tensor, device: str | None = None) -> list[int]:
    found = profile(nn.Sequential(*layers), x, sizes=[len(x)], device=device, time=False)
    return [int(layer.peak_bytes[len(x)]) for layer in found.layers]


@pytest.mark.parametrize("device", [None, "meta"])
def test_a_linear_layer_has_both_gradients_and_that_of_its_weight(device: str | None) -> None:
    first, second = peaks(
        nn.Linear(30, 50, bias=False), nn.Linear(50, 70, bias=False), x=torch.rand(8, 30),
        device=device,
    )  # fmt: skip
    assert first == 4 * (8 * 30 + 8 * 50 + 30 * 50)  # nothing goes back to the sample
    assert second == 4 * (8 * 50 + 8 * 70 + 8 * 50 + 50 * 70)


def test_gradients_of_earlier_micro_batches_are_not_of_this_one() -> None:
    layer = nn.Linear(30, 50, bias=False)
    layer.weight.grad = torch.ones(50, 30)
    assert peaks(layer, x=torch.rand(8, 30)) == [4 * (8 * 30 + 8 * 50 + 30 * 50)]
    assert torch.equal(layer.weight.grad, torch.ones(50, 30))


def test_what_goes_and_comes_for_a_moment_counts() -> None:
    class Wide(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + x.detach().repeat(1, 10)[:, : x.shape[1]]

    x = torch.rand(8, 30).requires_grad_()
    assert peaks(Wide(), x=x) == [4 * 8 * 30 * (1 + 10 + 1)]


def test_an_input_that_the_layer_before_stores_counts_there() -> None:
    x = torch.rand(8, 5, 6).requires_grad_()
    sigmoid, flatten = peaks(nn.Sigmoid(), nn.Flatten(), x=x)
    assert sigmoid == 4 * 8 * 30 * 3  # output, its gradient, and that of the input
    assert flatten == 4 * 8 * 30  # the gradient of its output, or of its input


def test_a_layer_without_a_way_back() -> None:
    assert peaks(nn.Embedding(9, 5), x=torch.ones(8, 3, dtype=torch.long))[0] > 0
    assert peaks(nn.ReLU(), x=torch.rand(8, 3)) == [2 * 4 * 8 * 3]


def test_old_files_have_none(tmp_path: Path) -> None:
    found = profile(nn.Sequential(nn.ReLU()), torch.rand(2, 3), time=False)
    path = tmp_path / "old.json"
    found.save(path)
    data = json.loads(path.read_text())
    data["syncpipe_profile"] = 1
    del data["source"], data["layers"][0]["peak_bytes"]
    data["layers"][0].pop("weight_share", None)
    path.write_text(json.dumps(data))
    old = Profile.load(path)
    assert old.layers[0].peak_bytes == {}
    assert old.source == ""
    assert old.layers[0].stored_bytes == found.layers[0].stored_bytes
