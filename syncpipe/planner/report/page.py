"""A plan as a page that one can decide from."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence, Set
from itertools import pairwise

from syncpipe.balance.profile import Profile, in_bytes, interpolate
from syncpipe.planner.costs.machine import Machine
from syncpipe.planner.report.rivals import Rival, duration
from syncpipe.planner.report.stages import StagePlan, stages_of
from syncpipe.planner.search.candidate import Candidate

__all__ = ["page"]

_NAMES = {"gpipe": "GPipe", "1f1b": "1F1B"}
_WIDTH = 96
#: Time of the interpreter is told from this part of the step on, and is the bottleneck from this
#: part of the devices' on: it is a lower bound.
_NOTICED, _TIGHT = 0.1, 0.9


def page(
    profile: Profile,
    machine: Machine,
    batch_size: int,
    chosen: Candidate,
    rivals: Sequence[Rival],
    fixed: Set[str],
) -> str:
    """What ``print(plan)`` shows; the arguments are the attributes of the plan."""
    samples = batch_size / chosen.chunks
    start = [f"Plan for mini-batches of {_count(batch_size, 'sample')} on {_devices(len(machine))}"]
    start += _way(chosen, samples, len(machine), fixed)
    start.append(_source(profile, samples))
    table = [*_table(stages_of(profile, machine, chosen)), _not_counted(profile, samples)]
    if any(chosen.recomputes):
        table.append("+ again: this stage stores its inputs only, and computes its forward again")
    blocks = [start, table, _figures(chosen, batch_size)]
    if rivals:
        blocks.append(_comparison(rivals, chosen.time))
    if bottleneck := _bottleneck(chosen):
        blocks.append(bottleneck)
    fewer = len(chosen.balance) == 1 < len(machine) and not fixed
    blocks.append(textwrap.wrap(_verdict(rivals, chosen.time, fewer), _WIDTH))
    return "\n\n".join("\n".join(lines) for lines in blocks)


def _way(chosen: Candidate, samples: float, devices: int, fixed: Set[str]) -> list[str]:
    """The schedule, and how many stages and micro-batches."""
    n, m = len(chosen.balance), chosen.chunks
    what = (
        f"{_NAMES[chosen.schedule]}, {_count(n, 'stage')}" if n > 1 else "one device, no pipeline"
    )
    lines = [f"{what}, {_count(m, 'micro-batch', 'es')} of {_count(int(samples), 'sample')}"]
    if n < devices:
        why = "as asked" if "stages" in fixed else "no faster plan with more stages was found"
        lines.append(f"({_devices(devices - n)} left over: {why})")
    return lines


def _source(profile: Profile, samples: float) -> str:
    """Where the costs of the layers come from."""
    source = f"layers measured on {profile.device}" if profile.device else "layers as profiled"
    *others, largest = map(str, profile.sizes)
    listed = ", ".join(others) + " and " * bool(others) + _count(int(largest), "sample")
    line = f"{source}, with micro-batches of {listed}"
    if not profile.sizes[0] <= samples <= profile.sizes[-1]:
        line += f" (those of {samples:g} are estimated from these)"
    return line


def _table(stages: Sequence[StagePlan]) -> list[str]:
    header = ["stage", "device", "layers", "forward", "backward", "send", "in flight", "memory"]
    rows = [header]
    for s, stage in enumerate(stages):
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
    return [
        "  ".join(
            cell.ljust(width) if k in left else cell.rjust(width)
            for k, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _not_counted(profile: Profile, samples: float) -> str:
    """What is alive for a moment only, estimated by the widest layer."""
    outputs = [interpolate(layer.output_bytes, samples) for layer in profile.layers]
    given = interpolate(profile.input_bytes, samples) if profile.input_bytes else 0.0
    widest = max(a + b for a, b in pairwise([given, *outputs]))
    return (
        "memory: parameters, gradients, optimizer and what is stored for backward; gradients of "
        f"activations come on top for a moment, {in_bytes(widest)} in the widest layer"
    )


def _figures(chosen: Candidate, batch_size: int) -> list[str]:
    rate = batch_size / chosen.time if chosen.time else math.inf
    lines = [
        f"step time   {duration(chosen.time)}, simulated, without loss and optimizer "
        f"({_rate(rate)} samples per second)"
    ]
    if len(chosen.balance) > 1:
        lines += [
            f"bubble      {chosen.simulation.bubble:.1%} of the devices' time",
            f"bound       {duration(chosen.bound)}; the simulated step is "
            f"{chosen.certificate:.3f} times that",
        ]
    if chosen.interpreter > _NOTICED * chosen.time:
        lines.append(
            f"interpreter {duration(chosen.interpreter)} of Python in all forwards, one at a time; "
            "what the pipe itself does is not in it"
        )
    return lines


def _bottleneck(chosen: Candidate) -> list[str]:
    """Whether the interpreter holds the devices up."""
    if chosen.interpreter < _TIGHT * chosen.simulation.makespan:
        return []
    return textwrap.wrap(
        "The interpreter is the bottleneck: one process runs the Python of one stage at a time, "
        f"and that alone takes {duration(chosen.interpreter)} a step, the devices "
        f"{duration(chosen.simulation.makespan)}. Fewer micro-batches, compiled layers, CUDA "
        "graphs in layers or a free-threaded Python make it faster, more devices do not.",
        _WIDTH,
    )


def _comparison(rivals: Sequence[Rival], step_time: float) -> list[str]:
    lines = ["Compared with"]
    width = max(len(rival.name) for rival in rivals)
    for rival in rivals:
        if rival.time is None:
            times = "does not fit"
        else:
            times = f"{duration(rival.time):>9}  {_more(rival.time, step_time):>6}"
        note = "" if not rival.note or rival.note == "does not fit" else f"  {rival.note}"
        lines.append(f"  {rival.name.ljust(width)}  {times:<17}{note}".rstrip())
    return lines


def _verdict(rivals: Sequence[Rival], step_time: float, fewer: bool) -> str:
    """The plain truth about whether this is the way to go; ``fewer``: one device was chosen."""
    others = [(rival.time, rival.name) for rival in rivals if not rival.pipeline and rival.time]
    time, name = min(others, default=(math.inf, ""))
    start = "No pipeline that was found is faster than one of these devices alone." * fewer
    if time >= step_time:
        return start or "Nothing that was looked at is faster than this plan."
    way = (
        "torch.nn.parallel.DistributedDataParallel, a process for each device"
        if "copies" in name and "pipeline" not in name
        else "DistributedDataParallel around pipes"
        if "copies" in name
        else "no pipe at all"
    )
    return (
        f"{start} The plain truth: {name} would be {step_time / time:.2f} times as fast as this "
        f"plan ({duration(time)} a step). Use {way}, unless something else speaks for a pipeline."
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
