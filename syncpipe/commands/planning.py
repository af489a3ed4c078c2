"""The part of ``python -m syncpipe plan`` that imports PyTorch."""

from __future__ import annotations

import argparse
import json
import pkgutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from syncpipe.balance import Profile
from syncpipe.layers.conversion.sequential import sequential
from syncpipe.planner import NoPlan, plan
from syncpipe.planner.machine import machine_of
from syncpipe.planner.planning import layers_of

#: Arguments that are passed to :func:`syncpipe.plan` unchanged.
_OPTIONS = ("batch_size", "memory", "bandwidth", "host_bandwidth", "chunks", "stages", "schedule",
           "param_scale", "replicas")  # fmt: skip

_Error = partial(argparse.ArgumentError, None)


@contextmanager
def _reporting(*errors: type[Exception], what: str = "") -> Iterator[None]:
    """Reports these errors as errors of an argument, on one line."""
    try:
        yield
    except (NoPlan, argparse.ArgumentError):
        raise
    except errors as error:
        kind = "" if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: "
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", [])[:1])
        raise _Error(" ".join(f"{what}{kind}{error}{notes}".split())) from error


def run(args: argparse.Namespace) -> int:
    """Run the command; see :func:`syncpipe.commands.plan.run`."""
    try:
        _run(args)
    except (NoPlan, argparse.ArgumentError) as error:
        print(f"python -m syncpipe plan: {error}", file=sys.stderr)
        return 1 if isinstance(error, NoPlan) else 2
    return 0


def _run(args: argparse.Namespace) -> None:
    wrong = ArithmeticError, LookupError, RuntimeError, TypeError, ValueError
    with _reporting(*wrong, what=f"--devices {args.devices}: "):  # before layers are measured
        machine_of(args.devices, memory=args.memory, bandwidth=args.bandwidth)
    layers = _load_profile(args) if args.model is None else _measure(args)
    with _reporting(TypeError, ValueError):
        options = {name: getattr(args, name) for name in _OPTIONS}
        found = plan(layers, devices=args.devices, **options)
    print(json.dumps(found.as_dict(), indent=1) if args.json else found)
    with _reporting(ImportError, OSError):
        if args.picture is not None:
            found.timeline().save(args.picture)
        if args.save is not None:
            found.save(args.save)


def _load_profile(args: argparse.Namespace) -> Profile:
    if args.profile is None:
        raise _Error("give a model (package.module:factory), or --profile with a file to read")
    for option in ("sample", "on", "efficiency"):
        if getattr(args, option) is not None:
            raise _Error(f"--{option} is for a model: leave it out with a --profile to read")
    with _reporting(OSError, ValueError):
        return Profile.load(args.profile)


def _measure(args: argparse.Namespace) -> Profile:
    """The profile of the layers of the model, written to ``--profile`` if that is given."""
    if args.on is None and args.efficiency is not None:
        raise _Error("--efficiency belongs to a device to estimate for: give --on")
    with torch.device("meta") if args.on is not None else nullcontext():
        module, sample = _load_model(args.model)
    if sample is None and args.sample is None:
        raise _Error("--sample is missing: the shape of a micro-batch, for example 64x3x224x224")
    wrong = (TypeError, ValueError) if args.sample is None else (Exception,)
    with _reporting(*wrong, what="the model cannot be measured with this sample: "):
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


def _load_model(name: str) -> tuple[Any, Any]:
    """The model of ``package.module:factory``, and its sample or None."""
    no_name = f"{name!r} is not a package.module:factory"
    with _reporting(AttributeError, ImportError, ValueError, what=f"{no_name}: "):
        found = pkgutil.resolve_name(name)
    if callable(found) and not isinstance(found, nn.Module):
        found = found()
    module, sample = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
    if not isinstance(module, nn.Module | list):
        raise _Error(f"{no_name} of a model: it returns a {type(module).__name__}")
    return module, sample
