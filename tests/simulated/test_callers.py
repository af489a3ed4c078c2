"""The caller's streams: its iterator is asked there, and what it was given it may read late."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from syncpipe import Pipe
from syncpipe.runtime.worker import Worker
from tests import simulated

WIDTH = 4


def callers_streams(stack: ExitStack) -> list[torch.Stream]:
    """Makes streams of its own current on each device."""
    streams = [torch.Stream(device=device) for device in simulated.devices()]
    for stream in reversed(streams):
        stack.enter_context(stream)
    return streams


def pipe_of(by_hand: bool) -> Pipe:
    workers: list[Any] = [Worker(d) if by_hand else d for d in simulated.devices()]
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in workers))
    return Pipe(layers, [1] * 4, devices=workers, chunks=4)


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def still(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.0)


DRIVERS: dict[str, Callable[[Pipe, Iterator[Any]], Any]] = {
    "train_batch": lambda pipe, pairs: pipe.train_batch(
        data_iter=pairs, loss_fn=nn.functional.mse_loss
    ),
    "eval_batch": lambda pipe, pairs: pipe.eval_batch(
        data_iter=pairs, loss_fn=nn.functional.mse_loss
    ),
    "train_stream": lambda pipe, pairs: pipe.train_stream(
        pairs, optimizer=sgd, loss_fn=nn.functional.mse_loss
    ),
}


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("driver", DRIVERS)
def test_an_iterator_is_asked_on_the_callers_streams(driver: str, by_hand: bool) -> None:
    seen = []
    pipe = pipe_of(by_hand)

    def pairs() -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(4):
            seen.append([torch.accelerator.current_stream(d) for d in simulated.devices()])
            yield torch.randn(2, WIDTH, device="sim:0"), torch.randn(2, WIDTH, device="sim:3")

    with ExitStack() as stack:
        mine = callers_streams(stack)
        DRIVERS[driver](pipe, pairs())
        for device in simulated.devices():
            torch.accelerator.synchronize(device)
    assert len(seen) == 4
    assert all(streams == mine for streams in seen)


@pytest.mark.parametrize("late", [0, 3])
@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("driver", ["train_batch", "eval_batch", "pipe(x)", "train_stream"])
def test_what_a_call_gave_may_be_read_late_and_dropped(driver: str, chunks: int, late: int) -> None:
    pipe = pipe_of(by_hand=True)
    pipe.chunks = chunks
    x = torch.randn(8, WIDTH, device="sim:0")

    def run() -> list[Tensor]:
        pipe.zero_grad()
        leaf = x.clone().requires_grad_()
        if driver == "train_stream":
            made = pipe.train_stream([(x, None)] * 3, loss_fn=torch.mean, optimizer=still)
            states = [state["exp_avg"] for own in made.optimizers for state in own.state.values()]
            return [made.losses, *states]
        if driver == "eval_batch":
            return [pipe.eval_batch(x, loss_fn=torch.mean), pipe.eval_batch(x)]
        if driver == "pipe(x)":
            found = [pipe(leaf)]
            found[0].mean().backward()
        else:
            found = [*pipe.train_batch(leaf, loss_fn=torch.mean, return_outputs=True)]
        return [*found, *[t.grad for t in (leaf, *pipe.parameters()) if t.grad is not None]]

    expected = [tensor.detach().cpu() for tensor in run()]
    with ExitStack() as stack:
        streams = callers_streams(stack)
        found = run()
        with simulated.delays(50.0, stream=streams[late]):
            read = [tensor.detach() * 1 for tensor in found]
            found.clear()
            run()  # which may get their memory
        for tensor, right in zip(read, expected, strict=True):
            torch.testing.assert_close(tensor.cpu(), right)
