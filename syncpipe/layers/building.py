"""From specs and layers on ``meta`` to layers on the devices of their stages."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from syncpipe.layers.listing import LayerSpec, as_sequential, has_specs
from syncpipe.layers.placement import move_layers
from syncpipe.runtime.errors import annotate
from syncpipe.runtime.random_numbers import Generators, run_seeded
from syncpipe.runtime.worker import Worker
from syncpipe.skip import verify_skippables

__all__ = [
    "Initialization", "build_alone", "build_specs", "give_values", "materialize", "on_meta",
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

    def run(self, layer: int, device: torch.device, make: Callable[[], _T], note: str) -> _T:
        """Calls what builds a layer, with the generators as they should be for it."""
        try:
            if self.seed is None:
                return make()
            # Seeds that are neighbours must not give neighbouring layers the same numbers.
            key = (random.Random(self.seed).getrandbits(63), layer, 0)
            all_of, run = Generators(device), lambda _: make()
            made, _ = run_seeded(all_of, all_of.all, key, run, None, observe=False)
            return cast("_T", made)
        except BaseException as error:
            annotate(error, note)
            raise


# Specs


def build_specs(
    partitions: Sequence[nn.Sequential],
    workers: Sequence[Worker],
    how: Initialization,
    stages: Sequence[tuple[int, int]] | None = None,
) -> None:
    """Builds the specs of partitions, each on the device of its stage, one after another.

    ``stages`` has for each partition its stage and the index of its first layer, if these are not
    all partitions of a model. An exception of a constructor comes as itself, with a note that names
    the layer.
    """
    if not any(map(has_specs, partitions)):
        return
    owners: dict[Any, nn.Module] = {}  # by key the first layer with a ``TiedLayerSpec``
    for layer in chain.from_iterable(partitions):
        if (tie := vars(layer).get("_syncpipe_tie")) is not None:
            owners.setdefault(tie[0], layer)

    def build(layers: Any, name: str, spec: LayerSpec, device: torch.device) -> None:
        layers[name] = made = build_alone(spec, device)
        if how.init_fn is not None:
            with torch.no_grad(), torch.device(_memory_of(device)):
                made.apply(how.init_fn)
        key, attributes = vars(made).get("_syncpipe_tie", (None, ()))
        for attribute in attributes:
            _share(made, owners.setdefault(key, made), key, attribute)

    places = stages or list(enumerate(accumulate(map(len, partitions), initial=0)))
    for (j, first), partition, worker in zip(places, partitions, workers, strict=False):
        for index, (name, spec) in enumerate(partition._modules.items(), first):
            if isinstance(spec, LayerSpec):
                device, what = worker.device, f"layer {index} ({name!r}: {spec!r})"
                run = partial(build, partition._modules, name, spec, device)
                how.run(index, device, run, f"while building {what} of stage {j} on {device}")
    if stages is None:
        verify_skippables(nn.Sequential(*chain.from_iterable(partitions)))


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
    build_specs([made], [Worker.shared(torch.device("meta"))], Initialization(seed=0), [(0, 0)])
    return made


def build_alone(spec: LayerSpec, device: torch.device) -> nn.Module:
    """One layer by itself, on a device; on ``meta`` also one whose constructor needs values."""
    layer = None
    if device.type == "meta":
        with suppress(Exception), torch.device(device):
            layer = spec.build()
    if layer is None:
        with torch.device("cpu" if device.type == "meta" else _memory_of(device)):
            layer = spec.build()
    move_layers([layer], [Worker.shared(device)], [])  # what the constructor put elsewhere
    return layer


def _share(layer: nn.Module, owner: nn.Module, key: Any, attribute: str) -> None:
    """Lets a layer have a parameter or buffer of the owner in place of its own."""
    found, kinds = [], []
    for module in (layer, owner):
        try:
            tensor = operator.attrgetter(attribute)(module)
        except AttributeError:
            tensor = None
        if not any(tensor is own for own in _tensors(module)):
            raise AttributeError(
                f"tied_weight_attr={attribute!r}: {type(module).__name__} has no parameter and no "
                "buffer there"
            )
        kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
        found.append(tensor)
        kinds.append(f"a {kind} {tensor.dtype} {list(tensor.shape)}")
    if kinds[0] != kinds[1]:
        raise ValueError(
            f"{attribute!r} of this {type(layer).__name__} is {kinds[0]}, and that of "
            f"the {type(owner).__name__} with which it is tied by the key {key!r} is "
            f"{kinds[1]}: they must be alike"
        )
    for name, tensor in _named(layer):
        if tensor is found[0]:
            _set(layer, name, found[1])


# Values for what is on meta


def materialize(
    partitions: Sequence[nn.Sequential],
    workers: Sequence[Worker],
    how: Initialization,
    firsts: Sequence[int] | None = None,
) -> bool:
    """Gives layers on ``meta`` memory and values on the device of their stage, layer by layer.

    ``firsts`` are the indices of the first layers of partitions that are not all of a model.

    Returns:
        Whether there were any.
    """
    before = [
        (layer, *named) for layer in partitions for named in _named(layer) if named[1].is_meta
    ]
    firsts = list(accumulate(map(len, partitions), initial=0)) if firsts is None else firsts
    owned: dict[int, tuple[Tensor, Tensor]] = {}
    stay: set[int] = set()  # what a stage on meta has, and others share with it
    try:
        for first, partition, worker in zip(firsts, partitions, workers, strict=False):
            for index, layer in enumerate(partition, first):
                here, device = set(map(id, waiting(layer))), worker.device
                if device.type == "meta":
                    stay |= here
                elif here - stay:
                    run = partial(give_values, layer, device, how.init_fn, owned)
                    kind = type(layer).__name__
                    note = f"while initialising layer {index} ({kind}) on {device}"
                    how.run(index, device, run, note)
    except BaseException:
        for layer, name, tensor in before:
            _set(layer, name, tensor)
        raise
    return bool(owned)


def give_values(
    layer: nn.Module,
    device: torch.device,
    init_fn: InitFn | None,
    owned: dict[int, tuple[Tensor, Tensor]],
    *,
    zeros: bool = False,
) -> None:
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
    places = [(name, tensor) for name, tensor in _named(layer) if tensor.is_meta]
    memory = {id(tensor): _empty(tensor, device, zeros) for _, tensor in places}
    for name, tensor in places:
        _set(layer, name, memory[id(tensor)])
    with torch.device(_memory_of(device)), torch.no_grad():
        for module in new:
            if reset := next((n for n in _RESETS if hasattr(module, n)), None):
                getattr(module, reset)()
        for module in new if init_fn is not None else ():
            cast("InitFn", init_fn)(module)
    for name, old in places:
        path, _, own = name.rpartition(".")
        module = layer.get_submodule(path)
        value = getattr(module, own)
        if value is memory[id(old)] and not zeros and _unset(value):
            kind = type(module).__name__
            raise ValueError(
                f"{kind}{f' at {path!r}' if path else ''} has {own!r} on meta, without values, and "
                f"nothing sets all of it: write a {_RESETS[0]}() for {kind} that sets all its "
                "parameters and buffers (it is called where all of them are on meta), give Pipe an "
                "init_fn= that does, or build the layer by a LayerSpec instead"
            )
        _set(layer, name, owned.setdefault(id(old), (old, value))[1])
    for module in new:
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()


def waiting(module: nn.Module) -> list[Tensor]:
    """The tensors of a module that are on ``meta``."""
    return [tensor for tensor in _tensors(module) if tensor.is_meta]


def _memory_of(device: torch.device) -> torch.device:
    """Where the tensors of a worker are: a CPU worker has no memory of its own."""
    return torch.device("cpu") if device.type == "cpu" else device


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _named(module: nn.Module) -> list[tuple[str, Tensor]]:
    found = (module.named_parameters, module.named_buffers)
    return [named for each in found for named in each(remove_duplicate=False)]


def _set(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Not into the dict of the owner: an RNN has its parameters in a list, too."""
    path, _, own = name.rpartition(".")
    setattr(module.get_submodule(path), own, tensor)


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
