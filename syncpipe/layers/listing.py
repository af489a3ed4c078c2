"""What a pipe can be made of: an ``nn.Sequential``, or a list of modules, callables and specs.

``LayerSpec`` and ``TiedLayerSpec`` are known from DeepSpeed.
"""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextvars import ContextVar
from itertools import chain
from pathlib import PurePath
from types import BuiltinFunctionType, CellType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from syncpipe.layers.placement import check_module

__all__ = [
    "Function", "Layer", "LayerSpec", "Layers", "TiedLayerSpec", "as_layer", "as_sequential",
    "has_specs", "type_name",
]  # fmt: skip

Layer = nn.Module | Callable[..., Any]
#: What ``Pipe``, ``plan`` and the functions of ``syncpipe.balance`` take.
#: (To a type checker a list of modules and functions is one of objects.)
Layers = nn.Sequential | nn.ModuleList | Iterable[Any] | Mapping[str, Any]


def as_sequential(layers: Any) -> nn.Sequential:
    """The layers as an ``nn.Sequential``: the very one that was given, if there is nothing to do.

    Args:
        layers: an ``nn.Sequential``; or anything that yields layers, or a mapping of names to
            layers. A layer is a module, a callable or a :class:`LayerSpec`; the same spec may come
            several times, and stands for another layer each time.
    """
    if isinstance(layers, nn.Sequential) and not has_specs(layers):
        check_module(layers)
        return layers
    made, named = nn.Sequential(), dict[str, Any]()
    if isinstance(layers, nn.Sequential):
        made, named = copy.copy(layers), dict(layers._modules)
    elif isinstance(layers, Mapping):
        named = dict(layers)
    else:
        no_list = isinstance(layers, (str, bytes, Set, Tensor, nn.Module))
        if not isinstance(layers, Iterable) or (no_list and not isinstance(layers, nn.ModuleList)):
            check_module(layers)  # says what it should be
        named = {str(index): layer for index, layer in enumerate(layers)}
    made._modules = {}
    for index, (name, layer) in enumerate(named.items()):
        made.add_module(name, as_layer(layer, f"layer {index}"))
    check_module(made)
    return made


def has_specs(module: nn.Sequential) -> bool:
    """Whether there are layers that are yet to be built."""
    return any(isinstance(layer, LayerSpec) for layer in module._modules.values())


def as_layer(layer: Any, where: str) -> nn.Module:
    """One layer as a module; of a spec a copy, for the same one may stand for several layers.

    ``where`` names it in errors.
    """
    if isinstance(layer, nn.Module):
        return copy.copy(layer) if isinstance(layer, LayerSpec) else layer
    if callable(layer) and not isinstance(layer, type):
        try:
            return Function(layer)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{where}: {error}") from None
    what, way = f"a {type(layer).__name__} ({layer!r:.60})", "a layer is a module, a callable or a "
    way += "LayerSpec"
    if isinstance(layer, type):
        what, name = f"the class {layer.__name__}", layer.__name__
        way = f"write {name}(...), or LayerSpec({name}, ...) to have it built on its device"
    elif isinstance(layer, (list, tuple)):
        what = f"a {type(layer).__name__}"
        way = "unpack it into the list around it (*layers), or make one layer of it by " + (
            "nn.Sequential(*layers)"
        )
    raise TypeError(f"{where} is {what}: {way}")


def type_name(layer: nn.Module) -> str:
    """The name of the type of a layer; of a callable its own, of a spec that of what it builds."""
    if isinstance(layer, Function):
        return _name(layer.function)
    return layer.type_name if isinstance(layer, LayerSpec) else type(layer).__name__


