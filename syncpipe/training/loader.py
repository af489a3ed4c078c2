"""Micro-batches from an iterator."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

__all__ = ["RepeatingLoader", "next_of"]

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


_running: WeakKeyDictionary[Any, Iterator[Any]] = WeakKeyDictionary()


def next_of(loader: Iterable[_T]) -> _T:
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
