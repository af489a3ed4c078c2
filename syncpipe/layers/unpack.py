"""Layers with several arguments: what one layer returns is spread over those of the next one.

    tuple           layer(*value)
    dict            layer(**value)
    anything else   layer(value)

A ``NamedTuple``, a list, a dataclass and a ``ModelOutput`` are one value each: they have names of
their own, which a layer that takes them apart knows.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

__all__ = ["PipeSequential", "Unpacked", "call_note", "chained", "unpacks"]


class PipeSequential(nn.Sequential):
    """An ``nn.Sequential`` whose layers may take and return several values.

    Tuples are spread over the positional arguments of the next layer and dicts over its keyword
    arguments, as in ``torch.distributed.pipeline.sync.PipeSequential``. It is the plain model of
    ``Pipe(..., unpack=True)``: a ``Pipe`` of one unpacks by itself, and so do
    :func:`syncpipe.balance.profile`, ``balance_by_time``, ``balance_by_size`` and ``plan``::

        model = PipeSequential(Embed(), Block(), Block(), Head())   # Block: (x, mask) -> (x, mask)
        logits = model(tokens, mask)
        pipe = Pipe(model, balance=[2, 2])
        logits = pipe((tokens, mask))
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the first layer with these arguments, and each other one with what came out."""
        layers = list(self._modules.values())
        if not layers:
            return args[0] if len(args) == 1 and not kwargs else args or kwargs
        first: Any = layers[0]
        return chained(layers[1:], first(*args, **kwargs))


class Unpacked:
    """A layer as a function of one value, which is spread over its arguments."""

    __slots__ = ("layer",)

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    def __call__(self, value: Any) -> Any:
        if type(value) is tuple:
            return self.layer(*value)
        return self.layer(**value) if type(value) is dict else self.layer(value)

    @property
    def training(self) -> bool:
        """The layer's mode."""
        return bool(self.layer.training)


def chained(layers: Iterable[Any], value: Any) -> Any:
    """Layers one after another, each with what the one before it returned."""
    for layer in layers:
        value = Unpacked(layer)(value)
    return value


def unpacks(module: nn.Module) -> bool:
    """Whether the layers of a module take their values apart."""
    return isinstance(module, PipeSequential)


def call_note(error: BaseException, layer: Any, value: Any, *, unpack: bool) -> str | None:
    """What to say of a layer that was called with other arguments than it takes.

    Args:
        error: what calling it raised.
        layer: the layer.
        value: what it was given.
        unpack: whether that was spread over its arguments.

    Returns:
        None if the call was right, or nobody knows.
    """
    if not isinstance(error, TypeError):
        return None
    whole = _fits(layer, lambda signature: signature.bind(value))
    if type(value) is tuple:
        what = f"a tuple of {len(value)}"
        spread = _fits(layer, lambda signature: signature.bind(*value))
    elif type(value) is dict:
        what = f"a dict with {', '.join(map(repr, value)) or 'no keys'}"
        spread = _fits(layer, lambda signature: signature.bind(**value))
    else:
        what, spread = f"one {type(value).__name__}", whole
    if unpack:
        return None if spread is not False else f"unpack=True called it with {what}"
    if whole is False and spread and what[0] == "a":
        return (
            f"it was called with {what} as its one argument, as in an nn.Sequential: "
            "Pipe(..., unpack=True) (or a syncpipe.PipeSequential) spreads tuples over arguments "
            "and dicts over keyword arguments"
        )
    if whole is False:
        return f"it was called with one argument, {what}"
    return None


def _fits(layer: Any, bind: Callable[[inspect.Signature], Any]) -> bool | None:
    """Whether a layer takes such arguments; None: nobody knows."""
    try:
        signature = inspect.signature(layer.forward if isinstance(layer, nn.Module) else layer)
    except (TypeError, ValueError):
        return None
    try:
        bind(signature)
    except TypeError:
        return False
    return True
