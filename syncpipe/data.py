"""Values on their way: trees of tensors, cut into micro-batches and put together again.

Trees are PyTorch's pytrees, and containers that those take for leaves: mappings (``UserDict``, and
so what Hugging Face's tokenizers return; subclasses of ``dict``), lists, tuples and dataclasses.
The same type comes out, a shallow copy with other values. Most trees are one tensor.
"""

from __future__ import annotations

import array
import copy
import copyreg
import dataclasses
import gc
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    MutableMapping,
    MutableSequence,
    Sequence,
    Set,
)
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset, Sampler

# --- trees ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Structure:
    """A container without its leaves; equal for containers of the same types and keys."""

    kind: type
    keys: Any  #: of its entries, or what pytree remembers of it
    children: tuple[Structure | None, ...]  #: None for a leaf
    node: pytree.NodeDef | None = field(compare=False)  #: None where pytree takes it for a leaf
    like: Any = field(compare=False)  #: the container itself, then

    def __str__(self) -> str:
        inner = ", ".join("*" if child is None else str(child) for child in self.children)
        return f"{self.kind.__name__}({inner}; {self.keys})" if self.keys else f"({inner})"

    def filled(self, leaves: Iterator[Any]) -> Any:
        """One of the same type with the leaves that come next."""
        values = [next(leaves) if s is None else s.filled(leaves) for s in self.children]
        if self.node is not None:
            return self.node.unflatten_fn(values, self.keys)
        try:
            if issubclass(self.kind, tuple):
                return self.kind(values)
            made = copy.copy(self.like)
            for name, held in getattr(made, "__dict__", {}).items():
                if isinstance(held, dict | list):  # which may be where its entries are
                    made.__dict__[name] = copy.copy(held)
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


_LEAVES = (type(None), bool, int, float, str, Tensor, bytearray, array.array)


def _opened(tree: Any) -> tuple[pytree.NodeDef | None, list[Any], Any] | None:
    """Of a container how pytree makes one, what is in it, and its keys; None for a leaf."""
    if isinstance(tree, _LEAVES):
        return None
    kind = type(tree)
    node = pytree.SUPPORTED_NODES.get(pytree._get_node_type(tree))
    if node is not None:
        values, context = node.flatten_fn(tree)
        return node, list(values), context
    if issubclass(kind, MutableMapping):
        keys = list(tree.keys())
        return None, [tree[key] for key in keys], keys
    if dataclasses.is_dataclass(kind):
        keys = [f.name for f in dataclasses.fields(tree) if hasattr(tree, f.name)]
        return None, [getattr(tree, name) for name in keys], keys
    if issubclass(kind, tuple | MutableSequence):
        return None, list(tree), list(range(len(tree)))
    return None


def flatten(tree: Any) -> tuple[list[Any], Structure | None]:
    """Returns the leaves of a tree and its structure (None for a lone leaf)."""
    leaves: list[Any] = []
    return leaves, _structure(tree, leaves)


def _structure(tree: Any, leaves: list[Any]) -> Structure | None:
    """The structure of a tree, whose leaves are appended."""
    opened = _opened(tree)
    if opened is None:
        leaves.append(tree)
        return None
    node, values, keys = opened
    children = tuple([_structure(value, leaves) for value in values])
    return Structure(type(tree), keys, children, node, None if node else tree)


def unflatten(leaves: Iterable[Any], structure: Structure | None) -> Any:
    """The inverse of :func:`flatten`."""
    rest = iter(leaves)
    return next(rest) if structure is None else structure.filled(rest)


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
    opened = _opened(tree)
    if opened is None:
        return [root]
    node, values, keys = opened
    if node is None:
        dots = dataclasses.is_dataclass(tree) and not isinstance(tree, MutableMapping)
        steps = [f".{key}" if dots else f"[{key!r}]" for key in keys]
    elif node.flatten_with_keys_fn is not None:
        steps = [str(key) for key, _ in node.flatten_with_keys_fn(tree)[0]]
    else:  # registered without names
        steps = [f"<entry {k}>" for k in range(len(values))]
    found = zip(steps, values, strict=True)
    return [name for step, value in found for name in leaf_names(root + step, value)]


