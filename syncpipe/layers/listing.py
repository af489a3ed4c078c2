"""What a pipe can be made of: an ``nn.Sequential``, or a list of modules, callables and specs.

Specs (as in DeepSpeed) and layers on ``meta`` get memory and values on the devices of their stages.
"""

from __future__ import annotations

import copy
import gc
import inspect
import operator
import random
import reprlib
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain
from pathlib import PurePath
from types import BuiltinFunctionType, CellType, FunctionType, MethodType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from syncpipe.hints import caller_stacklevel
from syncpipe.layers.placement import check_module
from syncpipe.layers.ties import move_layers
from syncpipe.progress import progress_bar
from syncpipe.runtime.errors import annotate
from syncpipe.runtime.random_numbers import Generators, run_seeded
from syncpipe.storage import places_of

__all__ = [
    "Function", "Initialization", "Layer", "LayerSpec", "Layers", "TiedLayerSpec", "as_layer",
    "as_sequential", "build_alone", "build_layers", "give_values", "has_specs", "on_meta",
    "or_as_before", "type_name", "waiting",
]  # fmt: skip

_T = TypeVar("_T")
Layer = nn.Module | Callable[..., Any]
#: What ``Pipe``, ``plan`` and the functions of ``syncpipe.balance`` take.
#: ``Any``, because type checkers infer a list of modules and functions as a list of objects.
Layers = nn.Sequential | nn.ModuleList | Iterable[Any] | Mapping[str, Any]
#: Initialises one module, as for ``nn.Module.apply``.
InitFn = Callable[[nn.Module], Any]
_RESETS = ("reset_parameters", "_reset_parameters")  # the latter is nn.MultiheadAttention's
#: Types whose contents are searched for weights.
_SEARCHED = (partial, MethodType, FunctionType, CellType, tuple, dict)


def as_sequential(layers: Any) -> nn.Sequential:
    """The layers as an ``nn.Sequential``; one without specs is returned itself.

    Args:
        layers: an ``nn.Sequential``, an iterable of layers, or a mapping of names to layers. A
            layer is a module, a callable or a :class:`LayerSpec`. A spec that occurs several times
            makes a new layer each time.
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
            check_module(layers)  # raises
        named = {str(index): layer for index, layer in enumerate(layers)}
    made._modules = {}
    for index, (name, layer) in enumerate(named.items()):
        made.add_module(name, as_layer(layer, f"layer {index}"))
    check_module(made)
    return made


def has_specs(module: nn.Sequential) -> bool:
    """Whether layers are still to be built."""
    return any(isinstance(layer, LayerSpec) for layer in module._modules.values())


def as_layer(layer: Any, where: str) -> nn.Module:
    """One layer as a module; a spec is copied, because it may make several layers.

    ``where`` names the layer in errors.
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
    """The name of a layer's type, of the callable, or of what a spec builds."""
    if isinstance(layer, Function):
        return _name_of(layer.function)
    return layer.type_name if isinstance(layer, LayerSpec) else type(layer).__name__


# Specs


