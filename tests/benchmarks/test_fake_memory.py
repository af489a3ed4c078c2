"""Memory that is counted without values is that of a real run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.counted import actual_peaks
from benchmarks.models import resnet

SAMPLES, CHUNKS = 2, 4


def mlp() -> nn.Sequential:
    blocks = [[nn.Linear(16, 16), nn.ReLU()] for _ in range(3)]
    return nn.Sequential(*(layer for block in blocks for layer in block))


MODELS: dict[str, Any] = {
    "mlp": (mlp, (16,), [2, 2, 2], 16),
    "resnet": (lambda: resnet((1, 1), channels=8, num_classes=5), (3, 16, 16), [5, 5, 4], 5),
}


@pytest.mark.parametrize(
    ("name", "schedule", "checkpoint"),
    [
        ("mlp", "1f1b", "except_last"),
        ("mlp", "gpipe", "always"),
        ("resnet", "gpipe", "always"),
        ("resnet", "1f1b", "never"),
    ],
)
def test_bytes_without_values_are_those_of_a_real_run(name, schedule, checkpoint):
    build, shape, balance, width = MODELS[name]

    def batch(samples, first, last):
        return torch.rand(samples, *shape, device=first), torch.zeros(samples, width, device=last)

    with torch.device("meta"):
        on_meta = build()
    settings = {"samples": SAMPLES, "m": CHUNKS, "schedule": schedule, "checkpoint": checkpoint}
    fake = actual_peaks(on_meta, balance, batch, F.mse_loss, fake=True, **settings)
    real = actual_peaks(build(), balance, batch, F.mse_loss, fake=False, **settings)
    assert fake == real
    assert all(fake[0])
