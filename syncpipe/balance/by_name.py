"""Balance without measuring anything: by parameters, by layers, by the type of layers.

The three methods of DeepSpeed's ``PipelineModule`` (``parameters``, ``uniform``, ``type:regex``),
with exact cuts.
"""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from syncpipe.balance.cut import balance_cost
from syncpipe.layers.placement import check_module

__all__ = ["balance_by_parameters", "balance_by_type", "balance_named", "balance_uniform"]


def balance_by_parameters(partitions: int, module: nn.Sequential) -> list[int]:
    """The balance in which the largest stage has as few parameters to train as can be.

    Args:
        partitions: number of stages.
        module: the layers; they may be on ``meta``. A tied parameter counts where it comes first.

    Returns:
        For each stage the number of its layers.

    Raises:
        TypeError: ``module`` is no ``nn.Sequential``.
        ValueError: fewer layers than partitions, or a layer whose parameters have no shape yet.
    """
    check_module(module)
    seen: set[int] = set()
    cost = []
    for name, layer in module._modules.items():  # named_children() has each module once
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


def balance_uniform(partitions: int, module: nn.Sequential) -> list[int]:
    """The balance in which stages have the same number of layers, the first ones one more.

    Args:
        partitions: number of stages.
        module: the layers.

    Returns:
        For each stage the number of its layers.

    Raises:
        TypeError: ``module`` is no ``nn.Sequential``.
        ValueError: fewer layers than partitions.
    """
    check_module(module)
    return balance_cost([1] * len(module), partitions)


def balance_by_type(partitions: int, module: nn.Sequential, regex: str) -> list[int]:
    """The balance in which stages have the same number of layers of some type.

    Args:
        partitions: number of stages.
        module: the layers.
        regex: matched anywhere in the name of a layer's class, upper or lower case alike, such as
            ``"block"`` or ``"^Linear$"``. Other layers count for nothing.

    Returns:
        For each stage the number of its layers.

    Raises:
        TypeError: ``module`` is no ``nn.Sequential``.
        ValueError: fewer layers than partitions, or no layer matches, or ``regex`` is none.
    """
    check_module(module)
    try:
        pattern = re.compile(regex, re.IGNORECASE)
    except (re.error, TypeError) as error:
        raise ValueError(f"regex={regex!r} is not a regular expression: {error}") from error
    names = [type(layer).__name__ for layer in module]
    cost = [int(bool(pattern.search(name))) for name in names]
    if not any(cost):
        raise ValueError(
            f"regex={regex!r} matches no layer; the types are {', '.join(dict.fromkeys(names))}"
        )
    return balance_cost(cost, partitions)


def balance_named(how: Any, module: nn.Sequential, partitions: int) -> list[int]:
    """What ``Pipe(balance=...)`` takes as a string.

    Args:
        how: ``"parameters"``, ``"uniform"`` or ``"type:regex"``.
        module: the layers.
        partitions: number of stages.

    Raises:
        ValueError: another string, or as the functions above.
    """
    if how == "parameters":
        return balance_by_parameters(partitions, module)
    if how == "uniform":
        return balance_uniform(partitions, module)
    if isinstance(how, str) and how.startswith("type:"):
        return balance_by_type(partitions, module, how[len("type:") :])
    raise ValueError(
        f"balance={how!r}: as a string it is 'parameters', 'uniform' or 'type:regex'; otherwise "
        "give it a number of layers for each device"
    )
