"""``train_batch``: what is recomputed, and buffers, which count each micro-batch once."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from syncpipe import Pipe, is_checkpointing, is_recomputing
from tests.support.models import CHECKPOINT_MODES
from tests.support.running import Do, on_gradient, pipe_of
from tests.support.training import KINDS, RUNS, weigh
from tests.training.train_batch.loop import model, model_pipe


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("run", KINDS)
def test_batch_norm_counts_each_micro_batch_once(run, checkpoint):
    pipe = model_pipe(run, checkpoint=checkpoint)
    for _ in range(2):
        pipe.train_batch(torch.randn(10, 6), loss_fn=weigh, **RUNS[run][0])
    assert pipe[1].num_batches_tracked == 10


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("run", KINDS)
def test_deferred_batch_norm_counts_the_mini_batch_once(run, checkpoint):
    pipe = model_pipe(run, checkpoint=checkpoint, deferred_batch_norm=True)
    x = torch.randn(10, 6)
    with torch.no_grad():
        whole = model()
        whole(x)
    pipe.train_batch(x, loss_fn=weigh, **RUNS[run][0])
    assert pipe[1].num_batches_tracked == 1
    torch.testing.assert_close(dict(pipe.named_buffers()), dict(whole.named_buffers()))


# Re-materialization


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("run", KINDS)
def test_the_mode_says_which_micro_batches_are_recomputed_and_each_is_once(
    run, checkpoint, training
):
    forwards, again = [], []

    def note(x):
        i = int(x.detach()[0, 0])
        assert not (is_checkpointing() and is_recomputing())
        if is_recomputing():
            again.append(i)
        else:
            forwards.append((i, is_checkpointing()))

    layers = nn.Sequential(*[nn.Sequential(Do(note), Scale()) for _ in range(4)])
    pipe = Pipe(layers, [1] * 4, devices=RUNS[run][1], chunks=3, checkpoint=checkpoint)
    pipe.train(training)
    x = torch.arange(3.0).repeat_interleave(2)[:, None].repeat(1, 3)
    pipe.train_batch(x, loss_fn=weigh, **RUNS[run][0])
    dropped = {"always": [0, 1, 2], "except_last": [0, 1], "never": []}[checkpoint]
    dropped = dropped if training else []
    assert sorted(forwards) == sorted([(i, i in dropped) for i in range(3)] * 4)
    assert sorted(again) == sorted(dropped * 4)


class Scale(nn.Module):
    """Leaves the first column as it is, which says which micro-batch this is."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x):
        return torch.cat([x[:, :1], x[:, 1:] * self.weight], 1)


@pytest.mark.parametrize("run", ["naive", "gpipe", "1f1b", "zb_h1"])
def test_a_recomputation_starts_before_the_gradient_arrives(run):
    started = [threading.Event() for _ in range(4)]
    in_time = []

    def wait(x):
        begun = started[int(x.detach()[0, 0])]
        return on_gradient(x, lambda grad: in_time.append(begun.wait(timeout=30)))

    def note(x):
        if is_recomputing():
            started[int(x.detach()[0, 0])].set()

    layers = [nn.Sequential(Do(note), Scale()), nn.Sequential(Scale(), Do(wait))]
    pipe = pipe_of(nn.Sequential(*layers), checkpoint="always")
    x = torch.arange(4.0).repeat_interleave(2)[:, None].repeat(1, 3)
    pipe.train_batch(x, loss_fn=weigh, schedule=run)
    assert in_time == [True] * 4
