"""The immutable description of which layers run on which devices, and how."""

from __future__ import annotations

import dataclasses
import operator
import warnings
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from typing import Any, cast

from torch import nn

from syncpipe.balance.balances import balance_named
from syncpipe.hints import FixedLayers, caller_stacklevel
from syncpipe.layers import placement
from syncpipe.layers.batchnorm import defer_batch_norm
from syncpipe.layers.conversion.signature import batch_input
from syncpipe.layers.listing import Initialization, build_layers, or_as_before
from syncpipe.layers.ties import check_memory, check_replicas, find_ties, move_layers
from syncpipe.layers.unpack import PipeSequential
from syncpipe.options import ReplicasLike, StageMode, check_slots, counts_of, modes_of_stages
from syncpipe.runtime.streams import same_memory
from syncpipe.runtime.worker import Worker
from syncpipe.schedules.named import ScheduleLike
from syncpipe.skip import verify_skippables
from syncpipe.stages.stage import Partition


@dataclass(frozen=True, eq=False)
class Layout:
    """The layers of a pipe on their devices. Changes create a new layout."""

    layers: dict[str, nn.Module]  #: all layers, by name
    balance: list[int]
    devices: list[Any] | None  #: as given; None for all accelerators, or CPU workers
    replicas: ReplicasLike  #: as given
    checkpoint: Any  #: as given
    schedule: ScheduleLike  #: the default schedule of training
    defers_batch_norm: bool  #: whether BatchNorm has statistics of the mini-batch
    unpack: bool  #: whether tuples and dicts are spread over the arguments of the next layer
    #: For each stage its workers; the first one holds the layers.
    workers_of: list[tuple[Worker, ...]] = field(default_factory=list)
    partitions: list[Partition] = field(default_factory=list)
    modes: tuple[StageMode, ...] = ()  #: the ``checkpoint`` mode of each stage

    def changed(
        self,
        training: bool,
        initialization: Initialization | None = None,
        sample: Any = None,
        **asked: Any,
    ) -> Layout:
        """A layout with other fields, after cutting and moving the layers accordingly.

        If it raises, the layers are moved back, and this layout stays valid.
        """
        new = dataclasses.replace(self, **asked)
        if "layers" in asked:
            layers = new.sequential()
            placement.check_module(layers)
            new = dataclasses.replace(new, balance=_sizes(new, layers, sample))
        workers_of = _workers_of(new)
        check_slots(new.schedule, list(map(len, workers_of)))
        partitions = _partitions(new, training, self)
        new = dataclasses.replace(new, workers_of=workers_of, partitions=partitions)
        placed = partial(_placed, new, initialization or Initialization())
        try:
            return or_as_before(partitions, placed)
        except BaseException:
            with suppress(NotImplementedError):  # layers moved to meta have lost their values
                move_layers(self.partitions, [worker.device for worker in self.workers])
            raise

    def with_checkpoint(self, checkpoint: Any) -> Layout:
        modes = modes_of_stages(checkpoint, list(self.layers.values()), self.balance)
        return dataclasses.replace(self, checkpoint=checkpoint, modes=modes)

    def with_schedule(self, schedule: ScheduleLike) -> Layout:
        check_slots(schedule, list(map(len, self.workers_of)))
        return dataclasses.replace(self, schedule=schedule)

    def sequential(self) -> nn.Sequential:
        made = PipeSequential() if self.unpack else nn.Sequential()
        made._modules.update(self.layers)  # add_module refuses names of attributes
        return made

    @property
    def workers(self) -> list[Worker]:
        """For each stage the worker that holds its layers."""
        return [workers[0] for workers in self.workers_of]


