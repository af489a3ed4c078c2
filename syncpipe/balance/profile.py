"""What the layers of a model cost: the object that balancing and planning work from.

Measured by :func:`syncpipe.balance.profile`, or loaded from a file. Times are in seconds, sizes in
bytes, both for one micro-batch of so many samples; between the sizes that were measured they are
interpolated.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, asdict, dataclass, field, fields, replace
from numbers import Real
from pathlib import Path
from typing import Any, TypeVar

__all__ = ["LayerProfile", "Profile", "SkipProfile", "in_bytes", "interpolate"]

#: A number for each size of the micro-batch, in samples.
BySize = Mapping[int, float]

_T = TypeVar("_T")
#: Where the times of a profile are from, empty if unknown.
_SOURCES = ("measured", "estimated", "sizes", "")
#: Of the files that are written and read.
_VERSION = 2
_ENTRY = (
    "name",
    "forward_ms",
    "backward_ms",
    "activation_bytes",
    "parameter_bytes",
    "stored_bytes",
)
_UNITS = ("B", "kB", "MB", "GB", "TB")
#: Seconds or bytes; more is a mistake, and sums of it would not be finite.
_MOST = 1e30


@dataclass(frozen=True)
class LayerProfile:
    """What one layer costs.

    Attributes:
        name: of the layer in its ``nn.Sequential``.
        forward: seconds, by samples in the micro-batch.
        backward: seconds, the same; without any recomputation.
        output_bytes: what it hands to the next layer, the same.
        stored_bytes: what it keeps for backward, the same; each storage once, views and what it
            keeps of its input included, parameters and buffers not.
        shared_bytes: the part of ``stored_bytes`` that the layers before it keep already.
        peak_bytes: the most bytes that are alive at once while it runs forward or back: of its
            inputs, what it stores, its outputs, what it makes meanwhile, and gradients, that of a
            weight until it is added to the one from before included. Its inputs do not count if
            the layers before it store them, and it does not. Empty where unknown.
        parameter_bytes: its parameters.
        frozen_bytes: the part of these that needs no gradient.
        buffer_bytes: its buffers.
        interpreter: seconds that its forward holds the interpreter's lock, for a micro-batch of any
            size (:mod:`syncpipe.balance.run`); 0 where unknown.
        weight_share: the part of its backward, from 0 to 1, that the gradients of its parameters
            take; None where unknown.
    """

    name: str
    forward: BySize
    backward: BySize
    output_bytes: BySize
    stored_bytes: BySize
    shared_bytes: BySize = field(default_factory=dict)
    parameter_bytes: int = 0
    frozen_bytes: int = 0
    buffer_bytes: int = 0
    interpreter: float = 0.0
    peak_bytes: BySize = field(default_factory=dict)
    weight_share: float | None = None

    def memory(self, param_scale: float) -> float:
        """Return the bytes that stay on its device however many micro-batches there are.

        Args:
            param_scale: bytes for each byte of a parameter that is trained: itself, its gradient
                and the optimizer's state.
        """
        trained = self.parameter_bytes - self.frozen_bytes
        return param_scale * trained + self.frozen_bytes + self.buffer_bytes


@dataclass(frozen=True)
class SkipProfile:
    """A skip: from the layer that stashes it to the layer that pops it (indices), and its bytes."""

    name: str
    stash: int
    pop: int
    bytes: BySize


@dataclass(frozen=True)
class Profile:
    """What the layers of a model cost, and where it was measured.

    Attributes:
        layers: one for each layer of the ``nn.Sequential``.
        skips: what goes from layer to layer beside the chain.
        input_bytes: what the first layer is given, by samples.
        device: where it was measured, or for what it was estimated, in words; empty if unknown.
        whole: how many samples were measured is unknown: sizes are in mini-batches, and all
            numbers are for 1.
        spread: by what part of them measured times are uncertain; 0 if unknown.
        load_average: processes that waited for a processor when it was measured; 0 if unknown.
        source: where the times are from: ``"measured"``, ``"estimated"``, ``"sizes"`` if only sizes
            were counted, and times, if there are any, were put in later; empty if unknown.
    """

    layers: tuple[LayerProfile, ...]
    skips: tuple[SkipProfile, ...] = ()
    input_bytes: BySize = field(default_factory=dict)
    device: str = ""
    whole: bool = False
    source: str = ""
    spread: float = 0.0
    load_average: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        object.__setattr__(self, "skips", tuple(self.skips))
        if self.source not in _SOURCES:
            raise ValueError(f"source={self.source!r} of a profile: it is one of {_SOURCES}")
        if not self.layers:
            raise ValueError("a profile needs at least one layer")
        if not isinstance(self.whole, bool):
            raise TypeError(f"whole={_shown(self.whole)} must be True or False")
        for index, layer in enumerate(self.layers):
            self._check(f"layer {index} ({_shown(layer.name)})", layer)
            if layer.frozen_bytes > layer.parameter_bytes:
                raise ValueError(
                    f"frozen_bytes of layer {layer.name!r} is {layer.frozen_bytes}, more than its "
                    f"parameter_bytes={layer.parameter_bytes}"
                )
        self._check("a profile", self)
        for skip in self.skips:
            self._check(f"skip {_shown(skip.name)}", skip)
            if not (isinstance(skip.stash, int) and isinstance(skip.pop, int)):
                raise TypeError(
                    f"skip {skip.name!r} goes from {_shown(skip.stash)} to {_shown(skip.pop)}; "
                    "give it the indices of two layers"
                )
            if not 0 <= skip.stash < skip.pop < len(self.layers):
                raise ValueError(
                    f"skip {skip.name!r} goes from layer {skip.stash} to {skip.pop}, but there are "
                    f"{len(self.layers)} layers, and a skip leads to a later one"
                )

    def _check(self, whose: str, thing: Any) -> None:
        """Refuses texts, numbers and numbers by size that are none."""
        for about in fields(thing):
            what, value = f"{about.name} of {whose}", getattr(thing, about.name)
            if about.type == "str" and not isinstance(value, str):
                raise TypeError(f"{what} is {_shown(value)}; it must be text")
            if about.type == "float" or (about.name.endswith("_bytes") and about.type == "int"):
                _check_number(what, value)
            if about.name == "weight_share" and value is not None:
                _check_number(what, value, most=1)
            if about.type != "BySize" or (about.default_factory is not MISSING and not value):
                continue
            if not isinstance(value, Mapping):
                raise TypeError(f"{what} is {_shown(value)}, not a mapping of numbers by samples")
            sizes = self.sizes
            if tuple(sorted(value)) != sizes or sizes[:1] < (1,):
                raise ValueError(
                    f"{what} is given for micro-batches of {sorted(value)} samples, and the forward"
                    f" time of the first layer for {[*sizes]}: all numbers are for the same sizes, "
                    "from 1"
                )
            for number in value.values():
                _check_number(what, number)

    @property
    def timed(self) -> bool:
        """Whether there are times in it."""
        size = self.sizes[-1]
        return any(layer.forward[size] + layer.backward[size] for layer in self.layers)

    @property
    def how(self) -> str:
        """Where the numbers are from, in words; empty if unknown."""
        if self.source == "estimated":
            return f"times estimated for {self.device}; sizes counted without values"
        if self.source == "sizes":
            times = "times given by hand, " if self.timed else ""
            return f"{times}sizes counted on {self.device}"
        return f"measured on {self.device}" if self.device else ""

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of a micro-batch, in samples, that were measured; ascending."""
        return tuple(sorted(self.layers[0].forward))

    def of(self, samples: int) -> Profile:
        """Return a profile of one mini-batch of unknown size as one of so many samples."""
        if not self.whole:
            return self
        if samples < 1:
            raise ValueError(f"samples={samples}: a mini-batch has at least one sample")

        def relabelled(thing: _T, **more: Any) -> _T:
            made: Any = thing
            for key in _by_size(type(thing)):
                numbers = getattr(thing, key)
                more[key] = {size * samples: number for size, number in numbers.items()}
            return replace(made, **more)  # type: ignore[no-any-return]

        layers, skips = (tuple(map(relabelled, some)) for some in (self.layers, self.skips))
        return relabelled(self, layers=layers, skips=skips, whole=False)

    @classmethod
    def from_list(
        cls, entries: Iterable[Mapping[str, Any]], *, samples: int | None = None
    ) -> Profile:
        """Make a profile from one entry for each layer, measured on one batch.

        Args:
            entries: each with ``name``, ``forward_ms``, ``backward_ms``, ``activation_bytes`` (its
                output), ``parameter_bytes`` and ``stored_bytes``; anything else is left aside.
            samples: how many samples were measured; None if unknown. The numbers are then
                those of the mini-batch that is planned for.

        Raises:
            ValueError: an entry lacks something, or a number is none or negative.
        """
        if samples is not None and samples < 1:
            raise ValueError(f"samples={samples}: at least one was measured")
        size = 1 if samples is None else samples
        layers = []
        for index, entry in enumerate(entries):
            if not isinstance(entry, Mapping):
                raise ValueError(f"entry {index} is {_shown(entry)}, not a mapping")
            missing = [key for key in _ENTRY if key not in entry]
            if missing:
                raise ValueError(f"entry {index} of the profile lacks {', '.join(missing)}")
            for key in _ENTRY[1:]:
                _check_number(f"{key} of entry {index} ({entry['name']!r})", entry[key])
            layers.append(
                LayerProfile(
                    name=entry["name"],
                    forward={size: entry["forward_ms"] / 1e3},
                    backward={size: entry["backward_ms"] / 1e3},
                    output_bytes={size: entry["activation_bytes"]},
                    stored_bytes={size: entry["stored_bytes"]},
                    parameter_bytes=entry["parameter_bytes"],
                )
            )
        return cls(tuple(layers), whole=samples is None)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a JSON file that :meth:`load` reads."""
        text = json.dumps({"syncpipe_profile": _VERSION, **asdict(self)}, indent=1)
        Path(path).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, samples: int | None = None) -> Profile:
        """Read what :meth:`save` wrote, or a list as for :meth:`from_list`.

        Args:
            path: of a JSON file.
            samples: for a list, how many samples were measured.

        Raises:
            OSError, ValueError: it cannot be read, or is neither; the message says why.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8-sig"))
        except RecursionError as error:
            raise ValueError(f"{path} is not a profile: it is nested too deep") from error
        except ValueError as error:  # no text, or no JSON
            raise ValueError(f"{path} is not a JSON file: {error}") from error
        if isinstance(data, list):
            return cls.from_list(data, samples=samples)
        version = data.pop("syncpipe_profile", None) if isinstance(data, dict) else None
        if version is None:
            raise ValueError(
                f"{path} is not a profile: neither one that Profile.save wrote nor a list of "
                f"entries with {', '.join(_ENTRY)}"
            )
        if version != _VERSION:
            raise ValueError(
                f"{path} is not a profile that can be read here: it is of version "
                f"{_shown(version)}, not {_VERSION}"
            )
        if samples is not None and not data.get("whole"):
            raise ValueError(f"samples={samples}: {path} says itself how many were measured")
        try:
            for key, kind in (("layers", LayerProfile), ("skips", SkipProfile)):
                if not isinstance(data.get(key), list):
                    raise ValueError(f"{key} is {_shown(data.get(key))}, not a list")
                data[key] = [_read(kind, x, f"{key}[{k}]") for k, x in enumerate(data[key])]
            found = _read(cls, data, "it")
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path} is not a whole profile: {error}") from error
        return found if samples is None else found.of(samples)

    def table(self) -> str:
        """Return a line for each layer, for the largest micro-batch that was measured."""
        size = self.sizes[-1]
        of = "one mini-batch" if self.whole else f"{size} sample{'s' * (size != 1)}"
        where = f" on {self.device}" if self.device else ""
        if self.source in ("estimated", "sizes"):
            where = f", {self.how}"
        lines = [["layer", "forward", "backward", "output", "stored", "parameters"]]
        for layer in self.layers:
            lines.append(
                [
                    layer.name,
                    _in_ms(layer.forward[size]),
                    _in_ms(layer.backward[size]),
                    in_bytes(layer.output_bytes[size]),
                    in_bytes(layer.stored_bytes[size]),
                    in_bytes(layer.parameter_bytes),
                ]
            )
        shared = sum(layer.shared_bytes.get(size, 0) for layer in self.layers)
        stored = sum(layer.stored_bytes[size] for layer in self.layers) - shared
        lines.append(
            [
                "all",
                _in_ms(math.fsum(layer.forward[size] for layer in self.layers)),
                _in_ms(math.fsum(layer.backward[size] for layer in self.layers)),
                "",
                in_bytes(stored),
                in_bytes(sum(layer.parameter_bytes for layer in self.layers)),
            ]
        )
        text = [f"{of}{where}", *_aligned(lines)]
        for skip in self.skips:
            first, last = self.layers[skip.stash].name, self.layers[skip.pop].name
            text.append(f"skip {skip.name}: {first} to {last}, {in_bytes(skip.bytes[size])}")
        return "\n".join(text)

    def __str__(self) -> str:
        return self.table()


