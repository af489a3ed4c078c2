"""Warns where a pipe would cut time: modules with ``batch_first=False``, PyTorch's default.

A pipe cuts dimension 0. A model that does not transpose before such a module computes wrong results
on micro-batches, without an error.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from syncpipe.hints import caller_stacklevel

__all__ = ["watch_time_first"]

#: Layers that do not move the batch to another dimension.
_SAFE = (nn.Linear, nn.Embedding, nn.LayerNorm, nn.Dropout, nn.Identity, nn.ReLU, nn.GELU,
            nn.SiLU, nn.Tanh, nn.Sigmoid, nn.RNNBase, nn.MultiheadAttention,
            nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)  # fmt: skip


def watch_time_first(modules: Iterable[tuple[str, nn.Module]], sizes: Sequence[int]) -> None:
    """Check the first input of each time-first module, in the first call of a pipe.

    ``modules`` are the modules of the pipe by name (layers have no dot in theirs), ``sizes`` the
    sizes of the micro-batches known so far.
    """
    frame = sys._getframe(caller_stacklevel() - 1)
    caller = frame.f_code.co_filename, frame.f_lineno  # the check runs on a worker
    certain = True  # whether the batch is still in dimension 0
    for name, module in modules:
        if name and "." not in name:
            certain = certain and isinstance(module, _SAFE)
        if isinstance(module, (nn.RNNBase, nn.MultiheadAttention)) and not module.batch_first:
            handles: list[Any] = []  # the first call removes the hook: hooks disable fast paths
            check = partial(_check, handles, name, sizes, certain, caller)
            handles.append(module.register_forward_pre_hook(check))


def _check(
    handles: list[Any],
    name: str,
    sizes: Sequence[int],
    certain: bool,
    caller: tuple[str, int],
    module: nn.Module,
    args: tuple[Any, ...],
) -> None:
    handles.pop().remove()
    given = args[0] if args else None
    if not isinstance(given, Tensor) or given.dim() != 3 or given.shape[0] not in sizes:
        return
    if given.shape[1] not in sizes or certain:  # or it may be transposed
        kind, cut = type(module).__name__, ", ".join(str(n) for n in sorted(set(sizes)) if n)
        warnings.warn_explicit(
            f"{name} is an nn.{kind} with batch_first=False, so it takes [time, batch, features], "
            f"and it is given {list(given.shape)}: dimension 0 is what the pipe cuts into "
            f"micro-batches (of {cut}). Make it nn.{kind}(..., batch_first=True) and give it "
            "[batch, time, features]; or transpose before it: x.transpose(0, 1)",
            UserWarning,
            *caller,
        )
