"""Batch normalisation whose running statistics see whole mini-batches.

In a pipe every micro-batch is normalised with its own statistics; nothing else is possible without
making the micro-batches wait for each other. The *running* statistics, which evaluation uses, have
no such excuse: left alone they would be moved once per micro-batch, by small and noisy samples.
Here they move once per mini-batch, by the mean and variance of all its samples
(GPipe, https://arxiv.org/abs/1811.06965, section 3)::

    micro-batch 0 --> DeferredBatchNorm --> ...      normalised with its own mean and variance
    micro-batch 1 --> DeferredBatchNorm --> ...
                              |  add
                              v
                     MiniBatchStatistics  -- commit --> running_mean, running_var (once)

The accumulators belong to the mini-batch, never to the module, so that mini-batches may overlap,
an abandoned one leaves no trace and `state_dict` has the keys that it always had.
"""

from __future__ import annotations

import copy
import functools
import os
import threading
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable
from contextvars import ContextVar, Token
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm, _LazyNormBase

__all__ = [
    "DeferredBatchNorm",
    "DeferredBatchNorm1d",
    "DeferredBatchNorm2d",
    "DeferredBatchNorm3d",
    "MiniBatchStatistics",
    "collect",
    "defer_batch_norm",
]


# -- accumulating ---------------------------------------------------------------------------------


class _Moments(NamedTuple):
    """Per-channel statistics of one micro-batch, in at least single precision."""

    values: int  # per channel
    mean: Tensor
    var: Tensor  # biased


# Running statistics are read, changed and written back: two commits must not interleave.
_commit_lock = threading.Lock()


def _renew_commit_lock() -> None:
    global _commit_lock
    _commit_lock = threading.Lock()


if hasattr(os, "register_at_fork"):  # the child must not inherit a lock that nobody will release
    os.register_at_fork(after_in_child=_renew_commit_lock)


class MiniBatchStatistics:
    """The accumulators of one mini-batch, one for each `DeferredBatchNorm` that it passes.

    Micro-batches of one mini-batch may add from several threads. A module that runs several times
    per micro-batch pools all its inputs, and still counts one mini-batch.

    On an accelerator, `commit` works on the current streams; these must already wait for the
    streams on which the micro-batches were added.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: dict[DeferredBatchNorm, list[_Moments]] = {}

    @torch.no_grad()
    def add(self, module: DeferredBatchNorm, input: Tensor) -> None:
        """Take in one micro-batch.

        Args:
            module: the layer whose running statistics are meant.
            input: what it was given, `(N, C, *)`. An empty one contributes nothing.
        """
        if input.numel() == 0:
            return
        # One reduction is all that a micro-batch pays; the rest is done once, in commit().
        values = input.to(torch.promote_types(input.dtype, torch.float32))
        var, mean = torch.var_mean(values, dim=[0, *range(2, input.dim())], correction=0)
        moments = _Moments(input.numel() // input.size(1), mean, var)
        with self._lock:
            self._seen.setdefault(module, []).append(moments)

    @torch.no_grad()
    def commit(self) -> None:
        """Move the running statistics of every module seen, once, and forget the mini-batch.

        Raises:
            ValueError: a module saw a single value per channel in the whole mini-batch, which has
                no unbiased variance. No running statistics have been changed then.
        """
        with self._lock:
            seen, self._seen = self._seen, {}
        pooled = [(module, *_pool(moments)) for module, moments in seen.items()]
        with _commit_lock:
            for module, mean, var in pooled:
                module._move_running_stats(mean, var)


def _pool(parts: list[_Moments]) -> tuple[Tensor, Tensor]:
    """Mean and unbiased variance of all micro-batches together.

    The parallel formula of Chan, Golub and LeVeque (1979) for any number of parts at a time. All
    means are taken relative to the first, so that nothing cancels when they are large.
    """
    total = sum(part.values for part in parts)
    if total < 2:
        raise ValueError(
            "the running variance needs more than 1 value per channel in a mini-batch, but got "
            f"{total}; use a larger mini-batch or put the layer in eval mode"
        )
    for part in parts:
        _keep_for_current_stream(part.mean)
        _keep_for_current_stream(part.var)

    means, variances = torch.stack([p.mean for p in parts]), torch.stack([p.var for p in parts])
    shares = torch.tensor([[p.values / total] for p in parts], dtype=means.dtype)
    shares = shares.to(means.device, non_blocking=True)

    offsets = means - means[0]
    offset = (shares * offsets).sum(0)
    biased = (shares * (variances + (offsets - offset).square())).sum(0)
    return means[0] + offset, biased * (total / (total - 1))


def _keep_for_current_stream(tensor: Tensor) -> None:
    """Keep the memory of `tensor`, made on a worker's stream, until this stream is done too."""
    if tensor.device.type in ("cuda", "xpu"):
        tensor.record_stream(torch.accelerator.current_stream(tensor.device))


# -- who collects ---------------------------------------------------------------------------------