def by_name(root: str, tree: Any) -> dict[str, Any]:
    """The leaves of a tree by the way to each."""
    return dict(zip(leaf_names(root, tree), flatten(tree)[0], strict=True))


def equal(a: Any, b: Any) -> bool:
    """Whether two values are of one type and equal, as far as they tell."""
    try:
        return a is b or (type(a) is type(b) and bool(a == b))
    except Exception:
        return False


def described(tensor: Tensor) -> str:
    """A tensor's dtype and shape in a few characters: ``float32[8, 3]``."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


# --- objects that are no trees -------------------------------------------------------------------

#: What does something rather than being data.
_APPARATUS: Any = (Callable, Iterator, ModuleType, Dataset, DataLoader, Sampler, Optimizer)


def attributes_of(thing: Any) -> dict[str, Any]:
    """The attributes of an object, also where it has no dictionary."""
    slots: list[str] = copyreg._slotnames(type(thing))  # type: ignore[attr-defined]
    found = {name: getattr(thing, name) for name in slots if hasattr(thing, name)}
    return {**found, **getattr(thing, "__dict__", {})}


def hidden_tensor(
    thing: Any, is_meant: Callable[[Tensor], bool] | None = None, depth: int = 3
) -> str | None:
    """The way to a tensor that counts in the attributes of an object, in Python; None without one.

    Args:
        thing: a leaf, or a container, whose entries are no attributes.
        is_meant: which tensors count; by default those that may have one entry a sample.
        depth: how many objects in objects are looked into.
    """
    if not depth or not gc.is_tracked(thing) or isinstance(thing, _APPARATUS):
        return None  # a number, a string: nearly always it is so
    entries = set(map(id, flatten(thing)[0]))
    for name, value in attributes_of(thing).items():
        for k, leaf in enumerate(flatten(value)[0]):
            if id(leaf) in entries:
                continue
            found: str | None = ""
            if not isinstance(leaf, Tensor):
                found = hidden_tensor(leaf, is_meant, depth - 1)
            elif not (is_meant or _may_be_cut)(leaf):
                continue
            if found is not None:
                return leaf_names(f".{name}", value)[k] + found
    return None


def _may_be_cut(tensor: Tensor) -> bool:
    return tensor.dim() > 0 and not isinstance(tensor, nn.Parameter)


# --- micro-batches -------------------------------------------------------------------------------


class NoChunk:
    """Marks a tensor in the input of a pipe that goes whole to every micro-batch.

    Example::

        pipe({"tokens": tokens, "mask": NoChunk(mask)})   # mask: [length, length]

    The layers receive the bare tensor.
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
    """Cuts a mini-batch into at most ``chunks`` micro-batches of its structure.

    Every tensor is cut along dimension 0 as by ``torch.chunk``; other values, and tensors in
    :class:`NoChunk`, go whole to every micro-batch. Refuses what cannot be cut, also because a
    micro-batch would get another part of one tensor than of another one.
    """
    return scatter_sized(input, chunks)[0]


def scatter_sized(input: Any, chunks: int) -> tuple[list[Any], list[int]]:
    """As :func:`scatter`, and the number of samples in each micro-batch."""
    return _scattered(input, chunks, {"input": input})


def scatter_pair(input: Any, target: Any, chunks: int) -> tuple[list[Any], list[Any], list[int]]:
    """Inputs and targets of as many micro-batches, and the number of samples in each.

    As :func:`scatter`; a target without any tensor to cut goes whole to every micro-batch.
    """
    pairs, sizes = _scattered((input, target), chunks, {"input": input, "target": target})
    inputs, targets = zip(*pairs, strict=True)
    return list(inputs), list(targets), sizes


def unwrapped(micro_batch: Any) -> tuple[Any, int]:
    """A micro-batch as the layers get it, and the number of samples in it."""
    leaves, structure = flatten(micro_batch)
    sizes = [len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() > 0]
    return unflatten(map(bare, leaves), structure), sizes[0] if sizes else 1


