"""Layers that are yet to be built: ``LayerSpec`` and ``TiedLayerSpec``, known from DeepSpeed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

from torch import nn

from syncpipe.layers.callables import function_name, shown_arguments

__all__ = ["LayerSpec", "TieKey", "TiedLayerSpec"]


class LayerSpec(nn.Module):
    """A layer that is built when its stage is known, directly on the device of that stage::

        pipe = Pipe([LayerSpec(nn.Linear, 4096, 4096) for _ in range(48)], balance="parameters")

    It stands for the layer in lists and in an ``nn.Sequential``, and cannot run itself.

    Args:
        typename: a class of modules, or any function that returns a new module.
        module_args: what to call it with.
        module_kwargs: likewise.

    Raises:
        TypeError: ``typename`` cannot be called, or is a module already.
    """

    def __init__(self, typename: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> None:
        super().__init__()
        kind = type(self).__name__
        if isinstance(typename, nn.Module):
            raise TypeError(
                f"{kind}({type(typename).__name__}(...)): that is a module already; write "
                f"{kind}({type(typename).__name__}, ...) to have it built, or leave {kind} out"
            )
        if not callable(typename):
            raise TypeError(
                f"{kind}({typename!r}): the first argument must be a class of modules, or a "
                "function that returns a module"
            )
        self.typename = typename
        self.module_args = args
        self.module_kwargs = kwargs

    @property
    def type_name(self) -> str:
        """The name of what will be built, for ``balance="type:regex"``."""
        return function_name(self.typename)

    def build(self) -> nn.Module:
        """Makes the layer, on the default device (``with torch.device(...):``).

        Raises:
            TypeError: no module came out.
        """
        layer = self.typename(*self.module_args, **self.module_kwargs)
        if not isinstance(layer, nn.Module) or isinstance(layer, LayerSpec):
            raise TypeError(f"{self!r} built a {type(layer).__name__}, no nn.Module")
        return layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: there is no layer yet."""
        raise TypeError(f"{self!r} is not built yet: give it to a Pipe, or call its build()")

    def __repr__(self) -> str:
        given = shown_arguments(self.module_args, self.module_kwargs)
        shown = [*self._first(), self.type_name, *given]
        return f"{type(self).__name__}({', '.join(shown)})"

    def _first(self) -> list[str]:
        return []


class TieKey:
    """What a layer that a ``TiedLayerSpec`` built shares with others of the same key."""

    def __init__(self, key: Any, attributes: tuple[str, ...]) -> None:
        self.key = key
        self.attributes = attributes


class TiedLayerSpec(LayerSpec):
    """A layer that shares weights with those before it that have the same key::

        layers = [
            TiedLayerSpec("embed", nn.Embedding, 50257, 768),
            *[LayerSpec(Block, 768) for _ in range(12)],
            TiedLayerSpec("embed", nn.Embedding, 50257, 768, forward_fn=to_logits),
        ]                       # def to_logits(module, x): return F.linear(x, module.weight)

    The first layer with a key is the owner; each later one is a layer of its own, in which the
    owner's parameter takes the place of its own, as if one had written
    ``last.weight = first.weight``.

    Args:
        key: says which layers belong together.
        typename: as for :class:`LayerSpec`.
        module_args: likewise.
        forward_fn: ``forward_fn(module, input)`` instead of the layer's own ``forward``.
        tied_weight_attr: the parameter (or buffer) that is shared, or a list of these;
            ``"inner.weight"`` for one of a submodule.
        module_kwargs: likewise.

    Raises:
        TypeError: as for :class:`LayerSpec`; or ``forward_fn`` or ``tied_weight_attr`` is none.
    """

    def __init__(
        self,
        key: Any,
        typename: Callable[..., nn.Module],
        *args: Any,
        forward_fn: Callable[[nn.Module, Any], Any] | None = None,
        tied_weight_attr: str | Sequence[str] = "weight",
        **kwargs: Any,
    ) -> None:
        super().__init__(typename, *args, **kwargs)
        if forward_fn is not None and not callable(forward_fn):
            raise TypeError(f"forward_fn={forward_fn!r}: must be a function (module, input)")
        names = (tied_weight_attr,) if isinstance(tied_weight_attr, str) else tied_weight_attr
        if not (isinstance(names, Sequence) and names and all(type(n) is str for n in names)):
            raise TypeError(
                f"tied_weight_attr={tied_weight_attr!r}: must be the name of a parameter, or a "
                "list of names"
            )
        self.key = key
        self.forward_fn = forward_fn
        self.tied_weight_attr = tied_weight_attr
        self._tie = TieKey(key, tuple(names))

    def build(self) -> nn.Module:
        """Makes the layer, whose weights are its own still."""
        layer = super().build()
        layer.__dict__["_syncpipe_tie"] = self._tie
        if self.forward_fn is not None:
            layer.__dict__["forward"] = functools.partial(_forward, layer, self.forward_fn)
        return layer

    def _first(self) -> list[str]:
        return [repr(self.key)]


_running: ContextVar[nn.Module | None] = ContextVar("syncpipe_tied_layer", default=None)


def _forward(layer: nn.Module, forward_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls ``forward_fn``, within which the layer has its own forward."""
    if _running.get() is layer:
        return type(layer).forward(layer, *args, **kwargs)
    token = _running.set(layer)
    try:
        return forward_fn(layer, *args, **kwargs)
    finally:
        _running.reset(token)
