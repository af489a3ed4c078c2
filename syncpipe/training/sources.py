"""Where ``train_batch`` gets its micro-batches from: a mini-batch to cut, or an iterator."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from copy import copy
from functools import partial
from types import FunctionType, MethodType
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from syncpipe.data import described, map_tensors, scatter_pair, tensors_in, unwrapped
from syncpipe.hints import outside
from syncpipe.layers.placement import check_input
from syncpipe.runtime.errors import annotate
from syncpipe.runtime.streams import moved

_T = TypeVar("_T")
_Pack = Callable[[Any], Any]  #: makes of an input what the first layer gets


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
        TypeError: ``iterable`` cannot be iterated over, or only once, or is a dataset of samples.
        ValueError: while iterating, if a pass gives nothing at all.
    """

    def __init__(self, iterable: Iterable[_T]) -> None:
        refuse_dataset(iterable, "RepeatingLoader")
        if not isinstance(iterable, Iterable):
            raise TypeError(f"RepeatingLoader needs an iterable, not {type(iterable).__name__}")
        if isinstance(iterable, Iterator):
            raise TypeError(
                f"RepeatingLoader cannot restart {type(iterable).__name__}, an iterator: give it "
                "what the iterator is made from, such as the DataLoader itself"
            )
        self._iterable = iterable
        self._running: dict[str, Iterator[_T]] = {}

    def __iter__(self) -> Iterator[_T]:
        return self

    def __next__(self) -> _T:
        return _next_item(self._iterable, self._running, "iterable", "RepeatingLoader")


def refuse_dataset(data: Any, what: str) -> None:
    """Refuses what gives samples, which would be cut along their own first dimension."""
    by_index = hasattr(type(data), "__getitem__") and not isinstance(
        data, Sequence | Mapping | Tensor
    )
    if isinstance(data, Dataset) or (by_index and not type(data).__module__.startswith("numpy")):
        raise TypeError(
            f"{what} is a {type(data).__name__}, which gives samples, and not batches: wrap it in "
            "a DataLoader, torch.utils.data.DataLoader(data, batch_size=...); with batch_size=None "
            "if what it gives are batches"
        )


def _next_item(
    loader: Iterable[_T], running: MutableMapping[Any, Iterator[_T]], key: Any, who: str
) -> _T:
    """What comes next from a loader, pass after pass; the one that it is in is ``running[key]``."""
    for _ in range(2):
        if key not in running:
            running[key] = iter(loader)
        for item in running[key]:
            return item
        del running[key]
    raise ValueError(f"{who}: there is nothing in {loader!r}")


class Source:
    """Micro-batches that are there: inputs, targets, and how many samples each has.

    If it is ``lazy``, one comes to light only when it is pulled. All else of a micro-batch is to be
    asked for after that.

    Attributes:
        m: how many.
        total: the number of samples in all of them, where it is known.
        sizes: in each of them; 0 before one is pulled.
        dimensions: the sizes of all other dimensions of the first one.
        lock: the lock of those that are lazy; to be taken before the random generators.
    """

    lazy = False
    lock: threading.Lock

    def __init__(self, inputs: list[Any], targets: list[Any], sizes: list[int]) -> None:
        self.m, self.sizes, self.dimensions = len(inputs), sizes, set[int]()
        self.total = None if self.lazy else sum(sizes)
        self._inputs, self._targets = list(inputs), dict(enumerate(targets))

    def pull(self, i: int) -> Any:
        return self._note_input(i, self._inputs[i])

    def _note_input(self, i: int, input: Any) -> Any:
        tensors = tensors_in(input)
        if i == 0:
            self.dimensions = {size for tensor in tensors for size in tensor.shape[1:]}
        self._inputs[i] = [tensor for tensor in tensors if tensor.requires_grad]
        return input

    def inputs(self, i: int) -> list[Tensor]:
        """The tensors in the input of a micro-batch that need a gradient."""
        return self._inputs[i] or []

    def target(self, i: int) -> Any:
        """The target of a micro-batch. Called once for each."""
        return self._targets.pop(i)

    def peek_target(self, i: int) -> Any:
        """What came with the input of a micro-batch: the target, as long as it is here."""
        return self._targets.get(i)

    @property
    def targets(self) -> list[Any] | None:
        """The targets of all micro-batches, before any was pulled; None where nobody knows them."""
        return None if self.lazy else list(self._targets.values())


