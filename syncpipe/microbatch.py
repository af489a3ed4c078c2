"""Scatters a mini-batch into micro-batches and gathers the micro-batches' outputs again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from syncpipe.objects import hidden_tensor
from syncpipe.tree import Structure, containers_in, described, flatten, leaf_names, unflatten

__all__ = ["NoChunk", "gather", "scatter", "scatter_pair", "unwrapped"]


class NoChunk:
    """Marks a tensor in the input of a pipe that goes whole to every micro-batch.

    Example::

        pipe({"tokens": tokens, "mask": NoChunk(mask)})   # mask: [length, length]

    The layers receive the bare tensor.

    Args:
        tensor: a tensor of any shape, also without dimensions.

    Raises:
        TypeError: ``tensor`` is not a tensor (other values are never cut, so they need no mark).
    """

    def __init__(self, tensor: Tensor) -> None:
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"NoChunk takes a tensor, not {type(tensor).__name__}: values that are not "
                "tensors go whole to every micro-batch anyway, and the tensors inside a tuple or "
                "dict are wrapped one by one"
            )
        self.tensor = tensor

    def __repr__(self) -> str:
        return f"NoChunk({described(self.tensor)})"


def scatter(input: Any, chunks: int) -> list[Any]:
    """Cuts a mini-batch into at most ``chunks`` micro-batches.

    Every tensor is cut along dimension 0 as by ``torch.chunk``; other values, and tensors in
    :class:`NoChunk`, go whole to every micro-batch.

    Args:
        input: a tensor, or any pytree of tensors and other values.
        chunks: how many micro-batches to make, at most.

    Returns:
        The micro-batches, each of the structure of ``input``.

    Raises:
        TypeError: ``chunks`` is not 1, and there is nothing to cut; or an object holds tensors that
            are not found.
        ValueError: a tensor has no dimension to cut, or the tensors give different numbers of
            pieces.
    """
    if isinstance(input, Tensor) and input.dim() > 0:
        cut = input.chunk(chunks)
        return list(cut) if len(cut) > 1 else [input]

    return _scattered(input, chunks, {"input": input})


def scatter_pair(input: Any, target: Any, chunks: int) -> tuple[list[Any], list[Any], list[int]]:
    """Cuts a mini-batch and its targets into as many micro-batches.

    Args:
        input: as for :func:`scatter`.
        target: the same; one without any tensor to cut goes whole to every micro-batch.
        chunks: how many micro-batches to make, at most.

    Returns:
        The inputs and the targets of the micro-batches, and the number of samples in each.

    Raises:
        ValueError: as :func:`scatter`, or a micro-batch would get another part of one tensor than
            of another one.
    """
    named = {"input": input, "target": target}
    if isinstance(input, Tensor) and isinstance(target, Tensor) and input.dim() and target.dim():
        inputs, targets = list(input.chunk(chunks)), list(target.chunk(chunks))  # mostly it is so
        cut = [input, target]
    else:
        pairs = _scattered((input, target), chunks, named)
        inputs, targets = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        cut = [leaf for leaf in flatten((input, target))[0] if isinstance(leaf, Tensor)]
    if not cut:
        return inputs, targets, [1]
    rows = [[len(piece) for piece in leaf.chunk(chunks)] for leaf in cut]
    for other in rows[1:]:
        if [size * len(cut[0]) for size in other] != [size * sum(other) for size in rows[0]]:
            raise ValueError(_cannot_scatter(named, chunks))
    return inputs, targets, rows[0]


def unwrapped(micro_batch: Any) -> tuple[Any, int]:
    """A micro-batch as the layers get it, and the number of samples in it."""
    leaves, spec = flatten(micro_batch)
    sizes = [len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() > 0]
    whole = [leaf.tensor if isinstance(leaf, NoChunk) else leaf for leaf in leaves]
    return unflatten(whole, spec), sizes[0] if sizes else 1


def _scattered(tree: Any, chunks: int, named: dict[str, Any]) -> list[Any]:
    leaves, spec = flatten(tree)
    if chunks > 1:
        _refuse_uncut(named, chunks)
    pieces = {
        k: leaf.chunk(chunks)
        for k, leaf in enumerate(leaves)
        if isinstance(leaf, Tensor) and leaf.dim() > 0
    }
    counts = {len(cut) for cut in pieces.values()}
    scalars = any(isinstance(leaf, Tensor) and leaf.dim() == 0 for leaf in leaves)
    if scalars or len(counts) > 1:
        raise ValueError(_cannot_scatter(named, chunks))

    m = counts.pop() if counts else 1
    whole = [leaf.tensor if isinstance(leaf, NoChunk) else leaf for leaf in leaves]
    if m == 1:
        return [unflatten(whole, spec)]
    return [
        unflatten([pieces[k][i] if k in pieces else leaf for k, leaf in enumerate(whole)], spec)
        for i in range(m)
    ]


def _refuse_uncut(named: dict[str, Any], chunks: int) -> None:
    """Refuses what would go whole to every micro-batch though it should not.

    Raises:
        TypeError: an object holds tensors where they are not found; or there is no tensor to cut.
    """
    for name, tree in named.items():
        leaves, structure = flatten(tree)
        for k, leaf in enumerate(leaves):
            at = None if isinstance(leaf, (Tensor, NoChunk)) else hidden_tensor(leaf)
            if at is not None:
                raise TypeError(_hidden(leaf_names(name, tree)[k], leaf, at, chunks))
        for container in containers_in(structure):
            at = hidden_tensor(container.like, entries=container.values)
            if at is not None:
                raise TypeError(_hidden(name, container.like, at, chunks))
    if not any(isinstance(leaf, Tensor) for leaf in flatten(named["input"])[0]):
        raise TypeError(
            f"the input ({_type_in_words(named['input'])}) holds no tensor to cut into "
            f"micro-batches (chunks={chunks}), so each of them would be the whole of it: give it "
            "a tensor with one entry a sample, in a tuple, a dict or a dataclass (not in NoChunk); "
            "or set chunks=1"
        )


def _hidden(where: str, thing: Any, at: str, chunks: int) -> str:
    name = type(thing).__name__
    return (
        f"{where} (or what is in it), of type {name}, holds a tensor at {at} that is no entry of a "
        f"tuple, dict or dataclass and would go whole to each of the micro-batches (chunks={chunks}"
        "): pass the tensors in one of these, in syncpipe.NoChunk those that every micro-batch "
        "needs whole; or register the class by torch.utils._pytree.register_pytree_node"
    )


def _type_in_words(value: Any) -> str:
    return f"{value!r}" if isinstance(value, NoChunk) or value is None else type(value).__name__


def _cannot_scatter(named: dict[str, Any], chunks: int) -> str:
    lines = []
    leaves = [
        pair
        for name, tree in named.items()
        for pair in zip(leaf_names(name, tree), flatten(tree)[0], strict=True)
    ]
    for where, leaf in leaves:
        if not isinstance(leaf, Tensor):
            continue
        name = f"  {where}: {described(leaf)}"
        if leaf.dim() == 0:
            lines.append(f"{name} has no dimension to cut")
        else:
            sizes = [len(piece) for piece in leaf.chunk(chunks)]
            lines.append(f"{name} gives {len(sizes)} micro-batches of {_few(sizes)}")
    return (
        f"the {' and the '.join(named)} cannot be cut into micro-batches along "
        f"dimension 0 (chunks={chunks}):\n"
        + "\n".join(lines)
        + "\nGive all tensors the same batch size, and wrap those that every micro-batch needs "
        "whole in syncpipe.NoChunk(tensor)."
    )


def _few(sizes: list[int]) -> str:
    head = ", ".join(map(str, sizes[:4]))
    return head if len(sizes) <= 5 else f"{head}, ..., {sizes[-1]}"


def gather(outputs: list[Any]) -> Any:
    """Puts the outputs of the micro-batches together: the inverse of :func:`scatter`.

    Args:
        outputs: one output a micro-batch, all of one structure.

    Returns:
        One output of the same structure. Tensors are concatenated along dimension 0; other values
        must be equal in every micro-batch. The output of a single micro-batch is returned as is.

    Raises:
        ValueError: the outputs differ in structure, in a value that is not a tensor, or hold
            tensors that cannot be concatenated.
    """
    first = outputs[0]
    if len(outputs) == 1:
        return first
    if all(isinstance(output, Tensor) for output in outputs):
        return _concatenate(outputs, first, 0)

    columns, structures = zip(*map(flatten, outputs), strict=True)
    for i, structure in enumerate(structures):
        if structure is None or structures[0] is None or not structure.like(structures[0]):
            raise ValueError(
                "the outputs of the micro-batches differ in structure: micro-batch 0 gave "
                f"{_shown(structures[0])}, micro-batch {i} gave {_shown(structure)}. Let the last "
                "layer return the same structure for every micro-batch."
            )
    gathered = [
        _concatenate(list(row), first, k)
        if any(isinstance(value, Tensor) for value in row)
        else _common(list(row), first, k)
        for k, row in enumerate(zip(*columns, strict=True))
    ]
    return unflatten(gathered, structures[0])


def _shown(structure: Structure | None) -> str:
    if structure is None:
        return "a tensor"
    inner = [type(part[0].like).__name__ for part in structure.inner if part is not None]
    return f"{structure.spec}" + (f" with {', '.join(inner)}" if inner else "")


def _concatenate(row: list[Any], output: Any, k: int) -> Tensor:
    strangers = [type(value).__name__ for value in row if not isinstance(value, Tensor)]
    if strangers:
        raise ValueError(
            f"{leaf_names('output', output)[k]} is a tensor in some micro-batches and "
            f"{strangers[0]} in others: let the last layer return the same kind of value for every "
            "micro-batch"
        )
    if any(tensor.dim() == 0 for tensor in row):
        raise ValueError(
            f"{leaf_names('output', output)[k]} is a tensor without dimensions in every "
            f"micro-batch, and {len(row)} of them cannot be concatenated. Return one value a "
            "sample from the last layer (for a loss: reduction='none'), or compute it from the "
            "pipe's output, outside of the pipe."
        )
    try:
        return torch.cat(row)
    except (RuntimeError, TypeError) as error:
        shapes = ", ".join(described(tensor) for tensor in row)
        raise ValueError(
            f"{leaf_names('output', output)[k]} cannot be concatenated along dimension 0, the "
            f"micro-batches gave {shapes}: {error}. Bring the other dimensions to one size (pad "
            "them) in the last layer."
        ) from error


def _common(row: list[Any], output: Any, k: int) -> Any:
    first = row[0]
    for i, value in enumerate(row):
        if value is first:
            continue
        try:
            same = type(value) is type(first) and bool(value == first)
        except Exception:
            same = False
        if not same:
            raise ValueError(
                f"{leaf_names('output', output)[k]} is not a tensor and differs between "
                f"micro-batches ({first!r} in micro-batch 0, {value!r} in micro-batch {i}), so "
                "there is no one value to return: return it as a tensor with one entry a sample"
            )
    return first
