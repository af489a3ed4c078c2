"""Predicted beside measured step times: real pipes on CPU workers, and layers that sleep."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import syncpipe
from benchmarks.common import Options, Part, Spread, rounds
from benchmarks.planning.models import MODELS
from benchmarks.planning.profiles import PARAM_SCALE
from benchmarks.planning.ways import (
    ALONE,
    AT_ONCE,
    asleep,
    loop_of,
    other_ways,
    steps,
    two_at_once,
)
from syncpipe import Plan
from syncpipe.planner.chain import Chain
from syncpipe.schedules.simulation import Simulation

DEVICES = ("cpu:0", "cpu:1")
ASLEEP = ("cpu:0", "cpu:1", "cpu:2", "cpu:3")
CHUNKS = (4, 8)
#: How far a measured step may be from the predicted one.
_NEAR = 0.05

_COLUMNS = {
    "run": "the schedule, for 1F1B with the slots of each stage; and how many micro-batches.",
    "predicted ms": "predicted: the simulated step time. Loss and optimizer are not in it.",
    "measured ms": "measured: one train_batch after another, into gradients of None, with the loss "
    "(mean squared error of a few numbers), without an optimizer. Of the plain loop on one thread "
    "likewise; its prediction is the sum of the profile.",
    "measured / predicted": "measured over predicted, in each round.",
}
_MACHINE = {
    "machine": f"measured: '{AT_ONCE}' (the plain loop over the whole model in each of two "
    f"threads) over '{ALONE}' in one thread: 1 if two cores are two, 2 if they are one.",
    "processors": "measured: CPU time over time of a step, on how many processors it ran; 1 is one "
    "at a time.",
    "over the machine's limit": "measured over predicted as above, where the prediction takes as "
    "many times longer as 'machine' says wherever both devices compute at once in the simulation.",
    "over limit and profile": "measured over that prediction times the error of the profile, which "
    "is what the plain loop over as many micro-batches took in the same round, over its own "
    "prediction (layers one by one take another time than the model).",
}
_RANKING = {
    "rank correlation": "Spearman's, of predicted and measured medians over the ways to run.",
    "predicted best": "the way predicted to be the fastest; the plan, if it is one of them.",
    "measured best": "the way measured to be the fastest, by the median.",
    "best over best": "measured: the predicted best over the measured best, medians. 1 is right.",
}


def run(options: Options) -> list[Part]:
    """Measures it."""
    repeats = options.rounds(9)
    notes = f"{repeats} rounds; in each of them all ways to run."
    cpu = Part(
        "Predicted and measured: pipes on two CPU workers",
        f"syncpipe.plan(model, sample, devices={list(DEVICES)}, chunks={CHUNKS}), which profiles "
        "with one intra-op thread; then the plan and other ways, run by Pipe(**plan.options()) "
        f"with one intra-op thread each; {notes}",
        _COLUMNS | _MACHINE,
    )
    naps = Part(
        "Predicted and measured: layers that sleep",
        f"Layers that sleep unequal times, backward twice as long as forward, {len(ASLEEP)} CPU "
        f"workers; profiled as the others are; {notes} Cores are no limit here.",
        _COLUMNS,
    )
    ranking = Part(
        "Is the predicted best the best?",
        "The ways to run of the two tables above, by their medians.",
        _RANKING,
    )
    for name, model in MODELS.items():
        problem = model(options.quick)
        timeout = 0.02 if options.quick else 5.0
        plan = syncpipe.plan(
            problem.model, problem.x, devices=DEVICES, batch_size=len(problem.x), chunks=CHUNKS,
            param_scale=PARAM_SCALE, timeout=timeout,
        )  # fmt: skip
        ways = other_ways(plan, DEVICES, CHUNKS)
        got: dict[str, list[float]] = defaultdict(list)
        jobs = {**steps(problem, ways, got), **two_at_once(problem, plan.chunks)}
        samples = rounds(jobs, repeats, name)
        tell(cpu, name, ways, samples, got)
        ranking.rows.append(_ranked(name, ways, samples))
    problem = asleep(options.quick)
    plan = syncpipe.plan(
        problem.model, problem.x, devices=ASLEEP, batch_size=len(problem.x),
        chunks=4 if options.quick else 8, param_scale=PARAM_SCALE, timeout=5.0,
    )  # fmt: skip
    ways = other_ways(plan, ASLEEP, (plan.chunks,))
    samples = rounds(steps(problem, ways, defaultdict(list)), repeats, "layers that sleep")
    tell(naps, "layers that sleep", ways, samples)
    ranking.rows.append(_ranked("layers that sleep", ways, samples))
    _conclude(cpu, naps, ranking)
    return [cpu, naps, ranking]


# -- what is told ---------------------------------------------------------------------------------


def both_busy(simulation: Simulation) -> float:
    """Seconds in which at least two devices compute, in a simulated step."""
    edges = sorted((at, way) for s in simulation.spans for at, way in ((s.start, 1), (s.end, -1)))
    total, running = 0.0, 0
    for (at, way), (later, _) in pairwise(edges):
        running += way
        total += (later - at) * (running > 1)
    return total


def _summed(plan: Plan, m: int) -> float:
    """Seconds of all layers and so many micro-batches, one after another."""
    return Chain.of(plan.profile, plan.batch_size / m, PARAM_SCALE).sums["time"][-1] * m


def tell(
    part: Part,
    name: str,
    ways: Mapping[str, Plan],
    samples: Mapping[str, Sequence[float]],
    processors: Mapping[str, Sequence[float]] | None = None,
) -> None:
    """A row for each plain loop and for each way; ``processors``: where these are the limit."""
    plan = ways["the plan"]
    errors: dict[int, list[float]] = {}
    machine: list[float] = []
    if processors is not None:
        pairs = zip(samples[AT_ONCE], samples[ALONE], strict=True)
        machine = [both / alone for both, alone in pairs]
    for m in dict.fromkeys(way.chunks for way in ways.values()):
        loop, predicted = samples[loop_of(m)], _summed(plan, m)
        errors[m] = [took / predicted for took in loop]
        row: dict[str, Any] = {"model": name, "what": loop_of(m), "balance": "", "run": ""}
        part.rows.append(row | _beside(loop, predicted))
        if machine and m == plan.chunks:
            part.rows[-1]["machine"] = Spread.of(machine)
    for label, way in ways.items():
        row = {
            "model": name,
            "what": label,
            "balance": "-".join(map(str, way.balance)),
            "run": f"{_schedule(way)}, {way.chunks} micro-batches",
            **_beside(samples[label], way.step_time),
        }
        part.rows.append(row)
        if processors is not None:
            row["processors"] = Spread.of(processors[label][-len(samples[label]) :])
            busy = both_busy(way.simulation)
            limits = [way.step_time + (slower - 1) * busy for slower in machine]
            pairs = zip(limits, errors[way.chunks], strict=True)
            both = [limit * error for limit, error in pairs]
            row["over the machine's limit"] = Spread.ratio(samples[label], limits)
            row["over limit and profile"] = Spread.ratio(samples[label], both)


def _schedule(way: Plan) -> str:
    """With the number of slots of each stage."""
    slots = "" if way.slots is None else " " + "-".join(map(str, way.slots))
    return way.schedule + slots


def _beside(times: Sequence[float], predicted: float) -> dict[str, Any]:
    return {
        "predicted ms": 1e3 * predicted,
        "measured ms": Spread.of([1e3 * took for took in times]),
        "measured / predicted": Spread.ratio(times, [predicted] * len(times)),
    }


def _ranked(
    name: str, ways: Mapping[str, Plan], samples: Mapping[str, Sequence[float]]
) -> dict[str, Any]:
    """Whether the order is right."""
    # Rounded, so that of equal ones the first counts: the plan.
    predicted = {label: float(f"{way.step_time:.9g}") for label, way in ways.items()}
    measured = {label: statistics.median(samples[label]) for label in ways}
    guess, best = min(predicted, key=predicted.__getitem__), min(measured, key=measured.__getitem__)
    return {
        "model": name,
        "ways": len(ways),
        "rank correlation": spearman(list(predicted.values()), list(measured.values())),
        "predicted best": guess,
        "measured best": best,
        "best over best": measured[guess] / measured[best],
    }


def spearman(a: Sequence[float], b: Sequence[float]) -> float | None:
    """The correlation of ranks; equal numbers share theirs. None where all are equal."""

    def ranks(numbers: Sequence[float]) -> list[float]:
        ordered = sorted(numbers)
        return [ordered.index(x) + (ordered.count(x) - 1) / 2 for x in numbers]

    try:
        return statistics.correlation(ranks(a), ranks(b))
    except statistics.StatisticsError:
        return None


def _conclude(cpu: Part, naps: Part, ranking: Part) -> None:
    """What the plans came to."""
    for part in (cpu, naps):
        for row in part.rows:
            if row["what"] == "the plan":
                ratio = row["measured / predicted"]
                told = f"{ratio} times it"
                if part is cpu:
                    limit = row["over the machine's limit"]
                    told += f", {limit} over the machine's limit"
                part.aim(
                    f"{row['model']}: the measured step of the plan within {_NEAR:.0%} of the "
                    "predicted one",
                    abs(ratio.median - 1) <= _NEAR,
                    told,
                )
    right = sum(row["predicted best"] == row["measured best"] for row in ranking.rows)
    ranking.notes.append(
        f"The predicted best is the measured best in {right} of {len(ranking.rows)}."
    )
