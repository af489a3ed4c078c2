"""Ctrl-C, or another thread, while a model is converted leaves PyTorch and Python as they were."""

from __future__ import annotations

import builtins
import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction, checkpoint

import syncpipe
from syncpipe.layers.conversion import patches
from syncpipe.layers.conversion.patches import Patches
from syncpipe.runtime import interrupts
from tests.support.interrupts import Lines

FILES = {interrupts.__file__, patches.__file__}


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

    whole = Lines(lambda code: code.co_filename in FILES, None)
    whole.during(convert)
    assert len(whole.seen) > 500
    came = 0
    for at in range(1, len(whole.seen), len(whole.seen) // 40):
        lines = Lines(lambda code: code.co_filename in FILES, at)
        try:
            lines.during(convert)
        except KeyboardInterrupt:
            came += 1
        assert patched() == before, whole.seen[at - 1]
    assert came > 30
    assert model.rate == 0.5


def test_what_two_threads_replace_at_once_is_there_again_after_both():
    """The second one must not take for the original what the first one has put there."""
    entered, left = threading.Event(), threading.Event()

    def first(patches: Patches) -> None:
        patches.put(Model, "kind", "first")
        entered.set()
        left.wait(0.5)  # the other one waits, and nothing ends this wait

    def second(patches: Patches) -> None:
        patches.put(Model, "kind", "second")
        left.set()
        other.result()

    with ThreadPoolExecutor(1) as pool:
        one, two = Patches(), Patches()
        other = pool.submit(one.around, lambda: first(one))
        assert entered.wait(10)
        two.around(lambda: second(two))
    assert not hasattr(Model, "kind")
