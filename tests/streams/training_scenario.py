"""What people do with ``train_batch`` and ``eval_batch``, on made-up streams."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests.streams.happens_before import Stream
from tests.streams.happens_before_autograd import AutogradWorld
from tests.streams.test_streams import Scenario

CHUNKS = 4


class Criterion(nn.Module):
    """A loss with a parameter of its own, alone or with a weight that is a tensor of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.weighted = False
        self.fails = False

    def forward(self, output, target):
        loss = (output * self.scale - target).square().mean()
        if self.fails:
            raise ValueError("as it was told")
        return (loss, (target > -0.5).sum()) if self.weighted else loss


class Training(Scenario):
    """A pipe on made-up streams, and what people do with ``train_batch`` and ``eval_batch``."""

    def __init__(self, world: AutogradWorld, layout: str, schedule: str, **options: Any) -> None:
        super().__init__(world, layout, chunks=CHUNKS, **options)
        self.schedule = schedule
        self.criterion = Criterion()
        self.homes.append((self.criterion.scale, self.last))
        world.adopt([self.criterion.scale], self.last)
        self.turns: list[Stream] = []

    def on(self, device: int, *, requires_grad: bool = False) -> torch.Tensor:
        """A mini-batch of whatever, made by the caller on a device."""
        with self.world.on(self.world.current(device)), self.world.watch():
            made = torch.randn(8, 4)
        return made.requires_grad_(requires_grad)

    def batch(self, *args: Any, **options: Any) -> Any:
        options = {"loss_fn": self.criterion, "schedule": self.schedule, **options}
        return self.pipe.train_batch(*args, **options)

    def overwrite(self, *tensors: torch.Tensor) -> None:
        with self.world.watch(), torch.no_grad():
            for tensor in tensors:
                tensor.zero_()

    def step(self, target_on: int, *, weighted: bool = False) -> None:
        """Everything that went in is overwritten, and everything that came out is used."""
        with self.world.on(*self.callers):
            self.criterion.weighted = weighted
            x, target = self.on(self.first, requires_grad=True), self.on(target_on)
            loss, output = self.batch(x, target, return_outputs=True)
            self.overwrite(x, target, loss, output, x.grad)
            del loss, output
            self.optimize()

    def accumulate(self) -> None:
        """Gradients are there already; the second time they are scaled in the end."""
        with self.world.on(*self.callers):
            for weighted in (False, True):
                self.criterion.weighted = weighted
                self.batch(self.on(self.first), self.on(self.last))
            self.optimize()

    def fail(self) -> None:
        """Gradients are put back, used, and so is the memory of what the call had in hands."""
        with self.world.on(*self.callers):
            self.criterion.weighted = False
            self.batch(self.on(self.first), self.on(self.last))
            self.criterion.fails = True
            with pytest.raises(ValueError, match="as it was told"):
                self.batch(self.on(self.first), self.on(self.last))
            self.criterion.fails = False
            self.optimize()

    def iterate(self) -> None:
        """Micro-batches are made on the way, of data on several devices, and dropped there."""
        with self.world.on(*self.callers):
            source = [self.on(self.first), self.on(self.last)]
            rows = [0, 3, 4, 6, 8]  # of different sizes

            def micro_batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
                for begin, end in itertools.pairwise(rows):
                    x, target = (whole[begin:end] * 2 for whole in source)
                    if begin == 4:
                        x, target = target, x  # each on the other's device
                    yield x, target
                    del x, target

            self.criterion.weighted = False
            self.batch(data_iter=micro_batches())
            self.overwrite(*source)
            self.optimize()
            with torch.no_grad():
                source = [self.on(self.first), self.on(self.last)]
                loss = self.pipe.eval_batch(data_iter=micro_batches(), loss_fn=self.criterion)
                self.overwrite(*source, loss)

    def evaluate_target(self, device: int) -> None:
        """Nothing goes back, so nothing but the call's end says that the target was read."""
        with self.world.on(*self.callers):
            self.criterion.weighted = False
            x, target = self.on(self.first), self.on(device)
            loss = self.pipe.eval_batch(x, target, loss_fn=self.criterion)
            self.overwrite(x, target, loss)

    def mix(self) -> None:
        """``pipe(x)`` and ``train_batch`` add to the same gradients."""
        with self.world.on(*self.callers):
            self.pipe.train()
            output = self.pipe(self.on(self.first))
            with self.world.watch():
                loss = (output * output).sum()
            del output
            self.world.backward(loss)
            del loss
            self.batch(self.on(self.first), self.on(self.last))
            self.optimize()

    def mix_on_other_streams(self) -> None:
        """A graph of ``pipe(x)`` keeps alive the nodes that add to ``.grad``, on its streams."""
        with self.world.on(*self.callers):
            self.pipe.train()
            output = self.pipe(self.on(self.first))
        with self.world.on(*self.turn("other")):
            self.batch(self.on(self.first), self.on(self.last))
            del output
            self.optimize()
        self.end_turns()

    def take_turns_training(self) -> None:
        """Callers on several streams that do not wait for each other, in training and without."""

        def train(weighted: bool) -> None:
            self.criterion.weighted = weighted
            self.batch(self.on(self.first, requires_grad=True), self.on(self.last))
            for tensor, _ in self.homes:
                tensor.grad = None

        def evaluate(loss_fn: Any) -> None:
            target = None if loss_fn is None else self.on(self.last)
            self.overwrite(self.pipe.eval_batch(self.on(self.first), target, loss_fn=loss_fn))

        self.criterion.weighted = False
        for use, option in (
            (train, False), (train, True), (evaluate, self.criterion), (evaluate, None),
        ):  # fmt: skip
            for k in range(2):
                with self.world.on(*self.turn(f"caller {k}")):
                    use(option)
            self.end_turns()

    def turn(self, name: str) -> list[Stream]:
        """Streams for a caller to whom the parameters are ready."""
        streams = [Stream(name, stream.device) for stream in self.callers]
        for stream, before in zip(streams, self.callers, strict=True):
            stream.join(before.clock)
        self.turns += streams
        return streams

    def end_turns(self) -> None:
        """The parameters may be changed again."""
        for stream in self.callers:
            for other in self.turns:
                if other.device == stream.device:
                    stream.join(other.clock)
        self.turns.clear()

    def run(self) -> list[str]:
        for target_on in {self.first, self.last}:
            self.step(target_on)
            self.evaluate_target(target_on)
        self.step(self.last, weighted=True)
        self.accumulate()
        self.take_turns_training()
        self.fail()
        self.iterate()
        self.mix()
        self.mix_on_other_streams()
        self.step(self.last)
        return self.world.reports
