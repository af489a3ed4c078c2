"""Names of other libraries are answered with ours."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from syncpipe import Pipe
from tests.support.models import linear_model

ARGUMENTS = {
    "num_stages": (2, r"balance=\[\.\.\.\]"),
    "partition_method": ("parameters", "balance='parameters'"),
    "loss_fn": (nn.MSELoss(), "pipe.train_batch"),
    "activation_checkpoint_interval": (1, "checkpoint='always'"),
    "checkpointable_layers": (["Linear"], "checkpoint=lambda"),
    "gradient_accumulation_steps": (4, "chunks="),
    "seed_layers": (True, "seed="),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_argument_of_deepspeed_is_answered(name: str) -> None:
    value, message = ARGUMENTS[name]
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}': .*{message}"):
        Pipe(linear_model(2), [1, 1], **{name: value})


def test_an_unknown_argument_is_none() -> None:
    unknown: dict[str, Any] = {"chunk": 2}
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'chunk'$"):
        Pipe(linear_model(2), [1, 1], **unknown)


METHODS = {
    "save_checkpoint": "state_dict",
    "load_checkpoint": "load_state_dict",
    "gradient_accumulation_steps": "pipe.chunks",
    "train_micro_batch_size_per_gpu": "pipe.chunks",
    "step": r"optimizer\.step\(\)",
    "backward": "train_batch",
}


@pytest.mark.parametrize("name", METHODS)
def test_a_method_of_deepspeed_is_answered(name: str) -> None:
    pipe = Pipe(linear_model(2), [1, 1])
    with pytest.raises(AttributeError, match=METHODS[name]):
        getattr(pipe, name)
    assert not hasattr(pipe, name)


def test_a_layer_may_have_such_a_name() -> None:
    layers = nn.Sequential()
    layers.add_module("step", nn.Linear(3, 3))
    assert Pipe(layers, [1]).step is layers[0]


def test_other_attributes_are_missing_as_ever() -> None:
    with pytest.raises(AttributeError, match="'Pipe' object has no attribute 'nothing'"):
        _ = Pipe(linear_model(2), [1, 1]).nothing


# --- balance="time" ------------------------------------------------------------------------------


def test_a_balance_by_time_in_one_line() -> None:
    layers = nn.Sequential(*[nn.Linear(4, 4) for _ in range(6)])
    sample = torch.randn(2, 4)
    pipe = Pipe(layers, balance="time", sample=sample, devices=["cpu:0", "cpu:1"], chunks=2)
    assert len(pipe.balance) == 2
    assert sum(pipe.balance) == 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"balance": "time"}, r"give Pipe a sample="),
        ({"balance": "uniform", "sample": torch.ones(1, 3)}, "sample= is what balance='time'"),
        ({"balance": [1, 1], "sample": torch.ones(1, 3)}, "sample= is what balance='time'"),
    ],
)
def test_a_sample_goes_with_time(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Pipe(linear_model(2), devices=["cpu:0", "cpu:1"], **options)


# --- small micro-batches -------------------------------------------------------------------------


def test_a_normalisation_of_one_sample_says_what_to_do() -> None:
    pipe = Pipe(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), [1, 1], chunks=4)
    with pytest.raises(ValueError, match="more than 1 value per channel") as caught:
        pipe.train_batch(torch.randn(7, 3), loss_fn=torch.mean)
    assert any("drop_last=True" in note for note in caught.value.__notes__)
