"""Stream logic without an accelerator: no race with all waits in place, some without."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

import syncpipe.runtime.streams
import syncpipe.stages.call
import syncpipe.training.forward
from syncpipe import Pipe, inline
from syncpipe.data import tensors_in
from syncpipe.runtime.worker import Worker
from syncpipe.skip import pop, skippable, stash
from tests.streams.happens_before import FakeStreams, Stream, parameters_of
from tests.streams.happens_before_autograd import AutogradWorld
from tests.support.running import Residual


@skippable(stash=["a"])
class StashA(nn.Module):
    """Sends its input itself past the layers that follow."""

    def forward(self, x):
        yield stash("a", x)
        return x


@skippable(stash=["b"], pop=["a"])
class PopAStashB(nn.Module):
    def forward(self, x):
        yield stash("b", x)
        return x + (yield pop("a"))


@skippable(pop=["b"])
class PopB(nn.Module):
    def forward(self, x):
        return x * (yield pop("b"))


class Returns(nn.Module):
    """Reads a second input late: a tuple travels between the stages."""

    def forward(self, x):
        return x, x * 2


class Takes(nn.Module):
    def forward(self, pair):
        return pair[0] + pair[1] * pair[0]


def layers() -> nn.Sequential:
    return nn.Sequential(
        StashA(), nn.Linear(4, 4), nn.Tanh(), Returns(),
        Takes(), Residual(4),
        PopAStashB(), Residual(4), nn.Linear(4, 4),
        PopB(), Residual(4), nn.Linear(4, 4),
    )  # fmt: skip


BALANCE = [4, 2, 3, 3]

# For each stage the device and the number of the worker.
LAYOUTS = {
    "one device": [(0, 0), (0, 1), (0, 2), (0, 3)],
    "one device, two workers": [(0, 0), (0, 1), (0, 0), (0, 1)],
    "two devices": [(0, 0), (1, 1), (0, 2), (1, 3)],
    "four devices": [(0, 0), (1, 1), (2, 2), (3, 3)],
}


class Scenario:
    """A pipe on made-up streams, and what people do with it.

    Args:
        callers: which streams the caller uses: "default" ones or "own" ones.
        workers: "private" ones have a compute stream of their own, "shared" ones the caller's.
    """

    def __init__(
        self, world: AutogradWorld, layout: str, *, checkpoint: str, chunks: int,
        callers: str = "own", workers: str = "private",
    ) -> None:  # fmt: skip
        self.world = world
        places = LAYOUTS[layout]
        devices = sorted({device for device, _ in places})
        if callers == "own":
            self.callers = [Stream("caller", device) for device in reversed(devices)]
        else:
            self.callers = [world.default(device) for device in reversed(devices)]
            for stream in self.callers:
                stream.name = "default (caller)"
        made: dict[int, Worker] = {}
        for device, number in places:
            if number not in made:
                streams = FakeStreams(world, device)
                made[number] = Worker(f"cpu:{device}", streams=streams)
                if workers == "shared":
                    made[number]._private = False
                    streams.names.remove("compute")
        self.first, self.last = places[0][0], places[-1][0]
        self.pipe = Pipe(
            layers(), BALANCE, devices=[made[number] for _, number in places],
            chunks=chunks, checkpoint=checkpoint,
        )  # fmt: skip
        self.homes = [
            (t, device)
            for partition, (device, _) in zip(self.pipe.partitions, places, strict=True)
            for t in parameters_of(partition)
        ]
        for tensor, device in self.homes:
            world.adopt([tensor], device)

    def input(self, *, requires_grad: bool = False) -> torch.Tensor:
        with self.world.on(self.world.current(self.first)), self.world.watch():
            x = torch.randn(8, 4)
        return x.requires_grad_(requires_grad)

    def train(self, *, requires_grad: bool = False) -> None:
        """A step as in any training loop."""
        with self.world.on(*self.callers):
            self.pipe.train()
            output = self.pipe(self.input(requires_grad=requires_grad))
            with self.world.watch():
                loss = (output * output).sum()
            del output
            self.world.backward(loss)
            self.optimize()

    def train_directly(self) -> None:
        """Backward starts at the output of the pipe, and the gradient is used afterwards."""
        with self.world.on(*self.callers):
            x = self.input(requires_grad=True)
            output = self.pipe(x)
            with self.world.on(self.world.current(self.last)), self.world.watch():
                grad = torch.ones_like(output)
            self.world.backward(output, grad)
            with self.world.watch():
                x.grad.mul_(2)
            self.optimize()

    @torch.no_grad()
    def optimize(self) -> None:
        with self.world.watch():
            for tensor, device in self.homes:
                if tensor.grad is not None:
                    assert self.world.device_of(tensor.grad) == device
                    tensor.sub_(tensor.grad, alpha=0.01)
                    tensor.grad = None

    @torch.no_grad()
    def evaluate(self) -> None:
        """Input and parameters are overwritten, the output is used, and then its memory."""
        with self.world.on(*self.callers):
            self.pipe.eval()
            x = self.input()
            output = self.pipe(x)
            with self.world.watch():
                x.zero_()
                output.mul_(2)
                for tensor, _ in self.homes:
                    tensor.mul_(0.99)
            del output
            self.pipe(self.input())

    def train_beside(self) -> None:
        """The input lives in the graph alone, and the caller's own nodes go back last."""
        with self.world.on(*self.callers):
            with self.world.on(self.world.current(self.last)), self.world.watch():
                weight = torch.ones(8, 4).requires_grad_()
                beside = (weight * 2).exp()
                self.world.tag([beside])
            output = self.pipe(self.input())
            with self.world.watch():
                loss = (output + beside).sum()
            del output, beside
            self.world.backward(loss)
            self.optimize()

    @torch.no_grad()
    def take_turns(self) -> None:
        """Callers on several streams, one after another, use their outputs and drop them."""
        before = list(self.callers)
        for k in range(3):
            with self.world.on(*(Stream(f"caller {k}", s.device) for s in before)):
                for stream in before:  # the parameters are ready
                    self.world.current(stream.device).join(stream.clock)
                output = self.pipe(self.input())
                with self.world.watch():
                    output.sum()
                del output
                turn = [self.world.current(stream.device) for stream in before]
            self.turns += turn
        for stream in before:  # they may be changed again
            for other in self.turns:
                if other.device == stream.device:
                    stream.join(other.clock)

    def go_back_twice(self) -> None:
        """Gradients are read between two backwards, without a call in between."""
        with self.world.on(*self.callers):
            self.pipe.train()
            losses = []
            for _ in range(2):
                output = self.pipe(self.input())
                with self.world.watch():
                    losses.append((output * output).sum())
                del output
            while losses:
                self.world.backward(losses.pop())
                with self.world.watch(), torch.no_grad():
                    for tensor, _ in self.homes:
                        if tensor.grad is not None:
                            tensor.grad.sum()
            self.optimize()

    def run(self, times: int) -> list[str]:
        self.turns: list[Stream] = []
        for _ in range(times):
            self.train_beside()
            self.take_turns()
            self.train()
            self.train(requires_grad=True)
            self.train_directly()
            self.go_back_twice()
            self.evaluate()
        return self.world.reports


