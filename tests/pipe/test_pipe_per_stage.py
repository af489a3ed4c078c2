"""A checkpoint mode for each stage, and a schedule of the pipe's own."""

from __future__ import annotations

import copy
import pickle
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from syncpipe import Pipe, is_recomputing
from syncpipe.schedules import Schedule, gpipe, one_f_one_b
from tests.support.models import CHECKPOINT_MODES, assert_equals_plain, linear_model
from tests.support.training import FOUR, KINDS, RUNS


class Counted(nn.Module):
    """Counts its recomputations."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.again = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.again += is_recomputing()
        return x * self.weight


def counted(**options: object) -> Pipe:
    return Pipe(nn.Sequential(*[Counted() for _ in range(4)]), [1] * 4, chunks=4, **options)


@given(modes=st.tuples(*[st.sampled_from(CHECKPOINT_MODES)] * 4), seed=st.integers(0, 99))
def test_the_result_is_that_of_the_plain_model(modes: tuple[str, ...], seed: int) -> None:
    torch.manual_seed(seed)
    x = torch.randn(8, 3, requires_grad=True)
    assert_equals_plain(linear_model(), x, [1] * 4, devices=FOUR, chunks=4, checkpoint=modes)


TIMES = {"always": 4, "except_last": 3, "never": 0}


@pytest.mark.parametrize("modes", [("never", "always", "except_last", "never"), ("always",) * 4])
def test_each_stage_recomputes_as_its_own_mode_says(modes: tuple[str, ...]) -> None:
    pipe = counted(devices=FOUR, checkpoint=modes)
    pipe(torch.randn(8, 3)).sum().backward()
    assert [layer.again for layer in pipe] == [TIMES[mode] for mode in modes]


@pytest.mark.parametrize("run", KINDS)
def test_so_does_train_batch(run: str) -> None:
    modes = ["except_last", "never", "always", "never"]
    options, devices = RUNS[run]
    pipe = counted(devices=devices, checkpoint=modes)
    pipe.train_batch(torch.randn(8, 3), loss_fn=torch.mean, **options)
    assert [layer.again for layer in pipe] == [3, 0, 4, 0]


def test_in_eval_mode_no_stage_recomputes() -> None:
    pipe = counted(devices=FOUR, checkpoint=("always",) * 4).eval()
    pipe(torch.randn(8, 3)).sum().backward()
    assert [layer.again for layer in pipe] == [0] * 4


def test_modes_can_be_read_and_set() -> None:
    pipe = counted(devices=FOUR)
    pipe.checkpoint = ["never", "always", "never", "never"]
    assert pipe.checkpoint == ("never", "always", "never", "never")
    pipe.checkpoint = "never"
    assert pipe.checkpoint == "never"


def test_as_many_modes_as_stages() -> None:
    pipe = counted(devices=FOUR, checkpoint=["never"] * 4)
    with pytest.raises(ValueError, match=r"has 3 modes.*4 stages"):
        pipe.checkpoint = ["never"] * 3
    with pytest.raises(ValueError, match=r"has 4 modes.*2 stages"):
        pipe.balance = [2, 2]
    assert pipe.balance == [1] * 4
    assert pipe.checkpoint == ("never",) * 4
    with pytest.raises(ValueError, match=r"has 2 modes.*4 stages"):
        counted(devices=FOUR, checkpoint=["never", "always"])


def test_an_unknown_mode_of_one_stage_is_named() -> None:
    with pytest.raises(ValueError, match=r"'sometimes' is not one of 'always'"):
        counted(devices=FOUR, checkpoint=["never", "sometimes", "never", "never"])


# --- the schedule of a pipe ---------------------------------------------------------------------


def rows_of(pipe: Pipe, **options: object) -> list[list[tuple[str, int]]]:
    """For each stage its actions in order, as they were traced."""
    with pipe.trace() as trace:
        pipe.train_batch(torch.randn(8, 3), loss_fn=torch.mean, **options)
    rows: list[list[tuple[str, int]]] = [[] for _ in pipe.balance]
    for span in sorted(trace.spans, key=lambda span: span.start):
        if span.kind in ("forward", "backward"):
            rows[span.j].append((span.kind, span.i))
    return rows


NEVER = {"devices": FOUR, "checkpoint": "never"}


@pytest.mark.parametrize(
    ("schedule", "slots"), [("gpipe", None), ("1f1b", "textbook"), ("1f1b", [4, 2, 2, 1])]
)
def test_train_batch_uses_the_schedule_of_the_pipe(schedule: str, slots: object) -> None:
    own = rows_of(counted(schedule=schedule, slots=slots, **NEVER))
    assert own == rows_of(counted(**NEVER), schedule=schedule, slots=slots)
    assert own != rows_of(counted(**NEVER), schedule="naive")


def test_what_the_call_says_goes_before_what_the_pipe_says() -> None:
    pipe = counted(schedule="1f1b", slots="textbook", **NEVER)
    assert rows_of(pipe, schedule="gpipe") == rows_of(counted(**NEVER), schedule="gpipe")
    assert rows_of(pipe, slots=[4, 4, 4, 4]) == rows_of(counted(**NEVER), slots=[4, 4, 4, 4])


def test_a_schedule_object_can_be_the_pipes_own() -> None:
    pipe = counted(schedule=gpipe(4, 4), **NEVER)
    assert rows_of(pipe) == rows_of(counted(**NEVER), schedule="gpipe")


def test_a_function_can_be_the_schedule() -> None:
    asked = []

    def mine(m: int, device_of: tuple[int, ...]) -> Schedule:
        asked.append((m, device_of))
        return gpipe(m, device_of)

    expected = rows_of(counted(**NEVER), schedule="gpipe")
    pipe = counted(**NEVER)
    assert rows_of(pipe, schedule=mine) == expected
    pipe.schedule = mine
    assert rows_of(pipe) == expected
    assert asked == [(4, (0, 1, 2, 3))]  # what it returned is kept


def test_a_function_that_fails_loses_nothing() -> None:
    def mine(m: int, device_of: tuple[int, ...]) -> Schedule:
        raise ZeroDivisionError("its own")

    pipe, inputs = counted(**NEVER), iter([(torch.randn(2, 3), None)] * 4)
    pipe.train_batch(torch.randn(8, 3), loss_fn=torch.mean)
    before = [p.grad.clone() for p in pipe.parameters()]
    with pytest.raises(ZeroDivisionError, match="its own") as caught:
        pipe.train_batch(data_iter=inputs, loss_fn=lambda y, _: y.mean(), schedule=mine)
    [note] = caught.value.__notes__
    assert "mine when called with m=4, device_of=(0, 1, 2, 3)" in note
    assert all(torch.equal(p.grad, old) for p, old in zip(pipe.parameters(), before, strict=True))
    assert len(list(inputs)) == 4
    pipe.train_batch(torch.randn(8, 3), loss_fn=torch.mean)


def test_slots_are_short_for_a_function() -> None:
    own = partial(one_f_one_b, slots="textbook")
    pipe = counted(slots="textbook", **NEVER)
    assert rows_of(pipe) == rows_of(counted(schedule=own, **NEVER))
    assert rows_of(pipe) == rows_of(counted(schedule="gpipe", **NEVER), slots="textbook")
    assert rows_of(pickle.loads(pickle.dumps(pipe))) == rows_of(copy.deepcopy(pipe))


def test_slots_of_a_function_are_checked_as_well() -> None:
    pipe = counted(**NEVER)
    with pytest.raises(ValueError, match=r"slots=\[2, 1\] has 2 numbers.*4 stages"):
        pipe.schedule = partial(one_f_one_b, slots=[2, 1])
    assert pipe.schedule == "1f1b"


def test_a_schedule_can_be_set_and_forgets_slots_of_another() -> None:
    pipe = counted(schedule="1f1b", slots="textbook", **NEVER)
    pipe.schedule = "gpipe"
    assert pipe.schedule == "gpipe"
    assert rows_of(pipe) == rows_of(counted(**NEVER), schedule="gpipe")


def test_an_unknown_schedule_is_refused_when_the_pipe_is_made() -> None:
    with pytest.raises(ValueError, match="did you mean 'gpipe'"):
        counted(schedule="gpip")
    with pytest.raises(TypeError, match="schedule=3"):
        counted(schedule=3)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"slots": [2, 1]}, ValueError, r"slots=\[2, 1\] has 2 numbers.*4 stages"),
        ({"slots": "some"}, ValueError, "slots='some'"),
        ({"slots": 3}, ValueError, "slots=3"),
        ({"slots": {0: 1}}, ValueError, "slots={0: 1}"),
        ({"slots": [[1], 1, 1, 1]}, ValueError, r"slots=\(\[1\], 1, 1, 1\)"),
        ({"schedule": "gpipe", "slots": "textbook"}, ValueError, "only schedule='1f1b' has slots"),
    ],
)
def test_slots_that_cannot_be_are_refused_when_the_pipe_is_made(
    options: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        counted(devices=FOUR, **options)


def test_slots_do_not_go_with_another_number_of_stages() -> None:
    pipe = counted(slots=[4, 3, 2, 1], **NEVER)
    with pytest.raises(ValueError, match=r"slots.*4 numbers.*2 stages: give one for each"):
        pipe.balance = [2, 2]
    pipe.schedule = "1f1b"
    pipe.balance = [2, 2]
    pipe.train_batch(torch.randn(8, 3), loss_fn=torch.mean)


def test_repr_shows_a_schedule_of_its_own() -> None:
    assert "schedule" not in repr(counted(devices=FOUR))
    shown = repr(counted(slots=[4, 3, 2, 1], **NEVER)).splitlines()[0]
    assert shown.endswith("checkpoint='never', schedule=partial(one_f_one_b, slots=(4, 3, 2, 1))")
