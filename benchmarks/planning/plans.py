"""How long plans are predicted to take beside what else one could do; nothing is measured."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import syncpipe
from benchmarks.common import Part
from benchmarks.planning.profiles import (
    PARAM_SCALE,
    PlanningOptions,
    Table,
    given,
    quantiles,
    random_profile,
)
from syncpipe import Plan
from syncpipe.balance import balance_cost
from syncpipe.balance.profile import Profile
from syncpipe.planner.alternatives import block_partitions
from syncpipe.planner.chain import Mode
from syncpipe.planner.draft import Draft
from syncpipe.planner.machine import Machine
from syncpipe.planner.sizes import chunk_counts

MEMORY, BANDWIDTH, BATCH = 16e9, 12e9, 512
DEVICES = (4, 8)


def run(options: PlanningOptions) -> list[Part]:
    """Plans for the profiles given, one by one, and for random ones in all."""
    from tqdm import tqdm

    count, layers, batch = (2, (8, 12), 32) if options.quick else (100, (20, 100), BATCH)
    devices = DEVICES[:1] if options.quick else DEVICES
    definitions = {
        "even split, torchgpipe's balance": "predicted: step time over the plan's, with as many "
        "stages under the plan's schedule, the number of micro-batches that is best for it, "
        "stages re-materialized where they do not fit otherwise.",
        "torchgpipe": "predicted, the same: its balance under GPipe's schedule, every micro-batch "
        "but the last re-materialized (its default), the best number of micro-batches.",
        "no pipeline": "predicted, the same: the fastest of one device and data parallelism (with "
        "or without pipelines inside). Less than 1: it is faster than the plan.",
        "predicted / bound": "predicted: simulated step time over the least that is possible for "
        "this cut, number of micro-batches and slots.",
    }
    setting = (
        f"Batch {batch}, {MEMORY / 1e9:.0f} GB on each device, {BANDWIDTH / 1e9:.0f} GB/s, Adam. "
        "Everything is predicted, nothing measured."
    )
    loaded = options.loaded()
    drawn = random.Random("plans")
    profiles = {
        f"random {k}": random_profile(drawn.randint(*layers), f"plans {k}") for k in range(count)
    }
    by_file = Table(
        "Plans for the profiles given",
        setting,
        definitions,
        over="Predicted, one plan in each row.",
        notes=[
            "Profiles for one size of the micro-batch do not know what a micro-batch costs "
            "beside its samples: all rows here are planned with at most 4 for each device."
        ],
    )
    if not loaded:
        by_file.notes = ["No --profiles were given."]
    of_random = Table(
        "Plans for random profiles",
        f"{count} profiles of {layers[0]} to {layers[1]} layers. {setting}",
        definitions,
        over="Over the profiles with a plan; what does not fit is counted, and not in the mean.",
    )
    with tqdm(total=len(devices) * (len(loaded) + count), desc="plans", disable=None) as bar:
        for n in devices:
            for name, profile in loaded.items():
                row = _compared(profile.of(batch), n, batch)
                about = {"profile": name, "devices": n}
                by_file.rows.append(about | (row or {"plan": "nothing fits"}))
                bar.update()
            rows = []
            for profile in profiles.values():
                rows.append(_compared(profile, n, batch))
                bar.update()
            of_random.rows += _summed(n, rows)
    return [by_file, of_random]


def _compared(profile: Profile, n: int, batch: int) -> dict[str, Any] | None:
    """The plan, and the others over it; None if nothing fits, None for others that do not fit."""
    machine = Machine.even(n, MEMORY, BANDWIDTH)
    try:
        plan = syncpipe.plan(profile, devices=machine, batch_size=batch, param_scale=PARAM_SCALE)
    except ValueError:
        return None
    size = profile.sizes[-1]
    times = [layer.forward[size] + layer.backward[size] for layer in profile.layers]
    stages = len(plan.balance)
    even, blocks = tuple(balance_cost([1] * len(times), stages)), block_partitions(times, stages)
    again: tuple[Mode, ...] = ("recompute",) * stages
    others = [a.time for a in plan.alternatives if not a.pipeline and a.time is not None]
    recomputing = plan.chosen.modes.count("recompute")
    return {
        "plan": f"{plan.schedule}, {stages} stages, {plan.chunks} micro-batches, "
        f"{recomputing} re-materialize",
        "predicted ms": 1e3 * plan.step_time,
        "predicted / bound": plan.certificate,
        "even split": _over(plan, even, plan.schedule),
        "torchgpipe's balance": _over(plan, blocks, plan.schedule),
        "torchgpipe": _over(plan, blocks, "gpipe", again),
        "no pipeline": min(others) / plan.step_time if others else None,
    }


def _over(
    plan: Plan, balance: Sequence[int], schedule: str, modes: Sequence[Mode] | None = None
) -> float | None:
    """Predicted step time over the plan's, with the best number of micro-batches that fits."""
    usual, extra = chunk_counts(plan.profile, len(plan.machine), plan.batch_size)
    for counts in (usual, extra):
        fitting = [c.time for m in counts for c in _ways(plan, balance, m, schedule, modes)]
        if fitting:
            return min(fitting) / plan.step_time
    return None


def _ways(
    plan: Plan, balance: Sequence[int], m: int, schedule: str, modes: Sequence[Mode] | None
) -> Iterator[Draft]:
    """With either kind of slots, if it fits."""
    for overlap in (True, False) if schedule == "1f1b" else (True,):
        found = given(plan.terms, balance, m, schedule, overlap=overlap, modes=modes)
        if found.excess <= 1:
            yield found


def _summed(n: int, rows: Sequence[dict[str, Any] | None]) -> list[dict[str, Any]]:
    """A row for each column of the single ones."""
    planned = [row for row in rows if row is not None]
    table = []
    for what in (
        "predicted / bound", "even split", "torchgpipe's balance", "torchgpipe", "no pipeline",
    ):  # fmt: skip
        ratios = [row[what] for row in planned if row[what] is not None]
        row: dict[str, Any] = {
            "devices": n,
            "what": what,
            "planned": f"{len(planned)} of {len(rows)}",
        }
        if ratios:
            row |= {f"{key}, predicted": value for key, value in quantiles(ratios).items()}
            row["least, predicted"] = min(ratios)
        table.append(row | {"does not fit": len(planned) - len(ratios)})
    return table
