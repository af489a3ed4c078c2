"""Warns where a pipe would cut time: modules with ``batch_first=False``, PyTorch's default.

A pipe cuts dimension 0. A model that transposes before such a module is right, and one that does
not computes something else in micro-batches, without an error.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from syncpipe.data import tensors_in

__all__ = ["is_time_first", "time_first_message", "watch_time_first"]

_LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
#: Layers that leave the batch in the dimension where it is.
_KEEP_IT = (nn.Linear, nn.Embedding, nn.LayerNorm, nn.Dropout, nn.Identity, nn.ReLU, nn.GELU,
            nn.SiLU, nn.Tanh, nn.Sigmoid, nn.RNNBase, nn.MultiheadAttention, *_LAYERS)  # fmt: skip


def watch_time_first(modules: Iterable[tuple[str, nn.Module]], input: Any, chunks: int) -> bool:
    """Looks at what each time-first module is given first; for the first call of a pipe.

    Args:
        modules: of the pipe, with their names; its layers are those without a dot.
        input: the mini-batch; None if it comes later.
        chunks: into how many micro-batches it is cut, at most.

    Returns:
        Whether there is nothing more to look at in later calls.
    """
    named = list(modules)
    found = [(name, module) for name, module in named if _takes_time(module)]
    cut = [tensor for tensor in tensors_in(input) if tensor.dim()] if found else []
    sizes = {len(piece) for tensor in cut for piece in tensor.chunk(chunks)}
    certain: set[str] = set()  # layers that are given the batch in the dimension of the input
    for name, module in named:
        if name and "." not in name:
            if not isinstance(module, _KEEP_IT):
                break
            certain.add(name)
    for name, module in found if sizes else ():
        watch = _Watch(name, sizes, name.partition(".")[0] in certain)
        watch.handle = module.register_forward_pre_hook(watch)
    return bool(sizes) or not found


def is_time_first(module: nn.Module) -> bool:
    """Whether a module of PyTorch's takes time in dimension 0."""
    return _takes_time(module.self_attn if isinstance(module, _LAYERS) else module)


def _takes_time(module: nn.Module) -> bool:
    return isinstance(module, (nn.RNNBase, nn.MultiheadAttention)) and not module.batch_first


class _Watch:
    """A hook for one call of a module. (None of these modules has a fast path without hooks.)"""

    handle: Any = None

    def __init__(self, name: str, sizes: set[int], certain: bool) -> None:
        self.name, self.sizes, self.certain = name, sizes, certain

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self.handle.remove()
        given = args[0] if args and isinstance(args[0], Tensor) else None
        if given is None or given.dim() != 3:
            return
        other = given.shape[1] not in self.sizes or self.certain  # or it may be transposed
        if given.shape[0] in self.sizes and other:
            sizes = ", ".join(map(str, sorted(self.sizes)))
            why = f"dimension 0 is what the pipe cuts into micro-batches (of {sizes})"
            warnings.warn(time_first_message(self.name, module, given, why), stacklevel=2)


def time_first_message(name: str, module: nn.Module, given: Tensor, why: str) -> str:
    """What to say of a module that takes time in dimension 0, and is given the batch there."""
    kind = type(module).__name__
    return (
        f"{name} is an nn.{kind} with batch_first=False, so it takes [time, batch, features], and "
        f"it is given {list(given.shape)}: {why}. Make it nn.{kind}(..., batch_first=True) and "
        "give it [batch, time, features]; or transpose before it: x.transpose(0, 1)"
    )
