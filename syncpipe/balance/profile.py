"""Profiles: what the layers of a model cost, the input of balancing and planning.

Profiles are measured by :func:`syncpipe.balance.profile`, or loaded from a file. Times are in
seconds, sizes in bytes, both for one micro-batch of a known number of samples.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from itertools import pairwise
from numbers import Real
from pathlib import Path
from statistics import linear_regression
from typing import Any, TypeVar

from syncpipe.format import columns, count, in_bytes

__all__ = ["LayerProfile", "Profile", "SkipProfile", "interpolate"]

#: A number for each size of the micro-batch, in samples.
BySize = Mapping[int, float]

_T = TypeVar("_T")
_SOURCES = ("measured", "estimated", "sizes", "")
#: Version of the file format.
_VERSION = 2
#: Keys of an entry of a plain list, besides its name.
_ENTRY = ("forward_ms", "backward_ms", "activation_bytes", "parameter_bytes", "stored_bytes")
#: Limit for seconds and bytes, so that sums stay finite.
_MOST = 1e30


@dataclass(frozen=True)
class LayerProfile:
    """What one layer costs; mappings are by samples in the micro-batch.

    Attributes:
        name: of the layer in its ``nn.Sequential``.
        forward, backward: seconds, without recomputation.
        output_bytes: size of its output.
        stored_bytes: what it stores for backward; each storage once, views and stored parts of its
            input included, parameters and buffers not.
        shared_bytes: the part of ``stored_bytes`` that earlier layers store, too.
        forward_peak_bytes, backward_peak_bytes: maximum bytes alive during its forward and its
            backward: inputs, stored tensors, outputs, temporaries and gradients, with a new weight
            gradient until it is accumulated. Inputs that earlier layers store and it does not are
            left out. Empty if unknown.
        parameter_bytes, frozen_bytes, buffer_bytes: its parameters, the part without gradients, and
            its buffers.
        interpreter: seconds that its forward holds the interpreter's lock, whatever the size; 0 if
            unknown.
        weight_share: the part of its backward, from 0 to 1, that computes the gradients of its
            parameters; None if unknown.
        input_peak_bytes, weight_peak_bytes: the same for the halves of a split backward: for the
            gradients of its inputs, and for the products that are the gradients of its weights.
        halves_bytes: what the weight half needs from the input half: inputs of its products, and
            gradients of their outputs.
        may_write: whether it, or a layer that gets its input from it, may write into that, so that
            a pipe lets a stage that begins here work on copies of inputs that others need.
        renorms: whether its forward writes into its weight, so that a pipe never recomputes it.
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
    weight_share: float | None = None
    forward_peak_bytes: BySize = field(default_factory=dict)
    backward_peak_bytes: BySize = field(default_factory=dict)
    input_peak_bytes: BySize = field(default_factory=dict)
    halves_bytes: BySize = field(default_factory=dict)
    weight_peak_bytes: BySize = field(default_factory=dict)
    may_write: bool = False
    renorms: bool = False

    def memory(self, param_scale: float) -> float:
        """Return the bytes that stay on its device, whatever the number of micro-batches.

        ``param_scale``: bytes per byte of a trained parameter, for itself, its gradient and the
        optimizer's state.
        """
        trained = self.parameter_bytes - self.frozen_bytes
        return param_scale * trained + self.frozen_bytes + self.buffer_bytes


@dataclass(frozen=True)
class SkipProfile:
    """A skip: the indices of the layers that stash and pop it, and its bytes."""

    name: str
    stash: int
    pop: int
    bytes: BySize


