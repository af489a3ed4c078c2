"""Ctrl-C while a model is converted leaves PyTorch, and Python, as they were."""

from __future__ import annotations

import builtins

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction, checkpoint

import syncpipe
from syncpipe.runtime import interrupts
from tests.support.interrupts import Lines


class Model(nn.Module):
    """It has a number that layers follow, and recomputes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.rate = nn.Linear(3, 3), nn.Linear(3, 3), 0.5

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.b, self.a(x) * self.rate, use_reentrant=True)


def patched() -> list[object]:
    """All that a conversion replaces, of which every class has its own."""
    owners: list[type] = [Model, nn.Linear, nn.Module, CheckpointFunction, torch.autograd.Function]
    names = ("__call__", "__setattr__", "__getattribute__", "apply")
    found = [vars(owner).get(name) for owner in owners for name in names]
    return [*found, builtins.len, torch.jit.ScriptFunction.__call__]


def test_ctrl_c_at_any_line_of_what_replaces_and_restores():
    model, x, before = Model(), torch.randn(2, 3), patched()

    def convert() -> None:
        syncpipe.sequential(model, x)

    whole = Lines(lambda code: code.co_filename == interrupts.__file__, None)
    whole.during(convert)
    assert len(whole.seen) > 500
    came = 0
    for at in range(1, len(whole.seen), len(whole.seen) // 40):
        lines = Lines(lambda code: code.co_filename == interrupts.__file__, at)
        try:
            lines.during(convert)
        except KeyboardInterrupt:
            came += 1
        assert patched() == before, whole.seen[at - 1]
    assert came > 30
    assert model.rate == 0.5
