"""Micro-batches: scatters mini-batches, and gathers outputs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from syncpipe.data.batch_classes import batch_kind, cut_batch, join_batches, samples_of, shares
from syncpipe.data.trees import described, equal, flatten, leaf_names, unflatten
from syncpipe.data.uncut import cannot_scatter, refuse_uncut, without_no_chunk


def _pieces(leaf: Any, chunks: int, m: int) -> Sequence[Any]:
    if isinstance(leaf, Tensor):
        return leaf.chunk(chunks)
    if batch_kind(leaf):
        return cut_batch(leaf, shares(leaf, chunks))
    return (without_no_chunk(leaf),) * m


def scatter(input: Any, chunks: int) -> list[Any]:
    """Cuts a mini-batch into at most ``chunks`` micro-batches of the same structure.

    ``torch.chunk`` cuts tensors along dimension 0. Objects of classes of :func:`register_batch` are
    cut into the same numbers of samples. Other values, and tensors in :class:`NoChunk`, go whole to
    every micro-batch.

    Raises:
        TypeError: an object holds tensors that would not be cut, or the input has no tensor to cut.
        ValueError: tensors cannot be cut into the same shares.
    """
    return scatter_sized(input, chunks)[0]


def scatter_sized(input: Any, chunks: int) -> tuple[list[Any], list[int]]:
    return _scattered(input, chunks, {"input": input})


def scatter_pair(input: Any, target: Any, chunks: int) -> tuple[list[Any], list[Any], list[int]]:
    """As :func:`scatter`: inputs and targets of the micro-batches, and their numbers of samples.

    A target without a tensor to cut goes whole to every micro-batch.
    """
    pairs, sizes = _scattered((input, target), chunks, {"input": input, "target": target})
    inputs, targets = zip(*pairs, strict=True)
    return list(inputs), list(targets), sizes


def unwrapped(micro_batch: Any) -> tuple[Any, int]:
    """A micro-batch without ``NoChunk``, as layers receive it, and its number of samples."""
    leaves, structure = flatten(micro_batch, batches=True)
    sizes = [size for leaf in leaves if (size := samples_of(leaf)) is not None]
    return unflatten(map(without_no_chunk, leaves), structure), sizes[0] if sizes else 1


def _scattered(tree: Any, chunks: int, named: dict[str, Any]) -> tuple[list[Any], list[int]]:
    leaves, structure = flatten(tree, batches=True)
    if chunks > 1:
        refuse_uncut(named, chunks)
    cut = [leaf for leaf in leaves if isinstance(leaf, Tensor) or batch_kind(leaf)]
    rows = [shares(leaf, chunks) for leaf in cut] or [[1]]
    sizes = rows[0]
    for row in rows:  # each must have the same proportions
        if not row or [n * sum(sizes) for n in row] != [n * sum(row) for n in sizes]:
            raise ValueError(cannot_scatter(named, chunks))
    if (m := len(sizes)) == 1:
        return [unflatten(map(without_no_chunk, leaves), structure)], sizes
    columns = [_pieces(leaf, chunks, m) for leaf in leaves]
    return [unflatten(row, structure) for row in zip(*columns, strict=True)], sizes


def gather(outputs: list[Any], common: Collection[int] = ()) -> Any:
    """Concatenates the outputs of the micro-batches: the inverse of :func:`scatter`.

    Tensors are concatenated along dimension 0, and objects of registered classes joined. Other
    values, and tensors whose index among the leaves is in ``common``, must be equal in every
    micro-batch. A single output is returned unchanged.

    Raises:
        ValueError: outputs differ in structure or in such a value, or cannot be concatenated.
    """
    first = outputs[0]
    if len(outputs) == 1:
        return first
    columns, structures = zip(*[flatten(each, batches=True) for each in outputs], strict=True)
    for i, structure in enumerate(structures):
        if structure != structures[0]:
            raise ValueError(
                "the outputs of the micro-batches differ in structure: micro-batch 0 gave "
                f"{structures[0] or 'a tensor'}, micro-batch {i} gave {structure or 'a tensor'}. "
                "Let the last layer return the same structure for every micro-batch."
            )
    rows = zip(*columns, strict=True)
    values = [
        _common(row, first, k) if k in common else _gathered(row, first, k)
        for k, row in enumerate(rows)
    ]
    return unflatten(values, structures[0])


def _gathered(row: Sequence[Any], output: Any, k: int) -> Any:
    if batch_kind(row[0]):
        return join_batches(list(row))
    if not any(isinstance(value, Tensor) for value in row):
        return _common(row, output, k)
    strangers = [type(value).__name__ for value in row if not isinstance(value, Tensor)]
    if strangers:
        wrong = (
            f"is a tensor in some micro-batches and {strangers[0]} in others: let the last layer "
            "return the same kind of value for every micro-batch"
        )
    elif any(tensor.dim() == 0 for tensor in row):
        wrong = (
            f"is a tensor without dimensions in every micro-batch, and {len(row)} of them cannot "
            "be concatenated. Return one value a sample from the last layer (for a loss: "
            "reduction='none'), or compute it from the pipe's output, outside of the pipe."
        )
    else:
        try:
            return torch.cat(list(row))
        except (RuntimeError, TypeError) as error:
            shapes = ", ".join(map(described, row))
            wrong = (
                f"cannot be concatenated along dimension 0, the micro-batches gave {shapes}: "
                f"{error}. In the last layer, pad the other dimensions to one size, and move "
                "samples to dimension 0."
            )
    raise ValueError(f"{leaf_names('output', output, batches=True)[k]} {wrong}")


def _common(row: Sequence[Any], output: Any, k: int) -> Any:
    first = row[0]
    for i, value in enumerate(row):
        if not (_same_tensor if isinstance(value, Tensor) else equal)(value, first):
            raise ValueError(
                f"{leaf_names('output', output, batches=True)[k]} has no entry for each sample and "
                f"differs between micro-batches ({first!r} in micro-batch 0, {value!r} in "
                f"micro-batch {i}), so there is no one value to return: return it as a tensor with "
                "one entry a sample"
            )
    return first


def _same_tensor(a: Tensor, b: Any) -> bool:
    try:
        return a is b or a.is_meta or torch.equal(a, b)
    except RuntimeError:  # fake tensors and those of torch.func have no values to compare
        return type(a) is type(b) and a.shape == b.shape
