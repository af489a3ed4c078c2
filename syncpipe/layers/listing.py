"""What a pipe can be made of: an ``nn.Sequential``, or a list of modules, callables and specs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any

from torch import Tensor, nn

from syncpipe.layers.callables import Function, function_name
from syncpipe.layers.placement import check_module
from syncpipe.layers.spec import LayerSpec

__all__ = ["Layer", "Layers", "as_layer", "as_sequential", "has_specs", "type_name"]

Layer = nn.Module | Callable[..., Any]
#: What ``Pipe``, ``plan`` and the functions of ``syncpipe.balance`` take.
Layers = nn.Sequential | nn.ModuleList | Iterable[Layer] | Mapping[str, Layer]


def as_sequential(layers: Any) -> nn.Sequential:
    """The layers as an ``nn.Sequential``: the very one that was given, if there is nothing to do.

    Args:
        layers: an ``nn.Sequential``; or anything that yields layers, or a mapping of names to
            layers. A layer is a module, a callable or a :class:`LayerSpec`; the same spec may come
            several times, and stands for another layer each time.

    Raises:
        TypeError: neither of these, or something in it is no layer.
        ValueError: as :func:`check_module`.
    """
    if isinstance(layers, nn.Sequential):
        if not has_specs(layers):
            check_module(layers)
            return layers
        made = copy.copy(layers)
        made._modules = {
            name: copy.copy(layer) if isinstance(layer, LayerSpec) else layer
            for name, layer in layers._modules.items()
        }
    else:
        made = nn.Sequential()
        for index, (name, layer) in enumerate(_named(layers)):
            made.add_module(name, as_layer(layer, f"layer {index}"))
    check_module(made)
    return made


def _named(layers: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(layers, Mapping):
        return layers.items()
    no_list = isinstance(layers, (str, bytes, Set, Tensor)) or (
        isinstance(layers, nn.Module) and not isinstance(layers, nn.ModuleList)
    )
    if no_list or not isinstance(layers, Iterable):
        check_module(layers)  # says what it should be
    return ((str(index), layer) for index, layer in enumerate(layers))


def has_specs(module: nn.Sequential) -> bool:
    """Whether there are layers that are yet to be built."""
    return any(isinstance(layer, LayerSpec) for layer in module._modules.values())


def as_layer(layer: Any, where: str) -> nn.Module:
    """One layer as a module; of a spec a copy, for the same one may stand for several layers.

    Args:
        layer: a module, a callable or a spec.
        where: names it in errors.

    Raises:
        TypeError: it is neither of these.
        ValueError: a callable with parameters that the pipe would not see.
    """
    if isinstance(layer, nn.Module):
        return copy.copy(layer) if isinstance(layer, LayerSpec) else layer
    if isinstance(layer, type):
        if issubclass(layer, nn.Module):
            raise TypeError(
                f"{where} is the class {layer.__name__}, no module: write {layer.__name__}(...), "
                f"or LayerSpec({layer.__name__}, ...) to have it built on its device"
            )
        raise TypeError(f"{where} is the class {layer.__name__}: a layer cannot be a class")
    if callable(layer):
        try:
            return Function(layer)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{where}: {error}") from None
    if isinstance(layer, (list, tuple)):
        raise TypeError(
            f"{where} is a {type(layer).__name__}: unpack it into the list around it (*layers), "
            "or make one layer of it by nn.Sequential(*layers)"
        )
    raise TypeError(
        f"{where} is a {type(layer).__name__} ({layer!r:.60}): a layer is a module, a callable "
        "or a LayerSpec"
    )


def type_name(layer: nn.Module) -> str:
    """The name of the type of a layer; of a callable its own, of a spec that of what it builds."""
    if isinstance(layer, Function):
        return function_name(layer.function)
    return layer.type_name if isinstance(layer, LayerSpec) else type(layer).__name__
