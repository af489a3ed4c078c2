"""A model with its batch normalisations deferred, made from one with plain ones.

    model                            defer_batch_norm(model)
      block                            block'               shallow clone: it holds one
        Conv2d       <-- same object --  Conv2d
        BatchNorm2d                      DeferredBatchNorm2d  same parameters, buffers, hooks
      Linear         <-- same object --  Linear

The original is never changed, and both sides share every parameter and buffer.
"""

from __future__ import annotations

import copy
import functools
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _LazyNormBase

from syncpipe.layers.batchnorm import (
    DeferredBatchNorm,
    DeferredBatchNorm1d,
    DeferredBatchNorm2d,
    DeferredBatchNorm3d,
)

__all__ = ["defer_batch_norm", "from_plain"]

_DEFERRED: dict[type[nn.Module], type[DeferredBatchNorm]] = {
    nn.BatchNorm1d: DeferredBatchNorm1d,
    nn.BatchNorm2d: DeferredBatchNorm2d,
    nn.BatchNorm3d: DeferredBatchNorm3d,
}


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
    used = {part: set(_modules_in(part.__dict__)) for part in paths}
    replaced = {part for part in paths if _tracks(part)}
    while more := {p for p in paths if p not in replaced and not used[p].isdisjoint(replaced)}:
        replaced |= more
    return _cloned({p: path for p, path in paths.items() if p in replaced}).get(module, module)


def from_plain(bn: nn.Module) -> DeferredBatchNorm:
    """A deferred layer with the parameters, buffers and hooks of `bn`, which stays as it is.

    Raises:
        TypeError: `bn` is not exactly a `BatchNorm1d`, `BatchNorm2d` or `BatchNorm3d`, or it is
            compiled or patched.
        ValueError: `bn` is lazy and has not been run yet.
    """
    _check_plain(bn, "")
    deferred = _cloned({bn: ""})[bn]
    assert isinstance(deferred, DeferredBatchNorm)
    return deferred


def _tracks(module: nn.Module) -> bool:
    """Whether `module` is a batch normalisation that has yet to be deferred."""
    return (
        isinstance(module, _BatchNorm)
        and not isinstance(module, DeferredBatchNorm)
        and module.track_running_stats
        and module.running_mean is not None
    )


# -- refusals -------------------------------------------------------------------------------------


def _refusal(module: nn.Module, path: str) -> str:
    """How each message about `module` begins."""
    kind = type(module)
    place = f" at '{path}'" if path else ""
    return f"deferred_batch_norm cannot convert {kind.__module__}.{kind.__qualname__}{place}: "


def _check_plain(module: nn.Module, path: str) -> None:
    if type(module) in _DEFERRED:
        return
    refusal = _refusal(module, path)
    if isinstance(module, _LazyNormBase):
        raise ValueError(f"{refusal}it is not initialised yet; run the model once first")
    if isinstance(module, nn.SyncBatchNorm):
        raise TypeError(
            f"{refusal}statistics across processes need the plain form; "
            "use BatchNorm1d/2d/3d, or deferred_batch_norm=False"
        )
    raise TypeError(
        f"{refusal}only BatchNorm1d, BatchNorm2d and BatchNorm3d themselves are understood, not "
        "subclasses or parametrized ones; convert it by hand by deriving it from "
        "syncpipe.layers.batchnorm.DeferredBatchNorm, or use deferred_batch_norm=False"
    )


def _check_not_bound(module: nn.Module, path: str) -> None:
    """Refuse what would run the original module from inside its clone."""
    if module._compiled_call_impl is not None or "_orig_mod" in module._modules:
        raise TypeError(
            f"{_refusal(module, path)}it is compiled around a batch normalisation; wrap the model "
            "in the pipe first and compile its layers after, or use deferred_batch_norm=False"
        )
    if "forward" in module.__dict__:
        raise TypeError(
            f"{_refusal(module, path)}its 'forward' was replaced on the instance and may be bound "
            "to the original; undo that before wrapping the model in the pipe, or use "
            "deferred_batch_norm=False"
        )


