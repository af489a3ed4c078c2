"""Balance without measuring anything: by parameters, by layers, by the type of layers.

The three methods of DeepSpeed's ``PipelineModule`` (``parameters``, ``uniform``, ``type:regex``),
with exact cuts.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from syncpipe.balance.by_cost import balance_by_time
from syncpipe.balance.cut import balance_cost
from syncpipe.layers.building import on_meta
from syncpipe.layers.listing import Layers, as_sequential, type_name

__all__ = ["balance_by_parameters", "balance_by_type", "balance_named", "balance_uniform"]


def balance_by_parameters(partitions: int, module: Layers) -> list[int]:
    """The balance in which the largest stage has as few parameters to train as can be.

    Args:
        partitions: number of stages.
        module: the layers, as for ``Pipe``; they may be on ``meta``, and specs are looked at there.
            A tied parameter counts where it comes first.

    Returns:
        For each stage the number of its layers.

    Raises:
        TypeError: ``module`` is no ``nn.Sequential`` and no list of layers.
        ValueError: fewer layers than partitions, or a layer whose parameters have no shape yet.
    """
    seen: set[int] = set()
    cost = []
    for name, layer in on_meta(module)._modules.items():  # named_children() has each once
        count = 0
        for parameter in layer.parameters():
            if nn.parameter.is_lazy(parameter):
                raise ValueError(
                    f"layer {name!r} ({type(layer).__name__}) is lazy: its parameters have no "
                    "shape before its first forward, so run the module once"
                )
            if parameter.requires_grad and id(parameter) not in seen:
                seen.add(id(parameter))
                count += parameter.numel()
        cost.append(count)
    return balance_cost(cost, partitions)


def balance_uniform(partitions: int, module: Layers) -> list[int]:
    """The balance in which stages have the same number of layers, the first ones one more.

    Args:
        partitions: number of stages.
        module: the layers, as for ``Pipe``.

    Returns:
        For each stage the number of its layers.

    Raises:
        TypeError: ``module`` is no ``nn.Sequential`` and no list of layers.
        ValueError: fewer layers than partitions.
    """
    return balance_cost([1] * len(as_sequential(module)), partitions)


def balance_by_type(partitions: int, module: Layers, regex: str) -> list[int]:
    """The balance in which stages have the same number of layers of some type.

    Args:
        partitions: number of stages.
        module: the layers, as for ``Pipe``.
        regex: matched anywhere in the name of a layer's class (of a callable in its own), upper or
            lower case alike, such as ``"block"`` or ``"^Linear$"``. Others count for nothing.

    Returns:
        For each stage the number of its layers.

    Raises:
        TypeError: ``module`` is no ``nn.Sequential`` and no list of layers.
        ValueError: fewer layers than partitions, or no layer matches, or ``regex`` is none.
    """
    try:
        pattern = re.compile(regex, re.IGNORECASE)
    except (re.error, TypeError) as error:
        raise ValueError(f"regex={regex!r} is not a regular expression: {error}") from error
    names = [type_name(layer) for layer in as_sequential(module)]
    cost = [int(bool(pattern.search(name))) for name in names]
    if not any(cost):
        raise ValueError(
            f"regex={regex!r} matches no layer; the types are {', '.join(dict.fromkeys(names))}"
        )
    return balance_cost(cost, partitions)


def balance_named(
    how: Any,
    module: Layers,
    partitions: int,
    *,
    sample: Any = None,
    device: torch.device | None = None,
) -> list[int]:
    """What ``Pipe(balance=...)`` takes as a string.

    Args:
        how: ``"parameters"``, ``"uniform"``, ``"type:regex"`` or ``"time"``.
        module: the layers, as for ``Pipe``.
        partitions: number of stages.
        sample: for ``"time"``, an input of the size of a micro-batch.
        device: where that is measured.

    Raises:
        ValueError: another string, or as the functions above.
    """
    if how == "time":
        if sample is None:
            raise ValueError(
                "balance='time' measures the layers: give Pipe a sample=, an input of the size of "
                "a micro-batch"
            )
        return balance_by_time(partitions, module, sample, device=device)
    if sample is not None:
        raise ValueError(f"sample= is what balance='time' measures with, not balance={how!r}")
    if how == "parameters":
        return balance_by_parameters(partitions, module)
    if how == "uniform":
        return balance_uniform(partitions, module)
    if isinstance(how, str) and how.startswith("type:"):
        return balance_by_type(partitions, module, how[len("type:") :])
    raise ValueError(
        f"balance={how!r}: as a string it is 'parameters', 'uniform', 'type:regex' or 'time'; "
        "otherwise give it a number of layers for each device"
    )