@pytest.fixture
def world(monkeypatch) -> AutogradWorld:
    """A world that the library works in: devices are told apart, and graph nodes are tagged."""
    world = AutogradWorld()
    driver, end = syncpipe.training.forward, syncpipe.training.cell._end
    alias = driver._alias
    scatter, gather = driver.scatter, driver.gather
    captured = syncpipe.training.forward.captured
    sums = syncpipe.training.forward.Captured.sums
    real = torch.Tensor.device

    def watched_scatter(input, chunks):
        with world.watch():
            pieces = scatter(input, chunks)
        world.tag(tensors_in(pieces))
        return pieces

    def watched_gather(outputs):
        with world.watch():
            gathered = gather(outputs)
        world.tag(tensors_in(gathered))
        return gathered

    def tagged(function):
        def apply(*args):
            made = function(*args)
            world.tag(made)
            return made

        return apply

    def tagged_alias(tensor):
        made = alias(tensor)
        world.tag([made])
        return made

    def tagged_end(tensor):
        world.tag([tensor])
        return end(tensor)

    def acted(roots, grads, leaves, *, keep):
        with world.nested(), world.going_back():
            found = captured(roots, grads, leaves, keep=keep)
        for leaf in leaves:  # their nodes have not run
            get_gradient_edge(leaf).node.metadata.get("arrived", {}).clear()
        return found

    def watched_sums(self):
        with world.watch():
            return sums(self)

    def device(tensor):
        block = world.block_of(tensor)
        return real.__get__(tensor) if block is None else torch.device("cpu", block.device)

    monkeypatch.setattr(driver, "scatter", watched_scatter)
    monkeypatch.setattr(driver, "gather", watched_gather)
    monkeypatch.setattr(driver._Node, "apply", tagged(driver._Node.apply))
    monkeypatch.setattr(driver, "_alias", tagged_alias)
    monkeypatch.setattr(syncpipe.training.cell, "_end", tagged_end)
    monkeypatch.setattr(syncpipe.training.forward, "captured", acted)
    monkeypatch.setattr(syncpipe.training.forward.Captured, "sums", watched_sums)
    monkeypatch.setattr(torch.Tensor, "device", property(device), raising=False)
    monkeypatch.setattr(syncpipe.runtime.streams, "same_memory", lambda a, b: a == b)
    monkeypatch.setattr(syncpipe.stages.call, "same_memory", lambda a, b: a == b)
    return world


@contextlib.contextmanager
def running(how: str) -> Iterator[None]:
    with inline() if how == "inline" else contextlib.nullcontext():
        yield


# Of all combinations a sixth: with each layout and driver any two of the other four meet.
USES = [
    (*use, "threads" if k % 2 else "inline")
    for k, use in enumerate(
        (workers, callers, checkpoint, chunks)
        for k, (workers, callers) in enumerate(
            itertools.product(["private", "shared"], ["own", "default"])
        )
        for a, checkpoint in enumerate(["always", "except_last", "never"])
        for b, chunks in enumerate([1, 2, 4])
        if (k + a + b) % 3 == 0
    )
]


@pytest.mark.parametrize(("workers", "callers", "checkpoint", "chunks", "how"), USES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_race(world, layout, workers, callers, checkpoint, chunks, how):
    scenario = Scenario(
        world, layout, checkpoint=checkpoint, chunks=chunks, callers=callers, workers=workers
    )
    with running(how):
        reports = scenario.run(2)
    assert not reports, "\n".join(dict.fromkeys(reports))
    assert world.operators > 100


@pytest.mark.parametrize("layout", ["one device", "four devices"])
@pytest.mark.parametrize("what", ["wait", "keep"])
def test_what_is_left_out_is_reported(world, layout, what):
    """Line by line that is ``python -m tests.mutations``."""
    world.left_out = what
    with inline():
        reports = Scenario(world, layout, checkpoint="never", chunks=4).run(2)
    assert any(report.startswith("race" if what == "wait" else "reuse") for report in reports)
