"""A pipe that fails where it is told to, and what ``.grad`` was before."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from syncpipe import Pipe
from tests.support.models import in_turn, step
from tests.support.running import assert_same
from tests.support.training import ANY_RUNS, FOUR, assert_trains_as
from tests.support.watched import Fails, numbered

CHUNKS, REPLICAS = 3, [2, 1, 3, 1]


def failing_pipe(run: str = "1f1b", checkpoint: str = "always") -> Pipe:
    """Four stages on the devices of a schedule, or on a worker each, or on several."""
    layers = nn.Sequential(*(Fails() for _ in range(4)))
    options = {"devices": ANY_RUNS.get(run, ((), FOUR))[1], "chunks": CHUNKS}
    if "replicas" in run:
        options |= {"replicas": REPLICAS, "devices": [f"cpu:{k}" for k in range(sum(REPLICAS))]}
    return Pipe(layers, [1] * 4, checkpoint=checkpoint, **options)


class Grads:
    """What ``.grad`` was; half of the parameters have one."""

    def __init__(self, *modules: nn.Module) -> None:
        self.parameters = [p for module in modules for p in module.parameters()]
        for parameter in self.parameters[::2]:
            parameter.grad = torch.randn_like(parameter)
        self.tensors = [p.grad for p in self.parameters]
        self.values = [None if p.grad is None else p.grad.clone() for p in self.parameters]

    def unchanged(self) -> bool:
        """The same tensors, with the same values; None where there was none."""
        pairs = zip(self.parameters, self.tensors, self.values, strict=True)
        return all(
            p.grad is tensor and (value is None or torch.equal(p.grad, value))
            for p, tensor, value in pairs
        )

    def put_back(self) -> None:
        """After a call that was to add to them."""
        for p, grad, value in zip(self.parameters, self.tensors, self.values, strict=True):
            p.grad = None if grad is None else grad.copy_(value)


def assert_works(pipe: Pipe, run: str = "1f1b") -> None:
    """The next calls are as if nothing had been."""
    pipe.zero_grad()
    plain = nn.Sequential(*(Fails() for _ in pipe))
    plain.load_state_dict(pipe.state_dict())
    x = numbered(CHUNKS).requires_grad_()
    options, _ = ANY_RUNS.get(run, ({}, ()))
    assert_trains_as(pipe, plain, x, loss_fn=mean, **options)
    there = step(in_turn(plain, CHUNKS), plain, x)
    assert_same(step(pipe, pipe, x), there, rounded="replicas" in run)


def mean(y: Tensor) -> Tensor:
    return y.pow(2).mean()


def notes_of(error: BaseException) -> str:
    return "\n".join(getattr(error, "__notes__", []))
