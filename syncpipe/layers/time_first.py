"""Warns where a pipe would cut time: modules with ``batch_first=False``, PyTorch's default.

A pipe cuts dimension 0. A model that transposes before such a module is right, and one that does
not computes something else in micro-batches, without an error.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

__all__ = ["is_time_first", "time_first_message", "watch_time_first"]

_LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
#: Layers that leave the batch in the dimension where it is.
_KEEP_IT = (nn.Linear, nn.Embedding, nn.LayerNorm, nn.Dropout, nn.Identity, nn.ReLU, nn.GELU,
            nn.SiLU, nn.Tanh, nn.Sigmoid, nn.RNNBase, nn.MultiheadAttention, *_LAYERS)  # fmt: skip


def watch_time_first(modules: Iterable[tuple[str, nn.Module]], sizes: Sequence[int]) -> None:
    """Looks at what each time-first module is given first; for the first call of a pipe.

    ``modules`` are those of the pipe with their names, its layers without a dot; ``sizes`` those of
    the micro-batches, at least of those that have come to light.
    """
    certain = True  # whether layers are given the batch in the dimension of the input
    for name, module in modules:
        if name and "." not in name:
            certain = certain and isinstance(module, _KEEP_IT)
        if _takes_time(module):
            handles: list[Any] = []
            look = partial(_look, handles, name, sizes, certain)
            handles.append(
                module.register_forward_pre_hook(look)
            )  # once, so fast ways are not lost


def _look(
    handles: list[Any],
    name: str,
    sizes: Sequence[int],
    certain: bool,
    module: nn.Module,
    args: tuple[Any, ...],
) -> None:
    handles.pop().remove()
    given = args[0] if args else None
    if not isinstance(given, Tensor) or given.dim() != 3 or given.shape[0] not in sizes:
        return
    if given.shape[1] not in sizes or certain:  # or it may be transposed
        shown = ", ".join(str(size) for size in sorted(set(sizes)) if size)
        why = f"dimension 0 is what the pipe cuts into micro-batches (of {shown})"
        warnings.warn(time_first_message(name, module, given, why), stacklevel=2)


def is_time_first(module: nn.Module) -> bool:
    """Whether a module of PyTorch's takes time in dimension 0."""
    return _takes_time(module.self_attn if isinstance(module, _LAYERS) else module)


def _takes_time(module: nn.Module) -> bool:
    return isinstance(module, (nn.RNNBase, nn.MultiheadAttention)) and not module.batch_first


def time_first_message(name: str, module: nn.Module, given: Tensor, why: str) -> str:
    """What to say of a module that takes time in dimension 0, and is given the batch there."""
    kind = type(module).__name__
    return (
        f"{name} is an nn.{kind} with batch_first=False, so it takes [time, batch, features], and "
        f"it is given {list(given.shape)}: {why}. Make it nn.{kind}(..., batch_first=True) and "
        "give it [batch, time, features]; or transpose before it: x.transpose(0, 1)"
    )
