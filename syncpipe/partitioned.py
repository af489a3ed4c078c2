"""An ``nn.Sequential`` that is cut into partitions, each on a device of its own.

What ``Pipe`` is before it runs anything: the layers under their own names, the balance, the
devices; and what must not change behind its back.
"""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from textwrap import indent
from typing import Any, Self, cast, overload

import torch
from torch import Tensor, nn

from syncpipe.balance.by_name import balance_named
from syncpipe.layers.batchnorm_convert import defer_batch_norm
from syncpipe.layers.building import Initialization, build_specs, materialize
from syncpipe.layers.conversion.layer import in_order
from syncpipe.layers.conversion.sequential import batch_input
from syncpipe.layers.listing import Layer, Layers, as_layer, as_sequential, has_specs
from syncpipe.layers.placement import (
    check_balance,
    check_devices,
    check_module,
    check_no_hooks,
    default_devices,
    missing_balance,
    move_layers,
    moves,
    placed_balance,
    resolve_workers,
)
from syncpipe.layers.state_dict_keys import translate_keys
from syncpipe.layers.ties import check_memory, check_replicas, find_ties
from syncpipe.layers.time_first import watch_time_first
from syncpipe.layers.unpack import PipeSequential, unpacks
from syncpipe.options.checkpoint import modes_of_stages
from syncpipe.options.replicas import checked_replicas, counts_of, partitions_for, split
from syncpipe.runtime.streams import same_memory
from syncpipe.runtime.worker import Worker
from syncpipe.skip import verify_skippables
from syncpipe.stages.pipeline import Pipeline
from syncpipe.stages.run import Partition

__all__ = ["Partitioned"]


_AS_IT_COMES = Initialization()


