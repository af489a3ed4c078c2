"""Layers that do more with a generator than draw in forward, and threads that draw beside them."""

from __future__ import annotations

import copy
import importlib
import subprocess
import sys
import threading
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from syncpipe import inline, is_recomputing
from tests.support.running import (
    MODES,
    Dawdle,
    Do,
    Noise,
    another_thread,
    assert_same,
    on_gradient,
    pipe_of,
    trained,
)

SCHEDULES = ("naive", "gpipe", "1f1b", "zb_h1")
X = torch.randn(16, 6, generator=torch.Generator().manual_seed(1))


class Checkpointed(nn.Module):
    """PyTorch's checkpoint inside of a layer, which saves and sets states."""

    def __init__(self, reentrant, *inner):
        super().__init__()
        self.reentrant = reentrant
        self.inner = nn.Sequential(nn.Linear(6, 6), Dawdle(3), *inner)

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


class Forked(nn.Module):
    """Draws the same numbers every time, and leaves the generator as it was."""

    def __init__(self):
        super().__init__()
        self.slow = Dawdle(4)

    def forward(self, x):
        with torch.random.fork_rng():
            torch.manual_seed(7)
            self.slow(x)
            return x + torch.rand(6)


def noisy_hook(grad):
    return grad + torch.rand(grad.shape)


def noisy_gradient(x):
    """Draws in backward."""
    return on_gradient(x, lambda grad: noisy_hook(Dawdle(5)(grad)))


def forking_hook(grad):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return grad * torch.rand(grad.shape)


class HookedWeight(nn.Linear):
    """A hook on a parameter that draws."""

    def __init__(self):
        super().__init__(6, 6)
        self.weight.register_hook(noisy_hook)


def hooked_module():
    layer = nn.Linear(6, 6)
    layer.register_full_backward_hook(lambda module, grads, _: (noisy_hook(grads[0]),))
    return layer


def hook(function):
    return lambda x: x.register_hook(function) and None


KINDS = {
    "reentrant": lambda: Checkpointed(True),
    "reentrant, dropout": lambda: Checkpointed(True, nn.Dropout()),
    "not reentrant": lambda: Checkpointed(False),
    "not reentrant, dropout": lambda: Checkpointed(False, nn.Dropout()),
    "fork_rng": Forked,
    "tensor hook": lambda: Do(hook(noisy_hook)),
    "tensor hook with fork_rng": lambda: Do(hook(forking_hook)),
    "parameter hook": HookedWeight,
    "module hook": hooked_module,
    "function": lambda: Do(noisy_gradient),
}


def with_dropout(kind):
    """Four stages of three layers, each with one of a kind between random layers."""
    layers = []
    for j in range(4):
        layers += [nn.Linear(6, 6), KINDS[kind](), nn.Sequential(Dawdle(j), nn.Dropout(0.3))]
    return nn.Sequential(*layers)


def copied(layers):
    """A copy, hooks and all."""
    other = copy.deepcopy(layers)
    for ours, theirs in zip(layers.modules(), other.modules(), strict=True):
        if isinstance(ours, HookedWeight):
            theirs.weight.register_hook(noisy_hook)
    return other


def stepped(pipe, step=0, loss_fn=F.mse_loss):
    pipe.zero_grad()
    x, schedule = X.clone().requires_grad_(), SCHEDULES[step % len(SCHEDULES)]
    loss = pipe.train_batch(x, X, loss_fn=loss_fn, schedule=schedule)
    return [loss, x.grad, *(p.grad for p in pipe.parameters())]


