"""The options of ``python -m syncpipe demo``, checked as they are read."""

import argparse
import re
from functools import partial

import torch

BATCH_SIZE = 128


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the demo's options to its parser."""
    parser.add_argument(
        "--devices",
        type=_devices,
        metavar="D,D,...",
        help="such as 0,1 or cpu:0,cpu:1 (default: all accelerators, "
        "or two CPU workers where there is none)",
    )
    parser.add_argument(
        "--chunks",
        type=partial(_integer, least=1, most=BATCH_SIZE),
        default=4,
        metavar="M",
        help=f"micro-batches per mini-batch of {BATCH_SIZE} images (default: %(default)s)",
    )
    parser.add_argument(
        "--checkpoint",
        choices=["always", "except_last", "never"],
        default="except_last",
        help="which micro-batches are recomputed in backward (default: %(default)s)",
    )
    parser.add_argument(
        "--epochs",
        type=partial(_integer, least=1, most=10_000),
        default=12,
        metavar="N",
        help="passes over the training images (default: %(default)s)",
    )
    parser.add_argument(
        "--seed",
        type=partial(_integer, least=0, most=2**32 - 1),
        default=0,
        metavar="N",
        help="for the weights and for the order of the images (default: %(default)s)",
    )


def _integer(text: str, *, least: int, most: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if not least <= value <= most:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} to {most}")
    return value


def _devices(text: str) -> list[torch.device]:
    return [_device(name.strip()) for name in text.split(",")]


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


def accelerators() -> list[torch.device]:
    """All accelerators of this machine."""
    # A build for an accelerator names its type even where there is none, so ask for availability.
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or not torch.accelerator.is_available():
        return []
    return [torch.device(accelerator.type, k) for k in range(torch.accelerator.device_count())]


def default_devices() -> list[torch.device]:
    """All accelerators, or two CPU workers where there is none."""
    return accelerators() or [torch.device("cpu", 0), torch.device("cpu", 1)]
