"""Batch normalisation whose running statistics are updated once per mini-batch.

A pipe normalises every micro-batch with its own statistics: any other way would make micro-batches
wait for each other. The *running* statistics, which evaluation uses, are updated once per
mini-batch, from the mean and variance of all its samples (GPipe, https://arxiv.org/abs/1811.06965,
section 3). The accumulators belong to the mini-batch, not to the module, so mini-batches may
overlap, and an aborted one leaves nothing behind. Conversion is in place and changes only the
class of a layer.
"""

from __future__ import annotations

from contextvars import ContextVar, Token
from operator import itemgetter

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm, _LazyNormBase

from syncpipe.runtime.interrupts import forkable_lock
from syncpipe.runtime.streams import moved

__all__ = [
    "ORIGINAL", "DeferredBatchNorm", "DeferredBatchNorm1d", "DeferredBatchNorm2d",
    "DeferredBatchNorm3d", "MiniBatchStatistics", "collect", "defer_batch_norm",
]  # fmt: skip


#: Micro-batch index, values per channel, mean and biased variance per channel (at least float32).
_Moments = tuple[int, int, Tensor, Tensor]
# A commit reads, changes and writes running statistics: two commits must not interleave.
_commit_lock = forkable_lock()


class MiniBatchStatistics:
    """The accumulators of one mini-batch, one for each `DeferredBatchNorm`.

    `add` is thread-safe. A module that runs several times per micro-batch pools all its inputs. On
    an accelerator each replica of a stage adds on its own stream. The caller waits for all of
    these streams before `commit`.
    """

    def __init__(self) -> None:
        self._seen: dict[DeferredBatchNorm, list[_Moments]] = {}

    @torch.no_grad()
    def add(self, module: DeferredBatchNorm, input: Tensor, i: int = 0) -> None:
        """Add the statistics of a module's input for micro-batch `i`, `(N, C, *)`; N may be 0.

        Micro-batches may arrive in any order: they are pooled in the order of their indices.
        """
        if input.numel() == 0:
            return
        # A micro-batch costs one reduction; commit() does the rest once.
        values = input.to(torch.promote_types(input.dtype, torch.float32))
        var, mean = torch.var_mean(values, dim=[0, *range(2, input.dim())], correction=0)
        moments = i, input.numel() // input.size(1), mean, var
        self._seen.setdefault(module, []).append(moments)

    @torch.no_grad()
    def commit(self) -> None:
        """Update the running statistics of every module once, and reset the accumulators.

        Raises:
            ValueError: a module saw a single value per channel in the whole mini-batch, which has
                no unbiased variance. No running statistics are changed.
        """
        seen, self._seen = self._seen, {}
        pooled = [(module, *_pool(module, moments)) for module, moments in seen.items()]
        with _commit_lock:
            for module, mean, var in pooled:
                module._update_running_stats(mean, var)


def _pool(module: DeferredBatchNorm, parts: list[_Moments]) -> tuple[Tensor, Tensor]:
    """Mean and unbiased variance of all micro-batches together.

    The sum of the mean of variances and the variance of means avoids cancellation.
    """
    _, counts, means, variances = zip(*sorted(parts, key=itemgetter(0)), strict=True)
    total = sum(counts)
    if total < 2:
        raise ValueError(
            "the running variance needs more than 1 value per channel in a mini-batch, but got "
            f"{total}; use a larger mini-batch or put the layer in eval mode"
        )
    running = module.running_mean
    device = means[0].device if running is None else running.device
    shares = moved(torch.tensor([[n / total] for n in counts], dtype=means[0].dtype), device)
    means_of, vars_of = (torch.stack([moved(t, device) for t in ts]) for ts in (means, variances))
    mean = (shares * means_of).sum(0)
    biased = (shares * (vars_of + (means_of - mean).square())).sum(0)
    return mean, biased * (total / (total - 1))


class collect:
    """Context in which the deferred layers of this thread add statistics of micro-batch `i`.

    With `stats=None`, for recomputation, training forwards neither accumulate statistics nor
    update running ones.
    """

    __slots__ = ("_token", "i", "stats")
    _token: Token[collect | None]

    def __init__(self, stats: MiniBatchStatistics | None, i: int = 0) -> None:
        self.stats, self.i = stats, i

    def __enter__(self) -> None:
        self._token = _scope.set(self)

    def __exit__(self, *exc_info: object) -> None:
        _scope.reset(self._token)


_scope: ContextVar[collect | None] = ContextVar("syncpipe_batch_norm_scope", default=None)
#: Attribute in which the substitute of a module (in a cell or a replica) keeps the original.
ORIGINAL = "_syncpipe_original"