def assert_as_inline(layers, run, steps=8, **options):
    ours = pipe_of(layers, [3, 3, 3, 3], **options)
    theirs = pipe_of(copied(layers), [3, 3, 3, 3], **options)
    for step in range(steps):
        torch.manual_seed(step)
        result, after = run(ours, step), torch.get_rng_state()
        torch.manual_seed(step)
        with inline():
            expected = run(theirs, step)
        assert_same(result, expected)
        assert torch.equal(after, torch.get_rng_state())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_what_uses_the_state_or_draws_in_backward_trains_as_inline(kind, mode):
    assert_as_inline(with_dropout(kind), stepped, checkpoint=mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_what_uses_the_state_or_draws_in_backward_runs_as_inline(kind, mode):
    assert_as_inline(with_dropout(kind), lambda p, _: trained(p, p, X), 4, checkpoint=mode)


def test_a_loss_that_draws_in_backward_trains_as_inline():
    def loss_fn(output, target):
        return F.mse_loss(noisy_gradient(output), target)

    assert_as_inline(with_dropout("fork_rng"), lambda p, step: stepped(p, step, loss_fn))


def test_what_draws_in_backward_draws_anew_for_each_layer_micro_batch_and_call():
    drawn = []

    def note(grad):
        drawn.append(tuple(torch.rand(4).tolist()))

    pipe = pipe_of(nn.Sequential(nn.Linear(6, 6), Do(hook(note)), Do(hook(note))))
    for _ in range(3):
        stepped(pipe)
    assert len(drawn) == len(set(drawn)) == 24


def test_looking_at_a_layer_leaves_no_profile_function_behind():
    found = []
    pipe = pipe_of(nn.Sequential(Noise(), Do(lambda x: found.append(sys.getprofile()) or None)))
    pipe(X)
    pipe(X)
    assert [look is not None for look in found] == [True, False, False, False] * 2
    assert sys.getprofile() is None


class Starts(nn.Linear):
    """Begins to draw in backward in a later call, by a hook that it did not have before."""

    def __init__(self):
        super().__init__(6, 6)
        self.begun, self.slow = False, Dawdle(7)

    def forward(self, x):
        y = super().forward(self.slow(x))
        if self.begun:
            y.register_hook(lambda grad: self.slow(grad + torch.rand(grad.shape)))
        return y


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_begins_to_draw_in_backward_in_a_later_call_is_learned_there(schedule):
    results = []
    for _ in range(6):
        torch.manual_seed(2)
        pipe = pipe_of(nn.Sequential(*(nn.Sequential(Starts(), nn.Dropout()) for _ in range(3))))
        for step in range(4):
            for module in pipe.modules():
                if isinstance(module, Starts):
                    module.begun = step >= 2
            pipe.zero_grad()
            pipe.train_batch(X, X, loss_fn=F.mse_loss, schedule=schedule)
        results.append([p.grad for p in pipe.parameters()])
    for other in results[1:]:
        assert_same(other, results[0])


class Slope(nn.Module):
    """Draws, and then runs a backward inside of its forward, for which it is recomputed."""

    def forward(self, x):
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_()
            energy = F.dropout(x).tanh().square().sum()
            return torch.autograd.grad(energy, x, create_graph=True)[0]


@pytest.mark.parametrize("mode", ["except_last", "always"])
@pytest.mark.parametrize("others", [False, True], ids=["alone", "beside a thread"])
def test_a_backward_inside_of_a_layer_recomputes_what_it_drew(mode, others):
    results = []
    with another_thread() if others else nullcontext():
        for checkpoint in ("never", mode):
            torch.manual_seed(1)
            layers = nn.Sequential(nn.Linear(6, 6), nn.Dropout(), Slope(), nn.Linear(6, 6))
            pipe = pipe_of(layers, [2, 2], checkpoint=checkpoint)
            results.append([trained(pipe, pipe, torch.ones(8, 6)) for _ in range(3)])
    for never, again in zip(*results, strict=True):
        assert_same(again, never)


# --- a thread of the user's that draws ----------------------------------------------------------


@contextmanager
def drawing():
    """A thread that draws from the generator of the process all the time."""
    numbers, stop, began = [], threading.Event(), threading.Event()

    def draw():
        while not stop.is_set():
            numbers.append(float(torch.rand((), dtype=torch.float64)))
            began.set()

    thread = threading.Thread(target=draw)
    thread.start()
    began.wait()
    try:
        yield numbers
    finally:
        stop.set()
        thread.join()


class Drawing(nn.Module):
    """Draws by operations of all kinds, and notes what it drew in forward and recomputation."""

    def __init__(self):
        super().__init__()
        self.slow = Dawdle(6)
        self.seen = {}

    def forward(self, x):
        i = int(x[0, 0])
        noise = torch.rand(x.shape) + torch.randn_like(x)
        self.slow(x)
        noise = F.dropout(noise, 0.4) + torch.empty(6).exponential_() + torch.randperm(6)
        self.seen.setdefault(i, []).append(noise)
        return torch.cat([x[:, :1], (x * noise).sin()[:, 1:]], 1)  # which begins with the index


def indexed(chunks=4):
    return torch.arange(1.0, 1.0 + chunks)[:, None].repeat(1, 6).requires_grad_()


@pytest.mark.parametrize("mode", MODES)
def test_beside_a_thread_that_draws_masks_are_the_same_or_the_call_is_refused(mode):
    importlib.import_module("torch._dynamo")  # as a step of any optimizer does
    layers = nn.Sequential(*(Drawing() for _ in range(3)))
    pipe = pipe_of(layers, checkpoint=mode)
    refused = 0
    for _ in range(20):
        for layer in layers:
            layer.seen = {}
        with drawing():
            try:
                pipe(indexed()).sum().backward()
            except RuntimeError as error:
                refused += "give it a torch.Generator of its own" in str(error)
                continue
        for layer in layers:
            for noises in layer.seen.values():
                assert_same(noises, noises[:1] * len(noises))
    assert bool(refused) == (mode != "never")


@pytest.mark.parametrize("mode", MODES)
def test_a_thread_that_draws_is_no_reason_for_an_error(mode):
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), Dawdle(j)) for j in range(4)))
    pipe = pipe_of(layers, checkpoint=mode, chunks=8)
    expected = trained(pipe, pipe, X)
    with drawing():
        for _ in range(40):
            assert_same(trained(pipe, pipe, X), expected)


