"""What the measurements share: options, rounds, spreads, the machine, the report."""

from __future__ import annotations

import datetime
import gc
import importlib.metadata
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

import syncpipe

# -- what there is to measure ----------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    """What was asked for on the command line.

    Attributes:
        quick: small sizes, to see that it runs.
        repeats: number of rounds, where it was given.
    """

    quick: bool = False
    repeats: int | None = None

    def rounds(self, full: int) -> int:
        """How many rounds to measure."""
        return self.repeats or (2 if self.quick else full)


@dataclass(frozen=True)
class Group:
    """Parts that are measured one after another, and have a page in common.

    Attributes:
        name: on the command line, and of the page.
        title: stands above the page.
        parts: what there is to measure, by name.
        versions: libraries whose versions the page names.
        one_thread: whether everything runs on one intra-op thread.
    """

    name: str
    title: str
    parts: Mapping[str, Callable[[Any], Part | Sequence[Part]]]
    versions: Sequence[str] = ()
    one_thread: bool = True


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
    """The version of an installed package, by the name under which it is imported or published."""
    published = importlib.metadata.packages_distributions().get(package, [package])[0]
    try:
        return importlib.metadata.version(published)
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
        over: what stands below the table.
    """

    title: str
    setting: str
    definitions: dict[str, str] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    targets: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    over: str = "Median (quartiles) over the rounds."

    def tell(self, note: str) -> None:
        """Adds a note, once."""
        if note not in self.notes:
            self.notes.append(note)

    def aim(self, aim: str, met: bool, measured: str) -> None:
        """Adds a target."""
        self.targets.append({"aim": aim, "met": met, "measured": measured})

    def as_markdown(self) -> str:
        """A section of the report."""
        lines = [f"## {self.title}", "", self.setting, ""]
        if self.rows:
            lines += [*_table(self.rows), "", self.over, ""]
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


def report(
    title: str,
    command: str,
    options: Options,
    jobs: Mapping[str, Callable[[], Part | Sequence[Part]]],
    page: Path,
    versions: Sequence[str] = (),
) -> list[Part]:
    """Measures one part after another, prints what they found, and writes it beside that.

    Args:
        title: stands above the page.
        command: what wrote it.
        options: the page says if they were quick.
        jobs: what measures, by name.
        page: the file; one with the same name that ends in ``.json`` gets all samples. Both are
            written after each part, so that nothing is lost.
        versions: of other libraries that the page names.
    """
    found = {name: version(name) for name in versions}
    about = {**machine(), "command": command, **found}
    told = "".join(f", {name} {each or 'not installed'}" for name, each in found.items())
    sections = [f"# {title}\n\nWritten by `{command}`.\n\n```text\n{head(about)}{told}\n```\n"]
    if options.quick:
        sections.append("Quick: small sizes and few rounds. These numbers say nothing.\n")
    print("\n".join(sections), flush=True)
    every: list[Part] = []
    numbers: dict[str, Any] = {}
    for name, job in jobs.items():
        start = time.monotonic()
        made = job()
        tables = [made] if isinstance(made, Part) else list(made)
        seconds = round(time.monotonic() - start, 1)
        numbers[name] = {"tables": [asdict(table) for table in tables], "seconds": seconds}
        texts = [table.as_markdown() for table in tables]
        print("\n".join([*texts, f"({name} took {seconds:.0f} s)\n"]), flush=True)
        sections, every = sections + texts, every + tables
        page.write_text("\n".join(sections), encoding="utf-8")
        text = json.dumps({"about": about, "parts": numbers}, indent=1)
        page.with_suffix(".json").write_text(text + "\n", encoding="utf-8")
    return every