class collect:
    """Within this context, deferred layers leave their statistics to `stats`.

    It holds for the thread that enters it, and may be entered as often as there are micro-batches.

    Args:
        stats: the accumulators of the mini-batch at hand. With `None` training forwards neither
            accumulate nor touch running statistics, which is what recomputation asks for.
    """

    __slots__ = ("_token", "stats")

    def __init__(self, stats: MiniBatchStatistics | None) -> None:
        self.stats = stats
        self._token: Token[collect | None] | None = None

    def __enter__(self) -> None:
        if self._token is not None:
            raise RuntimeError("this collect(...) is already entered; make one for each `with`")
        self._token = _scope.set(self)

    def __exit__(self, *exc_info: object) -> None:
        token, self._token = self._token, None
        if token is not None:
            _scope.reset(token)


_scope: ContextVar[collect | None] = ContextVar("syncpipe_batch_norm_scope", default=None)


# -- the layers -----------------------------------------------------------------------------------


class DeferredBatchNorm(_BatchNorm):
    """A batch normalisation that leaves its running statistics to the `collect` it runs in.

    Outside of any `collect`, and in eval mode, it is the ordinary one. Parameters, buffers and
    `state_dict` keys are those of `torch.nn.BatchNorm1d`, `2d` and `3d`.
    """

    @classmethod
    def from_plain(cls, bn: nn.Module) -> DeferredBatchNorm:
        """A deferred layer with the parameters, buffers and hooks of `bn`, which stays as it is.

        Raises:
            TypeError: `bn` is not exactly a `BatchNorm1d`, `BatchNorm2d` or `BatchNorm3d`.
            ValueError: `bn` is lazy and has not been run yet.
        """
        _check_plain(bn, "")
        deferred = _DEFERRED[type(bn)].__new__(_DEFERRED[type(bn)])
        _fill(deferred, bn, {bn: deferred})
        return deferred

    def forward(self, input: Tensor) -> Tensor:
        """Normalise `input`, `(N, C, *)`, by its own (training) or the running statistics."""
        scope = _scope.get()
        tracks = self.training and self.track_running_stats and self.running_mean is not None
        if scope is None or not tracks:
            return super().forward(input)
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        output = F.batch_norm(input, None, None, self.weight, self.bias, True, 0.0, self.eps)
        if scope.stats is not None:
            scope.stats.add(self, input)
        return output

    def _move_running_stats(self, mean: Tensor, var: Tensor) -> None:
        weight: float | Tensor | None = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if weight is None:  # a cumulative average; as a tensor, so that no device is waited for
                weight = self.num_batches_tracked.to(mean.dtype).reciprocal()
        if weight is None:
            return  # nothing counts the mini-batches: the plain layer does not move either
        for running, new in ((self.running_mean, mean), (self.running_var, var)):
            if running is not None:  # in place: the user's own module holds the same tensor
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
    nn.BatchNorm1d: DeferredBatchNorm1d,
    nn.BatchNorm2d: DeferredBatchNorm2d,
    nn.BatchNorm3d: DeferredBatchNorm3d,
}


# -- converting a model ---------------------------------------------------------------------------


def defer_batch_norm(module: nn.Module) -> nn.Module:
    """The same model with its batch normalisations deferred.

    `module` itself is left as it is. What holds no batch normalisation is returned as the very
    same object; what does is replaced by a shallow clone, and all parameters and buffers are
    shared, so that training the result trains `module`. Convert after moving to devices:
    `Module.to` gives a clone buffers of its own.

    Layers without running statistics, and those already deferred, are left alone.

    Raises:
        TypeError: a batch normalisation of a class that cannot be converted (`SyncBatchNorm`,
            subclasses), or a compiled or patched module that would go on running the original.
        ValueError: a lazy batch normalisation that has not been run yet.
    """
    paths = {part: path for path, part in module.named_modules()}
    for part, path in paths.items():
        if _tracks(part):
            _check_plain(part, path)
        _check_not_scripted(part, path)

    # Whatever refers to a replaced module, be it a parent, a list of layers in a plain attribute
    # or a hook, has to refer to the replacement: so it is replaced itself.
    users: dict[nn.Module, list[nn.Module]] = {part: [] for part in paths}
    for part in paths:
        for used in _references(part):
            if used in users:
                users[used].append(part)
    replaced = dict.fromkeys(part for part in paths if _tracks(part))
    todo = list(replaced)
    while todo:
        for user in users[todo.pop()]:
            if user not in replaced:
                replaced[user] = None
                todo.append(user)

    for part in replaced:
        _check_not_bound(part, paths[part])
    clones = {part: _shell(part) for part in replaced}
    for part in replaced:
        _fill(clones[part], part, clones)
    return clones.get(module, module)


def _tracks(module: nn.Module) -> bool:
    """Whether `module` is a batch normalisation that has yet to be deferred."""
    return (
        isinstance(module, _BatchNorm)
        and not isinstance(module, DeferredBatchNorm)
        and module.track_running_stats
        and module.running_mean is not None
    )


def _named(module: nn.Module, path: str) -> str:
    kind = type(module)
    place = f" at '{path}'" if path else ""
    return f"{kind.__module__}.{kind.__qualname__}{place}"


