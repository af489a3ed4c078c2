"""What a layer draws depends on the call, the layer and the micro-batch, and on nothing else."""

from __future__ import annotations

import importlib
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from syncpipe import inline, is_recomputing
from syncpipe.runtime import random_numbers
from syncpipe.runtime.random_numbers import _cell_seed
from syncpipe.state import restoring_settings
from tests.fuzz.models import dawdling
from tests.support.running import (
    MODES,
    Do,
    Noise,
    Using,
    another_thread,
    assert_same,
    on_gradient,
    pipe_of,
    trained,
    weigh,
)

SCHEDULES = ("naive", "gpipe", "1f1b", "zb_h1")
X = torch.randn(16, 6, generator=torch.Generator().manual_seed(1))


def test_seeds_of_a_long_stream_do_not_repeat():
    micro_batches = [*range(9), *(k << 16 for k in range(1, 600)), *range(65_530, 65_540)]
    seeds = {_cell_seed(5, j, i) & 0xFFFFFFFF for i in set(micro_batches) for j in range(40)}
    assert len(seeds) == 40 * len(set(micro_batches))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_train_batch_draws_what_the_forward_draws_whatever_its_loss_draws(schedule):
    layers, x = nn.Sequential(nn.Linear(6, 6), nn.Dropout(), nn.RReLU()), torch.randn(8, 6)
    torch.manual_seed(1)
    expected, after = pipe_of(layers)(x), torch.get_rng_state()
    torch.manual_seed(1)
    _, output = pipe_of(layers).train_batch(
        x, loss_fn=lambda y: y.mean() * torch.rand(()), schedule=schedule, return_outputs=True
    )
    assert torch.equal(output, expected)
    assert torch.equal(torch.get_rng_state(), after)
    torch.manual_seed(1)
    assert not torch.equal(torch.get_rng_state(), after), "the generator was rewound"


class Remember(nn.Module):
    """Draws by operations of all kinds for some micro-batches, and notes what it drew."""

    def __init__(self, draws=lambda i: True):
        super().__init__()
        self.draws, self.slow, self.drawn = draws, dawdling(6), {}

    def forward(self, x):
        i = int(x.detach()[0, 0])
        if not self.draws(i):
            return x.cos() + i
        noise = torch.rand(x.shape) + torch.randn_like(x)
        self.slow(x)
        width = x.shape[1]
        noise = F.dropout(noise, 0.4) + torch.empty(width).exponential_() + torch.randperm(width)
        self.drawn.setdefault(i, []).append(noise)
        return torch.cat([x[:, :1], (x * noise).sin()[:, 1:]], 1)  # which begins with the index


@pytest.mark.parametrize(
    ("draws", "late"),
    [(lambda i: 1, 0), (lambda i: i == 0, 0), (lambda i: i > 0, 1), (lambda i: i % 2 == 1, 1)],
    ids=["always", "first", "later", "odd"],
)
def test_what_is_recomputed_draws_what_was_drawn_or_is_known_from_the_next_call_on(draws, late):
    layer = Remember(draws)
    layers = nn.Sequential(nn.Identity(), layer, nn.Tanh())
    pipe = pipe_of(layers, chunks=6, checkpoint="always")

    def run():
        layer.drawn = {}
        weigh(pipe(torch.arange(6.0)[:, None].repeat(1, 3).requires_grad_())).backward()

    if late:
        with pytest.raises(RuntimeError, match=r"layer 1 .*Remember.*the next call expects it"):
            run()
    for _ in range(6):
        run()
        assert sorted(layer.drawn) == list(filter(draws, range(6)))
        for noises in layer.drawn.values():  # in the forward, and when it was recomputed
            assert_same(noises, noises[:1] * 2)


def test_a_layer_goes_on_with_its_own_numbers_after_a_pipe_in_it():
    drawn = []

    def layer(x, inner):
        before, y = torch.rand(2), inner(x)
        drawn.append((*before.tolist(), *torch.rand(2).tolist()))
        return y

    inner = pipe_of(nn.Sequential(nn.Dropout()))
    pipe = pipe_of(nn.Sequential(nn.Linear(6, 6), Using(layer, inner), Using(layer, inner)))
    found = []
    for _ in range(2):
        torch.manual_seed(4)
        pipe.train_batch(X, X, loss_fn=lambda y, x: y.mean(), verify=False)
        found.append(sorted(drawn))
        assert len({number for numbers in drawn for number in numbers}) == 32
        drawn.clear()
    assert found[0] == found[1]


