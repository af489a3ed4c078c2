"""The weight half of a backward is measured, or known from the operators."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import syncpipe
import syncpipe.balance.profiling.profiler as profiler
from syncpipe.balance import DeviceSpec, LayerProfile, Profile, estimated, profile


def model() -> nn.Sequential:
    frozen = nn.Linear(512, 512).requires_grad_(False)
    return nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512), frozen)


def test_only_layers_that_are_trained_have_a_weight_half(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiler.clock, "monotonic", lambda: 0.0)  # there is always time
    monkeypatch.setattr(profiler, "MOST", 1)
    layers = profile(model(), torch.randn(64, 512), sizes=[64], timeout=1).layers
    first, relu, second, frozen = (layer.weight_share for layer in layers)
    assert relu == frozen == 0
    assert first is not None
    assert second is not None
    assert 0 < first <= 1
    assert 0 < second <= 1


def test_without_time_nobody_knows() -> None:
    layers = profile(model(), torch.randn(64, 512), timeout=0).layers
    assert layers[2].weight_share is None
    sizes = profile(model(), torch.randn(64, 512), time=False).layers
    assert sizes[2].weight_share is None


def test_of_operators_it_is_estimated() -> None:
    fast = DeviceSpec("d", half=1.0, single=1.0, bandwidth=1e30, launch=0.0)
    layers = estimated(model(), torch.randn(64, 512), on=fast).layers
    assert layers[2].weight_share == pytest.approx(0.5)  # two products of one size


def test_the_halves_of_a_plan_are_those_of_its_profile() -> None:
    def planned(share: float | None) -> syncpipe.planner.Plan:
        layers = [
            LayerProfile(str(k), {8: 1e-3}, {8: 2e-3}, {8: 10}, {8: 10}, parameter_bytes=8,
                         weight_share=share)
            for k in range(4)
        ]  # fmt: skip
        return syncpipe.plan(
            Profile(tuple(layers)), devices="2 x 1GB, 1GB/s", batch_size=32, chunks=4,
            schedule="zb_h1",
        )  # fmt: skip

    costs = planned(0.75).simulation.costs
    assert costs.backward_weight == pytest.approx([0.75 * 2 * 2e-3] * 2)
    assert costs.backward_input == pytest.approx([0.25 * 2 * 2e-3] * 2)
    assert "are estimated" not in str(planned(0.75))
    assert "are estimated" in str(planned(None))
