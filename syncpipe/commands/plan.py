"""Finds the fastest way to run a training step of a model within the memory of the devices.

Prints the balance, the number of micro-batches, the schedule and the stages that recompute, with
predicted times and memory. Measures the layers on this machine; the devices need not be here.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def whole_number(least: int, most: float = float("inf")) -> Callable[[str], int]:
    """An argument type: whole numbers within bounds, both included."""

    def read(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            bounds = f"from {least}" + f" to {most}" * (most != float("inf"))
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number {bounds}")
        return int(text)

    return read


def seconds(text: str) -> float:
    """An argument type: a number of seconds, 0 or more."""
    try:
        if (number := float(text)) >= 0:
            return number
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds, 0 or more")


def file_to_write(*suffixes: str) -> Callable[[str], Path]:
    """An argument type: a file in a folder that exists, with one of these suffixes."""

    def read(text: str) -> Path:
        path = Path(text)
        if path.suffix.lower() not in suffixes and suffixes:
            raise argparse.ArgumentTypeError(f"{text!r} must end in {' or '.join(suffixes)}")
        if not path.parent.is_dir() or path.is_dir():
            raise argparse.ArgumentTypeError(f"{text!r} is not a file in a folder that exists")
        return path

    return read


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add, count = parser.add_argument, whole_number(1)
    words = "the model, or a function that returns it, or that returns a pair of model and sample"
    add("model", nargs="?", metavar="PACKAGE.MODULE:FACTORY", help=words)
    words = "a micro-batch to measure with, for example 64x3x224x224 or 8x128:int64"
    add("--sample", type=_sample, metavar="SHAPE[:DTYPE]", help=words)
    words = "JSON with the costs of the layers: read if no model is given, else written"
    add("--profile", type=file_to_write(), metavar="FILE", help=words)
    words = 'described, "4 x 24GB, 12GB/s" or "8 x H100, 450GB/s", or of this machine: cuda:0, or 2'
    add("--devices", required=True, metavar="DEVICES", help=words)
    add("--batch-size", type=count, required=True, metavar="N")
    add("--memory", metavar="SIZE", help="of each device, for example 20GB")
    add("--bandwidth", metavar="SPEED", help="between devices, for example 12GB/s")
    words = "between devices and the host, for example 25GB/s; lets stages offload activations"
    add("--host-bandwidth", metavar="SPEED", help=words)
    add("--chunks", type=count, metavar="M", help="number of micro-batches")
    add("--stages", type=count, metavar="N", help="number of stages")
    words = "one schedule, for example zb_h1; or any, the fastest of all (default: 1f1b)"
    add("--schedule", metavar="NAME", help=words)
    words = "bytes for each byte of a parameter, gradient and optimizer state included (default: 4)"
    add("--param-scale", type=float, metavar="X", help=words)
    words = "seconds to measure the layers for (default: %(default)s)"
    add("--timeout", type=seconds, default=5.0, metavar="SECONDS", help=words)
    add("--replicas", action="store_true", help="devices may share a stage")
    words = "estimate times for this device, for example A100-80GB, instead of measuring them"
    add("--on", metavar="NAME", help=words)
    words = "share of the peak of the --on device that matrix products reach (default: 0.5)"
    add("--efficiency", type=float, metavar="X", help=words)
    add("--json", action="store_true", help="print the plan as JSON")
    words = "draw the simulated step: .svg, .png, or .json for https://ui.perfetto.dev"
    add("--picture", type=file_to_write(".svg", ".png", ".json"), metavar="FILE", help=words)
    words = "write the entire plan as a page for a browser: .html"
    add("--save", type=file_to_write(".html"), metavar="FILE", help=words)


def run(args: argparse.Namespace) -> int:
    """Run the command; return 0, or 1 if no plan fits into memory, or 2 for a wrong argument."""
    status: int = import_module("syncpipe.commands.planning").run(args)  # imports PyTorch
    return status


def _sample(text: str) -> tuple[list[int], Any]:
    import torch

    shape, _, name = text.partition(":")
    dtype = getattr(torch, name or "float32", None)
    sizes = [int(size) if size.isdecimal() else 0 for size in shape.lower().split("x")]
    if not isinstance(dtype, torch.dtype) or min(sizes) < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a shape; write it like 64x3x224x224 or 8x128:int64, samples first"
        )
    return sizes, dtype
