"""``plan``: from a model and devices to the plan."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from numbers import Real
from typing import Any, Literal, cast, overload

import torch
from torch import nn

from syncpipe.balance.by_cost import param_scale_of
from syncpipe.balance.measure import profile as measured
from syncpipe.balance.profile import Profile, in_bytes
from syncpipe.layers.listing import Layers
from syncpipe.layers.placement import check_devices, default_devices, resolve_workers
from syncpipe.planner.costs.devices import machine_of
from syncpipe.planner.costs.machine import Machine
from syncpipe.planner.replicas import Replicas, replicated
from syncpipe.planner.report.plan import Plan
from syncpipe.planner.report.rivals import rivals_of
from syncpipe.planner.search.candidate import SCHEDULES
from syncpipe.planner.search.orders import search_orders
from syncpipe.planner.search.search import Shortage, shortage

__all__ = ["NoPlan", "measured_for", "plan"]

#: The parameter, its gradient and Adam's two moments.
_ADAM = 4.0


class NoPlan(ValueError):
    """Nothing fits into memory."""


@overload
def plan(
    module: Layers | Profile,
    sample: Any = None,
    *,
    devices: Any,
    batch_size: int,
    memory: float | str | Sequence[float | str] | None = None,
    bandwidth: float | str | Sequence[Sequence[float]] | None = None,
    speed: Sequence[float] | None = None,
    chunks: int | Iterable[int] | None = None,
    stages: int | None = None,
    schedule: str | None = None,
    param_scale: float | None = None,
    optimizer: Callable[..., Any] | None = None,
    replicas: Literal[False] = False,
    timeout: float = 5.0,
    progress: bool | None = None,
) -> Plan: ...


@overload
def plan(
    module: Layers | Profile,
    sample: Any = None,
    *,
    devices: Any,
    batch_size: int,
    memory: float | str | Sequence[float | str] | None = None,
    bandwidth: float | str | Sequence[Sequence[float]] | None = None,
    speed: Sequence[float] | None = None,
    replicas: Literal[True],
    timeout: float = 5.0,
    progress: bool | None = None,
) -> Replicas: ...


def plan(
    module: Layers | Profile,
    sample: Any = None,
    *,
    devices: Any,
    batch_size: int,
    memory: float | str | Sequence[float | str] | None = None,
    bandwidth: float | str | Sequence[Sequence[float]] | None = None,
    speed: Sequence[float] | None = None,
    chunks: int | Iterable[int] | None = None,
    stages: int | None = None,
    schedule: str | None = None,
    param_scale: float | None = None,
    optimizer: Callable[..., Any] | None = None,
    replicas: bool = False,
    timeout: float = 5.0,
    progress: bool | None = None,
) -> Plan | Replicas:
    """Finds how to run a model on several devices so that a step is as short as possible.

    The choice is of balance, number of micro-batches, schedule, slots and re-materialization of
    each stage, within the memory of each device::

        plan = syncpipe.plan(model, sample, devices="4 x 16GB, 12GB/s", batch_size=512)
        print(plan)
        pipe = Pipe(model, **plan.options(), devices=[...])

    For GPipe's schedule the cut with the shortest step is found exactly, for 1F1B the cut with the
    lowest bound; what is found is played through by the simulator, and ``plan.certificate`` says
    how far above the bound it is.

    Args:
        module: the layers, which are measured (:func:`syncpipe.balance.profile`) and stay as they
            are, or what was measured before.
        sample: an input to measure with, with at least as many samples as a micro-batch will have;
            not for a profile.
        devices: stages are put on them in this order, or, if they are of two or three kinds, in
            the best order of the kinds (``plan.devices``, ``plan.machine``): real ones, as ``Pipe``
            takes them, whose memory and bandwidth are measured; a number of those of this machine;
            or a description of others, such as ``"8 x 16GB, 12GB/s"``, which are taken to be as
            fast as the one that the layers were measured on, or ``"2 x 80GB @ 2.0 + 4 x 24GB,
            12GB/s"``, two of them twice as fast.
        batch_size: samples in a mini-batch.
        memory: bytes that may be used on each device (a number, ``"16GB"``, or one for each).
        bandwidth: bytes per second between devices (a number, ``"12GB/s"``, or a matrix).
        speed: for each device by what factor it is faster than the one that the layers were
            measured on (the first of real ones); by default real ones of different kinds are
            measured.
        chunks: the number of micro-batches, or those to choose from; by default all that divide
            ``batch_size``.
        stages: the number of stages; by default whatever is best, up to the number of devices.
        schedule: ``"gpipe"`` or ``"1f1b"``; by default the better one.
        param_scale: bytes for each byte of a parameter that is trained: parameter, gradient, and
            the optimizer's state. By default 4, as for Adam; 2 is plain SGD.
        optimizer: instead of that, what makes the optimizer from a list of parameters, such as
            ``torch.optim.AdamW``; its state is measured.
        replicas: PipeDream's plan instead, in which several devices may share a stage. Each device
            then takes mini-batches of ``batch_size / devices`` samples (those of the profile, if
            it does not know its own); see :func:`syncpipe.planner.replicated`.
        timeout: seconds to measure for.
        progress: show a bar while measuring; by default if it takes longer than a second and a
            terminal watches.

    Returns:
        The plan; ``print`` explains it.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: an argument does not fit.
        NoPlan: no plan fits into memory (a ``ValueError``): the message says which stage misses by
            how much, and what would make it fit.
    """
    batch_size = _count("batch_size", batch_size)
    stages = None if stages is None else _count("stages", stages)
    if chunks is not None:
        many = isinstance(chunks, Iterable) and not isinstance(chunks, str)
        given = chunks if many else [chunks]
        counts = [_count("chunks", number) for number in cast("Iterable[Any]", given)]
        chunks = counts if many else counts[0]
    if not isinstance(devices, int | str | Machine):
        devices = check_devices(devices)
    if schedule not in (None, *SCHEDULES):
        raise ValueError(f"schedule={schedule!r}: there are plans for 'gpipe' and for '1f1b'")
    if param_scale is not None and optimizer is not None:
        raise ValueError("param_scale and optimizer both say what a parameter takes: give one")
    if replicas:
        _only_for_pipelines(
            chunks=chunks, stages=stages, schedule=schedule, param_scale=param_scale,
            optimizer=optimizer,
        )  # fmt: skip
    scale = _ADAM if param_scale is None else param_scale
    if optimizer is not None:
        scale = param_scale_of(optimizer)
    if not (isinstance(scale, Real) and 0 <= scale < math.inf):
        raise ValueError(f"param_scale={scale!r}: must be a number, at least 0")
    machine = machine_of(devices, memory=memory, bandwidth=bandwidth, speed=speed)
    layers = _profile(module, sample, devices, timeout, progress)
    if replicas:
        return _replicated(layers, machine, batch_size)
    layers = layers.of(batch_size)
    choice: dict[str, Any] = {
        "param_scale": scale,
        "chunks": chunks,
        "stages": stages,
        "schedules": SCHEDULES if schedule is None else (schedule,),
    }
    order, found = search_orders(layers, machine, batch_size, **choice)
    if not found:
        lack = shortage(layers, machine, batch_size, **choice)
        raise NoPlan(_explained(lack, layers, machine, batch_size))
    machine, real = machine.ordered(order), _real(devices)
    real = None if real is None else tuple(real[d] for d in order)
    rivals = rivals_of(layers, machine, batch_size, chosen=found[0], found=found, param_scale=scale)
    asked = {"chunks": chunks, "stages": stages, "schedule": schedule}
    fixed = frozenset(name for name, value in asked.items() if value is not None)
    return Plan(layers, machine, batch_size, found[0], rivals, real, fixed)


def _count(name: str, number: Any) -> int:
    """A whole number, at least 1."""
    try:
        count = -1 if isinstance(number, bool) else operator.index(number)
    except TypeError as error:
        raise TypeError(f"{name}={number!r}: must be a whole number") from error
    if count < 1:
        raise ValueError(f"{name}={number!r}: must be a number, at least 1")
    return count


def _replicated(layers: Profile, machine: Machine, batch_size: int) -> Replicas:
    if not machine.uniform:
        raise ValueError("replicas=True is for devices that are alike, with links that are alike")
    n = len(machine)
    samples = None if layers.whole else max(1, batch_size // n)
    return replicated(layers, n, machine.bandwidth[0][-1], samples=samples)


def _real(devices: Any) -> tuple[Any, ...] | None:
    """The devices that a pipe can be given; None if they were only described."""
    if isinstance(devices, str | Machine):
        return None
    if isinstance(devices, int):
        return tuple(default_devices(devices)[:devices])
    return tuple(devices)


def _profile(
    module: Any,
    sample: Any,
    devices: Any,
    timeout: float,
    progress: bool | None,
) -> Profile:
    """What the layers cost, with times."""
    if isinstance(module, Profile):
        if sample is not None:
            raise ValueError("a profile is measured already: leave out the sample")
        layers = module
    elif not isinstance(module, nn.Module | Iterable):
        raise TypeError(
            "module must be an nn.Sequential, a list of layers or a Profile, not "
            f"{type(module).__name__}"
        )
    elif sample is None:
        raise ValueError("to measure the layers, plan needs a sample: an input of a micro-batch")
    else:
        layers = measured_for(devices, module, sample, timeout=timeout, progress=progress)
    size = layers.sizes[-1]
    if not any(layer.forward[size] + layer.backward[size] for layer in layers.layers):
        raise ValueError(
            "the profile has no times (on meta and on fake devices only sizes are measured), so "
            "there is nothing to plan by: measure the layers on a real device"
        )
    return layers


def measured_for(
    devices: Any, module: Any, sample: Any, *, timeout: float, progress: bool | None = None
) -> Profile:
    """Measures layers for these devices: on the first of them, if they are real.

    Args:
        devices: as for :func:`plan`.
        module: the layers.
        sample: an input to measure with.
        timeout: seconds to measure for.
        progress: as for :func:`plan`.
    """
    device = threads = None
    real = _real(devices)
    if real is not None:
        workers = dict.fromkeys(resolve_workers(real, len(real)))
        device = next(iter(workers)).device
        if device.type == "cpu":  # as the workers share them out
            threads = max(1, torch.get_num_threads() // len(workers))
    return measured(
        module, sample, timeout=timeout, device=device, threads=threads, progress=progress
    )


def _only_for_pipelines(**arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise ValueError(f"{name}={value!r}: a plan with replicas takes no {name}")


def _explained(lack: Shortage | None, profile: Profile, machine: Machine, batch_size: int) -> str:
    """Which stage misses by how much, and what would make it fit."""
    if lack is None:
        return f"no plan fits {len(machine)} devices and batch_size={batch_size}"
    s = lack.stage
    start = sum(lack.balance[:s])
    names = [layer.name for layer in profile.layers[start : start + lack.balance[s]]]
    layers = f"layer {names[0]!r}" if len(names) == 1 else f"layers {names[0]!r} to {names[-1]!r}"
    again = ", recomputing its forward" if lack.recomputes[s] else ""
    more = in_bytes(lack.memory_per_device * (1 + 1e-9), up=True)
    ways = [f"{more} on each device"] if machine.uniform else []
    if lack.devices is not None:
        ways.append(f"{lack.devices} such devices")
    if lack.batch_size is not None:
        ways.append(f"batch_size={lack.batch_size}")
    ways.append("a smaller param_scale (an optimizer with less state)")
    if not machine.uniform:
        ways.append("the devices in another order")
    return (
        f"no plan fits into memory. Nearest comes balance={list(lack.balance)} with "
        f"chunks={lack.chunks} under {lack.schedule!r}: stage {s} ({layers}) needs "
        f"{in_bytes(lack.memory[s], up=True)}{again}, {in_bytes(lack.missing, up=True)} more than "
        f"the {in_bytes(lack.limits[s])} of {machine.name(s)}. What would make it fit: "
        f"{', or '.join(ways)}"
    )