class FromIterator(Source):
    """Takes ``m`` micro-batches from an iterator, each only when the first stage is ready for it.

    ``where`` each has its target.
    """

    lazy = True

    def __init__(self, iterator: Iterator[Any], m: int, where: Any, pack: _Pack) -> None:
        super().__init__([None] * m, [], [0] * m)
        self._iterator, self._target_key, self._pack = iterator, where, pack
        self.lock = threading.Lock()  # of the replicas of the first stage
        self._waiting: dict[int, Any] = {}  # what came to light, and was not pulled yet
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
                "No gradient of this call remains: .grad is what it was before. Give it a multiple "
                "of chunks micro-batches, or start again each time by syncpipe.RepeatingLoader"
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
        return _pair_of(item, self._target_key, f" for {what}")


#: Of the loaders that are asked for one mini-batch in each step.
_running: WeakKeyDictionary[Any, Iterator[Any]] = WeakKeyDictionary()


def source_of(
    input: Any, target: Any, data_iter: Any, chunks: int, device: torch.device, pack: _Pack
) -> Source:
    """Where micro-batches come from, by what ``train_batch`` is given; inputs are on ``device``.

    Raises:
        TypeError: ``data_iter`` is no iterator, or ``input`` is one.
        ValueError: there is a mini-batch beside it, or neither.
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
        raise ValueError("data_iter gives the inputs, so there can be none beside it: give either")
    if not (target is None or isinstance(target, str | int) or _is_function(target)):
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
    refuse_dataset(data_iter, "data_iter")
    if isinstance(data_iter, FunctionType | MethodType | partial):
        raise TypeError(
            f"data_iter is a {type(data_iter).__name__}, and not what it returns: call it, once "
            "for all steps, data_iter=f()"
        )
    if isinstance(data_iter, Tensor):
        raise TypeError(
            f"data_iter is a tensor ({described(data_iter)}), and it must give micro-batches: a "
            "mini-batch is given as the input"
        )
    if not isinstance(data_iter, Iterable) or not hasattr(data_iter, "__weakref__"):
        raise TypeError(
            f"data_iter must be an iterator, not {type(data_iter).__name__}: make "
            "one by iter(...), once for all steps, or every step would start with the same "
            "micro-batches; or give a DataLoader, which is asked for a mini-batch in each step"
        )
    try:
        item = _next_item(data_iter, _running, data_iter, "data_iter")
    except BaseException as error:
        annotate(error, "in data_iter, when asked for a mini-batch")
        raise
    input, target = _pair_of(item, target, "")
    there = map_tensors(lambda tensors: [moved(tensor, device) for tensor in tensors], input)
    return Source(*scatter_pair(pack(there), target, chunks))


def _is_function(target: Any) -> bool:
    return callable(target) and not isinstance(target, Tensor | nn.Module)


def _pair_of(item: Any, where: Any, at: str) -> tuple[Any, Any]:
    """Input and target, of what ``data_iter`` gave: a pair, a longer tuple, or a dict.

    ``where`` is the key, the index, or a function of the item, of the target; None for the last of
    a tuple, and for a dict without one. ``at`` says in words for which micro-batch.
    """
    if callable(where) or isinstance(item, Mapping):
        if isinstance(where, str | int) and where not in item:
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
    if _is_function(target):
        return input, target(input)
    if not isinstance(target, str) or isinstance(input, Tensor):
        return input, target
    if not isinstance(input, Mapping):
        raise TypeError(
            f"target={target!r} is a key, and the input is a {type(input).__name__}, which has "
            "none: give the target itself, or a function of the input that returns it"
        )
    if target not in input:
        keys = ", ".join(map(repr, input))
        raise ValueError(f"target={target!r}, but the input is a dict with {keys}")
    rest: Any = copy(input) if isinstance(input, MutableMapping) else dict(input)
    target = rest.pop(target)
    return rest, target