def bare(leaf: Any) -> Any:
    """What a ``NoChunk`` holds, and anything else itself."""
    return leaf.tensor if isinstance(leaf, NoChunk) else leaf


def _scattered(tree: Any, chunks: int, named: dict[str, Any]) -> tuple[list[Any], list[int]]:
    leaves, structure = flatten(tree)
    if chunks > 1:
        _refuse_uncut(named, chunks)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    rows = [[len(p) for p in t.chunk(chunks)] if t.dim() else [] for t in tensors] or [[1]]
    sizes = rows[0]
    for row in rows:  # the same shares of each
        if not row or [n * sum(sizes) for n in row] != [n * sum(row) for n in sizes]:
            raise ValueError(_cannot_scatter(named, chunks))
    if (m := len(sizes)) == 1:
        return [unflatten(map(bare, leaves), structure)], sizes
    columns = [t.chunk(chunks) if isinstance(t, Tensor) else (bare(t),) * m for t in leaves]
    return [unflatten(row, structure) for row in zip(*columns, strict=True)], sizes


def _refuse_uncut(named: dict[str, Any], chunks: int) -> None:
    """Refuses what would go whole to every micro-batch though it should not."""
    for name, tree in named.items():
        things = [*by_name(name, tree).items()]
        things += [(name, container) for container in _shallow_copied(flatten(tree)[1])]
        for where, thing in things:
            if isinstance(thing, Tensor | NoChunk) or (at := hidden_tensor(thing)) is None:
                continue
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


def _shallow_copied(structure: Structure | None) -> Iterator[Any]:
    """The containers in a tree that have attributes beside their entries."""
    if structure is not None:
        if structure.node is None:
            yield structure.like
        for child in structure.children:
            yield from _shallow_copied(child)


def _cannot_scatter(named: dict[str, Any], chunks: int) -> str:
    lines = []
    for root, tree in named.items():
        for where, leaf in by_name(root, tree).items():
            if not isinstance(leaf, Tensor):
                continue
            found = "has no dimension to cut"
            if leaf.dim():
                sizes = [str(len(piece)) for piece in leaf.chunk(chunks)]
                few = sizes if len(sizes) <= 5 else [*sizes[:4], "...", sizes[-1]]
                found = f"gives {len(sizes)} micro-batches of {', '.join(few)}"
            lines.append(f"  {where}: {described(leaf)} {found}\n")
    return (
        f"the {' and the '.join(named)} cannot be cut into micro-batches along dimension 0 "
        f"(chunks={chunks}):\n{''.join(lines)}Give all tensors the same batch size, and wrap "
        "those that every micro-batch needs whole in syncpipe.NoChunk(tensor)."
    )


def gather(outputs: list[Any], common: Collection[int] = ()) -> Any:
    """Puts the outputs of the micro-batches together: the inverse of :func:`scatter`.

    Tensors are concatenated along dimension 0. Other values, and tensors whose index among the
    leaves is in ``common``, must be equal in every micro-batch. The output of a single micro-batch
    is returned as it is.
    """
    first = outputs[0]
    if len(outputs) == 1:
        return first
    columns, structures = zip(*map(flatten, outputs), strict=True)
    for i, structure in enumerate(structures):
        if structure != structures[0]:
            raise ValueError(
                "the outputs of the micro-batches differ in structure: micro-batch 0 gave "
                f"{structures[0] or 'a tensor'}, micro-batch {i} gave {structure or 'a tensor'}. "
                "Let the last layer return the same structure for every micro-batch."
            )
    rows = zip(*columns, strict=True)
    joined = [
        _common(row, first, k) if k in common else _gathered(row, first, k)
        for k, row in enumerate(rows)
    ]
    return unflatten(joined, structures[0])


