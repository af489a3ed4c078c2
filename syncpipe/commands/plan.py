"""Finds how a training step of a model is as short as possible within the memory of the devices.

That is the balance, the number of micro-batches, the schedule and the recomputation of each stage,
which are printed with what they will take. The layers are measured here; the devices need not be.
"""

from __future__ import annotations

import argparse
import json
import pkgutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from syncpipe.balance import DEVICES, Profile
from syncpipe.layers.conversion.sequential import sequential
from syncpipe.planner import NoPlan, plan
from syncpipe.planner.machine import machine_of
from syncpipe.planner.planning import layers_of
from syncpipe.planner.search import ANY, TITLES

#: Arguments that go to the plan as they are.
_PASSED = ("batch_size", "memory", "bandwidth", "host_bandwidth", "chunks", "stages", "schedule",
           "param_scale", "replicas")  # fmt: skip


def whole_number(least: int, most: float = float("inf")) -> Callable[[str], int]:
    """A type of arguments: whole numbers within bounds, both included."""

    def read(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            bounds = f"from {least}" + f" to {most}" * (most != float("inf"))
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number {bounds}")
        return int(text)

    return read


def file_to_write(*suffixes: str) -> Callable[[str], Path]:
    """A type of arguments: a file in a folder that exists, with one of some suffixes."""

    def read(text: str) -> Path:
        path = Path(text)
        if path.suffix.lower() not in suffixes and suffixes:
            raise argparse.ArgumentTypeError(f"{text!r} must end in {' or '.join(suffixes)}")
        if not path.parent.is_dir() or path.is_dir():
            raise argparse.ArgumentTypeError(f"{text!r} is no file in a folder that is there")
        return path

    return read


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to its parser."""
    add, count = parser.add_argument, whole_number(1)
    words = "a function that returns the model, or the pair of it and a sample; or the model itself"
    add("model", nargs="?", metavar="PACKAGE.MODULE:FACTORY", help=words)
    words = "a micro-batch to measure with, such as 64x3x224x224 or 8x128:int64"
    add("--sample", type=_sample, metavar="SHAPE[:DTYPE]", help=words)
    words = "JSON with what the layers cost: read if there is no model, else written"
    add("--profile", type=file_to_write(), metavar="FILE", help=words)
    words = 'such as "4 x 24GB, 12GB/s", or those of this machine: cuda:0,cuda:1, or their number'
    add("--devices", required=True, metavar="DEVICES", help=words)
    add("--batch-size", type=count, required=True, metavar="N")
    add("--memory", metavar="SIZE", help="of each device, such as 20GB")
    add("--bandwidth", metavar="SPEED", help="between devices, such as 12GB/s")
    words = "between devices and the host, such as 25GB/s: stages may then offload activations"
    add("--host-bandwidth", metavar="SPEED", help=words)
    add("--chunks", type=count, metavar="M", help="so many micro-batches")
    add("--stages", type=count, metavar="N", help="so many stages")
    words = f"this schedule only: {', '.join(TITLES)}; or {ANY}, the fastest (default: 1f1b)"
    add("--schedule", choices=[*TITLES, ANY], metavar="NAME", help=words)
    words = "bytes for each byte of a parameter, gradient and optimizer state included (default: 4)"
    add("--param-scale", type=float, metavar="X", help=words)
    words = "to measure for (default: %(default)s)"
    add("--timeout", type=float, default=5.0, metavar="SECONDS", help=words)
    add("--replicas", action="store_true", help="PipeDream's plan: devices may share a stage")
    words = f"estimate times for this device instead of measuring here: {', '.join(DEVICES)}"
    add("--on", metavar="NAME", help=words)
    words = "the part of that device's peak that matrix products reach (default: 0.5)"
    add("--efficiency", type=float, metavar="X", help=words)
    add("--json", action="store_true", help="print the plan as JSON")
    words = "draw the simulated step: .svg, .png, or .json for https://ui.perfetto.dev"
    add("--picture", type=file_to_write(".svg", ".png", ".json"), metavar="FILE", help=words)
    words = "all of the plan as a page for a browser: .html"
    add("--save", type=file_to_write(".html"), metavar="FILE", help=words)


#: An argument that does not fit.
_Refused = partial(argparse.ArgumentError, None)


@contextmanager
def _refusing(*errors: type[Exception], what: str = "") -> Iterator[None]:
    """Where these errors are about an argument."""
    try:
        yield
    except (NoPlan, argparse.ArgumentError):
        raise
    except errors as error:
        kind = "" if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: "
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", [])[:1])
        raise _Refused(" ".join(f"{what}{kind}{error}{notes}".split())) from error


def run(args: argparse.Namespace) -> int:
    """Perform the command; return 0, or 2 for arguments that do not fit, or 1 if no plan does."""
    try:
        _run(args)
    except (NoPlan, argparse.ArgumentError) as error:
        print(f"python -m syncpipe plan: {error}", file=sys.stderr)
        return 1 if isinstance(error, NoPlan) else 2
    return 0


def _run(args: argparse.Namespace) -> None:
    wrong = ArithmeticError, LookupError, RuntimeError, TypeError, ValueError
    with _refusing(*wrong, what=f"--devices {args.devices}: "):  # before minutes go by
        machine_of(args.devices, memory=args.memory, bandwidth=args.bandwidth)
    layers = _read(args) if args.model is None else _measured(args)
    with _refusing(TypeError, ValueError):
        options = {name: getattr(args, name) for name in _PASSED}
        found = plan(layers, devices=args.devices, **options)
    print(json.dumps(found.as_dict(), indent=1) if args.json else found)
    with _refusing(ImportError, OSError):
        if args.picture is not None:
            found.timeline().save(args.picture)
        if args.save is not None:
            found.save(args.save)


def _read(args: argparse.Namespace) -> Profile:
    if args.profile is None:
        raise _Refused("give a model (package.module:factory) or a --profile to read")
    for option in ("sample", "on", "efficiency"):
        if getattr(args, option) is not None:
            raise _Refused(f"--{option}: a profile that is read needs none")
    with _refusing(OSError, ValueError):
        return Profile.load(args.profile)


def _measured(args: argparse.Namespace) -> Profile:
    """What the layers of the model cost."""
    if args.on is None and args.efficiency is not None:
        raise _Refused("--efficiency is of a device to estimate for: give --on")
    with torch.device("meta") if args.on is not None else nullcontext():
        module, sample = _model(args.model)
    if sample is None and args.sample is None:
        raise _Refused("--sample is missing: which shape has a micro-batch? Such as 64x3x224x224")
    wrong = (TypeError, ValueError) if args.sample is None else (Exception,)
    with _refusing(*wrong, what="the model cannot be measured with this sample: "):
        if args.sample is not None:
            shape, dtype = args.sample
            own = module.parameters() if isinstance(module, nn.Module) else ()
            place = "meta" if args.on is not None else next((p.device for p in own), "cpu")
            floating = dtype.is_floating_point or dtype.is_complex
            sample = (torch.randn if floating else torch.zeros)(shape, dtype=dtype, device=place)
        if not isinstance(module, nn.Sequential | list):
            module = sequential(module, sample, verify=args.on is None)
        found = layers_of(
            module, sample, devices=args.devices, timeout=args.timeout, on=args.on,
            efficiency=args.efficiency,
        )  # fmt: skip
    if args.profile is not None:
        found.save(args.profile)
    return found


def _model(name: str) -> tuple[Any, Any]:
    """The model behind ``package.module:factory``, and a sample if there is one."""
    no_name = f"{name!r} is no package.module:factory"
    with _refusing(AttributeError, ImportError, ValueError, what=f"{no_name}: "):
        found = pkgutil.resolve_name(name)
    if callable(found) and not isinstance(found, nn.Module):
        found = found()
    module, sample = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
    if not isinstance(module, nn.Module | list):
        raise _Refused(f"{no_name} of a model: it gives a {type(module).__name__}")
    return module, sample


def _sample(text: str) -> tuple[list[int], torch.dtype]:
    shape, _, name = text.partition(":")
    dtype = getattr(torch, name or "float32", None)
    sizes = [int(size) if size.isdecimal() else 0 for size in shape.lower().split("x")]
    if not isinstance(dtype, torch.dtype) or min(sizes) < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no shape such as 64x3x224x224 or 8x128:int64, the samples first"
        )
    return sizes, dtype
