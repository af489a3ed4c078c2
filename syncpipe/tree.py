"""Trees of values: PyTorch's pytrees, with a short way for the most common tree, one tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = ["flatten", "keystr", "map_tensors", "tensors_in"]


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
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def map_tensors(function: Callable[[list[Tensor]], list[Tensor]], tree: Any) -> Any:
    """Replaces the tensors of a tree by what ``function`` makes of the list of them all."""
    if isinstance(tree, Tensor):
        return function([tree])[0]
    leaves, spec = pytree.tree_flatten(tree)
    places = [k for k, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    if not places:
        return tree
    for k, tensor in zip(places, function([leaves[k] for k in places]), strict=True):
        leaves[k] = tensor
    return pytree.tree_unflatten(leaves, spec)


def keystr(root: str, path: Any) -> str:
    """Writes the path of a leaf as one would in Python: ``input['x'][0]``."""
    return root + pytree.keystr(path)


def described(tensor: Tensor) -> str:
    """A tensor's dtype and shape in a few characters: ``float32[8, 3]``."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def is_differentiable(value: Any) -> bool:
    """Whether a leaf is a tensor that autograd follows."""
    return isinstance(value, torch.Tensor) and value.requires_grad
