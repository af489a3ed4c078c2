"""A pipe that fails where it is told to, and what ``.grad`` was before."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from syncpipe import Pipe
from tests.support.training import ANY_RUNS, assert_trains_as
from tests.support.watched import Fails, numbered

CHUNKS = 3


def failing_pipe(run: str, checkpoint: str = "always") -> Pipe:
    layers = nn.Sequential(*(Fails() for _ in range(4)))
    return Pipe(layers, [1] * 4, devices=ANY_RUNS[run][1], chunks=CHUNKS, checkpoint=checkpoint)


class Grads:
    """What ``.grad`` was; half of the parameters have one."""

    def __init__(self, module: nn.Module) -> None:
        self.parameters = list(module.parameters())
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


def assert_works(pipe: Pipe, run: str) -> None:
    """The next call is as if nothing had been."""
    pipe.zero_grad()
    plain = nn.Sequential(*(Fails() for _ in pipe))
    plain.load_state_dict(pipe.state_dict())
    x = numbered(CHUNKS).requires_grad_()
    assert_trains_as(pipe, plain, x, loss_fn=mean, **ANY_RUNS[run][0])


def mean(y: Tensor) -> Tensor:
    return y.pow(2).mean()


def notes_of(error: BaseException) -> str:
    return "\n".join(getattr(error, "__notes__", []))