FRESH = """
import sys, threading, torch
from torch import nn
from syncpipe import Pipe
{first}

class Interrupted(nn.Module):
    def forward(self, x):
        thread = threading.Thread(target=torch.rand, args=(50,))
        thread.start()
        thread.join()
        return nn.functional.dropout(x)

release = threading.Event()
threading.Thread(target=release.wait, daemon=True).start()
layers = nn.Sequential(Interrupted(), Interrupted())
pipe = Pipe(layers, [1, 1], devices=["cpu:0", "cpu:1"], chunks=4, checkpoint="always")
try:
    for _ in range(3):
        x = torch.ones(4, 64, requires_grad=True)
        y = pipe(x)
        y.sum().backward()
        assert torch.equal(y != 0, x.grad != 0)
finally:
    release.set()
"""


@pytest.mark.parametrize("first", ["", "import torch._dynamo"], ids=["fresh", "dynamo imported"])
def test_a_thread_that_draws_changes_nothing_from_the_first_call_of_a_process_on(first):
    code = FRESH.format(first=first)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=260
    )
    assert done.returncode == 0, done.stderr


class Meets(nn.Module):
    """In one of its micro-batches it waits for another layer."""

    def __init__(self, barrier: threading.Barrier, micro_batch: int) -> None:
        super().__init__()
        self.barrier, self.micro_batch, self.calls = barrier, micro_batch, 0

    def forward(self, x):
        heads = x.view(len(x), 1, 1, -1)
        y = F.scaled_dot_product_attention(heads, heads, heads).view_as(x)  # may draw, but does not
        self.calls += 1
        if self.calls == self.micro_batch + 1:
            self.barrier.wait(timeout=60)
        return y


def test_layers_that_draw_nothing_run_at_once_beside_other_threads():
    barrier = threading.Barrier(2)
    with another_thread():
        pipe_of(nn.Sequential(Meets(barrier, 1), Meets(barrier, 0)), [1, 1], chunks=2)(X[:4])


class Block(nn.Module):
    """A block of a user's own; all that draws in it are PyTorch's modules."""

    def __init__(self, *layers):
        super().__init__()
        self.dropout, self.body = nn.Dropout(0.2), nn.Sequential(*layers)

    def forward(self, x):
        return self.dropout(self.body(self.dropout(x)))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("block", [nn.Sequential, Block])
def test_beside_dropout_in_a_block_its_other_layers_run_at_once(block, mode):
    barrier, calls = threading.Barrier(2), [0, 0]

    def layers(j):
        def met(x):
            # Stage 1 is at micro-batch 1 while stage 0 is at micro-batch 2: both have to be here.
            calls[j] += not is_recomputing()
            if calls[j] == 3 - j:
                barrier.wait(timeout=60)

        return block(nn.Dropout(0.1), Do(met), nn.Linear(6, 6), nn.Dropout(0.1))

    model = nn.Sequential(layers(0), layers(1))
    pipe_of(model, checkpoint=mode)(X).sum().backward()
    assert calls == [4, 4]
