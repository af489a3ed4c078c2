"""AmoebaNet-D, each cell opened up into single operations.

A cell computes hidden states 2 to 6, each the sum of two operations on earlier ones. States 0 and 1
come from the two cells before. Between the layers of one cell travels a dict of those states that
are still needed; the output of the cell before the last one comes as a skip, over a whole cell::

    cell k-1 -> Squeeze ------> Reach -> Operate -> ... -> Operate -> Leave -> cell k+1 -> Reach
                   |   state 1   ^ states 0, 1                                               ^
                   |             '- from cell k-2                                            |
                   '---------------------- the output of cell k-1 ---------------------------'
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from syncpipe.skip import Namespace, pop, skippable, stash

from .layers import GlobalAverage, Remember

States = dict[int, Tensor]
Pair = tuple[tuple[int, str], tuple[int, str]]
"""Two times the hidden state and the operation on it; their sum is the next hidden state."""


@dataclass(frozen=True)
class CellKind:
    """A cell: the pairs that make states 2, 3, ..., and the states that are its output."""

    pairs: tuple[Pair, ...]
    output: tuple[int, ...]
    stride: int


NORMAL = CellKind(
    pairs=(
        ((1, "1x1"), (1, "max 3x3")),
        ((1, "none"), (0, "1x7 7x1")),
        ((0, "1x1"), (0, "1x7 7x1")),
        ((2, "max 3x3"), (2, "none")),
        ((1, "avg 3x3"), (5, "1x1")),
    ),
    output=(0, 3, 4, 6),
    stride=1,
)
REDUCTION = CellKind(
    pairs=(
        ((0, "max 2x2"), (0, "max 3x3")),
        ((2, "none"), (1, "3x3")),
        ((2, "1x7 7x1"), (2, "max 3x3")),
        ((3, "none"), (1, "max 2x2")),
        ((2, "avg 3x3"), (3, "1x1")),
    ),
    output=(4, 5, 6),
    stride=2,
)


# -- operations -----------------------------------------------------------------------------------


def _conv(channels_in: int, channels: int, kernel: tuple[int, int], stride: int = 1) -> list[Any]:
    padding = (kernel[0] // 2, kernel[1] // 2)
    return [
        nn.ReLU(),
        nn.Conv2d(channels_in, channels, kernel, stride, padding, bias=False),
        nn.BatchNorm2d(channels),
    ]


def _squeezed(channels: int, stride: int, *kernels: tuple[int, int]) -> nn.Sequential:
    """Convolutions on a quarter of the channels; they stride along the axes that they cover."""
    inside = channels // 4
    layers = _conv(channels, inside, (1, 1))
    for kernel in kernels:
        own = tuple(stride if size > 1 else 1 for size in kernel)
        layers += _conv(inside, inside, kernel, own)
    return nn.Sequential(*layers, *_conv(inside, channels, (1, 1)))


class Halve(nn.Module):
    """Half as many pixels each way, and any number of channels.

    Half of the channels come from the pixels in even rows and columns, half from those in odd ones.
    """

    def __init__(self, channels_in: int, channels: int) -> None:
        super().__init__()
        self.even = nn.Conv2d(channels_in, channels // 2, 1, stride=2, bias=False)
        self.odd = nn.Conv2d(channels_in, channels - channels // 2, 1, stride=2, bias=False)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(x)
        shifted = F.pad(x, (-1, 1, -1, 1))  # by one pixel to the left and up
        return self.norm(torch.cat([self.even(x), self.odd(shifted)], dim=1))


OPERATIONS: dict[str, Callable[[int, int], nn.Module]] = {
    "1x1": lambda channels, stride: nn.Sequential(*_conv(channels, channels, (1, 1), stride)),
    "3x3": lambda channels, stride: _squeezed(channels, stride, (3, 3)),
    "1x7 7x1": lambda channels, stride: _squeezed(channels, stride, (1, 7), (7, 1)),
    "max 2x2": lambda _, stride: nn.MaxPool2d(2, stride),
    "max 3x3": lambda _, stride: nn.MaxPool2d(3, stride, padding=1),
    "avg 3x3": lambda _, stride: nn.AvgPool2d(3, stride, padding=1, count_include_pad=False),
}


# -- the layers of a cell -------------------------------------------------------------------------


class Squeeze(nn.Module):
    """Begins a cell: state 1 from the output of the cell before."""

    def __init__(self, channels_in: int, channels: int) -> None:
        super().__init__()
        self.squeeze = nn.Sequential(*_conv(channels_in, channels, (1, 1)))

    def forward(self, x: Tensor) -> Any:
        return {1: self.squeeze(x)}


@skippable(stash=["skip"])
class SqueezeAndRemember(Squeeze):
    """The same; the next cell will need the output of the cell before as well."""

    def forward(self, x: Tensor) -> Generator[Any, Any, States]:
        yield stash("skip", x)
        return {1: self.squeeze(x)}


@skippable(pop=["skip"])
class Reach(nn.Module):
    """State 0 from the output of the cell before the last one."""

    def __init__(self, squeeze: nn.Module) -> None:
        super().__init__()
        self.squeeze = squeeze

    def forward(self, states: States) -> Generator[Any, Any, States]:
        earlier = yield pop("skip")
        return {0: self.squeeze(earlier), **states}


class Operate(nn.Module):
    """One operation on one hidden state; its result is added to the state that it makes.

    Args:
        operation: what is done.
        source: the state that it is done to.
        also: a state that is added as it is; None for none.
        target: the state that is made, or added to where it is there already.
        needed: the states that later layers of the cell need; the others end here.
    """

    def __init__(
        self, operation: nn.Module, source: int, also: int | None, target: int, needed: set[int]
    ) -> None:
        super().__init__()
        self.operation = operation
        self.source, self.also, self.target = source, also, target
        self.needed = frozenset(needed | {target})

    def forward(self, states: States) -> States:
        result = self.operation(states[self.source])
        if self.also is not None:
            result = result + states[self.also]
        if self.target in states:
            result = states[self.target] + result
        states = {**states, self.target: result}
        return {state: value for state, value in states.items() if state in self.needed}

    def extra_repr(self) -> str:
        also = "" if self.also is None else f" + h{self.also}"
        return f"h{self.target} <- h{self.source}{also}"


class Leave(nn.Module):
    """Ends a cell: its output is the channels of all states that are left."""

    def forward(self, states: States) -> Tensor:
        return torch.cat([states[state] for state in sorted(states)], dim=1)


def _operations(kind: CellKind, channels: int) -> Iterator[Operate]:
    steps: list[tuple[str, int, int | None, int]] = []
    for target, pair in enumerate(kind.pairs, start=2):
        # Where one of the two only passes its state on, the layer of the other one adds it.
        plain = [state for state, name in pair if name == "none"]
        rest = [(state, name) for state, name in pair if name != "none"]
        for (state, name), also in zip(rest, plain or [None, None], strict=True):
            steps.append((name, state, also, target))
    for k, (name, source, also, target) in enumerate(steps):
        needed = {state for step in steps[k + 1 :] for state in step[1:3] if state is not None}
        stride = kind.stride if source < 2 else 1  # states 2 to 6 are small already
        operation = OPERATIONS[name](channels, stride)
        yield Operate(operation, source, also, target, needed | set(kind.output))


# -- the network ----------------------------------------------------------------------------------


def _kinds(num_layers: int) -> Iterator[CellKind]:
    normal = [NORMAL] * (num_layers // 3)
    yield from (REDUCTION, REDUCTION, *normal, REDUCTION, *normal, REDUCTION, *normal)


def amoebanetd(
    num_classes: int = 1000, num_layers: int = 18, num_filters: int = 256
) -> nn.Sequential:
    """AmoebaNet-D (L, D): from ``[N, 3, H, W]`` to ``[N, num_classes]``.

    Source: Real et al. 2018, "Regularized Evolution for Image Classifier Architecture Search",
    https://arxiv.org/abs/1802.01548, the figure of AmoebaNet-D in its appendix for the cells and
    figure 1 for how they are stacked; L and D as in GPipe's Table 1 (Huang et al. 2018,
    https://arxiv.org/abs/1811.06965).

    Assumed, mostly after the code that its authors published (tensorflow/tpu, amoeba_net), with
    which the published numbers of parameters agree:

    - The stem is a 3x3 convolution with stride 2 and D / 4 channels, and two reduction cells. Each
      reduction cell, these included, doubles the channels: cells of D, 2 D and 4 D channels follow.
    - A normal cell puts out states 0, 3, 4 and 6. By the rule of the paper, states that nothing
      uses, it would be 3, 4 and 6, and the models a good tenth smaller than published.
    - 3x3 and 1x7 7x1 convolutions work on a quarter of the channels, between two 1x1.
    - Convolutions come as ReLU, convolution, batch normalization. After a reduction cell, state 0
      is halved as in NASNet.
    - No auxiliary classifier, no dropped paths, no dropout, and 1,000 classes.

    Args:
        num_classes: of the classifier.
        num_layers: L, the number of normal cells, a multiple of 3.
        num_filters: D, a multiple of 8.

    Returns:
        11 * (num_layers + 4) + 6 layers: 8 of the 11 of a cell are its operations. Height and width
        of the pictures must be multiples of 32.

    Raises:
        ValueError: numbers of which no such network can be made.
    """
    if num_layers < 3 or num_layers % 3:
        raise ValueError(f"num_layers={num_layers}: it must be a multiple of 3, for 3 equal groups")
    if num_filters < 8 or num_filters % 8:
        raise ValueError(f"num_filters={num_filters}: it must be a multiple of 8")
    kinds = list(_kinds(num_layers))
    channels = num_filters // 4
    earlier = before = channels  # that the cell before the last one puts out, and the last one
    sent = Namespace()
    layers: list[nn.Module] = [
        nn.Conv2d(3, channels, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(channels),
        Remember().isolate(sent),
    ]
    for k, kind in enumerate(kinds):
        channels *= kind.stride
        arriving, sent = sent, Namespace()
        layers.append(
            Squeeze(before, channels)
            if k == len(kinds) - 1
            else SqueezeAndRemember(before, channels).isolate(sent)
        )
        after_reduction = k > 0 and kinds[k - 1].stride == 2
        squeeze = (
            Halve(earlier, channels)
            if after_reduction
            else nn.Sequential(*_conv(earlier, channels, (1, 1)))
        )
        layers += [Reach(squeeze).isolate(arriving), *_operations(kind, channels), Leave()]
        earlier, before = before, channels * len(kind.output)
    head: Sequence[nn.Module] = [nn.ReLU(), GlobalAverage(), nn.Linear(before, num_classes)]
    return nn.Sequential(*layers, *head)