class LayerSpec(nn.Module):
    """A layer to be built later, directly on the device of its stage::

        pipe = Pipe([LayerSpec(nn.Linear, 4096, 4096) for _ in range(48)], balance="parameters")

    A spec takes the place of the layer in a list or an ``nn.Sequential``. It cannot run itself.

    Args:
        typename: a class of modules, or a function that returns a new module.
        module_args: positional arguments for ``typename``.
        module_kwargs: keyword arguments for ``typename``.

    Raises:
        TypeError: ``typename`` cannot be called, or is a module already.
    """

    def __init__(self, typename: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> None:
        super().__init__()
        kind = type(self).__name__
        if isinstance(typename, nn.Module) or not callable(typename):
            raise TypeError(
                f"{kind}({_brief(typename)}): the first argument must be a class of modules, or a "
                f"function that returns a module, for example {kind}(nn.Linear, 3, 3); an existing "
                f"module needs no {kind}"
            )
        self.typename = typename
        self.module_args = args
        self.module_kwargs = kwargs

    @property
    def type_name(self) -> str:
        """The name of ``typename``, for ``balance="type:regex"``."""
        return _name_of(self.typename)

    def build(self) -> nn.Module:
        """Make the layer, on the default device (``with torch.device(...):``).

        Raises:
            TypeError: ``typename`` returned no module.
        """
        layer = self.typename(*self.module_args, **self.module_kwargs)
        if not isinstance(layer, nn.Module) or isinstance(layer, LayerSpec):
            raise TypeError(f"{self!r} built a {type(layer).__name__}, no nn.Module")
        return layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raises TypeError: the layer is not built."""
        raise TypeError(f"{self!r} is not built yet: give it to a Pipe, or call its build()")

    def __repr__(self) -> str:
        key = [repr(self.key)] if isinstance(self, TiedLayerSpec) else []
        given = [f"{name}={_brief(value)}" for name, value in self.module_kwargs.items()]
        shown = [*key, self.type_name, *map(_brief, self.module_args), *given]
        return f"{type(self).__name__}({', '.join(shown)})"


class TiedLayerSpec(LayerSpec):
    """A layer that shares weights with the first layer of the same key::

        layers = [
            TiedLayerSpec("embed", nn.Embedding, 50257, 768),
            *[LayerSpec(Block, 768) for _ in range(12)],
            TiedLayerSpec("embed", nn.Embedding, 50257, 768, forward_fn=to_logits),
        ]                       # def to_logits(module, x): return F.linear(x, module.weight)

    The first layer with a key is the owner. Each later one is built as its own layer, and then gets
    the owner's parameter, as by ``last.weight = first.weight``.

    Args:
        key: equal for all layers that share.
        typename, module_args, module_kwargs: as for :class:`LayerSpec`.
        forward_fn: ``forward_fn(module, input)`` instead of the layer's own ``forward``.
        tied_weight_attr: the name of the shared parameter or buffer, or a list of names;
            ``"inner.weight"`` for one of a submodule.

    Raises:
        TypeError: as for :class:`LayerSpec`, or ``forward_fn`` is no function, or
            ``tied_weight_attr`` no name or list of names.
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
        """Make the layer; its weights are not shared yet."""
        layer = super().build()
        layer.__dict__["_syncpipe_tie"] = self._tie
        for name in self._tie[1]:
            _tied_tensor(layer, name)  # raises if it is missing
        if self.forward_fn is not None:
            layer.__dict__["forward"] = partial(_forward, layer, self.forward_fn)
        return layer


def _tied_tensor(layer: nn.Module, name: str) -> Tensor:
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
    """Call ``forward_fn``; in it, ``layer(...)`` runs the layer's own forward."""
    if _running.get() is layer:
        return type(layer).forward(layer, *args, **kwargs)
    token = _running.set(layer)
    try:
        return forward_fn(layer, *args, **kwargs)
    finally:
        _running.reset(token)


# Callables


class Function(nn.Module):
    """A callable as a layer, without parameters.

    It can be copied and pickled if the callable can. Its ``repr`` shows the callable and its line.

    Args:
        function: called with the output of the layer before; it may draw random numbers and write
            into its input.

    Raises:
        TypeError: ``function`` is a generator or a coroutine function.
        ValueError: ``function`` holds parameters, or a module with parameters or buffers.
    """

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function
        if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
            raise TypeError(
                f"{self.extra_repr()} returns a generator or a coroutine, no output: for skips "
                "write a class with @skippable"
            )
        for owner in _referents(function):
            if isinstance(owner, nn.Parameter) or (
                isinstance(owner, nn.Module) and [*owner.parameters(), *owner.buffers()]
            ):
                raise ValueError(
                    f"{self.extra_repr()} uses a {type(owner).__name__}, whose values would "
                    "stay on their device, missing in the pipe's parameters() and state_dict(). "
                    "Make it part of an nn.Module, and use that as the layer. Use TiedLayerSpec "
                    "for one weight in two layers"
                )

    def forward(self, input: Any) -> Any:
        return self.function(input)

    def extra_repr(self) -> str:
        plain = inspect.unwrap(_innermost(self.function))
        code = getattr(plain, "__code__", None)
        if code is None and not isinstance(plain, BuiltinFunctionType):
            code = getattr(type(plain).__call__, "__code__", None)
        where = f", {PurePath(code.co_filename).name}:{code.co_firstlineno}" if code else ""
        return _name_of(self.function) + where


def _name_of(function: Any) -> str:
    """The name of a callable, without that of its module."""
    plain = _innermost(function)
    return str(getattr(plain, "__name__", type(plain).__name__))


def _innermost(function: Any) -> Any:
    while isinstance(function, partial):
        function = function.func
    return function


def _brief(value: Any) -> str:
    if isinstance(value, (Tensor, nn.Module)):
        return type(value).__name__
    return str(getattr(value, "__name__", "")) or reprlib.repr(value)


def _referents(function: Any) -> list[Any]:
    """All objects that a callable holds, as far as the garbage collector shows them."""
    found, seen = [function], {id(function)}
    for thing in found:
        if thing is function or isinstance(thing, _SEARCHED):
            # Not what its module holds.
            seen |= {id(getattr(thing, name, None)) for name in ("__globals__", "__builtins__")}
            found += [held for held in gc.get_referents(thing) if id(held) not in seen]
            seen |= set(map(id, found))
    return found


# Building


@dataclass(frozen=True)
class Initialization:
    """How the layers that a pipe builds get their initial values.

    Attributes:
        init_fn: called with each of their modules, children first.
        seed: the random numbers of layer ``l`` depend on ``(seed, l)`` only. With None, layers draw
            from PyTorch's global generators, one after another.
    """

    init_fn: InitFn | None = None
    seed: int | None = None

    @classmethod
    def checked(cls, module: nn.Sequential, init_fn: Any, seed: Any) -> Initialization:
        if init_fn is not None and not callable(init_fn):
            raise TypeError(f"init_fn={init_fn!r}: must be a function that initialises a module")
        if seed is not None:
            if isinstance(seed, bool) or not hasattr(seed, "__index__"):
                raise TypeError(f"seed={seed!r}: must be an integer")
            seed = operator.index(seed)
            if not 0 <= seed < 2**64:
                raise ValueError(f"seed={seed}: must be at least 0 and less than 2**64")
        for name, value in (("init_fn", init_fn), ("seed", seed)):
            if value is not None and not has_specs(module) and not waiting(module):
                raise ValueError(
                    f"{name}={value!r}: there is nothing to initialise, because all layers exist "
                    "already: build them on meta (with torch.device('meta'):), or give LayerSpecs"
                )
        return cls(init_fn, seed)

    def run(self, layer: int, device: torch.device, make: Callable[[], _T]) -> _T:
        """Call ``make`` with the generators seeded for a layer."""
        if self.seed is None:
            return make()
        # Hash the seed: seed 1, layer 2 must not draw the numbers of seed 2, layer 1.
        key = (random.Random(self.seed).getrandbits(63), layer, 0)
        all_of, run = Generators(device), lambda _: make()
        made, _ = run_seeded(all_of, all_of.all, key, run, None, observe=False)
        return cast("_T", made)


def build_layers(
    partitions: Sequence[nn.Module],
    devices: Sequence[torch.device],
    initial: Initialization,
    firsts: Sequence[int] | None = None,
) -> None:
    """Build specs, and materialise layers on ``meta``, one layer after another.

    Layers get memory on the device of their partition. Layers of a stage on ``meta`` stay there.

    Args:
        partitions: layers by name; a built layer replaces its spec.
        devices: one per partition.
        initial: where their values are from.
        firsts: the index of the first layer of each partition, if they are not a whole model.

    Raises:
        BaseException: what a layer raised, with a note that names the layer.
    """
    owned: dict[int, tuple[Tensor, Tensor]] = {}
    staying: set[int] = set()  # tensors of stages on meta, which other stages may share
    built = set[nn.Module]()
    sizes = [len(partition._modules) for partition in partitions]
    firsts = list(accumulate(sizes, initial=0)) if firsts is None else firsts
    with progress_bar("fill layers", "layer", sum(sizes)) as bar:
        for first, partition, device in zip(firsts, partitions, devices, strict=False):
            layers: dict[str, Any] = partition._modules
            for index, (name, layer) in enumerate(layers.items(), first):
                bar.update()
                if isinstance(layer, LayerSpec):
                    verb, make = "building", partial(build_alone, layer, device, initial.init_fn)
                elif device.type == "meta":
                    staying |= set(map(id, waiting(layer)))
                    continue
                elif set(map(id, waiting(layer))) - staying:
                    verb, make = (
                        "initialising",
                        partial(give_values, layer, device, initial.init_fn, owned),
                    )
                else:
                    continue
                try:
                    layers[name] = initial.run(index, device, make)
                except BaseException as error:
                    shown = repr(layer) if verb == "building" else type(layer).__name__
                    annotate(error, f"while {verb} layer {index} ({name!r}: {shown}) on {device}")
                    raise
                if verb == "building":
                    built.add(layers[name])
    for module, _, name, tensor in list(chain.from_iterable(map(places_of, partitions))):
        if id(tensor) in owned:  # also on a stage that stays on meta
            setattr(module, name, owned[id(tensor)][1])
    _tie(chain.from_iterable(partition.children() for partition in partitions), built)


def or_as_before(partitions: Sequence[nn.Module], run: Callable[[], _T]) -> _T:
    """Call ``run``, which materialises layers on ``meta``, and keep their tensor objects.

    An optimizer that was made before therefore trains the right parameters. After an error the
    tensors are on ``meta`` again.
    """
    every = chain.from_iterable(map(places_of, partitions))
    before = [(module, name, tensor) for module, _, name, tensor in every if tensor.is_meta]
    recurrent = {module for module, *_ in before if isinstance(module, nn.RNNBase)}
    kept: dict[int, tuple[Tensor, Tensor]] = {}
    try:
        found = run()
        for rnn in recurrent:
            rnn._flat_weight_refs = []  # swap_tensors refuses tensors with weak references
        for module, name, old in before:
            new = getattr(module, name, old)
            if old.is_meta and not new.is_meta and _swap(old, new, name):
                kept[id(new)] = new, old
        for module, _, name, tensor in list(chain.from_iterable(map(places_of, partitions))):
            if id(tensor) in kept:
                setattr(module, name, kept[id(tensor)][1])
        for rnn in recurrent:
            rnn._init_flat_weights()
        return found
    except BaseException:
        for rnn in recurrent:
            rnn._flat_weight_refs = []
        for module, name, old in before:
            if not old.is_meta:
                _swap(old, _allocate(old, torch.device("meta"), zeros=True), name)
            setattr(module, name, old)
        raise


def _swap(old: Any, new: Any, name: str) -> bool:
    """Swap the values of ``new`` into ``old``, which keeps its hooks; returns whether it could."""
    vars(new).update({key: value for key, value in vars(old).items() if key not in vars(new)})
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if getattr(old, hooks, None):
            setattr(new, hooks, getattr(old, hooks))
    try:
        torch.utils.swap_tensors(old, new)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        warnings.warn(
            f"{name} was on meta, and another tensor with values is in its place now ({error}): an "
            "optimizer that was made before would not train it; make it of pipe.parameters()",
            stacklevel=caller_stacklevel(),
        )
        return False
    return True


def on_meta(layers: Any) -> nn.Sequential:
    """The layers with each spec built on ``meta``, for inspection.

    A layer whose constructor needs values is in host memory for a moment. Global generators do not
    advance.
    """
    module = as_sequential(layers)
    if not has_specs(module):
        return module
    made = nn.Sequential()
    made._modules = dict(module._modules)
    build_layers([made], [torch.device("meta")], Initialization(seed=0))
    return made


def build_alone(spec: LayerSpec, device: torch.device, init_fn: InitFn | None = None) -> nn.Module:
    """Build one layer on a device; ``meta`` works also if the constructor needs values."""
    layer = None
    if device.type == "meta":
        with suppress(Exception), torch.device(device):
            layer = spec.build()
    if layer is None:
        with torch.device("cpu" if device.type == "meta" else _memory(device)):
            layer = spec.build()
    move_layers([layer], [device])  # the constructor may have put tensors elsewhere
    if init_fn is not None:
        with torch.no_grad(), torch.device(_memory(device)):
            layer.apply(init_fn)
    return layer


def _tie(layers: Iterable[nn.Module], built: set[nn.Module]) -> None:
    """Tie built layers to the first layer of their key.

    Layers that existed before come first and keep their values, if they have any.
    """
    owners: dict[Any, nn.Module] = {}
    for layer in sorted(layers, key=built.__contains__):
        key, attributes = vars(layer).get("_syncpipe_tie", (None, ()))
        owner = owners.setdefault(key, layer)
        for attribute in attributes if layer in built else ():
            mine, other = (_tied_tensor(each, attribute) for each in (layer, owner))
            if _kind(mine) != _kind(other):
                raise ValueError(
                    f"{attribute!r} of this {type(layer).__name__} is {_kind(mine)}, and that of "
                    f"the {type(owner).__name__} with which it is tied by the key {key!r} is "
                    f"{_kind(other)}: they must be alike"
                )
            kept = mine if other.is_meta and not mine.is_meta else other
            for module, _, name, tensor in [*places_of(layer), *places_of(owner)]:
                if tensor is mine or tensor is other:
                    setattr(module, name, kept)


def _kind(tensor: Tensor) -> str:
    what = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
    return f"a {what} {tensor.dtype} {list(tensor.shape)}"


# Values for what is on meta


def give_values(
    layer: nn.Module,
    device: torch.device,
    init_fn: InitFn | None,
    owned: dict[int, tuple[Tensor, Tensor]],
    *,
    zeros: bool = False,
) -> nn.Module:
    """Give the tensors of a layer that are on ``meta`` memory and values, in place.

    Calls ``reset_parameters()`` of its modules, children first, and then ``init_fn``, except for
    modules that have tensors with values. With ``zeros``, tensors that remain unset are zero
    instead of an error.

    The first of several layers that share a tensor determines its device and values. ``owned``
    maps the id of each old tensor to the old and the new one.
    """
    order: list[nn.Module] = []
    layer.apply(order.append)
    new = [m for m in dict.fromkeys(order) if 0 < len(list(places_of(m))) == len(waiting(m))]
    places = [(module, name, old) for module, _, name, old in places_of(layer) if old.is_meta]
    memory = {id(old): _allocate(old, device, zeros) for *_, old in places}
    for module, name, old in places:  # by setattr: an RNN also keeps them in a list
        setattr(module, name, memory[id(old)])
    with torch.device(_memory(device)), torch.no_grad():
        for module in new:
            if reset := next((n for n in _RESETS if hasattr(module, n)), None):
                getattr(module, reset)()
        for module in new if init_fn is not None else ():
            cast("InitFn", init_fn)(module)
    for module, name, old in places:
        value = getattr(module, name)
        if value is memory[id(old)] and not zeros and _is_unset(value):
            kind = type(module).__name__
            path = next(path for path, each in layer.named_modules() if each is module)
            raise ValueError(
                f"{kind}{f' at {path!r}' if path else ''} has {name!r} on meta, without values, "
                f"and nothing sets all of it: write a {_RESETS[0]}() for {kind} that sets all its "
                "parameters and buffers (it is called where all of them are on meta), give Pipe an "
                "init_fn= that does, or build the layer by a LayerSpec instead"
            )
        setattr(module, name, owned.setdefault(id(old), (old, value))[1])
    for module in new:
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()
    return layer


def waiting(module: nn.Module) -> list[Tensor]:
    return [tensor for *_, tensor in places_of(module) if tensor.is_meta]


def _memory(device: torch.device) -> torch.device:
    """The device of a worker's tensors: CPU workers share one memory."""
    return torch.device("cpu") if device.type == "cpu" else device


def _allocate(tensor: Tensor, device: torch.device, zeros: bool) -> Any:
    """An uninitialised tensor, filled with the sentinel that ``_is_unset`` finds."""
    made: Any = torch.empty_like(tensor.detach(), device=_memory(device))
    plain, odd = _sentinel(made)
    plain.fill_(0 if zeros else odd)
    if isinstance(tensor, nn.Parameter):
        made = torch.Tensor._make_subclass(type(tensor), made, tensor.requires_grad)
    made.__dict__.update(vars(tensor))
    return made


def _is_unset(tensor: Tensor) -> bool:
    """Whether any element of a float tensor, or every element of another one, was never set."""
    plain, odd = _sentinel(tensor.detach())
    if plain.is_floating_point() or plain.is_complex():
        return bool(plain.isnan().any())
    return plain.numel() > 0 and bool((plain == odd).all())


def _sentinel(tensor: Tensor) -> tuple[Tensor, float]:
    """A view to fill, and the sentinel: NaN, a large integer, or a byte that is no bool."""
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor, float("nan")
    if tensor.dtype is torch.bool:
        return tensor.view(torch.uint8), 2
    return tensor, torch.iinfo(tensor.dtype).max - 3
