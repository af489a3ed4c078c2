"""A layer that sleeps instead of computing, so that eight stages fit on two cores.

Forward takes one nap, a whole backward one that is twice as long. Where a zero-bubble schedule
splits the backward, each half takes its own: :func:`splitting_naps` tells syncpipe how to split
the layer, as it splits linear maps and convolutions. So the runtime itself decides
what runs in which half, and the layer only takes its time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from syncpipe.training.weight_gradients import PRODUCTS, add_to_grad

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
        self._function = _Napping if splits else _NappingWhole

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.linear.weight, self.linear.bias
        y: Tensor = self._function.apply(x, weight, bias, self.naps)  # type: ignore[no-untyped-call]
        return y


class _NappingWhole(torch.autograd.Function):
    """Forward and backward; in an input half nobody asks for the gradient of the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, naps: Naps) -> Tensor:
        ctx.x, ctx.naps = x.detach(), naps
        ctx.save_for_backward(weight)
        naps.take(FORWARD)
        return torch.addmm(bias, x, weight.t())

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        whole = torch._C._will_engine_execute_node(ctx.next_functions[1][0])
        ctx.naps.take(WHOLE if whole else INPUT)
        return gy.mm(weight), gy.t().mm(ctx.x) if whole else None, gy.sum(0), None


class _Napping(_NappingWhole):
    """The same, which syncpipe may split."""


class _Product:
    """How (``syncpipe.training.weight_gradients.Product``)."""

    factor, weight, bias = "x", 1, None

    def settings(self, node: Any) -> Naps:
        """Its naps."""
        naps: Naps = node.naps
        return naps

    def accumulate(
        self, settings: Naps, gy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> None:
        """The weight half."""
        settings.take(WEIGHT)
        add_to_grad(weight, gy.t().mm(x))


@contextmanager
def splitting_naps() -> Iterator[None]:
    """In here syncpipe can split the backward of layers that nap."""
    PRODUCTS["_NappingBackward"] = _Product()
    try:
        yield
    finally:
        del PRODUCTS["_NappingBackward"]
