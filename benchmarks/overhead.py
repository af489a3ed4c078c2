"""What a pipe costs beside its layers: microseconds per cell (micro-batch, stage) of tiny layers.

    python -m benchmarks.overhead [--json FILE]

The layers compute next to nothing, so nearly all of the time is bookkeeping. Each stage is one
``Linear``; the same micro-batches go through

    loop          the plain model:  torch.cat([model(c) for c in x.chunk(m)])
    Pipe          on one worker, and on several CPU workers
    torchgpipe    where it is installed (extra ``bench``)

forward alone (a graph is recorded, and dropped) and forward with backward. All of them are measured
in every round, in an order that rotates from round to round, so that whatever else the machine does
meets them alike. Shown are the median over the rounds, the spread (the distance between the
quartiles, in percent of the median), and the median of the ratios to the loop of the same round.
The loop never re-materializes, so ``always`` pays for a second forward as well.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import common
from benchmarks.common import Part, Spread
from benchmarks.schedules.model import Options
from syncpipe import Pipe

MODES = ("never", "always")
WORKERS = (1, 2, 4)
PASSES = ("forward", "forward+backward")
LOOP = "loop"
#: At most this many times the loop, for a pipe on one worker that re-materializes nothing.
ONE_WORKER_TARGET = 1.3

Model = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Subject:
    """Something to measure.

    Attributes:
        name: the library.
        workers: how many CPU workers; 0 for the plain loop.
        checkpoint: the mode of re-materialization.
        model: from a mini-batch to its output.
    """

    name: str
    workers: int
    checkpoint: str
    model: Model

    @property
    def label(self) -> str:
        """The first column of the table."""
        if not self.workers:
            return self.name
        plural = "" if self.workers == 1 else "s"
        return f"{self.name}, {self.workers} worker{plural}, {self.checkpoint}"


@dataclass(frozen=True)
class Result:
    """One line of the table; times in microseconds per cell, one for each round in ``samples``."""

    name: str
    workers: int
    checkpoint: str
    label: str
    what: str
    median: float
    spread_percent: float
    ratio: float
    samples: list[float]


# -- what is measured -----------------------------------------------------------------------------


def loop(model: nn.Module, chunks: int) -> Model:
    """The plain model, fed the micro-batches one after another."""
    return lambda x: torch.cat([model(c) for c in x.chunk(chunks)])


def subjects(model: nn.Sequential, chunks: int) -> list[Subject]:
    """The loop first; each has a copy of the model of its own."""
    n = len(model)
    found = [Subject(LOOP, 0, "never", loop(copy.deepcopy(model), chunks))]
    for workers in (w for w in WORKERS if w <= n):
        devices = [f"cpu:{j * workers // n}" for j in range(n)] if workers > 1 else ["cpu"] * n
        for mode in MODES:
            pipe = Pipe(
                copy.deepcopy(model), [1] * n, devices=devices, chunks=chunks, checkpoint=mode
            )
            found.append(Subject("Pipe", workers, mode, pipe))
    found += [
        Subject("torchgpipe", 1, mode, gpipe)
        for mode in MODES
        if (gpipe := torchgpipe(copy.deepcopy(model), chunks, mode)) is not None
    ]
    return found


def torchgpipe(model: nn.Sequential, chunks: int, mode: str) -> Model | None:
    """The same by torchgpipe, which serves all CPU partitions by one thread; None without it."""
    try:
        from torchgpipe import GPipe
    except ImportError:
        return None
    n = len(model)
    gpipe: Model = GPipe(model, [1] * n, devices=["cpu"] * n, chunks=chunks, checkpoint=mode)
    return gpipe


def step(subject: Subject, what: str, x: Tensor) -> None:
    """One forward, or one forward and backward."""
    output = subject.model(x)
    if what != "forward":
        output.sum().backward()  # type: ignore[no-untyped-call]


def check(every: Sequence[Subject], x: Tensor) -> None:
    """Refuses to measure something that computes something else.

    Raises:
        SystemExit: an output differs from the loop's.
    """
    expected = every[0].model(x)
    for subject in every[1:]:
        if not torch.equal(subject.model(x), expected):
            raise SystemExit(f"{subject.label}: the output is not the loop's; nothing measured")


# -- measuring ------------------------------------------------------------------------------------


def seconds(subject: Subject, what: str, x: Tensor, steps: int) -> float:
    """The time of so many steps."""
    start = time.perf_counter()
    for _ in range(steps):
        step(subject, what, x)
    return time.perf_counter() - start


def measure(args: argparse.Namespace, every: Sequence[Subject], x: Tensor) -> list[Result]:
    """All subjects, forward and with backward, round after round."""
    jobs = [(subject, what) for what in PASSES for subject in every]
    steps = [calibrated(subject, what, x, args.seconds) for subject, what in jobs]
    cells = args.chunks * args.layers
    samples: list[list[float]] = [[] for _ in jobs]
    for r in range(args.repeats):
        gc.collect()
        for turn in range(len(jobs)):
            k = (turn + r) % len(jobs)
            took = seconds(*jobs[k], x, steps[k])
            samples[k].append(took / steps[k] / cells * 1e6)
        progress(r + 1, args.repeats)
    results = []
    for (subject, what), times in zip(jobs, samples, strict=True):
        base = samples[jobs.index((every[0], what))]
        ratios = [time / loop for time, loop in zip(times, base, strict=True)]
        results.append(summary(subject, what, times, ratios))
    return results


def measured(args: argparse.Namespace) -> list[Result]:
    """Makes the model and all subjects, and measures these."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(args.features, args.features) for _ in range(args.layers)))
    x = torch.randn(args.chunks * args.rows, args.features)
    every = subjects(model, args.chunks)
    check(every, x)
    return measure(args, every, x)


