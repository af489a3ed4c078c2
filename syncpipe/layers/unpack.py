"""Layers with several arguments: the output of a layer is spread over the arguments of the next.

    tuple           layer(*value)
    dict            layer(**value)
    anything else   layer(value)

A ``NamedTuple``, a list, a dataclass and a ``ModelOutput`` are passed as one argument each.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

from torch import nn

__all__ = ["PipeSequential", "call_note", "chained", "spread", "unpacks"]


class PipeSequential(nn.Sequential):
    """An ``nn.Sequential`` whose layers may take and return several values.

    Tuples are spread over the positional arguments of the next layer and dicts over its keyword
    arguments, as in ``torch.distributed.pipeline.sync.PipeSequential``. This is the plain model of
    ``Pipe(..., unpack=True)``. ``Pipe``, :func:`syncpipe.balance.profile`, ``balance_by_time``,
    ``balance_by_size`` and ``plan`` set ``unpack`` by themselves for a ``PipeSequential``::

        model = PipeSequential(Embed(), Block(), Block(), Head())   # Block: (x, mask) -> (x, mask)
        logits = model(tokens, mask)
        pipe = Pipe(model, balance=[2, 2])
        logits = pipe((tokens, mask))
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the first layer with these arguments, and each other layer with the last output."""
        first, *layers = self._modules.values()
        return chained(layers, first(*args, **kwargs))


def spread(layer: Any, value: Any) -> Any:
    """Call a layer with one value, which is spread over its arguments."""
    if type(value) is tuple:
        return layer(*value)
    return layer(**value) if type(value) is dict else layer(value)


def chained(layers: Iterable[Any], value: Any) -> Any:
    """Call layers one after another, each with the output of the one before."""
    for layer in layers:
        value = spread(layer, value)
    return value


def unpacks(module: nn.Module) -> bool:
    """Whether the values between the layers of a module are spread over arguments."""
    return isinstance(module, PipeSequential)


def call_note(error: BaseException, layer: Any, value: Any, *, unpack: bool) -> str | None:
    """A note for ``error`` if ``layer`` does not take ``value`` (spread if ``unpack``)."""
    if not isinstance(error, TypeError):
        return None
    try:
        bind = inspect.signature(getattr(layer, "forward", layer)).bind
    except (TypeError, ValueError):
        return None  # its signature is unknown

    def fits(*args: Any, **kwargs: Any) -> bool:
        try:
            bind(*args, **kwargs)
        except TypeError:
            return False
        return True

    fits_spread, fits_alone = spread(fits, value), fits(value)
    if fits_spread if unpack else fits_alone:
        return None
    what = f"one {type(value).__name__}"
    if type(value) is tuple:
        what = f"a tuple of {len(value)}"
    elif type(value) is dict:
        what = f"a dict with {', '.join(map(repr, value)) or 'no keys'}"
    if unpack:
        return f"unpack=True called it with {what}"
    way = (
        ", as in an nn.Sequential: Pipe(..., unpack=True) (or a syncpipe.PipeSequential) spreads "
        "tuples over arguments and dicts over keyword arguments"
    )
    return f"it was called with {what} as its one argument{way if fits_spread else ''}"