@dataclass(frozen=True)
class Profile:
    """What the layers of a model cost, and where it was measured.

    Attributes:
        layers: one for each layer of the ``nn.Sequential``.
        skips: between layers.
        ties: parameters that several layers share: the index of the first layer, which counts them,
            those of the others, their bytes, and the trained part of these.
        input_bytes: size of the first layer's input, by samples.
        device: on which it was measured, or for which it was estimated; empty if unknown.
        whole: the number of samples is unknown: all numbers are for 1, a mini-batch.
        source: of the times: ``"measured"``, ``"estimated"``, ``"sizes"`` if only sizes were
            counted (times may have been added later); empty if unknown.
        spread: relative uncertainty of measured times; 0 if unknown.
        load_average: running processes during measurement; 0 if unknown.
    """

    layers: tuple[LayerProfile, ...]
    skips: tuple[SkipProfile, ...] = ()
    input_bytes: BySize = field(default_factory=dict)
    device: str = ""
    whole: bool = False
    source: str = ""
    spread: float = 0.0
    load_average: float = 0.0
    ties: tuple[tuple[int, tuple[int, ...], float, float], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        object.__setattr__(self, "skips", tuple(self.skips))
        ties = tuple([(a, tuple(others), size, part) for a, others, size, part in self.ties])
        object.__setattr__(self, "ties", ties)
        if self.source not in _SOURCES:
            raise ValueError(f"source={self.source!r} of a profile: must be one of {_SOURCES}")
        if not self.layers:
            raise ValueError("a profile needs at least one layer")
        for index, layer in enumerate(self.layers):
            self._check(f"layer {index} ({layer.name!r})", layer)
            if layer.frozen_bytes > layer.parameter_bytes:
                raise ValueError(
                    f"frozen_bytes of layer {layer.name!r} is {layer.frozen_bytes}, more than its "
                    f"parameter_bytes={layer.parameter_bytes}"
                )
        self._check("a profile", self)
        for home, others, *sizes in self.ties:
            if not all(0 <= home < k < len(self.layers) for k in others):
                raise ValueError(f"ties: layers {home} and {others} must ascend, and exist")
            for size in sizes:
                _check_number(f"what layers {home} and {others} share", size)
        for skip in self.skips:
            self._check(f"skip {skip.name!r}", skip)
            ends = isinstance(skip.stash, int) and isinstance(skip.pop, int)
            if not (ends and 0 <= skip.stash < skip.pop < len(self.layers)):
                raise ValueError(
                    f"skip {skip.name!r} goes from layer {skip.stash!r} to {skip.pop!r}, but there "
                    f"are {len(self.layers)} layers, and a skip leads to a later one"
                )

    def _check(self, whose: str, thing: Any) -> None:
        """Refuse invalid strings, numbers and numbers by size."""
        for one in fields(thing):
            what, value, kind = f"{one.name} of {whose}", getattr(thing, one.name), one.type
            if kind == "str" and not isinstance(value, str):
                raise TypeError(f"{what} is {value!r:.60}, not a str")
            if kind in ("int", "float") or (kind == "float | None" and value is not None):
                _check_number(what, value, 1 if one.name == "weight_share" else _MOST)
            if kind == "BySize" and (value or one.default_factory is MISSING):
                sizes = list(self.sizes)
                known = isinstance(value, Mapping) and sorted(value) == sizes
                if not known or not sizes or sizes[0] < 1:
                    raise ValueError(
                        f"{what} is {value!r:.60}: must be numbers by samples in a micro-batch, "
                        f"from 1, for the sizes of the forward of the first layer, {sizes}"
                    )
                for number in value.values():
                    _check_number(what, number)

    @property
    def how(self) -> str:
        """Where the numbers are from, as text; empty if unknown."""
        if self.source == "estimated":
            return f"times estimated for {self.device}; sizes counted without values"
        if self.source == "sizes":
            return f"sizes counted on {self.device}"
        return f"measured on {self.device}" if self.device else ""

    @property
    def sizes(self) -> tuple[int, ...]:
        """The measured sizes of a micro-batch, in samples; ascending."""
        return tuple(sorted(self.layers[0].forward))

    def of(self, samples: int) -> Profile:
        """Return a profile of a mini-batch of unknown size as one of ``samples`` samples."""
        if not self.whole:
            return self
        known = ("forward", "backward", "output_bytes", "stored_bytes")
        layers = []
        for layer in self.layers:
            more: dict[str, Any] = {key: {samples: getattr(layer, key)[1]} for key in known}
            layers.append(replace(layer, **more))
        return replace(self, layers=tuple(layers), whole=False)

    @classmethod
    def from_list(
        cls, entries: Iterable[Mapping[str, Any]], *, samples: int | None = None
    ) -> Profile:
        """Make a profile from one entry for each layer, measured on one batch.

        Args:
            entries: each with ``name``, ``forward_ms``, ``backward_ms``, ``activation_bytes`` (its
                output), ``parameter_bytes`` and ``stored_bytes``; other keys are ignored.
            samples: size of the measured batch; default: that of the mini-batch to plan for.

        Raises:
            ValueError: an entry lacks a key, or a number is invalid.
        """
        layers = []
        for index, entry in enumerate(entries):
            missing = [key for key in ("name", *_ENTRY) if key not in entry]
            if missing:
                raise ValueError(f"entry {index} of the profile lacks {', '.join(missing)}")
            for key in _ENTRY:
                _check_number(f"{key} of entry {index} ({entry['name']!r})", entry[key])
            forward, backward, output, parameters, stored = (entry[key] for key in _ENTRY)
            layers.append(
                LayerProfile(
                    entry["name"], {1: forward / 1e3}, {1: backward / 1e3}, {1: output},
                    {1: stored}, parameter_bytes=parameters,
                )
            )  # fmt: skip
        found = cls(tuple(layers), whole=True)
        return found if samples is None else found.of(samples)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a JSON file that :meth:`load` reads."""
        text = json.dumps({"syncpipe_profile": _VERSION, **asdict(self)}, indent=1)
        Path(path).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, samples: int | None = None) -> Profile:
        """Read what :meth:`save` wrote, or a list and ``samples`` as for :meth:`from_list`.

        Raises:
            OSError, ValueError: the file is unreadable, or neither of both; the message has the
                reason.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8-sig"))
            if isinstance(data, list):
                return cls.from_list(data, samples=samples)
            if data.pop("syncpipe_profile") != _VERSION:
                raise ValueError(f"syncpipe_profile is not {_VERSION}")
            for key, kind in (("layers", LayerProfile), ("skips", SkipProfile)):
                data[key] = [_read(kind, entry) for entry in data[key]]
            found = _read(cls, data)
            if samples is not None and not found.whole:
                raise ValueError(f"samples={samples}: the file has its own number of samples")
            return found if samples is None else found.of(samples)
        except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path} is not a profile ({type(error).__name__}: {error}): must be JSON that "
                f"Profile.save wrote, or a list of entries with name, {', '.join(_ENTRY)}"
            ) from error

    def table(self) -> str:
        """Return a line for each layer, for the largest measured micro-batch."""
        n, layers = self.sizes[-1], self.layers
        stored = sum(x.stored_bytes[n] - x.shared_bytes.get(n, 0) for x in layers)
        rows = [("layer", "forward", "backward", "output", "stored", "parameters")]
        for name, some, output, kept in [
            *((x.name, [x], in_bytes(x.output_bytes[n]), x.stored_bytes[n]) for x in layers),
            ("all", layers, "", stored),
        ]:
            forward, backward = (
                f"{1e3 * math.fsum(getattr(x, what)[n] for x in some):.3f} ms"
                for what in ("forward", "backward")
            )
            parameters = in_bytes(sum(x.parameter_bytes for x in some))
            rows.append((name, forward, backward, output, in_bytes(kept), parameters))
        ends = [(skip, layers[skip.stash].name, layers[skip.pop].name) for skip in self.skips]
        skips = (f"skip {s.name}: {a} to {b}, {in_bytes(s.bytes[n])}" for s, a, b in ends)
        return "\n".join(
            [
                ("one mini-batch" if self.whole else count(n, "sample"))
                + f", {self.how}" * bool(self.how),
                *columns(rows),
                *skips,
            ]
        )

    def __str__(self) -> str:
        return self.table()


