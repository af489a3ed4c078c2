"""Where layers are profiled: on copies of them.

Ctrl-C may come between any two lines. So nothing of the user's is ever changed and changed back,
except what has no copy: the states of random generators and a few settings of the thread, which
``syncpipe.state.sandboxed`` puts back by one call.
"""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from types import CellType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.parameter import is_lazy

from syncpipe.balance.estimation.fused import as_on_gpu
from syncpipe.data import NoChunk, flatten, tensors_in
from syncpipe.layers.building import Materializer, build_alone, waiting
from syncpipe.layers.listing import Function, LayerSpec

__all__ = [
    "Place",
    "copy_of_layer",
    "copy_of_tensor",
    "described_layer",
    "layer_to_run",
    "place_of",
]


class Place(NamedTuple):
    """Where layers are profiled.

    Attributes:
        device: for all layers; None: each where it is.
        used: the real devices among those that are worked on.
        mode: to be entered for it.
        fake: how tensors without values are called here; empty if there are values.
        words: for the profile.
    """

    device: torch.device | None
    used: list[torch.device]
    mode: AbstractContextManager[Any]
    fake: str
    words: str


def place_of(module: nn.Module, sample: Any, device: torch.device | str | int | None) -> Place:
    own = list(chain(module.parameters(), module.buffers()))
    leaves = [leaf.tensor if isinstance(leaf, NoChunk) else leaf for leaf in flatten(sample)[0]]
    tensors = own + [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    target = None if device is None else _resolved(device)
    modes: list[FakeTensorMode] = [t.fake_mode for t in tensors if isinstance(t, FakeTensor)]
    if modes:
        if any(mode is not modes[0] for mode in modes):
            raise ValueError("model and sample are of two FakeTensorModes: make them under one")
        if not all(isinstance(tensor, FakeTensor) for tensor in own):
            raise ValueError(
                "some tensors are fake, but not all of the model are: make the model under the "
                "FakeTensorMode, or measure sizes with device='meta'"
            )
        home = target or tensors[0].device
        return Place(target, [], modes[0], "fake", f"fake {home.type}")
    if target is None and any(tensor.is_meta for tensor in tensors):
        target = torch.device("meta")
    if any(tensor.is_meta for tensor in tensors[len(own) :]) and target != torch.device("meta"):
        raise ValueError(
            f"device={device!r}, but the sample is on meta and has no values to put there: leave "
            "device out to measure sizes, or make the sample elsewhere to measure time"
        )
    if target is not None and target.type == "meta":
        return Place(target, [], as_on_gpu(), "meta", "meta")
    used = list(dict.fromkeys([tensor.device for tensor in tensors] if target is None else []))
    used = used if target is None else [target]
    return Place(target, used, nullcontext(), "", ", ".join(map(_words, used)) or "cpu")


def _resolved(device: torch.device | str | int) -> torch.device:
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
        raise ValueError(f"device={device!r} cannot be used here: {error}") from error


def _words(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return str(device)


def described_layer(name: str, layer: nn.Module) -> str:
    """A layer in the words of error messages."""
    return f"layer {name!r} ({type(layer).__name__})"


def layer_to_run(name: str, layer: nn.Module, place: Place, home: torch.device) -> nn.Module:
    """A layer in train mode to try and to throw away: a copy; of a spec what it builds.

    Args:
        name: of the layer.
        layer: the layer, or a spec.
        place: where it runs.
        home: the device, if it has none yet.

    Raises:
        TypeError: as :func:`copy_of_layer`.
    """
    if isinstance(layer, LayerSpec):
        return build_alone(layer, home).train()
    if home.type != "meta" and waiting(layer):
        made = copy_of_layer(name, layer, None)
        Materializer(zeros=True).run(made, home, None)
        return made.to(home)
    return copy_of_layer(name, layer, place.device, eager=bool(place.fake))


def copy_of_layer(
    name: str, layer: nn.Module, device: torch.device | None, *, eager: bool = False
) -> nn.Module:
    """A copy of a layer in train mode, on a device.

    Its parameters and buffers are copied straight to the device; on ``meta`` they take no memory.
    Gradients are left behind, and so are hooks on parameters. Tensors that some forward left in
    an attribute, the ``weight`` of the old ``weight_norm`` for one, lose their graph.

    Args:
        name: of the layer.
        layer: the layer.
        device: None: each tensor stays where it is.
        eager: do without ``torch.compile``, which makes little of tensors without values.

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
        _bind_forwards(layer, made, eager)
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
    elif target == tensor.device:
        made = bare.clone()
    else:
        made = bare.to(target, copy=True)
    if issubclass(type(tensor), nn.Parameter):
        made = torch.Tensor._make_subclass(type(tensor), made, tensor.requires_grad)
    elif isinstance(tensor, nn.Parameter):  # of a tensor that is no plain one, such as a fake one
        made = nn.Parameter(made, tensor.requires_grad)
    elif made.requires_grad != tensor.requires_grad:
        made.requires_grad_(tensor.requires_grad)
    for name, value in vars(tensor).items():
        made.__dict__.setdefault(name, value)
    return made


def compiled(layer: nn.Module) -> bool:
    """Whether torch.compile has taken the Python out of a layer, or of a part of it."""
    return any(
        module._compiled_call_impl is not None
        or "_orig_mod" in module._modules
        or hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable")
        or hasattr(vars(module).get("function"), "_torchdynamo_orig_callable")
        for module in layer.modules()
    )


def _bind_forwards(layer: nn.Module, made: nn.Module, eager: bool) -> None:
    """Sees to it that the copy computes with its own parameters: functions are not copied.

    Raises:
        TypeError: a module has a forward of its own that is tied to the user's layer.
    """
    originals = {id(module) for module in layer.modules()}
    for old, new in zip(layer.modules(), made.modules(), strict=False):
        if old._compiled_call_impl is not None and not eager:
            new.compile()
        if eager and isinstance(new, Function):
            new.function = getattr(new.function, "_torchdynamo_orig_callable", new.function)
        if eager and "_orig_mod" in new._modules and "dynamo_ctx" in vars(new):
            vars(new)["forward"] = new._orig_mod  # made by torch.compile(module)
        forward = vars(new).get("forward")
        methods = [found for found in _methods(forward) if id(found.__self__) in originals]
        if not methods:
            continue
        method = methods[0]
        if not hasattr(forward, "_torchdynamo_orig_callable") or method.__self__ is not old:
            raise TypeError(
                f"the attribute 'forward' of {type(new).__name__} is a function tied to the "
                "module itself, which a copy would go on to use"
            )
        plain = MethodType(method.__func__, new)
        vars(new)["forward"] = plain if eager else torch.compile(plain)


def _methods(function: Any) -> list[MethodType]:
    """The methods behind a function: itself, those in closures; a module in one as its forward."""
    found: list[MethodType] = []
    seen: set[int] = set()
    pending = [function]
    while pending:
        thing = pending.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, MethodType):
            found.append(thing)
        elif isinstance(thing, nn.Module) and thing is not function:
            found.append(MethodType(type(thing).forward, thing))
        elif isinstance(thing, FunctionType):
            cells = [cell for cell in thing.__closure__ or () if cell != CellType()]
            pending += [cell.cell_contents for cell in cells]
            pending += vars(thing).values()
    return found
