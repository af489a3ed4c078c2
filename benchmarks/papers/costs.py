"""What the layers of the papers' models cost here, and what any schedule would make of that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.group import Options
from benchmarks.models import amoebanetd, resnet101, unet, vgg16
from syncpipe.balance import Profile, balance_cost, profile
from syncpipe.planner.cuts.heuristics import block_partitions
from syncpipe.schedules import build
from syncpipe.schedules.simulation import Costs, simulate


@dataclass(frozen=True)
class PaperOptions(Options):
    """What was asked for on the command line.

    Attributes:
        profiles: files with profiles, named after their models, used in place of measuring.
        profile_samples: how many samples the lists among them were measured with, where known.
    """

    profiles: tuple[Path, ...] = ()
    profile_samples: int | None = None

    def loaded(self) -> dict[str, Profile]:
        """The profiles of the files, by the name of the file without its ending."""
        return {path.stem: self._load(path) for path in self.profiles}

    def _load(self, path: Path) -> Profile:
        found = Profile.load(path)
        return found if self.profile_samples is None else found.of(self.profile_samples)


def bar(total: int, label: str) -> Any:
    """A progress bar, a context."""
    from tqdm import tqdm

    return tqdm(total=total, desc=label, disable=None)


# -- measured -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Subject:
    """A model whose layers are measured.

    Attributes:
        name: what the report calls it.
        build: makes it.
        side: of its images, in pixels, as in the papers.
        samples: in a micro-batch.
        quick_side: with ``--quick``.
    """

    name: str
    build: Callable[[], nn.Sequential]
    side: int
    samples: int
    quick_side: int


#: By the name of the file that stands for measuring.
SUBJECTS = {
    "amoebanetd": Subject("AmoebaNet-D (18, 256)", amoebanetd, 224, 2, 64),
    "resnet101": Subject("ResNet-101", resnet101, 224, 4, 64),
    "unet": Subject("U-Net (5, 64)", partial(unet, num_convs=5, base_channels=64), 192, 1, 64),
    "vgg16": Subject("VGG-16", vgg16, 224, 4, 224),
}


@dataclass(frozen=True)
class Measured:
    """Layers with their times for one micro-batch.

    Attributes:
        profile: all that is known of them.
        source: what was measured, in words.
    """

    profile: Profile
    source: str

    @property
    def size(self) -> int:
        """Samples in the micro-batch."""
        return self.profile.sizes[-1]

    @property
    def forward(self) -> list[float]:
        return [layer.forward[self.size] for layer in self.profile.layers]

    @property
    def backward(self) -> list[float]:
        return [layer.backward[self.size] for layer in self.profile.layers]


def measured(key: str, options: PaperOptions) -> Measured:
    """Loads the profile of a model, or measures it on one intra-op thread of the CPU."""
    files = options.loaded()
    subject = SUBJECTS[key]
    if key in files:
        found = files[key]
        of = "one mini-batch of unknown size" if found.whole else f"{found.sizes[-1]} samples"
        where = f", {found.device}" if found.device else ""
        return Measured(found, f"{subject.name}: {key}.json, {of}{where}")
    samples = subject.samples if not options.quick else 2
    side = subject.side if not options.quick else subject.quick_side
    sample: Tensor = torch.rand(samples, 3, side, side)
    torch.manual_seed(0)
    found = profile(
        subject.build(),
        sample,
        sizes=[samples],
        timeout=0.0 if options.quick else 30.0,
        threads=1,
    )
    total = sum(layer.forward[samples] + layer.backward[samples] for layer in found.layers)
    words = f"{subject.name}: {len(found.layers)} layers, measured on one thread of this CPU with "
    words += f"micro-batches of {samples}, {side}x{side} pixels; {total:.3g} s forward and backward"
    return Measured(found, words)


# -- simulated ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """How a mini-batch goes through the stages.

    Attributes:
        schedule: its name.
        rematerialized: whether all micro-batches but the last are computed again.
        stages: on each device.
    """

    schedule: str
    rematerialized: bool = False
    stages: int = 1


WAYS = {
    "GPipe, re-materialized": Way("gpipe", rematerialized=True),
    "GPipe": Way("gpipe"),
    "1F1B": Way("1f1b"),
    "interleaved 1F1B": Way("interleaved_1f1b", stages=2),
    "zero bubble": Way("zb_h1"),
}
CUTS: dict[str, Callable[[Sequence[float], int], Sequence[int]]] = {
    "exact": balance_cost,
    "block partitions": block_partitions,
}
#: What the columns of ``WAYS`` mean, and what is assumed; for the reports.
DEFINITIONS = {
    "cut": "of the layers into stages, by forward and backward time: the exact one of "
    "syncpipe.balance, or torchgpipe's block partitions.",
    "GPipe, re-materialized": "all forwards, then all backwards; all micro-batches but the last "
    "are computed again (checkpoint='except_last'). As in the papers. In the other columns nothing "
    "is computed again.",
    "GPipe": "the same without re-materialization, which would seldom fit.",
    "1F1B": "with overlap slots.",
    "interleaved 1F1B": "two stages on each device; the cut is that into 2 n stages, each for "
    "itself, so two large ones may meet on one device.",
    "zero bubble": "ZB-H1. Its two halves of a backward are taken to be equally long: halves are "
    "not measured.",
}
NOTES = [
    "Simulated with measured times of layers, in which all micro-batches have the same number of "
    "samples: what smaller micro-batches lose is not in it, nor is sending (0 s), nor the "
    "optimizer's step.",
    "A GPU shares out its time among the layers differently from a CPU, so the cuts are not the "
    "papers' cuts.",
]


def step_time(costs: Measured, cut: str, way: Way, n: int, m: int) -> float:
    """Seconds of a simulated step of ``m`` micro-batches on ``n`` devices."""
    stages = n * way.stages
    totals = [f + b for f, b in zip(costs.forward, costs.backward, strict=True)]
    balance = CUTS[cut](totals, stages)
    forward, backward, start = [], [], 0
    for size in balance:
        forward.append(sum(costs.forward[start : start + size]))
        backward.append(sum(costs.backward[start : start + size]))
        start += size
    half = tuple(time / 2 for time in backward)
    schedule = build(way.schedule, m, [j % n for j in range(stages)])
    again = m - 1 if way.rematerialized else 0
    return simulate(schedule, Costs(tuple(forward), half, half), (again,) * stages).makespan


def throughputs(costs: Measured, cut: str, n: int, m: int) -> dict[str, float]:
    """Micro-batches per second, by the names of ``WAYS``."""
    return {name: m / step_time(costs, cut, way, n, m) for name, way in WAYS.items()}
