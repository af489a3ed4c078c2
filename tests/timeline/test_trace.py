"""``pipe.trace()``: everything that a pipe does, in the order in which it was done."""

from __future__ import annotations

import copy
import json
import pickle
import threading
import time
from collections import Counter
from contextlib import nullcontext
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import syncpipe
from syncpipe import Pipe
from syncpipe.schedules import build
from syncpipe.timeline import Timeline
from tests.support.skips import Receive, Send
from tests.support.training import fitting

DEVICES = ["cpu:0", "cpu:1", "cpu:2"]


def make(balance=(1, 2, 1), **options) -> Pipe:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 2))
    options = {"chunks": 4, "checkpoint": "never", "devices": DEVICES, **options}
    return Pipe(layers, balance, **options)


def batch():
    return torch.randn(8, 4), torch.randn(8, 2)


def actions(trace, row):
    return [(s.kind, s.i, s.j) for s in trace.spans if s.row == row and s.kind != "transfer"]


@pytest.mark.parametrize("name", fitting([0, 1, 2]))
@pytest.mark.parametrize("inline", [False, True])
def test_each_row_of_train_batch_is_what_the_schedule_says(name, inline):
    pipe = make()
    with pipe.trace() as trace, syncpipe.inline() if inline else nullcontext():
        pipe.train_batch(*batch(), loss_fn=F.mse_loss, schedule=name)
    for row, expected in enumerate(build(name, 4, [0, 1, 2]).actions):
        assert actions(trace, row) == [tuple(action) for action in expected]


def test_nothing_overlaps_and_host_time_is_that_of_the_thread_that_did_it(monkeypatch):
    here = threading.local()

    def thread_time():  # one more than at this thread's last look
        here.looks = getattr(here, "looks", 0) + 1
        return float(here.looks)

    monkeypatch.setattr(time, "thread_time", thread_time)
    pipe = make(checkpoint="always")
    with pipe.trace() as trace:
        pipe.train_batch(*batch(), loss_fn=F.mse_loss)
    assert all(s.host == (None if s.kind == "transfer" else 1.0) for s in trace.spans)
    for row in range(3):
        spans = [s for s in trace.spans if s.row == row and s.kind != "transfer"]
        assert all(a.end <= b.start for a, b in pairwise(spans))
        for before, (kind, *cell) in pairwise(actions(trace, row)):
            assert kind != "backward" or before == ("recompute", *cell)
    assert min(span.start for span in trace.spans) == 0
    assert trace.host == (12.0, 12.0, 12.0)  # forward, recompute, backward of four micro-batches
    assert trace.table().split()[:3] == ["busy", "idle", "host"]


@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
@pytest.mark.parametrize("devices", [DEVICES, ["cpu"] * 3])
def test_forward_and_the_backward_of_autograd(checkpoint, devices):
    pipe = make(checkpoint=checkpoint, devices=devices)
    with pipe.trace() as trace:
        pipe(batch()[0]).sum().backward()
    again = {"always": 4, "except_last": 3, "never": 0}[checkpoint]
    found = Counter((s.kind, s.i, s.j) for s in trace.spans if s.kind != "transfer")
    cells = {(kind, i, j) for kind in ("forward", "backward") for i in range(4) for j in range(3)}
    recomputed = {cell for cell in found if cell[0] == "recompute"}
    # A cell that stores nothing but its parameters has nothing to recompute.
    assert {("recompute", i, 1) for i in range(again)} <= recomputed
    assert all(i < again for _, i, _ in recomputed)
    assert found == Counter(cells | recomputed)
    assert all((s.host is None) == (s.kind == "transfer") for s in trace.spans)
    with pipe.trace() as trace:  # each call is a step, and a second backward is there as well
        loss = pipe(batch()[0]).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        pipe.eval_batch(batch()[0])
    counts = Counter((span.kind, span.step) for span in trace.spans)
    assert counts["backward", 0] == 2 * counts["forward", 0] == 2 * counts["forward", 1] == 24


def test_every_way_between_workers_forth_and_back():
    layers = nn.Sequential(nn.Linear(4, 4), Send(), nn.Linear(4, 4), Receive(), nn.Linear(4, 2))
    pipe = Pipe(layers, [2, 1, 2], devices=DEVICES, chunks=2)
    with pipe.trace() as trace:
        pipe.train_batch(*batch(), loss_fn=F.mse_loss)
    ways = Counter((s.j, s.target, s.backward) for s in trace.spans if s.kind == "transfer")
    forth = [(0, 1), (1, 2), (0, 2)]
    assert ways == {
        **{(j, k, False): 2 for j, k in forth},
        **{(k, j, True): 2 for j, k in forth},
    }


def test_rows_are_the_devices():
    assert make().trace().rows == ("cpu:0", "cpu:1", "cpu:2")
    assert make(devices=["cpu:0", "cpu:1", "cpu:0"]).trace().rows == ("cpu:0", "cpu:1")
    workers = [syncpipe.Worker("cpu") for _ in range(3)]
    assert make(devices=workers).trace().rows == ("cpu (0)", "cpu (1)", "cpu (2)")


def test_nothing_is_recorded_outside_of_the_block_nor_of_copies():
    pipe = make()
    pipe.train_batch(*batch(), loss_fn=F.mse_loss)
    with pipe.trace() as trace:
        for twin in (copy.deepcopy(pipe), pickle.loads(pickle.dumps(pipe))):
            twin(batch()[0])
    pipe.train_batch(*batch(), loss_fn=F.mse_loss)
    assert trace.spans == ()
    assert trace.bubble == 0
    with pipe.trace(), pytest.raises(RuntimeError, match="being traced already"), pipe.trace():
        pass
    with pipe.trace() as trace:
        pipe(batch()[0])
    assert trace.spans


def test_what_was_done_before_a_failure_is_there_and_the_trace_ends():
    class Fails(nn.Module):
        def forward(self, x):
            raise ValueError("not today")

    pipe = Pipe(nn.Sequential(nn.Linear(4, 4), Fails()), [1, 1], devices=DEVICES, chunks=2)
    with pytest.raises(ValueError, match="not today"), pipe.trace() as trace:
        pipe(batch()[0])
    assert ("forward", 0, 0) in actions(trace, 0)
    with pipe.trace():
        pass


def test_a_trace_does_not_change_the_result_and_draws_itself(tmp_path):
    results = []
    for traced in (False, True):
        pipe = make(checkpoint="always")
        torch.manual_seed(1)
        x, t = batch()
        with pipe.trace("one step") if traced else nullcontext() as trace:
            pipe.train_batch(x, t, loss_fn=F.mse_loss)
            F.mse_loss(pipe(x), t).backward()
        results.append([p.grad for p in pipe.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    trace.save(tmp_path / "step.json")
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == len(trace.spans)
    assert trace.costs.forward == Timeline(trace.spans, trace.rows).costs.forward
    pytest.importorskip("matplotlib")
    svg = trace._repr_svg_()
    assert "cpu:1" in svg
    assert "one step" in svg


def test_a_trace_in_which_another_pipe_ran_says_that_nothing_did():
    pipe, other = (Pipe(nn.Sequential(nn.Linear(3, 3)), [1]) for _ in range(2))
    with pipe.trace() as trace:
        other(torch.randn(2, 3))
    assert trace.table().startswith("nothing ran: ")
