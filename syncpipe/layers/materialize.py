"""Values for tensors on ``meta``: memory on their device, and then what initialises it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["InitFn", "Materializer", "check_materializable", "memory_of", "post_order", "waiting"]

#: Initialises one module: what ``nn.Module.apply`` takes.
InitFn = Callable[[nn.Module], Any]
#: A tensor of a module: the dict that it is in, and its name there.
_Place = tuple[dict[str, Any], str]

_RESETS = ("reset_parameters", "_reset_parameters")  # the latter is nn.MultiheadAttention's


def memory_of(device: torch.device) -> torch.device:
    """Where the tensors of a worker are: a CPU worker has no memory of its own."""
    return torch.device("cpu") if device.type == "cpu" else device


def waiting(module: nn.Module) -> list[Tensor]:
    """The tensors of a module that are on ``meta``."""
    return list(filter(_waits, chain(module.parameters(), module.buffers())))


def _waits(tensor: Tensor) -> bool:
    return tensor.is_meta and not is_lazy(tensor)


def post_order(module: nn.Module) -> list[nn.Module]:
    """A module and all in it, children first, as ``nn.Module.apply`` goes; each once."""
    order: list[nn.Module] = []
    module.apply(order.append)
    return list(dict.fromkeys(order))


def check_materializable(layer: nn.Module, init_fn: InitFn | None) -> None:
    """Refuses a layer that cannot get values, as far as that can be seen beforehand.

    Raises:
        ValueError: naming the module and the tensor.
    """
    for path, module in layer.named_modules():
        for name, tensor in _own(module):
            if not _waits(tensor):
                continue
            if not _all_waits(module):
                raise ValueError(_refusal(path, module, name, "others of its tensors are not"))
            if init_fn is None and _reset_of(module) is None:
                raise ValueError(_refusal(path, module, name, f"it has no {_RESETS[0]}()"))


class Materializer:
    """Gives the tensors of layers on ``meta`` memory and values, layer by layer.

    The first of several layers that share a tensor owns it: it is where that layer is, with the
    values that it has there.

    Args:
        zeros: what nobody gives a value is zero, instead of an error.
    """

    def __init__(self, *, zeros: bool = False) -> None:
        self._zeros = zeros
        self._owned: dict[int, tuple[Tensor, Any]] = {}  # by id; the old one is kept alive
        self._before: list[tuple[_Place, Tensor]] = []

    def run(self, layer: nn.Module, device: torch.device, init_fn: InitFn | None) -> None:
        """Materialises one layer in place.

        All of its modules get their ``reset_parameters()``, children first, and then ``init_fn``,
        but those that have tensors with values already.

        Raises:
            ValueError: there is a tensor that nobody gave a value.
        """
        new = [module for module in post_order(layer) if _all_waits(module)]
        places, made = list(_waiting_in(layer)), {}
        if not places:
            return  # it was at another place before
        for path, module, kind, name in places:
            tensor = kind[name]
            self._before.append(((kind, name), tensor))
            if id(tensor) not in made:
                made[id(tensor)] = _empty(tensor, device), path, module, name
                if self._zeros:
                    made[id(tensor)][0].detach().zero_()
            kind[name] = made[id(tensor)][0]
        with _Writes() as writes, torch.device(memory_of(device)), torch.no_grad():
            for module in new:
                reset = _reset_of(module)
                if reset is not None:
                    reset()
            if init_fn is not None:
                for module in new:
                    init_fn(module)
        replaced = {id(kind[name]) for _, _, kind, name in places}
        for tensor, path, module, name in made.values():
            untouched = tensor.untyped_storage()._cdata not in writes.storages
            if tensor.numel() and untouched and id(tensor) in replaced and not self._zeros:
                tried = [f"its {_RESETS[0]}()"] * (_reset_of(module) is not None)
                tried += ["init_fn"] * (init_fn is not None)
                why = f"{' and '.join(tried)} did not set it"
                raise ValueError(_refusal(path, module, name, why))
        for ((kind, name), old), _ in zip(self._before[-len(places) :], places, strict=True):
            kind[name] = self._owned.setdefault(id(old), (old, kind[name]))[1]

    def undo(self) -> None:
        """Everything is on ``meta`` again."""
        for (kind, name), tensor in reversed(self._before):
            kind[name] = tensor


def _own(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in chain(module._parameters.items(), module._buffers.items()):
        if tensor is not None:
            yield name, tensor


def _waiting_in(layer: nn.Module) -> Iterator[tuple[str, nn.Module, dict[str, Any], str]]:
    for path, module in layer.named_modules():
        for kind in (module._parameters, module._buffers):
            for name, tensor in kind.items():
                if tensor is not None and _waits(tensor):
                    yield path, module, kind, name


def _all_waits(module: nn.Module) -> bool:
    tensors = list(chain(module.parameters(), module.buffers()))
    return bool(tensors) and all(map(_waits, tensors))


def _reset_of(module: nn.Module) -> Callable[[], Any] | None:
    return next((getattr(module, name) for name in _RESETS if hasattr(module, name)), None)


def _refusal(path: str, module: nn.Module, name: str, why: str) -> str:
    kind = type(module).__name__
    where = f" at {path!r}" if path else ""
    return (
        f"{kind}{where} has {name!r} on meta, without values, and {why}: write a {_RESETS[0]}() "
        f"for {kind} that sets all its parameters and buffers, give Pipe an init_fn= that does, "
        "or build the layer by a LayerSpec instead"
    )


def _empty(tensor: Tensor, device: torch.device) -> Any:
    """Memory for a tensor; what else is known of it stays."""
    made: Any = torch.empty_like(tensor.detach(), device=memory_of(device))
    if isinstance(tensor, nn.Parameter):
        made = torch.Tensor._make_subclass(type(tensor), made, tensor.requires_grad)
    made.__dict__.update(vars(tensor))
    return made


class _Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees which memory is written, also by way of ``tensor.data``."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for k, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[k] if k < len(args) else kwargs.get(argument.name)
                for tensor in value if isinstance(value, (list, tuple)) else [value]:
                    if isinstance(tensor, Tensor):
                        self.storages.add(tensor.untyped_storage()._cdata)
        return func(*args, **kwargs)
