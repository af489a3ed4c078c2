"""What a call must leave as it was: a model, other tensors, and the settings of this process."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn

from syncpipe.runtime.recomputation import version_of
from tests.support.interrupts import modes_on

#: What the first call of a pipe sets, whatever it is: stages, and that modules hold generators.
OF_FIRST_CALLS = {"_loader_passes", "_locks", "_pipeline", "_time_checked"}


def snapshot(model: Any, *tensors: Tensor, versions: bool = False) -> dict[str, Any]:
    """By name which objects there are now, and what is in them; ``versions`` of tensors as well."""
    found = {
        "random": (torch.get_rng_state().tolist(), random.getstate()),
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "threads": torch.get_num_threads(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()),
        "saving": torch._C._autograd._top_saved_tensors_default_hooks(True),
        "modes": modes_on(),
        "tensors": _seen(tensors, versions)[1],
    }
    for name, module in model.named_modules() if isinstance(model, nn.Module) else ():
        own = {k: v for k, v in vars(module).items() if k not in OF_FIRST_CALLS}
        found |= {f"{name}.{key}": _seen(value, versions) for key, value in own.items()}
    return found


def _seen(value: Any, versions: bool) -> Any:
    """An object, and what is in it."""
    inside: Any = None
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        there = not value.is_meta and not nn.parameter.is_lazy(value)
        inside = [value.requires_grad, str(value.tolist()) if there else ""]
        inside += [version_of(value)] if versions and there else []
        inside.append(_seen(value.grad, versions) if value.is_leaf else None)
    elif isinstance(value, torch.Generator):
        inside = value.get_state().tolist()
    elif isinstance(value, dict):
        inside = {key: _seen(entry, versions) for key, entry in value.items()}
    elif isinstance(value, list | tuple | set):
        inside = [_seen(entry, versions) for entry in value]
    elif type(value).__module__.startswith("tests.") and not isinstance(value, nn.Module):
        inside = _seen(vars(value), versions)[1]
    return id(value), inside
