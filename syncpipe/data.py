"""Values on their way: trees of tensors, cut into micro-batches and put together again.

Trees are PyTorch's pytrees, and containers that those take for leaves: mappings (``UserDict``, and
so what Hugging Face's tokenizers return; subclasses of ``dict``), lists, tuples and dataclasses.
The same type comes out, a shallow copy with other values. Most trees are one tensor.
"""

from __future__ import annotations

import array
import copy
import dataclasses
import gc
from collections.abc import Callable, Iterable, Iterator, MutableMapping, MutableSequence
from dataclasses import dataclass, field
from itertools import islice
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

__all__ = [
    "NoChunk",
    "Structure",
    "attributes_of",
    "clones",
    "compact",
    "could_be_cut",
    "described",
    "distinct",
    "extent",
    "flatten",
    "gather",
    "hidden_tensor",
    "leaf_names",
    "map_tensors",
    "objects_in",
    "overlap",
    "place_of",
    "scatter",
    "scatter_pair",
    "storage_of",
    "tensors_in",
    "unflatten",
    "unwrapped",
]


# --- trees ---------------------------------------------------------------------------------------


class Structure(NamedTuple):
    """A tree without its leaves; equal for trees of the same types and keys.

    Attributes:
        spec: pytree's.
        inner: for each leaf of that what is in it; nothing where all are leaves indeed.
    """

    spec: pytree.TreeSpec
    inner: tuple[_Container | None, ...]


@dataclass(frozen=True)
class _Container:
    """A container that pytree takes for a leaf."""

    like: Any = field(compare=False)
    kind: type
    keys: list[Any]
    values: Structure | None

    def filled(self, values: list[Any]) -> Any:
        """One of the same type with other values."""
        try:
            if issubclass(self.kind, tuple):
                return self.kind(values)
            made = copy.copy(self.like)
            for key, value in zip(self.keys, values, strict=True):
                if issubclass(self.kind, MutableMapping | MutableSequence):
                    made[key] = value
                else:
                    object.__setattr__(made, key, value)  # also if the dataclass is frozen
        except Exception as error:
            raise TypeError(
                f"a {self.kind.__name__} cannot be made anew with other tensors: pass them "
                "in tuples or dicts, or register the class by "
                "torch.utils._pytree.register_pytree_node"
            ) from error
        return made


_PLAIN = frozenset({type(None), bool, int, float, str})


def _opened(leaf: Any) -> tuple[list[Any], list[Any]] | None:
    """Keys and values of a container that pytree takes for a leaf; None for a leaf indeed."""
    kind = type(leaf)
    if kind in _PLAIN or isinstance(leaf, Tensor | bytearray | array.array):
        return None
    if issubclass(kind, MutableMapping):
        keys = list(leaf.keys())
        return keys, [leaf[key] for key in keys]
    if dataclasses.is_dataclass(kind):
        keys = [f.name for f in dataclasses.fields(leaf) if hasattr(leaf, f.name)]
        return keys, [getattr(leaf, name) for name in keys]
    if issubclass(kind, tuple | MutableSequence):
        return list(range(len(leaf))), list(leaf)
    return None


def flatten(tree: Any) -> tuple[list[Any], Structure | None]:
    """Returns the leaves of a tree and its structure (None for a lone tensor)."""
    if isinstance(tree, Tensor):
        return [tree], None
    found, spec = pytree.tree_flatten(tree)
    contents = [_opened(leaf) for leaf in found]
    if not any(contents):
        return found, Structure(spec, ())
    leaves: list[Any] = []
    inner: list[_Container | None] = []
    for leaf, content in zip(found, contents, strict=True):
        if content is None:
            leaves.append(leaf)
            inner.append(None)
        else:
            keys, values = content
            below, structure = flatten(values)
            leaves += below
            inner.append(_Container(leaf, type(leaf), keys, structure))
    return leaves, Structure(spec, tuple(inner))


def unflatten(leaves: Iterable[Any], structure: Structure | None) -> Any:
    """The inverse of :func:`flatten`."""
    rest = iter(leaves)
    if structure is None:
        return next(rest)
    if not structure.inner:
        found = list(islice(rest, structure.spec.num_leaves))
    else:
        found = [
            next(rest) if part is None else part.filled(unflatten(rest, part.values))
            for part in structure.inner
        ]
    return pytree.tree_unflatten(found, structure.spec)


