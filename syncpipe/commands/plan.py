"""``python -m syncpipe plan``: how to cut a model and run it on devices, here or elsewhere."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from syncpipe.balance import DEVICES, EFFICIENCY, Profile, estimated
from syncpipe.commands.arguments import file_to_write, whole_number
from syncpipe.layers.conversion.sequential import sequential
from syncpipe.layers.listing import as_sequential
from syncpipe.planner import NoPlan, Plan, Replicas, plan
from syncpipe.planner.machine import machine_of
from syncpipe.planner.planning import measured_for
from syncpipe.planner.search import ANY, TITLES

__all__ = ["add_arguments", "run"]

_DESCRIPTION = """
Finds the balance, the number of micro-batches, the schedule and the recomputation of each
stage with which a training step is as short as possible within the memory of the devices, and
prints it with what it will take. The layers are measured here; the devices need not be.
"""
#: Arguments that go to the plan as they are, if they are given.
_PASSED = ("chunks", "stages", "schedule", "param_scale", "host_bandwidth")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to its parser."""
    parser.description = _DESCRIPTION
    add, count = parser.add_argument, whole_number(1)
    words = (
        "a function that returns the model, an nn.Sequential, a list of layers, or any module that "
        "syncpipe.sequential converts; or the pair of it and a sample; or the model itself"
    )
    add("model", nargs="?", metavar="PACKAGE.MODULE:FACTORY", help=words)
    words = (
        "a micro-batch to measure with, such as 64x3x224x224 or 8x128:int64 (random numbers, zeros "
        "if they are whole)"
    )
    add("--sample", type=_sample, metavar="SHAPE[:DTYPE]", help=words)
    words = "JSON with what the layers cost: read if there is no model, else written"
    add("--profile", type=file_to_write(), metavar="FILE", help=words)
    words = "how many samples a --profile that is a plain list was measured with"
    add("--samples", type=count, metavar="N", help=words)
    words = (
        'such as "4 x 24GB, 12GB/s", or those of this machine: cuda:0,cuda:1 or cpu:0,cpu:1, or '
        "how many of them"
    )
    add("--devices", type=_devices, required=True, metavar="DEVICES", help=words)
    add("--batch-size", type=count, required=True, metavar="N")
    add("--memory", metavar="SIZE", help="of each device, such as 20GB")
    add("--bandwidth", metavar="SPEED", help="between devices, such as 12GB/s")
    words = "between devices and the host, such as 25GB/s: stages may then offload activations"
    add("--host-bandwidth", metavar="SPEED", help=words)
    add("--chunks", type=count, metavar="M", help="so many micro-batches")
    add("--stages", type=count, metavar="N", help="so many stages")
    words = f"this schedule only: {', '.join(TITLES)}; or {ANY}, the fastest (default: 1f1b)"
    add("--schedule", choices=[*TITLES, ANY], metavar="NAME", help=words)
    words = (
        "bytes for each byte of a parameter, gradient and optimizer state included (default: 4, as "
        "for Adam)"
    )
    add("--param-scale", type=float, metavar="X", help=words)
    words = "to measure for (default: %(default)s)"
    add("--timeout", type=float, default=5.0, metavar="SECONDS", help=words)
    words = "PipeDream's plan, in which devices may share a stage"
    add("--replicas", action="store_true", help=words)
    words = (
        "estimate times for this device instead of measuring here, and make the model on meta, "
        f"without memory: {', '.join(DEVICES)}"
    )
    add("--on", metavar="NAME", help=words)
    words = "the part of that device's peak that matrix products reach (default: 0.5)"
    add("--efficiency", type=float, metavar="X", help=words)
    add("--json", action="store_true", help="print the plan as JSON")
    words = "draw the simulated step: .svg, .png, or .json for https://ui.perfetto.dev"
    add("--picture", type=file_to_write(".svg", ".png", ".json"), metavar="FILE", help=words)
    words = "all of the plan as a page for a browser: .html"
    add("--save", type=file_to_write(".html"), metavar="FILE", help=words)


class _Refused(Exception):
    """An argument that does not fit."""


def run(args: argparse.Namespace) -> int:
    """Perform the command.

    Returns:
        The exit status: 0 for success, 2 for arguments that do not fit, 1 if no plan does.

    Raises:
        Exception: whatever the model raises when it is made or measured, as it is.
    """
    try:
        try:  # before minutes go by
            machine_of(args.devices, memory=args.memory, bandwidth=args.bandwidth)
        except (ArithmeticError, LookupError, RuntimeError) as error:
            raise _Refused(f"--devices {args.devices}: {error}") from error
        for option in ("picture", "save"):
            if args.replicas and getattr(args, option) is not None:
                raise _Refused(f"--{option}: a plan with replicas has no schedule to draw")
        layers = _profile(args)
    except (_Refused, ValueError, TypeError) as error:
        if not isinstance(error, _Refused) and _raised_by_the_model(error):
            raise
        return _failed(2, error)
    try:
        options: dict[str, Any] = {name: getattr(args, name) for name in _PASSED}
        found: Plan | Replicas = plan(
            layers, devices=args.devices, batch_size=args.batch_size, memory=args.memory,
            bandwidth=args.bandwidth, replicas=args.replicas, **options,
        )  # fmt: skip
    except NoPlan as error:
        return _failed(1, error)
    except (ValueError, TypeError) as error:
        return _failed(2, error)
    print(json.dumps(found.as_dict(), indent=1) if args.json else found)
    try:
        if args.picture is not None and isinstance(found, Plan):
            found.timeline().save(args.picture)
        if args.save is not None and isinstance(found, Plan):
            found.save(args.save)
    except (ImportError, OSError) as error:
        return _failed(2, error)
    return 0


