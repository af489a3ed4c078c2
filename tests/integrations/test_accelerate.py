"""Hugging Face Accelerate: ``prepare`` takes a pipe as it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from syncpipe import Pipe
from tests.integrations.loops import assert_trains_as_the_model, data, pipe_and_model

accelerate: Any = pytest.importorskip("accelerate")


@pytest.mark.parametrize("how", ["pipe(x)", "train_batch"])
@pytest.mark.parametrize("placement", [True, False])
def test_it_trains_as_a_plain_loop_does(placement: bool, how: str) -> None:
    pipe, model = pipe_and_model()
    accelerator = accelerate.Accelerator(cpu=True, device_placement=placement)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    prepared, optimizer, loader = accelerator.prepare(pipe, optimizer, data())
    assert isinstance(prepared, Pipe)
    for x, y in loader:
        optimizer.zero_grad()
        if how == "pipe(x)":
            accelerator.backward(F.cross_entropy(prepared(x), y))
        else:
            prepared.train_batch(x, y, loss_fn=F.cross_entropy)
        optimizer.step()
    assert_trains_as_the_model(pipe, model)
    norms, grads = [], []
    for clip, module in (
        (accelerator.clip_grad_norm_, prepared), (torch.nn.utils.clip_grad_norm_, model)
    ):  # fmt: skip
        norms.append(clip(module.parameters(), 0.1))
        grads.append([p.grad for p in module.parameters()])
    torch.testing.assert_close(*norms)
    torch.testing.assert_close(*grads)