def interpolate(numbers: BySize, samples: float) -> float:
    """A number for a size that may not have been measured.

    Between two measured sizes on the straight line through both; beyond all of them on from the
    nearest one, with the slope of the line that fits all best; with one measured size in
    proportion. Below all of them no less than in proportion: fewer samples are never quicker each.
    """
    if samples in numbers:
        return numbers[int(samples)]
    sizes = sorted(numbers)
    if len(sizes) == 1:
        return numbers[sizes[0]] * samples / sizes[0]
    if sizes[0] < samples < sizes[-1]:
        right = next(k for k, size in enumerate(sizes) if size > samples)
        a, b = sizes[right - 1], sizes[right]
        return numbers[a] + (numbers[b] - numbers[a]) * (samples - a) / (b - a)
    nearest = sizes[0] if samples < sizes[0] else sizes[-1]
    mean = sum(sizes) / len(sizes)
    slope = sum((size - mean) * numbers[size] for size in sizes)
    slope /= sum((size - mean) ** 2 for size in sizes)
    least = min(1.0, samples / nearest) * numbers[nearest]
    return max(least, numbers[nearest] + max(0.0, slope) * (samples - nearest))


def in_bytes(number: float, *, up: bool = False) -> str:
    """A size in a unit that fits: 12 B, 3.4 kB, 56.0 MB, 789 GB, powers of 1000.

    Args:
        number: of bytes.
        up: round up, as for what is needed.
    """
    unit = 0
    while abs(number) >= 999.5 and unit < len(_UNITS) - 1:
        number, unit = number / 1000, unit + 1
    digits = 0 if unit == 0 or abs(number) >= 99.5 else 1
    if up:
        number = math.ceil(number * 10**digits) / 10**digits
    return f"{number:.{digits}f} {_UNITS[unit]}"


