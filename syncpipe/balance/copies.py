"""Temporary copies of layers, for profiling.

Ctrl-C may interrupt at any line, so the user's objects are never changed temporarily. Only random
generators and thread settings have no copies: ``syncpipe.state.restoring_settings`` restores them.
"""

from __future__ import annotations

import copy
import inspect
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from syncpipe.data.trees import tensors_in
from syncpipe.layers.listing import Function, LayerSpec, build_alone, give_values, waiting
from syncpipe.runtime.random_numbers import is_compiled

__all__ = ["copy_of_tensor", "has_compiled", "layer_label", "runnable_copy"]

_COMPILED_FROM = "_torchdynamo_orig_callable"


def layer_label(name: str, layer: nn.Module) -> str:
    return f"layer {name!r} ({type(layer).__name__})"


def runnable_copy(
    name: str, layer: nn.Module, device: torch.device | None, default: torch.device
) -> nn.Module:
    """A temporary copy of a layer in train mode, or the layer that a spec builds.

    It runs on ``device``, by default where the layer is, or on ``default`` if it has no memory yet.
    Parameters and buffers are copied straight to the device; on ``meta`` the copy runs without
    ``torch.compile``. Gradients and hooks of parameters are not copied. Tensors that a forward has
    left in an attribute, for example ``weight`` of the old ``weight_norm``, lose their graph.

    Raises:
        TypeError: the layer cannot be copied.
    """
    if isinstance(layer, LayerSpec):
        return build_alone(layer, default).train()
    empty = default.type != "meta" and waiting(layer)
    device = None if empty else device
    memo: dict[int, Any] = {}
    eager = device is not None and device.type == "meta"
    try:
        for module in layer.modules():
            for tensor in tensors_in(list(vars(module).values())):
                if id(tensor) not in memo:
                    memo[id(tensor)] = copy_of_tensor(tensor, device)
        with torch.no_grad():  # scripted layers clone their parameters
            made: nn.Module = copy.deepcopy(layer, memo)
        for own, copied in zip(layer.parameters(), made.parameters(), strict=True):
            if copied.requires_grad != own.requires_grad:
                copied.requires_grad_(own.requires_grad)
        for old, new in zip(layer.modules(), made.modules(), strict=False):
            _compile_as(old, new, eager=eager)
        if device is not None and any(p.device != device for p in made.parameters()):
            made.to(device)  # scripted layers are copied where they are
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise TypeError(
            f"{layer_label(name, layer)} cannot be copied ({type(error).__name__}: {error}), "
            "and profiling needs a copy: give its class a __deepcopy__, or remove the attribute "
            "that cannot be copied while profiling"
        ) from error
    for module in made.modules():
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()
    if empty:
        give_values(made, default, None, {}, zeros=True)
        made.to(default)
    return made.train()


def copy_of_tensor(tensor: Tensor, device: torch.device | None) -> Tensor:
    """A leaf with the same values, or none on ``meta``, in newly allocated memory."""
    target = tensor.device if device is None else device
    if is_lazy(tensor):
        kind: Any = type(tensor)
        lazy: Tensor = kind(requires_grad=tensor.requires_grad, device=target, dtype=tensor.dtype)
        return lazy
    bare, needs = tensor.detach(), tensor.requires_grad
    made = bare.to(target, copy=True)
    if issubclass(type(tensor), nn.Parameter):
        made = torch.Tensor._make_subclass(type(tensor), made, needs)
    elif isinstance(tensor, nn.Parameter):  # a parameter of another tensor class
        made = nn.Parameter(made, needs)
    elif needs:
        made.requires_grad_()
    for name, value in vars(tensor).items():
        made.__dict__.setdefault(name, value)
    return made


def has_compiled(layer: nn.Module) -> bool:
    """Whether a layer, or a part of it, is compiled, so that modes do not see its operators."""
    return any(
        is_compiled(module)
        or "_orig_mod" in module._modules
        or any(hasattr(vars(module).get(name), _COMPILED_FROM) for name in ("forward", "function"))
        for module in layer.modules()
    )


def _compile_as(old: nn.Module, new: nn.Module, *, eager: bool) -> None:
    """Compile a copy as its original is, or not at all if ``eager``.

    A copied function would still use the original's parameters.
    """
    forward = vars(new).get("forward")
    method = inspect.unwrap(forward) if isinstance(forward, FunctionType) else None
    if is_compiled(old) and not eager:
        new.compile()
    elif eager and isinstance(new, Function):
        new.function = getattr(new.function, _COMPILED_FROM, new.function)
    elif eager and "_orig_mod" in new._modules:
        vars(new)["forward"] = new._orig_mod  # made by torch.compile(module)
    elif hasattr(forward, _COMPILED_FROM) and getattr(method, "__self__", None) is old:
        own = MethodType(method.__func__, new)  # type: ignore[union-attr]
        vars(new)["forward"] = own if eager else torch.compile(own)
    elif isinstance(method, FunctionType):
        known = inspect.getclosurevars(method).nonlocals.values()
        if any(value is old for value in known):
            kind = type(new).__name__
            raise TypeError(f"the 'forward' of this {kind} refers to the original module")
