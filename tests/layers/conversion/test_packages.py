"""Models of torchvision, timm and transformers, where these are installed, in small sizes."""

from __future__ import annotations

import importlib

import pytest
import torch

from benchmarks.converted import DOCUMENTED, compared
from syncpipe import sequential


def import_with_operators(package: str) -> None:
    """Imports torchvision, without its compiled operators if they are not for this PyTorch."""
    try:
        importlib.import_module(package)
    except RuntimeError:
        for operator in ("nms", "qnms"):
            torch.library.define(
                f"{package}::{operator}", "(Tensor a, Tensor b, float c) -> Tensor"
            )
        importlib.import_module(package)


@pytest.mark.parametrize("name", DOCUMENTED)
def test_outputs_and_gradients_are_those_of_the_model(name):
    made = DOCUMENTED[name]
    try:
        import_with_operators("torchvision")  # the others look at it
        importlib.import_module(made.package)
    except ImportError as error:
        pytest.skip(f"not installed: {error}")
    torch.manual_seed(1)
    model, args, kwargs = made.make(batch=2)
    layers = sequential(model, *args, **kwargs)
    assert list(layers.state_dict()) == list(model.state_dict())
    assert [n for n, _ in layers.named_parameters()] == [n for n, _ in model.named_parameters()]
    _, args, kwargs = made.make(batch=3)
    # Gradients of tied weights are summed in another order.
    assert (
        compared(model, layers, args, kwargs)
        in ("to the bit", "to rounding")[: 1 + ("tied" in name)]
    )
