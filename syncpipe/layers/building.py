"""From specs and layers on ``meta`` to layers on the devices of their stages."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from syncpipe.data import places_of
from syncpipe.layers.listing import LayerSpec, as_sequential, has_specs, tied_tensor
from syncpipe.layers.ties import move_layers
from syncpipe.runtime.errors import annotate
from syncpipe.runtime.random_numbers import Generators, run_seeded

__all__ = [
    "Initialization", "build_alone", "build_layers", "give_values", "on_meta", "or_as_before",
    "waiting",
]  # fmt: skip

_T = TypeVar("_T")
#: Initialises one module: what ``nn.Module.apply`` takes.
InitFn = Callable[[nn.Module], Any]
_RESETS = ("reset_parameters", "_reset_parameters")  # the latter is nn.MultiheadAttention's


@dataclass(frozen=True)
class Initialization:
    """How layers that a pipe builds get their first values.

    Attributes:
        init_fn: called with each of their modules, children first.
        seed: what layer ``l`` draws depends on ``(seed, l)`` alone; None: it draws from PyTorch's
            generators as they are, one layer after another.
    """

    init_fn: InitFn | None = None
    seed: int | None = None

    @classmethod
    def checked(cls, module: nn.Sequential, init_fn: Any, seed: Any) -> Initialization:
        """From what was given to a pipe."""
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
                    f"{name}={value!r}: there is nothing to initialise, for all layers are there "
                    "already: build them on meta (with torch.device('meta'):), or give LayerSpecs"
                )
        return cls(init_fn, seed)

    def run(self, layer: int, device: torch.device, make: Callable[[], _T]) -> _T:
        """Calls what makes a layer, with the generators as they should be for it."""
        if self.seed is None:
            return make()
        # Seeds that are neighbours must not give neighbouring layers the same numbers.
        key = (random.Random(self.seed).getrandbits(63), layer, 0)
        all_of, run = Generators(device), lambda _: make()
        made, _ = run_seeded(all_of, all_of.all, key, run, None, observe=False)
        return cast("_T", made)


def build_layers(
    partitions: Sequence[nn.Module],
    devices: Sequence[torch.device],
    how: Initialization,
    firsts: Sequence[int] | None = None,
) -> None:
    """Builds specs, and gives layers on ``meta`` memory and values, one layer after another.

    Each comes to be on the device of its partition; on a stage on ``meta`` it stays there.

    Args:
        partitions: layers by name; what is built takes the place of its spec.
        devices: one for each partition.
        how: where their values are from.
        firsts: the indices of the first layers of partitions that are not all of a model.

    Raises:
        BaseException: what a layer raised, with a note that names it.
    """
    owned: dict[int, tuple[Tensor, Tensor]] = {}
    stay: set[int] = set()  # what a stage on meta has, and others share with it
    built = set[nn.Module]()
    sizes = [len(partition._modules) for partition in partitions]
    firsts = list(accumulate(sizes, initial=0)) if firsts is None else firsts
    for first, partition, device in zip(firsts, partitions, devices, strict=False):
        layers: dict[str, Any] = partition._modules
        for index, (name, layer) in enumerate(layers.items(), first):
            if isinstance(layer, LayerSpec):
                verb, make = "building", partial(build_alone, layer, device, how.init_fn)
            elif device.type == "meta":
                stay |= set(map(id, waiting(layer)))
                continue
            elif set(map(id, waiting(layer))) - stay:
                verb, make = "initialising", partial(give_values, layer, device, how.init_fn, owned)
            else:
                continue
            try:
                layers[name] = how.run(index, device, make)
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
    """Calls what gives layers on ``meta`` values; if it fails, they are there again."""
    every = chain.from_iterable(map(places_of, partitions))
    before = [(module, name, tensor) for module, _, name, tensor in every if tensor.is_meta]
    try:
        return run()
    except BaseException:
        for place in before:
            setattr(*place)
        raise


# Specs


def on_meta(layers: Any) -> nn.Sequential:
    """What will be built, to look at: layers as they are, and specs as layers on ``meta``.

    The host holds at most one layer meanwhile, if its constructor needs values. Generators stay as
    they are.
    """
    module = as_sequential(layers)
    if not has_specs(module):
        return module
    made = nn.Sequential()
    made._modules = dict(module._modules)
    build_layers([made], [torch.device("meta")], Initialization(seed=0))
    return made


def build_alone(spec: LayerSpec, device: torch.device, init_fn: InitFn | None = None) -> nn.Module:
    """One layer by itself, on a device; on ``meta`` also one whose constructor needs values."""
    layer = None
    if device.type == "meta":
        with suppress(Exception), torch.device(device):
            layer = spec.build()
    if layer is None:
        with torch.device("cpu" if device.type == "meta" else _memory_of(device)):
            layer = spec.build()
    move_layers([layer], [device])  # what the constructor put elsewhere
    if init_fn is not None:
        with torch.no_grad(), torch.device(_memory_of(device)):
            layer.apply(init_fn)
    return layer


def _tie(layers: Iterable[nn.Module], built: set[nn.Module]) -> None:
    """Has layers share what they are told to with the first one of their key, if one is new."""
    owners: dict[Any, nn.Module] = {}
    for layer in layers:
        key, attributes = vars(layer).get("_syncpipe_tie", (None, ()))
        owner = owners.setdefault(key, layer)
        for attribute in attributes if built & {owner, layer} else ():
            mine, other = (tied_tensor(each, attribute) for each in (layer, owner))
            if _kind(mine) != _kind(other):
                raise ValueError(
                    f"{attribute!r} of this {type(layer).__name__} is {_kind(mine)}, and that of "
                    f"the {type(owner).__name__} with which it is tied by the key {key!r} is "
                    f"{_kind(other)}: they must be alike"
                )
            for module, _, name, tensor in list(places_of(layer)):
                if tensor is mine:
                    setattr(module, name, other)


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
    """Gives the tensors of a layer that are on ``meta`` memory and values, in place.

    All of its modules get their ``reset_parameters()``, children first, and then ``init_fn``, but
    those that have tensors with values already. With ``zeros`` what nobody gives a value is zero,
    instead of an error.

    The first of several layers that share a tensor owns it: it is where that layer is, with the
    values that it has there. These are in ``owned``, with the old one, by the id of that.
    """
    order: list[nn.Module] = []
    layer.apply(order.append)
    new = [m for m in dict.fromkeys(order) if 0 < len(_tensors(m)) == len(waiting(m))]
    places = [(module, name, old) for module, _, name, old in places_of(layer) if old.is_meta]
    memory = {id(old): _empty(old, device, zeros) for *_, old in places}
    for module, name, old in places:  # not into its dict: an RNN has them in a list, too
        setattr(module, name, memory[id(old)])
    with torch.device(_memory_of(device)), torch.no_grad():
        for module in new:
            if reset := next((n for n in _RESETS if hasattr(module, n)), None):
                getattr(module, reset)()
        for module in new if init_fn is not None else ():
            cast("InitFn", init_fn)(module)
    for module, name, old in places:
        value = getattr(module, name)
        if value is memory[id(old)] and not zeros and _unset(value):
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
    """The tensors of a module that are on ``meta``."""
    return [tensor for tensor in _tensors(module) if tensor.is_meta]


def _memory_of(device: torch.device) -> torch.device:
    """Where the tensors of a worker are: a CPU worker has no memory of its own."""
    return torch.device("cpu") if device.type == "cpu" else device


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _empty(tensor: Tensor, device: torch.device, zeros: bool) -> Any:
    """Memory for a tensor, filled with what nobody sets; what else is known of it stays."""
    made: Any = torch.empty_like(tensor.detach(), device=_memory_of(device))
    plain, odd = _odd(made)
    plain.fill_(0 if zeros else odd)
    if isinstance(tensor, nn.Parameter):
        made = torch.Tensor._make_subclass(type(tensor), made, tensor.requires_grad)
    made.__dict__.update(vars(tensor))
    return made


def _unset(tensor: Tensor) -> bool:
    """Whether some number of floats, or all of another tensor, was not set since."""
    plain, odd = _odd(tensor.detach())
    if plain.is_floating_point() or plain.is_complex():
        return bool(plain.isnan().any())
    return plain.numel() > 0 and bool((plain == odd).all())


def _odd(tensor: Tensor) -> tuple[Tensor, float]:
    """A tensor to be filled with what nobody sets, and that: NaN, a far number, or no bool."""
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor, float("nan")
    if tensor.dtype is torch.bool:
        return tensor.view(torch.uint8), 2
    return tensor, torch.iinfo(tensor.dtype).max - 3
