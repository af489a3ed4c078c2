"""The options of ``python -m syncpipe demo``, checked as they are read."""

import argparse
import re
from collections.abc import Callable
from pathlib import Path

import torch

from syncpipe.commands.demo_data import BATCH_SIZE
from syncpipe.runtime.streams import accelerators

__all__ = ["add_arguments", "default_devices"]

_PICTURES = (".png", ".svg")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the demo's options to its parser."""
    parser.add_argument(
        "--devices",
        type=_devices,
        metavar="D,D,...",
        help="such as 0,1 or cpu:0,cpu:1, a stage on each (default: all accelerators, or two CPU "
        "workers where there are not two of them)",
    )
    parser.add_argument(
        "--chunks",
        type=_chunks,
        metavar="M",
        help=f"micro-batches per mini-batch of {BATCH_SIZE} images (default: as planned)",
    )
    parser.add_argument(
        "--epochs",
        type=_integer(1, 10_000),
        default=12,
        metavar="N",
        help="passes over the training images (default: %(default)s)",
    )
    parser.add_argument(
        "--seed",
        type=_integer(0, 2**32 - 1),
        default=0,
        metavar="N",
        help="for the weights and for the order of the images (default: %(default)s)",
    )
    parser.add_argument(
        "--picture",
        type=_picture,
        default=Path("syncpipe-demo.png"),
        metavar="FILE",
        help="where to draw a step, .png or .svg (default: %(default)s)",
    )


def _integer(least: int, most: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not a whole number from {least} to {most}"
            )
        return value

    return read


def _chunks(text: str) -> int:
    fit = [m for m in range(1, BATCH_SIZE + 1) if BATCH_SIZE % m == 0]
    if text not in map(str, fit):
        raise argparse.ArgumentTypeError(
            f"{text!r} does not divide a mini-batch of {BATCH_SIZE} images: "
            f"{', '.join(map(str, fit))} do"
        )
    return int(text)


def _picture(text: str) -> Path:
    path = Path(text)
    if path.suffix.lower() not in _PICTURES:
        raise argparse.ArgumentTypeError(f"{text!r} must end in {' or '.join(_PICTURES)}")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r}: there is no folder {str(path.parent)!r}")
    return path


def _devices(text: str) -> list[torch.device]:
    devices = [_device(name.strip()) for name in text.split(",")]
    for device in devices:
        if devices.count(device) > 1:
            raise argparse.ArgumentTypeError(
                f"{device} is named twice: the demo puts one stage on each device"
            )
        if device.type != devices[0].type:
            raise argparse.ArgumentTypeError(
                f"{devices[0]} and {device} are of two kinds: the demo measures on the first of "
                "them what it plans for all"
            )
    return devices


def _device(name: str) -> torch.device:
    """A device of this machine by its name, or an accelerator by its number."""
    numbered = accelerators()
    kind = numbered[0].type if numbered else "accelerator"
    match = re.fullmatch(r"(?:([a-z]+)(?::(\d+))?|(\d+))", name, re.ASCII)
    if match:
        index = int(match[2] or match[3] or 0)
        # Past 127 torch.device wraps around in silence.
        if match[1] == "cpu" and index <= 127:
            return torch.device("cpu", index)
        if match[1] in (kind, None) and index < len(numbered):
            return numbered[index]
    has = f"{kind}:0 to {kind}:{len(numbered) - 1}" if numbered else "no accelerator"
    raise argparse.ArgumentTypeError(
        f"there is no device {name!r}: this machine has {has}, and cpu:0 to cpu:127 as CPU workers"
    )


def default_devices() -> list[torch.device]:
    """All accelerators, or two CPU workers: one device has nobody to share the work with."""
    found = accelerators()
    return found if len(found) > 1 else [torch.device("cpu", 0), torch.device("cpu", 1)]
