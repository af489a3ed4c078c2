"""A plan as a page that one can decide from."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence, Set
from itertools import accumulate, pairwise

from syncpipe.balance.profile import Profile, in_bytes
from syncpipe.planner.costs.chain import Chain
from syncpipe.planner.costs.machine import Machine
from syncpipe.planner.report.rivals import Rival, duration
from syncpipe.planner.report.stages import StagePlan, on_devices, stages_of
from syncpipe.planner.report.verdict import verdict
from syncpipe.planner.schedules.layouts import AUTO, TITLES, placement
from syncpipe.planner.schedules.setting import Scheduled
from syncpipe.planner.search.candidate import Candidate
from syncpipe.planner.search.sizes import chunk_counts, sizes_of

__all__ = ["bounded", "introduction", "page"]

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
    others: Sequence[Scheduled],
    fixed: Set[str],
) -> str:
    """What ``print(plan)`` shows; the arguments are the attributes of the plan."""
    samples, rest = sizes_of(batch_size, chosen.chunks)
    start = [introduction(batch_size, len(machine))]
    start += _way(chosen, (samples, rest), len(machine), fixed)
    if "chunks" not in fixed:
        start += _capped(profile, chosen, batch_size, len(machine))
    start.append(_source(profile, samples))
    stages = stages_of(profile, machine, chosen)
    table = [*_table(stages), *_counted(profile, chosen, samples)]
    table += _copied(machine, chosen, stages)
    table += _shared_devices(machine, chosen)
    if any(chosen.recomputes):
        table.append("+ again: this stage stores its inputs only, and computes its forward again")
    blocks = [start, table, _figures(chosen, batch_size)]
    if rivals:
        blocks.append(_comparison(rivals, chosen.time))
    if others:
        blocks.append(_schedules(others, chosen, machine))
    if bottleneck := _bottleneck(chosen):
        blocks.append(bottleneck)
    fewer = len(chosen.balance) == 1 < len(machine) and not fixed
    blocks.append(textwrap.wrap(verdict(rivals, others, chosen.time, machine, fewer), _WIDTH))
    return "\n\n".join("\n".join(lines) for lines in blocks)


def introduction(batch_size: int, devices: int) -> str:
    """What stands above everything."""
    return f"Plan for mini-batches of {_count(batch_size, 'sample')} on {_devices(devices)}"


def _way(chosen: Candidate, samples: tuple[int, int], devices: int, fixed: Set[str]) -> list[str]:
    """The schedule, and how many stages and micro-batches."""
    n, m = len(chosen.balance), chosen.chunks
    used = max(placement(chosen.simulation.schedule)) + 1
    what = (
        f"{TITLES[chosen.schedule]}, {_count(n, 'stage')}" if n > 1 else "one device, no pipeline"
    )
    if 1 < n > used:
        what += f" on {_devices(used)}"
    size, rest = samples
    last = f", the last of {rest}" * (rest < size)
    lines = [f"{what}, {_count(m, 'micro-batch', 'es')} of {_count(size, 'sample')}{last}"]
    if used < devices:
        why = "as asked" if "stages" in fixed else "no faster plan with more stages was found"
        lines.append(f"({_devices(devices - used)} left over: {why})")
    return lines


def _capped(profile: Profile, chosen: Candidate, batch_size: int, devices: int) -> list[str]:
    """Why there are not more micro-batches, where that is not a matter of time or memory."""
    usual, extra = chunk_counts(profile, devices, batch_size)
    lines = []
    if chosen.chunks == max(usual + extra) < batch_size:
        lines.append(f"(more micro-batches than {chosen.chunks} are tried on demand only: chunks=)")
    if len(profile.sizes) == 1 and chosen.chunks > max(usual):
        lines.append(
            "(so many micro-batches, as nobody knows what each takes beside its samples: measure "
            "several sizes)"
        )
    return lines


def _source(profile: Profile, samples: int) -> str:
    """Where the costs of the layers come from."""
    source = f"layers: {profile.how}" if profile.how else "layers as profiled"
    if profile.source in ("", "measured"):
        source = source.replace("layers: measured", "layers measured")
    *others, largest = map(str, profile.sizes)
    listed = ", ".join(others) + " and " * bool(others) + _count(int(largest), "sample")
    line = f"{source}, with micro-batches of {listed}"
    if not profile.sizes[0] <= samples <= profile.sizes[-1]:
        line += f" (those of {samples} are estimated from these)"
    return line


def _table(stages: Sequence[StagePlan]) -> list[str]:
    header = ["stage", "device", "layers", "forward", "backward", "send", "in flight", "memory"]
    rows = [[*header, "+ .grad"]]
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
                _of(stage.memory, stage.limit),
                in_bytes(stage.gradients),
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


def _counted(profile: Profile, chosen: Candidate, samples: int) -> list[str]:
    """What memory is made of."""
    chain = Chain.of(profile, samples, 0.0, samples * chosen.chunks)
    stages = pairwise(accumulate(chosen.balance, initial=0))
    in_flight = chosen.simulation.in_flight
    held = [
        chain.held(i, j, q, in_flight[0], again)
        for (i, j), q, again in zip(stages, in_flight, chosen.recomputes, strict=True)
    ]
    start = "memory: parameters, gradients, optimizer, what is stored for backward"
    if not chain.peaks:
        widest = max(a + b for a, b in pairwise([*chain.inputs, 0.0]))
        return [
            f"{start}; gradients of activations come on top for a moment, {in_bytes(widest)} in "
            "the widest layer"
        ]
    moment, early = (max(getattr(one, what) for one in held) for what in ("moment", "arrived"))
    came = f" and inputs that came early (up to {in_bytes(early)})" * bool(early)
    words = f"{start}, what is alive for a moment (up to {in_bytes(moment)}){came}"
    return textwrap.wrap(words, _WIDTH)


def _copied(machine: Machine, chosen: Candidate, stages: Sequence[StagePlan]) -> list[str]:
    """What comes on top where a step finds gradients, and on which devices it is too much."""
    held = list(on_devices(chosen))
    for d, stage in zip(placement(chosen.simulation.schedule), stages, strict=True):
        held[d] += stage.gradients
    room = zip(held, machine.memory, strict=False)
    short = [machine.name(d) for d, (needs, limit) in enumerate(room) if needs > limit]
    words = (
        "+ .grad: so much more if gradients are there when a step begins (no zero_grad() before), "
        "for it copies them"
    )
    words += f"; too much for {', '.join(short)}" * bool(short)
    return textwrap.wrap(words, _WIDTH)


def _figures(chosen: Candidate, batch_size: int) -> list[str]:
    rate = batch_size / chosen.time if chosen.time else math.inf
    lines = [
        f"step time   {duration(chosen.time)}, simulated, without loss and optimizer "
        f"({_rate(rate)} samples per second)"
    ]
    if len(chosen.balance) > 1:
        lines += [
            f"bubble      {chosen.simulation.bubble:.1%} of the devices' time",
            f"bound       {duration(chosen.bound)} for {bounded(chosen)}: "
            f"the simulated step is {chosen.certificate:.3f} times that",
        ]
    if chosen.least and len(chosen.balance) > 1:
        lines.append(
            f"            {duration(chosen.least)} for all that was searched, whatever the cut, "
            f"chunks, slots and stages: {chosen.time / chosen.least:.3f} times that"
        )
    if chosen.interpreter > _NOTICED * chosen.time:
        lines.append(
            f"interpreter {duration(chosen.interpreter)} of Python in all forwards, one at a time; "
            "what the pipe itself does is not in it"
        )
    return lines


def bounded(chosen: Candidate) -> str:
    """What the bound is a bound of."""
    if isinstance(chosen, Scheduled):
        return "any order of these actions"
    return "this cut, chunks and slots" if chosen.slots else "this cut and these chunks"


def _shared_devices(machine: Machine, chosen: Candidate) -> list[str]:
    """What devices with several stages hold at once."""
    device_of = placement(chosen.simulation.schedule)
    if len(set(device_of)) == len(device_of):
        return []
    lines = []
    for d, memory in enumerate(on_devices(chosen)):
        stages = ", ".join(str(s) for s, device in enumerate(device_of) if device == d)
        lines.append(
            f"{machine.name(d)}, stages {stages} at once: {_of(memory, machine.memory[d])}"
        )
    return lines


def _schedules(others: Sequence[Scheduled], chosen: Candidate, machine: Machine) -> list[str]:
    """Step time and memory of the schedules that were not chosen."""
    first = others[0].schedule
    lines = [f"Under other schedules (schedule={first!r} asks for one, and looks longer)"]
    for other in others:
        n, largest = len(other.balance), max(on_devices(other))
        lacking = next((d for d, b in enumerate(on_devices(other)) if b > machine.memory[d]), None)
        shape = f"{_count(n, 'stage')}, {_count(other.chunks, 'micro-batch', 'es')}"
        if any(other.recomputes):
            shape += f", recomputes {_count(sum(other.recomputes), 'stage')}"
        if lacking is None:
            times = f"{duration(other.time):>9}  {_more(other.time, chosen.time):>6}"
            times += f"  {in_bytes(largest):>8} at most"
        else:
            needs = in_bytes(on_devices(other)[lacking], up=True)
            times = f"does not fit: {machine.name(lacking)} would need {needs}"
        lines.append(f"  {other.schedule:<23}  {times}; {shape}")
    if AUTO not in (chosen.schedule, *(other.schedule for other in others)):
        lines.append(
            f"  {AUTO:<23}  made to measure; not tried for so many stages and micro-batches"
        )
    if any(other.guessed for other in others):
        lines.append(
            "  (halves of backwards are estimated: half of it for each layer that has weights)"
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


def _run(names: Sequence[str]) -> str:
    """The layers of a stage: first, last, how many."""
    if len(names) == 1:
        return _short(names[0])
    return f"{_short(names[0])} to {_short(names[-1])} ({len(names)})"


def _short(name: str) -> str:
    name = name if name.isprintable() else repr(name)[1:-1]
    return name if len(name) <= 24 else name[:11] + ".." + name[-11:]


def _of(memory: float, limit: float) -> str:
    if math.isinf(limit):
        return in_bytes(memory)
    return f"{in_bytes(memory)} of {in_bytes(limit)} ({memory / limit:.0%})"


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
