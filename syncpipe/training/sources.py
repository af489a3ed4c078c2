"""The micro-batches of a call."""

from __future__ import annotations

import threading
from collections.abc import Callable
from operator import attrgetter
from typing import Any

from torch import Tensor

from syncpipe.data.trees import tensors_in

_requires_grad = attrgetter("requires_grad")
Pack = Callable[[Any], Any]  #: turns an input into the argument of the first layer


class Source:
    """The micro-batches of a mini-batch: inputs, targets, and numbers of samples.

    A ``lazy`` source reads a micro-batch when it is pulled. Everything else about a micro-batch is
    known only after that.

    Attributes:
        m: the number of micro-batches.
        total: the number of samples in all micro-batches; None if unknown.
        sizes: the number of samples in each; 0 before the micro-batch is pulled.
        other_sizes: the set of sizes of all dimensions but the first, in micro-batch 0.
        lock: of lazy sources; acquire it before the locks of random generators.
    """

    lazy = False
    lock: threading.Lock

    def __init__(self, inputs: list[Any], targets: list[Any], sizes: list[int]) -> None:
        self.m, self.sizes, self.other_sizes = len(inputs), sizes, set[int]()
        self.total = None if self.lazy else sum(sizes)
        self._inputs, self._targets = list(inputs), dict(enumerate(targets))

    def pull(self, i: int) -> Any:
        return self._note_input(i, self._inputs[i])

    def _note_input(self, i: int, input: Any) -> Any:
        tensors = tensors_in(input)
        if i == 0:
            self.other_sizes = {size for tensor in tensors for size in tensor.shape[1:]}
        self._inputs[i] = list(filter(_requires_grad, tensors))
        return input

    def differentiable_inputs(self, i: int) -> list[Tensor]:
        """The tensors that require grad in the input of a pulled micro-batch."""
        return self._inputs[i] or []

    def target(self, i: int) -> Any:
        """Takes the target of a micro-batch, once for each."""
        return self._targets.pop(i)

    def peek_target(self, i: int) -> Any:
        """The target of a micro-batch until :meth:`target` takes it, then None."""
        return self._targets.get(i)

    @property
    def targets(self) -> list[Any] | None:
        """The targets of all micro-batches, before any is pulled; None if it is lazy."""
        return None if self.lazy else list(self._targets.values())