def _failed(status: int, error: Exception) -> int:
    print(f"python -m syncpipe plan: {error}", file=sys.stderr)
    return status


def _raised_by_the_model(error: BaseException) -> bool:
    """Whether an error comes out of code that is not ours."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is None or not trace.tb_frame.f_globals.get("__name__", "").startswith("syncpipe")


def _profile(args: argparse.Namespace) -> Profile:
    """The profile that was named, or that of the model."""
    if args.model is None:
        if args.profile is None:
            raise _Refused("give a model (package.module:factory) or a --profile to read")
        for option in ("sample", "on", "efficiency"):
            if getattr(args, option) is not None:
                raise _Refused(f"--{option}: a profile that is read needs none")
        try:
            return Profile.load(args.profile, samples=args.samples)
        except OSError as error:
            raise _Refused(f"--profile: {error}") from error
    if args.samples is not None:
        raise _Refused("--samples is for a --profile that is read, not for a model")
    with _home(args):
        module, sample = _model(args.model)
    layers = as_sequential(module) if isinstance(module, nn.Sequential | list) else module
    if args.sample is not None:
        sample = _made(args, layers)
    if sample is None:
        raise _Refused("--sample is missing: which shape has a micro-batch? Such as 64x3x224x224")
    try:
        if layers is module and not isinstance(layers, nn.Sequential):
            layers = sequential(module, sample, verify=args.on is None)
        found = _costs(args, layers, sample)
    except Exception as error:
        if args.sample is None or not _raised_by_the_model(error):
            raise
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", [])[:1])
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise _Refused(
            f"the model does not run on --sample {_shape(args)}: {reason}{notes}. If the sample is "
            "right, run syncpipe.balance.profile(model, sample) to see where in the layer"
        ) from error
    if args.profile is not None:
        try:
            found.save(args.profile)
        except OSError as error:
            raise _Refused(f"--profile: {error}") from error
    return found


def _costs(args: argparse.Namespace, module: Any, sample: Any) -> Profile:
    """What the layers cost, measured or estimated."""
    if args.on is None:
        if args.efficiency is not None:
            raise _Refused("--efficiency is that of a device to estimate for: give --on")
        return measured_for(args.devices, module, sample, timeout=args.timeout)
    part = EFFICIENCY if args.efficiency is None else args.efficiency
    return estimated(module, sample, on=args.on, efficiency=part)


def _home(args: argparse.Namespace) -> AbstractContextManager[Any]:
    """Where model and sample are made."""
    return torch.device("meta") if args.on is not None else nullcontext()


def _made(args: argparse.Namespace, module: nn.Module) -> torch.Tensor:
    """A sample of the shape that was asked for."""
    shape, dtype = args.sample
    whole = not (dtype.is_floating_point or dtype.is_complex)
    try:
        with _home(args):
            made = torch.zeros(shape, dtype=dtype) if whole else torch.randn(shape, dtype=dtype)
        parameter = next(iter(module.parameters()), None)
        if parameter is None or parameter.is_meta:
            return made
        return made.to(parameter.device)
    except (RuntimeError, TypeError, OverflowError) as error:
        reason = str(error).partition("\n")[0]
        raise _Refused(f"--sample {_shape(args)} cannot be made: {reason}") from error


def _shape(args: argparse.Namespace) -> str:
    shape, dtype = args.sample
    return f"{'x'.join(map(str, shape))}:{str(dtype).removeprefix('torch.')}"


def _model(name: str) -> tuple[Any, Any]:
    """The model behind ``package.module:factory``, and a sample if there is one."""
    package, colon, attribute = name.partition(":")
    if not colon or not attribute or not package or package.startswith("."):
        raise _Refused(f"{name!r} is not of the form package.module:factory")
    try:
        found: Any = importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{package}.".startswith(f"{error.name}."):
            raise  # something that the module itself imports
        raise _Refused(f"{name!r}: {error}") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise _Refused(f"{package} has no {attribute!r}")
        found = getattr(found, part)
    if not isinstance(found, nn.Module):
        if not callable(found):
            raise _Refused(f"{name} is a {type(found).__name__}, no function and no nn.Sequential")
        found = found()
    module, sample = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
    if not isinstance(module, nn.Module | list):
        raise _Refused(f"{name} gives a {type(module).__name__}, no model and no list of layers")
    return module, sample


def _sample(text: str) -> tuple[list[int], torch.dtype]:
    shape, _, name = text.partition(":")
    dtype = getattr(torch, name or "float32", None)
    try:
        sizes = [int(size) for size in shape.lower().split("x")]
    except ValueError:
        sizes = [0]
    if not isinstance(dtype, torch.dtype) or min(sizes) < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no shape such as 64x3x224x224 or 8x128:int64 (the first is the number of "
            "samples)"
        )
    return sizes, dtype


def _devices(text: str) -> Any:
    """A number or a description stays one; names of devices of this machine are a list."""
    if text.strip().isdecimal():
        return int(text)
    names = [name.strip() for name in text.split(",")]
    try:
        return [int(name) if name.isdecimal() else torch.device(name) for name in names]
    except RuntimeError:
        return text
