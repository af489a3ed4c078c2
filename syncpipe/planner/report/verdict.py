"""The plain truth about a plan: whether something else would be faster, and what."""

from __future__ import annotations

import math
from collections.abc import Sequence

from syncpipe.planner.costs.machine import Machine
from syncpipe.planner.report.rivals import Rival, duration
from syncpipe.planner.schedules.setting import Scheduled

__all__ = ["verdict"]

#: What a pipe could run instead is worth a word if it takes so much less, relative.
_WORTH = 1.01


def verdict(
    rivals: Sequence[Rival],
    schedules: Sequence[Scheduled],
    step_time: float,
    machine: Machine,
    fewer: bool,
) -> str:
    """Whether this is the way to go.

    Args:
        rivals: what else could be done.
        schedules: other schedules.
        step_time: of the plan.
        machine: the devices.
        fewer: one device was chosen, of several.
    """
    words = [*_other_schedules(schedules, step_time, machine), *_other_pipes(rivals, step_time)]
    if fewer:
        words.append("No pipeline that was found is faster than one of these devices alone.")
    others = [(rival.time, rival.name) for rival in rivals if not rival.pipeline and rival.time]
    time, name = min(others, default=(math.inf, ""))
    if time < step_time:
        ratio = step_time / time
        faster = f"{ratio:.2f} times " * (ratio >= 1.005)
        words.append(
            f"The plain truth: {name} would be {faster}as fast as this plan "
            f"({duration(time)} a step). Use {_instead(name)}, unless something else speaks for a "
            "pipeline."
        )
    elif not fewer:
        which = "Nothing else" if words else "Nothing"
        words.append(f"{which} that was looked at is faster than this plan.")
    return " ".join(words)


def _other_schedules(
    schedules: Sequence[Scheduled], step_time: float, machine: Machine
) -> list[str]:
    best = next((other for other in schedules if other.fits(machine)), None)
    if best is None or best.time * _WORTH >= step_time:
        return []
    changed = ", and change the last bits of gradients" * bool(best.simulation.schedule.splits)
    faster = step_time / best.time
    return [f"Under schedule={best.schedule!r} it would be {faster:.2f} times as fast{changed}."]


def _other_pipes(rivals: Sequence[Rival], step_time: float) -> list[str]:
    pipes = [(rival.time, rival.name) for rival in rivals if rival.pipeline and rival.time]
    time, name = min(pipes, default=(math.inf, ""))
    if time * _WORTH >= step_time:
        return []
    return [f"{name[0].upper()}{name[1:]} would be {step_time / time:.2f} times as fast."]


def _instead(name: str) -> str:
    if "copies" not in name:
        return "no pipe at all"
    if "pipeline" in name:
        return "DistributedDataParallel around pipes"
    return "torch.nn.parallel.DistributedDataParallel, a process for each device"
