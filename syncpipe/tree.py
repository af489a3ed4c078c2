"""Trees of values: PyTorch's pytrees, with a short way for the most common tree, one tensor."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from syncpipe.objects import Container, opened

__all__ = [
    "clones",
    "compact",
    "containers_in",
    "described",
    "distinct",
    "extent",
    "flatten",
    "leaf_names",
    "map_tensors",
    "objects_in",
    "overlap",
    "place_of",
    "storage_of",
    "tensors_in",
    "unflatten",
]


_NO_SKIPS = ()  # most stages get and give one tensor, and these


class Structure(NamedTuple):
    """A tree without its leaves.

    Attributes:
        spec: pytree's.
        inner: for each leaf of that what is in it; nothing where all are leaves indeed.
    """

    spec: pytree.TreeSpec
    inner: list[tuple[Container, Structure] | None]

    def like(self, other: Structure) -> bool:
        """Whether both have the same types and keys everywhere."""
        return (
            self.spec == other.spec
            and len(self.inner) == len(other.inner)
            and all(
                a is b is None or (a and b and a[0].kind == b[0].kind and a[1].like(b[1]))
                for a, b in zip(self.inner, other.inner, strict=True)
            )
        )


def flatten(tree: Any) -> tuple[list[Any], Structure | None]:
    """Returns the leaves of a tree and its structure (None for a lone tensor)."""
    if isinstance(tree, Tensor):
        return [tree], None
    found, spec = pytree.tree_flatten(tree)
    containers = [None if isinstance(leaf, Tensor) else opened(leaf) for leaf in found]
    if not any(containers):
        return found, Structure(spec, [])
    leaves: list[Any] = []
    inner: list[tuple[Container, Structure] | None] = []
    for leaf, container in zip(found, containers, strict=True):
        if container is None:
            leaves.append(leaf)
            inner.append(None)
        else:
            below, structure = flatten(container.values)
            assert structure is not None
            leaves += below
            inner.append((container, structure))
    return leaves, Structure(spec, inner)


def containers_in(structure: Structure | None) -> list[Container]:
    """The containers in a tree that PyTorch's pytrees take for leaves."""
    parts = [] if structure is None else [part for part in structure.inner if part is not None]
    return [found for part in parts for found in (part[0], *containers_in(part[1]))]


def unflatten(leaves: Iterable[Any], structure: Structure | None) -> Any:
    """The inverse of :func:`flatten`."""
    return next(iter(leaves)) if structure is None else _filled(iter(leaves), structure)


