"""Trees of tensors.

Trees are PyTorch's pytrees, and containers that pytree takes for leaves: mappings (``UserDict``, as
from Hugging Face's tokenizers, and subclasses of ``dict``), lists, tuples and dataclasses. Mapping
a tree makes a shallow copy of the same type. Most trees are one tensor.
"""

from __future__ import annotations

import copy
import copyreg
import dataclasses
import gc
import operator
from collections.abc import Callable, Iterable, Iterator, MutableMapping, MutableSequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from syncpipe.data.batch_classes import LEAVES, batch_kind, samples_of


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


def _opened(tree: Any) -> tuple[pytree.NodeDef | None, list[Any], Any] | None:
    """The pytree node (or None), values and keys of a container; None for a leaf."""
    if isinstance(tree, LEAVES):
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


def attributes_of(thing: Any) -> dict[str, Any]:
    """The attributes of an object, including those in ``__slots__``."""
    slots: list[str] = copyreg._slotnames(type(thing))  # type: ignore[attr-defined]
    found = {name: getattr(thing, name) for name in slots if hasattr(thing, name)}
    return {**found, **getattr(thing, "__dict__", {})}


def entries(tree: Any) -> Iterator[tuple[Callable[[Any, Any], Any], Any, Any]]:
    """The entries of a registered batch, or a container in it: ``value = read(tree, key)``."""
    opened = _opened(tree)
    if opened is None or (opened[0] is not None and type(tree) not in (tuple, list, dict)):
        return
    keys = range(len(tree)) if type(tree) in (tuple, list) else opened[2]
    dots = not (_is_keyed(tree) or isinstance(tree, tuple | MutableSequence))
    for key, value in zip(keys, opened[1], strict=True):
        yield getattr if dots else operator.getitem, key, value
