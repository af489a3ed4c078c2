"""Values for a model on ``meta`` while it is converted, which take no memory.

Some models look at values, ``if mask.all()``, which there are none of on ``meta``. Here each tensor
is a view of a few numbers, ``tensor[i, j, k] = numbers[i + j + k]``, as many as the sum of its
sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import starmap
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from syncpipe.runtime.interrupts import undone

__all__ = ["on_views"]

_M = TypeVar("_M", bound=nn.Module)
#: About the scale of initial weights.
_SCALE = 0.05
_set: Callable[..., Any] = dict.__setitem__


def on_views(model: nn.Module, convert: Callable[[], _M]) -> _M:
    """Converts a model whose tensors on ``meta`` are such views meanwhile.

    Args:
        model: the model, which is on ``meta`` again afterwards.
        convert: makes something else of its modules, which is on ``meta`` then, too.
    """
    generator = torch.Generator().manual_seed(0)
    views: dict[int, Tensor] = {}
    back: dict[int, Tensor] = {}
    places: list[tuple[dict[str, Any], str, Tensor]] = []
    for module in model.modules():
        for own in _dicts(module):
            for name, tensor in own.items():
                if tensor is not None and tensor.is_meta:
                    if id(tensor) not in views:
                        views[id(tensor)] = _view(tensor, generator)
                        back[id(views[id(tensor)])] = tensor
                    places.append((own, name, tensor))

    def converted() -> _M:
        for own, name, tensor in places:
            own[name] = views[id(tensor)]
        return convert()

    made = undone(converted, starmap(_set, places))
    for module in made.modules():
        for own in _dicts(module):
            own.update({name: back[id(t)] for name, t in own.items() if id(t) in back})
    return made


def _dicts(module: nn.Module) -> list[dict[str, Any]]:
    return [module._parameters, module._buffers]


def _view(tensor: Tensor, generator: torch.Generator) -> Tensor:
    count = max(1, sum(tensor.shape))
    numbers = torch.zeros(count, dtype=tensor.dtype)
    if tensor.is_floating_point():
        numbers.copy_(_SCALE * torch.randn(count, generator=generator))
    made = numbers.as_strided(tensor.shape, (1,) * tensor.dim())
    if isinstance(tensor, nn.Parameter):
        made = torch.Tensor._make_subclass(type(tensor), made, tensor.requires_grad)
    made.__dict__.update(vars(tensor))
    return made
