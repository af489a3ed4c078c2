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

from syncpipe.layers.listing import as_sequential, has_specs
from syncpipe.layers.materialize import (
    InitFn,
    Materializer,
    check_materializable,
    memory_of,
    waiting,
)
from syncpipe.layers.placement import move_layers
from syncpipe.layers.spec import LayerSpec, TieKey
from syncpipe.runtime.errors import annotate
from syncpipe.runtime.randomness.generators import Generators
from syncpipe.runtime.randomness.random import run_seeded
from syncpipe.runtime.worker import Worker
from syncpipe.skip import verify_skippables

__all__ = ["Initialization", "build_alone", "build_specs", "materialize", "on_meta"]

_T = TypeVar("_T")


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
        given = {"init_fn": init_fn, "seed": seed}
        for name, value in given.items():
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


def build_specs(
    partitions: Sequence[nn.Sequential],
    workers: Sequence[Worker],
    how: Initialization,
    stages: Sequence[tuple[int, int]] | None = None,
) -> bool:
    """Builds the specs of partitions, each on the device of its stage, one after another.

    Args:
        partitions: in which the layers take the place of their specs.
        workers: of the partitions.
        how: how they get their values.
        stages: for each partition its stage and the index of its first layer, if these are not all
            partitions of a model.

    Returns:
        Whether there were any.

    An exception of a constructor comes as itself, with a note that names the layer.

    Raises:
        TypeError, ValueError, AttributeError: what was built is no module, does not fit the
            others, or cannot share what it should.
    """
    if not any(map(has_specs, partitions)):
        return False
    owners = _owners(chain.from_iterable(partitions))
    whole = nn.Sequential()
    index = 0
    for k, (partition, worker) in enumerate(zip(partitions, workers, strict=True)):
        j, index = (k, index) if stages is None else stages[k]
        for name, layer in partition._modules.items():
            assert layer is not None
            if isinstance(layer, LayerSpec):
                note = f"while building layer {index} ({name!r}: {layer!r})"
                with _noted(f"{note} of stage {j} on {worker.device}"):
                    layer = _built(layer, index, worker.device, how)
                    _tie(layer, owners)
            partition._modules[name] = whole._modules[name] = layer
            index += 1
    if stages is None:
        verify_skippables(whole)
    return True


def build_alone(spec: LayerSpec, device: torch.device) -> nn.Module:
    """One layer by itself, on a device; on ``meta`` also one whose constructor needs values."""
    layer = None
    if device.type == "meta":
        with suppress(Exception), torch.device(device):
            layer = spec.build()
    if layer is None:
        with torch.device("cpu" if device.type == "meta" else memory_of(device)):
            layer = spec.build()
    move_layers([layer], [Worker.shared(device)], [])  # what the constructor put elsewhere
    return layer


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
    made = nn.Sequential()
    owners = _owners(module)
    for index, (name, layer) in enumerate(module._modules.items()):
        assert layer is not None
        if isinstance(layer, LayerSpec):
            with _noted(f"while building layer {index} ({name!r}: {layer!r}) on meta"):
                make = partial(build_alone, layer, torch.device("meta"))
                layer = _seeded(0, index, torch.device("cpu"), make)
                _tie(layer, owners)
        made._modules[name] = layer
    return made


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
    placed = [
        (index, worker.device, layer)
        for first, partition, worker in zip(before, partitions, workers, strict=False)
        for index, layer in enumerate(partition, first)
    ]
    stay: set[int] = set()  # what a stage on meta has, and others share with it
    layers = []
    for index, device, layer in placed:
        found = set(map(id, waiting(layer)))
        if device.type == "meta":
            stay |= found
        elif found - stay:
            layers.append((index, device, layer))
    for index, _, layer in layers:
        with _noted(f"in layer {index} ({type(layer).__name__})"):
            check_materializable(layer, how.init_fn)
    materializer = Materializer()
    try:
        for index, device, layer in layers:
            with _noted(f"while initialising layer {index} ({type(layer).__name__}) on {device}"):
                how.run(index, device, partial(materializer.run, layer, device, how.init_fn))
    except BaseException:
        materializer.undo()
        raise
    return bool(layers)


def _built(spec: LayerSpec, index: int, device: torch.device, how: Initialization) -> nn.Module:
    def make() -> nn.Module:
        layer = build_alone(spec, device)
        if how.init_fn is not None:
            with torch.no_grad(), torch.device(memory_of(device)):
                layer.apply(how.init_fn)
        return layer

    return how.run(index, device, make)


@contextmanager
def _noted(note: str) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        annotate(error, note)
        raise


def _owners(layers: Iterable[nn.Module]) -> dict[Any, nn.Module]:
    """Of the layers that are there already the first one for each key of a ``TiedLayerSpec``."""
    owners: dict[Any, nn.Module] = {}
    for layer in layers:
        tie: TieKey | None = vars(layer).get("_syncpipe_tie")
        if tie is not None:
            owners.setdefault(tie.key, layer)
    return owners


def _tie(layer: nn.Module, owners: dict[Any, nn.Module]) -> None:
    """Lets a layer share what its ``TiedLayerSpec`` says with the first one of its key."""
    tie: TieKey | None = vars(layer).get("_syncpipe_tie")
    if tie is None:
        return
    owner = owners.setdefault(tie.key, layer)
    for attribute in tie.attributes:
        own, shared = (_tensor(module, attribute) for module in (layer, owner))
        if own is shared:
            continue
        if _described(own) != _described(shared):
            raise ValueError(
                f"{attribute!r} of this {type(layer).__name__} is {_described(own)}, and that of "
                f"the {type(owner).__name__} with which it is tied by the key {tie.key!r} is "
                f"{_described(shared)}: they must be alike"
            )
        for module in layer.modules():
            for name, value in [*module._parameters.items(), *module._buffers.items()]:
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
