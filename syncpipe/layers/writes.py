"""Which layers may write into their inputs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn
from torch.nn.modules import module as global_hooks


def may_write(layers: Iterable[nn.Module], *, pops: bool = False) -> bool:
    """Whether layers may write into the inputs of their stage.

    PyTorch's own layers write only if ``inplace`` is set; other layers may write. Any layer may see
    a skip that the stage ``pops``.
    """
    if global_hooks._global_forward_pre_hooks:
        return True
    for layer in _one_by_one(layers):
        if not all(map(_never_writes, layer.modules())) or global_hooks._global_forward_hooks:
            return True
        if not pops and any(p is not None for p in layer._parameters.values()):
            return False  # a layer with parameters returns a new tensor to the layers after it
    return False


def _one_by_one(layers: Iterable[nn.Module]) -> Iterator[nn.Module]:
    for layer in layers:
        if type(layer) is nn.Sequential and _never_writes(layer):
            yield from _one_by_one(layer)
        else:
            yield layer


def _never_writes(layer: nn.Module) -> bool:
    own = vars(layer)
    return not (
        not type(layer).__module__.startswith(("torch.nn.modules.", "syncpipe.layers.batchnorm"))
        or getattr(layer, "inplace", False)
        or "forward" in own
        or own.get("_compiled_call_impl")
        or is_hooked(layer)
    )


def is_hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)