def _by_size(kind: type) -> list[str]:
    """The fields of a dataclass that are numbers by samples."""
    found: tuple[Field[Any], ...] = fields(kind)
    return [about.name for about in found if about.type == "BySize"]


def _read(kind: type[_T], data: Any, what: str) -> _T:
    """A dataclass from a mapping, in which JSON has sizes as strings."""
    if not isinstance(data, Mapping):
        raise ValueError(f"{what} is {_shown(data)}, not a mapping")
    converted = dict(data)
    for key in _by_size(kind):
        numbers = converted.get(key)
        if isinstance(numbers, Mapping):
            converted[key] = {_size(size, f"{key} of {what}"): numbers[size] for size in numbers}
    try:
        return kind(**converted)
    except TypeError as error:  # Python's own says what is missing or unknown
        raise ValueError(f"{what}: {error}") from error


def _size(text: str, what: str) -> int:
    if not text.isdecimal() or len(text) > 15:
        raise ValueError(f"{what} is for {_shown(text)} samples, no such number")
    return int(text)


def _check_number(what: str, number: Any, most: float = _MOST) -> None:
    """Refuses what is no time and no size."""
    ok = isinstance(number, Real) and not isinstance(number, bool)
    if not (ok and 0 <= number <= most):
        raise ValueError(
            f"{what} is {_shown(number)}; it must be a finite number, not negative, "
            f"and {most:g} at most"
        )


def _shown(value: Any) -> str:
    """A value in a message, if it is not too long for it."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):
        return f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:60]}.."


def _in_ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"


def _aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    """Cells as columns: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip()
        for line in lines
    ]
