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
import operator
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
from typing import Any, NamedTuple

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
                if issubclass(self.kind, MutableSequence) or _is_keyed(self.like):
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
    if _is_keyed(tree):
        keys = list(tree.keys())
        return None, [tree[key] for key in keys], keys
    if dataclasses.is_dataclass(kind):
        keys = [f.name for f in dataclasses.fields(tree) if hasattr(tree, f.name)]
        return None, [getattr(tree, name) for name in keys], keys
    if issubclass(kind, tuple | MutableSequence):
        return None, list(tree), list(range(len(tree)))
    if batch_kind(tree):
        found = attributes_of(tree)
        return None, list(found.values()), list(found)
    return None


def _is_keyed(tree: Any) -> bool:
    """Whether entries are read and set by key: of a mapping, or a batch that is used as one."""
    return isinstance(tree, MutableMapping) or (
        batch_kind(tree) is not None
        and all(hasattr(tree, name) for name in ("keys", "__getitem__", "__setitem__"))
    )


def flatten(tree: Any, *, batches: bool = False) -> tuple[list[Any], Structure | None]:
    """Returns the leaves of a tree and its structure (None for a lone leaf).

    With ``batches`` what is cut as :func:`register_batch` says is a leaf.
    """
    leaves: list[Any] = []
    return leaves, _structure(tree, leaves, batches)


def _structure(tree: Any, leaves: list[Any], batches: bool) -> Structure | None:
    """The structure of a tree, whose leaves are appended."""
    opened = None if batches and batch_kind(tree) else _opened(tree)
    if opened is None:
        leaves.append(tree)
        return None
    node, values, keys = opened
    children = tuple([_structure(value, leaves, batches) for value in values])
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


def leaf_names(root: str, tree: Any, *, batches: bool = False) -> list[str]:
    """The way to each leaf, as one would write it in Python: ``input['x'][0]``."""
    opened = None if batches and batch_kind(tree) else _opened(tree)
    if opened is None:
        return [root]
    node, values, keys = opened
    if node is None:
        dots = not (_is_keyed(tree) or isinstance(tree, tuple | MutableSequence))
        steps = [f".{key}" if dots else f"[{key!r}]" for key in keys]
    elif node.flatten_with_keys_fn is not None:
        steps = [str(key) for key, _ in node.flatten_with_keys_fn(tree)[0]]
    else:  # registered without names
        steps = [f"<entry {k}>" for k in range(len(values))]
    found = zip(steps, values, strict=True)
    return [name for step, v in found for name in leaf_names(root + step, v, batches=batches)]


def by_name(root: str, tree: Any, *, batches: bool = False) -> dict[str, Any]:
    """The leaves of a tree by the way to each."""
    leaves, _ = flatten(tree, batches=batches)
    return dict(zip(leaf_names(root, tree, batches=batches), leaves, strict=True))


def equal(a: Any, b: Any) -> bool:
    """Whether two values are of one type and equal, as far as they tell."""
    try:
        return a is b or (type(a) is type(b) and bool(a == b))
    except Exception:
        return False


def described(tensor: Any) -> str:
    """A tensor's dtype and shape in a few characters: ``float32[8, 3]``."""
    if not isinstance(tensor, Tensor):
        return f"{type(tensor).__name__}[{samples_of(tensor)}]"
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
    """Say how objects of a class are cut into micro-batches, and put together again.

    For what has no samples in dimension 0 of its tensors: graphs, ragged lists. Inputs, targets and
    outputs of a pipe, and samples of :func:`sequential`, may then hold such objects. With PyTorch
    Geometric::

        def cut(batch, sizes):
            graphs = iter(batch.to_data_list())
            return [Batch.from_data_list([*islice(graphs, n)]) for n in sizes]

        def join(batches):
            return Batch.from_data_list([g for batch in batches for g in batch.to_data_list()])

        syncpipe.register_batch(Batch, lambda batch: batch.num_graphs, cut, join)

    The layers receive such an object. Its tensors, which go to the devices of stages, are those of
    its entries (where it has ``keys()`` and is indexed by them), or of its attributes. A mini-batch
    of ``n`` samples counts as a tensor of ``n`` rows beside it does: micro-batches have the sizes
    that ``torch.chunk`` gives, and losses that are means are weighted by them.

    Args:
        kind: the class. Subclasses are cut likewise.
        size: gives the number of samples of a batch.
        cut: takes a batch, and the numbers of samples of its parts in a list, which add up to its
            size; gives a batch for each.
        join: takes a list of batches, and gives one that has all of their samples in this order.

    Raises:
        TypeError: ``kind`` is no class, or one of Python's containers or a tensor, or one of the
            others is no function.
    """
    plain = (*_LEAVES, object, list, tuple, dict, set)
    if not isinstance(kind, type) or kind in plain or issubclass(kind, Tensor):
        raise TypeError(f"register_batch takes a class of batches of your own, not {kind!r}")
    for name, given in {"size": size, "cut": cut, "join": join}.items():
        if not callable(given):
            raise TypeError(f"{name} must be a function, not {type(given).__name__}")
    _kinds[kind] = _Kind(size, cut, join)