class DeferredBatchNorm(_BatchNorm):
    """Batch normalisation that inside a `collect` adds its statistics to a mini-batch.

    Outside any `collect`, and in eval mode, it does what `torch.nn.BatchNorm1d`, `2d` and `3d` do.
    Parameters, buffers and `state_dict` keys are the same as theirs.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Normalise `input`, `(N, C, *)`, by its own (training) or the running statistics."""
        scope = _scope.get()
        tracks = self.training and self.track_running_stats and self.running_mean is not None
        if scope is None or not tracks:
            return super().forward(input)
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        output = F.batch_norm(input, None, None, self.weight, self.bias, True, 0.0, self.eps)
        if scope.stats is not None:
            original: DeferredBatchNorm = self.__dict__.get(ORIGINAL, self)
            scope.stats.add(original, input, scope.i)
        return output

    def _update_running_stats(self, mean: Tensor, var: Tensor) -> None:
        weight: float | Tensor | None = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if weight is None:  # a cumulative average; a tensor avoids waiting for the device
                weight = self.num_batches_tracked.to(mean.dtype).reciprocal()
        if weight is None:
            return  # no counter of mini-batches: the plain layer updates nothing either
        for running, new in ((self.running_mean, mean), (self.running_var, var)):
            if running is not None:  # in place: the user's own module shares the tensor
                dtype = torch.promote_types(running.dtype, new.dtype)
                step = weight.to(dtype) if isinstance(weight, Tensor) else weight
                running.copy_(torch.lerp(running.to(dtype), new.to(dtype), step))


class DeferredBatchNorm1d(DeferredBatchNorm, nn.BatchNorm1d):
    """`torch.nn.BatchNorm1d`, deferred."""


class DeferredBatchNorm2d(DeferredBatchNorm, nn.BatchNorm2d):
    """`torch.nn.BatchNorm2d`, deferred."""


class DeferredBatchNorm3d(DeferredBatchNorm, nn.BatchNorm3d):
    """`torch.nn.BatchNorm3d`, deferred."""


_DEFERRED: dict[type[nn.Module], type[DeferredBatchNorm]] = {
    kind.__bases__[1]: kind
    for kind in (DeferredBatchNorm1d, DeferredBatchNorm2d, DeferredBatchNorm3d)
}


def defer_batch_norm(module: nn.Module) -> bool:
    """Make all batch normalisations of a model deferred; returns whether it changed any.

    Skips layers without running statistics and deferred ones. Changes nothing if it raises.
    """
    plain = []
    for path, part in module.named_modules():
        scripted = "BatchNorm" in getattr(part, "original_name", "")
        if isinstance(part, DeferredBatchNorm) or not (isinstance(part, _BatchNorm) or scripted):
            continue
        # A scripted module has only the buffers.
        if getattr(part, "track_running_stats", True) and (
            getattr(part, "running_mean", None) is not None
        ):
            if why := _obstacle(part):
                kind = type(part)
                error = ValueError if isinstance(part, _LazyNormBase) else TypeError
                raise error(
                    f"deferred_batch_norm cannot convert {kind.__module__}.{kind.__qualname__}"
                    f"{f' at {path!r}' if path else ''}: {why}, or use deferred_batch_norm=False"
                )
            plain.append(part)
    for norm in plain:
        norm.__class__ = _DEFERRED[type(norm)]
    if plain and any("_orig_mod" in part._modules for part in module.modules()):
        torch.compiler.reset()  # PyTorch 2.11 would run the code compiled for the plain layers
    return bool(plain)


def _obstacle(norm: nn.Module) -> str:
    """The reason why a batch normalisation cannot be converted, with the way out."""
    if isinstance(norm, _LazyNormBase):
        return "it is not initialised yet; run the model once first"
    if isinstance(norm, torch.jit.ScriptModule):
        return "it is scripted; leave the model unscripted"
    if isinstance(norm, nn.SyncBatchNorm):
        return "statistics across processes need the plain form; use BatchNorm1d/2d/3d"
    if type(norm) not in _DEFERRED:
        return (
            "only BatchNorm1d, BatchNorm2d and BatchNorm3d themselves are understood, not "
            "subclasses or parametrized ones; derive it from "
            "syncpipe.layers.batchnorm.DeferredBatchNorm by hand"
        )
    if "forward" in norm.__dict__:
        return (
            "its 'forward' was replaced on the instance and may be that of the plain layer; undo "
            "that before wrapping the model in the pipe"
        )
    return ""
