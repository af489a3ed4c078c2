"""Streams of ``train_batch`` and ``eval_batch``: no race with all waits, one with any taken out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import syncpipe.stages.call
import syncpipe.training.cell
import syncpipe.training.loss
import syncpipe.training.train
from syncpipe import Pipe
from syncpipe.data import tensors_in
from syncpipe.runtime.worker import Worker
from syncpipe.schedules.schedule import Action, Schedule
from tests.streams import test_streams
from tests.streams.happens_before import FakeStreams, Stream
from tests.streams.happens_before_autograd import AutogradWorld
from tests.streams.test_streams import running
from tests.streams.training_scenario import Training

SCHEDULES = ["naive", "gpipe", "1f1b", "interleaved_1f1b", "zb_h1"]
PLACES = ["one device", "one device, two workers", "two devices, two workers", "four devices"]


world = pytest.fixture(test_streams.world.__wrapped__, name="forward_world")


@pytest.fixture(name="world")
def training_world(forward_world, monkeypatch) -> AutogradWorld:
    """The same for the training driver; tensors tell which device they are meant to be on."""
    world = forward_world

    def watched(owner: Any, name: str) -> None:
        """Books what a function of the driver does on the caller's thread."""
        function = getattr(owner, name)

        def run(*args: Any, **kwargs: Any) -> Any:
            with world.watch():
                return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, run)

    monkeypatch.setitem(
        test_streams.LAYOUTS, "two devices, two workers", [(0, 0), (1, 1), (0, 0), (1, 1)]
    )
    monkeypatch.setitem(test_streams.LAYOUTS, "one worker", [(0, 0)] * 4)
    for name in ("register", "restore", "scale"):
        watched(syncpipe.training.cell.Accumulated, name)
    watched(syncpipe.training.train, "_results")
    watched(syncpipe.training.train, "_complete")

    go_back = syncpipe.training.cell.go_back
    backward = torch.autograd.backward
    loss = syncpipe.training.loss.LossHead._loss
    real = torch.Tensor.device

    def tagged_loss(self, *args):
        root, share = loss(self, *args)
        world.tag([root])
        return root, share

    def acted_backward(tensors, *args, **kwargs):
        if world.here.acting:
            return backward(tensors, *args, **kwargs)
        world.tag(tensors_in(tensors))
        with world.going_back():
            return backward(tensors, *args, **kwargs)

    def acted_go_back(roots, grads, inputs=(), *, keep=False):
        world.tag(tensors_in(roots))
        with world.going_back():
            go_back(roots, grads, inputs, keep=keep)

    def device(tensor):
        block = world.block_of(tensor)
        return real.__get__(tensor) if block is None else torch.device("cpu", block.device)

    monkeypatch.setattr(syncpipe.training.loss.LossHead, "_loss", tagged_loss)
    for module in (syncpipe.training.cell, syncpipe.training.weight_gradients):
        monkeypatch.setattr(module, "go_back", acted_go_back)
    monkeypatch.setattr(torch.autograd, "backward", acted_backward)
    monkeypatch.setattr(torch.Tensor, "device", property(device), raising=False)
    monkeypatch.setattr(syncpipe.stages.call, "same_memory", lambda a, b: a == b)
    return world


@pytest.mark.parametrize(
    ("layout", "schedule", "checkpoint"),
    [
        (layout, schedule, ("always", "never")[(i + k) % 2])  # each with half of the others
        for i, layout in enumerate(PLACES)
        for k, schedule in enumerate(SCHEDULES)
        if (i + k) % 4 in (0, 3) or layout == PLACES[-1]
    ],
)
def test_no_race(world, layout, schedule, checkpoint):
    with running("inline" if checkpoint == "always" else "threads"):
        reports = Training(world, layout, schedule, checkpoint=checkpoint).run()
    assert not reports, "\n".join(dict.fromkeys(reports))
    assert world.operators > 100


