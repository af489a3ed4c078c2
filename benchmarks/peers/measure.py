"""Peers beside each other, round after round: times, peaks of memory, ratios, who is behind."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.common import Spread, number, rounds
from benchmarks.peers.check import Field, tell
from benchmarks.peers.libraries import CALL, DISTRIBUTED, LIBRARIES, LOOP, OURS, Peer, Task

OVER = {name: f"over {name}" for name in (*LIBRARIES, DISTRIBUTED)}
#: A peak is higher than another one if it is so many times as high.
HIGHER = 1.005
MIB = 2**20


@dataclass(frozen=True)
class Meter:
    """A device: waits for it, begins to measure its peak of memory anew, and reads that."""

    synchronize: Callable[[], None] = lambda: None
    forget: Callable[[], None] = lambda: None
    peak: Callable[[], int] | None = None


def measured(
    found: Field,
    meter: Meter,
    repeats: int,
    label: str,
    first: Mapping[str, Any],
    least: float = 0.0,
) -> None:
    """Measures all of them in every round; a row for each, and where ours are behind.

    Args:
        found: who takes part.
        meter: for the device.
        repeats: number of rounds.
        label: stands before the bar that shows how far it is.
        first: the first columns of all rows.
        least: seconds for each of them in each round; 0 for one step, however long.
    """
    jobs: dict[str, Callable[[], float]] = {}
    about: dict[str, dict[str, str]] = {}
    for peer in fitting(found, meter):
        jobs[peer.label] = job(found, peer, meter, steps_in(found.task, peer, least))
        about[peer.label] = peer.columns
    for other, (columns, step) in found.jobs.items():
        jobs[other], about[other] = step, columns
    if not jobs:
        return
    samples = rounds(jobs, repeats, label)
    found.task.model.zero_grad()
    rows: dict[str, dict[str, Any]] = {}
    for name in sorted(samples, key=lambda name: about[name]["library"] == OURS):
        row = {**first, **about[name], **found.extra.get(name, {})}
        times = samples[name]
        if meter.peak is None:
            row["ms"] = Spread.of([1e3 * took for took in times])
            row["quickest"] = 1e3 * min(times)
        else:
            row["samples/s"] = Spread.of([len(found.task.x) / took for took in times])
        if LOOP in samples:
            row["over the loop"] = Spread.ratio(times, samples[LOOP])
        for library, other in counterparts(about, name).items():
            row[OVER[library]] = Spread.ratio(times, samples[other])
        rows[name] = row
    found.part.rows += rows.values()
    where = "".join(f"{value} {key}, " for key, value in first.items())
    summarize(found, rows, about, where)


# -- one of them ----------------------------------------------------------------------------------


def fitting(found: Field, meter: Meter) -> list[Peer]:
    """Those that have enough memory for a step; the others are told of."""
    fit = []
    for peer in found.peers:
        try:
            found.task.step(peer)
            meter.synchronize()
            fit.append(peer)
        except torch.OutOfMemoryError:
            tell(found.part, f"Out of memory: {peer.label}.")
        found.task.model.zero_grad()
        if peer not in fit:  # out here the traceback, and what it held, is gone
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    return fit


def job(found: Field, peer: Peer, meter: Meter, times: int) -> Callable[[], float]:
    """For ``rounds``: seconds of one step, the mean of so many; the peak of memory on the way."""
    task, extra = found.task, found.extra.setdefault(peer.label, {})

    def run() -> float:
        task.model.zero_grad()  # what the one before has left counts for nobody
        meter.synchronize()
        meter.forget()
        start = time.perf_counter()
        for _ in range(times):
            task.step(peer)
        meter.synchronize()
        took = time.perf_counter() - start
        if meter.peak is not None:
            extra["peak MiB"] = max(extra.get("peak MiB", 0.0), meter.peak() / MIB)
        return took / times

    return run


def steps_in(task: Task, peer: Peer, least: float) -> int:
    """How many steps take about so many seconds."""
    if least == 0:
        return 1
    for _ in range(3):
        task.step(peer)
    start = time.perf_counter()
    for _ in range(3):
        task.step(peer)
    return max(1, round(3 * least / (time.perf_counter() - start)))


# -- one beside the other -------------------------------------------------------------------------


def counterparts(about: Mapping[str, Mapping[str, str]], name: str) -> dict[str, str]:
    """For one of ours and each other library: its row of the same checkpoint mode, and schedule."""
    mine = about[name]
    if mine["library"] != OURS:
        return {}
    kind = "gpipe" if mine["how"] in (CALL, "train_batch gpipe") else "1f1b"
    return {
        row["library"]: other
        for other, row in about.items()
        if row["library"] in OVER
        and row["checkpoint"] == mine["checkpoint"]
        and (row["library"] != DISTRIBUTED or row["how"] == kind)
    }


def summarize(
    found: Field,
    rows: Mapping[str, dict[str, Any]],
    about: Mapping[str, Mapping[str, str]],
    where: str,
) -> None:
    """For each library, how many of our rows are ahead, and which are behind."""
    for library, column in OVER.items():
        beside = {name: row for name, row in rows.items() if column in row}
        if not beside:
            continue
        times = {name: row[column].median for name, row in beside.items()}
        behind = {name: ratio for name, ratio in times.items() if ratio >= 1}
        text = f"{where}time beside {library}: {len(times) - len(behind)} of our {len(times)} rows "
        tell(
            found.part,
            text + f"take less, {number(min(times.values()))} times at best" + _listed(behind),
        )
        if not all("peak MiB" in row for row in beside.values()):
            continue
        peaks = {
            name: row["peak MiB"] / rows[counterparts(about, name)[library]]["peak MiB"]
            for name, row in beside.items()
        }
        more = {name: ratio for name, ratio in peaks.items() if ratio > HIGHER}
        text = (
            f"{where}memory beside {library}: {len(peaks) - len(more)} of our {len(peaks)} peaks "
        )
        tell(
            found.part,
            text + f"are no higher, {number(min(peaks.values()))} times at best" + _listed(more),
        )


def _listed(behind: Mapping[str, float]) -> str:
    if not behind:
        return "; none is behind."
    names = [f"{name.removeprefix(OURS + ', ')} ({number(r)})" for name, r in behind.items()]
    return f"; **behind**: {'; '.join(names)}."
