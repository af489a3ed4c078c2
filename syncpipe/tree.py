"""Trees of values: PyTorch's pytrees, with a short way for the most common tree, one tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = [
    "aliased",
    "clones",
    "compact",
    "described",
    "flatten",
    "leaf_names",
    "map_tensors",
    "objects_in",
    "tensors_in",
    "unflatten",
]


def flatten(tree: Any) -> tuple[list[Any], pytree.TreeSpec | None]:
    """Returns the leaves of a tree and its structure (None for a lone tensor)."""
    if isinstance(tree, Tensor):
        return [tree], None
    leaves, spec = pytree.tree_flatten(tree)
    return leaves, spec


def unflatten(leaves: list[Any], spec: pytree.TreeSpec | None) -> Any:
    """The inverse of :func:`flatten`."""
    return leaves[0] if spec is None else pytree.tree_unflatten(leaves, spec)


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors among the leaves of a tree, in order."""
    if isinstance(tree, Tensor):
        return [tree]
    found: list[Tensor] = []
    _collect(tree, found)
    return found


def _collect(tree: Any, found: list[Tensor]) -> None:
    # Tuples and lists by hand: they are most of what travels, and pytree takes its time.
    if isinstance(tree, Tensor):
        found.append(tree)
    elif type(tree) is tuple or type(tree) is list:
        for child in tree:
            _collect(child, found)
    elif tree is not None:
        found += [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def objects_in(tree: Any) -> list[Any]:
    """The leaves of a tree that are objects with attributes, which a layer may change."""
    if isinstance(tree, Tensor) or tree is None:
        return []
    if type(tree) is tuple or type(tree) is list:
        return [found for child in tree for found in objects_in(child)]
    leaves = pytree.tree_leaves(tree)
    return [leaf for leaf in leaves if not isinstance(leaf, Tensor) and hasattr(leaf, "__dict__")]


def map_tensors(function: Callable[[list[Tensor]], list[Tensor]], tree: Any) -> Any:
    """Replaces the tensors of a tree by what ``function`` makes of the list of them all."""
    if isinstance(tree, Tensor):
        return function([tree])[0]
    tensors = tensors_in(tree)
    return _replace(tree, iter(function(tensors))) if tensors else tree


def _replace(tree: Any, tensors: Iterator[Tensor]) -> Any:
    if isinstance(tree, Tensor):
        return next(tensors)
    if type(tree) is tuple:
        return tuple([_replace(child, tensors) for child in tree])
    if type(tree) is list:
        return [_replace(child, tensors) for child in tree]
    if tree is None:
        return None
    leaves, spec = pytree.tree_flatten(tree)
    leaves = [next(tensors) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return pytree.tree_unflatten(leaves, spec)


def aliased(tree: Any) -> list[bool]:
    """For each tensor of a tree whether another one of them shares its memory."""
    storages = [_storage(tensor) for tensor in tensors_in(tree)]
    return [storages.count(storage) > 1 for storage in storages]


def clones(tensors: list[Tensor]) -> list[Tensor]:
    """Copies of tensors; those that are one (``(x, x)``) stay one."""
    if len(tensors) == 1:
        return [tensors[0].clone()]
    made: dict[Any, Tensor] = {}
    return [
        made[key] if (key := _place(tensor)) in made else made.setdefault(key, tensor.clone())
        for tensor in tensors
    ]


def compact(tensor: Tensor) -> Tensor:
    """A tensor to keep: a copy if it is a part of a larger memory, which would stay as well."""
    if type(tensor) is not Tensor or tensor.layout is not torch.strided:
        return tensor
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor


def _place(tensor: Tensor) -> Any:
    """What two tensors have in common that are the same part of the same memory."""
    if tensor.layout is not torch.strided:
        return id(tensor)
    region = (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
    return (_storage(tensor), *region, tensor.requires_grad)


def _storage(tensor: Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # sparse tensors and the like have none
        return id(tensor)


def leaf_names(root: str, tree: Any) -> list[str]:
    """The way to each leaf, as one would write it in Python: ``input['x'][0]``."""
    try:
        return [root + pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(tree)[0]]
    except ValueError:  # a node type that was registered without names
        return [f"leaf {k} of {root}" for k in range(len(pytree.tree_leaves(tree)))]


def described(tensor: Tensor) -> str:
    """A tensor's dtype and shape in a few characters: ``float32[8, 3]``."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