def same_layers(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Whether two pipes have the same modules under the same names, in the same order."""
    return list(a) == list(b) and all(map(operator.is_, a.values(), b.values()))


def first_layout(
    module: nn.Sequential,
    balance: Any,
    devices: Iterable[Any] | None,
    initialization: Initialization,
    sample: Any,
    **options: Any,
) -> Layout:
    given = None if devices is None else placement.check_devices(devices)
    if balance is None:
        if options["replicas"] != 1:
            raise ValueError(
                f"replicas={options['replicas']} needs balance=[...] and devices=[...]"
            )
        balance, found = placement.placed_balance(module)  # if layers are on their devices already
        if len(module) and (given is not None or len(set(found)) < 2):
            asked = found if given is None else given
            raise placement.missing_balance(len(module), max(2, len(asked)))
        given = list(found) if len(module) else []
    if sample is not None:
        sample = batch_input(module, sample)
        if not isinstance(balance, str):
            raise ValueError("sample= is for balance='time' only: leave it out")
    layers = cast("dict[str, nn.Module]", dict(module._modules))
    empty = Layout(layers={}, balance=[], devices=given, **options)
    return empty.changed(module.training, initialization, sample, layers=layers, balance=balance)


def _sizes(asked: Layout, module: nn.Sequential, sample: Any) -> list[int]:
    """The balance as numbers; a named balance has a partition for each device."""
    balance: Any = asked.balance
    if not isinstance(balance, str):
        return placement.check_balance(balance, len(module))
    replicas, devices = asked.replicas, asked.devices
    if devices is None:
        devices = placement.default_devices(sum(replicas) if isinstance(replicas, tuple) else 0)
    if not devices:
        balance_named(balance, module, 1)  # raises if the name is unknown
        raise ValueError(
            f"balance={balance!r} makes a partition for each device, and there is no "
            "accelerator to count: name CPU workers, devices=['cpu:0', 'cpu:1'], or give the "
            "number of layers of each partition, for which there are CPU workers by default"
        )
    if asked.devices is None and len(devices) == 1:
        text = f"balance={balance!r} makes a partition for each device, and there is one: name more"
        warnings.warn(text, stacklevel=caller_stacklevel())
    if not isinstance(replicas, int) and len(set(replicas)) > 1:
        raise ValueError(
            f"balance={balance!r} makes stages that are alike, but replicas={list(replicas)} are "
            "not: give numbers of layers, for example those of "
            "syncpipe.planner.plan(..., replicas=True)"
        )
    stages = len(devices) // replicas if isinstance(replicas, int) else len(replicas)
    if isinstance(replicas, int) and len(devices) % replicas:
        raise ValueError(
            f"replicas={replicas}: {len(devices)} devices cannot be divided by {replicas}: give as "
            f"many as there are stages times {replicas}"
        )
    stages = min(stages, max(1, len(module)))
    first = placement.resolve_workers(devices, 1)[0].device
    found = balance_named(balance, module, stages, sample=sample, device=first)
    return placement.check_balance(found, len(module))


def _workers_of(asked: Layout) -> list[tuple[Worker, ...]]:
    """For each stage its workers, from the devices in order."""
    counts = counts_of(asked.replicas, len(asked.balance))
    total, devices = sum(counts), asked.devices
    if devices is None:
        devices = placement.default_devices(total)
    elif total > len(counts) and len(devices) != total:
        raise ValueError(
            f"replicas={counts} need {total} devices, those of the first stage first, but "
            f"{len(devices)} are given: {', '.join(map(str, devices))}"
        )
    following = iter(placement.resolve_workers(devices, total))
    found = [tuple(islice(following, count)) for count in counts]
    for j, workers in enumerate(found):
        if len(set(workers)) < len(workers):
            names = ", ".join(str(worker.device) for worker in workers)
            raise ValueError(
                f"devices: the replicas of stage {j} would be on {names}, which are listed stage "
                "by stage: each replica of a stage needs a device of its own"
            )
    return found


def _placed(layout: Layout, initialization: Initialization) -> Layout:
    """Builds, checks and moves the layers of a new layout."""
    partitions, devices = layout.partitions, [worker.device for worker in layout.workers]
    build_layers(partitions, devices, initialization)
    layers = chain.from_iterable(partition._modules.items() for partition in partitions)
    layout = dataclasses.replace(layout, layers=dict(layers)).with_checkpoint(layout.checkpoint)
    verify_skippables(layout.sequential())
    check_replicas(find_ties(partitions), list(map(len, layout.workers_of)))
    if not all(same_memory(device, devices[0]) for device in devices):
        check_memory(partitions)
    if layout.defers_batch_norm:
        defer_batch_norm(layout.sequential())
    move_layers(partitions, devices)
    for partition in partitions:
        partition._modules = FixedLayers(partition._modules)
    for place in chain.from_iterable(tie.places for tie in find_ties(partitions)):
        partition = partitions[place.stage]
        vars(partition)["tied"] = partition.tied | {place.full_name}
    return layout


def _partitions(asked: Layout, training: bool, before: Layout) -> list[Partition]:
    same = before.balance == asked.balance
    if not same:
        placement.check_no_hooks(before.partitions)
    layers = iter(asked.layers.items())
    found = []
    for j, size in enumerate(asked.balance):
        partition = Partition()
        if same:  # keeps the hooks that users have put on the partitions
            partition.__dict__.update({**before.partitions[j].__dict__, "_modules": {}})
        partition.training, partition.defers_batch_norm = training, asked.defers_batch_norm
        partition.unpack, partition.tied = asked.unpack, frozenset()
        partition._modules.update(islice(layers, size))  # last, as names may be of attributes
        found.append(partition)
    return found