# --- layers that draw in backward


def test_what_draws_in_backward_draws_anew_for_each_layer_micro_batch_and_call():
    drawn = []
    note = lambda x: on_gradient(x, lambda _: drawn.append(tuple(torch.rand(4).tolist())))  # noqa: E731
    pipe = pipe_of(nn.Sequential(nn.Linear(6, 6), Do(note), Do(note)))
    for _ in range(3):
        pipe.train_batch(X, X, loss_fn=F.mse_loss)
    assert len(drawn) == len(set(drawn)) == 24


class Starts(nn.Linear):
    """Begins to draw in backward in a later call, by a hook that it did not have before."""

    def __init__(self):
        super().__init__(6, 6)
        self.calls, self.slow = 0, dawdling(7)

    def forward(self, x):
        y = super().forward(self.slow(x))
        self.calls += 1
        if self.calls > 8:
            y.register_hook(lambda grad: self.slow(grad + torch.rand(grad.shape)))
        return y


@pytest.mark.parametrize("after", [nn.Dropout, lambda: pipe_of(nn.Sequential(nn.Linear(6, 6)))])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_begins_to_draw_in_backward_in_a_later_call_is_learned_there(schedule, after):
    results = []
    for _ in range(3):
        torch.manual_seed(2)
        pipe = pipe_of(nn.Sequential(*(nn.Sequential(Starts(), after()) for _ in range(3))))
        for _ in range(4):
            pipe.zero_grad()
            pipe.train_batch(X, X, loss_fn=F.mse_loss, schedule=schedule)
        results.append([p.grad for p in pipe.parameters()])
    for other in results[1:]:
        assert_same(other, results[0])


# --- a thread of the user's that draws, and layers that run at once


@pytest.mark.parametrize("mode", MODES)
def test_beside_a_thread_that_draws_masks_are_the_same_or_the_call_is_refused(mode):
    importlib.import_module("torch._dynamo")  # as a step of any optimizer does
    layers = nn.Sequential(*(Remember() for _ in range(3)))
    pipe, refused = pipe_of(layers, checkpoint=mode), 0
    x = torch.arange(1.0, 5.0)[:, None].repeat(1, 6)
    for _ in range(20):
        for layer in layers:
            layer.drawn = {}
        with another_thread(lambda: torch.rand(())):
            try:
                pipe(x.clone().requires_grad_()).sum().backward()
            except RuntimeError as error:
                refused += "give it a torch.Generator of its own" in str(error)
                continue
        for noises in [noises for layer in layers for noises in layer.drawn.values()]:
            assert_same(noises, noises[:1] * len(noises))
    assert bool(refused) == (mode != "never")


def test_random_states_are_not_read_while_a_layer_has_its_own():
    draws, read, ended = threading.Event(), threading.Event(), threading.Event()

    def wait(x):
        draws.set()
        read.wait(0.2)  # in vain

    pipe, states = pipe_of(nn.Sequential(nn.Sequential(Noise(), Do(wait)))), []
    with ThreadPoolExecutor(1) as threads:
        threads.submit(
            lambda: draws.wait() and restoring_settings(lambda: read.set() or ended.wait(), [])
        )
        torch.manual_seed(5)
        pipe(X)
        ended.set()
    for _ in range(2):
        states.append(torch.get_rng_state())
        torch.manual_seed(5)
        pipe(X)
    assert_same(*states)


def test_states_are_read_by_whoever_holds_the_generator(monkeypatch):
    """Two threads that read them, one of them with the collector in the middle, wait for ever."""
    alone, read = [], random_numbers.states_of

    def look(generators):
        alone.append(random_numbers.LOCKS["cpu", 0]._is_owned())
        return read(generators)

    monkeypatch.setattr(random_numbers, "states_of", look)
    layers = nn.Sequential(Noise(), Do(torch.sin), Noise(), Do(torch.cos))
    pipe = pipe_of(layers, checkpoint="always", chunks=4)
    for _ in range(3):
        trained(pipe, pipe, X)
    assert alone
    assert all(alone)