_NO_SKIPS = ()  # most stages get and give one tensor, and these


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors among the leaves of a tree, in order."""
    if isinstance(tree, Tensor):
        return [tree]
    if type(tree) is tuple and len(tree) == 2 and tree[1] is _NO_SKIPS and type(tree[0]) is Tensor:
        return [tree[0]]
    if tree is None:
        return []
    # Tuples and lists by hand: they are most of what travels, and pytree takes its time.
    if type(tree) is tuple or type(tree) is list:
        return [tensor for child in tree for tensor in tensors_in(child)]
    return [leaf for leaf in flatten(tree)[0] if isinstance(leaf, Tensor)]


def distinct(tree: Any) -> list[Tensor]:
    """The tensors of a tree, each once."""
    if isinstance(tree, Tensor):
        return [tree]
    return list({id(tensor): tensor for tensor in tensors_in(tree)}.values())


def objects_in(tree: Any) -> list[Any]:
    """The leaves of a tree that are objects, which a layer may change, or hide tensors in."""
    if isinstance(tree, Tensor) or tree is None:
        return []
    if type(tree) is tuple or type(tree) is list:
        return [found for child in tree for found in objects_in(child)]
    leaves, _ = flatten(tree)
    return [leaf for leaf in leaves if not isinstance(leaf, Tensor) and gc.is_tracked(leaf)]


def map_tensors(function: Callable[[list[Tensor]], list[Tensor]], tree: Any) -> Any:
    """Replaces the tensors of a tree by what ``function`` makes of the list of them all."""
    if isinstance(tree, Tensor):
        return function([tree])[0]
    if type(tree) is tuple and len(tree) == 2 and tree[1] is _NO_SKIPS and type(tree[0]) is Tensor:
        return function([tree[0]])[0], _NO_SKIPS
    tensors = tensors_in(tree)
    return _replaced(tree, iter(function(tensors))) if tensors else tree


def _replaced(tree: Any, tensors: Iterator[Tensor]) -> Any:
    if isinstance(tree, Tensor):
        return next(tensors)
    if type(tree) is tuple or type(tree) is list:
        return type(tree)([_replaced(child, tensors) for child in tree])
    if tree is None:
        return None
    leaves, structure = flatten(tree)
    return unflatten([next(tensors) if isinstance(t, Tensor) else t for t in leaves], structure)


def leaf_names(root: str, tree: Any) -> list[str]:
    """The way to each leaf, as one would write it in Python: ``input['x'][0]``."""
    try:
        found = pytree.tree_flatten_with_path(tree)[0]
    except ValueError:  # a node type that was registered without names
        return [f"leaf {k} of {root}" for k in range(len(flatten(tree)[0]))]
    names: list[str] = []
    for path, leaf in found:
        name, content = root + pytree.keystr(path), _opened(leaf)
        if content is None:
            names.append(name)
            continue
        dots = dataclasses.is_dataclass(leaf) and not isinstance(leaf, MutableMapping)
        for key, value in zip(*content, strict=True):
            names += leaf_names(f"{name}.{key}" if dots else f"{name}[{key!r}]", value)
    return names


def described(tensor: Tensor) -> str:
    """A tensor's dtype and shape in a few characters: ``float32[8, 3]``."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


# --- objects that are no trees -------------------------------------------------------------------


def attributes_of(thing: Any) -> dict[str, Any]:
    """The attributes of an object, also where it has no dictionary; no code of its class runs."""
    found = {}
    for cls in type(thing).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in [slots] if isinstance(slots, str) else slots:
            if hasattr(thing, name):
                found[name] = getattr(thing, name)
    try:
        own = object.__getattribute__(thing, "__dict__")
    except AttributeError:
        own = None
    return {**found, **own} if isinstance(own, dict) else found


def could_be_cut(tensor: Tensor) -> bool:
    """Whether a tensor may have one entry a sample; a parameter has not."""
    return tensor.dim() > 0 and not isinstance(tensor, nn.Parameter)


def hidden_tensor(
    thing: Any, is_meant: Callable[[Tensor], bool] = could_be_cut, depth: int = 3
) -> str | None:
    """Which attribute of an object holds a tensor that counts; None where none does.

    What does something rather than being data (models, functions, iterators, datasets, optimizers)
    is not looked into.

    Args:
        thing: a leaf, or a container, whose entries are no attributes.
        is_meant: which tensors count.
        depth: how many objects in objects are looked into.

    Returns:
        How one gets from the object to the tensor, in Python.
    """
    if not depth or not gc.is_tracked(thing) or isinstance(thing, _APPARATUS):
        return None  # a number, a string: nearly always it is so
    for base in type(thing).__mro__:
        if base.__module__.startswith(("torch.utils.data", "torch.optim")):
            return None
    _, entries = _opened(thing) or ((), ())
    known = {id(leaf) for entry in entries for leaf in flatten(entry)[0]}
    for name, value in attributes_of(thing).items():
        if not gc.is_tracked(value):
            continue
        leaves, _ = flatten(value)
        for k, leaf in enumerate(leaves):
            if id(leaf) in known:
                continue
            found: str | None = ""
            if not isinstance(leaf, Tensor):
                found = hidden_tensor(leaf, is_meant, depth - 1)
            elif not is_meant(leaf):
                continue
            if found is not None:
                return leaf_names(f".{name}", value)[k] + found
    return None


