"""Layers that can be watched, and that fail."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from syncpipe import is_recomputing
from syncpipe.runtime.worker import FREE_THREADED
from tests.support.running import on_gradient


class Watched(nn.Module):
    """Makes an activation that its Linear stores for backward, and remembers it weakly.

    Attributes:
        made: for each forward the activation.
        given: for each forward the input, where it is a tensor of its own.
        counts: how many activations were alive at each forward, the new one included.
        inputs: how many inputs were, at each forward.
        sent: for each backward the gradient that it hands on.
        grads: how many of these were alive at each backward, the new one included.
    """

    # As one of PyTorch's own, which never write into their inputs, it gets no copies of these.
    __module__ = "torch.nn.modules.watched"

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.forget()

    def forget(self) -> None:
        """Begins to count anew."""
        self.made: list[Memory] = []
        self.given: list[Memory] = []
        self.counts: list[int] = []
        self.inputs: list[int] = []
        self.sent: list[Memory] = []
        self.grads: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        activation = Double.apply(x, self)
        self.made.append(Memory(activation))
        if not is_recomputing():
            self.given.append(Memory(x))
            self.inputs.append(alive(self.given))
        self.counts.append(alive(self.made))
        result: Tensor = self.linear(activation)
        return result


class Double(torch.autograd.Function):
    """Twice the input, which it stores for no reason."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Watched) -> Tensor:
        ctx.save_for_backward(x)
        ctx.layer = weakref.ref(layer)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        assert x.shape == grad.shape
        result = grad * 2
        layer = ctx.layer()
        layer.sent.append(Memory(result))
        layer.grads.append(alive(layer.sent))
        return result, None


class Memory:
    """A weak reference to the memory of a tensor; called, it returns None when that is gone.

    It does not ask a Python object, which in free-threaded builds may die after the memory that it
    stood for.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._reference = StorageWeakRef(tensor.untyped_storage())

    def __call__(self) -> Memory | None:
        return None if self._reference.expired() else self


def alive(references: Sequence[Callable[[], object]]) -> int:
    """How many of them still refer to something."""
    return sum(reference() is not None for reference in references)


def gone(references: Sequence[Callable[[], object]]) -> bool:
    """Whether nothing is alive of what they refer to.

    At once, and without any garbage collection; in free-threaded builds after the idle threads that
    made it have looked, some of them more than once.
    """
    deadline = time.monotonic() + (10 if FREE_THREADED else 0)
    while alive(references) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not alive(references)


class Odd(BaseException):
    """Not even an Exception, and not to be built again from its arguments."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__("odd")
        self.pair = (a, b)


class Fails(nn.Module):
    """Scales; raises ``error`` in a phase of a micro-batch (which its input's first value names).

    Attributes:
        error: what to raise; None for nothing.
        phase: ``"forward"``, ``"recompute"``, ``"backward"`` or ``"hook"`` (of the parameter).
        i: the micro-batch.
        threads: those that it ran on.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 4))
        hook = weakref.WeakMethod(self._hook)  # or the parameter would keep the layer alive
        self.weight.register_hook(lambda grad: hook()(grad))  # type: ignore[misc]
        self.error: BaseException | None = None
        self.phase, self.i = "", -1
        self.threads: set[threading.Thread] = set()
        self._going_back = -1

    def act(self, phase: str, i: int) -> None:
        """Something happens to a micro-batch."""
        self.threads.add(threading.current_thread())
        if self.error is not None and (phase, i) == (self.phase, self.i):
            try:
                raise self.error  # the line of the layer
            finally:
                self.error = None  # once; and nothing of it stays here

    def forward(self, x: Tensor) -> Tensor:
        i = int(x.detach()[0, 0])
        self.act("recompute" if is_recomputing() else "forward", i)
        scaled = torch.cat([x[:, :1], x[:, 1:] * self.weight.tanh()], 1)
        result: Tensor = on_gradient(scaled, lambda grad: self._back(i))
        return result

    def _back(self, i: int) -> None:
        self._going_back = i
        self.act("backward", i)

    def _hook(self, grad: Tensor) -> None:
        self.act("hook", self._going_back)


def numbered(chunks: int, rows: int = 2) -> Tensor:
    """A mini-batch whose first column says which micro-batch a sample is in."""
    x = torch.randn(rows * chunks, 5)
    x[:, 0] = torch.arange(chunks).repeat_interleave(rows)
    return x


class Grads:
    """What ``.grad`` was; half of the parameters have one."""

    def __init__(self, *modules: nn.Module) -> None:
        self.parameters = [p for module in modules for p in module.parameters()]
        for parameter in self.parameters[::2]:
            parameter.grad = torch.randn_like(parameter)
        self.tensors = [p.grad for p in self.parameters]
        self.values = [None if p.grad is None else p.grad.clone() for p in self.parameters]

    def unchanged(self) -> bool:
        """The same tensors, with the same values; None where there was none."""
        pairs = zip(self.parameters, self.tensors, self.values, strict=True)
        return all(
            p.grad is tensor and (value is None or torch.equal(p.grad, value))
            for p, tensor, value in pairs
        )

    def put_back(self) -> None:
        """After a call that was to add to them."""
        for p, grad, value in zip(self.parameters, self.tensors, self.values, strict=True):
            p.grad = None if grad is None else grad.copy_(value)
