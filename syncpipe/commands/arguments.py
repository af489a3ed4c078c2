"""What commands have in common: types of arguments, which say at once what does not fit."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path


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
