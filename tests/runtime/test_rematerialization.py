"""Which cells are computed again, when, how often, and that nothing but memory shows it."""

from __future__ import annotations

import copy
import gc
import threading
from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from syncpipe import inline, is_checkpointing, is_recomputing
from tests.support.running import (
    MODES,
    Do,
    assert_same,
    on_gradient,
    one_by_one,
    pipe_of,
    trained,
    weigh,
)
from tests.support.watched import Memory, alive, gone

RECOMPUTED = {
    "never": [],
    "except_last": [0, 1, 2],
    "always": [0, 1, 2, 3],
}


class Record(nn.Module):
    """Notes in ``events`` what it does to which micro-batch (its input's first value)."""

    def __init__(self, events, name=""):
        super().__init__()
        self.events, self.name = events, name
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x):
        what = "recompute" if is_recomputing() else "forward"
        assert not (is_recomputing() and is_checkpointing())
        i = int(x.detach()[0, 0])
        self.events.append((what + self.name, i, is_checkpointing()))
        note = "backward" + self.name, i, None
        return on_gradient(x * self.weight, lambda grad: self.events.append(note))

    def __deepcopy__(self, memo):
        return self


def numbered(m=4):
    return torch.arange(float(m)).repeat_interleave(2)[:, None].repeat(1, 3)


def recording():
    """A pipe of two stages that note what they do, and the notes."""
    events = []
    return pipe_of(nn.Sequential(Record(events, " 0"), Record(events, " 1"))), events


def which(events, what):
    return sorted(i for name, i, _ in events if name == what)


@pytest.mark.parametrize("inlined", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_the_mode_says_which_micro_batches_are_recomputed_and_each_is_once(mode, inlined):
    pipe, events = recording()
    pipe.checkpoint = mode
    with inline() if inlined else torch.enable_grad():
        loss = weigh(pipe(numbered()))
    for j in range(2):
        assert which(events, f"forward {j}") == [0, 1, 2, 3]
        checkpointing = {i for name, i, flag in events if name == f"forward {j}" and flag}
        assert sorted(checkpointing) == RECOMPUTED[mode]
    loss.backward()
    for j in range(2):
        assert which(events, f"recompute {j}") == RECOMPUTED[mode]
        assert which(events, f"backward {j}") == [0, 1, 2, 3]


def test_the_last_micro_batch_is_the_last_there_is():
    pipe, events = recording()
    pipe.chunks = 10
    weigh(pipe(numbered(2)[::2])).backward()  # two samples: two micro-batches
    assert which(events, "forward 0") == [0, 1]
    assert which(events, "recompute 0") == [0]


@pytest.mark.parametrize("why", ["eval", "no_grad", "inference_mode", "enable_grad in eval"])
def test_nothing_is_dropped_without_training_or_without_grad(why):
    pipe, events = recording()
    pipe.checkpoint = "always"
    pipe.train("eval" not in why)
    context = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
    with context.get(why, torch.enable_grad)():
        y = pipe(numbered())
    if y.requires_grad:
        weigh(y).backward()
    assert which(events, "forward 1") == [0, 1, 2, 3]
    assert which(events, "recompute 0") == which(events, "recompute 1") == []
    assert not any(flag for _, _, flag in events)


@pytest.mark.parametrize("mode", ["except_last", "always"])
def test_a_recomputation_starts_before_the_gradient_arrives(mode):
    begun = [threading.Event() for _ in range(4)]
    late = []

    def first(x):
        if is_recomputing():
            begun[int(x.detach()[0, 0])].set()

    def second(x):
        i = int(x.detach()[0, 0])
        # Stage 1 sends no gradient before stage 0 recomputes.

        def wait(_):
            if i in RECOMPUTED[mode] and not begun[i].wait(10):
                late.append(i)

        return on_gradient(x, wait)

    pipe = pipe_of(nn.Sequential(Do(first), Do(second)), checkpoint=mode)
    weigh(pipe(numbered().requires_grad_())).backward()
    assert not late


def test_micro_batches_go_back_in_reverse_order_on_every_stage():
    pipe, events = recording()
    weigh(pipe(numbered())).backward()
    for j in range(2):
        assert [i for name, i, _ in events if name == f"backward {j}"] == [3, 2, 1, 0]


def test_what_no_backward_asks_for_is_not_recomputed():
    pipe, events = recording()
    pipe.checkpoint = "always"
    pipe(numbered())
    assert which(events, "recompute 0") == []
    torch.autograd.grad(weigh(pipe(numbered())), pipe[1].weight)
    assert which(events, "recompute 1") == [0, 1, 2, 3]
    assert which(events, "backward 0") == []


def test_outside_of_a_pipe_nothing_is_checkpointed():
    assert not is_checkpointing()
    assert not is_recomputing()


# Buffers


class Codebook(nn.Module):
    """Its output depends on buffers that its forward changes: in place, and by assignment."""

    def __init__(self):
        super().__init__()
        self.register_buffer("codes", torch.linspace(0.5, 1.5, 6))
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        y = (x * self.codes.clone() + self.steps).tanh() * x
        if self.training:
            with torch.no_grad():
                self.codes.mul_(0.9).add_(x.mean(0), alpha=0.1)
                self.steps = self.steps + 1
        return y


STATEFUL = {
    "batch norm": lambda: nn.BatchNorm1d(6),
    "batch norm, momentum None": lambda: nn.BatchNorm1d(6, momentum=None),
    "spectral norm": lambda: spectral_norm(nn.Linear(6, 6)),
    "codebook": Codebook,
    "all in one": lambda: nn.Sequential(
        Codebook(), nn.BatchNorm1d(6), spectral_norm(nn.Linear(6, 6)), nn.Dropout()
    ),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", STATEFUL)
def test_buffers_and_gradients_are_those_of_the_plain_loop(kind, mode):
    layers = nn.Sequential(nn.Linear(6, 6), STATEFUL[kind](), nn.Linear(6, 6), STATEFUL[kind]())
    other = copy.deepcopy(layers)
    ours = pipe_of(layers, [2, 2], checkpoint=mode)
    theirs = pipe_of(other, [2, 2], checkpoint="never")
    for step in range(3):
        x = torch.randn(12, 6)
        torch.manual_seed(step)
        result = trained(ours, ours, x)
        torch.manual_seed(step)
        if "all" in kind:  # draws: the reference is the inline run
            with inline():
                assert_same(result, trained(theirs, theirs, x))
        else:
            assert_same(result, trained(lambda x: one_by_one(other, x), other, x))


def test_batch_norm_counts_each_micro_batch_once():
    layers = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3), nn.BatchNorm1d(3))
    pipe = pipe_of(layers, [2, 1], checkpoint="always")
    for _ in range(2):
        weigh(pipe(torch.randn(12, 3))).backward()
    assert layers[0].num_batches_tracked == layers[2].num_batches_tracked == 8