def batch_kind(thing: Any) -> _Kind | None:
    """How an object is cut, if its class was registered."""
    if not _kinds or isinstance(thing, Tensor):
        return None
    return next((_kinds[base] for base in type(thing).__mro__ if base in _kinds), None)


def samples_of(leaf: Any) -> int | None:
    """The number of samples in what is cut; None for what is not."""
    if isinstance(leaf, Tensor):
        return len(leaf) if leaf.dim() else None
    kind = batch_kind(leaf)
    return None if kind is None else int(kind.size(leaf))


def entries(tree: Any) -> Iterator[tuple[Callable[[Any, Any], Any], Any, Any]]:
    """Of each entry of a batch of a registered class, or of a container in it, what reads it."""
    opened = _opened(tree)
    if opened is None or (opened[0] is not None and type(tree) not in (tuple, list, dict)):
        return
    keys = range(len(tree)) if type(tree) in (tuple, list) else opened[2]
    dots = not (_is_keyed(tree) or isinstance(tree, tuple | MutableSequence))
    for key, value in zip(keys, opened[1], strict=True):
        yield getattr if dots else operator.getitem, key, value


def cut_batch(batch: Any, sizes: list[int]) -> Sequence[Any]:
    """A batch of a registered class, cut into parts of these sizes."""
    kind: Any = batch_kind(batch)
    parts = list(kind.cut(batch, sizes)) if len(sizes) > 1 else [batch]
    found = [samples_of(part) for part in parts]
    if found != sizes:
        raise ValueError(
            f"the cut of register_batch({type(batch).__name__}, ...) was to give batches of "
            f"{', '.join(map(str, sizes))} samples, and gave {', '.join(map(str, found))}"
        )
    return parts


def join_batches(batches: list[Any]) -> Any:
    """Several batches of a registered class as one."""
    kind: Any = batch_kind(batches[0])
    return kind.join(batches)


def repeated_batch(batch: Any, size: int) -> Any:
    """So many samples of a batch of a registered class, again and again."""
    own = samples_of(batch) or 1
    times, rest = divmod(size, own)
    return join_batches(
        [batch] * times + ([cut_batch(batch, [rest, own - rest])[0]] if rest else [])
    )


def _shares(leaf: Any, chunks: int) -> list[int]:
    """The sizes of the micro-batches of a leaf; empty for what cannot be cut."""
    if isinstance(leaf, Tensor):
        return [len(piece) for piece in leaf.chunk(chunks)] if leaf.dim() else []
    return [len(piece) for piece in torch.empty(samples_of(leaf) or 0).chunk(chunks)]


def _pieces(leaf: Any, chunks: int, m: int) -> Sequence[Any]:
    if isinstance(leaf, Tensor):
        return leaf.chunk(chunks)
    return (
        cut_batch(leaf, _shares(leaf, chunks))
        if batch_kind(leaf)
        else (without_no_chunk(leaf),) * m
    )