def calibrated(subject: Subject, what: str, x: Tensor, least: float) -> int:
    """Warms up; returns how many steps take about ``least`` seconds."""
    seconds(subject, what, x, 10)
    once = min(seconds(subject, what, x, 5) / 5 for _ in range(3))
    return max(1, round(least / once))


def summary(subject: Subject, what: str, times: list[float], ratios: list[float]) -> Result:
    """Median, spread and ratio of one subject's samples."""
    median = statistics.median(times)
    low, _, high = statistics.quantiles(times, n=4, method="inclusive")
    return Result(
        subject.name,
        subject.workers,
        subject.checkpoint,
        subject.label,
        what,
        round(median, 2),
        round(100 * (high - low) / median, 1),
        round(statistics.median(ratios), 3),
        [round(sample, 3) for sample in times],
    )


def progress(done: int, rounds: int) -> None:
    """A line that counts, on a terminal only."""
    if sys.stderr.isatty():
        print(f"\rround {done} of {rounds}", end="\n" if done == rounds else "", file=sys.stderr)


# -- telling --------------------------------------------------------------------------------------


def setting(args: argparse.Namespace) -> dict[str, Any]:
    """Where, when and with what it was measured."""
    return {
        **common.machine(),
        "torchgpipe": common.version("torchgpipe"),
        "options": {name: value for name, value in vars(args).items() if name != "json"},
    }


def head(about: dict[str, Any]) -> str:
    """The lines above the table."""
    options = about["options"]
    return (
        f"{common.head(about)}, torchgpipe {about['torchgpipe'] or 'missing'}\n"
        f"{options['layers']} stages of Linear({options['features']}, {options['features']}), "
        f"{options['chunks']} micro-batches of {options['rows']} samples, "
        f"{options['repeats']} rounds of {options['seconds']} s"
    )


def table(results: Sequence[Result]) -> str:
    """Time, spread and ratio; forward on the left, forward and backward on the right."""
    columns = f"{'us/cell':>9} {'spread':>7} {'ratio':>7}"
    lines = [
        f"{'':32} {PASSES[0]:^25}   {PASSES[1]:^25}",
        f"{'':32} {columns}   {columns}",
    ]
    for label in dict.fromkeys(result.label for result in results):
        row = f"{label:32}"
        for what in PASSES:
            found = next(r for r in results if (r.label, r.what) == (label, what))
            row += f" {found.median:9.1f} {found.spread_percent:6.0f}% {found.ratio:7.2f}  "
        lines.append(row.rstrip())
    return "\n".join(lines)


