"""Which layers run where, and how: a value that is made as a whole, and replaced as a whole."""

from __future__ import annotations

import dataclasses
import warnings
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any, cast

from torch import nn

from syncpipe.balance.balances import balance_named
from syncpipe.hints import outside
from syncpipe.layers.batchnorm import defer_batch_norm
from syncpipe.layers.building import Initialization, build_specs, materialize
from syncpipe.layers.conversion.sequential import batch_input
from syncpipe.layers.listing import has_specs
from syncpipe.layers.placement import (
    check_balance,
    check_devices,
    check_module,
    check_no_hooks,
    default_devices,
    missing_balance,
    move_layers,
    placed_balance,
    resolve_workers,
)
from syncpipe.layers.ties import check_memory, check_replicas, find_ties
from syncpipe.layers.unpack import PipeSequential
from syncpipe.options import (
    ReplicasLike,
    StageMode,
    check_slots,
    checked_replicas,
    counts_of,
    modes_of_stages,
)
from syncpipe.runtime.random_numbers import let_modules_hold
from syncpipe.runtime.streams import same_memory
from syncpipe.runtime.worker import Worker
from syncpipe.schedules.build import ScheduleLike
from syncpipe.skip import verify_skippables
from syncpipe.stages.stage import Partition

__all__ = ["Layout", "first_layout"]


@dataclass(frozen=True, eq=False)
class Layout:
    """The layers of a pipe on their devices.

    Attributes:
        layers: by name.
        balance: for each stage the number of its layers.
        devices: as they were asked for; None for those that there are.
        replicas: as they were asked for.
        checkpoint: as it was asked for.
        schedule: what the pipe trains by.
        defers: whether BatchNorm has statistics of the mini-batch.
        unpack: whether tuples and dicts are spread over the arguments of the next layer.
        served: for each stage the workers that serve it, first the one that holds its layers.
        partitions: for each stage its layers.
        modes: for each stage what ``checkpoint`` means there.
    """

    layers: dict[str, nn.Module]
    balance: list[int]
    devices: list[Any] | None
    replicas: ReplicasLike
    checkpoint: Any
    schedule: ScheduleLike
    defers: bool
    unpack: bool
    served: list[tuple[Worker, ...]] = field(default_factory=list)
    partitions: list[Partition] = field(default_factory=list)
    modes: tuple[StageMode, ...] = ()

    def changed(self, *, training: bool, **asked: Any) -> Layout:
        """Another layout, with the layers cut and moved accordingly; or an error, and this one."""
        new = dataclasses.replace(self, **asked)
        if isinstance(new.balance, str) or "layers" in asked or "balance" in asked:
            layers = new.sequential()
            check_module(layers)
            if not has_specs(layers):
                verify_skippables(layers)
            new = dataclasses.replace(new, balance=_sizes(new, new.balance, layers))
        return _laid_out(new, Initialization(), training, self)

    def with_checkpoint(self, checkpoint: Any) -> Layout:
        """The same but for what is recomputed."""
        modes = modes_of_stages(checkpoint, list(self.layers.values()), self.balance)
        return dataclasses.replace(self, checkpoint=checkpoint, modes=modes)

    def with_schedule(self, schedule: ScheduleLike) -> Layout:
        """The same but for the schedule."""
        check_slots(schedule, list(map(len, self.served)))
        return dataclasses.replace(self, schedule=schedule)

    def sequential(self) -> nn.Sequential:
        """The layers by themselves."""
        return (PipeSequential if self.unpack else nn.Sequential)(OrderedDict(self.layers))

    @property
    def workers(self) -> list[Worker]:
        """For each stage the worker that holds its layers."""
        return [those[0] for those in self.served]


def first_layout(
    module: nn.Sequential,
    balance: Iterable[int] | str | None,
    devices: Iterable[Any] | None,
    replicas: Any,
    init_fn: Any,
    seed: Any,
    sample: Any,
    **options: Any,
) -> Layout:
    """The layout of a new pipe, by the arguments of ``Pipe``."""
    if not has_specs(module):
        verify_skippables(module)
    how = Initialization.checked(module, init_fn, seed)
    if balance is None:
        if replicas != 1:
            raise ValueError(f"replicas={replicas!r} needs balance=[...] and devices=[...]")
        balance, devices = _placed(module, devices)
    if sample is not None:
        sample = batch_input(module, sample)
        if not isinstance(balance, str):
            raise ValueError("sample= is what balance='time' measures with: leave it out")
    asked = Layout(
        layers=cast("dict[str, nn.Module]", dict(module._modules)),
        balance=[],
        devices=None if devices is None else check_devices(devices),
        replicas=checked_replicas(replicas),
        **options,
    )
    asked = dataclasses.replace(asked, balance=_sizes(asked, balance, module, sample))
    return _laid_out(asked, how, module.training, None)