_APPARATUS: Any = (Callable, Iterator, ModuleType)


# --- micro-batches -------------------------------------------------------------------------------


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
        cut = tensors_in((input, target))
    if not cut:
        return inputs, targets, [1]
    rows = [[len(piece) for piece in leaf.chunk(chunks)] for leaf in cut]
    for other in rows[1:]:
        if [size * len(cut[0]) for size in other] != [size * sum(other) for size in rows[0]]:
            raise ValueError(_cannot_scatter(named, chunks))
    return inputs, targets, rows[0]


def unwrapped(micro_batch: Any) -> tuple[Any, int]:
    """A micro-batch as the layers get it, and the number of samples in it."""
    leaves, structure = flatten(micro_batch)
    sizes = [len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() > 0]
    return unflatten(map(_bare, leaves), structure), sizes[0] if sizes else 1


def _bare(leaf: Any) -> Any:
    return leaf.tensor if isinstance(leaf, NoChunk) else leaf


def _scattered(tree: Any, chunks: int, named: dict[str, Any]) -> list[Any]:
    leaves, structure = flatten(tree)
    if chunks > 1:
        _refuse_uncut(named, chunks)
    tensors = {k: leaf for k, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
    if any(leaf.dim() == 0 for leaf in tensors.values()):
        raise ValueError(_cannot_scatter(named, chunks))
    pieces = {k: leaf.chunk(chunks) for k, leaf in tensors.items()}
    counts = {len(cut) for cut in pieces.values()}
    if len(counts) > 1:
        raise ValueError(_cannot_scatter(named, chunks))
    m = counts.pop() if counts else 1
    if m == 1:
        return [unflatten(map(_bare, leaves), structure)]
    return [
        unflatten(
            [pieces[k][i] if k in pieces else _bare(leaf) for k, leaf in enumerate(leaves)],
            structure,
        )
        for i in range(m)
    ]


def _refuse_uncut(named: dict[str, Any], chunks: int) -> None:
    """Refuses what would go whole to every micro-batch though it should not.

    Raises:
        TypeError: an object holds tensors where they are not found; or there is no tensor to cut.
    """
    for name, tree in named.items():
        leaves, structure = flatten(tree)
        things = [
            (leaf_name, leaf)
            for leaf_name, leaf in zip(leaf_names(name, tree), leaves, strict=True)
            if not isinstance(leaf, (Tensor, NoChunk))
        ]
        for where, thing in [*things, *((name, container) for container in _opaque(structure))]:
            at = hidden_tensor(thing)
            if at is not None:
                raise TypeError(
                    f"{where} (or what is in it), of type {type(thing).__name__}, holds a tensor "
                    f"at {at} that is no entry of a tuple, dict or dataclass and would go whole to "
                    f"each of the micro-batches (chunks={chunks}): pass the tensors in one of "
                    "these, in syncpipe.NoChunk those that every micro-batch needs whole; or "
                    "register the class by torch.utils._pytree.register_pytree_node"
                )
    given = named["input"]
    if not tensors_in(given):
        shown = f"{given!r}" if isinstance(given, NoChunk | None) else type(given).__name__
        raise TypeError(
            f"the input ({shown}) holds no tensor to cut into "
            f"micro-batches (chunks={chunks}), so each of them would be the whole of it: give it "
            "a tensor with one entry a sample, in a tuple, a dict or a dataclass (not in NoChunk); "
            "or set chunks=1"
        )


def _opaque(structure: Structure | None) -> list[Any]:
    """The containers in a tree that pytree takes for leaves."""
    parts = [part for part in (structure.inner if structure else ()) if part is not None]
    return [found for part in parts for found in (part.like, *_opaque(part.values))]


def _cannot_scatter(named: dict[str, Any], chunks: int) -> str:
    lines = []
    for root, tree in named.items():
        for where, leaf in zip(leaf_names(root, tree), flatten(tree)[0], strict=True):
            if not isinstance(leaf, Tensor):
                continue
            name = f"  {where}: {described(leaf)}"
            if leaf.dim() == 0:
                lines.append(f"{name} has no dimension to cut")
                continue
            sizes = [len(piece) for piece in leaf.chunk(chunks)]
            few = ", ".join(map(str, sizes[:4]))
            few = few if len(sizes) <= 5 else f"{few}, ..., {sizes[-1]}"
            lines.append(f"{name} gives {len(sizes)} micro-batches of {few}")
    return (
        f"the {' and the '.join(named)} cannot be cut into micro-batches along "
        f"dimension 0 (chunks={chunks}):\n"
        + "\n".join(lines)
        + "\nGive all tensors the same batch size, and wrap those that every micro-batch needs "
        "whole in syncpipe.NoChunk(tensor)."
    )


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
        return _concatenated(outputs, first, 0)
    columns, structures = zip(*map(flatten, outputs), strict=True)
    for i, structure in enumerate(structures):
        if structure is None or structure != structures[0]:
            raise ValueError(
                "the outputs of the micro-batches differ in structure: micro-batch 0 gave "
                f"{_shown(structures[0])}, micro-batch {i} gave {_shown(structure)}. Let the last "
                "layer return the same structure for every micro-batch."
            )
    gathered = [
        _concatenated(list(row), first, k)
        if any(isinstance(value, Tensor) for value in row)
        else _common(list(row), first, k)
        for k, row in enumerate(zip(*columns, strict=True))
    ]
    return unflatten(gathered, structures[0])


def _shown(structure: Structure | None) -> str:
    if structure is None:
        return "a tensor"
    inner = [part.kind.__name__ for part in structure.inner if part is not None]
    return f"{structure.spec}" + (f" with {', '.join(inner)}" if inner else "")


def _concatenated(row: list[Any], output: Any, k: int) -> Tensor:
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
        try:
            same = value is first or (type(value) is type(first) and bool(value == first))
        except Exception:
            same = False
        if not same:
            raise ValueError(
                f"{leaf_names('output', output)[k]} is not a tensor and differs between "
                f"micro-batches ({first!r} in micro-batch 0, {value!r} in micro-batch {i}), so "
                "there is no one value to return: return it as a tensor with one entry a sample"
            )
    return first


# --- memory --------------------------------------------------------------------------------------


def storage_of(tensor: Tensor) -> int:
    """A number that tells the memory of tensors apart."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # sparse tensors and the like have none
        return id(tensor)


def extent(tensor: Tensor) -> tuple[int, int]:
    """The first byte of a tensor in its storage, and the one after the last."""
    start = int(tensor.storage_offset()) * tensor.itemsize
    if not tensor.numel():
        return start, start
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * step for size, step in steps)
    return start, start + (1 + int(last)) * tensor.itemsize


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors may share memory: one storage, where they reach over common bytes."""
    if storage_of(a) != storage_of(b):
        return False
    if a.layout is not torch.strided:
        return True
    (a_start, a_end), (b_start, b_end) = extent(a), extent(b)
    return max(a_start, b_start) < min(a_end, b_end)


def place_of(tensor: Tensor) -> Any:
    """What two tensors have in common that are the same part of the same memory."""
    if tensor.layout is not torch.strided:
        return id(tensor)
    region = (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
    return (storage_of(tensor), *region, tensor.requires_grad)


def compact(tensor: Tensor) -> Tensor:
    """A tensor to keep: a copy if it is a part of a larger memory, which would stay as well."""
    if type(tensor) is not Tensor or not torch._C._has_storage(tensor):
        return tensor
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor


def clones(tensors: list[Tensor]) -> list[Tensor]:
    """Copies of tensors; those that are one (``(x, x)``) stay one.

    Kernels go by strides and by the alignment of memory, and the last bit by the kernel. So the
    copies have both from the originals.
    """
    if len(tensors) == 1:
        return [_clone(tensors[0])]
    made: dict[Any, Tensor] = {}
    return [
        made[key] if (key := place_of(tensor)) in made else made.setdefault(key, _clone(tensor))
        for tensor in tensors
    ]


_ALIGNED = 64


def _clone(tensor: Tensor) -> Tensor:
    copied = tensor.clone()
    if (
        type(tensor) not in (Tensor, nn.Parameter)
        or tensor.layout is not torch.strided
        or tensor.is_quantized
        or tensor.is_conj()
        or tensor.is_neg()
        or storage_of(tensor) == id(tensor)
        or (
            copied.stride() == tensor.stride()
            and (copied.data_ptr() - tensor.data_ptr()) % _ALIGNED == 0
        )
    ):
        return copied
    exact: Tensor = _Exact.apply(tensor)  # type: ignore[no-untyped-call]
    return exact


class _Exact(torch.autograd.Function):
    """A copy in memory of the same layout, also of tensors that are expanded or have gaps."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        start, stop = extent(tensor)
        size = (stop - start) // tensor.itemsize
        memory = tensor.new_empty(size + _ALIGNED // tensor.itemsize)
        begin = (tensor.data_ptr() - memory.data_ptr()) % _ALIGNED // tensor.itemsize
        memory[begin : begin + size].copy_(tensor.as_strided((size,), (1,)))
        return memory.as_strided(tensor.shape, tensor.stride(), begin).detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return tangent.clone()
