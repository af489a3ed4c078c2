"""Loads checkpoints that the older pipeline libraries wrote.

Their keys say in which partition a layer was:

    torchgpipe, fairscale                   partitions.{j}.{name of the layer}.weight
    torch.distributed.pipeline.sync         partitions.{j}.{place in the partition}.weight

The layers come in the same order in all of them, so the ones with a state are matched one by one,
whatever the balance was; only where their number differs (a checkpoint of a part of the model) the
names have to do.
"""

from __future__ import annotations

import re
from typing import Any

from torch import nn

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
    if "partitions" in module._modules:
        return
    found: dict[tuple[str, str], dict[str, str]] = {}
    for key in state_dict:
        match = _OLD_KEY.fullmatch(key[len(prefix) :]) if key.startswith(prefix) else None
        if match is not None:
            found.setdefault((match[1], match[2]), {})[match[3]] = key
    if not found:
        return
    names = _matched(found, module)
    for place, keys in found.items():
        for rest, key in keys.items():
            value = state_dict.pop(key)
            owner, _, last = rest.rpartition(".")
            statistics = f"{owner}.running_mean" if owner else "running_mean"
            if not (last in _ACCUMULATORS and statistics in keys):
                state_dict[f"{prefix}{names[place]}.{rest}"] = value


def _matched(
    found: dict[tuple[str, str], dict[str, str]], module: nn.Module
) -> dict[tuple[str, str], str]:
    """For each place in the checkpoint the name of the layer."""
    own = {name: set(layer.state_dict()) for name, layer in module.named_children()}
    own = {name: keys for name, keys in own.items() if keys}
    if len(own) == len(found) and all(
        _plain(keys) <= _plain(theirs)
        for keys, theirs in zip(own.values(), found.values(), strict=True)
    ):
        return dict(zip(found, own, strict=True))
    return {place: place[1] for place in found}


def _plain(keys: Any) -> set[str]:
    """Keys without the ``module.`` that torchgpipe puts before those of a skippable layer."""
    return {key.replace("module.", "") for key in keys}
