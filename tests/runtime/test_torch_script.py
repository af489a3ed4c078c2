"""TorchScript layers in recomputed stages; weights that an embedding shortens are let go."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from syncpipe import Pipe

# Since Python 3.13 torch.jit.script keeps the frames that call it, with their variables as they are
# later: a pipe among them would never die.


@pytest.fixture
def scripted():
    return torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))


@pytest.mark.parametrize("chunks", [1, 2])
def test_torch_script_may_be_recomputed_from_its_first_run_on(scripted, chunks):
    layers = nn.Sequential(nn.Linear(4, 4), scripted, nn.Linear(4, 4))
    pipe = Pipe(layers, [1, 2], devices=["cpu:0", "cpu:1"], chunks=chunks, checkpoint="always")
    for size in (6, 6, 6, 4):
        x = torch.randn(size, 4)
        pipe.zero_grad()
        pipe(x).sum().backward()
        ours = [p.grad for p in pipe.parameters()]
        pipe.zero_grad()
        torch.cat([layers(c) for c in x.chunk(chunks)]).sum().backward()
        # Not to the last bit: TorchScript compiles itself meanwhile.
        torch.testing.assert_close([p.grad for p in pipe.parameters()], ours)


class Counts(nn.Module):
    """Does something else each time."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        for _ in range(self.calls):
            x = x * x.tanh()
        return x


@pytest.fixture
def unsteady():
    return torch.jit.script(Counts())


def test_what_torch_script_hides_of_an_error_is_said(unsteady):
    layers = nn.Sequential(nn.Linear(4, 4), unsteady, nn.Linear(4, 4))
    pipe = Pipe(layers, [1, 2], devices=["cpu:0", "cpu:1"], chunks=2, checkpoint="always")
    loss = pipe(torch.randn(6, 4)).sum()
    with pytest.raises(RuntimeError, match=r"stage 1 .* stored other tensors .*checkpoint='never'"):
        loss.backward()
    del pipe  # on Python 3.13 a script never lets go of its exception, which has this frame


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
