"""Translates the keys of checkpoints that older pipeline libraries wrote.

Their keys name the partition of each layer:

    torchgpipe, fairscale                   partitions.{j}.{name of the layer}.weight
    torch.distributed.pipeline.sync         partitions.{j}.{index in the partition}.weight

The last library also flattened layers that are an ``nn.Sequential`` themselves. So keys are matched
by the layers' names if that gives exactly the keys of the model, and otherwise by their order,
which does not depend on the balance. torchgpipe's decorator wrapped each layer with skips:
``0.module.conv.weight`` is ``0.conv.weight`` here.
"""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from syncpipe.skip.skippable import is_skippable

__all__ = ["translate_keys"]

_OLD_KEY = re.compile(r"partitions\.\d+\.([^.]+\..+)")
#: Buffers of torchgpipe's DeferredBatchNorm, which are empty between mini-batches.
_ACCUMULATORS = ("sum", "sum_squares")


def translate_keys(state_dict: dict[str, Any], prefix: str, module: nn.Module) -> None:
    """Rename old keys, in place, to the keys of ``module``, whose children are the layers.

    ``prefix`` is the common prefix of these keys in ``state_dict``.
    """
    wrapped = [
        path
        for path, layer in module.named_modules()
        if is_skippable(layer)
        and "module" not in {*layer._modules, *layer._parameters, *layer._buffers}
    ]
    names: list[str] = []  # of keys with a partition
    values: list[Any] = []
    before = list(state_dict)
    for key in [key for key in before if key.startswith(prefix)]:
        found = None if "partitions" in module._modules else _OLD_KEY.fullmatch(key, len(prefix))
        name = found[1] if found else key.removeprefix(prefix)
        for path in wrapped:
            if name.startswith(f"{path}.module."):
                name = path + name.removeprefix(f"{path}.module")
        owner, _, last = key.rpartition(".")
        if found is None:
            if prefix + name not in state_dict:
                state_dict[prefix + name] = state_dict.pop(key)
        elif last in _ACCUMULATORS and f"{owner}.running_mean" in before:
            del state_dict[key]
        else:
            names.append(name)
            values.append(state_dict.pop(key))
    own = module.state_dict() if names else {}
    matching = [*map(_ending, names, values)] == [*map(_ending, own, own.values())]
    if matching and {*names} != own.keys():
        names = list(own)
    state_dict.update({prefix + n: value for n, value in zip(names, values, strict=True)})


def _ending(name: str, value: Any) -> tuple[str, Any]:
    """The last part of a name, and the shape of the value."""
    return name.rpartition(".")[2], getattr(value, "shape", None)
