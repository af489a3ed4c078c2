"""Trees of tensors: traversal, scatter into micro-batches, gather of outputs; memory of tensors.

Trees are PyTorch's pytrees, and containers that pytree takes for leaves: mappings (``UserDict``, as
from Hugging Face's tokenizers, and subclasses of ``dict``), lists, tuples and dataclasses. Mapping
a tree makes a shallow copy of the same type. Most trees are one tensor.
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
    keys: Any  #: of its entries, or the context of pytree
    children: tuple[Structure | None, ...]  #: None for a leaf
    node: pytree.NodeDef | None = field(compare=False)  #: None if pytree takes it for a leaf
    like: Any = field(compare=False)  #: the container itself if ``node`` is None

    def __str__(self) -> str:
        inner = ", ".join("*" if child is None else str(child) for child in self.children)
        return f"{self.kind.__name__}({inner}; {self.keys})" if self.keys else f"({inner})"

    def filled(self, leaves: Iterator[Any]) -> Any:
        """A container of the same type with the next leaves of an iterator."""
        values = [next(leaves) if s is None else s.filled(leaves) for s in self.children]
        if self.node is not None:
            return self.node.unflatten_fn(values, self.keys)
        try:
            if issubclass(self.kind, tuple):
                return self.kind(values)
            made = copy.copy(self.like)
            for name, held in getattr(made, "__dict__", {}).items():
                if isinstance(held, dict | list):  # it may hold the entries
                    made.__dict__[name] = copy.copy(held)
            for key, value in zip(self.keys, values, strict=True):
                if issubclass(self.kind, MutableSequence) or _is_keyed(self.like):
                    made[key] = value
                else:
                    object.__setattr__(made, key, value)  # works for frozen dataclasses
        except Exception as error:
            raise TypeError(
                f"a {self.kind.__name__} cannot be copied with other tensors: pass them "
                "in tuples or dicts, or register the class with "
                "torch.utils._pytree.register_pytree_node"
            ) from error
        return made


_LEAVES = (type(None), bool, int, float, str, Tensor, bytearray, array.array)


def _opened(tree: Any) -> tuple[pytree.NodeDef | None, list[Any], Any] | None:
    """The pytree node (or None), values and keys of a container; None for a leaf."""
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
    """Whether entries are read and set by key: a mapping, or a registered batch like one."""
    return isinstance(tree, MutableMapping) or (
        batch_kind(tree) is not None
        and all(hasattr(tree, name) for name in ("keys", "__getitem__", "__setitem__"))
    )


def flatten(tree: Any, *, batches: bool = False) -> tuple[list[Any], Structure | None]:
    """Returns the leaves of a tree and its structure (None if the tree is a leaf).

    With ``batches``, objects of classes of :func:`register_batch` are leaves.
    """
    leaves: list[Any] = []
    return leaves, _structure(tree, leaves, batches)


def _structure(tree: Any, leaves: list[Any], batches: bool) -> Structure | None:
    opened = None if batches and batch_kind(tree) else _opened(tree)
    if opened is None:
        leaves.append(tree)
        return None
    node, values, keys = opened
    children = tuple([_structure(value, leaves, batches) for value in values])
    return Structure(type(tree), keys, children, node, None if node else tree)


def unflatten(leaves: Iterable[Any], structure: Structure | None) -> Any:
    rest = iter(leaves)
    return next(rest) if structure is None else structure.filled(rest)


_NO_SKIPS = ()  # the second part of most stages' inputs and outputs: (tensor, _NO_SKIPS)


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors among the leaves of a tree, in order."""
    if isinstance(tree, Tensor):
        return [tree]
    if type(tree) is tuple and len(tree) == 2 and tree[1] is _NO_SKIPS and type(tree[0]) is Tensor:
        return [tree[0]]
    if tree is None:
        return []
    # Tuples and lists, the most frequent containers, without pytree, which is slow.
    if type(tree) is tuple or type(tree) is list:
        return [tensor for child in tree for tensor in tensors_in(child)]
    return [leaf for leaf in flatten(tree)[0] if isinstance(leaf, Tensor)]


