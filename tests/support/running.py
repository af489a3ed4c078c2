"""Helpers of the tests that run pipes: workers, references, layers that do what a test says."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from syncpipe import Pipe
from tests.support.compare import assert_same as assert_same  # for those who import it here
from tests.support.models import Noise as Noise
from tests.support.models import Result, in_turn, step
from tests.support.models import weigh as weigh

MODES = ("never", "except_last", "always")


def pipe_of(module: nn.Sequential, balance: list[int] | None = None, **options: Any) -> Pipe:
    """A pipe on CPU workers that run at the same time; by default a layer for each."""
    balance = [1] * len(module) if balance is None else balance
    devices = [f"cpu:{j}" for j in range(len(balance))]
    return Pipe(module, balance, **{"chunks": 4, "devices": devices, **options})


def beside(
    mode: str, layers: nn.Sequential, balance: Sequence[int] = (2, 3), **options: Any
) -> tuple[Pipe, Callable[[Tensor], Tensor], nn.Sequential]:
    """A pipe, the plain loop over a copy of its layers, and that copy."""
    copied = copy.deepcopy(layers)
    pipe = pipe_of(layers, list(balance), checkpoint=mode, **options)
    return pipe, in_turn(copied, pipe.chunks), copied


def trained(run: Callable[[Tensor], Tensor], module: nn.Module, x: Tensor) -> Result:
    """One forward and backward, with a gradient of x."""
    return step(run, module, x.detach().requires_grad_())


class Do(nn.Module):
    """Calls a function with its inputs; passes on what that returns, or the input for None."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Any) -> Any:
        y = self.function(*inputs)
        return inputs[0] if y is None else y


class Using(nn.Module):
    """A function of its inputs and of layers."""

    def __init__(self, function: Callable[..., Any], *layers: nn.Module) -> None:
        super().__init__()
        self.function, self.layers = function, nn.ModuleList(layers)

    def forward(self, *inputs: Any) -> Any:
        return self.function(*inputs, *self.layers)


class Residual(nn.Module):
    """Uses its input twice, so that gradients meet where the input came from."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class NormBlock(nn.Module):
    """Has statistics, which change in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.linear(x)) + x)


class _Gradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, act: Callable[[Tensor], Tensor | None]) -> Tensor:
        ctx.act = act
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        other = ctx.act(grad)
        return grad if other is None else other, None


def on_gradient(x: Tensor, act: Callable[[Tensor], Tensor | None]) -> Any:
    """A copy of a tensor, whose backward calls a function; what that returns is the gradient."""
    return _Gradient.apply(x, act)


def in_threads(function: Callable[[Any], Any], *arguments: Any) -> list[Any]:
    """Calls a function with each of these at the same time, on threads of their own."""
    start = threading.Barrier(len(arguments))

    def work(argument: Any) -> Any:
        start.wait()
        return function(argument)

    with ThreadPoolExecutor(len(arguments)) as threads:
        return list(threads.map(work, arguments))


@contextmanager
def another_thread(act: Callable[[], Any] | None = None) -> Iterator[None]:
    """A thread of the user's that does this; it might draw, so layers draw in another way."""
    began, end = threading.Event(), threading.Event()

    def work() -> None:
        while not end.is_set():
            (act or end.wait)() if began.is_set() else began.set()

    thread = threading.Thread(target=work)
    thread.start()
    began.wait()
    try:
        yield
    finally:
        end.set()
        thread.join()


def raising(make: Callable[[], BaseException]) -> Callable[..., Any]:
    """A function that raises what this makes."""

    def fail(*_: Any) -> Any:
        raise make()

    return fail
