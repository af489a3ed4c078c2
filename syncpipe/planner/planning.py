""":func:`plan`: from a model and devices to a :class:`Plan`."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from syncpipe.balance import EFFICIENCY, DeviceSpec, Profile, estimated
from syncpipe.balance import profile as measured
from syncpipe.balance.balances import scales_of
from syncpipe.layers.listing import Layers
from syncpipe.layers.placement import resolve_workers
from syncpipe.options import checked_chunks, counted
from syncpipe.planner import page
from syncpipe.planner.alternatives import Alternative, alternatives_of, other_schedules
from syncpipe.planner.candidates import ADAM, Candidate, Problem
from syncpipe.planner.machine import kind_of, machine_of, places_of, real_devices
from syncpipe.planner.search import ANY, AUTO, NoPlan, check_schedule, choose
from syncpipe.progress import progress_bar
from syncpipe.schedules import build
from syncpipe.schedules.player import Simulation, simulate
from syncpipe.state import restoring_settings
from syncpipe.timeline.timeline import Timeline

__all__ = ["NoPlan", "Plan", "StagePlan", "layers_of", "plan", "speeds_of"]


def plan(
    module: Layers | Profile,
    sample: Any = None,
    *,
    devices: Any,
    batch_size: int,
    memory: float | str | Sequence[float | str] | None = None,
    bandwidth: float | str | Sequence[Sequence[float]] | None = None,
    speed: Sequence[float] | None = None,
    host_bandwidth: float | str | None = None,
    chunks: int | Iterable[int] | None = None,
    stages: int | None = None,
    schedule: str | None = None,
    param_scale: float | None = None,
    optimizer: Callable[..., Any] | None = None,
    on: str | DeviceSpec | None = None,
    efficiency: float | None = None,
    replicas: bool = False,
    timeout: float = 5.0,
    progress: bool | None = None,
) -> Plan:
    """Find the fastest way to run a training step of a model on several devices.

    Chooses the balance, the number of micro-batches, the slots, and whether each stage stores,
    recomputes or offloads its activations, within the memory of each device::

        plan = syncpipe.plan(model, sample, devices="4 x 16GB, 12GB/s", batch_size=512)
        print(plan)
        pipe = Pipe(model, **plan.options(), devices=[...])

    The step is simulated; ``plan.certificate`` compares it with a lower bound.

    Args:
        module: the layers, which are measured (:func:`syncpipe.balance.profile`) and stay
            unchanged, or a profile measured before.
        sample: an input to measure with, of at least as many samples as a micro-batch will have;
            not for a profile.
        devices: devices as ``Pipe`` takes them, or a number of devices of this machine, whose
            memory and bandwidth are measured; or a description. ``"8 x 16GB, 12GB/s"`` describes
            devices as fast as the one that the layers are measured on, ``"2 x 80GB @ 2.0 + 4 x
            24GB, 12GB/s"`` has two that are twice as fast. Stages are placed in this order; two or
            three kinds of devices in the best order of the kinds (``plan.devices``).
        batch_size: samples in a mini-batch.
        memory: bytes that may be used on each device (a number, ``"16GB"``, or one for each).
        bandwidth: bytes per second between devices (a number, ``"12GB/s"``, or a matrix).
        speed: the speed of each device relative to the device that the layers are measured on (the
            first of this machine); by default the layers are measured on each kind of device.
        host_bandwidth: bytes per second between a device and the host, each way, for stages that
            offload. By default measured for accelerators; described devices then do not offload.
        chunks: the number of micro-batches, or numbers to choose from; by default chosen among the
            divisors of ``batch_size`` and numbers in large gaps between divisors.
        stages: the number of stages; by default the best.
        schedule: by default ``"1f1b"`` (:meth:`Plan.compare` estimates the others). Or ``"gpipe"``,
            ``"zb_h1"``, ``"zb_h2"``, ``"interleaved_1f1b"``, ``"looped_bfs"``,
            ``"interleaved_zero_bubble"``, ``"zbv"``, ``"v_half"``, ``"v_min"``, ``"dualpipev"``;
            ``"auto"``, made to measure; ``"any"``, the fastest of all.
        param_scale: bytes per byte of a trained parameter, for parameter, gradient and the
            optimizer's state. By default 4, as for Adam; 2 is plain SGD.
        optimizer: in place of ``param_scale``, a callable that makes the optimizer from a list of
            parameters, for example ``torch.optim.AdamW``; its state is measured.
        on: estimate the times instead of measuring them, for this device: a name in
            ``syncpipe.balance.DEVICES``, or its figures. The model may be on ``meta``.
        efficiency: the share of the peak of the ``on`` device that matrix products reach; by
            default a half.
        replicas: let devices of one kind share a stage if that is faster.
        timeout: seconds to measure for.
        progress: show bars while measuring and searching; by default in a terminal, if that takes
            longer than a second.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: an argument does not fit.
        NoPlan: no plan fits into memory (a ``ValueError``). The message names the stage, the bytes
            that are missing, and what would make a plan fit.
    """
    batch_size = counted(batch_size, f"batch_size={batch_size!r}", "the samples in a mini-batch")
    if stages is not None:
        stages = counted(stages, f"stages={stages!r}", "the number of stages")
    if isinstance(chunks, Iterable) and not isinstance(chunks, str):
        chunks = [checked_chunks(number) for number in chunks]
    elif chunks is not None:
        chunks = checked_chunks(chunks)
    check_schedule(schedule)
    for name, value in {"stages": stages, "schedule": schedule}.items() if replicas else ():
        if value is not None:
            raise ValueError(f"{name}={value!r} is not possible with replicas=True: leave out one")
    scale, update = scales_of(param_scale, optimizer, ADAM)
    real = real_devices(devices)
    devices = devices if real is None else real
    machine = machine_of(
        devices, memory=memory, bandwidth=bandwidth, speed=speed, host_bandwidth=host_bandwidth,
        model=module,
    )  # fmt: skip
    if replicas and len(machine.kinds) > 1:
        raise ValueError("replicas=True needs devices of one kind: leave it out, or the others")
    layers = layers_of(
        module, sample, devices=devices, timeout=timeout, progress=progress, on=on,
        efficiency=efficiency,
    )  # fmt: skip
    if speed is None and real is not None:
        machine = replace(machine, speed=speeds_of(module, sample, real, timeout))
    known = Problem(layers, machine, batch_size, scale, update)

    def found() -> tuple[tuple[int, ...], Problem, Candidate, tuple[Alternative, ...]]:
        order, best = choose(known, schedule, chunks=chunks, stages=stages, replicas=replicas)
        problem = known.on(machine.ordered(order))
        return order, problem, best, alternatives_of(problem, best)

    # On a busy machine several threads for small tensors mostly wait for each other.
    with progress_bar("plan", "candidate", shown=progress) as known.bar:
        order, problem, chosen, others = restoring_settings(found, (), threads=1)
    real = real and tuple([real[d] for d in order])
    choice = {"chunks": chunks, "stages": stages, "schedule": schedule}
    fixed = frozenset(name for name, value in choice.items() if value not in (None, ANY))
    return Plan(problem, chosen, others, real, fixed)


def layers_of(
    module: Any,
    sample: Any,
    *,
    devices: Any,
    timeout: float,
    progress: bool | None = None,
    on: str | DeviceSpec | None = None,
    efficiency: float | None = None,
) -> Profile:
    """The profile of the layers, with times; the arguments are those of :func:`plan`.

    Layers are measured on the first device of this machine, a CPU worker with its share of the
    threads.
    """
    if efficiency is not None and on is None:
        raise ValueError(f"efficiency={efficiency!r} belongs to a device to estimate for: give on=")
    if isinstance(module, Profile):
        for name, given in (("the sample", sample), ("on", on)):
            if given is not None:
                raise ValueError(f"a profile is measured already: leave out {name}")
        layers = module
    elif not isinstance(module, nn.Module | Iterable):
        raise TypeError(
            "module must be an nn.Sequential, a list of layers or a Profile, not "
            f"{type(module).__name__}"
        )
    elif sample is None:
        raise ValueError("sample=None: to measure the layers, give an input of a micro-batch")
    elif on is not None:
        part = EFFICIENCY if efficiency is None else efficiency
        layers = estimated(module, sample, on=on, efficiency=part, progress=progress)  # type: ignore[arg-type]
    else:
        where: dict[str, Any] = {}
        if (real := real_devices(devices)) is not None:
            workers = dict.fromkeys(resolve_workers(real, len(real)))
            where["device"] = next(iter(workers)).device
            if where["device"].type == "cpu":
                where["threads"] = max(1, torch.get_num_threads() // len(workers))
        layers = measured(module, sample, timeout=timeout, progress=progress, **where)  # type: ignore[arg-type]
    size = layers.sizes[-1]
    if not any(layer.forward[size] + layer.backward[size] for layer in layers.layers):
        raise ValueError(
            "the profile has no times, because on meta and on fake devices only sizes are "
            "measured: measure on a real device, or estimate times, for example on='A100-80GB'"
        )
    return layers


def speeds_of(module: Any, sample: Any, real: Sequence[Any], timeout: float) -> tuple[float, ...]:
    """The speed of each device relative to the first, measured with the layers on each kind; empty
    if all devices are of one kind.

    Raises:
        ValueError: there are several kinds, and ``module`` is a profile.
    """
    places = places_of(real)
    kinds = {kind_of(place): place for place in reversed(places)}
    if len(kinds) == 1:
        return ()
    if isinstance(module, Profile):
        raise ValueError(
            f"devices are of {len(kinds)} kinds ({', '.join(kinds)}), but a profile is of one: "
            "give speed= with a factor for each device, or the layers in place of the profile"
        )
    times = {}
    for kind, place in kinds.items():
        found = measured(module, sample, timeout=timeout / len(kinds), device=place)
        size = found.sizes[-1]
        times[kind] = sum(layer.forward[size] + layer.backward[size] for layer in found.layers)
    return tuple(times[kind_of(places[0])] / times[kind_of(place)] for place in places)


@dataclass(frozen=True)
class StagePlan:
    """One stage of a plan.

    Attributes:
        layers: the names of its layers.
        device: the name of its device.
        forward: seconds for one micro-batch.
        backward: seconds for one micro-batch, without recomputation.
        send: seconds to send the output of one micro-batch to the next stage.
        in_flight: the most micro-batches in flight.
        mode: ``"store"``, ``"recompute"`` or ``"offload"``, for its activations.
        recomputed: with ``"recompute"``, the names of the layers that are recomputed: all of them,
            or some while the others store.
        memory: bytes at the peak.
        limit: bytes that its device has for all its stages.
        gradients: bytes in addition to ``memory`` if a step begins with gradients (without
            ``zero_grad()``), because it copies them to restore them if it fails.
    """

    layers: tuple[str, ...]
    device: str
    forward: float
    backward: float
    send: float
    in_flight: int
    mode: str
    recomputed: tuple[str, ...]
    memory: float
    limit: float
    gradients: float


class Plan:
    """The result of :func:`syncpipe.plan`. ``print(plan)`` explains it.

    Attributes:
        terms: the inputs of the search.
        chosen: the candidate of this plan.
        alternatives: other ways to train, with their times.
        devices: the devices of this machine, as a pipe takes them; None for described ones.
        fixed: the arguments that were given, of ``"chunks"``, ``"stages"`` and ``"schedule"``.
        profile: the costs of the layers.
        machine: the devices.
        batch_size: samples in a mini-batch.
        balance: the number of layers of each stage.
        chunks: the number of micro-batches.
        schedule: its name; ``"auto"`` for one that was made to measure.
        slots: the most micro-batches in flight on each stage under 1F1B; None for other schedules.
        checkpoint: the checkpoint mode of each stage: a name, or the runs of its layers that are
            recomputed. A stage that recomputes does so for all micro-batches, so that a stored one
            never adds to one being recomputed; under GPipe for all but the last, whose backward
            follows at once.
        device_of: the index of the device of each stage; some schedules put several stages on one.
        replicas: the number of devices of each stage.
        step_time: simulated seconds for forward and backward of one mini-batch, without the
            optimizer.
        samples_per_second: ``batch_size / step_time``.
        bound: seconds below which no order of the same actions falls. It is no bound for other
            plans: another cut or another number of micro-batches has a bound of its own.
        certificate: ``step_time / bound``; 1 is optimal.
        interpreter_time: seconds of Python in the forwards of all stages, a lower bound of the
            step, because one thread at a time runs Python; 0 in free-threaded builds of CPython.
            Does not include the Python of the pipe itself.
        compared: the result of :meth:`compare`; empty before.
    """

    def __init__(
        self, terms: Problem, chosen: Candidate, alternatives: Sequence[Alternative],
        devices: Sequence[Any] | None = None, fixed: Container[str] = (),
    ) -> None:  # fmt: skip
        shape, self.fixed = chosen.shape, fixed
        self.terms, self.chosen, self.alternatives = terms, chosen, tuple(alternatives)
        self.devices = None if devices is None else tuple(self.on(devices))
        self.profile, self.machine, self.batch_size = terms.profile, terms.machine, terms.batch_size
        self.balance, self.chunks = list(chosen.balance), shape.m
        self.schedule, self.slots = shape.name, None if shape.slots is None else list(shape.slots)
        recompute = "except_last" if self.schedule == "gpipe" else "always"
        checkpoint = {"store": "never", "recompute": recompute, "offload": "offload"}
        self.checkpoint: list[Any] = [
            checkpoint[mode] if isinstance(mode, str) else [(*range(*run),) for run in mode]
            for mode in chosen.modes
        ]
        self.device_of, self.replicas = list(shape.device_of), list(shape.replicas)
        self.step_time, self.bound = chosen.time, chosen.bound
        self.samples_per_second = terms.batch_size / chosen.time if chosen.time else math.inf
        self.certificate = chosen.time / chosen.bound if chosen.bound else 1.0
        self.interpreter_time = chosen.interpreter
        self.compared: tuple[Alternative, ...] = ()

    @cached_property
    def simulation(self) -> Simulation:
        """The simulated step, with the times of the profile in seconds."""
        shape, modes = self.chosen.shape, self.chosen.modes
        costs = self.terms.costs(shape, self.chosen.balance, modes)
        return simulate(shape.schedule, costs, shape.recomputed(modes))

    @property
    def bubble(self) -> float:
        """The fraction of the devices' time in which they are idle."""
        return self.simulation.bubble

    @cached_property
    def stages(self) -> tuple[StagePlan, ...]:
        """The stages in order."""
        chosen, names = self.chosen, self.machine.names
        costs = self.terms.costs(chosen.shape, chosen.balance)  # without recomputation
        backward = costs.times["backward"]
        layers = [layer.name for layer in self.profile.layers]
        runs = [
            ((ends,) if mode == "recompute" else mode if isinstance(mode, tuple) else ())
            for mode, ends in zip(chosen.modes, chosen.ends, strict=True)
        ]
        return tuple(
            StagePlan(
                layers=tuple(layers[i:j]),
                device=", ".join([names[d] for d in chosen.shape.places[s]]),
                forward=costs.forward[s],
                backward=backward[s],
                send=(*costs.transfer, 0.0)[s],
                in_flight=chosen.shape.in_flight[s],
                mode="recompute" if runs[s] else str(chosen.modes[s]),
                recomputed=tuple(name for run in runs[s] for name in layers[slice(*run)]),
                memory=chosen.memory[s],
                limit=self.machine.memory[self.device_of[s]],
                gradients=self.terms.trained(i, j),
            )
            for s, (i, j) in enumerate(chosen.ends)
        )

    def compare(self) -> tuple[Alternative, ...]:
        """Look for plans under the other schedules, for as many devices and micro-batches.

        Takes seconds. Afterwards the page and :meth:`as_dict` include the result. The search is
        short (``plan(schedule=...)`` searches longer), and some plans may not fit into memory.

        Returns:
            The best plan for each schedule; first those that fit, the fastest first.
        """
        if not self.compared and len(self.balance) > 1:
            self.compared = other_schedules(self.terms, self.chosen)
        return self.compared

    def on(self, devices: Sequence[Any]) -> list[Any]:
        """Return a device for each stage, or replica, as a pipe takes them::

        pipe = Pipe(model, **plan.options(), devices=plan.on(["cuda:0", "cuda:1"]))

        Args:
            devices: as many as the plan uses, or more.

        Raises:
            ValueError: there are too few devices.
        """
        used = self.chosen.shape.devices
        if len(devices) < used:
            raise ValueError(f"devices={list(devices)}: give the {used} that this plan uses")
        return [devices[d] for place in self.chosen.shape.places for d in place]

    def options(self) -> dict[str, Any]:
        """Return the arguments of a pipe that runs this plan::

        pipe = Pipe(model, **plan.options(), devices=plan.devices)

        The devices are not included, because a plan can run on others (:meth:`on`).
        """
        made = self.chosen.shape.schedule
        usual: Any = self.slots or self.schedule == AUTO
        usual = usual or build(self.schedule, made.m, made.device_of)
        shared = {"replicas": self.replicas} if max(self.replicas) > 1 else {}
        checkpoint = self.checkpoint
        if not any(isinstance(mode, str) for mode in checkpoint):  # a pipe takes one list of runs
            checkpoint = [run for mode in checkpoint for run in mode]
        return shared | {
            "balance": self.balance,
            "chunks": self.chunks,
            "checkpoint": checkpoint,
            "schedule": self.schedule if self.slots or made == usual else made,
            "slots": self.slots,
        }

    def timeline(self) -> Timeline:
        """Return the simulated step, to show, or to save as a picture or for Perfetto."""
        names = self.machine.names[: self.chosen.shape.devices]
        rows = [f"{x} ({k})" if names.count(x) > 1 else x for k, x in enumerate(names)]
        title = f"{self.schedule}, {self.chunks} micro-batches, planned"
        return Timeline.of(self.simulation, title, rows=rows, unit="s")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as a page of HTML: verdict, cut, step, memory and alternatives.

        The page is one file, whose name ends in ``.html``, in the light or dark style of the
        browser. Its picture of the step needs matplotlib.
        """
        page.save(path, self)

    def as_dict(self) -> dict[str, Any]:
        """Return numbers and strings, for JSON. Times are in seconds, memory in bytes."""
        names = (
            "batch_size balance replicas chunks schedule slots device_of checkpoint step_time "
            "samples_per_second bubble bound certificate interpreter_time"
        )
        found = {name: getattr(self, name) for name in names.split()} | {
            "spread": self.profile.spread,
            "stages": [
                {k: list(x) if isinstance(x, tuple) else x for k, x in vars(stage).items()}
                for stage in self.stages
            ],
            "memory_of_devices": list(self.chosen.on_device),
            "alternatives": [one.as_dict() for one in self.alternatives],
            "schedules": [one.as_dict() for one in self.compared],
        }
        for numbers in (found, *found["stages"]):  # JSON has no infinity
            numbers.update({name: None for name, x in numbers.items() if x == math.inf})
        return found

    def __str__(self) -> str:
        return page.text(self)

    def __repr__(self) -> str:
        return (
            f"<Plan balance={self.balance} chunks={self.chunks} schedule={self.schedule!r} "
            f"step_time={self.step_time:.4g} s certificate={self.certificate:.3f}>"
        )