# Specs


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
        if isinstance(typename, nn.Module) or not callable(typename):
            raise TypeError(
                f"{kind}({_brief(typename)}): the first argument must be a class of modules, or a "
                f"function that returns a module, such as {kind}(nn.Linear, 3, 3); a module that "
                f"is there already needs no {kind}"
            )
        self.typename = typename
        self.module_args = args
        self.module_kwargs = kwargs

    @property
    def type_name(self) -> str:
        """The name of what will be built, for ``balance="type:regex"``."""
        return _name(self.typename)

    def build(self) -> nn.Module:
        """Make the layer, on the default device (``with torch.device(...):``).

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
        key = [repr(self.key)] if isinstance(self, TiedLayerSpec) else []
        given = [f"{name}={_brief(value)}" for name, value in self.module_kwargs.items()]
        shown = [*key, self.type_name, *map(_brief, self.module_args), *given]
        return f"{type(self).__name__}({', '.join(shown)})"


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
        self.key, self.forward_fn, self.tied_weight_attr = key, forward_fn, tied_weight_attr
        self._tie = key, tuple(names)

    def build(self) -> nn.Module:
        """Make the layer, with weights of its own."""
        layer = super().build()
        layer.__dict__["_syncpipe_tie"] = self._tie
        for name in self._tie[1]:
            tied_tensor(layer, name)  # it is there
        if self.forward_fn is not None:
            layer.__dict__["forward"] = functools.partial(_forward, layer, self.forward_fn)
        return layer


def tied_tensor(layer: nn.Module, name: str) -> Tensor:
    """The parameter or buffer of a layer that ``tied_weight_attr`` names."""
    for path, tensor in chain(
        layer.named_parameters(remove_duplicate=False), layer.named_buffers(remove_duplicate=False)
    ):
        if path == name:
            return tensor
    raise AttributeError(
        f"tied_weight_attr={name!r}: {type(layer).__name__} has no parameter and no buffer there"
    )


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


# Callables

#: What is looked into for weights.
_HOLD = (functools.partial, MethodType, FunctionType, CellType, tuple, dict)


class Function(nn.Module):
    """A callable as a layer, without parameters.

    It can be copied and pickled if the callable can; like any layer it may draw random numbers and
    write into its input. Its ``repr`` shows what it calls and the line where that is written.

    Args:
        function: called with what the layer before returned.
    """

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function
        if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
            raise TypeError(
                f"{self.extra_repr()} returns a generator or a coroutine, no output: for skips "
                "write a class with @skippable"
            )
        for owner in _held(function):
            if isinstance(owner, nn.Parameter) or (
                isinstance(owner, nn.Module) and [*owner.parameters(), *owner.buffers()]
            ):
                raise ValueError(
                    f"{self.extra_repr()} uses a {type(owner).__name__}, whose values would be "
                    "none of the pipe's: they would stay on their device, out of its parameters() "
                    "and state_dict(). Make it part of an nn.Module, and that the layer; for one "
                    "weight in two layers there is TiedLayerSpec"
                )

    def forward(self, input: Any) -> Any:
        """Calls the function."""
        return self.function(input)

    def extra_repr(self) -> str:
        plain = inspect.unwrap(_innermost(self.function))
        code = getattr(plain, "__code__", None)
        if code is None and not isinstance(plain, BuiltinFunctionType):
            code = getattr(type(plain).__call__, "__code__", None)
        where = f", {PurePath(code.co_filename).name}:{code.co_firstlineno}" if code else ""
        return _name(self.function) + where


def _name(function: Any) -> str:
    """The name of a callable, without that of its module."""
    plain = _innermost(function)
    return str(getattr(plain, "__name__", type(plain).__name__))


def _innermost(function: Any) -> Any:
    """What a ``functools.partial`` calls."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _brief(value: Any) -> str:
    if isinstance(value, (Tensor, nn.Module)):
        return type(value).__name__
    return str(getattr(value, "__name__", "")) or reprlib.repr(value)


def _held(function: Any) -> list[Any]:
    """What a callable holds, as far as one can see."""
    found, seen = [function], {id(function)}
    for thing in found:
        if thing is function or isinstance(thing, _HOLD):
            # Neither what is named in its module.
            seen |= {id(getattr(thing, name, None)) for name in ("__globals__", "__builtins__")}
            found += [held for held in gc.get_referents(thing) if id(held) not in seen]
            seen |= set(map(id, found))
    return found
