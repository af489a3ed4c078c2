"""Layers are built on their devices: nothing of them is ever on the host."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.counted import HostBytes
from syncpipe import LayerSpec, Pipe, TiedLayerSpec
from syncpipe.balance import profile
from tests import simulated

pytestmark = pytest.mark.gpu

A, B = simulated.devices(2)
WIDTH = 256
LAYER = 4 * (WIDTH * WIDTH + WIDTH)


@pytest.fixture(autouse=True)
def all_memory_is_this_tests() -> None:
    """What others left in cycles would go in the middle of it."""
    gc.collect()


def specs() -> list[Any]:
    return [LayerSpec(nn.Linear, WIDTH, WIDTH) for _ in range(6)]


def on_meta() -> list[nn.Module]:
    with torch.device("meta"):
        return [nn.Linear(WIDTH, WIDTH) for _ in range(6)]


def twos(module: nn.Module) -> None:
    module.weight = nn.Parameter(torch.full((WIDTH, WIDTH), 2.0))


@pytest.mark.parametrize("how", [{"seed": None}, {"seed": 3}, {"init_fn": twos}])
@pytest.mark.parametrize("layers", [specs, on_meta])
def test_layers_come_to_be_on_their_devices(layers: Any, how: dict[str, Any]) -> None:
    before = [simulated.live_bytes(device) for device in (A, B)]
    with HostBytes() as host:
        pipe = Pipe(layers(), "parameters", devices=[A, B], **how)
        most = host.most
    assert most < LAYER / 4  # states of generators
    live = [simulated.live_bytes(device) for device in (A, B)]
    for now, earlier in zip(live, before, strict=True):
        assert 3 * LAYER <= now - earlier < 3.5 * LAYER
    assert [p.device for p in pipe.parameters()] == [A] * 6 + [B] * 6
    assert all(p.isfinite().all() for p in pipe.parameters())


@pytest.mark.parametrize("layers", [specs, on_meta])
def test_every_balance_starts_from_the_same_weights(layers: Any) -> None:
    states = []
    for balance, devices in [([6], [B]), ([2, 4], [A, B]), ([1, 1, 4], [B, A, B])]:
        generators = [torch.get_device_module(A).default_generators[k] for k in range(2)]
        before = [generator.get_state() for generator in generators]
        pipe = Pipe(layers(), balance, devices=devices, seed=7)
        assert all(map(torch.equal, before, [g.get_state() for g in generators]))
        states.append([p.cpu() for p in pipe.parameters()])
    assert all(map(torch.equal, states[0], states[1]))
    assert all(map(torch.equal, states[0], states[2]))


def test_layers_are_measured_on_the_device_one_after_another() -> None:
    x = torch.randn(4, WIDTH, device=A)
    before = simulated.live_bytes(A)
    with HostBytes() as host:
        profile(specs(), x, timeout=0.0)
        assert host.most < LAYER / 4
    assert simulated.live_bytes(A) == before


def test_a_layer_with_values_in_part_is_measured() -> None:
    layer = nn.Sequential(nn.Linear(WIDTH, WIDTH), *on_meta()[:1])
    found = profile([layer], torch.randn(4, WIDTH, device=A), timeout=0.0, device=A)
    assert found.layers[0].parameter_bytes == 2 * LAYER


def test_a_move_that_does_not_fit_is_taken_back() -> None:
    pipe = Pipe([nn.Linear(WIDTH, WIDTH) for _ in range(4)], [1, 3], devices=[A, A])
    x = torch.randn(2, WIDTH, device=A)
    expected = pipe(x)
    with simulated.capacity(B, 5 * LAYER // 2), pytest.raises(torch.OutOfMemoryError):
        pipe.devices = [A, B]
    assert [p.device for p in pipe.parameters()] == [A] * 8
    assert pipe.devices == [A, A]
    assert torch.equal(pipe(x), expected)


def tied_specs() -> list[Any]:
    spec = TiedLayerSpec("a", nn.Linear, WIDTH, WIDTH)
    return [spec, torch.tanh, spec]


def tied_on_meta() -> nn.Sequential:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        model[2].weight = model[0].weight
    return model


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("layers", [tied_specs, tied_on_meta])
def test_a_tied_weight_is_on_the_device_of_its_owner(layers: Any, seed: int | None) -> None:
    before = [simulated.live_bytes(device) for device in (A, B)]
    pipe = Pipe(layers(), [1, 2], devices=[A, B], seed=seed)
    assert pipe[2].weight is pipe[0].weight
    assert pipe[0].weight.device == A
    live = [simulated.live_bytes(device) for device in (A, B)]
    assert live[0] - before[0] < 1.5 * LAYER
    assert live[1] - before[1] < 0.5 * LAYER
    pipe(torch.randn(4, WIDTH, device=A)).sum().backward()
    assert pipe[0].weight.grad is not None