# Memory


class Watch(nn.Module):
    """Makes an activation that autograd stores (for the sine), and remembers it weakly."""

    def __init__(self):
        super().__init__()
        self.made = []

    def forward(self, x):
        y = x * 2
        self.made.append(Memory(y))
        return y.sin()

    def alive(self):
        return alive(self.made)

    def gone(self):
        return gone(self.made)


@pytest.mark.parametrize("mode", MODES)
def test_activations_of_rematerialized_cells_are_dropped_until_backward(mode):
    pipe = pipe_of(nn.Sequential(Watch(), Watch()), checkpoint=mode)
    y = pipe(torch.randn(8, 3, requires_grad=True))
    for layer in pipe:
        assert len(layer.made) == 4
        assert layer.alive() == 4 - len(RECOMPUTED[mode])
    y.sum().backward()
    for layer in pipe:
        assert layer.gone()


def test_a_retained_graph_keeps_no_recomputed_activations():
    pipe = pipe_of(nn.Sequential(Watch(), Watch()), checkpoint="always")
    y = pipe(torch.randn(8, 3, requires_grad=True))
    for _ in range(2):
        y.sum().backward(retain_graph=True)
        assert pipe[0].gone()
        assert pipe[1].gone()


def test_recomputed_activations_are_freed_as_backward_goes_on():
    most = []
    watch = Watch()
    count = Do(lambda x: x.register_hook(lambda _: most.append(watch.alive())) and None)
    pipe = pipe_of(nn.Sequential(count, watch, nn.Tanh()), [2, 1], chunks=8, checkpoint="always")
    pipe(torch.randn(16, 3, requires_grad=True)).sum().backward()
    assert most
    assert max(most) <= 2  # the cell that goes back, and the next one that is recomputed early


@pytest.mark.parametrize("mode", MODES)
def test_a_graph_that_is_dropped_without_backward_frees_everything(mode):
    pipe = pipe_of(nn.Sequential(Watch(), Watch()), checkpoint=mode)
    x = torch.randn(8, 3, requires_grad=True)
    reference = Memory(x)
    y = pipe(x)
    del x, y
    assert gone([reference])
    assert pipe[0].gone()
    assert pipe[1].gone()


@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_left_after_a_thousand_steps_not_even_cycles(mode):
    layers = nn.Sequential(
        nn.Linear(3, 3), nn.Dropout(), nn.BatchNorm1d(3), Watch(), nn.Linear(3, 3)
    )
    pipe = pipe_of(layers, [2, 1, 2], chunks=2, checkpoint=mode)
    x = torch.randn(4, 3, requires_grad=True)

    def steps(count):
        for _ in range(count):
            layers[3].made.clear()
            x.grad = None
            pipe.zero_grad()
            pipe(x).sum().backward()
        return Counter(type(thing).__name__ for thing in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        before, after = steps(20), steps(1000)
    finally:
        gc.enable()
    # one in five steps would be a leak; PyTorch has a few caches of its own
    grown = {name: n - before[name] for name, n in after.items() if n - before[name] > 200}
    assert grown == {}


# Layers that do not keep the rules


class Unsteady(nn.Module):
    def __init__(self, again):
        super().__init__()
        self.again = again

    def forward(self, x):
        return self.again(x) if is_recomputing() else x.exp().sin()


@pytest.mark.parametrize(
    "again",
    [
        lambda x: x[:1].exp().sin(),
        lambda x: x.double().exp().sin(),
        lambda x: x + 1,
        lambda x: x.exp(),
    ],
    ids=["another shape", "another dtype", "nothing stored", "less stored"],
)
@pytest.mark.parametrize("j", [0, 1])
def test_a_layer_that_does_something_else_the_second_time_is_an_error(j, again):
    layers = [nn.Tanh(), nn.Tanh()]
    layers[j] = Unsteady(again)
    pipe = pipe_of(nn.Sequential(*layers), checkpoint="always")
    y = pipe(torch.randn(8, 3, requires_grad=True))
    with pytest.raises(RuntimeError, match=rf"stage {j} .*stored other tensors") as caught:
        y.sum().backward()
    assert "is_recomputing()" in str(caught.value)
