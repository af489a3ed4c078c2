"""Finds how a training step of a model is as short as possible within the memory of the devices.

That is the balance, the number of micro-batches, the schedule and the recomputation of each stage,
which are printed with what they will take. The layers are measured here; the devices need not be.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def whole_number(least: int, most: float = float("inf")) -> Callable[[str], int]:
    """A type of arguments: whole numbers within bounds, both included."""

    def read(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            bounds = f"from {least}" + f" to {most}" * (most != float("inf"))
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number {bounds}")
        return int(text)

    return read


def seconds(text: str) -> float:
    """A type of arguments: 0 or more."""
    try:
        if (number := float(text)) >= 0:
            return number
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0")


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
    words = 'such as "4 x 24GB, 12GB/s" or "8 x H100, 450GB/s"; or those here: cuda:0,cuda:1, or 2'
    add("--devices", required=True, metavar="DEVICES", help=words)
    add("--batch-size", type=count, required=True, metavar="N")
    add("--memory", metavar="SIZE", help="of each device, such as 20GB")
    add("--bandwidth", metavar="SPEED", help="between devices, such as 12GB/s")
    words = "between devices and the host, such as 25GB/s: stages may then offload activations"
    add("--host-bandwidth", metavar="SPEED", help=words)
    add("--chunks", type=count, metavar="M", help="so many micro-batches")
    add("--stages", type=count, metavar="N", help="so many stages")
    words = "this schedule only, such as zb_h1; or any, the fastest of all (default: 1f1b)"
    add("--schedule", metavar="NAME", help=words)
    words = "bytes for each byte of a parameter, gradient and optimizer state included (default: 4)"
    add("--param-scale", type=float, metavar="X", help=words)
    words = "to measure for (default: %(default)s)"
    add("--timeout", type=seconds, default=5.0, metavar="SECONDS", help=words)
    add("--replicas", action="store_true", help="devices may share a stage")
    words = "estimate times for this device, such as A100-80GB, instead of measuring here"
    add("--on", metavar="NAME", help=words)
    words = "the part of that device's peak that matrix products reach (default: 0.5)"
    add("--efficiency", type=float, metavar="X", help=words)
    add("--json", action="store_true", help="print the plan as JSON")
    words = "draw the simulated step: .svg, .png, or .json for https://ui.perfetto.dev"
    add("--picture", type=file_to_write(".svg", ".png", ".json"), metavar="FILE", help=words)
    words = "all of the plan as a page for a browser: .html"
    add("--save", type=file_to_write(".html"), metavar="FILE", help=words)


def run(args: argparse.Namespace) -> int:
    """Perform the command; return 0, or 2 for arguments that do not fit, or 1 if no plan does."""
    status: int = import_module("syncpipe.commands.planning").run(args)  # and with it PyTorch
    return status


def _sample(text: str) -> tuple[list[int], Any]:
    import torch

    shape, _, name = text.partition(":")
    dtype = getattr(torch, name or "float32", None)
    sizes = [int(size) if size.isdecimal() else 0 for size in shape.lower().split("x")]
    if not isinstance(dtype, torch.dtype) or min(sizes) < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no shape such as 64x3x224x224 or 8x128:int64, the samples first"
        )
    return sizes, dtype