def quiet(x):
    heads = x.view(len(x), 1, 1, -1)
    return F.scaled_dot_product_attention(heads, heads, heads).view_as(x)  # may draw, but does not


class Block(nn.Module):
    """A block of a user's own; all that draws in it are PyTorch's modules."""

    def __init__(self, *layers):
        super().__init__()
        self.dropout, self.body = nn.Dropout(0.2), nn.Sequential(*layers)

    def forward(self, x):
        return self.dropout(self.body(self.dropout(x)))


BLOCKS = {
    "nothing": lambda met: nn.Sequential(Do(lambda x: (y := quiet(x), met(y))[0])),
    "dropout": lambda met: nn.Sequential(
        nn.Dropout(0.1), Do(met), nn.Linear(6, 6), nn.Dropout(0.1)
    ),
    "a block": lambda met: Block(nn.Dropout(0.1), Do(met), nn.Linear(6, 6)),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", BLOCKS)
def test_layers_run_at_once_but_for_what_draws(kind, mode):
    barrier, calls = threading.Barrier(2), [0, 0]

    def layer(j):
        def met(x):
            # Stage 1 is at micro-batch 1 while stage 0 is at micro-batch 2: both have to be here.
            calls[j] += not is_recomputing()
            if calls[j] == 3 - j and not is_recomputing():
                barrier.wait(timeout=60)

        return BLOCKS[kind](met)

    with another_thread():
        pipe = pipe_of(nn.Sequential(layer(0), layer(1)), checkpoint=mode)
        pipe(X.clone().requires_grad_()).sum().backward()
    assert calls == [4, 4]


# --- what was learned in a call belongs to that call


def forked(x):
    with torch.random.fork_rng(devices=[]):
        return x * 2


HISTORIES = {
    "a draw": lambda x, i: x + torch.rand(()),
    "a draw in a later micro-batch": lambda x, i: x + torch.rand(()) if i == 3 else x * 2,
    "a draw in training": lambda x, i: F.dropout(x, 0.5),
    "a state that is saved": lambda x, i: forked(x),
    "a draw in backward": lambda x, i: on_gradient(x, lambda grad: grad * torch.rand(())),
    "a profile function": lambda x, i: x * 2,
}


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("history", HISTORIES)
def test_stages_run_at_once_whatever_earlier_calls_drew(history, checkpoint):
    barrier, calls, drew = threading.Barrier(2), [0, 0], HISTORIES[history]
    meet = False

    def layer(j):
        def run(x):
            calls[j] += not is_recomputing()
            if drew is not None:
                return drew(x, (calls[j] - 1) % 4)
            # Stage 1 is at micro-batch 1 while stage 0 is at micro-batch 2: both have to be here.
            if meet and calls[j] == 3 - j and not is_recomputing():
                barrier.wait(timeout=60)
            return x * 2

        return Do(run)

    pipe = pipe_of(nn.Sequential(layer(0), layer(1)), checkpoint=checkpoint)

    def step():
        calls[:] = [0, 0]
        try:
            pipe(X.clone().requires_grad_()).sum().backward()
        except RuntimeError as error:  # of what draws in a later micro-batch only
            assert "the next call expects it" in str(error)  # noqa: PT017

    with inline():
        sys.setprofile((lambda *_: None) if history == "a profile function" else None)
        step()
        step()
        sys.setprofile(None)
    drew = None
    step()  # what was found late is observed once more
    meet = True
    step()
    assert calls == [4, 4]


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("checkpoint", ["never", "always", [0, 1]])
def test_modules_that_draw_are_left_as_they_were(checkpoint, graph):
    """They hold generators by an attribute, which is there while a call runs."""
    layers = nn.Sequential(Block(nn.Dropout(0.1)), nn.Sequential(nn.Linear(6, 6), nn.RReLU()))
    before = [dict(module.__dict__) for module in layers.modules()]
    pipe = pipe_of(layers, checkpoint=checkpoint)
    for _ in range(2):
        with inline(graph=graph):
            y = pipe(X.clone().requires_grad_())
            assert [dict(module.__dict__) for module in layers.modules()] == before
            y.sum().backward()
        pipe.train_batch(X, loss_fn=lambda y: y.mean(), verify=False)
        with pytest.raises(RuntimeError, match="shapes"):
            pipe(X[:, :3])
    assert [dict(module.__dict__) for module in layers.modules()] == before
