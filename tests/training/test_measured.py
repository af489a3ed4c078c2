"""``schedule="auto"``: the first calls are measured, and then there is a schedule for it."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from syncpipe import Pipe
from syncpipe.schedules import Costs, auto, one_f_one_b
from syncpipe.training import measured

X = torch.randn(10, 6, generator=torch.Generator().manual_seed(1))
UNEVEN = Costs((1, 3, 2), (1, 2, 2), (1, 3, 1), (0.1, 0.3))


def pipe_of(**options: Any) -> Pipe:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Dropout(0.3), nn.Linear(6, 6)]
    devices = ["cpu:0", "cpu:1", "cpu:2"]
    return Pipe(nn.Sequential(*layers), [2, 2, 1], **{"devices": devices, "chunks": 5, **options})


def gradients(pipe: Pipe, schedule: Any) -> list[Tensor]:
    """With the loss."""
    pipe.zero_grad()
    torch.manual_seed(2)
    loss = pipe.train_batch(X, X, loss_fn=F.mse_loss, schedule=schedule)
    return [loss, *(parameter.grad.clone() for parameter in pipe.parameters())]


def check(found: list[Tensor], expected: list[Tensor], *, exact: bool) -> None:
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b) if exact else torch.allclose(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
@pytest.mark.parametrize("devices", [["cpu:0", "cpu:1", "cpu:2"], ["cpu:0", "cpu:1", "cpu:0"]])
@pytest.mark.parametrize("split", [False, True])
def test_gradients_under_a_schedule_for_given_costs(
    checkpoint: str, devices: list[str], split: bool
) -> None:
    pipe = pipe_of(checkpoint=checkpoint, devices=devices)
    places = [int(device[-1]) for device in devices]
    schedule = auto(5, places, costs=UNEVEN, memory=3, split=split)
    assert schedule != one_f_one_b(5, places)
    assert bool(schedule.splits) == split
    check(gradients(pipe, schedule), gradients(pipe, "1f1b"), exact=not split)


@pytest.mark.parametrize("checkpoint", ["never", "except_last"])
def test_gradients_while_it_measures_and_after(checkpoint: str) -> None:
    pipe = pipe_of(checkpoint=checkpoint, schedule="auto")
    expected = gradients(pipe, "1f1b")
    for call in range(6):
        found = gradients(pipe, None)
        assert bool(pipe.auto_schedules) == (call >= 4)
        halves = call in (2, 3) or any(made.splits for made in pipe.auto_schedules.values())
        check(found, expected, exact=not halves)
    made = pipe.auto_schedules[5]
    report, usual = made.report, one_f_one_b(5, 3).in_flight
    assert report.limits == (tuple(max(3, slots) for slots in usual) if made.splits else usual)
    assert 0 < report.bound <= report.step


def test_what_was_measured_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Halves have to be worth it; both are given the costs of their own calls."""
    asked = []

    def watched(m: int, device_of: Any, *, costs: Costs, split: bool, **options: Any) -> Any:
        asked.append((split, any(costs.backward_weight), options["rematerialized"]))
        return auto(m, device_of, costs=UNEVEN, split=split)

    monkeypatch.setattr(measured, "auto", watched)
    pipe = pipe_of(checkpoint=["always", "except_last", "never"])
    for _ in range(5):
        gradients(pipe, "auto")
    assert asked == [(False, False, (5, 4, 0)), (True, True, (5, 4, 0))]
    assert pipe.auto_schedules[5].splits
    pipe = pipe_of()
    monkeypatch.setattr(measured, "_WORTH", 0.0)
    for _ in range(5):
        gradients(pipe, "auto")
    assert not pipe.auto_schedules[5].splits


def test_each_number_of_micro_batches_and_each_way_to_run_is_measured() -> None:
    pipe = pipe_of()
    for _ in range(5):
        gradients(pipe, "auto")
    before = pipe.auto_schedules[5]
    pipe.chunks = 3
    gradients(pipe, "auto")
    assert set(pipe.auto_schedules) == {5}
    pipe.chunks, pipe.checkpoint = 5, "always"
    for _ in range(5):
        gradients(pipe, "auto")
    assert pipe.auto_schedules[5] is not before
    pipe.balance = [1, 2, 2]
    assert pipe.auto_schedules == {}


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pipe: pickle.loads(pickle.dumps(pipe))])
def test_a_copy_measures_for_itself(copied: Any) -> None:
    pipe = pipe_of()
    for _ in range(5):
        gradients(pipe, "auto")
    other = copied(pipe)
    assert other.auto_schedules == {}
    check(gradients(other, "auto"), gradients(pipe, "1f1b"), exact=True)


def test_a_trace_of_the_callers_sees_every_call_once() -> None:
    pipe = pipe_of(checkpoint="never")
    with pipe.trace() as trace:
        for _ in range(6):
            gradients(pipe, "auto")
    steps = {span.step for span in trace.spans}
    assert len(steps) == 6
    forwards = [span for span in trace.spans if span.kind == "forward"]
    assert len(forwards) == 6 * 5 * 3
    assert set(pipe.auto_schedules) == {5}


def test_a_call_that_fails_is_not_measured() -> None:
    pipe = pipe_of()

    def fails(output: Tensor, target: Tensor) -> Tensor:
        raise ZeroDivisionError("its own")

    for _ in range(3):
        gradients(pipe, "auto")
        with pytest.raises(ZeroDivisionError, match="its own"):
            pipe.train_batch(X, X, loss_fn=fails, schedule="auto")
    gradients(pipe, "auto")
    assert pipe.auto_schedules == {}
    gradients(pipe, "auto")
    assert set(pipe.auto_schedules) == {5}


def test_slots_are_for_1f1b() -> None:
    with pytest.raises(ValueError, match="only schedule='1f1b' has slots, not 'auto'"):
        pipe_of(schedule="auto", slots="textbook")


def test_what_stops_the_search_leaves_gradients_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = pipe_of()
    for _ in range(4):
        expected = gradients(pipe, "auto")

    def stopped(*args: Any, **options: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(measured, "auto", stopped)
        with pytest.raises(KeyboardInterrupt):
            pipe.train_batch(X, X, loss_fn=F.mse_loss, schedule="auto")
    check([p.grad for p in pipe.parameters() if p.grad is not None], expected[1:], exact=True)
    gradients(pipe, "auto")
    assert set(pipe.auto_schedules) == {5}
