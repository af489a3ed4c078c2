"""Frozen stages before the first one that is trained: nothing is kept, or computed again, there."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from syncpipe import Pipe, inline
from tests.support.models import CHECKPOINT_MODES
from tests.support.training import FOUR, KINDS, RUNS
from tests.support.watched import Watched, alive, gone

CHUNKS = 6


def frozen_pipe(**options) -> tuple[Pipe, list[Watched]]:
    """Four stages, the first two of them frozen."""
    layers = [Watched() for _ in range(4)]
    for layer in layers[:2]:
        layer.requires_grad_(False)
    options.setdefault("devices", FOUR)
    return Pipe(nn.Sequential(*layers), [1] * 4, chunks=CHUNKS, **options), layers


@pytest.mark.parametrize("driver", ["train_batch", "pipe(x)"])
@pytest.mark.parametrize("checkpoint", [*CHECKPOINT_MODES, "offload"])
def test_they_hold_nothing_for_backward(checkpoint, driver):
    pipe, layers = frozen_pipe(checkpoint=checkpoint)
    held: list[int] = []
    kept: list[bool] = []
    for layer in layers[:2]:
        layer.register_forward_hook(lambda layer, args, y: kept.append(y.requires_grad))

    def loss_fn(y):
        held.append(sum(alive([*layer.made, *layer.given]) for layer in layers[:2]))
        return y.pow(2).mean()

    with inline():
        for _ in range(2):  # in its first call a pipe works on copies of inputs
            for layer in layers:
                layer.forget()
            held.clear()
            data = ((torch.randn(2, 3), None) for _ in range(CHUNKS))
            if driver == "train_batch":
                pipe.train_batch(data_iter=data, loss_fn=loss_fn, schedule="gpipe")
            else:
                loss = loss_fn(pipe(torch.cat([x for x, _ in data])))
                # (Its input is one tensor, which is the caller's.)
                held[-1] -= alive(layers[0].given)
                loss.backward()
    assert held[-1] == 0  # by then all have gone forward, and none has gone back
    assert not any(kept)


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("run", KINDS)
def test_they_go_forward_once_and_never_back(run, checkpoint):
    pipe, layers = frozen_pipe(devices=RUNS[run][1], checkpoint=checkpoint)
    pipe.train_batch(torch.randn(2 * CHUNKS, 3), loss_fn=lambda y: y.pow(2).mean(), **RUNS[run][0])
    assert [len(layer.made) for layer in layers[:2]] == [CHUNKS] * 2
    assert [len(layer.sent) for layer in layers[:2]] == [0, 0]
    again = {"always": CHUNKS, "except_last": CHUNKS - 1, "never": 0}[checkpoint]
    assert [len(layer.made) for layer in layers[2:]] == [CHUNKS + again] * 2
    assert gone([memory for layer in layers for memory in layer.made])


class Looked(nn.Embedding):
    """Hands on no gradient, so that its weight gets none but that of others who have it."""

    def forward(self, x):
        return super().forward(x).detach()


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
def test_a_tied_weight_in_such_a_stage_gets_its_gradient_from_later_ones(checkpoint):
    layers = nn.Sequential(Looked(5, 4), nn.Linear(4, 4), nn.Linear(4, 5, bias=False))
    layers[1].requires_grad_(False)
    layers[2].weight = layers[0].weight
    plain = copy.deepcopy(layers)
    ids = torch.randint(5, (8,))
    for chunk in ids.chunk(4):
        (plain(chunk).pow(2).mean() / 4).backward()
    pipe = Pipe(layers, [1, 1, 1], devices=FOUR[:3], chunks=4, checkpoint=checkpoint)
    pipe.train_batch(ids, loss_fn=lambda y: y.pow(2).mean())
    assert torch.equal(pipe[0].weight.grad, plain[0].weight.grad)