class Partitioned(nn.Module):
    """The layers of an ``nn.Sequential`` on several devices; arguments are those of ``Pipe``."""

    _syncpipe_skips_are_internal = True
    _checkpoint: Any

    def _cut(
        self,
        layers: Layers,
        balance: Iterable[int] | str | None,
        devices: Iterable[Any] | None,
        deferred_batch_norm: bool,
        init_fn: Any = None,
        seed: Any = None,
        unpack: bool = False,
        sample: Any = None,
        replicas: Any = 1,
    ) -> None:
        """The last thing to do in ``__init__``: a layer may be named as an attribute is."""
        module = as_sequential(layers)
        if not has_specs(module):
            verify_skippables(module)
        how = Initialization.checked(module, init_fn, seed)
        self._asked_replicas = checked_replicas(replicas)
        if balance is None:
            if replicas != 1:
                raise ValueError(f"replicas={replicas!r} needs balance=[...] and devices=[...]")
            balance, devices = _placed(module, devices)
        self._asked_devices = None if devices is None else check_devices(devices)
        sizes = self._sizes(balance, module, sample)
        # Straight into the dict: the names are the module's own, whatever attributes we have.
        self._modules.update(module._modules)
        self.training, self._defers = module.training, deferred_batch_norm
        self._unpack = unpack or unpacks(module)
        self._place(sizes, self._resolve(len(sizes)), how)

    def _sizes(
        self, balance: Iterable[int] | str, module: nn.Sequential, sample: Any = None
    ) -> list[int]:
        """The balance as numbers; by name there is a partition for each device."""
        if sample is not None:
            sample = batch_input(module, sample)
            if not isinstance(balance, str):
                raise ValueError("sample= is what balance='time' measures with: leave it out")
        if isinstance(balance, str):
            devices = default_devices(0) if self._asked_devices is None else self._asked_devices
            replicas = self._asked_replicas
            if not devices and not isinstance(replicas, int):
                devices = default_devices(sum(replicas))
            if not devices:
                balance_named(balance, module, 1)  # whether it is a name at all
                raise ValueError(
                    f"balance={balance!r} makes a partition for each device, but there are no "
                    "devices: give devices=['cpu:0', 'cpu:1'], for example"
                )
            first = resolve_workers(devices, 1)[0].device
            partitions = partitions_for(replicas, balance, len(devices))
            partitions = min(partitions, max(1, len(module)))
            balance = balance_named(balance, module, partitions, sample=sample, device=first)
        return check_balance(balance, len(module))

    def _resolve(
        self, partitions: int, devices: list[Any] | None = None, replicas: Any = None
    ) -> list[tuple[Worker, ...]]:
        """For each partition its workers, of the devices and replicas that were asked for."""
        devices = self._asked_devices if devices is None else devices
        counts = counts_of(self._asked_replicas if replicas is None else replicas, partitions)
        total = sum(counts)
        if devices is None:
            devices = default_devices(total)
        elif total > partitions and len(devices) != total:
            raise ValueError(
                f"replicas={counts} need {total} devices, those of the first stage first, but "
                f"{len(devices)} are given: {', '.join(map(str, devices))}"
            )
        return split(counts, resolve_workers(devices, total))

    def _place(
        self,
        balance: list[int],
        served: list[tuple[Worker, ...]],
        how: Initialization = _AS_IT_COMES,
    ) -> None:
        """Cuts the layers and moves them; leaves everything as it was when that is refused."""
        workers = [those[0] for those in served]
        layers = iter(cast("dict[str, nn.Module]", self._modules).items())
        partitions = []
        old: list[Partition] = self.__dict__.get("_partitions", [])
        same = self.__dict__.get("_balance") == balance
        for j, size in enumerate(balance):
            partition = Partition()
            if same:  # hooks, which are on the partitions that people have seen
                partition.__dict__.update({**old[j].__dict__, "_modules": {}})
            partition._modules.update(islice(layers, size))
            partition.training, partition.defers = self.training, self._defers
            partition.unpack = self._unpack
            partitions.append(partition)
        if not same:
            check_no_hooks(old)
        built = build_specs(partitions, workers, how)
        modes = modes_of_stages(self._checkpoint, [k for part in partitions for k in part], balance)
        ties = find_ties(partitions)
        check_replicas(ties, list(map(len, served)))
        if not all(same_memory(worker.device, workers[0].device) for worker in workers):
            check_memory(partitions)
        if materialize(partitions, workers, how):  # which makes other tensors
            ties = find_ties(partitions)
        if built:
            for partition in partitions:
                self._modules.update(partition._modules)
        if self._defers:
            defer_batch_norm(self)
        move_layers(partitions, workers, ties)
        for j, partition in enumerate(partitions):
            places = [place for tie in ties for place in tie.places if place.stage == j]
            partition.tied = frozenset(place.full_name for place in places)
        self._balance, self._workers, self._partitions = balance, workers, partitions
        self._served = served
        self._modes = modes
        self._layers = tuple(self._modules.values())
        self._pipeline: Pipeline | None = None
        self._watched = False

    @property
    def balance(self) -> list[int]:
        """For each partition the number of its layers. Setting it cuts the layers anew."""
        return list(self._balance)

    @balance.setter
    def balance(self, balance: Iterable[int] | str) -> None:
        sizes = self._sizes(balance, self[:])
        self._place(sizes, self._resolve(len(sizes)))

    @property
    def devices(self) -> list[torch.device]:
        """For each partition its device, or those of its replicas. Setting it moves the layers."""
        return [worker.device for those in self._served for worker in those]

    @devices.setter
    def devices(self, devices: Iterable[Any]) -> None:
        asked = check_devices(devices)
        self._place(self._balance, self._resolve(len(self._balance), asked))
        self._asked_devices = asked

    @property
    def replicas(self) -> list[int]:
        """For each partition how many devices serve it. Setting it deals the devices anew."""
        return list(map(len, self._served))

    @replicas.setter
    def replicas(self, replicas: int | Iterable[int]) -> None:
        asked = checked_replicas(replicas)
        self._place(self._balance, self._resolve(len(self._balance), replicas=asked))
        self._asked_replicas = asked

    @property
    def partitions(self) -> list[nn.Sequential]:
        """For each stage its layers, as an ``nn.Sequential`` that shares them with the pipe."""
        self._follow_layers()
        return list(self._partitions)

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(cast("list[nn.Module]", list(self._modules.values())))

    @overload
    def __getitem__(self, index: int) -> nn.Module: ...

    @overload
    def __getitem__(self, index: slice) -> nn.Sequential: ...

    def __getitem__(self, index: int | slice) -> nn.Module:
        items = cast("list[tuple[str, nn.Module]]", list(self._modules.items()))
        if isinstance(index, slice):
            return (PipeSequential if self._unpack else nn.Sequential)(OrderedDict(items[index]))
        try:
            return items[operator.index(index)][1]
        except IndexError:
            raise IndexError(f"layer {index} does not exist: the pipe has {len(self)}") from None

    def _follow_layers(self) -> None:
        """Notices layers that were replaced by name (``pipe.fc = ...``, quantization, LoRA)."""
        if tuple(self._modules.values()) == self._layers:
            return
        self._check_layers()
        self._place(check_balance(self._balance, len(self)), self._served)

    def _watch(self, input: Any, chunks: int = 1) -> None:
        """In the first call, looks for modules to which dimension 0 is time."""
        if not self._watched:
            self._watched = watch_time_first(self.named_modules(), input, chunks)

    def _check_layers(self) -> nn.Sequential:
        """The layers by themselves, as far as they can be checked before specs are built."""
        module = nn.Sequential()
        module._modules.update(cast("dict[str, nn.Module]", self._modules))
        check_module(module)
        if not has_specs(module):
            verify_skippables(module)
        return module

    def __setitem__(self, index: int, layer: Layer) -> None:
        """Puts another layer in the place of one, in its stage and under its name.

        A module goes to the device of its stage, a spec is built there. The other layers keep
        their parameters, and the optimizer its state: tell it of the new ones by
        ``optimizer.add_param_group``. What is refused changes nothing.
        """
        try:
            index = range(len(self))[operator.index(index)]
        except IndexError:
            raise IndexError(f"layer {index} does not exist: the pipe has {len(self)}") from None
        before = dict(self._modules)
        try:
            self._modules[list(before)[index]] = as_layer(layer, f"the new layer {index}")
            self._check_layers()
            self._place(self._balance, self._served)
        except BaseException:
            self._modules.update(before)
            raise

    def train(self, mode: bool = True) -> Self:
        """As ``nn.Module.train``."""
        super().train(mode)
        for partition in self._partitions:
            partition.training = mode
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # All that moves or casts a module comes here, that of a module around it as well.
        if moves(fn, self.devices):
            raise TypeError(
                "this would move a Pipe (or a module that contains it), or forget its values, but "
                "its partitions are on devices of their own: set pipe.devices = [...], or make the "
                "Pipe with devices=[...]"
            )
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, *args: Any
    ) -> None:
        translate_keys(state_dict, prefix, self)
        if local_metadata.get("assign_to_params_buffers", False):
            homes = dict(zip(self._modules, self._layer_devices(), strict=True))
            for key, value in state_dict.items():
                name = key[len(prefix) :].split(".", 1)[0]
                if key.startswith(prefix) and name in homes and isinstance(value, Tensor):
                    state_dict[key] = value.to(homes[name])
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)

    def _named_members(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        return in_order(self, *args, **kwargs)

    def _shown_stages(self) -> Iterator[str]:
        """The lines of the ``repr`` that show the layers."""
        layers = iter(self._modules.items())
        for j, (size, those) in enumerate(zip(self._balance, self._served, strict=True)):
            yield f"  stage {j} on {', '.join(str(worker.device) for worker in those)}:"
            for name, layer in islice(layers, size):
                yield indent(f"({name}): {layer!r}", "    ")

    def _shown_replicas(self) -> str:
        """For the ``repr``; nothing where each stage has one device."""
        return f"replicas={self.replicas}, " if max(self.replicas, default=1) > 1 else ""

    def _layer_devices(self) -> list[torch.device]:
        return [
            worker.device
            for worker, size in zip(self._workers, self._balance, strict=True)
            for _ in range(size)
        ]


def _placed(module: nn.Sequential, devices: Iterable[Any] | None) -> tuple[list[int], list[Any]]:
    """Balance and devices of layers that are on several devices already."""
    balance, found = placed_balance(module)
    if not len(module):
        return [], []
    if devices is not None or len(set(found)) < 2:
        asked = found if devices is None else check_devices(devices)
        raise missing_balance(len(module), max(2, len(asked)))
    return balance, list(found)
