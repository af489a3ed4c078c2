"""What ``train_batch`` and ``eval_batch`` may be given: a mini-batch, a loader, an iterator."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from copy import copy
from functools import partial
from types import FunctionType, MethodType
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from syncpipe.data.batches import scatter_pair, unwrapped
from syncpipe.data.trees import described, map_tensors
from syncpipe.hints import caller_stacklevel
from syncpipe.layers.placement import check_input
from syncpipe.runtime.errors import annotate
from syncpipe.runtime.streams import moved
from syncpipe.training.sources import Source

_T = TypeVar("_T")
Pack = Callable[[Any], Any]  #: turns an input into the argument of the first layer


class RepeatingLoader(Generic[_T]):
    """Iterate over something again and again, for ``train_batch(data_iter=...)``.

    Each pass calls ``iter(iterable)``, so a shuffling ``DataLoader`` gives a new order::

        data = iter(RepeatingLoader(DataLoader(dataset, batch_size=16, shuffle=True)))
        for _ in range(steps):
            loss = pipe.train_batch(data_iter=data, loss_fn=loss_fn)

    Args:
        iterable: an iterable that can restart, for example a ``DataLoader`` or a list.

    Raises:
        TypeError: ``iterable`` is not iterable, is an iterator, or is a dataset of samples.
        ValueError: while iterating, if a pass gives no item.
    """

    def __init__(self, iterable: Iterable[_T]) -> None:
        refuse_dataset(iterable, "RepeatingLoader")
        if not isinstance(iterable, Iterable):
            raise TypeError(f"RepeatingLoader needs an iterable, not {type(iterable).__name__}")
        if isinstance(iterable, Iterator):
            raise TypeError(
                f"RepeatingLoader cannot restart {type(iterable).__name__}, an iterator: give it "
                "the iterable itself, for example the DataLoader"
            )
        self._iterable = iterable
        self._running: dict[str, Iterator[_T]] = {}

    def __iter__(self) -> Iterator[_T]:
        return self

    def __next__(self) -> _T:
        return _next_item(self._iterable, self._running, "iterable", "RepeatingLoader")


def refuse_dataset(data: Any, what: str) -> None:
    """Raises TypeError for a dataset, whose samples would be cut along their first dimension."""
    by_index = hasattr(type(data), "__getitem__") and not isinstance(
        data, Sequence | Mapping | Tensor
    )
    if isinstance(data, Dataset) or (by_index and not type(data).__module__.startswith("numpy")):
        raise TypeError(
            f"{what} is a {type(data).__name__}, which gives samples, and not batches: wrap it in "
            "torch.utils.data.DataLoader(data, batch_size=...), None if its items are batches"
        )


def _next_item(
    loader: Iterable[_T], running: MutableMapping[Any, Iterator[_T]], key: Any, who: str
) -> _T:
    """The next item of a loader, pass after pass; ``running[key]`` is the iterator of this pass."""
    for _ in range(2):
        if key not in running:
            running[key] = iter(loader)
        for item in running[key]:
            return item
        del running[key]
    raise ValueError(f"{who}: there is nothing in {loader!r}")


class FromIterator(Source):
    """Takes ``m`` micro-batches from an iterator, each when the first stage is ready for it.

    ``where`` locates the target of each, as in :func:`pair_of`.
    """

    lazy = True

    def __init__(self, iterator: Iterator[Any], m: int, where: Any, pack: Pack) -> None:
        super().__init__([None] * m, [], [0] * m)
        self._iterator, self._target_key, self._pack = iterator, where, pack
        self.lock = threading.Lock()  # of workers that share the iterator
        self._waiting: dict[int, Any] = {}  # read, but not pulled yet
        self._next_index = 0

    def pull(self, i: int) -> Any:
        while self._next_index <= i:
            self._waiting[self._next_index] = self._fetch(self._next_index)
            self._next_index += 1
        return self._waiting.pop(i)

    def _fetch(self, i: int) -> Any:
        if (pair := self._next_pair(f"micro-batch {i}")) is None:
            raise ValueError(
                f"data_iter ended when asked for micro-batch {i} of {self.m} (chunks={self.m}). "
                ".grad is what it was before this call. Give it a multiple of chunks "
                "micro-batches, or repeat it by syncpipe.RepeatingLoader"
            )
        input, self.sizes[i] = unwrapped(self._pack(pair[0]))
        self._targets[i], _ = unwrapped(pair[1])
        return self._note_input(i, input)

    def _next_pair(self, what: str) -> tuple[Any, Any] | None:
        try:
            item = next(self._iterator)
        except StopIteration:
            return None
        except BaseException as error:
            annotate(error, f"in data_iter, when asked for {what}")
            raise
        return pair_of(item, self._target_key, f" for {what}")


def source_of(
    input: Any,
    target: Any,
    data_iter: Any,
    chunks: int,
    device: torch.device,
    pack: Pack,
    passes: MutableMapping[Any, Iterator[Any]],
) -> Source:
    """The source for the arguments of ``train_batch``; inputs are on ``device``.

    ``passes`` has the iterator of each loader that gives one mini-batch in each step, by identity:
    loaders may be equal, or have no hash.

    Raises:
        TypeError: ``data_iter`` gives no micro-batches, or ``input`` is an iterator.
        ValueError: both ``input`` and ``data_iter`` are given, or neither.
    """
    if data_iter is None:
        if input is None:
            raise ValueError("there is neither an input nor a data_iter to take it from")
        if isinstance(input, Iterator | DataLoader | Dataset):
            raise TypeError(
                f"input is a {type(input).__name__}, which gives inputs, and not one itself: "
                "did you mean data_iter=...?"
            )
        input, target = input_and_target(input, target)
        input = pack(input)
        check_input(input, device)
        return Source(*scatter_pair(input, target, chunks))
    if input is not None:
        raise ValueError("both input and data_iter are given, and data_iter gives inputs: drop one")
    if not (target is None or isinstance(target, str | int) or is_function(target)):
        raise ValueError(
            "data_iter gives the targets, too: with it target must be their key or index in an "
            f"item, or a function of an item, not {type(target).__name__}"
        )
    if isinstance(data_iter, Iterator):
        if isinstance(data_iter, _BaseDataLoaderIter) and chunks > 1:
            warnings.warn(
                f"data_iter=iter(loader): each of its batches is one micro-batch, and chunks="
                f"{chunks} of them make a step. If a batch is meant to be a whole mini-batch, give "
                "the loader itself, data_iter=loader. If it is a micro-batch, give "
                "iter(syncpipe.RepeatingLoader(loader)) to silence this warning",
                stacklevel=caller_stacklevel(),
            )
        return FromIterator(data_iter, chunks, target, pack)
    _check_loader(data_iter)
    try:
        item = _next_item(data_iter, passes, data_iter, "data_iter")
    except BaseException as error:
        annotate(error, "in data_iter, when asked for a mini-batch")
        raise
    input, target = pair_of(item, target, "")
    input = map_tensors(lambda tensors: [moved(tensor, device) for tensor in tensors], input)
    return Source(*scatter_pair(pack(input), target, chunks))


def _check_loader(data_iter: Any) -> None:
    """Raises TypeError for what does not give mini-batches."""
    refuse_dataset(data_iter, "data_iter")
    if isinstance(data_iter, FunctionType | MethodType | partial):
        raise TypeError(
            f"data_iter is a {type(data_iter).__name__}: call it once for all steps, and give what "
            "it returns, data_iter=f()"
        )
    if isinstance(data_iter, Tensor):
        raise TypeError(
            f"data_iter is a tensor ({described(data_iter)}), and it must give micro-batches: give "
            "a mini-batch as the input"
        )
    if not isinstance(data_iter, Iterable) or not hasattr(data_iter, "__weakref__"):
        raise TypeError(
            f"data_iter must be an iterator, not {type(data_iter).__name__}: make one by iter(...) "
            "once for all steps, or give a DataLoader, which gives a mini-batch in each step"
        )


def is_function(target: Any) -> bool:
    return callable(target) and not isinstance(target, Tensor | nn.Module)


def pair_of(item: Any, where: Any, at: str) -> tuple[Any, Any]:
    """Input and target of an item of ``data_iter``: a pair, a longer tuple, or a dict.

    ``where`` is the key or index of the target, or a function of the item that returns it. None:
    the last of a tuple; a dict then has no target. ``at`` names the micro-batch in messages.
    """
    if isinstance(item, Mapping) and isinstance(where, str | int):
        return _without_key(item, where, "data_iter gave", at)
    if callable(where) or isinstance(item, Mapping):
        return input_and_target(item, where)
    length = f" of {len(item)}" if isinstance(item, tuple | list) else ""
    if not isinstance(item, tuple | list) or len(item) < 2:
        raise TypeError(
            f"data_iter gave {type(item).__name__}{length}{at}: it must give pairs (input, target "
            "or None), longer tuples that end in the target, or dicts with target= as its key"
        )
    index = -1 if where is None else where
    if not isinstance(index, int) or not -len(item) <= index < len(item):
        raise ValueError(f"target={where!r}, but data_iter gave {type(item).__name__}{length}{at}")
    parts = list(item)
    target = parts.pop(index)
    return (parts[0] if len(parts) == 1 else tuple(parts)), target


def input_and_target(input: Any, target: Any) -> tuple[Any, Any]:
    """A mini-batch and its target; ``target`` may be a key of the input, or a function of it."""
    if is_function(target):
        return input, target(input)
    if not isinstance(target, str) or isinstance(input, Tensor):
        return input, target
    if not isinstance(input, Mapping):
        raise TypeError(
            f"target={target!r} is a key, and the input is a {type(input).__name__}, which has no "
            "keys: give the target itself, or a function of the input that returns it"
        )
    return _without_key(input, target, "the input is")


def _without_key(given: Mapping[Any, Any], key: Any, what: str, at: str = "") -> tuple[Any, Any]:
    if key not in given:
        keys = ", ".join(map(repr, given))
        raise ValueError(f"target={key!r}, but {what} a dict with {keys}{at}")
    rest: Any = copy(given) if isinstance(given, MutableMapping) else dict(given)
    target = rest.pop(key)
    return rest, target
