"""What the measurements share: rounds, spreads, agreement, the machine, tables in Markdown."""

from __future__ import annotations

import datetime
import gc
import importlib.metadata
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import syncpipe

MISSING = 'benchmarks: {}; this measurement needs tqdm: pip install "syncpipe[bench]"'


#: What a training step leaves: the loss, and the gradients of all parameters in order.
Outcome = tuple[Tensor, list[Tensor]]


# -- measuring ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spread:
    """Samples, one for each round, by their median and quartiles."""

    median: float
    low: float
    high: float
    samples: list[float]

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        """At least two samples."""
        low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
        return cls(median, low, high, [float(f"{sample:.6g}") for sample in samples])

    @classmethod
    def ratio(cls, times: Sequence[float], bases: Sequence[float], factor: float = 1.0) -> Spread:
        """Of the ratios to ``factor`` times the base of the same round."""
        return cls.of([time / (factor * base) for time, base in zip(times, bases, strict=True)])

    def __str__(self) -> str:
        return f"{number(self.median)} ({number(self.low)} .. {number(self.high)})"


def number(value: float) -> str:
    """Four digits, or all before the point."""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def rounds(
    jobs: Mapping[str, Callable[[], float]], repeats: int, label: str
) -> dict[str, list[float]]:
    """Runs all jobs in every round, so that whatever else the machine does meets them alike.

    The order is rotated from round to round, and every other round goes backwards. Two rounds
    before the first are not counted.

    Args:
        jobs: by name, each returns its time.
        repeats: number of rounds.
        label: stands before the bar that shows how far it is.

    Returns:
        For each job its times, one for each round.
    """
    from tqdm import tqdm

    names = list(jobs)
    samples: dict[str, list[float]] = {name: [] for name in names}
    with tqdm(total=(2 + repeats) * len(names), desc=label, disable=None) as bar:
        for r in range(-2, repeats):
            gc.collect()
            k = r % len(names)
            order = names[k:] + names[:k]
            for name in order if r % 2 == 0 else reversed(order):
                took = jobs[name]()
                if r >= 0:
                    samples[name].append(took)
                bar.update()
    return samples


def timed(step: Callable[[], Any], times: int = 1) -> Callable[[], float]:
    """A job for :func:`rounds`: the seconds of one step, the mean of so many."""

    def job() -> float:
        start = time.perf_counter()
        for _ in range(times):
            step()
        return (time.perf_counter() - start) / times

    return job


def calibrated(step: Callable[[], object], least: float) -> Callable[[], float]:
    """A job of as many steps as take about ``least`` seconds."""
    for _ in range(3):
        step()
    start = time.perf_counter()
    for _ in range(5):
        step()
    once = (time.perf_counter() - start) / 5
    return timed(step, max(1, round(least / once)))


# -- whether they do the same ----------------------------------------------------------------------


def gradients(module: nn.Module) -> list[Tensor]:
    """Of all parameters in order; each has one."""
    found = []
    for name, parameter in module.named_parameters():
        if parameter.grad is None:
            raise SystemExit(f"{name} got no gradient; nothing measured")
        found.append(parameter.grad.clone())
    return found


def check(label: str, outcome: Outcome, expected: Outcome) -> None:
    """Refuses to measure something that computes something else.

    Raises:
        SystemExit: the loss or a gradient is not the plain loop's, by ``torch.allclose``; the
            absolute tolerance is relative to the largest entry of the tensor.
    """
    pairs = zip([outcome[0], *outcome[1]], [expected[0], *expected[1]], strict=True)
    for k, (got, wanted) in enumerate(pairs):
        largest = float(wanted.abs().max())
        same = got.shape == wanted.shape and largest > 0
        if not (same and torch.allclose(got, wanted, rtol=1e-4, atol=1e-5 * largest)):
            what = f"gradient {k - 1}" if k else "the loss"
            raise SystemExit(f"{label}: {what} is not the plain loop's; nothing measured")


# -- where it was measured ------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    """Where, when and with what it was measured."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.system()} {platform.machine()}, {processor()}",
        "cpus": os.cpu_count(),
        "load_before": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "intra_op_threads": torch.get_num_threads(),
        "syncpipe": syncpipe.__version__,
    }


def head(about: Mapping[str, Any]) -> str:
    """The same in two lines; the second one can be continued."""
    return (
        f"{about['date']}  {about['machine']}, {about['cpus']} CPUs, load {about['load_before']}\n"
        f"Python {about['python']}, torch {about['torch']} ({about['intra_op_threads']} intra-op "
        f"threads), syncpipe {about['syncpipe']}"
    )


def processor() -> str:
    """The name of the processor, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown processor"


def version(package: str) -> str | None:
    """The version of an installed package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


# -- telling --------------------------------------------------------------------------------------


@dataclass
class Part:
    """One part of a report.

    Attributes:
        title: what is measured.
        setting: of what, how often.
        definitions: for each column that needs one, what its numbers are.
        rows: of the table; columns by name, numbers and spreads as they are.
        targets: what was aimed for, and what was measured.
        notes: what a reader should know besides.
    """

    title: str
    setting: str
    definitions: dict[str, str] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    targets: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def aim(self, aim: str, met: bool, measured: str) -> None:
        """Adds a target."""
        self.targets.append({"aim": aim, "met": met, "measured": measured})

    def as_json(self) -> dict[str, Any]:
        """Everything, samples included."""
        return asdict(self)

    def as_markdown(self) -> str:
        """A section of the report."""
        lines = [f"## {self.title}", "", self.setting, ""]
        if self.rows:
            lines += [*_table(self.rows), "", "Median (quartiles) over the rounds.", ""]
            lines += [f"- **{name}**: {text}" for name, text in self.definitions.items()]
        lines += [f"- {note}" for note in self.notes]
        if self.targets:
            lines.append("")
        for target in self.targets:
            met = "met" if target["met"] else "**not met**"
            lines.append(f"- Target, {met}: {target['aim']} ({target['measured']})")
        return "\n".join(lines).rstrip() + "\n"


def _table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    columns = list(dict.fromkeys(column for row in rows for column in row))
    cells = [columns, *([_cell(row.get(column)) for column in columns] for row in rows)]
    widths = [max(len(line[c]) for line in cells) for c in range(len(columns))]
    texts = [
        "| " + " | ".join(map(str.ljust, line, widths)) + " |"
        for line in cells  # all of them left-aligned: most are a number and its quartiles
    ]
    return [texts[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *texts[1:]]


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return number(value) if isinstance(value, float) else str(value)
