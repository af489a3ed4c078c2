"""What cannot be cut into micro-batches, and says so."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence, Set
from types import ModuleType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, Sampler

from syncpipe.data.batch_classes import batch_kind, shares
from syncpipe.data.trees import (
    Structure,
    attributes_of,
    by_name,
    described,
    flatten,
    leaf_names,
    tensors_in,
)


class NoChunk:
    """Marks a tensor in the input of a pipe that goes whole to every micro-batch.

    Example::

        pipe({"tokens": tokens, "mask": NoChunk(mask)})   # mask: [length, length]

    The layers receive the tensor itself.

    Raises:
        TypeError: ``tensor`` is not a tensor.
    """

    def __init__(self, tensor: Tensor) -> None:
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"NoChunk takes a tensor, not {type(tensor).__name__}: values that are not tensors "
                "are never cut. Wrap the tensors of a tuple or dict one by one"
            )
        self.tensor = tensor

    def __repr__(self) -> str:
        return f"NoChunk({described(self.tensor)})"


def without_no_chunk(leaf: Any) -> Any:
    return leaf.tensor if isinstance(leaf, NoChunk) else leaf


#: Types of objects that are not data.
_APPARATUS: Any = (Callable, Iterator, ModuleType, Dataset, DataLoader, Sampler, Optimizer)


def hidden_tensor(
    thing: Any,
    is_meant: Callable[[Tensor], bool] = lambda t: t.dim() > 0 and not isinstance(t, nn.Parameter),
    depth: int = 3,
) -> str | None:
    """The path, as Python attributes, of a tensor inside an object; None without one.

    Args:
        thing: a leaf, or a container, whose entries are not searched.
        is_meant: selects tensors; by default those that may have one entry a sample.
        depth: how many levels of objects to search.
    """
    if not depth or not gc.is_tracked(thing) or isinstance(thing, _APPARATUS):
        return None  # the usual case: a number or a string
    entries = set(map(id, flatten(thing)[0]))
    for name, value in attributes_of(thing).items():
        for k, leaf in enumerate(flatten(value)[0]):
            if id(leaf) in entries:
                continue
            found: str | None = ""
            if not isinstance(leaf, Tensor):
                found = hidden_tensor(leaf, is_meant, depth - 1)
            elif not is_meant(leaf):
                continue
            if found is not None:
                return leaf_names(f".{name}", value)[k] + found
    return None


def refuse_uncut(named: dict[str, Any], chunks: int) -> None:
    for name, tree in named.items():
        things = [*by_name(name, tree, batches=True).items()]
        containers = _shallow_copied(flatten(tree, batches=True)[1])
        for where, thing in [*things, *((name, container) for container in containers)]:
            if isinstance(thing, Tensor | NoChunk) or batch_kind(thing):
                continue
            if (at := hidden_tensor(thing)) is None:
                continue
            raise TypeError(
                f"{where} (or an entry of it), of type {type(thing).__name__}, holds a tensor "
                f"at {at} that is no entry of a tuple, dict or dataclass and would go whole to "
                f"each of the micro-batches (chunks={chunks}): {to_cut(thing)}"
            )
    given = named["input"]
    if not tensors_in(given):
        shown = f"{given!r}" if isinstance(given, NoChunk | None) else type(given).__name__
        raise TypeError(
            f"the input ({shown}) holds no tensor to cut into micro-batches (chunks={chunks}), so "
            "each of them would get all of it: add a tensor with one entry a sample, in a tuple, a "
            "dict or a dataclass (not in NoChunk); or set chunks=1"
        )


def to_cut(thing: Any) -> str:
    """The way to get an object with tensors cut, for error messages."""
    if type(thing).__name__ == "BlockMask":
        return (
            "make it in the layer that uses it, with create_block_mask from tensors that are cut. "
            "Its mask function takes the index of a sample in the batch, which differs in a "
            "micro-batch"
        )
    return (
        "pass the tensors in one of these, in syncpipe.NoChunk those that every micro-batch needs "
        "whole; or register the class, with torch.utils._pytree.register_pytree_node if dimension "
        "0 of its tensors has the samples, otherwise with syncpipe.register_batch"
    )


def _shallow_copied(structure: Structure | None) -> Iterator[Any]:
    """The containers in a tree that may have attributes besides their entries."""
    if structure is not None:
        if structure.node is None:
            yield structure.like
        for child in structure.children:
            yield from _shallow_copied(child)


def cannot_scatter(named: dict[str, Any], chunks: int) -> str:
    lines = []
    for root, tree in named.items():
        for where, leaf in by_name(root, tree, batches=True).items():
            if not (isinstance(leaf, Tensor) or batch_kind(leaf)):
                continue
            found = "has no dimension to cut"
            if sizes := list(map(str, shares(leaf, chunks))):
                few = sizes if len(sizes) <= 5 else [*sizes[:4], "...", sizes[-1]]
                found = f"gives {len(sizes)} micro-batches of {', '.join(few)}"
            lines.append(f"  {where}: {described(leaf)} {found}\n")
    return (
        f"the {' and the '.join(named)} cannot be cut into micro-batches along dimension 0 "
        f"(chunks={chunks}):\n{''.join(lines)}Give all tensors the same batch size, and wrap "
        "those that every micro-batch needs whole in syncpipe.NoChunk(tensor)."
    )


def samples_elsewhere(
    outputs: list[Any], sizes: Sequence[int], dimensions: Set[int] | None = None
) -> str:
    """Describes an output whose samples are in another dimension than 0; "" without one.

    Rows that are a multiple of the samples may be samples times another size (flattened tokens of
    all sequences). With ``dimensions``, the sizes of the input, such an output counts only if its
    rows are one of these sizes, or if it has three dimensions and the multiple is none of them.
    """
    leaves = flatten(outputs[0], batches=True)[0]
    if len(outputs) < 2 or all(
        isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == sizes[0] for leaf in leaves
    ):
        return ""  # the usual case
    columns = zip(*[flatten(each, batches=True)[0] for each in outputs], strict=False)
    for name, row in zip(leaf_names("output", outputs[0], batches=True), columns, strict=False):
        shapes = [tensor.shape for tensor in row if isinstance(tensor, Tensor) and tensor.dim()]
        if len(set(map(len, shapes))) != 1 or len(shapes) < len(sizes):
            continue
        rows, *others = map(list, zip(*shapes, strict=True))
        if rows == list(sizes) or list(sizes) not in others:
            continue
        n, samples, d = rows[0], sizes[0], others.index(list(sizes)) + 1
        if dimensions is not None and [r * samples for r in rows] == [n * s for s in sizes]:
            times = n // samples if n % samples == 0 else 0
            is_time = n in dimensions and (samples > 1 or len(others) > 1)
            if times and not is_time and (len(others) < 2 or times in dimensions):
                continue
        return f"{name} is {described(row[0])} for {samples} samples, so dimension {d} has them"
    return ""
