"""Reads what may be a profile, and says in a sentence what is wrong with it."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, fields
from numbers import Real
from pathlib import Path
from typing import Any

__all__ = [
    "by_size",
    "check_name",
    "check_number",
    "check_sizes",
    "entries",
    "listed",
    "read_json",
    "shown",
]

_LONG = 60
#: Seconds or bytes; more is a mistake, and sums of it would not be finite.
_MOST = 1e30


def read_json(path: str | os.PathLike[str]) -> Any:
    """What is in a JSON file, with or without a mark of its byte order.

    Raises:
        OSError: it cannot be read.
        ValueError: it is none.
    """
    try:
        return json.loads(Path(path).read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a JSON file: it is no text ({error})") from error
    except RecursionError as error:
        raise ValueError(f"{path} is not a profile: it is nested too deep") from error
    except ValueError as error:
        raise ValueError(f"{path} is not a JSON file: {error}") from error


def entries(kind: type, data: Any, what: str) -> dict[str, Any]:
    """What a dataclass is made from.

    Args:
        kind: the dataclass.
        data: as read from a file.
        what: it is called in messages.

    Raises:
        ValueError: it is no mapping, lacks something, or has what is unknown.
    """
    if not isinstance(data, Mapping):
        raise ValueError(f"{what} is {shown(data)}, not a mapping")
    known = fields(kind)
    needed = [f.name for f in known if f.default is MISSING and f.default_factory is MISSING]
    _complete(data, needed, [f.name for f in known], what)
    return dict(data)


def _complete(data: Mapping[str, Any], needed: Collection[str], known: Collection[str], what: str
) -> None:  # fmt: skip
    missing = [name for name in needed if name not in data]
    if missing:
        raise ValueError(f"{what} lacks {', '.join(missing)}")
    unknown = [shown(name) for name in data if name not in known]
    if unknown:
        raise ValueError(f"{what} has {', '.join(unknown)}, which is unknown here")


def by_size(data: dict[str, Any], keys: Collection[str], what: str) -> dict[str, Any]:
    """Numbers by samples, whose keys JSON has as strings.

    Raises:
        ValueError: they are something else.
    """
    converted = {}
    for key in keys:
        numbers = data.get(key, {})
        if not isinstance(numbers, Mapping):
            raise ValueError(f"{key} of {what} is {shown(numbers)}, not numbers by samples")
        for size in numbers:
            if not str(size).isdecimal() or len(str(size)) > 15:
                raise ValueError(f"{key} of {what} is for {shown(size)} samples, no such number")
        converted[key] = {int(size): number for size, number in numbers.items()}
    return {**data, **converted}


def shown(value: Any) -> str:
    """A value in a message, if it is not too long for it."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):
        return f"a {type(value).__name__}"
    return text if len(text) <= _LONG else f"{text[:_LONG]}.."


def listed(key: str, data: Any) -> list[Any]:
    """A list, as it is."""
    if not isinstance(data, list):
        raise ValueError(f"{key} is {shown(data)}, not a list")
    return data


def check_sizes(what: str, numbers: Any, sizes: Sequence[int]) -> None:
    """Refuses numbers that are not for these sizes."""
    if not isinstance(numbers, Mapping):
        raise TypeError(f"{what} is {shown(numbers)}, not a mapping of numbers by samples")
    if tuple(sorted(numbers)) != tuple(sizes) or not sizes or sizes[0] < 1:
        raise ValueError(
            f"{what} is given for micro-batches of {sorted(numbers)} samples, and the forward time "
            f"of the first layer for {list(sizes)}: all numbers are for the same sizes, from 1"
        )
    for number in numbers.values():
        check_number(what, number)


def check_number(what: str, number: Any, most: float = _MOST) -> None:
    """Refuses what is no time and no size."""
    ok = isinstance(number, Real) and not isinstance(number, bool)
    if not (ok and 0 <= number <= most):
        raise ValueError(
            f"{what} is {shown(number)}; it must be a finite number, not negative, "
            f"and {most:g} at most"
        )


def check_name(what: str, name: Any) -> None:
    """Refuses what is no text."""
    if not isinstance(name, str):
        raise TypeError(f"{what} is {shown(name)}; it must be text")
