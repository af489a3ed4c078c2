"""From specs and layers on ``meta`` to layers on the devices of their stages."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from syncpipe.layers.listing import LayerSpec, as_sequential, has_specs
from syncpipe.layers.placement import move_layers
from syncpipe.runtime.errors import annotate
from syncpipe.runtime.random_numbers import Generators, run_seeded
from syncpipe.runtime.worker import Worker
from syncpipe.skip import verify_skippables

__all__ = [
    "Initialization", "Materializer", "build_alone", "build_specs", "materialize", "on_meta",
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
        """From what was given to a pipe.

        Raises:
            TypeError: of the wrong type.
            ValueError: given, but there is nothing to initialise.
        """
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
        """Calls what builds a layer, with the generators as they should be for it."""
        if self.seed is None:
            return make()
        # Seeds that are neighbours must not give neighbouring layers the same numbers.
        return _seeded(random.Random(self.seed).getrandbits(63), layer, device, make)


def _seeded(seed: int, layer: int, device: torch.device, make: Callable[[], _T]) -> _T:
    generators = Generators(device)
    made, _ = run_seeded(
        generators, generators.all, (seed, layer, 0), lambda _: make(), None, observe=False
    )
    return cast("_T", made)


@contextmanager
def _noted(note: str) -> Iterator[None]:
    try:
        yield
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

    Args:
        partitions: in which the layers take the place of their specs.
        workers: of the partitions.
        how: how they get their values.
        stages: for each partition its stage and the index of its first layer, if these are not all
            partitions of a model.

    An exception of a constructor comes as itself, with a note that names the layer.

    Raises:
        TypeError, ValueError, AttributeError: what was built is no module, does not fit the
            others, or cannot share what it should.
    """
    if not any(map(has_specs, partitions)):
        return
    ties = _Ties(chain.from_iterable(partitions))
    firsts = accumulate(map(len, partitions), initial=0)
    for (j, first), partition, worker in zip(
        stages or enumerate(firsts), partitions, workers, strict=False
    ):

        def build(spec: LayerSpec, index: int, device: torch.device = worker.device) -> nn.Module:
            def make() -> nn.Module:
                layer = build_alone(spec, device)
                if how.init_fn is not None:
                    with torch.no_grad(), torch.device(_memory_of(device)):
                        layer.apply(how.init_fn)
                return layer

            return how.run(index, device, make)

        ties.built(partition._modules, build, f"of stage {j} on {worker.device}", first)
    if stages is None:
        verify_skippables(nn.Sequential(*chain.from_iterable(partitions)))


def on_meta(layers: Any) -> nn.Sequential:
    """What will be built, to look at: layers as they are, and specs as layers on ``meta``.

    The host holds at most one layer meanwhile, if its constructor needs values. Generators stay as
    they are.

    Args:
        layers: as for :func:`as_sequential`.

    Raises:
        TypeError, ValueError: as :func:`as_sequential` and :func:`build_specs`.
    """
    module = as_sequential(layers)
    if not has_specs(module):
        return module

    def build(spec: LayerSpec, index: int) -> nn.Module:
        make = partial(build_alone, spec, torch.device("meta"))
        return _seeded(0, index, torch.device("cpu"), make)

    made = nn.Sequential()
    made._modules = dict(module._modules)
    _Ties(module).built(made._modules, build, "on meta")
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


