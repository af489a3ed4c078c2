"""Loads checkpoints that the older pipeline libraries wrote.

Their keys say in which partition a layer was:

    torchgpipe, fairscale                   partitions.{j}.{name of the layer}.weight
    torch.distributed.pipeline.sync         partitions.{j}.{place in the partition}.weight

The last one also took layers apart that are an ``nn.Sequential`` themselves. So keys are matched
by the layers' names where that gives just the keys of the model, and otherwise by their order,
which is the same in all of them whatever the balance was.
"""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from syncpipe.layers.conversion.layer import index_keys

__all__ = ["translate_keys"]

_OLD_KEY = re.compile(r"partitions\.(\d+)\.([^.]+)\.(.+)")
#: Buffers of torchgpipe's DeferredBatchNorm, which hold nothing between mini-batches.
_ACCUMULATORS = ("sum", "sum_squares")


def translate_keys(state_dict: dict[str, Any], prefix: str, module: nn.Module) -> None:
    """Renames old keys in place to those of ``module``; does nothing when there are none.

    Args:
        state_dict: the dict to load.
        prefix: what stands before the keys of ``module`` in it.
        module: the module that is loaded, whose children are the layers.
    """
    index_keys(state_dict, prefix, module)
    if "partitions" in module._modules:
        return
    found = [
        key
        for key in state_dict
        if key.startswith(prefix) and _OLD_KEY.fullmatch(key, len(prefix)) is not None
    ]
    if not found:
        return
    old = [key for key in found if not _is_accumulator(key, state_dict)]
    own = module.state_dict()
    named = [_named(key[len(prefix) :]) for key in old]
    if {_plain(key) for key in named} != {_plain(key) for key in own} and _in_order(
        [state_dict[key] for key in old], old, own
    ):
        named = list(own)
    moved = {prefix + name: state_dict[key] for name, key in zip(named, old, strict=True)}
    for key in found:
        del state_dict[key]
    state_dict.update(moved)


def _is_accumulator(key: str, state_dict: dict[str, Any]) -> bool:
    """Whether a key is of a buffer that torchgpipe's DeferredBatchNorm adds."""
    owner, _, last = key.rpartition(".")
    return last in _ACCUMULATORS and f"{owner}.running_mean" in state_dict


def _named(key: str) -> str:
    """The key without its partition: layer and rest."""
    return key.split(".", 2)[2]


def _plain(key: str) -> str:
    """A key without the ``module.`` that torchgpipe puts before those of a skippable layer."""
    return key.replace("module.", "")


def _in_order(values: list[Any], keys: list[str], own: dict[str, Any]) -> bool:
    """Whether the values can be those of the model's own keys, one after another."""
    return len(values) == len(own) and all(
        key.rpartition(".")[2] == mine.rpartition(".")[2]
        and getattr(value, "shape", None) == getattr(tensor, "shape", None)
        for value, key, (mine, tensor) in zip(values, keys, own.items(), strict=True)
    )
