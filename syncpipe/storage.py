"""The tensors of modules, and the memory of tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn


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


def renorming(root: nn.Module) -> list[nn.Module]:
    """The modules that write into their weight in a forward: embeddings with ``max_norm``."""
    kinds = nn.Embedding, nn.EmbeddingBag
    return [m for m in modules_of(root) if isinstance(m, kinds) and m.max_norm is not None]


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
