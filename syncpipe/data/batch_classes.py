"""Classes of batches that are cut by functions of their own."""

from __future__ import annotations

import array
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

#: Types that are leaves of trees.
LEAVES = (type(None), bool, int, float, str, Tensor, bytearray, array.array)


class _Kind(NamedTuple):
    size: Callable[[Any], int]
    cut: Callable[[Any, list[int]], Sequence[Any]]
    join: Callable[[list[Any]], Any]


_kinds: dict[type, _Kind] = {}


def register_batch(
    kind: type,
    size: Callable[[Any], int],
    cut: Callable[[Any, list[int]], Sequence[Any]],
    join: Callable[[list[Any]], Any],
) -> None:
    """Register how to cut objects of a class into micro-batches, and how to join them.

    For batches whose tensors do not have the samples in dimension 0: graphs, ragged lists. Inputs,
    targets and outputs of a pipe, and samples of :func:`sequential`, may then contain such objects.
    With PyTorch Geometric::

        def cut(batch, sizes):
            graphs = iter(batch.to_data_list())
            return [Batch.from_data_list([*islice(graphs, n)]) for n in sizes]

        def join(batches):
            return Batch.from_data_list([g for batch in batches for g in batch.to_data_list()])

        syncpipe.register_batch(Batch, lambda batch: batch.num_graphs, cut, join)

    The layers receive such an object. The pipe moves its tensors to the devices of stages: those of
    its entries if it has ``keys()`` and is indexed by them, otherwise those of its attributes. A
    batch of ``n`` samples is cut as a tensor of ``n`` rows: micro-batches have the sizes that
    ``torch.chunk`` gives, and losses that are means are weighted by these sizes.

    Args:
        kind: the class, with its subclasses.
        size: ``size(batch)`` returns the number of samples of a batch.
        cut: ``cut(batch, sizes)`` returns a batch for each number of samples in ``sizes``, which
            add up to the size of the batch.
        join: ``join(batches)`` returns one batch with the samples of all, in order.

    Raises:
        TypeError: ``kind`` is not a class, or is a container of Python or a tensor, or another
            argument is not a function.
    """
    plain = (*LEAVES, object, list, tuple, dict, set)
    if not isinstance(kind, type) or kind in plain or issubclass(kind, Tensor):
        raise TypeError(f"register_batch takes a class of batches of your own, not {kind!r}")
    for name, given in {"size": size, "cut": cut, "join": join}.items():
        if not callable(given):
            raise TypeError(f"{name} must be a function, not {type(given).__name__}")
    _kinds[kind] = _Kind(size, cut, join)


def batch_kind(thing: Any) -> _Kind | None:
    """The functions registered for the class of an object; None without any."""
    if not _kinds or isinstance(thing, Tensor):
        return None
    return next((_kinds[base] for base in type(thing).__mro__ if base in _kinds), None)


def shares(leaf: Any, chunks: int) -> list[int]:
    """The sizes of the micro-batches of a leaf; empty if it cannot be cut."""
    if isinstance(leaf, Tensor):
        return [len(piece) for piece in leaf.chunk(chunks)] if leaf.dim() else []
    return [len(piece) for piece in torch.empty(samples_of(leaf) or 0).chunk(chunks)]


def cut_batch(batch: Any, sizes: list[int]) -> Sequence[Any]:
    """Cuts a batch of a registered class into parts of these sizes."""
    kind: Any = batch_kind(batch)
    parts = list(kind.cut(batch, sizes)) if len(sizes) > 1 else [batch]
    found = [samples_of(part) for part in parts]
    if found != sizes:
        raise ValueError(
            f"cut= of register_batch({type(batch).__name__}, ...) must return batches of "
            f"{', '.join(map(str, sizes))} samples, and returned {', '.join(map(str, found))}"
        )
    return parts


def join_batches(batches: list[Any]) -> Any:
    kind: Any = batch_kind(batches[0])
    return kind.join(batches)


def repeated_batch(batch: Any, size: int) -> Any:
    """A batch of ``size`` samples, those of a batch of a registered class repeated."""
    own = samples_of(batch) or 1
    times, rest = divmod(size, own)
    part = cut_batch(batch, [rest, own - rest])[:1] if rest else []
    return join_batches([*[batch] * times, *part])


def samples_of(leaf: Any) -> int | None:
    """The number of samples of a tensor or registered batch; None for values that are not cut."""
    if isinstance(leaf, Tensor):
        return len(leaf) if leaf.dim() else None
    kind = batch_kind(leaf)
    return None if kind is None else int(kind.size(leaf))
