"""A plan as a page that one can decide from."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from syncpipe.balance.profile import in_bytes, interpolate
from syncpipe.planner.report.rivals import duration

if TYPE_CHECKING:
    from syncpipe.planner.report.plan import Plan, StagePlan

__all__ = ["page"]

_NAMES = {"gpipe": "GPipe", "1f1b": "1F1B"}
_WIDTH = 96


def page(plan: Plan) -> str:
    """What ``print(plan)`` shows."""
    return "\n".join(
        [
            *_head(plan),
            "",
            *_stages(plan),
            "",
            *_figures(plan),
            "",
            *_comparison(plan),
            *textwrap.wrap(_verdict(plan), _WIDTH),
        ]
    )


def _head(plan: Plan) -> list[str]:
    n, m, devices = len(plan.balance), plan.chunks, len(plan.machine)
    samples = plan.batch_size / m
    lines = [f"Plan for mini-batches of {_count(plan.batch_size, 'sample')} on {_devices(devices)}"]
    what = f"{_NAMES[plan.schedule]}, {_count(n, 'stage')}" if n > 1 else "one device, no pipeline"
    lines.append(f"{what}, {_count(m, 'micro-batch', 'es')} of {_count(int(samples), 'sample')}")
    if n < devices:
        why = "as asked" if "stages" in plan.fixed else "no faster plan with more stages was found"
        lines.append(f"({_devices(devices - n)} left over: {why})")
    where, sizes = plan.profile.device, plan.profile.sizes
    source = f"layers measured on {where}" if where else "layers as profiled"
    *others, largest = map(str, sizes)
    listed = ", ".join(others) + " and " * bool(others) + _count(int(largest), "sample")
    lines.append(f"{source}, with micro-batches of {listed}")
    if not sizes[0] <= samples <= sizes[-1]:
        lines[-1] += f" (those of {samples:g} are estimated from these)"
    return lines


def _stages(plan: Plan) -> list[str]:
    header = ["stage", "device", "layers", "forward", "backward", "send", "in flight", "memory"]
    rows = [header]
    for s, stage in enumerate(plan.stages):
        rows.append(
            [
                str(s),
                stage.device,
                _run(stage.layers),
                duration(stage.forward),
                duration(stage.backward) + (" + again" if stage.recomputes else ""),
                duration(stage.send) if stage.send else "",
                str(stage.in_flight),
                _memory(stage),
            ]
        )
    left = {1, 2, 7}
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    text = [
        "  ".join(
            cell.ljust(width) if k in left else cell.rjust(width)
            for k, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    text.append(_not_counted(plan))
    if any(stage.recomputes for stage in plan.stages):
        text.append("+ again: this stage stores its inputs only, and computes its forward again")
    return text


def _not_counted(plan: Plan) -> str:
    """What is alive for a moment only, estimated by the widest layer."""
    samples = plan.batch_size / plan.chunks
    outputs = [interpolate(layer.output_bytes, samples) for layer in plan.profile.layers]
    given = interpolate(plan.profile.input_bytes, samples) if plan.profile.input_bytes else 0.0
    widest = max(a + b for a, b in pairwise([given, *outputs]))
    return (
        "memory: parameters, gradients, optimizer and what is stored for backward; gradients of "
        f"activations come on top for a moment, {in_bytes(widest)} in the widest layer"
    )


def _figures(plan: Plan) -> list[str]:
    lines = [
        f"step time   {duration(plan.step_time)}, simulated, without loss and optimizer "
        f"({_rate(plan.samples_per_second)} samples per second)"
    ]
    if len(plan.balance) > 1:
        lines += [
            f"bubble      {plan.bubble:.1%} of the devices' time",
            f"bound       {duration(plan.bound)}; the simulated step is "
            f"{plan.certificate:.3f} times that",
        ]
    return lines


def _comparison(plan: Plan) -> list[str]:
    if not plan.rivals:
        return []
    lines = ["Compared with"]
    width = max(len(rival.name) for rival in plan.rivals)
    for rival in plan.rivals:
        if rival.time is None:
            times = "does not fit"
        else:
            times = f"{duration(rival.time):>9}  {_more(rival.time, plan.step_time):>6}"
        note = "" if not rival.note or rival.note == "does not fit" else f"  {rival.note}"
        lines.append(f"  {rival.name.ljust(width)}  {times:<17}{note}".rstrip())
    return [*lines, ""]


def _verdict(plan: Plan) -> str:
    """The plain truth about whether this is the way to go."""
    others = [rival for rival in plan.rivals if not rival.pipeline and rival.time is not None]
    faster = [rival for rival in others if rival.time is not None and rival.time < plan.step_time]
    if len(plan.balance) == 1 < len(plan.machine) and not plan.fixed:
        start = "No pipeline that was found is faster than one of these devices alone."
    elif faster:
        start = ""
    else:
        start = "Nothing that was looked at is faster than this plan."
    if not faster:
        return start
    best = min(faster, key=lambda rival: math.inf if rival.time is None else rival.time)
    assert best.time is not None
    gain = plan.step_time / best.time
    way = (
        "torch.nn.parallel.DistributedDataParallel, a process for each device"
        if "copies" in best.name and "pipeline" not in best.name
        else "DistributedDataParallel around pipes"
        if "copies" in best.name
        else "no pipe at all"
    )
    return (
        f"{start} The plain truth: {best.name} would be {gain:.2f} times as fast as this plan "
        f"({duration(best.time)} a step). Use {way}, unless something else speaks for a pipeline."
    ).strip()


def _run(names: Sequence[str]) -> str:
    """The layers of a stage: first, last, how many."""
    if len(names) == 1:
        return _short(names[0])
    return f"{_short(names[0])} to {_short(names[-1])} ({len(names)})"


def _short(name: str) -> str:
    return name if len(name) <= 24 else name[:11] + ".." + name[-11:]


def _memory(stage: StagePlan) -> str:
    if math.isinf(stage.limit):
        return in_bytes(stage.memory)
    return f"{in_bytes(stage.memory)} of {in_bytes(stage.limit)} ({stage.memory / stage.limit:.0%})"


def _more(time: float, base: float) -> str:
    if not base:
        return ""
    percent = round(100 * (time / base - 1))
    return f"{percent:+d}%" if percent else "same"


def _rate(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _count(number: int, what: str, plural: str = "s") -> str:
    return f"{number} {what}{'' if number == 1 else plural}"


def _devices(number: int) -> str:
    return _count(number, "device")
