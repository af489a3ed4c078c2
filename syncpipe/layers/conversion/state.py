"""The state of a model, so that it can be run and be found as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["attributes", "left_as_it_was", "same_random_numbers"]


@contextmanager
def left_as_it_was(model: nn.Module) -> Iterator[None]:
    """Puts modes, attributes, buffers and random generators back at the end, whatever happens."""
    modules = list(model.modules())
    before = [{**vars(module)} for module in modules]
    inside = [
        (value, value.copy())
        for found in before
        for value in found.values()
        if type(value) in (dict, list, set)
    ]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    rows = [  # embeddings that shorten rows of their weight as they go
        (module.weight, module.weight.detach().clone())
        for module in modules
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None
    ]
    try:
        with same_random_numbers(model):
            yield
    finally:
        with torch.no_grad():
            for tensor, value in [*buffers, *rows]:
                if not tensor.is_meta and not torch.equal(tensor, value):
                    tensor.copy_(value)
        for module, old in zip(modules, before, strict=True):
            vars(module).clear()
            vars(module).update(old)
        for value, copied in inside:
            value.clear()
            value.extend(copied) if isinstance(value, list) else value.update(copied)


@contextmanager
def same_random_numbers(model: nn.Module) -> Iterator[None]:
    """Draws what is drawn in it as if it had not been drawn."""
    kinds = {tensor.device for tensor in model.parameters() if tensor.device.type != "meta"}
    found = [device for device in kinds if device.type != "cpu"]
    if found:
        with torch.random.fork_rng(found, device_type=found[0].type):
            yield
        return
    state = torch.get_rng_state()  # by hand: `fork_rng` asks for accelerators
    try:
        yield
    finally:
        torch.set_rng_state(state)


def attributes(model: nn.Module) -> dict[str, dict[str, Any]]:
    """What each module of a model has, by its path."""
    return {
        path: {
            name: dict(value) if name in ("_buffers", "_parameters", "_modules") else value
            for name, value in vars(module).items()
            if name != "training"
        }
        for path, module in model.named_modules()
    }


def changed(before: dict[str, Any], after: dict[str, Any]) -> str | None:
    """The name of an attribute that is another object now; None: all are as they were."""
    for name in {**before, **after}:
        old, new = before.get(name, before), after.get(name, before)
        if old is new:
            continue
        if type(old) is dict and type(new) is dict:
            if old.keys() != new.keys() or any(old[key] is not new[key] for key in old):
                return name
        elif isinstance(old, Tensor) or type(old) is not type(new) or not _equal(old, new):
            return name
    return None


def _equal(a: Any, b: Any) -> bool:
    try:
        return bool(a == b)
    except Exception:
        return False
