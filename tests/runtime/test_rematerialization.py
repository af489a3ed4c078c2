"""Which cells are computed again, when, how often, and that nothing but memory shows it."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from syncpipe import Pipe, inline, is_checkpointing, is_recomputing
from tests.support.running import (
    MODES,
    Do,
    on_gradient,
    one_by_one,
    pipe_of,
    trained,
    weigh,
)
from tests.support.watched import Memory, alive, gone

RECOMPUTED = {"never": [], "except_last": [0, 1, 2], "always": [0, 1, 2, 3]}


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


def numbered(m=4):
    return torch.arange(float(m)).repeat_interleave(2)[:, None].repeat(1, 3)


def recording(mode="except_last"):
    """A pipe of two stages that note what they do, and what says for which micro-batches."""
    events = []
    pipe = pipe_of(nn.Sequential(Record(events, " 0"), Record(events, " 1")), checkpoint=mode)
    return pipe, lambda what, flags=(True, False, None): [
        i for name, i, flag in events if name == what and flag in flags
    ]


@pytest.mark.parametrize("inlined", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_the_mode_says_which_micro_batches_are_recomputed_and_each_is_once(mode, inlined):
    pipe, which = recording(mode)
    with inline() if inlined else torch.enable_grad():
        loss = weigh(pipe(numbered()))
    for j in range(2):
        assert which(f"forward {j}") == [0, 1, 2, 3]
        assert which(f"forward {j}", [True]) == RECOMPUTED[mode]
    loss.backward()
    for j in range(2):
        assert which(f"recompute {j}") == RECOMPUTED[mode][::-1]
        assert which(f"backward {j}") == [3, 2, 1, 0]
    assert not is_checkpointing()
    assert not is_recomputing()


def test_the_last_micro_batch_is_the_last_there_is():
    pipe, which = recording()
    pipe.chunks = 10
    weigh(pipe(numbered(2)[::2])).backward()  # two samples: two micro-batches
    assert which("forward 0") == [0, 1]
    assert which("recompute 0") == [0]


@pytest.mark.parametrize("why", ["eval", "no_grad", "inference_mode", "enable_grad in eval"])
def test_nothing_is_dropped_without_training_or_without_grad(why):
    pipe, which = recording("always")
    pipe.train("eval" not in why)
    context = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
    with context.get(why, torch.enable_grad)():
        y = pipe(numbered())
    if y.requires_grad:
        weigh(y).backward()
    assert which("forward 1", [False]) == [0, 1, 2, 3]
    assert which("recompute 0") == which("recompute 1") == []


def test_without_a_backward_nothing_is_recomputed():
    pipe, which = recording("always")
    pipe(numbered())
    assert which("recompute 0") == []
    torch.autograd.grad(weigh(pipe(numbered())), pipe[1].weight)
    assert which("recompute 1") == [3, 2, 1, 0]


def test_a_layer_is_recomputed_once_however_often_autograd_asks():
    runs = []
    layer = Do(lambda x: runs.append(len(x)) or x.sin() * x.cos())
    pipe = pipe_of(nn.Sequential(nn.Linear(6, 6), layer), checkpoint="always")
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        weigh(pipe(torch.randn(12, 6))).backward()
    assert len(runs) == 2 * 4


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


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("end", ["backward", "backwards", "dropped"])
def test_activations_of_rematerialized_cells_are_dropped_until_backward(end, mode):
    pipe = pipe_of(nn.Sequential(Watch(), Watch()), checkpoint=mode)
    x = torch.randn(8, 3, requires_grad=True)
    references = [Memory(x)]
    y = pipe(x)
    for layer in pipe:
        assert len(layer.made) == 4
        assert alive(layer.made) == 4 - len(RECOMPUTED[mode])
    for _ in range(2 if end == "backwards" else 0):  # a retained graph keeps nothing recomputed
        y.sum().backward(retain_graph=True)
        assert sum(alive(layer.made) for layer in pipe) == 2 * (4 - len(RECOMPUTED[mode]))
    if end == "backward":
        y.sum().backward()
        assert all(gone(layer.made) for layer in pipe)
    del x, y
    assert gone([*references, *pipe[0].made, *pipe[1].made])


def test_recomputed_activations_are_freed_as_backward_goes_on():
    most = []
    watch = Watch()
    count = Do(lambda x: x.register_hook(lambda _: most.append(alive(watch.made))) and None)
    pipe = pipe_of(nn.Sequential(count, watch, nn.Tanh()), [2, 1], chunks=8, checkpoint="always")
    pipe(torch.randn(16, 3, requires_grad=True)).sum().backward()
    assert most
    assert max(most) <= 2  # the cell that goes back, and the next one that is recomputed early


# Layers that do not keep the rules


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
    layers[j] = Do(lambda x: again(x) if is_recomputing() else x.exp().sin())
    pipe = pipe_of(nn.Sequential(*layers), checkpoint="always")
    y = pipe(torch.randn(8, 3, requires_grad=True))
    with pytest.raises(RuntimeError, match=rf"stage {j} .*stored other tensors") as caught:
        y.sum().backward()
    assert "is_recomputing()" in str(caught.value)


# TorchScript. Since Python 3.13 torch.jit.script keeps the frames that call it, with what their
# variables are later: a pipe among them would never die.


@pytest.fixture
def scripted():
    return torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))


@pytest.mark.parametrize("chunks", [1, 2])
def test_torch_script_may_be_recomputed_from_its_first_run_on(scripted, chunks):
    layers = nn.Sequential(nn.Linear(4, 4), scripted, nn.Linear(4, 4))
    pipe = pipe_of(layers, [1, 2], chunks=chunks, checkpoint="always")
    for size in (6, 6, 6, 4):
        x = torch.randn(size, 4)
        ours = trained(pipe, pipe, x)
        # Not to the last bit: TorchScript compiles itself meanwhile.
        torch.testing.assert_close(trained(lambda x: one_by_one(layers, x), layers, x), ours)


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_weights_of_an_embedding_that_renorms_are_let_go(checkpoint):
    layers = nn.Sequential(nn.Embedding(5, 6, max_norm=0.5), nn.Linear(6, 2))
    pipe = Pipe(layers, [1, 1], devices=["cpu:0", "cpu:1"], chunks=2, checkpoint=checkpoint)
    alive = []
    for step in range(4):
        if step % 2:
            weights = {k: p.detach().clone().requires_grad_() for k, p in pipe.named_parameters()}
            torch.func.functional_call(pipe, weights, (torch.arange(4),)).sum().backward()
            alive.append(weakref.ref(weights.pop("0.weight")))
        else:
            alive.append(weakref.ref(pipe[0].weight))
            pipe(torch.arange(4)).sum().backward()
            pipe.load_state_dict({k: v.clone() for k, v in pipe.state_dict().items()}, assign=True)
    gc.collect()
    assert [reference() is None for reference in alive] == [True] * 4