def distinct(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    return list({id(tensor): tensor for tensor in tensors_in(tree)}.values())


def objects_in(tree: Any) -> list[Any]:
    """The leaves of a tree that are mutable objects, or may contain tensors."""
    if isinstance(tree, Tensor) or tree is None:
        return []
    if type(tree) is tuple or type(tree) is list:
        return [found for child in tree for found in objects_in(child)]
    leaves, _ = flatten(tree)
    return [leaf for leaf in leaves if not isinstance(leaf, Tensor) and gc.is_tracked(leaf)]


def map_tensors(function: Callable[[list[Tensor]], list[Tensor]], tree: Any) -> Any:
    """A copy of a tree; ``function`` maps the list of its tensors to new ones."""
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
    """The path of each leaf as a Python expression: ``input['x'][0]``."""
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
    leaves, _ = flatten(tree, batches=batches)
    return dict(zip(leaf_names(root, tree, batches=batches), leaves, strict=True))


def equal(a: Any, b: Any) -> bool:
    """Whether two values have one type and compare equal; False if the comparison raises."""
    try:
        return a is b or (type(a) is type(b) and bool(a == b))
    except Exception:
        return False


def described(tensor: Any) -> str:
    """The dtype and shape of a tensor, ``float32[8, 3]``, or the type and size of a batch."""
    if not isinstance(tensor, Tensor):
        return f"{type(tensor).__name__}[{samples_of(tensor)}]"
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


# --- objects that are not trees ------------------------------------------------------------------

#: Types of objects that are not data.
_APPARATUS: Any = (Callable, Iterator, ModuleType, Dataset, DataLoader, Sampler, Optimizer)


def attributes_of(thing: Any) -> dict[str, Any]:
    """The attributes of an object, including those in ``__slots__``."""
    slots: list[str] = copyreg._slotnames(type(thing))  # type: ignore[attr-defined]
    found = {name: getattr(thing, name) for name in slots if hasattr(thing, name)}
    return {**found, **getattr(thing, "__dict__", {})}


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


# --- micro-batches -------------------------------------------------------------------------------


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
    plain = (*_LEAVES, object, list, tuple, dict, set)
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


def samples_of(leaf: Any) -> int | None:
    """The number of samples of a tensor or registered batch; None for values that are not cut."""
    if isinstance(leaf, Tensor):
        return len(leaf) if leaf.dim() else None
    kind = batch_kind(leaf)
    return None if kind is None else int(kind.size(leaf))


def entries(tree: Any) -> Iterator[tuple[Callable[[Any, Any], Any], Any, Any]]:
    """The entries of a registered batch, or a container in it: ``value = read(tree, key)``."""
    opened = _opened(tree)
    if opened is None or (opened[0] is not None and type(tree) not in (tuple, list, dict)):
        return
    keys = range(len(tree)) if type(tree) in (tuple, list) else opened[2]
    dots = not (_is_keyed(tree) or isinstance(tree, tuple | MutableSequence))
    for key, value in zip(keys, opened[1], strict=True):
        yield getattr if dots else operator.getitem, key, value


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


def _shares(leaf: Any, chunks: int) -> list[int]:
    """The sizes of the micro-batches of a leaf; empty if it cannot be cut."""
    if isinstance(leaf, Tensor):
        return [len(piece) for piece in leaf.chunk(chunks)] if leaf.dim() else []
    return [len(piece) for piece in torch.empty(samples_of(leaf) or 0).chunk(chunks)]


def _pieces(leaf: Any, chunks: int, m: int) -> Sequence[Any]:
    if isinstance(leaf, Tensor):
        return leaf.chunk(chunks)
    if batch_kind(leaf):
        return cut_batch(leaf, _shares(leaf, chunks))
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


def without_no_chunk(leaf: Any) -> Any:
    return leaf.tensor if isinstance(leaf, NoChunk) else leaf


def _scattered(tree: Any, chunks: int, named: dict[str, Any]) -> tuple[list[Any], list[int]]:
    leaves, structure = flatten(tree, batches=True)
    if chunks > 1:
        _refuse_uncut(named, chunks)
    cut = [leaf for leaf in leaves if isinstance(leaf, Tensor) or batch_kind(leaf)]
    rows = [_shares(leaf, chunks) for leaf in cut] or [[1]]
    sizes = rows[0]
    for row in rows:  # each must have the same proportions
        if not row or [n * sum(sizes) for n in row] != [n * sum(row) for n in sizes]:
            raise ValueError(_cannot_scatter(named, chunks))
    if (m := len(sizes)) == 1:
        return [unflatten(map(without_no_chunk, leaves), structure)], sizes
    columns = [_pieces(leaf, chunks, m) for leaf in leaves]
    return [unflatten(row, structure) for row in zip(*columns, strict=True)], sizes


def _refuse_uncut(named: dict[str, Any], chunks: int) -> None:
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
    return type(a) is not Tensor or a.is_meta or torch.equal(a, b)


# --- memory --------------------------------------------------------------------------------------


def modules_of(module: nn.Module) -> list[nn.Module]:
    """As ``module.modules()``, in less time."""
    found: dict[nn.Module, None] = {}
    todo: list[nn.Module | None] = [module]
    while todo:
        each = todo.pop()
        if each is not None and each not in found:
            found[each] = None
            todo += reversed(each._modules.values())
    return list(found)


def places_of(module: nn.Module) -> Iterator[tuple[nn.Module, dict[str, Any], str, Tensor]]:
    """Yields ``(submodule, its _parameters or _buffers, name, tensor)`` for all tensors."""
    for part in modules_of(module):
        for held in (part._parameters, part._buffers):
            for name, tensor in held.items():
                if tensor is not None:
                    yield part, held, name, tensor


def storage_of(tensor: Tensor) -> int:
    """A number that identifies the memory of a tensor."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # for example, sparse tensors have no storage
        return id(tensor)


def extent(tensor: Tensor) -> tuple[int, int]:
    """The range of bytes of a tensor in its storage, ``(start, stop)``."""
    start = int(tensor.storage_offset()) * tensor.itemsize
    if not tensor.numel():
        return start, start
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * step for size, step in steps)
    return start, start + (1 + int(last)) * tensor.itemsize


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors may share memory: their ranges in one storage overlap."""
    if storage_of(a) != storage_of(b):
        return False
    if a.layout is not torch.strided:
        return True
    (a_start, a_end), (b_start, b_end) = extent(a), extent(b)
    return max(a_start, b_start) < min(a_end, b_end)


def place_of(tensor: Tensor) -> Any:
    """A key that is equal for tensors with the same memory, shape, strides and dtype."""
    if tensor.layout is not torch.strided:
        return id(tensor)
    region = (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
    return (storage_of(tensor), *region, tensor.requires_grad)


def storage_users(tensor: Tensor) -> int:
    """The number of tensors that use the storage of one, itself included; 0 without a storage."""
    if not torch._C._has_storage(tensor):  # for example, a sparse tensor
        return 0
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)) - _OWN_COUNT


