"""``eval_batch``: outputs and losses, modes and generators as they were."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from syncpipe import Pipe
from tests.fuzz.models import dawdling
from tests.support.running import Do, in_threads, pipe_of, raising
from tests.support.watched import Memory, alive


def test_eval_batch_in_several_threads_leaves_the_flags_and_is_right():
    layers = nn.Sequential(nn.Dropout(), nn.Sequential(nn.Linear(3, 3), dawdling(1)), nn.Dropout())
    pipe, x = pipe_of(layers, chunks=2), torch.ones(4, 3)
    expected = pipe.eval_batch(x)

    def evaluate(_):
        return all(torch.equal(pipe.eval_batch(x), expected) for _ in range(60))

    assert in_threads(evaluate, *range(3)) == [True] * 3
    assert all(modes_of(pipe))


def test_eval_batch_never_recomputes_and_stores_nothing():
    references: list[Any] = []
    counts = []

    def look(x):
        y = x * 2
        counts.append(alive(references))
        references.append(Memory(y))
        return y.sin()

    pipe = pipe_of(nn.Sequential(nn.Linear(3, 3), Do(look)), chunks=4, checkpoint="always")
    pipe.eval_batch(torch.randn(8, 3), loss_fn=torch.sum, verify=False)
    assert counts == [0] * 4
    assert alive(references) == 0


class Merging(nn.Linear):
    """Adds a low-rank part in training; in evaluation it is merged into the weight (LoRA)."""

    def __init__(self, width: int = 4) -> None:
        self.merged = False
        super().__init__(width, width)
        self.down, self.up = (nn.Parameter(torch.ones(s)) for s in ((1, width), (width, 1)))
        self.errors: dict[bool, BaseException] = {}  # by mode, each once

    def train(self, mode: bool = True) -> Merging:
        if mode in self.errors:
            raise self.errors.pop(mode)
        super().train(mode)
        if self.merged == mode:
            with torch.no_grad():
                self.weight += (self.up @ self.down) * (-1 if mode else 1)
            self.merged = not mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        assert self.merged != self.training
        y = super().forward(x)
        return y + 1000 if self.training else y  # so that one can tell


class Listed(nn.Module):
    """Holds a module in a plain list, and passes the mode on."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = [inner]

    def train(self, mode: bool = True) -> Listed:
        super().train(mode)
        self.inner[0].train(mode)
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.inner[0](x)


def layers() -> nn.Sequential:
    return nn.Sequential(
        Merging(), Listed(nn.Dropout(0.9)), nn.Sequential(nn.BatchNorm1d(4), Merging()), nn.Tanh()
    )


def modes_of(pipe: Pipe) -> list[bool]:
    inside = [m.inner[0] for m in pipe.modules() if isinstance(m, Listed)]
    return [m.training for m in [*pipe.modules(), *pipe.partitions, *inside]]


@pytest.mark.parametrize("trains", ["all", "all but one", "one", "none"])
def test_weights_and_modes_are_back_afterwards(trains):
    pipe = pipe_of(layers(), chunks=2)
    if trains == "all but one":
        pipe[2].eval()  # frozen statistics, and merged weights
    elif trains == "one":
        pipe.eval()[0].train()
    elif trains == "none":
        pipe.eval()
    plain, x = copy.deepcopy(nn.Sequential(*pipe)).eval(), torch.randn(6, 4)
    weight, modes = pipe[0].weight.detach().clone(), modes_of(pipe)
    if trains == "none":
        pipe[0].train = lambda mode=True: pytest.fail("train() was called")
    assert torch.equal(pipe.eval_batch(x), torch.cat([plain(half) for half in x.chunk(2)]))
    for error in (OSError, KeyboardInterrupt) if trains == "all" else ():
        for where in ("loss", "back", "into eval mode"):
            loss_fn = raising(error) if where == "loss" else torch.sum
            if where != "loss":
                pipe[2][1].errors[where == "back"] = error()
            with pytest.raises(error):
                pipe.eval_batch(x, loss_fn=loss_fn)
    assert pipe[0].merged == (trains == "none")
    assert pipe[2][1].merged == (trains != "all")
    torch.testing.assert_close(pipe[0].weight.detach(), weight)
    assert modes_of(pipe) == modes