def _check_not_scripted(module: nn.Module, path: str) -> None:
    if isinstance(module, torch.jit.ScriptModule):
        kind = getattr(module, "original_name", "")
        if "BatchNorm" in kind and getattr(module, "running_mean", None) is not None:
            raise TypeError(
                f"deferred_batch_norm cannot convert the scripted {kind} at '{path}'; "
                "leave the model unscripted, or use deferred_batch_norm=False"
            )


# -- cloning --------------------------------------------------------------------------------------

# Where nn.Module registers things: parameters, buffers, children, hooks of all kinds.
_REGISTRIES = frozenset(k for k, v in nn.Module().__dict__.items() if isinstance(v, (dict, set)))


def _cloned(paths: dict[nn.Module, str]) -> dict[nn.Module, nn.Module]:
    """A shallow clone, deferred if need be, of each module of `paths`; they refer to each other."""
    clones: dict[nn.Module, nn.Module] = {}
    for module, path in paths.items():
        _check_not_bound(module, path)
        kind: type[nn.Module] = _DEFERRED.get(type(module), type(module))
        clones[module] = kind.__new__(kind)
    for module, clone in clones.items():
        for name, value in module.__dict__.items():
            rebound = _rebound(value, clones)
            if name in _REGISTRIES and rebound is value:
                rebound = value.copy()
            clone.__dict__[name] = rebound
    return clones


# -- references to modules ------------------------------------------------------------------------
# Both functions look into what `_opened` can open. `above` are the values on the way to this one:
# a container that holds itself is not entered again.


def _modules_in(value: Any, above: tuple[object, ...] = ()) -> Iterator[nn.Module]:
    """The modules that `value` refers to, without looking into these."""
    if isinstance(value, nn.Module):
        yield value
    elif not any(value is outer for outer in above):
        for part in _opened(value)[0]:
            yield from _modules_in(part, (*above, value))


def _rebound(value: Any, clones: dict[nn.Module, nn.Module], above: tuple[object, ...] = ()) -> Any:
    """`value` with a clone in place of each module that has one; itself if that changes nothing."""
    if isinstance(value, nn.Module):
        return clones.get(value, value)
    if any(value is outer for outer in above):
        return value
    parts, build = _opened(value)
    rebound = [_rebound(part, clones, (*above, value)) for part in parts]
    return value if all(map(is_, parts, rebound)) else build(rebound)


def _opened(value: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """The parts of `value`, and how to build its like from others; no parts if it is opaque.

    Plain containers, bound methods, partials, weak references to modules, and hooks of
    `load_state_dict`.
    """
    kind = type(value)
    if kind is dict or kind is OrderedDict:
        count = len(value)
        return [*value, *value.values()], lambda new: kind(
            zip(new[:count], new[count:], strict=True)
        )
    if kind in (list, tuple, set, frozenset):
        return [*value], kind
    if kind is types.MethodType:
        return [value.__self__], lambda new: types.MethodType(value.__func__, *new)
    if kind is functools.partial:
        return (
            [value.func, value.args, value.keywords],
            lambda new: functools.partial(new[0], *new[1], **new[2]),
        )
    if kind is weakref.ref and isinstance(target := value(), nn.Module):
        return [target], lambda new: weakref.ref(*new)
    if kind is _WrappedHook:
        return [value.__dict__], lambda new: _hook_with(value, *new)
    return [], lambda _: value


# A hook that is handed its module (load_state_dict pre-hooks) keeps a weak reference to it.
_WrappedHook = getattr(nn.modules.module, "_WrappedHook", None)


def _hook_with(hook: Any, state: dict[str, Any]) -> Any:
    twin = copy.copy(hook)
    twin.__dict__.update(state)
    return twin
