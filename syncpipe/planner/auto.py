"""From a model to a pipe that fits, in one call: convert, plan, and try one step.

model -> layers -> plan for the memory that is free -> Pipe -> one step -> the pipe
                    ^                                              |
                    '------- for less memory -- out of memory -----'
"""

from __future__ import annotations

import gc
import inspect
from collections import defaultdict
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from syncpipe.balance import param_scale_of
from syncpipe.balance.measure import resized, samples_in
from syncpipe.balance.profile import Profile
from syncpipe.checkpoints import reader
from syncpipe.data.trees import tensors_in
from syncpipe.format import count, in_bytes
from syncpipe.layers.conversion.sequential import sequential
from syncpipe.layers.conversion.signature import call_input
from syncpipe.layers.listing import or_as_before
from syncpipe.layers.placement import check_devices, default_devices
from syncpipe.layers.ties import move_layers
from syncpipe.options import check_flags, counted
from syncpipe.planner.machine import bytes_on, levels, machine_of, real_devices
from syncpipe.planner.page import limited_by
from syncpipe.planner.planning import NoPlan, Plan, layers_of, plan, speeds_of
from syncpipe.state import restoring_module

__all__ = ["auto"]

#: Each new try plans for this share of the memory of the try before, and for twice as many
#: micro-batches if possible.
_LESS, _TRIES = 0.95, 8
_CPU_WORKERS = 2
_CHOSEN = {"balance", "chunks", "checkpoint", "replicas", "schedule", "slots"}


