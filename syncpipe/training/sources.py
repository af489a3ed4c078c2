"""Where ``train_batch`` gets its micro-batches from: a mini-batch to cut, or an iterator.

Both give pairs of input and target, tuples whose last entry is the target, or dicts in which
``target`` names it.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from copy import copy
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from syncpipe.data import map_tensors, scatter_pair, tensors_in, unwrapped
from syncpipe.hints import outside
from syncpipe.layers.placement import check_input
from syncpipe.runtime.errors import annotate
from syncpipe.runtime.streams import moved

__all__ = ["FromMiniBatch", "RepeatingLoader", "Source", "input_and_target", "pair_of", "source_of"]

_T = TypeVar("_T")


class RepeatingLoader(Generic[_T]):
    """Iterates over something again and again, for ``train_batch(data_iter=...)``.

    A new pass begins as soon as the one before has ended, with whatever order the iterable has
    then::

        data = iter(RepeatingLoader(DataLoader(dataset, batch_size=16, shuffle=True)))
        for _ in range(steps):
            loss = pipe.train_batch(data_iter=data, loss_fn=loss_fn)

    Args:
        iterable: what can be iterated over more than once, such as a ``DataLoader`` or a list.

    Raises:
        TypeError: ``iterable`` cannot be iterated over, or only once.
        ValueError: while iterating, if a pass gives nothing at all.
    """

    def __init__(self, iterable: Iterable[_T]) -> None:
        if not isinstance(iterable, Iterable):
            raise TypeError(f"RepeatingLoader needs an iterable, not {type(iterable).__name__}")
        if isinstance(iterable, Iterator):
            raise TypeError(
                f"RepeatingLoader cannot restart {type(iterable).__name__}, an iterator: give it "
                "what the iterator is made from, such as the DataLoader itself"
            )
        self._iterable = iterable
        self._pass: Iterator[_T] | None = None

    def __iter__(self) -> Iterator[_T]:
        return self

    def __next__(self) -> _T:
        if self._pass is not None:
            for item in self._pass:
                return item
        self._pass = iter(self._iterable)
        for item in self._pass:
            return item
        self._pass = None
        raise ValueError(f"RepeatingLoader: there is nothing in {self._iterable!r}")


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

    @property
    def sizes(self) -> list[int]:
        """The numbers of samples in all micro-batches; 0 before one is pulled."""
        return self._sizes

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
        iterator: yields them.
        m: so many are taken.
        target: where each has its target.
        pack: makes of an input what the first layer gets.
    """

    lazy = True

    def __init__(
        self, iterator: Iterator[Any], m: int, target: Any, pack: Callable[[Any], Any]
    ) -> None:
        super().__init__(m)
        self._pack = pack
        self._iterator = iterator
        self._where = target
        self._lock = threading.Lock()  # the replicas of the first stage take turns
        self._waiting: dict[int, Any] = {}  # inputs that came to light, and were not pulled yet
        self._following = 0

    def pull(self, i: int) -> Any:
        with self._lock:
            while self._following <= i:
                self._waiting[self._following] = self._taken(self._following)
                self._following += 1
            return self._waiting.pop(i)

    def _taken(self, i: int) -> Any:
        """The input of micro-batch ``i``, which comes next."""
        try:
            item = next(self._iterator)
        except StopIteration:
            raise ValueError(
                f"data_iter ended when asked for micro-batch {i} of {self.m} (chunks={self.m}). "
                "No gradient of this call remains: .grad is what it was before. Give it a multiple "
                "of chunks micro-batches, or start again each time by syncpipe.RepeatingLoader"
            ) from None
        except BaseException as error:
            annotate(error, f"in data_iter, when asked for micro-batch {i}")
            raise
        given, target = pair_of(item, self._where, f" for micro-batch {i}")
        input, self._sizes[i] = unwrapped(self._pack(given))
        self._targets[i], _ = unwrapped(target)
        return self._pulled(i, input)


_running: WeakKeyDictionary[Any, Iterator[Any]] = WeakKeyDictionary()


def _next_of(loader: Iterable[_T]) -> _T:
    """What comes next from a loader that is asked once for each step; epoch after epoch.

    Raises:
        ValueError: there is nothing in it.
    """
    for _ in range(2):
        if loader not in _running:
            _running[loader] = iter(loader)
        for item in _running[loader]:
            return item  # type: ignore[no-any-return]
        del _running[loader]
    raise ValueError(f"data_iter: there is nothing in {loader!r}")