def targets(results: Sequence[Result]) -> list[dict[str, Any]]:
    """What was aimed for, and what was measured."""
    found = []
    for what in PASSES:
        rows = [result for result in results if result.what == what]
        pipes = [result for result in rows if result.name == "Pipe"]
        for row in pipes:
            if (row.workers, row.checkpoint) == (1, "never"):
                aim = f"{row.label}: at most {ONE_WORKER_TARGET} times the loop"
                met = row.ratio <= ONE_WORKER_TARGET
                found.append(_target(what, aim, met, f"{row.ratio:.2f} times"))
        for row in pipes:
            for other in rows:
                if other.name == "torchgpipe" and other.checkpoint == row.checkpoint:
                    measured = f"{row.median:.1f} us and {other.median:.1f} us"
                    aim = f"{row.label}: below torchgpipe"
                    found.append(_target(what, aim, row.median < other.median, measured))
    return found


def _target(what: str, aim: str, met: bool, measured: str) -> dict[str, Any]:
    return {"what": what, "aim": aim, "met": met, "measured": measured}


# -- as a part of a report ------------------------------------------------------------------------


def part(options: Options) -> Part:
    """The same for a report of several benchmarks."""
    args = parsed(["--repeats", str(options.rounds(21)), *["--seconds", "0.01"] * options.quick])
    results = measured(args)
    found = Part(
        "Overhead",
        f"{args.layers} stages of Linear({args.features}, {args.features}), {args.chunks} "
        f"micro-batches of {args.rows} samples, {args.repeats} rounds of {args.seconds} s.",
        {"us/cell": "microseconds for each micro-batch and stage"},
    )
    base = {result.what: result.samples for result in results if result.name == LOOP}
    for label in dict.fromkeys(result.label for result in results):
        row: dict[str, Any] = {"what": label}
        for result in results:
            if result.label == label:
                row[f"{result.what}, us/cell"] = Spread.of(result.samples)
                ratio = Spread.ratio(result.samples, base[result.what])
                row[f"{result.what}, over the loop"] = ratio
        found.rows.append(row)
    for aim in targets(results):
        found.aim(f"{aim['what']}: {aim['aim']}", aim["met"], aim["measured"])
    return found


# -- the command ----------------------------------------------------------------------------------


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.overhead",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for name, default, text in (
        ("layers", 4, "number of layers, each a stage"),
        ("chunks", 8, "number of micro-batches"),
        ("rows", 1, "samples in a micro-batch"),
        ("features", 4, "width of the layers"),
        ("repeats", 21, "number of rounds, at least 2"),
    ):
        parser.add_argument(
            f"--{name}", type=int, default=default, metavar="N", help=f"{text} ({default})"
        )
    parser.add_argument(
        "--seconds",
        type=float,
        default=0.05,
        metavar="S",
        help="time for each subject in each round (0.05)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there as well")
    args = parser.parse_args(argv)
    for name in ("layers", "chunks", "rows", "features", "seconds"):
        if getattr(args, name) <= 0:
            parser.error(f"argument --{name}: must be positive, not {getattr(args, name)}")
    if args.json is not None and not args.json.parent.is_dir():
        parser.error(f"argument --json: there is no folder {args.json.parent}")
    if args.repeats < 2:
        parser.error(f"argument --repeats: must be at least 2, not {args.repeats}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints the table, writes the JSON."""
    args = parsed(argv)
    about = setting(args)
    print(head(about), flush=True)
    results = measured(args)
    print(f"\n{table(results)}\n")
    aims = targets(results)
    for aim in aims:
        met = "met    " if aim["met"] else "NOT MET"
        print(f"{met}  {aim['what']}: {aim['aim']} ({aim['measured']})")
    if about["torchgpipe"] is None:
        print("unknown  whether below torchgpipe: it is not installed")
    if args.json is not None:
        content = {"about": about, "results": [asdict(r) for r in results], "targets": aims}
        args.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