def auto(
    make: Callable[..., Any],
    model: nn.Module,
    sample: tuple[Any, ...],
    sample_kwargs: dict[str, Any],
    *,
    batch_size: int,
    devices: Any,
    memory: Any,
    optimizer: Callable[..., Any],
    loss_fn: Callable[..., Any] | None,
    target: Any,
    weights: Any,
    init_fn: Callable[[nn.Module], Any] | None,
    timeout: float,
    verbose: bool,
    eval_sample: Any,
) -> Any:
    """The body of ``Pipe.auto``; ``make`` is the class of the pipe."""
    if not sample and not sample_kwargs:
        raise TypeError(
            "Pipe.auto needs a sample, the arguments of one call of the model: "
            "Pipe.auto(model, input, batch_size=64)"
        )
    for name in sorted(_CHOSEN & sample_kwargs.keys()):
        takes = inspect.signature(model.forward).parameters
        if name not in takes and all(each.kind is not each.VAR_KEYWORD for each in takes.values()):
            raise TypeError(
                f"{name}= is chosen by Pipe.auto, and is no argument of {type(model).__name__}: "
                f"to choose it yourself, use Pipe(layers, ..., {name}=...)"
            )
    if target is not None and loss_fn is None:
        raise ValueError("target= needs a loss_fn: give loss_fn= as well, or leave out target=")
    check_flags(verbose=verbose)
    if loss_fn is not None and target is None and not _takes_one(loss_fn):
        raise TypeError(
            "loss_fn takes more than the output, and Pipe.auto runs one step: give the target= of "
            "the sample as well"
        )
    batch_size = counted(batch_size, f"batch_size={batch_size!r}", "the samples in a mini-batch")
    if any(tensor.is_meta for tensor in tensors_in((sample, sample_kwargs))):
        raise ValueError(
            "the sample is on meta, but Pipe.auto runs the model with it: give a sample with "
            "values (the model may be on meta)"
        )
    if weights is not None and not any(tensor.is_meta for tensor in model.parameters()):
        raise ValueError(
            f"weights={weights!r} needs a model on meta: load a checkpoint into this model by "
            "syncpipe.checkpoints.load(pipe, ...)"
        )
    scale = param_scale_of(optimizer)
    gc.collect()  # memory in reference cycles counts as free
    devices, limits = _find_devices(devices, memory, model)
    layers = _to_layers(model, sample, sample_kwargs, eval_sample, len(devices))
    input = call_input(layers, sample, sample_kwargs, training=True)
    samples_in(input)  # raises if the input has no batch
    if weights is not None:
        init_fn = reader(layers, weights, init_fn=init_fn)
    homes = []
    for layer in layers:
        own = chain(layer.parameters(), layer.buffers())
        homes.append(next((tensor.device for tensor in own), torch.device("cpu")))
    # BatchNorm needs two samples for a variance.
    least = 1 + any(isinstance(module, _BatchNorm) for module in layers.modules())
    counts = [m for m in range(1, batch_size // least + 1) if batch_size % m == 0] or [1]
    chunks, failed = counts if least > 1 else None, ""
    rows = max(1, -(-batch_size // len(devices)))
    profile, speed = _measure(layers, input, rows, devices, limits, timeout)
    for attempt in range(_TRIES):
        try:
            found = plan(
                profile, devices=devices, memory=[x * _LESS**attempt for x in limits], speed=speed,
                batch_size=batch_size, chunks=chunks, param_scale=scale,
            )  # fmt: skip
        except NoPlan as error:
            if attempt:
                error.add_note(f"A plan for more memory did not fit in a trial step: {failed}")
            raise
        chunks = [m for m in counts if m >= 2 * found.chunks] or counts[-1:]
        try:
            options = {**found.options(), "devices": found.devices, "init_fn": init_fn}

            def build(options: dict[str, Any] = options) -> tuple[Any, dict[str, int]]:
                pipe = make(layers, **options)
                return pipe, _trial_step(pipe, input, target, loss_fn, batch_size, scale)

            pipe, used = or_as_before([layers], build)
        except BaseException as error:
            pipe, failed = None, str(error).partition("\n")[0]
            move_layers(list(layers), homes)
            on_cpu = "can't allocate memory" in str(error)
            if not on_cpu and not isinstance(error, torch.OutOfMemoryError):
                raise
        else:
            if verbose:
                print(_report(found, used, _LESS**attempt))
            return pipe
        gc.collect()  # frees the failed pipe before the next try
    raise NoPlan(f"no plan fits, even for {_LESS ** (_TRIES - 1):.0%} of the memory: {failed}")


def _to_layers(
    model: nn.Module,
    sample: tuple[Any, ...],
    kwargs: dict[str, Any],
    eval_sample: Any,
    devices: int,
) -> nn.Sequential:
    """The model itself if it is an ``nn.Sequential`` with enough layers, else converted to one."""
    name = type(model).__name__
    if not isinstance(model, nn.Module):
        raise TypeError(f"Pipe.auto takes an nn.Module, not {name}")
    layers = model
    plain = isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward
    if not (hasattr(model, "whole") or (plain and len(model) >= devices)):  # type: ignore[arg-type]
        meta = any(tensor.is_meta for tensor in model.parameters())
        layers = sequential(model, *sample, **kwargs, verify=not meta, eval_sample=eval_sample)
    elif eval_sample is not None:
        raise TypeError(
            f"eval_sample is for a model that Pipe.auto converts, and {name} is a chain of layers: "
            "give it to syncpipe.sequential"
        )
    assert isinstance(layers, nn.Sequential)
    if len(layers) < min(devices, 2):
        why = [f"{path}: {reason} {line}" for path, line, reason in getattr(layers, "whole", ())]
        raise ValueError(
            f"{name} cannot be cut, because it is one layer: make its parts modules that it "
            "calls one after another" + "".join(f"\n  {line}" for line in why)
        )
    return layers


def _find_devices(devices: Any, memory: Any, model: nn.Module) -> tuple[list[Any], list[float]]:
    """The devices and the bytes to use on each; the largest first, as layers are measured there."""
    if devices is None:
        devices = default_devices(_CPU_WORKERS)
    devices = real_devices(devices) or check_devices(devices)
    limits = machine_of(
        devices, memory=memory, bandwidth=1.0, host_bandwidth=1.0, model=model
    ).memory
    order = sorted(range(len(devices)), key=lambda d: -levels(limits)[d])
    return [devices[d] for d in order], [limits[d] for d in order]


def _measure(
    layers: nn.Sequential,
    input: Any,
    rows: int,
    devices: list[Any],
    limits: list[float],
    timeout: float,
) -> tuple[Profile, tuple[float, ...]]:
    """A profile of ``rows`` samples, or as many as fit, and the relative speeds of devices."""
    while True:
        try:
            sample = resized(input, rows)
            found = layers_of(layers, sample, devices=devices, timeout=timeout)
            return found, speeds_of(layers, sample, devices, timeout)
        except torch.OutOfMemoryError as error:
            if rows == 1:
                notes = "; ".join(getattr(error, "__notes__", ()))
                raise NoPlan(
                    f"one layer is too large for every device: with one sample on {devices[0]} it "
                    f"takes more than {in_bytes(limits[0])} ({notes or error}). Use smaller "
                    "layers, or a device with more memory"
                ) from None
        rows = -(-rows // 4)


# One step


def _takes_one(function: Callable[..., Any]) -> bool:
    """Whether a function can be called with one argument; True if its signature is unknown."""
    try:
        signature = inspect.signature(getattr(function, "forward", function))
    except (TypeError, ValueError):
        return True
    try:
        signature.bind(None)
    except TypeError:
        return False
    return True


def _trial_step(
    pipe: Any,
    input: Any,
    target: Any,
    loss_fn: Callable[..., Any] | None,
    batch_size: int,
    scale: float,
) -> dict[str, int]:
    """Run a training step next to as much memory as the optimizer takes, and undo it.

    Returns:
        The peak bytes of each accelerator.
    """
    places = [place for place in dict.fromkeys(pipe.devices) if place.type != "cpu"]
    before = {}
    for place in places:
        torch.accelerator.synchronize(place)
        torch.accelerator.reset_peak_memory_stats(place)
        before[place] = torch.accelerator.memory_allocated(place) - bytes_on(pipe, place)
    batch = resized(input, batch_size, pipe.devices[0])
    goal = None if target is None else resized(target, batch_size)
    trained = [p for p in pipe.parameters() if p.requires_grad and p.device in before]

    def taken(part: float) -> list[Tensor]:
        """``part`` bytes for each byte of a trained parameter, on the same device."""
        return [torch.empty(int(part * p.nbytes), dtype=torch.uint8, device=p.device)
                for p in trained]  # fmt: skip

    state = taken(scale - 2)

    def step() -> None:
        pipe.train()
        pipe.train_batch(batch, goal, loss_fn=loss_fn or _mean, verify=False)
        taken(1)  # the optimizer's step

    restoring_module(pipe, step, gradients=True)
    for place in places:
        torch.accelerator.synchronize(place)
    peaks = {str(p): torch.accelerator.max_memory_allocated(p) - n for p, n in before.items()}
    del state
    if places:
        torch.accelerator.empty_cache()  # blocks of sizes that no training needs
    return peaks


def _mean(output: Any) -> Tensor:
    """A loss for any output with floating-point tensors."""
    found = [tensor.mean() for tensor in tensors_in(output) if tensor.is_floating_point()]
    if not found:
        raise ValueError(
            "the output of the model has no floating-point tensor to train a trial step with: give "
            "Pipe.auto the loss_fn=, and target= if loss_fn takes one"
        )
    return torch.stack([one.float() for one in found]).sum()


def _report(found: Plan, used: dict[str, int], part: float) -> str:
    """Three lines on a plan for ``part`` of the memory: what fits, its speed and its limit."""
    limits, taken = defaultdict[str, float](float), defaultdict[str, float](float)
    for name, limit in zip(found.machine.names, found.machine.memory, strict=True):
        limits[name] += limit / part
    for name, planned in zip(found.machine.names, found.chosen.on_device, strict=False):
        taken[name] += planned
    sizes = {name: used.get(name, size) for name, size in taken.items()}
    memory = ", ".join(
        f"{x} {in_bytes(size)} and {in_bytes(limits[x] - size)} left" for x, size in sizes.items()
    )
    shape = f"{count(len(found.balance), 'stage')}, {count(found.chunks, 'micro-batch', 'es')}"
    alone = next((one for one in found.alternatives if one.name == "one device"), None)
    speed = "that of one device; no pipeline that was tried is faster"
    if alone is not None:
        speed = f"one device alone: {alone.note}"
        if alone.time is not None:
            speed = f"{alone.time / found.step_time:.2f} times one device"
    words = "measured" if used else "planned"
    limited = limited_by(found)
    return f"fits: {shape}; {words}: {memory}\nspeed: {speed}\nlimited by: {limited}"