def _filled(leaves: Iterator[Any], structure: Structure) -> Any:
    if not structure.inner:
        found = list(islice(leaves, structure.spec.num_leaves))
    else:
        found = [
            next(leaves) if part is None else part[0].filled(_filled(leaves, part[1]))
            for part in structure.inner
        ]
    return pytree.tree_unflatten(found, structure.spec)


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors among the leaves of a tree, in order."""
    if isinstance(tree, Tensor):
        return [tree]
    if type(tree) is tuple and len(tree) == 2 and tree[1] is _NO_SKIPS and type(tree[0]) is Tensor:
        return [tree[0]]
    found: list[Tensor] = []
    _collect(tree, found)
    return found


def distinct(tree: Any) -> list[Tensor]:
    """The tensors of a tree, each once."""
    if isinstance(tree, Tensor):
        return [tree]
    return list({id(tensor): tensor for tensor in tensors_in(tree)}.values())


def _collect(tree: Any, found: list[Tensor]) -> None:
    # Tuples and lists by hand: they are most of what travels, and pytree takes its time.
    if isinstance(tree, Tensor):
        found.append(tree)
    elif type(tree) is tuple or type(tree) is list:
        for child in tree:
            _collect(child, found)
    elif tree is not None:
        found += [leaf for leaf in flatten(tree)[0] if isinstance(leaf, Tensor)]


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
    leaves, structure = flatten(tree)
    return unflatten([next(tensors) if isinstance(t, Tensor) else t for t in leaves], structure)


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


def compact(tensor: Tensor) -> Tensor:
    """A tensor to keep: a copy if it is a part of a larger memory, which would stay as well."""
    if type(tensor) is not Tensor or tensor.layout is not torch.strided:
        return tensor
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor


def _clone(tensor: Tensor) -> Tensor:
    copy = tensor.clone()
    if (
        type(tensor) not in (Tensor, torch.nn.Parameter)
        or tensor.layout is not torch.strided
        or tensor.is_quantized
        or tensor.is_conj()
        or tensor.is_neg()
        or storage_of(tensor) == id(tensor)
        or (copy.stride() == tensor.stride() and _alignment(copy) == _alignment(tensor))
    ):
        return copy
    exact: Tensor = _Exact.apply(tensor)  # type: ignore[no-untyped-call]
    return exact


def _alignment(tensor: Tensor) -> int:
    return tensor.data_ptr() % _ALIGNED


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


_ALIGNED = 64


def extent(tensor: Tensor) -> tuple[int, int]:
    """The first byte of a tensor in its storage, and the one after the last."""
    start = int(tensor.storage_offset()) * tensor.itemsize
    if not tensor.numel():
        return start, start
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * step for size, step in steps)
    return start, start + (1 + int(last)) * tensor.itemsize


def place_of(tensor: Tensor) -> Any:
    """What two tensors have in common that are the same part of the same memory."""
    if tensor.layout is not torch.strided:
        return id(tensor)
    region = (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
    return (storage_of(tensor), *region, tensor.requires_grad)


def storage_of(tensor: Tensor) -> int:
    """A number that tells the memory of tensors apart."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # sparse tensors and the like have none
        return id(tensor)


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether an element of one tensor lies in the same memory as one of the other.

    True as well where that would take long to find out, which it does for odd strides only.
    """
    if storage_of(a) != storage_of(b):
        return False
    if a.layout is not torch.strided or a.itemsize != b.itemsize:
        return True
    if not a.numel() or not b.numel():
        return False
    ways: dict[int, tuple[int, int]] = {}  # for each stride how far one can go, in b and in a
    for size, stride in zip(a.shape, a.stride(), strict=True):
        back, forth = ways.get(stride, (0, 0))
        ways[stride] = back, forth + size - 1
    for size, stride in zip(b.shape, b.stride(), strict=True):
        back, forth = ways.get(stride, (0, 0))
        ways[stride] = back + size - 1, forth
    ways.pop(0, None)
    steps = [(stride, *ways[stride]) for stride in sorted(ways, reverse=True)]
    return _reached(int(b.storage_offset() - a.storage_offset()), steps, iter(range(1000)))


def _reached(distance: int, steps: list[tuple[int, int, int]], patience: Iterator[int]) -> bool:
    """Whether steps of so many strides, at most so many back and forth, lead so far."""
    if not steps or next(patience, None) is None:
        return distance == 0 or bool(steps)
    stride, back, forth = steps[0]
    least = -sum(length * less for length, less, _ in steps[1:])
    most = sum(length * more for length, _, more in steps[1:])
    first, last = -((most - distance) // stride), (distance - least) // stride
    return any(
        _reached(distance - k * stride, steps[1:], patience)
        for k in range(max(first, -back), min(last, forth) + 1)
    )


def leaf_names(root: str, tree: Any) -> list[str]:
    """The way to each leaf, as one would write it in Python: ``input['x'][0]``."""
    try:
        found = pytree.tree_flatten_with_path(tree)[0]
    except ValueError:  # a node type that was registered without names
        return [f"leaf {k} of {root}" for k in range(len(flatten(tree)[0]))]
    names: list[str] = []
    for path, leaf in found:
        name = root + pytree.keystr(path)
        container = None if isinstance(leaf, Tensor) else opened(leaf)
        if container is None:
            names.append(name)
        else:
            for k, value in enumerate(container.values):
                names += leaf_names(name + container.name(k), value)
    return names


def described(tensor: Tensor) -> str:
    """A tensor's dtype and shape in a few characters: ``float32[8, 3]``."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