class _Ties:
    """Lets layers share what their ``TiedLayerSpec`` says with the first one of their key."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        self._owners: dict[Any, nn.Module] = {}
        for layer in layers:  # those that are there already
            if (tie := vars(layer).get("_syncpipe_tie")) is not None:
                self._owners.setdefault(tie[0], layer)

    def built(
        self,
        layers: Any,
        build: Callable[[LayerSpec, int], nn.Module],
        where: str,
        first: int = 0,
    ) -> None:
        """Replaces the specs in a dict of layers; ``first`` is the index of the first of these."""
        for index, (name, layer) in enumerate(layers.items(), first):
            if isinstance(layer, LayerSpec):
                with _noted(f"while building layer {index} ({name!r}: {layer!r}) {where}"):
                    layers[name] = made = build(layer, index)
                    key, attributes = vars(made).get("_syncpipe_tie", (None, ()))
                    for attribute in attributes:
                        _share(made, self._owners.setdefault(key, made), key, attribute)


def _share(layer: nn.Module, owner: nn.Module, key: Any, attribute: str) -> None:
    own, shared = (_tensor(module, attribute) for module in (layer, owner))
    if own is shared:
        return
    if _described(own) != _described(shared):
        raise ValueError(
            f"{attribute!r} of this {type(layer).__name__} is {_described(own)}, and that of "
            f"the {type(owner).__name__} with which it is tied by the key {key!r} is "
            f"{_described(shared)}: they must be alike"
        )
    for module in layer.modules():
        for name, value in _own(module):
            if value is own:
                setattr(module, name, shared)


def _tensor(module: nn.Module, attribute: str) -> Tensor:
    try:
        tensor = operator.attrgetter(attribute)(module)
    except AttributeError as error:
        raise AttributeError(
            f"tied_weight_attr={attribute!r}: {type(module).__name__} has no such attribute"
        ) from error
    if not any(tensor is own for own in chain(module.parameters(), module.buffers())):
        raise TypeError(
            f"tied_weight_attr={attribute!r}: in {type(module).__name__} that is no parameter and "
            f"no buffer, but a {type(tensor).__name__}"
        )
    return cast("Tensor", tensor)


def _described(tensor: Tensor) -> str:
    kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
    return f"a {kind} {tensor.dtype} {list(tensor.shape)}"


# Values for what is on meta


def materialize(
    partitions: Sequence[nn.Sequential],
    workers: Sequence[Worker],
    how: Initialization,
    firsts: Sequence[int] | None = None,
) -> bool:
    """Gives layers on ``meta`` memory and values on the device of their stage, layer by layer.

    Args:
        partitions: of a model, or some of them.
        workers: of the partitions.
        how: how they get their values.
        firsts: of these some the index of the first layer.

    Returns:
        Whether there were any.

    Raises:
        ValueError: a tensor that nobody gives a value; then all are on ``meta`` as before.
    """
    before = list(accumulate(map(len, partitions), initial=0)) if firsts is None else firsts
    materializer, found = Materializer(), False
    stay: set[int] = set()  # what a stage on meta has, and others share with it
    try:
        for first, partition, worker in zip(before, partitions, workers, strict=False):
            for index, layer in enumerate(partition, first):
                here, device = set(map(id, waiting(layer))), worker.device
                if device.type == "meta":
                    stay |= here
                elif here - stay:
                    found, run = True, partial(materializer.run, layer, device, how.init_fn)
                    kind = type(layer).__name__
                    with _noted(f"while initialising layer {index} ({kind}) on {device}"):
                        how.run(index, device, run)
    except BaseException:
        materializer.undo()
        raise
    return found


class Materializer:
    """Gives the tensors of layers on ``meta`` memory and values, layer by layer.

    The first of several layers that share a tensor owns it: it is where that layer is, with the
    values that it has there.

    Args:
        zeros: what nobody gives a value is zero, instead of an error.
    """

    def __init__(self, *, zeros: bool = False) -> None:
        self._zeros = zeros
        self._owned: dict[int, tuple[Tensor, Any]] = {}  # by id; the old one is kept alive
        self._before: list[tuple[nn.Module, str, Tensor]] = []

    def run(self, layer: nn.Module, device: torch.device, init_fn: InitFn | None) -> None:
        """Materialises one layer in place.

        All of its modules get their ``reset_parameters()``, children first, and then ``init_fn``,
        but those that have tensors with values already.

        Raises:
            ValueError: there is a tensor that nobody gives a value.
        """
        order: list[nn.Module] = []
        layer.apply(order.append)
        new = [module for module in dict.fromkeys(order) if _all_waits(module)]
        places = [
            (path, module, name, tensor)
            for path, module in layer.named_modules()
            for name, tensor in _own(module)
            if tensor.is_meta
        ]
        made: dict[int, tuple[Any, ...]] = {}
        for path, module, name, tensor in places:
            resets = _reset_of(module) is not None
            if not self._zeros and not _all_waits(module) and module not in new:
                raise ValueError(_refusal(path, module, name, "others of its tensors are not"))
            if not self._zeros and not resets and init_fn is None:
                raise ValueError(_refusal(path, module, name, f"it has no {_RESETS[0]}()"))
            if id(tensor) not in made:
                made[id(tensor)] = _empty(tensor, device, self._zeros), path, module, name
            self._before.append((module, name, tensor))
            setattr(module, name, made[id(tensor)][0])  # not into its dict: an RNN has lists, too
        with torch.device(_memory_of(device)), torch.no_grad():
            for reset in filter(None, map(_reset_of, new)):
                reset()
            for module in new if init_fn is not None else ():
                cast("InitFn", init_fn)(module)
        still = {id(getattr(module, name)) for _, module, name, _ in places}
        for tensor, path, module, name in made.values():
            # A lazy module's first forward gives it shapes, and resets it.
            lazy = any(is_lazy(own) for _, own in _own(module))
            if not self._zeros and not lazy and id(tensor) in still and _unset(tensor):
                tried = [f"its {_RESETS[0]}()"] * (_reset_of(module) is not None)
                tried += ["init_fn"] * (init_fn is not None)
                why = f"{' and '.join(tried)} did not set all of it"
                raise ValueError(_refusal(path, module, name, why))
        for _, module, name, old in places:
            owned = self._owned.setdefault(id(old), (old, getattr(module, name)))[1]
            setattr(module, name, owned)
        for module in new:
            if isinstance(module, nn.RNNBase):
                module.flatten_parameters()

    def undo(self) -> None:
        """Everything is on ``meta`` again."""
        for module, name, tensor in reversed(self._before):
            setattr(module, name, tensor)


def waiting(module: nn.Module) -> list[Tensor]:
    """The tensors of a module that are on ``meta``."""
    return [tensor for tensor in chain(module.parameters(), module.buffers()) if tensor.is_meta]


def _memory_of(device: torch.device) -> torch.device:
    """Where the tensors of a worker are: a CPU worker has no memory of its own."""
    return torch.device("cpu") if device.type == "cpu" else device


def _own(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in chain(module._parameters.items(), module._buffers.items()):
        if tensor is not None:
            yield name, tensor


def _all_waits(module: nn.Module) -> bool:
    tensors = list(chain(module.parameters(), module.buffers()))
    return bool(tensors) and all(tensor.is_meta for tensor in tensors)


def _reset_of(module: nn.Module) -> Callable[[], Any] | None:
    return next((getattr(module, name) for name in _RESETS if hasattr(module, name)), None)


def _refusal(path: str, module: nn.Module, name: str, why: str) -> str:
    kind = type(module).__name__
    where = f" at {path!r}" if path else ""
    return (
        f"{kind}{where} has {name!r} on meta, without values, and {why}: write a {_RESETS[0]}() "
        f"for {kind} that sets all its parameters and buffers, give Pipe an init_fn= that does, "
        "or build the layer by a LayerSpec instead"
    )


def _empty(tensor: Tensor, device: torch.device, zeros: bool) -> Any:
    """Memory for a tensor, filled with what nobody sets; what else is known of it stays."""
    if is_lazy(tensor):
        kind: Any = type(tensor)
        return kind(
            requires_grad=tensor.requires_grad, device=_memory_of(device), dtype=tensor.dtype
        )
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
