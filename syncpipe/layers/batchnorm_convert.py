"""A model's batch normalisations become deferred ones where they are.

Each keeps its identity, parameters, buffers and hooks, and whoever refers to it goes on doing so:
only its class changes, to a subclass that differs from it within a ``collect`` alone. So the model
that was given to a pipe still works by itself, and in pipes that do not defer.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _LazyNormBase

from syncpipe.layers.batchnorm import (
    DeferredBatchNorm,
    DeferredBatchNorm1d,
    DeferredBatchNorm2d,
    DeferredBatchNorm3d,
)

__all__ = ["defer_batch_norm"]

_DEFERRED: dict[type[nn.Module], type[DeferredBatchNorm]] = {
    nn.BatchNorm1d: DeferredBatchNorm1d,
    nn.BatchNorm2d: DeferredBatchNorm2d,
    nn.BatchNorm3d: DeferredBatchNorm3d,
}


def defer_batch_norm(module: nn.Module) -> None:
    """Makes the batch normalisations of a model deferred ones, or changes nothing.

    Layers without running statistics, and those already deferred, are left alone.

    Raises:
        TypeError: a batch normalisation that cannot be converted: `SyncBatchNorm`, a subclass, a
            scripted one, or one whose `forward` was replaced on the instance.
        ValueError: a lazy batch normalisation that has not been run yet.
    """
    plain = []
    for path, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            _check_scripted(part, path)
        elif isinstance(part, _BatchNorm) and _tracks(part):
            _check_plain(part, path)
            plain.append(part)
    for norm in plain:
        norm.__class__ = _DEFERRED[type(norm)]


def _tracks(norm: _BatchNorm) -> bool:
    """Whether it has running statistics that are yet to be deferred."""
    if isinstance(norm, DeferredBatchNorm):
        return False
    return norm.track_running_stats and norm.running_mean is not None


def _check_plain(module: _BatchNorm, path: str) -> None:
    kind = type(module)
    place = f" at '{path}'" if path else ""
    refusal = f"deferred_batch_norm cannot convert {kind.__module__}.{kind.__qualname__}{place}: "
    if isinstance(module, _LazyNormBase):
        raise ValueError(f"{refusal}it is not initialised yet; run the model once first")
    if isinstance(module, nn.SyncBatchNorm):
        raise TypeError(
            f"{refusal}statistics across processes need the plain form; "
            "use BatchNorm1d/2d/3d, or deferred_batch_norm=False"
        )
    if kind not in _DEFERRED:
        raise TypeError(
            f"{refusal}only BatchNorm1d, BatchNorm2d and BatchNorm3d themselves are understood, "
            "not subclasses or parametrized ones; convert it by hand by deriving it from "
            "syncpipe.layers.batchnorm.DeferredBatchNorm, or use deferred_batch_norm=False"
        )
    if "forward" in module.__dict__:
        raise TypeError(
            f"{refusal}its 'forward' was replaced on the instance and may be that of the plain "
            "layer; undo that before wrapping the model in the pipe, or use "
            "deferred_batch_norm=False"
        )


def _check_scripted(module: torch.jit.ScriptModule, path: str) -> None:
    kind = getattr(module, "original_name", "")
    if "BatchNorm" in kind and getattr(module, "running_mean", None) is not None:
        raise TypeError(
            f"deferred_batch_norm cannot convert the scripted {kind} at '{path}'; "
            "leave the model unscripted, or use deferred_batch_norm=False"
        )
