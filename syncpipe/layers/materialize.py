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
_RESETS = ("reset_parameters", "_reset_parameters")  # the latter is nn.MultiheadAttention's


def memory_of(device: torch.device) -> torch.device:
    """Where the tensors of a worker are: a CPU worker has no memory of its own."""
    return torch.device("cpu") if device.type == "cpu" else device


def waiting(module: nn.Module) -> list[Tensor]:
    """The tensors of a module that are on ``meta``."""
    return [tensor for tensor in chain(module.parameters(), module.buffers()) if tensor.is_meta]


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
            if not tensor.is_meta:
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
        self._before: list[tuple[nn.Module, str, Tensor]] = []

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
        for path, module, name, tensor in places:
            self._before.append((module, name, tensor))
            if id(tensor) not in made:
                made[id(tensor)] = _empty(tensor, device), path, module, name
                if self._zeros and not is_lazy(tensor):
                    made[id(tensor)][0].detach().zero_()
            setattr(module, name, made[id(tensor)][0])  # not into its dict: an RNN has lists, too
        with _Writes() as writes, torch.device(memory_of(device)), torch.no_grad():
            for module in new:
                reset = _reset_of(module)
                if reset is not None:
                    reset()
            if init_fn is not None:
                for module in new:
                    init_fn(module)
        still = {id(getattr(module, name)) for _, module, name, _ in places}
        for tensor, path, module, name in made.values():
            if any(is_lazy(own) for _, own in _own(module)):
                continue  # its first forward gives it shapes, and resets it
            untouched = tensor.untyped_storage()._cdata not in writes.storages
            if tensor.numel() and untouched and id(tensor) in still and not self._zeros:
                tried = [f"its {_RESETS[0]}()"] * (_reset_of(module) is not None)
                tried += ["init_fn"] * (init_fn is not None)
                why = f"{' and '.join(tried)} did not set it"
                raise ValueError(_refusal(path, module, name, why))
        for _, module, name, old in places:
            owned = self._owned.setdefault(id(old), (old, getattr(module, name)))[1]
            setattr(module, name, owned)
        for module in new:
            if isinstance(module, nn.RNNBase):
                module.flatten_parameters()

    def undo(self) -> None:
        """Everything is on ``meta`` again."""
        for module, name, tensor in reversed(self._before):
            setattr(module, name, tensor)


def _own(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in chain(module._parameters.items(), module._buffers.items()):
        if tensor is not None:
            yield name, tensor


def _waiting_in(layer: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    for path, module in layer.named_modules():
        for name, tensor in _own(module):
            if tensor.is_meta:
                yield path, module, name, tensor


def _all_waits(module: nn.Module) -> bool:
    tensors = list(chain(module.parameters(), module.buffers()))
    return bool(tensors) and all(tensor.is_meta for tensor in tensors)


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
    if is_lazy(tensor):
        kind: Any = type(tensor)
        return kind(
            requires_grad=tensor.requires_grad, device=memory_of(device), dtype=tensor.dtype
        )
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