def source_of(
    input: Any,
    target: Any,
    data_iter: Any,
    chunks: int,
    device: torch.device,
    pack: Callable[[Any], Any],
) -> Source:
    """Where micro-batches come from, by what ``train_batch`` is given.

    Args:
        input: a mini-batch, or None.
        target: its target, or what says where that is.
        data_iter: an iterator that gives micro-batches, or a loader that gives mini-batches.
        chunks: so many micro-batches.
        device: where inputs have to be.
        pack: makes of an input what the first layer gets.

    Raises:
        TypeError: ``data_iter`` is no iterator, or ``input`` is one.
        ValueError: there is a mini-batch beside it, or neither.
    """
    if data_iter is None:
        if input is None:
            raise ValueError("there is neither an input nor a data_iter to take it from")
        if isinstance(input, Iterator | DataLoader):
            raise TypeError(
                f"input is a {type(input).__name__}, which gives inputs, and not one itself: "
                "did you mean data_iter=...?"
            )
        input, target = input_and_target(input, target)
        input = pack(input)
        check_input(input, device)
        return FromMiniBatch(input, target, chunks)
    if input is not None:
        raise ValueError("data_iter gives the inputs, so there can be none beside it: give either")
    if target is not None and not _says_where(target):
        raise ValueError(
            "data_iter gives the targets, too: target can only say where they are, by a key, an "
            f"index or a function of what data_iter gives, and is {type(target).__name__}"
        )
    if isinstance(data_iter, Iterator):
        if isinstance(data_iter, _BaseDataLoaderIter) and chunks > 1:
            warnings.warn(
                f"data_iter=iter(loader): each of its batches is one micro-batch, and chunks="
                f"{chunks} of them make a step. If a batch is meant to be a whole mini-batch, give "
                "the loader itself, data_iter=loader. If it is a micro-batch, give "
                "iter(syncpipe.RepeatingLoader(loader)), and this warning goes",
                stacklevel=outside(),
            )
        return FromIterator(data_iter, chunks, target, pack)
    if not isinstance(data_iter, Iterable) or not hasattr(data_iter, "__weakref__"):
        raise TypeError(
            f"data_iter must be an iterator, not {type(data_iter).__name__}: make "
            "one by iter(...), once for all steps, or every step would start with the same "
            "micro-batches; or give a DataLoader, which is asked for a mini-batch in each step"
        )
    try:
        item = _next_of(data_iter)
    except BaseException as error:
        annotate(error, "in data_iter, when asked for a mini-batch")
        raise
    input, target = pair_of(item, target, "")
    there = map_tensors(lambda tensors: [moved(tensor, device) for tensor in tensors], input)
    input = pack(there)
    return FromMiniBatch(input, target, chunks)


def _says_where(target: Any) -> bool:
    function = callable(target) and not isinstance(target, Tensor | nn.Module)
    return function or isinstance(target, str | int)


def pair_of(item: Any, where: Any, at: str) -> tuple[Any, Any]:
    """Input and target, of what ``data_iter`` gave.

    Args:
        item: a pair, a longer tuple, or a dict.
        where: the key, the index, or a function of the item, of the target; None for the last of a
            tuple, and for a dict without one.
        at: for which micro-batch, in words.

    Raises:
        TypeError: it is nothing of the kind.
        ValueError: there is no such key or index.
    """
    if callable(where):
        return input_and_target(item, where)
    if isinstance(item, Mapping):
        if where is not None and where not in item:
            keys = ", ".join(map(repr, item))
            raise ValueError(f"target={where!r}, but data_iter gave a dict with {keys}{at}")
        return input_and_target(item, where)
    length = f" of {len(item)}" if isinstance(item, tuple | list) else ""
    if not isinstance(item, tuple | list) or len(item) < 2:
        raise TypeError(
            f"data_iter gave {type(item).__name__}{length}{at}; it gives pairs (input, target), "
            "with None for a target that there is not, longer tuples with the target at their "
            "end, or dicts with target= as its key"
        )
    index = -1 if where is None else where
    if not isinstance(index, int) or not -len(item) <= index < len(item):
        raise ValueError(f"target={where!r}, but data_iter gave {type(item).__name__}{length}{at}")
    parts = list(item)
    target = parts.pop(index)
    return (parts[0] if len(parts) == 1 else tuple(parts)), target


def input_and_target(input: Any, target: Any) -> tuple[Any, Any]:
    """A mini-batch and its target, which may be a key of it, or a function of it."""
    if callable(target) and _says_where(target):
        return input, target(input)
    if isinstance(target, str) and isinstance(input, MutableMapping) and target in input:
        rest = copy(input)  # of its own kind
        target = rest.pop(target)
        return rest, target
    return input, target
