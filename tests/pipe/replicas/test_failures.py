"""P4 with replicas: failures and Ctrl-C anywhere, and the pipe works again."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import nn

from syncpipe import Pipe
from tests.pipe.replicas.dealing import dealt
from tests.support.interrupts import interrupted
from tests.support.models import linear_model
from tests.support.running import Noise
from tests.support.watched import Fails, Odd, numbered
from tests.training.failures.failing import Grads, mean

CHUNKS, REPLICAS = 4, [2, 1, 3]


def pipe_of(**options: object) -> Pipe:
    torch.manual_seed(1)
    return dealt(nn.Sequential(*(Fails() for _ in range(3))), [1] * 3, REPLICAS, **options)


def works(pipe: Pipe) -> list[torch.Tensor]:
    """What a step gives."""
    pipe.zero_grad()
    torch.manual_seed(2)
    loss = pipe.train_batch(numbered(CHUNKS), loss_fn=mean)
    return [loss, *[p.grad.clone() for p in pipe.parameters()]]


@pytest.mark.parametrize("driver", ["pipe(x)", "gpipe", "1f1b", "zb_h1"])
@pytest.mark.parametrize("phase", ["forward", "recompute", "backward"])
def test_an_exception_in_any_cell_arrives_as_itself_and_changes_nothing(driver, phase):
    pipe = pipe_of(chunks=CHUNKS, checkpoint="always")
    expected = works(pipe)
    grads, x = Grads(pipe), numbered(CHUNKS).requires_grad_()
    steps = (
        lambda: pipe.train_batch(x.detach(), loss_fn=mean, schedule=driver),
        lambda: pipe(x).sum().backward(),
    )
    for j, i in product(range(3), range(CHUNKS)):
        error = Odd(i, j) if (i + j) % 2 else ValueError("bad")
        layer = pipe[j]
        layer.error, layer.phase, layer.i = error, phase, i
        with pytest.raises(type(error)) as caught:
            steps[driver == "pipe(x)"]()
        assert caught.value is error
        assert f"stage {j} (layer {j}), micro-batch {i}" in "\n".join(error.__notes__)
        assert grads.unchanged(), (i, j)
        layer.error = error.__traceback__ = None  # a cell's own module has it, and its graph that
    assert all(map(torch.equal, works(pipe), expected))


def test_ctrl_c_anywhere():
    pipe = dealt(linear_model(3), [1] * 3, REPLICAS, chunks=CHUNKS)
    x = torch.randn(CHUNKS, 3)
    expected = [pipe.train_batch(x, loss_fn=torch.mean), *[p.grad for p in pipe.parameters()]]
    pipe.zero_grad()
    at, through = 1, True
    while through:
        calls, through = interrupted(at, lambda: pipe.train_batch(x, loss_fn=torch.mean))
        if through and any(p.grad is not None for p in pipe.parameters()):
            found = [p.grad for p in pipe.parameters()]  # it came when all was done
            assert all(map(torch.equal, found, expected[1:]))
        pipe.zero_grad()
        at += 1 + at // 12
        assert calls
    found = [pipe.train_batch(x, loss_fn=torch.mean), *[p.grad for p in pipe.parameters()]]
    assert all(map(torch.equal, found, expected))


def test_layers_that_a_failed_call_did_not_reach_may_draw_in_the_next():
    pipe = dealt(nn.Sequential(nn.Linear(3, 3), Noise()), [2], [2], chunks=CHUNKS)
    with pytest.raises(RuntimeError, match="shapes"):
        pipe(torch.ones(CHUNKS, 2))
    results = []
    for _ in range(2):
        torch.manual_seed(3)
        results.append(pipe(torch.ones(CHUNKS, 3)))
    assert torch.equal(*results)