@pytest.mark.parametrize(
    ("workers", "callers", "how"),
    [
        ("private", "own", "threads"),
        ("private", "default", "inline"),
        ("shared", "own", "inline"),
        ("shared", "default", "threads"),
    ],
)
@pytest.mark.parametrize("layout", ["one worker", *PLACES[2:]])
def test_no_race_whosever_the_streams_are(world, layout, workers, callers, how):
    checkpoint = "never" if how == "threads" else "except_last"
    scenario = Training(
        world, layout, "1f1b", checkpoint=checkpoint, callers=callers, workers=workers
    )
    with running(how):
        reports = scenario.run()
    assert not reports, "\n".join(dict.fromkeys(reports))


ONE, TWO = "one device", "four devices"


@pytest.mark.parametrize("layout", [ONE, TWO])
@pytest.mark.parametrize("what", ["wait", "keep"])
def test_what_is_left_out_is_reported(world, layout, what):
    """Line by line that is ``python -m tests.mutations``."""
    world.left_out = what
    with running("inline"):
        reports = Training(world, layout, "zb_h1", checkpoint="never").run()
    assert any(report.startswith("race" if what == "wait" else "reuse") for report in reports)


def test_one_stage(world):
    """It pulls targets for itself, and computes on another stream than the iterator."""
    worker = Worker("cpu:0", streams=FakeStreams(world, 0))
    layer = nn.Linear(4, 4)
    world.adopt(layer.parameters(), 0)
    pipe = Pipe(nn.Sequential(layer), [1], devices=[worker], chunks=2)
    with world.on(Stream("caller", 0)):
        with world.watch():
            x, target = torch.randn(2, 4, 4)
        pairs = ((a * 2, b * 2) for a, b in zip(x.chunk(2), target.chunk(2), strict=True))
        pipe.train_batch(data_iter=pairs, loss_fn=nn.functional.mse_loss)
    assert not world.reports


@pytest.mark.parametrize(("how", "checkpoint"), [("threads", "never"), ("inline", "always")])
@pytest.mark.parametrize("layout", [ONE, TWO])
def test_no_race_while_traced(world, layout, how, checkpoint):
    """What the trace itself waits for makes its times right, and nothing else."""
    scenario = Training(world, layout, "1f1b", checkpoint=checkpoint)
    with running(how), scenario.pipe.trace() as trace:
        scenario.step(scenario.first)
        scenario.iterate()
    assert not world.reports
    kinds = {span.kind for span in trace.spans}
    assert kinds >= {"forward", "backward", "transfer"}
    assert ("recompute" in kinds) == (checkpoint == "always")


class Position(nn.Module):
    """Adds a parameter by a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(3, 4))

    def forward(self, x):
        return x + self.position.unsqueeze(0)


@pytest.mark.parametrize(
    ("balance", "order"),
    [
        ([2, 3], "F00 F01 F10 F11 B01 B11 B00 B10"),  # a gradient is on its way to stage 0
        ([3, 2], "F00 F01 F10 F11 B01 B11 I00 I10 W00 W10"),  # it waits for its weight half
    ],
)
def test_a_gradient_that_is_still_needed_is_not_added_to(balance, order):
    """Autograd makes a view of it the parameter's gradient, and adds the next one in place."""
    model = nn.Sequential(
        nn.Linear(4, 4), nn.Linear(4, 4), Position(), nn.Linear(4, 4), nn.Tanh()
    )  # fmt: skip
    x, target = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    for i in range(2):
        (nn.functional.mse_loss(model(x[i : i + 1]), target[i : i + 1]) / 2).backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    kinds = {"F": "forward", "B": "backward", "I": "backward_input", "W": "backward_weight"}
    row = tuple(Action(kinds[a[0]], int(a[1]), int(a[2])) for a in order.split())
    pipe = Pipe(model, balance, devices=["cpu", "cpu"], chunks=2, checkpoint="never")
    schedule = Schedule(2, (0, 0), (row,))
    pipe.train_batch(x, target, loss_fn=nn.functional.mse_loss, schedule=schedule)
    for parameter, grad in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, grad)