def scatter(input: Any, chunks: int) -> list[Any]:
    """Cuts a mini-batch into at most ``chunks`` micro-batches of its structure.

    Every tensor is cut along dimension 0 as by ``torch.chunk``, and an object of a registered class
    (:func:`register_batch`) into as many samples; other values, and tensors in
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
    leaves, structure = flatten(micro_batch, batches=True)
    sizes = [size for leaf in leaves if (size := samples_of(leaf)) is not None]
    return unflatten(map(without_no_chunk, leaves), structure), sizes[0] if sizes else 1


def without_no_chunk(leaf: Any) -> Any:
    """What a ``NoChunk`` holds, and anything else itself."""
    return leaf.tensor if isinstance(leaf, NoChunk) else leaf


def _scattered(tree: Any, chunks: int, named: dict[str, Any]) -> tuple[list[Any], list[int]]:
    leaves, structure = flatten(tree, batches=True)
    if chunks > 1:
        _refuse_uncut(named, chunks)
    cut = [leaf for leaf in leaves if isinstance(leaf, Tensor) or batch_kind(leaf)]
    rows = [_shares(leaf, chunks) for leaf in cut] or [[1]]
    sizes = rows[0]
    for row in rows:  # the same shares of each
        if not row or [n * sum(sizes) for n in row] != [n * sum(row) for n in sizes]:
            raise ValueError(_cannot_scatter(named, chunks))
    if (m := len(sizes)) == 1:
        return [unflatten(map(without_no_chunk, leaves), structure)], sizes
    columns = [_pieces(leaf, chunks, m) for leaf in leaves]
    return [unflatten(row, structure) for row in zip(*columns, strict=True)], sizes


def _refuse_uncut(named: dict[str, Any], chunks: int) -> None:
    """Refuses what would go whole to every micro-batch though it should not."""
    for name, tree in named.items():
        things = [*by_name(name, tree, batches=True).items()]
        containers = _shallow_copied(flatten(tree, batches=True)[1])
        for where, thing in [*things, *((name, container) for container in containers)]:
            if isinstance(thing, Tensor | NoChunk) or batch_kind(thing):
                continue
            if (at := hidden_tensor(thing)) is None:
                continue
            raise TypeError(
                f"{where} (or what is in it), of type {type(thing).__name__}, holds a tensor "
                f"at {at} that is no entry of a tuple, dict or dataclass and would go whole to "
                f"each of the micro-batches (chunks={chunks}): {to_cut(thing)}"
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


def to_cut(thing: Any) -> str:
    """What to do that an object with tensors in it is cut."""
    if type(thing).__name__ == "BlockMask":
        return (
            "make it in the layer that uses it, by create_block_mask of tensors that are cut. Its "
            "mask function asks for the index of a sample in the batch, which in a micro-batch is "
            "another one"
        )
    return (
        "pass the tensors in one of these, in syncpipe.NoChunk those that every micro-batch needs "
        "whole; or register the class, by torch.utils._pytree.register_pytree_node where dimension "
        "0 of its tensors has the samples, otherwise by syncpipe.register_batch"
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
        for where, leaf in by_name(root, tree, batches=True).items():
            if not (isinstance(leaf, Tensor) or batch_kind(leaf)):
                continue
            found = "has no dimension to cut"
            if sizes := list(map(str, _shares(leaf, chunks))):
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

    Tensors are concatenated along dimension 0, and objects of registered classes joined. Other
    values, and tensors whose index among the leaves is in ``common``, must be equal in every
    micro-batch. The output of a single micro-batch is returned as it is.
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


def samples_elsewhere(
    outputs: list[Any], sizes: Sequence[int], dimensions: Set[int] | None = None
) -> str:
    """Which output of micro-batches has its samples in another dimension than 0, in words, or "".

    Rows that are a multiple of the samples may be samples times something (tokens of all sequences,
    flattened), and the other dimension have that size by chance. Then it counts if the rows are one
    of the ``dimensions`` of the input, or else it has three of its own and they are not samples
    times one of these; without ``dimensions`` always.
    """
    leaves = flatten(outputs[0], batches=True)[0]
    if len(outputs) < 2 or all(
        isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == sizes[0] for leaf in leaves
    ):
        return ""  # nearly always
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


def _gathered(row: Sequence[Any], output: Any, k: int) -> Any:
    """What the micro-batches gave at the ``k``-th leaf of the output, as one value."""
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
                f"{error}. Bring the other dimensions to one size (pad them) in the last layer, "
                "and samples into dimension 0."
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


def storage_users(tensor: Tensor) -> int:
    """How many tensors use the memory of one, itself included; 0 where it has no storage."""
    if not torch._C._has_storage(tensor):  # a sparse one
        return 0
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)) - _OWN_COUNT


_OWN_COUNT = 0  # uses that the query itself adds, by PyTorch version
_OWN_COUNT = storage_users(torch.empty(1)) - 1


def is_slice(tensor: Tensor) -> bool:
    """Whether it is a part of a larger memory, with others that count versions with it."""
    has_storage = bool(torch._C._has_storage(tensor))
    return has_storage and tensor.untyped_storage().nbytes() > tensor.nbytes


def own_storage(tensor: Tensor) -> Tensor:
    """A tensor to keep: a copy if it is a part of a larger memory, which would stay as well."""
    return tensor.clone() if type(tensor) is Tensor and is_slice(tensor) else tensor


def with_class_of(tensor: Tensor, value: Tensor) -> Tensor:
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
