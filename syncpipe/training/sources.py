"""Sources of micro-batches: a mini-batch that is cut, or an iterator."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from copy import copy
from operator import attrgetter
from typing import Any

from torch import Tensor, nn

from syncpipe.data.batches import unwrapped
from syncpipe.data.trees import tensors_in
from syncpipe.runtime.errors import annotate

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
