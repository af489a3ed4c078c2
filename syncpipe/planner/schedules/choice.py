"""Which plan it is to be: under the schedules whose cuts are exact, or under any other."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from syncpipe.balance.profile import in_bytes
from syncpipe.planner.schedules.layouts import ANY, AUTO, LAYOUTS
from syncpipe.planner.schedules.setting import Scheduled
from syncpipe.planner.schedules.variants import THOROUGH, variants
from syncpipe.planner.search.candidate import SCHEDULES, Candidate, Terms
from syncpipe.planner.search.orders import search_orders
from syncpipe.planner.search.search import Shortage, shortage

__all__ = ["check_schedule", "choose"]


def check_schedule(schedule: Any) -> None:
    """Refuses what there are no plans for.

    Raises:
        TypeError: not a name.
        ValueError: an unknown name.
    """
    names = (*SCHEDULES, *LAYOUTS, ANY)
    if schedule is not None and not isinstance(schedule, str):
        raise TypeError(f"schedule={schedule!r}: plans are made for names, {', '.join(names)}")
    if schedule is not None and schedule not in names:
        raise ValueError(f"schedule={schedule!r}: there are plans for {', '.join(names)}")


def choose(
    terms: Terms, schedule: str | None, *, chunks: int | Iterable[int] | None, stages: int | None
) -> tuple[tuple[int, ...], Candidate, list[Candidate]]:
    """The order of the devices, the plan, and what else the search found under 1F1B and GPipe.

    Args:
        terms: layers and devices.
        schedule: a name; None for GPipe or 1F1B.
        chunks: the number of micro-batches, or those to choose from.
        stages: the number of stages.

    Raises:
        LookupError: nothing fits into memory; it says what would.
        ValueError: an argument does not fit.
    """
    asked: dict[str, Any] = {"param_scale": terms.param_scale, "chunks": chunks}
    if schedule is None or schedule in SCHEDULES:
        asked |= {"stages": stages, "schedules": (schedule,) if schedule else SCHEDULES}
        order, found = search_orders(terms.profile, terms.machine, terms.batch_size, **asked)
        if not found:
            raise LookupError(_explained(_shortage(terms, asked), terms))
        return order, found[0], found
    order, found = search_orders(terms.profile, terms.machine, terms.batch_size, **asked)
    terms = terms.on(terms.machine.ordered(order))
    names = LAYOUTS if schedule == ANY else [schedule]
    made = variants(terms, found, names, THOROUGH, chunks=chunks, stages=stages)
    if schedule == ANY:
        near = [candidate for candidate in found if stages in (None, len(candidate.balance))]
        fitting = [c for c in (*near, *made) if c.fits(terms.machine)]
        if not fitting:
            raise LookupError(_explained(_shortage(terms, asked), terms))
        return order, min(fitting, key=lambda candidate: candidate.time), found
    if not made and schedule == AUTO and not found:
        raise LookupError(_explained(_shortage(terms, asked), terms))
    if not made:
        raise ValueError(_no_layout(terms, schedule, stages))
    if not made[0].fits(terms.machine):
        raise LookupError(_lacking(made[0], terms))
    return order, made[0], found


def _no_layout(terms: Terms, schedule: str, stages: int | None) -> str:
    devices, layers = len(terms.machine), len(terms.profile.layers)
    wanted = f" stages={stages} with" if stages is not None else ""
    shape = {
        "line": "a stage on each device",
        "rounds": "two stages or more on each device",
        "v": "two stages on each device",
    }[LAYOUTS[schedule].shape]
    return (
        f"schedule={schedule!r} is not possible for{wanted} {devices} devices and {layers} layers: "
        f"it needs {shape}, none of them empty"
    )


def _lacking(nearest: Scheduled, terms: Terms) -> str:
    """What the plan that comes nearest lacks."""
    limits = terms.machine.memory
    d = max(range(len(nearest.on_device)), key=lambda d: nearest.on_device[d] / limits[d])
    needs, has = nearest.on_device[d], limits[d]
    return (
        f"no plan under schedule={nearest.schedule!r} that was looked at fits into memory. Nearest "
        f"comes balance={list(nearest.balance)} with chunks={nearest.chunks}: "
        f"{terms.machine.name(d)} needs {in_bytes(needs, up=True)}, "
        f"{in_bytes(needs - has, up=True)} more than its {in_bytes(has)}. Leave out the schedule: "
        "1F1B takes the least, and a shortage is explained there"
    )


def _shortage(terms: Terms, asked: dict[str, Any]) -> Shortage | None:
    return shortage(terms.profile, terms.machine, terms.batch_size, **asked)


def _explained(lack: Shortage | None, terms: Terms) -> str:
    """Which stage misses by how much, and what would make it fit."""
    profile, machine = terms.profile, terms.machine
    if lack is None:
        return f"no plan fits {len(machine)} devices and batch_size={terms.batch_size}"
    s = lack.stage
    start = sum(lack.balance[:s])
    names = [layer.name for layer in profile.layers[start : start + lack.balance[s]]]
    layers = f"layer {names[0]!r}" if len(names) == 1 else f"layers {names[0]!r} to {names[-1]!r}"
    again = ", recomputing its forward" if lack.recomputes[s] else ""
    more = in_bytes(lack.memory_per_device * (1 + 1e-9), up=True)
    ways = [f"{more} on each device"] if machine.uniform else []
    if lack.devices is not None:
        ways.append(f"{lack.devices} such devices")
    if lack.batch_size is not None:
        ways.append(f"batch_size={lack.batch_size}")
    ways.append("a smaller param_scale (an optimizer with less state)")
    if not machine.uniform:
        ways.append("the devices in another order")
    return (
        f"no plan fits into memory. Nearest comes balance={list(lack.balance)} with "
        f"chunks={lack.chunks} under {lack.schedule!r}: stage {s} ({layers}) needs "
        f"{in_bytes(lack.memory[s], up=True)}{again}, {in_bytes(lack.missing, up=True)} more than "
        f"the {in_bytes(lack.limits[s])} of {machine.name(s)}. What would make it fit: "
        f"{', or '.join(ways)}"
    )
