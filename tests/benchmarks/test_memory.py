"""The memory report: its models are those that it names, and its smallest run says something."""

from __future__ import annotations

import pytest
import torch

from benchmarks.memory.models import ENTRIES
from benchmarks.memory.parts import measured
from tests import simulated


@pytest.mark.parametrize(("name", "millions"), [("gpt2", 163.04), ("resnet50", 25.56)])
def test_the_models_have_their_published_sizes(name, millions):
    with torch.device("meta"):
        model = ENTRIES[name](False).build()
    assert round(sum(p.numel() for p in model.parameters()) / 1e6, 2) == millions


@pytest.mark.parametrize("name", ENTRIES)
def test_each_mode_trains_the_same_model(name):
    entry = ENTRIES[name](True)
    x, target = entry.batch()
    assert sum(entry.balance) == len(entry.layers)
    assert entry.loss(entry.build()(x), target).requires_grad


@pytest.mark.simulated
@pytest.mark.skipif(
    not torch.accelerator.is_available() and simulated.unavailable() is not None,
    reason="neither accelerators nor simulated ones",
)
def test_a_pipe_that_is_built_has_its_parameters_on_the_devices():
    found = measured("gpt2", "build", True)["rows"][0]
    with torch.device("meta"):
        model = ENTRIES["gpt2"](True).build()
    size = sum(p.nbytes for p in model.parameters())
    assert found["host"] >= size
    assert sum(found["device"]) >= size