def _placed(module: nn.Sequential, devices: Iterable[Any] | None) -> tuple[list[int], list[Any]]:
    """Balance and devices of layers that are on several devices already."""
    balance, found = placed_balance(module)
    if not len(module):
        return [], []
    if devices is not None or len(set(found)) < 2:
        asked = found if devices is None else check_devices(devices)
        raise missing_balance(len(module), max(2, len(asked)))
    return balance, list(found)


def _sizes(
    asked: Layout, balance: Iterable[int] | str, module: nn.Sequential, sample: Any = None
) -> list[int]:
    """The balance as numbers; by name there is a partition for each device."""
    if isinstance(balance, str):
        devices = default_devices(0) if asked.devices is None else asked.devices
        replicas = asked.replicas
        if not devices and not isinstance(replicas, int):
            devices = default_devices(sum(replicas))
        if not devices:
            balance_named(balance, module, 1)  # whether it is a name at all
            raise ValueError(
                f"balance={balance!r} makes a partition for each device, and there is no "
                "accelerator to count: name CPU workers, devices=['cpu:0', 'cpu:1'], or give the "
                "number of layers of each partition, for which there are CPU workers by default"
            )
        if asked.devices is None and len(devices) == 1:
            warnings.warn(
                f"balance={balance!r} makes a partition for each device, and there is one, "
                f"{devices[0]}: all layers are on it, without a pipeline; name devices=, or give "
                "the number of layers of each partition",
                stacklevel=outside(),
            )
        first = resolve_workers(devices, 1)[0].device
        partitions = min(_stages_of(replicas, balance, len(devices)), max(1, len(module)))
        balance = balance_named(balance, module, partitions, sample=sample, device=first)
    return check_balance(balance, len(module))


def _stages_of(replicas: ReplicasLike, balance: str, devices: int) -> int:
    """How many stages a balance by name makes for so many devices."""
    if isinstance(replicas, int):
        if devices % replicas:
            raise ValueError(
                f"replicas={replicas}: {devices} devices cannot be divided by {replicas}: give as "
                f"many as there are stages times {replicas}"
            )
        return devices // replicas
    if len(set(replicas)) > 1:
        raise ValueError(
            f"balance={balance!r} makes stages that are alike, but replicas={list(replicas)} are "
            "for stages that are not: give numbers of layers, such as those of "
            "syncpipe.planner.plan(..., replicas=True)"
        )
    return len(replicas)


def _served(asked: Layout) -> list[tuple[Worker, ...]]:
    """For each stage its workers; those of the first stage come first."""
    counts = counts_of(asked.replicas, len(asked.balance))
    total, devices = sum(counts), asked.devices
    if devices is None:
        devices = default_devices(total)
    elif total > len(counts) and len(devices) != total:
        raise ValueError(
            f"replicas={counts} need {total} devices, those of the first stage first, but "
            f"{len(devices)} are given: {', '.join(map(str, devices))}"
        )
    following = iter(resolve_workers(devices, total))
    found = [tuple(islice(following, count)) for count in counts]
    for j, those in enumerate(found):
        if len(set(those)) < len(those):
            names = ", ".join(str(worker.device) for worker in those)
            raise ValueError(
                f"devices: the replicas of stage {j} would be on {names}, which are listed stage "
                "by stage: each replica of a stage needs a device of its own"
            )
    return found


def _laid_out(asked: Layout, how: Initialization, training: bool, before: Layout | None) -> Layout:
    """Cuts the layers and moves them. Everything that can be refused is so before that."""
    served = _served(asked)
    replicas = list(map(len, served))
    check_slots(asked.schedule, replicas)
    partitions = _partitions(asked, training, before)
    workers = [those[0] for those in served]
    build_specs(partitions, workers, how)
    layers = dict(chain.from_iterable(partition._modules.items() for partition in partitions))
    new = dataclasses.replace(asked, layers=layers, served=served, partitions=partitions)
    new = new.with_checkpoint(asked.checkpoint)
    ties = find_ties(partitions)
    check_replicas(ties, replicas)
    if not all(same_memory(worker.device, workers[0].device) for worker in workers):
        check_memory(partitions)
    if materialize(partitions, workers, how):  # which makes other tensors
        ties = find_ties(partitions)
    if asked.defers:
        defer_batch_norm(new.sequential())
    move_layers(partitions, workers, ties)
    for j, partition in enumerate(partitions):
        if workers[j].device.type == "cpu":
            let_modules_hold(partition)
        places = [place for tie in ties for place in tie.places if place.stage == j]
        partition.tied = frozenset(place.full_name for place in places)
    return new


def _partitions(asked: Layout, training: bool, before: Layout | None) -> list[Partition]:
    same = before is not None and before.balance == asked.balance
    if before is not None and not same:
        check_no_hooks(before.partitions)
    layers = iter(asked.layers.items())
    found = []
    for j, size in enumerate(asked.balance):
        partition = Partition()
        if same and before is not None:  # hooks, which are on the partitions that people have seen
            partition.__dict__.update({**before.partitions[j].__dict__, "_modules": {}})
        partition._modules.update(islice(layers, size))
        partition.training, partition.defers = training, asked.defers
        partition.unpack = asked.unpack
        found.append(partition)
    return found
