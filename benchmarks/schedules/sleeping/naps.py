"""A layer that sleeps instead of computing, so that eight stages fit on two cores.

Forward takes one nap, a whole backward one that is twice as long. Where a zero-bubble schedule
splits the backward, each half takes its own: :func:`splitting_naps` tells syncpipe how to split
the layer, with a rule like those for linear maps and convolutions. So the runtime itself decides
what runs in which half, and the layer only takes its time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from syncpipe.training.weight_gradients_rules import BINDERS

Kinds = tuple[str, ...]
FORWARD, INPUT, WEIGHT = ("forward",), ("backward_input",), ("backward_weight",)
WHOLE = ("backward_input", "backward_weight")


class Naps:
    """How long layers sleep, and which naps they took.

    Args:
        forward: seconds.
        backward_input: seconds for the gradient of the inputs.
        backward_weight: seconds for the gradients of the parameters.
    """

    def __init__(self, forward: float, backward_input: float, backward_weight: float) -> None:
        self.seconds = {
            "forward": forward,
            "backward_input": backward_input,
            "backward_weight": backward_weight,
        }
        self.taken: list[Kinds] = []

    def take(self, kinds: Kinds) -> None:
        """One nap, for one kind of work or for several."""
        self.taken.append(kinds)
        time.sleep(sum(self.seconds[kind] for kind in kinds))


class NappingLinear(nn.Module):
    """A linear map that takes its time.

    Args:
        width: of inputs and outputs.
        naps: that it takes.
        splits: whether its backward can be split.
    """

    def __init__(self, width: int, naps: Naps, *, splits: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.naps = naps
        self._function = napping if splits else napping_whole

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self._function(x, self.linear.weight, self.linear.bias, self.naps)
        return y


def napping(x: Tensor, weight: Tensor, bias: Tensor, naps: Naps) -> Tensor:
    """``F.linear`` with naps; modes see it, as they see functions of PyTorch."""
    if has_torch_function((x, weight, bias)):
        y: Tensor = handle_torch_function(napping, (x, weight, bias), x, weight, bias, naps)
        return y
    return napping_whole(x, weight, bias, naps)


def napping_whole(x: Tensor, weight: Tensor, bias: Tensor, naps: Naps) -> Tensor:
    """The same, out of sight of modes."""
    y: Tensor = _Napping.apply(x, weight, bias, naps)  # type: ignore[no-untyped-call]
    return y


class _Napping(torch.autograd.Function):
    """Forward and whole backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, naps: Naps) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.naps = naps
        naps.take(FORWARD)
        return torch.addmm(bias, x, weight.t())

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        ctx.naps.take(WHOLE)
        return gy.mm(weight), gy.t().mm(x), gy.sum(0), None


class _Rule:
    """How syncpipe splits the layer (``syncpipe.training.weight_gradients_rules.Rule``)."""

    defers_bias = False  # so that there is an input half on the first stage, too
    reads_weight = True

    def __init__(self, naps: Naps) -> None:
        self._naps = naps

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        self._naps.take(FORWARD)
        assert bias is not None
        return torch.addmm(bias, x, weight.t())

    def gradients(
        self, gy: Tensor, x: Tensor, weight: Tensor | None, mask: Sequence[bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        self._naps.take(WHOLE if mask[1] else INPUT)
        assert weight is not None
        return (
            gy.mm(weight) if mask[0] else None,
            gy.t().mm(x) if mask[1] else None,
            gy.sum(0) if mask[2] else None,
        )

    def accumulate(
        self, gy: Tensor, x: Tensor, weight: Tensor | None, into: Tensor, bias: Tensor | None
    ) -> None:
        self._naps.take(WEIGHT)
        gradient = gy.t().mm(x)
        into.grad = gradient if into.grad is None else into.grad.add_(gradient)


def _bind(x: Tensor, weight: Tensor, bias: Tensor, naps: Naps) -> Any:
    return _Rule(naps), x, weight, bias


@contextmanager
def splitting_naps() -> Iterator[None]:
    """In here syncpipe can split the backward of layers that nap."""
    BINDERS[napping] = _bind
    try:
        yield
    finally:
        del BINDERS[napping]
