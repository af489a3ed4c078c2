"""What a layer draws depends on the call, the layer and the micro-batch, and on nothing else."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from syncpipe import inline, is_recomputing
from syncpipe.runtime.random_numbers import _cell_seed
from tests.support.running import (
    MODES,
    Dawdle,
    Do,
    Noise,
    assert_same,
    pipe_of,
    trained,
    weigh,
)


class Nested(nn.Module):
    """Dropout deep inside of a layer that it calls ``layer``, and functions that draw."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Sequential(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3)))

    def forward(self, x):
        return F.dropout(self.layer(x), 0.2, self.training) + torch.randn(6)


def many_random_layers(size=12):
    kinds = [
        lambda: nn.Sequential(nn.Linear(6, 6), Dawdle(1), nn.Dropout()),
        Nested,
        Noise,
        lambda: nn.Sequential(Dawdle(2), nn.RReLU()),
        lambda: nn.AlphaDropout(0.1),
        lambda: nn.Sequential(Dawdle(3), nn.BatchNorm1d(6)),
    ]
    return nn.Sequential(*(kinds[k % len(kinds)]() for k in range(size)))


@pytest.mark.parametrize("mode", MODES)
def test_hundreds_of_steps_on_four_workers_draw_what_the_inline_run_draws(mode):
    layers = many_random_layers()
    other = copy.deepcopy(layers)
    ours = pipe_of(layers, [3, 3, 3, 3], chunks=4, checkpoint=mode)
    theirs = pipe_of(other, [3, 3, 3, 3], chunks=4, checkpoint="never")
    x = torch.randn(16, 6)
    for step in range(100):
        torch.manual_seed(step // 2)  # every second step with other numbers from the same seed
        if step % 2:
            torch.rand(3)
        state = torch.get_rng_state()
        result = trained(ours, ours, x)
        after = torch.get_rng_state()
        torch.set_rng_state(state)
        with inline():
            expected = trained(theirs, theirs, x)
        assert_same(result, expected)
        assert torch.equal(after, torch.get_rng_state())
        assert not torch.equal(after, state)


@settings(max_examples=40)
@given(
    cuts=st.sets(st.integers(1, 5), max_size=4),
    mode=st.sampled_from(MODES),
    seed=st.integers(0, 2**63 - 1),
)
def test_neither_balance_nor_mode_changes_what_is_drawn(cuts, mode, seed):
    torch.manual_seed(1)
    layers = many_random_layers(6)
    other = copy.deepcopy(layers)
    edges = [0, *sorted(cuts), 6]
    balance = [b - a for a, b in pairwise(edges)]
    x = torch.randn(8, 6)
    results = []
    for pipe in (pipe_of(layers, balance, checkpoint=mode), pipe_of(other, [6])):
        torch.manual_seed(seed)
        results.append(trained(pipe, pipe, x))
    assert_same(*results)


def test_layers_micro_batches_and_calls_draw_different_numbers():
    drawn = []

    def draw(x):
        drawn.append(torch.rand(4).tolist())

    pipe = pipe_of(nn.Sequential(*(Do(draw) for _ in range(3))), chunks=4)
    for _ in range(3):
        pipe(torch.ones(4, 1))
    assert len(drawn) == 36
    assert len({tuple(numbers) for numbers in drawn}) == 36


def test_seeds_of_a_long_stream_do_not_repeat():
    micro_batches = [*range(9), *(k << 16 for k in range(1, 600)), *range(65_530, 65_540)]
    seeds = {_cell_seed(5, j, i) & 0xFFFFFFFF for i in set(micro_batches) for j in range(40)}
    assert len(seeds) == 40 * len(set(micro_batches))


def test_the_same_seed_gives_the_same_run_and_another_seed_another_one():
    pipe = pipe_of(many_random_layers(6), checkpoint="always")
    pipe.apply(lambda m: m.eval() if isinstance(m, nn.BatchNorm1d) else None)
    x = torch.randn(8, 6)
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append([pipe(x).detach(), pipe(x).detach()])
    assert_same(runs[0], runs[1])
    assert not torch.equal(runs[0][0], runs[0][1])
    assert not torch.equal(runs[0][0], runs[2][0])


def test_the_callers_generator_moves_by_one_draw_a_call_whatever_the_layers_draw():
    x = torch.randn(8, 6)
    states = []
    for layers in (nn.Sequential(nn.Tanh(), nn.Tanh()), many_random_layers(2)):
        torch.manual_seed(5)
        pipe = pipe_of(layers, checkpoint="always")
        y = pipe(x.requires_grad_())
        y.sum().backward()
        states.append(torch.get_rng_state())
    assert_same([states[0]], [states[1]])


def test_a_layer_that_seeds_the_generator_does_not_disturb_the_caller():
    pipe = pipe_of(nn.Sequential(Do(lambda x: torch.manual_seed(0) and None), nn.Dropout()))
    torch.manual_seed(5)
    first = pipe(torch.ones(8, 4))
    after = torch.rand(3)
    assert not torch.equal(first, pipe(torch.ones(8, 4)))
    torch.manual_seed(5)
    pipe_of(nn.Sequential(nn.Tanh(), nn.Tanh()))(torch.ones(8, 4))
    assert torch.equal(torch.rand(3), after)


class Remember(nn.Module):
    """Draws, and notes what it drew in forward and recomputation; sometimes it does not draw."""

    def __init__(self, draws):
        super().__init__()
        self.draws = draws
        self.drawn = {False: {}, True: {}}

    def forward(self, x):
        i = int(x.detach()[0, 0])
        if not (self.training and self.draws(i)):
            return x.cos() + i
        noise = torch.rand(x.shape)
        self.drawn[is_recomputing()][i] = noise
        return (x * noise).sin() + i


@pytest.mark.parametrize("draws", [lambda i: True, lambda i: i == 0], ids=["always", "first"])
def test_what_is_recomputed_draws_what_was_drawn(draws):
    layers = nn.Sequential(*(Remember(draws) for _ in range(4)))
    pipe = pipe_of(layers, chunks=6, checkpoint="always")
    for _ in range(5):
        assert_drawn_again(pipe, layers)


@pytest.mark.parametrize("draws", [lambda i: i > 0, lambda i: i % 2 == 1], ids=["later", "odd"])
def test_a_layer_that_does_not_draw_at_first_is_known_from_the_next_call_on(draws):
    layers = nn.Sequential(nn.Identity(), Remember(draws), nn.Tanh())
    pipe = pipe_of(layers, chunks=6, checkpoint="always")
    with pytest.raises(RuntimeError, match=r"layer 1 .*Remember.*known from the next call on"):
        assert_drawn_again(pipe, layers[1:2])
    for _ in range(6):
        assert_drawn_again(pipe, layers[1:2])


def assert_drawn_again(pipe, layers):
    for layer in layers:
        layer.drawn = {False: {}, True: {}}
    weigh(pipe(torch.arange(6.0)[:, None].repeat(1, 3).requires_grad_())).backward()
    first, again = layers[0].drawn[False], layers[0].drawn[True]
    assert first.keys() == again.keys()
    for i, noise in first.items():
        assert torch.equal(noise, again[i])


def test_a_layer_may_draw_in_one_call_and_not_in_the_next():
    ours = pipe_of(many_random_layers(6), [2, 2, 2], checkpoint="always")
    theirs = copy.deepcopy(ours)
    x = torch.randn(8, 6)
    for training in (False, True, False, True, True):
        ours.train(training)
        theirs.train(training)
        results = []
        for pipe, context in ((ours, torch.enable_grad()), (theirs, inline())):
            torch.manual_seed(3)
            with context:
                results.append(trained(pipe, pipe, x))
        assert_same(*results)