def _check_plain(module: nn.Module, path: str) -> None:
    if type(module) in _DEFERRED:
        return _check_not_bound(module, path)
    name = f"deferred_batch_norm cannot convert {_named(module, path)}: "
    if isinstance(module, _LazyNormBase):
        raise ValueError(f"{name}it is not initialised yet; run the model once first")
    if isinstance(module, nn.SyncBatchNorm):
        raise TypeError(
            f"{name}statistics across processes need the plain form; "
            "use BatchNorm1d/2d/3d, or deferred_batch_norm=False"
        )
    raise TypeError(
        f"{name}only BatchNorm1d, BatchNorm2d and BatchNorm3d themselves are understood, not "
        "subclasses or parametrized ones; convert it by hand by deriving it from "
        "syncpipe.batchnorm.DeferredBatchNorm, or use deferred_batch_norm=False"
    )


def _check_not_bound(module: nn.Module, path: str) -> None:
    """Refuse what would run the original module from inside its clone."""
    if module._compiled_call_impl is not None or "_orig_mod" in module._modules:
        raise TypeError(
            f"deferred_batch_norm cannot convert {_named(module, path)}: it is compiled around a "
            "batch normalisation; wrap the model in the pipe first and compile its layers after, "
            "or use deferred_batch_norm=False"
        )
    if "forward" in module.__dict__:
        raise TypeError(
            f"deferred_batch_norm cannot convert {_named(module, path)}: its 'forward' was "
            "replaced on the instance and may be bound to the original; undo that before "
            "wrapping the model in the pipe, or use deferred_batch_norm=False"
        )


def _check_not_scripted(module: nn.Module, path: str) -> None:
    if isinstance(module, torch.jit.ScriptModule):
        kind = getattr(module, "original_name", "")
        if "BatchNorm" in kind and getattr(module, "running_mean", None) is not None:
            raise TypeError(
                f"deferred_batch_norm cannot convert the scripted {kind} at '{path}'; "
                "leave the model unscripted, or use deferred_batch_norm=False"
            )


# Where nn.Module registers things: parameters, buffers, children, hooks of all kinds.
_REGISTRIES = frozenset(k for k, v in nn.Module().__dict__.items() if isinstance(v, (dict, set)))


def _shell(module: nn.Module) -> nn.Module:
    """An empty object of the class that replaces that of `module`."""
    kind: type[nn.Module] = _DEFERRED.get(type(module), type(module))
    return kind.__new__(kind)


def _fill(clone: nn.Module, module: nn.Module, clones: dict[nn.Module, nn.Module]) -> None:
    """Give `clone` the attributes of `module`, referring to `clones` where there are any."""
    for name, value in module.__dict__.items():
        rebound = _rebound(value, lambda part: clones.get(part, part))
        if name in _REGISTRIES and rebound is value:
            rebound = value.copy()
        clone.__dict__[name] = rebound


def _references(module: nn.Module) -> list[nn.Module]:
    """The modules that `module` refers to, in whatever attribute."""
    found: list[nn.Module] = []

    def note(part: nn.Module) -> nn.Module:
        found.append(part)
        return part

    _rebound(module.__dict__, note)
    return found


def _rebound(
    value: Any, swap: Callable[[nn.Module], nn.Module], above: tuple[object, ...] = ()
) -> Any:
    """`value` with `swap` applied to each module in it; itself if that changes nothing.

    Looks into plain containers, bound methods, partials and weak references. `above` are the
    containers on the way to `value`: one that holds itself is not entered again.
    """
    if isinstance(value, nn.Module):
        return swap(value)
    if any(value is outer for outer in above):
        return value

    def again(part: Any) -> Any:
        return _rebound(part, swap, (*above, value))

    kind = type(value)
    if kind is dict or kind is OrderedDict:
        items = [(again(k), again(v)) for k, v in value.items()]
        same = all(k is a and v is b for (k, v), (a, b) in zip(value.items(), items, strict=True))
        return value if same else kind(items)
    if kind in (list, tuple, set, frozenset):
        parts = [again(part) for part in value]
        same = all(old is new for old, new in zip(value, parts, strict=True))
        return value if same else kind(parts)
    if kind is types.MethodType:
        owner = again(value.__self__)
        return value if owner is value.__self__ else types.MethodType(value.__func__, owner)
    if kind is functools.partial:
        old = (value.func, value.args, value.keywords)
        func, args, keywords = new = tuple(again(part) for part in old)
        same = all(a is b for a, b in zip(old, new, strict=True))
        return value if same else functools.partial(func, *args, **keywords)
    if kind is weakref.ref:
        target = value()
        new = again(target) if isinstance(target, nn.Module) else target
        return value if new is target else weakref.ref(new)
    if kind is _WrappedHook:
        state = again(value.__dict__)
        if state is value.__dict__:
            return value
        hook = copy.copy(value)
        hook.__dict__.update(state)
        return hook
    return value


# A hook that is handed its module (load_state_dict pre-hooks) keeps a weak reference to it.
_WrappedHook = getattr(nn.modules.module, "_WrappedHook", None)
