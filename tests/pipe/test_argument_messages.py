"""What a pipe says to arguments that were meant otherwise: the way out is in the message."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import syncpipe
from syncpipe import Pipe
from tests.support.models import linear_model


@pytest.mark.parametrize("cut", [lambda: Pipe(linear_model(2), 8), lambda: _set_balance(8)])
def test_a_number_for_a_balance_asks_whether_chunks_is_meant(cut: Any) -> None:
    with pytest.raises(TypeError, match=r"not 8: did you mean chunks=8\?"):
        cut()


def _set_balance(balance: Any) -> None:
    Pipe(linear_model(2), [1, 1], devices=["cpu:0", "cpu:1"]).balance = balance


@pytest.mark.parametrize("balance", [True, 2.5])
def test_what_cannot_be_chunks_is_not_taken_for_it(balance: Any) -> None:
    with pytest.raises(TypeError, match="must be a list") as caught:
        Pipe(linear_model(2), balance)
    assert "chunks" not in str(caught.value)


def test_without_balance_the_error_names_the_ways_to_find_one() -> None:
    with pytest.raises(ValueError, match="balance is missing") as caught:
        Pipe(linear_model(4), devices=["cpu:0", "cpu:1"])
    assert 'balance="parameters"' in str(caught.value)
    assert "syncpipe.balance.balance_by_time" in str(caught.value)


def test_a_schedule_made_to_measure_needs_costs_and_the_error_says_how_to_get_them() -> None:
    pipe, way_out = Pipe(linear_model(2), [1, 1]), r"pipe\.trace\(\).*schedules\.auto\("
    with pytest.raises(ValueError, match=way_out):
        Pipe(linear_model(2), [1, 1], schedule="auto")
    with pytest.raises(ValueError, match=way_out):
        pipe.train_batch(torch.randn(4, 3), loss_fn=torch.mean, schedule="auto")
    with pytest.raises(ValueError, match=way_out):
        pipe.schedule = "auto"
    assert pipe.schedule == "1f1b"


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there they are devices")
@pytest.mark.parametrize("device", [0, "cuda:0", "cuda", torch.device("cuda", 0)])
def test_without_an_accelerator_its_number_and_its_name_are_refused_alike(device: Any) -> None:
    with pytest.raises(ValueError, match=r"accelerator") as caught:
        Pipe(linear_model(2), [1, 1], devices=[device, device])
    assert repr(device) in str(caught.value)
    assert "'cpu:0', 'cpu:1'" in str(caught.value)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there it is a device")
def test_plan_refuses_the_number_of_an_accelerator_that_is_not_here() -> None:
    with pytest.raises(ValueError, match=r"0 is an accelerator, but"):
        syncpipe.plan(linear_model(2), torch.randn(4, 3), devices=[0, 1], batch_size=4)


def test_a_plan_for_real_devices_runs_on_those_that_the_pipe_is_given() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    plan = syncpipe.plan(
        model,
        torch.randn(8, 3),
        devices=["cpu:0", "cpu:1"],
        batch_size=8,
        stages=2,
        memory="1GB",
        timeout=0.05,
    )
    here = Pipe(model, **plan.options(), devices=plan.devices)
    assert here.devices == [torch.device("cpu", 0), torch.device("cpu", 1)]
    elsewhere = Pipe(model, **plan.options(), devices=["cpu:2", "cpu:3"])
    assert elsewhere.devices == [torch.device("cpu", 2), torch.device("cpu", 3)]
