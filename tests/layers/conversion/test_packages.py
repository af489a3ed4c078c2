"""Models of torchvision, timm and transformers, where these are installed, in small sizes."""

from __future__ import annotations

import copy
import importlib
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.models.converted import DOCUMENTED, Model
from syncpipe import Pipe, sequential
from tests.support.models import assert_same_tree


def made(name: str) -> Model:
    try:
        import_with_operators("torchvision")  # the others look at it
        importlib.import_module(DOCUMENTED[name].package)
    except ImportError as error:
        pytest.skip(f"not installed: {error}")
    torch.manual_seed(1)
    return DOCUMENTED[name]


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


def tensors_of(output: Any) -> list[Tensor]:
    found = [output] if isinstance(output, Tensor) else list(output.values())
    return [value for value in found if isinstance(value, Tensor)]


def loss_fn(output: Any) -> Tensor:
    return sum(value.float().square().mean() for value in tensors_of(output))


@pytest.mark.parametrize("name", DOCUMENTED)
def test_gradients_are_those_of_the_model(name):
    model, args, kwargs = made(name).make(batch=2)
    plain = copy.deepcopy(model)
    layers = sequential(model, *args, **kwargs)
    assert layers.state_dict().keys() == plain.state_dict().keys()
    assert [n for n, _ in layers.named_parameters()] == [n for n, _ in plain.named_parameters()]

    tied = "tied" in name
    devices = ["cpu:0", "cpu:1"]
    sizes = [len(layers) // 2, len(layers) - len(layers) // 2]
    pipe = Pipe(layers, sizes, devices=devices, chunks=2)
    plain.eval()  # dropout draws other numbers in a pipe
    pipe.eval()
    _, args, kwargs = made(name).make(batch=3)
    output = pipe(*args, **kwargs)
    pieces = [(args_of(args, i), kwargs_of(kwargs, i)) for i in range(2)]
    expected = [plain(*a, **k) for a, k in pieces]
    assert type(output) is type(expected[0])
    for ours, *theirs in zip(tensors_of(output), *map(tensors_of, expected), strict=True):
        assert torch.equal(ours, torch.cat(theirs))

    pipe.train_batch({**named(plain, args), **kwargs}, loss_fn=loss_fn, schedule="1f1b")
    for (a, k), weight in zip(pieces, (2 / 3, 1 / 3), strict=True):
        (loss_fn(plain(*a, **k)) * weight).backward()
    theirs = dict(plain.named_parameters())
    for key, parameter in pipe.named_parameters():
        if tied:  # its gradient is summed in another order
            torch.testing.assert_close(parameter.grad, theirs[key].grad)
        else:
            assert_same_tree(parameter.grad, theirs[key].grad, key)


def named(model: nn.Module, args: tuple[Any, ...]) -> dict[str, Any]:
    return dict(zip(inspect.signature(model.forward).parameters, args, strict=False))


def args_of(args: tuple[Any, ...], i: int) -> tuple[Any, ...]:
    return tuple(a.chunk(2)[i] for a in args)


def kwargs_of(kwargs: dict[str, Any], i: int) -> dict[str, Any]:
    return {k: v.chunk(2)[i] if isinstance(v, Tensor) else v for k, v in kwargs.items()}
