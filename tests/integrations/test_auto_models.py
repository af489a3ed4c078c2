"""``Pipe.auto`` on models of torchvision, timm and transformers; the others are in tests/auto."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from benchmarks.converted import MODELS
from syncpipe import Pipe
from tests.auto.models import BATCH, FEW, assert_trains, made

NAMES = ["torchvision DenseNet-121", "torchvision MobileNetV3", "timm ViT-Ti/16",
         "timm ConvNeXt-A", "HF GPT-2 (tied)", "HF BERT (mask)", "HF Llama (mask)"]  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES)
def test_it_fits_and_trains(name, capsys):
    """On two workers, neither of which holds the parameters with Adam; without dropout."""
    pytest.importorskip(MODELS[name].package)
    model, args, kwargs = made(lambda: MODELS[name].make(FEW))
    plain = copy.deepcopy(model.eval())
    size = 4 * sum(parameter.nbytes for parameter in model.parameters())
    call: dict[str, Any] = {
        "batch_size": BATCH, "devices": ["cpu:0", "cpu:1"], "timeout": 0.0,
        "memory": [0.6 * size + 100e6, 0.9 * size + 100e6], **kwargs,
    }  # fmt: skip
    assert_trains(Pipe.auto(model, *args, **call), plain, args, kwargs)
    assert capsys.readouterr().out.startswith("fits: ")
