"""Lets ``meta`` store for backward what an accelerator would, where PyTorch has other operators.

On ``meta`` attention takes the way of plain matrix products, and stores ``T x T`` numbers for each
head. A GPU has fused kernels, which store their output and a number for each row (FlashAttention,
Dao et al. 2022). Likewise its dropout stores a byte for each number and not four, and its RMSNorm
no intermediate results. Fake tensors of a GPU would say so, but only builds of PyTorch for that GPU
can have them; in others autograd aborts the process. So while :func:`as_on_gpu` is in force in a
thread, these operators on ``meta`` call the fused ones themselves, of which ``meta`` knows the
shapes::

    query, key, value -> output, logsumexp       stored: all five, nothing of T x T
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["as_on_gpu"]

_active: ContextVar[bool] = ContextVar("as_on_gpu", default=False)
_aten: Any = torch.ops.aten
_library: Any = torch.library
_cuda: Any = torch.backends.cuda
_COMPOSITE: Any = torch._C.DispatchKey.CompositeImplicitAutograd

_HALF = (torch.float16, torch.bfloat16)
#: The largest head of FlashAttention; its rows, and those of a mask, are padded to a multiple.
_FLASH_HEAD, _ROW, _MASK_ROW = 256, 8, 16


@contextmanager
def as_on_gpu() -> Iterator[None]:
    """Operators on ``meta`` store what they would on a GPU, in this context."""
    _register()
    token = _active.set(True)
    try:
        yield
    finally:
        _active.reset(token)


@lru_cache(maxsize=1)
def _register() -> Any:
    """For as long as the process lives; without :func:`as_on_gpu` nothing is different."""
    library = _library.Library("aten", "IMPL")
    for name, function in (
        ("scaled_dot_product_attention", _attention),
        ("dropout", _dropout),
        ("rms_norm", _rms_norm),
    ):
        library.impl(name, function, "AutogradMeta")
    return library


def _plain(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """What an operator does on ``meta`` without us: it is made of others."""
    return operator.default._op_dk(_COMPOSITE, *args, **kwargs)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    def plain() -> Any:
        return _plain(
            _aten.scaled_dot_product_attention,
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa,
        )  # fmt: skip

    shapes = [tensor.shape for tensor in (query, key, value)]
    if not _active.get() or any(len(shape) != 4 for shape in shapes) or 0 in query.shape:
        return plain()
    head = shapes[0][3]
    grouped = shapes[0][1] != shapes[1][1]
    if (
        attn_mask is None
        and query.dtype in _HALF
        and head == shapes[2][3] <= _FLASH_HEAD
        and _cuda.flash_sdp_enabled()
    ):
        rest = -head % _ROW
        padded = [F.pad(tensor, (0, rest)) if rest else tensor for tensor in (query, key, value)]
        scale = head**-0.5 if scale is None else scale
        found = _aten._scaled_dot_product_flash_attention(
            *padded, dropout_p, is_causal, scale=scale
        )
        return found[0][..., :head]
    aligned = all(shape[3] % (4 if query.dtype == torch.float32 else _ROW) == 0 for shape in shapes)
    if (
        aligned
        and not grouped
        and query.dtype in (*_HALF, torch.float32)
        and _cuda.mem_efficient_sdp_enabled()
    ):
        bias = None if attn_mask is None else _bias(attn_mask, query, key)
        stores = any(tensor.requires_grad for tensor in (query, key, value))
        return _aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, stores, dropout_p, is_causal, scale=scale
        )[0]
    return plain()


def _bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """A mask as the fused kernel wants it: numbers, rows padded, one for each head."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, -torch.inf)
    rest = -mask.shape[-1] % _MASK_ROW
    if rest:
        mask = F.pad(mask, (0, rest))[..., : mask.shape[-1]]
    return mask.expand(*query.shape[:2], query.shape[2], key.shape[2])


def _dropout(input: Tensor, p: float, train: bool) -> Any:
    if _active.get() and train and 0 < p < 1:
        return _aten.native_dropout(input, p, train)[0]
    return _plain(_aten.dropout, input, p, train)


def _rms_norm(
    input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Any:
    if _active.get():
        return _rms_norm_of(input, len(normalized_shape), weight)
    return _plain(_aten.rms_norm, input, normalized_shape, weight, eps)


class _RMSNorm(torch.autograd.Function):
    """Reads, writes and stores as much as the fused kernel; there are no values to be right."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, dims: int, weight: Tensor | None) -> Tensor:
        rows = input.shape[: input.dim() - dims]
        scales = input.new_empty([*rows, *[1] * dims], dtype=torch.float32)
        ctx.save_for_backward(input, weight, scales)
        return input.clone() if weight is None else input * weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        input, weight, scales = ctx.saved_tensors
        grad = grads[0] * input
        rows = list(range(scales.dim() - (0 if weight is None else weight.dim())))
        summed = None if weight is None else (grad.sum(rows) if rows else grad)
        return grad, None, summed


_rms_norm_of: Any = _RMSNorm.apply