_OWN_COUNT = 0  # uses that the query itself adds, by PyTorch version
_OWN_COUNT = storage_users(torch.empty(1)) - 1


def is_slice(tensor: Tensor) -> bool:
    """Whether a tensor is a part of a larger storage, whose tensors may share version counters."""
    has_storage = bool(torch._C._has_storage(tensor))
    return has_storage and tensor.untyped_storage().nbytes() > tensor.nbytes


def own_storage(tensor: Tensor) -> Tensor:
    """A tensor to keep: a copy if it is a slice, which would keep a larger storage alive."""
    return tensor.clone() if type(tensor) is Tensor and is_slice(tensor) else tensor


def with_class_of(tensor: Tensor, value: Tensor) -> Tensor:
    """``value`` as an instance of the class of ``tensor``, which shares its attributes."""
    value = value if type(value) is type(tensor) else value.as_subclass(type(tensor))
    value.__dict__ = tensor.__dict__
    return value


def clones(tensors: list[Tensor]) -> list[Tensor]:
    """Copies of tensors. Tensors that are the same, as in ``(x, x)``, have one copy.

    Copies keep strides and the alignment of memory, because kernels are chosen by these, and
    kernels differ in the last bit of results.
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
    """Copies a tensor into memory of the same layout, also if it is expanded or has gaps.

    Lazy conjugation and negation stay lazy.
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
