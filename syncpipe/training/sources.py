"""Where ``train_batch`` gets its micro-batches from: a mini-batch to cut, or an iterator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from syncpipe.microbatch import scatter_pair, unwrapped
from syncpipe.runtime.errors import annotate
from syncpipe.tree import tensors_in

__all__ = ["Source", "source_of"]


class Source:
    """Micro-batches: inputs and targets.

    Attributes:
        m: how many.
        lazy: whether a micro-batch comes to light only when it is pulled.
        total: the number of samples in all of them, where it is known.
    """

    lazy = False

    def __init__(self, m: int) -> None:
        self.m = m
        self.total: int | None = None
        self._inputs: list[Any] = [None] * m
        self._targets: list[Any] = [None] * m
        self._sizes = [0] * m

    def pull(self, i: int) -> Any:
        """The input of a micro-batch. Called once for each."""
        raise NotImplementedError

    def entering(self) -> Any:
        """What the first stage gets from the caller."""
        return None

    def size(self, i: int) -> int:
        """The number of samples in a micro-batch, once it was pulled."""
        return self._sizes[i]

    def target(self, i: int) -> Any:
        """The target of a micro-batch, once it was pulled. Called once for each."""
        target, self._targets[i] = self._targets[i], None
        return target

    def peek_target(self, i: int) -> Any:
        """What came with the input of a micro-batch: the target, as long as it is here."""
        return self._targets[i]

    @property
    def targets(self) -> list[Any] | None:
        """The targets of all micro-batches, before any was pulled; None where nobody knows them."""
        return None if self.lazy else self._targets

    def inputs(self, i: int) -> list[Tensor]:
        """The tensors in the input of a micro-batch that need a gradient, once it was pulled."""
        return self._inputs[i] or []

    def _pulled(self, i: int, input: Any) -> Any:
        self._inputs[i] = [tensor for tensor in tensors_in(input) if tensor.requires_grad]
        return input


class FromMiniBatch(Source):
    """Cuts a mini-batch into micro-batches.

    Args:
        input: a tree.
        target: a tree, or None.
        chunks: at most so many micro-batches.
    """

    def __init__(self, input: Any, target: Any, chunks: int) -> None:
        inputs, targets, sizes = scatter_pair(input, target, chunks)
        super().__init__(len(inputs))
        self._inputs, self._targets, self._sizes = inputs, targets, sizes
        self.total = sum(sizes)

    def pull(self, i: int) -> Any:
        return self._pulled(i, self._inputs[i])

    def entering(self) -> Any:
        return self._inputs[0]


class FromIterator(Source):
    """Takes micro-batches from an iterator, each only when the first stage is ready for it.

    Args:
        iterator: yields pairs ``(input, target)``.
        m: so many are taken.
    """

    lazy = True

    def __init__(self, iterator: Iterator[Any], m: int) -> None:
        super().__init__(m)
        self._iterator = iterator

    def pull(self, i: int) -> Any:
        try:
            item = next(self._iterator)
        except StopIteration:
            raise ValueError(
                f"data_iter ended when asked for micro-batch {i} of {self.m} (chunks={self.m}). "
                "No gradient of this call remains: .grad is what it was before. Give it a multiple "
                "of chunks micro-batches, or begin again each time by syncpipe.RepeatingLoader"
            ) from None
        except BaseException as error:
            annotate(error, f"in data_iter, when asked for micro-batch {i}")
            raise
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise TypeError(
                f"data_iter gave {type(item).__name__}{_length(item)} for micro-batch {i}; it "
                "gives pairs (input, target), with None for a target that there is not"
            )
        input, self._sizes[i] = unwrapped(item[0])
        self._targets[i], _ = unwrapped(item[1])
        return self._pulled(i, input)


def _length(item: Any) -> str:
    return f" of {len(item)}" if isinstance(item, tuple | list) else ""


def source_of(input: Any, target: Any, data_iter: Iterator[Any] | None, chunks: int) -> Source:
    """Where micro-batches come from, by what ``train_batch`` is given.

    Raises:
        TypeError: ``data_iter`` is no iterator.
        ValueError: there is a mini-batch beside it, or neither.
    """
    if data_iter is None:
        if input is None:
            raise ValueError("there is neither an input nor a data_iter to take it from")
        return FromMiniBatch(input, target, chunks)
    if input is not None or target is not None:
        raise ValueError(
            "data_iter gives the micro-batches, so there can be no input and no target "
            "beside it: give either"
        )
    if not isinstance(data_iter, Iterator):
        raise TypeError(
            f"data_iter must be an iterator, not {type(data_iter).__name__}: make one by "
            "iter(...), once for all steps, or every step would begin with the same micro-batches"
        )
    return FromIterator(data_iter, chunks)
