"""Balances: by what layers cost, measured on a sample, or by their parameters, number or type.

The latter three are the methods of DeepSpeed's ``PipelineModule`` (``parameters``, ``uniform``,
``type:regex``), with exact cuts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from syncpipe.balance.cut import balance_cost
from syncpipe.balance.measure import profile, samples_in
from syncpipe.balance.profile import LayerProfile
from syncpipe.layers.building import on_meta
from syncpipe.layers.listing import Layers, as_sequential, type_name

__all__ = [
    "balance_by_parameters",
    "balance_by_size",
    "balance_by_time",
    "balance_by_type",
    "balance_named",
    "balance_uniform",
    "param_scale_of",
]

#: Makes an optimizer of a list of parameters: ``torch.optim.Adam``, or a ``functools.partial``.
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

_GRADIENT_AND_ITSELF = 2.0


def balance_by_time(
    partitions: int,
    module: Layers,
    sample: Any,
    *,
    timeout: float = 1.0,
    device: torch.device | str | int | None = None,
    progress: bool | None = None,
) -> list[int]:
    """Balance the time that forward and backward of the layers take.

    Example::

        balance = balance_by_time(4, model, torch.rand(64, 3, 224, 224))
        pipe = Pipe(model, balance, chunks=8)

    Args:
        partitions: how many to make.
        module: the model, as for ``Pipe``; it stays as it is.
        sample: a batch, best of the size of a micro-batch: a tensor or a pytree.
        timeout: seconds to measure for; slow layers take longer.
        device: where to measure; default: where the layers are.
        progress: see :func:`syncpipe.balance.profile`.

    Returns:
        The number of layers in each partition; the slowest one takes as little time as possible.

    Raises:
        TypeError, ValueError: as :func:`syncpipe.balance.profile` and
            :func:`syncpipe.balance.balance_cost`; or the model is on ``meta`` and takes no time.
    """
    module = _checked(partitions, module)
    found = profile(
        module,
        sample,
        sizes=[samples_in(sample)],
        timeout=timeout,
        device=device,
        progress=progress,
    )
    if found.device == "meta":
        raise ValueError(
            f"balance_by_time() measures time, but the model or the sample is on {found.device}, "
            "where nothing is computed: use balance_by_size(), or a device that computes"
        )
    (size,) = found.sizes
    return balance_cost(
        [layer.forward[size] + layer.backward[size] for layer in found.layers], partitions
    )


def balance_by_size(
    partitions: int,
    module: Layers,
    input: Any,
    *,
    chunks: int = 1,
    param_scale: float = _GRADIENT_AND_ITSELF,
    device: torch.device | str | int | None = None,
    optimizer: MakeOptimizer | None = None,
    progress: bool | None = None,
) -> list[int]:
    """Balance the memory of the layers: their parameters, buffers and what they store.

    Example::

        balance = balance_by_size(4, model, batch, chunks=8, optimizer=torch.optim.Adam)

    What a layer stores for backward is counted for one micro-batch. On ``meta`` (``device="meta"``,
    or a model made there) no memory is taken, so the model may be too large for this machine.

    Args:
        partitions: how many to make.
        module: the model, as for ``Pipe``; it stays as it is.
        input: a mini-batch of the size to train with: a tensor or a pytree.
        chunks: into how many micro-batches it will be cut.
        param_scale: bytes for each byte of a parameter that is trained. 2 stands for itself and
            its gradient; SGD with momentum needs 3, Adam 4.
        device: where to measure; default: where the layers are.
        optimizer: measure ``param_scale``: an optimizer class, or ``functools.partial`` of one.
        progress: see :func:`syncpipe.balance.profile`.

    Returns:
        The number of layers in each partition; the largest one is as small as possible.

    Raises:
        TypeError, ValueError: as :func:`syncpipe.balance.profile`,
            :func:`syncpipe.balance.balance_cost` and :func:`param_scale_of`; or both
            ``param_scale`` and ``optimizer`` are given.
    """
    module = _checked(partitions, module)
    if isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 1:
        raise ValueError(f"chunks={chunks!r}: a mini-batch is cut into at least 1 micro-batch")
    if not (isinstance(param_scale, Real) and 0 <= param_scale < math.inf):
        raise ValueError(f"param_scale={param_scale!r}: it must be a number, 0 or more")
    if optimizer is not None:
        if param_scale != _GRADIENT_AND_ITSELF:
            raise ValueError(
                f"param_scale={param_scale} and optimizer are both given, and the optimizer says "
                "what the scale is: leave one of them out"
            )
        param_scale = param_scale_of(optimizer)
    size = -(-samples_in(input) // chunks)
    found = profile(module, input, sizes=[size], device=device, time=False, progress=progress)

    def cost(layer: LayerProfile) -> float:
        # What the layers before it keep already takes no memory again.
        return layer.memory(param_scale) + layer.stored_bytes[size] - layer.shared_bytes[size]

    return balance_cost([cost(layer) for layer in found.layers], partitions)


def param_scale_of(optimizer: MakeOptimizer) -> float:
    """Return bytes of training for a byte of a parameter: itself, gradient, optimizer's state.

    Measured on a small parameter. SGD: 2, with momentum 3, Adam: 4.

    Args:
        optimizer: an optimizer class, or anything that makes an optimizer of a list of parameters,
            such as ``functools.partial(torch.optim.SGD, momentum=0.9)``.

    Raises:
        TypeError: it does not make an optimizer, or one that cannot take a step by itself.
    """
    parameter = nn.Parameter(torch.zeros(256, 256, dtype=torch.float32, device="cpu"))
    parameter.grad = torch.ones_like(parameter)
    if isinstance(optimizer, torch.optim.Optimizer) or not callable(optimizer):
        raise TypeError(
            f"optimizer={optimizer!r} must be a class such as torch.optim.Adam, or "
            "functools.partial(torch.optim.SGD, momentum=0.9): it is tried on a small parameter"
        )
    try:
        made = optimizer([parameter])
        made.step()
        state = made.state[parameter]
    except Exception as error:
        raise TypeError(
            f"optimizer={optimizer!r} could not be tried on one parameter ({type(error).__name__}: "
            f"{error}): give it all it needs (functools.partial(torch.optim.SGD, lr=0.1)), or give "
            "param_scale as a number instead"
        ) from error
    size = parameter.numel() * parameter.element_size()
    kept = {id(t): t for t in tree_leaves(state) if isinstance(t, Tensor)}
    return 2.0 + sum(t.nbytes for t in kept.values() if t.numel() > 1) / size  # steps are nothing


def _checked(partitions: int, layers: Layers) -> nn.Sequential:
    """The layers; asks what cannot be right before anything is measured."""
    module = as_sequential(layers)
    if len(module):
        balance_cost([0.0] * len(module), partitions)
    return module


def balance_by_parameters(partitions: int, module: Layers) -> list[int]:
    """Return the balance whose largest stage has as few parameters to train as can be.

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
    """Return the balance in which stages have as many layers, the first ones one more.

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
    """Return the balance in which stages have the same number of layers of some type.

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
