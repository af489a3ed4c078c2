"""Training under ``autocast``, the caller's or a layer's own: the plain loop's bits."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from tests.support.running import MODES, assert_same, one_by_one, pipe_of, trained

BF16 = torch.bfloat16


def model():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3))


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_training_under_autocast_gives_the_plain_loops_bits_step_after_step(mode, cache):
    ours = model()
    theirs = copy.deepcopy(ours)
    pipe = pipe_of(ours, [2, 3], checkpoint=mode)
    x = torch.randn(8, 6)

    def step(module, run):
        def forward(x):
            with torch.autocast("cpu", dtype=BF16, cache_enabled=cache):
                return run(x)

        result = trained(forward, module, x)
        torch.optim.SGD(module.parameters(), lr=1.0).step()
        return result

    for _ in range(3):
        result = step(ours, pipe)
        assert result[0].dtype == BF16
        assert_same(result, step(theirs, lambda x: one_by_one(theirs, x)))


class OwnAutocast(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        with torch.autocast("cpu", dtype=BF16):
            return self.linear(x).float()


class DecoratedAutocast(OwnAutocast):
    @torch.autocast("cpu", dtype=BF16)
    def forward(self, x):
        return self.linear(x).float()


class SwitchedOff(OwnAutocast):
    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return self.linear(x.float())


@pytest.mark.parametrize("around", [False, True], ids=["alone", "inside the caller's"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layer", [OwnAutocast, DecoratedAutocast, SwitchedOff])
def test_a_layer_with_an_autocast_of_its_own_never_uses_a_stale_weight(layer, mode, around):
    ours = nn.Sequential(layer(), nn.Tanh(), layer())
    theirs = copy.deepcopy(ours)
    pipe = pipe_of(ours, [2, 1], checkpoint=mode)
    x = torch.randn(8, 6)

    def step(module, run):
        def forward(x):
            with torch.autocast("cpu", dtype=BF16) if around else nullcontext():
                return run(x)

        result = [t.clone() for t in trained(forward, module, x)]
        torch.optim.SGD(module.parameters(), lr=1.0).step()
        return result

    # The plain loop comes after: leaving its autocast clears the cache, which is everybody's.
    results = [step(ours, pipe) for _ in range(3)]
    for result in results:
        assert_same(result, step(theirs, lambda x: one_by_one(theirs, x)))


def test_a_cache_that_another_thread_clears_does_not_make_a_recomputation_another_one():
    runs = []

    class Twice(OwnAutocast):
        def forward(self, x):
            with torch.autocast("cpu", dtype=BF16):
                x = self.linear(x)
                if not runs:
                    torch.clear_autocast_cache()  # as a thread does that leaves its autocast
                runs.append(x)
                return self.linear(x).float()

    ours = nn.Sequential(Twice(), nn.Tanh())
    theirs = copy.deepcopy(ours)
    x = torch.randn(8, 6)
    expected = trained(lambda x: one_by_one(theirs, x), theirs, x)
    runs.clear()
    actual = trained(pipe_of(ours, checkpoint="always"), ours, x)
    torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)


def test_a_pipe_leaves_the_callers_autocast_cache_alone():
    linear = nn.Linear(4, 4)
    pipe = pipe_of(nn.Sequential(OwnAutocast(), OwnAutocast()))
    x = torch.randn(4, 4)
    with torch.autocast("cpu", dtype=BF16):
        first = linear(x)
        pipe(torch.randn(8, 6))
        second = linear(x)
    casts = [y.grad_fn.next_functions[2][0].next_functions[0][0] for y in (first, second)]
    assert casts[0] is casts[1]  # one cast of the weight, found again in the cache
