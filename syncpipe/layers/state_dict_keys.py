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

_OLD_KEY = re.compile(r"partitions\.\d+\.([^.]+\..+)")
#: Buffers of torchgpipe's DeferredBatchNorm, which hold nothing between mini-batches.
_ACCUMULATORS = ("sum", "sum_squares")


def translate_keys(state_dict: dict[str, Any], prefix: str, module: nn.Module) -> None:
    """Renames old keys in place to those of ``module``; does nothing when there are none.

    ``prefix`` is what stands before the keys of ``module``, whose children are the layers.
    """
    index_keys(state_dict, prefix, module)
    if "partitions" in module._modules:
        return
    old: dict[str, tuple[str, Any]] = {}  # names without partitions, and values
    before = list(state_dict)
    for key in (key for key in before if key.startswith(prefix)):
        if (found := _OLD_KEY.fullmatch(key, len(prefix))) is not None:
            owner, _, last = key.rpartition(".")
            accumulates = last in _ACCUMULATORS and f"{owner}.running_mean" in before
            value = state_dict.pop(key)
            if not accumulates:
                old[key] = found[1], value
    if not old:
        return
    names, values = [name for name, _ in old.values()], [value for _, value in old.values()]
    own = module.state_dict()
    in_order = len(values) == len(own) and all(
        name.rpartition(".")[2] == mine.rpartition(".")[2]
        and getattr(value, "shape", None) == getattr(tensor, "shape", None)
        for name, value, (mine, tensor) in zip(names, values, own.items(), strict=True)
    )
    # torchgpipe puts a ``module.`` before the keys of a skippable layer.
    if in_order and {n.replace("module.", "") for n in names} != {
        n.replace("module.", "") for n in own
    }:
        names = list(own)
    state_dict.update({prefix + n: value for n, value in zip(names, values, strict=True)})