def interpolate(numbers: BySize, samples: float) -> float:
    """A number for a size that may not have been measured; 0 if ``numbers`` is empty.

    Between two sizes it is linear. Beyond all it goes on from the nearest size with the slope of
    the line that fits all best. With one size it is proportional; below all at least proportional,
    as fewer samples are never faster per sample.
    """
    if samples in numbers or not numbers:
        return numbers.get(int(samples), 0.0)
    sizes = sorted(numbers)
    if len(sizes) == 1:
        return numbers[sizes[0]] * samples / sizes[0]
    if sizes[0] < samples < sizes[-1]:
        a, b = next((a, b) for a, b in pairwise(sizes) if b > samples)
        return numbers[a] + (numbers[b] - numbers[a]) * (samples - a) / (b - a)
    nearest = sizes[0] if samples < sizes[0] else sizes[-1]
    slope = linear_regression(sizes, [numbers[size] for size in sizes]).slope
    least = min(1.0, samples / nearest) * numbers[nearest]
    return max(least, numbers[nearest] + max(0.0, slope) * (samples - nearest))


def _read(kind: type[_T], data: dict[str, Any]) -> _T:
    """A dataclass from a JSON mapping, in which sizes are strings."""
    known = [one.name for one in fields(kind) if one.type == "BySize"]  # type: ignore[arg-type]
    sizes = {key: {int(n): x for n, x in data[key].items()} for key in known if key in data}
    return kind(**{**data, **sizes})


def _check_number(what: str, number: Any, most: float = _MOST) -> None:
    """Refuse a number that is no time and no size."""
    ok = isinstance(number, Real) and not isinstance(number, bool)
    if not (ok and 0 <= number <= most):
        raise ValueError(f"{what} is {number!r:.60}; must be a number from 0 to {most:g}")