def samples_elsewhere(
    outputs: list[Any], sizes: Sequence[int], dimensions: Set[int] | None = None
) -> str:
    """Which output of micro-batches has its samples in another dimension than 0, in words, or "".

    Rows that are a multiple of the samples may be samples times something (tokens of all sequences,
    flattened), and the other dimension have that size by chance. Then it counts if the rows are one
    of the ``dimensions`` of the input, or else it has three of its own and they are not samples
    times one of these; without ``dimensions`` always.
    """
    leaves = flatten(outputs[0])[0]
    if len(outputs) < 2 or all(
        isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == sizes[0] for leaf in leaves
    ):
        return ""  # nearly always
    columns = zip(*[flatten(output)[0] for output in outputs], strict=False)
    for name, row in zip(leaf_names("output", outputs[0]), columns, strict=False):
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


def _gathered(row: Sequence[Any], output: Any, k: int) -> Any:
    """What the micro-batches gave at the ``k``-th leaf of the output, as one value."""
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
                f"{error}. Bring the other dimensions to one size (pad them) in the last layer, "
                "and samples into dimension 0."
            )
    raise ValueError(f"{leaf_names('output', output)[k]} {wrong}")


def _common(row: Sequence[Any], output: Any, k: int) -> Any:
    first = row[0]
    for i, value in enumerate(row):
        if not (_same_tensor if isinstance(value, Tensor) else equal)(value, first):
            raise ValueError(
                f"{leaf_names('output', output)[k]} has no entry for each sample and differs "
                f"between micro-batches ({first!r} in micro-batch 0, {value!r} in micro-batch {i}),"
                " so there is no one value to return: return it as a tensor with one entry a sample"
            )
    return first


def _same_tensor(a: Tensor, b: Any) -> bool:
    return type(a) is not Tensor or a.is_meta or torch.equal(a, b)


# --- memory --------------------------------------------------------------------------------------


def places_of(module: nn.Module) -> Iterator[tuple[nn.Module, dict[str, Any], str, Tensor]]:
    """All parameters and buffers where they are: the module, its dict of them, the name there."""
    for part in module.modules():
        for held in (part._parameters, part._buffers):
            for name, tensor in held.items():
                if tensor is not None:
                    yield part, held, name, tensor


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


def users_of(tensor: Tensor) -> int:
    """How many tensors use the memory of one, itself included; 0 where it has no storage."""
    if not torch._C._has_storage(tensor):  # a sparse one
        return 0
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)) - _ASKING


_ASKING = 0  # in some versions who asks counts, too
_ASKING = users_of(torch.empty(1)) - 1


def is_part(tensor: Tensor) -> bool:
    """Whether it is a part of a larger memory, with others that count versions with it."""
    has_storage = bool(torch._C._has_storage(tensor))
    return has_storage and tensor.untyped_storage().nbytes() > tensor.nbytes


def compact(tensor: Tensor) -> Tensor:
    """A tensor to keep: a copy if it is a part of a larger memory, which would stay as well."""
    return tensor.clone() if type(tensor) is Tensor and is_part(tensor) else tensor


def disguised(tensor: Tensor, value: Tensor) -> Tensor:
    """A value as one of the class of ``tensor``, and with the very same attributes."""
    value = value if type(value) is type(tensor) else value.as_subclass(type(tensor))
    value.__dict__ = tensor.__dict__
    return value


def clones(tensors: list[Tensor]) -> list[Tensor]:
    """Copies of tensors; those that are one (``(x, x)``) stay one.

    Kernels go by strides and by the alignment of memory, and the last bit by the kernel. So the
    copies have both from the originals.
    """
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
        or storage_of(tensor) == id(tensor)
        or (
            copied.stride() == tensor.stride()
            and not (tensor.is_conj() or tensor.is_neg())
            and (copied.data_ptr() - tensor.data_ptr()) % _ALIGNED == 0
        )
    ):
        return copied
    exact: Tensor = _Exact.apply(tensor)  # type: ignore[no-untyped-call]
    return exact


class _Exact(torch.autograd.Function):
    """A copy in memory of the same layout, also of tensors that are expanded or have gaps.

    What is conjugated or negated only when it is read stays so.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        if tensor.is_conj():
            return _Exact.forward(ctx, tensor.conj()).conj()
        if tensor.is_neg():
            return torch._neg_view(_Exact.forward(ctx, torch._neg_view(tensor)))
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
