"""The memory report: its smallest run says something."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.memory import measured, sizes
from benchmarks.models import gpt2_layers
from tests import simulated


@pytest.mark.simulated
@pytest.mark.skipif(
    not torch.accelerator.is_available() and simulated.unavailable() is not None,
    reason="neither accelerators nor simulated ones",
)
def test_a_pipe_that_is_built_has_its_parameters_on_the_devices():
    found = measured("build", True)["rows"][0]
    with torch.device("meta"):
        model = nn.Sequential(*[make() for make in gpt2_layers(**sizes(True)[0])])
    size = sum(p.nbytes for p in model.parameters())
    assert found["host"] >= size
    assert sum(found["device"]) >= size
