"""Copies of layers, to be tried and thrown away.

Ctrl-C may come between any two lines. So nothing of the user's is ever changed and changed back,
except what has no copy: the states of random generators and a few settings of the thread, which
``syncpipe.state.sandboxed`` puts back by one call.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from syncpipe.data import tensors_in
from syncpipe.layers.building import build_alone, give_values, waiting
from syncpipe.layers.listing import Function, LayerSpec
from syncpipe.runtime.random_numbers import is_compiled

__all__ = ["compiled", "copy_of_layer", "copy_of_tensor", "described_layer", "layer_to_run"]

_COMPILED_FROM = "_torchdynamo_orig_callable"


def described_layer(name: str, layer: nn.Module) -> str:
    """A layer in the words of error messages."""
    return f"layer {name!r} ({type(layer).__name__})"


def layer_to_run(
    name: str, layer: nn.Module, device: torch.device | None, home: torch.device
) -> nn.Module:
    """A layer in train mode to try and to throw away: a copy; of a spec what it builds.

    Args:
        name: of the layer.
        layer: the layer, or a spec.
        device: where it runs; None: where it is.
        home: the device, if it has none yet.

    Raises:
        TypeError: as :func:`copy_of_layer`.
    """
    if isinstance(layer, LayerSpec):
        return build_alone(layer, home).train()
    if home.type != "meta" and waiting(layer):
        made = copy_of_layer(name, layer, None)
        give_values(made, home, None, {}, zeros=True)
        return made.to(home)
    return copy_of_layer(name, layer, device)


def copy_of_layer(name: str, layer: nn.Module, device: torch.device | None) -> nn.Module:
    """A copy of a layer in train mode, on a device.

    Its parameters and buffers are copied straight to the device; on ``meta`` they take no memory,
    and the layer runs without ``torch.compile``. Gradients are left behind, and so are hooks on
    parameters. Tensors that some forward left in an attribute, the ``weight`` of the old
    ``weight_norm`` for one, lose their graph.

    Args:
        name: of the layer.
        layer: the layer.
        device: None: each tensor stays where it is.

    Raises:
        TypeError: the layer cannot be copied.
    """
    memo: dict[int, Any] = {}
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
            _bind_forward(old, new, eager=device is not None and device.type == "meta")
        if device is not None and any(p.device != device for p in made.parameters()):
            made.to(device)  # scripted layers keep their tensors to themselves
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise TypeError(
            f"{described_layer(name, layer)} cannot be copied ({type(error).__name__}: {error}), "
            "and layers are profiled on copies, so that the model stays as it is: give its class "
            "a __deepcopy__, or set aside the attribute that cannot be copied meanwhile"
        ) from error
    for module in made.modules():
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()
    return made.train()


def copy_of_tensor(tensor: Tensor, device: torch.device | None) -> Tensor:
    """A leaf with the same values, or with none on ``meta``, and in memory of its own."""
    target = tensor.device if device is None else device
    if is_lazy(tensor):
        kind: Any = type(tensor)
        lazy: Tensor = kind(requires_grad=tensor.requires_grad, device=target, dtype=tensor.dtype)
        return lazy
    bare = tensor.detach()
    if target.type == "meta":
        made = torch.empty_like(bare, device=target)
    else:
        made = bare.clone() if target == tensor.device else bare.to(target, copy=True)
    if issubclass(type(tensor), nn.Parameter):
        made = torch.Tensor._make_subclass(type(tensor), made, tensor.requires_grad)
    elif isinstance(tensor, nn.Parameter):  # of a tensor that is no plain one
        made = nn.Parameter(made, tensor.requires_grad)
    elif made.requires_grad != tensor.requires_grad:
        made.requires_grad_(tensor.requires_grad)
    for name, value in vars(tensor).items():
        made.__dict__.setdefault(name, value)
    return made


def compiled(layer: nn.Module) -> bool:
    """Whether torch.compile has taken the Python out of a layer, or of a part of it."""
    return any(
        is_compiled(module)
        or "_orig_mod" in module._modules
        or any(hasattr(vars(module).get(name), _COMPILED_FROM) for name in ("forward", "function"))
        for module in layer.modules()
    )


def _bind_forward(old: nn.Module, new: nn.Module, *, eager: bool) -> None:
    """Sees to it that a copy computes with its own parameters: functions are not copied.

    Raises:
        TypeError: a module has a forward of its own that is tied to the user's layer.
    """
    if is_compiled(old) and not eager:
        new.compile()
    if eager and isinstance(new, Function):
        new.function = getattr(new.function, _COMPILED_FROM, new.function)
    if eager and "_orig_mod" in new._modules and "dynamo_ctx" in vars(new):
        vars(new)["forward"] = new._orig_mod  # made by torch.compile(module)
    forward = vars(new).get("forward")
    tied = [method for method in _methods(forward, set()) if method.__self__ is old]
    if not tied:
        return
    if not hasattr(forward, _COMPILED_FROM):
        raise TypeError(
            f"the attribute 'forward' of {type(new).__name__} is a function tied to the "
            "module itself, which a copy would go on to use"
        )
    plain = MethodType(tied[0].__func__, new)
    vars(new)["forward"] = plain if eager else torch.compile(plain)


def _methods(thing: Any, seen: set[int]) -> Iterator[MethodType]:
    """The methods behind a function: itself, those in closures; a module in one as its forward."""
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, MethodType):
        yield thing
    elif isinstance(thing, nn.Module):
        yield MethodType(type(thing).forward, thing)
    elif isinstance(thing, FunctionType):
        cells = [cell for cell in thing.__closure__ or () if cell != CellType()]
        for inner in (*(cell.cell_contents for cell in cells), *vars(thing).values()):
            yield from _methods(inner, seen)
