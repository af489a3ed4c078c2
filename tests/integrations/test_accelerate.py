"""Hugging Face Accelerate: ``prepare`` takes a pipe as it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from syncpipe import Pipe
from tests.integrations.loops import batches, pipe_and_model, plain_loop

accelerate: Any = pytest.importorskip("accelerate")


@pytest.mark.parametrize("how", ["pipe(x)", "train_batch"])
@pytest.mark.parametrize("placement", [True, False])
def test_it_trains_as_a_plain_loop_does(placement: bool, how: str) -> None:
    pipe, model = pipe_and_model()
    plain_loop(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator = accelerate.Accelerator(cpu=True, device_placement=placement)
    data = DataLoader(TensorDataset(*map(torch.cat, zip(*batches(), strict=True))), batch_size=8)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    prepared, optimizer, data = accelerator.prepare(pipe, optimizer, data)
    assert isinstance(prepared, Pipe)
    for x, y in data:
        optimizer.zero_grad()
        if how == "pipe(x)":
            accelerator.backward(F.cross_entropy(prepared(x), y))
        else:
            prepared.train_batch(x, y, loss_fn=F.cross_entropy)
        optimizer.step()
    for actual, expected in zip(pipe.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(actual, expected)


def test_clipping_by_the_accelerator() -> None:
    pipe, model = pipe_and_model()
    accelerator = accelerate.Accelerator(cpu=True)
    prepared = accelerator.prepare(pipe)
    x, y = batches()[0]
    prepared.train_batch(x, y, loss_fn=F.cross_entropy)
    F.cross_entropy(model(x), y).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    torch.testing.assert_close(accelerator.clip_grad_norm_(prepared.parameters(), 0.1), norm)
    for actual, expected in zip(pipe.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(actual.grad, expected.grad)
