"""``train_batch`` beside the loop written out, under schedules of all kinds."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.nn import functional as F

from syncpipe.schedules import Schedule, gpipe, one_f_one_b, to_csv
from tests.support.models import CHECKPOINT_MODES
from tests.support.training import RUNS, any_schedule, assert_trains_as, orders_of, weigh
from tests.training.train_batch.loop import model, model_pipe


@pytest.mark.parametrize("leaf", [True, False], ids=["leaf", "computed input"])
@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("run", RUNS)
def test_loss_outputs_buffers_and_all_gradients_are_those_of_the_loop(run, checkpoint, leaf):
    plain, pipe = model(), model_pipe(run, checkpoint=checkpoint)
    for _ in range(3):  # gradients accumulate
        x, target = torch.randn(14, 6, requires_grad=True), torch.randn(14, 3)  # 3, 3, 3, 3, 2
        assert_trains_as(pipe, plain, x, target, loss_fn=F.mse_loss, leaf=leaf, **RUNS[run][0])
        for p, q in zip(pipe.parameters(), plain.parameters(), strict=True):
            q.grad = p.grad.clone()  # of halves: the same bits


@pytest.mark.parametrize("form", ["object", "path", "name of a file"])
def test_a_schedule_can_be_an_object_or_a_file(form, tmp_path):
    # A schedule of nobody's: each stage takes micro-batches back in an order of its own.
    schedule = any_schedule(5, (0, 1, 2, 3), seed=3, halves=False, in_order=True)
    orders = orders_of(schedule)
    assert len(set(map(tuple, orders))) > 1
    path = tmp_path / "mine.csv"
    path.write_text(to_csv(schedule))
    given = {"object": schedule, "path": path, "name of a file": str(path)}[form]
    x, plain, pipe = torch.randn(14, 6, requires_grad=True), model(), model_pipe("1f1b")
    assert_trains_as(pipe, plain, x, loss_fn=weigh, schedule=given)


@pytest.mark.parametrize(
    ("schedule", "slots", "message"),
    [
        ("1f2b", None, "did you mean '1f1b'"),
        (gpipe(3, 4), None, "made for m=3, but here m=5"),
        (one_f_one_b(5, 2), None, r"made for device_of=\(0, 1\)"),
        ("gpipe", "textbook", "only schedule='1f1b' has slots, not 'gpipe'"),
        ("1f1b", [1, 2, 2, 2], "wait for ever"),
        (one_f_one_b, "textbook", "only schedule='1f1b' has slots, not one_f_one_b"),
        (partial(one_f_one_b, slots=[2]), None, "a number for each of 4 stages"),
        (lambda m, _: gpipe(m, 3), None, r"made for device_of=\(0, 1, 2\)"),
        (lambda m, d: Schedule(m, d, ((),) * 4), None, "0F0 is missing"),
        (any_schedule(5, (0, 1, 0, 1), seed=0, halves=True, in_order=True), None, "device_of"),
    ],
)
def test_a_schedule_that_does_not_fit_is_refused(schedule, slots, message):
    pipe = model_pipe("1f1b")
    with pytest.raises(ValueError, match=message):
        pipe.train_batch(torch.randn(10, 6), loss_fn=weigh, schedule=schedule, slots=slots)
    assert all(p.grad is None for p in pipe.parameters())
