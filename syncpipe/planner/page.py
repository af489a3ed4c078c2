"""A plan as text, and as a page of HTML: the verdict first."""

from __future__ import annotations

import math
import os
import re
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from html import escape
from itertools import accumulate, pairwise
from pathlib import Path
from string import Template
from typing import Any

from syncpipe.balance.profile import in_bytes
from syncpipe.planner.alternatives import duration
from syncpipe.planner.draft import Draft, levels
from syncpipe.planner.others import AUTO, TITLES
from syncpipe.planner.sizes import chunk_counts, sizes_of

__all__ = ["save", "text"]

#: :class:`.planning.Plan`, which shows itself by this page.
Plan = Any

_WIDTH = 96
#: Time of the interpreter is told from this part of the step on, and is the bottleneck from this
#: part of the devices' on: it is a lower bound.
_NOTICED, _TIGHT = 0.1, 0.9
#: What a pipe could run instead is worth a word if it takes so much less, relative.
_WORTH = 1.01
#: Measured times that differ by more than this are told.
_SPREAD = 0.05


def text(plan: Plan) -> str:
    """What ``print(plan)`` shows."""
    verdict, _ = _verdict(plan)
    blocks = [
        [_introduction(plan), *_way(plan), *_capped(plan), *_source(plan)],
        textwrap.wrap(verdict, _WIDTH),
        [*_table(plan), *_counted(plan), *_copied(plan), *_shared_devices(plan), *_again(plan)],
        _figures(plan),
        _alternatives(plan),
        _schedules(plan),
        _bottleneck(plan),
    ]
    return "\n\n".join("\n".join(lines) for lines in blocks if lines)


def _introduction(plan: Plan) -> str:
    samples, devices = _count(plan.batch_size, "sample"), _count(len(plan.machine), "device")
    return f"Plan for mini-batches of {samples} on {devices}"


def _way(plan: Plan) -> list[str]:
    """The schedule, and how many stages and micro-batches."""
    n, m, used = len(plan.balance), plan.chunks, max(plan.device_of) + 1
    title = TITLES[plan.schedule]
    what = f"{title}, {_count(n, 'stage')}" if n > 1 else "one device, no pipeline"
    if 1 < n > used:
        what += f" on {_count(used, 'device')}"
    size, rest = sizes_of(plan.batch_size, m)
    last = f", the last of {rest}" * (rest < size)
    lines = [f"{what}, {_count(m, 'micro-batch', 'es')} of {_count(size, 'sample')}{last}"]
    left = len(plan.machine) - used
    if left:
        why = "as asked" if "stages" in plan.fixed else "no faster plan with more stages was found"
        lines.append(f"({_count(left, 'device')} left over: {why})")
    return lines


def _capped(plan: Plan) -> list[str]:
    """Why there are not more micro-batches, where that is not a matter of time or memory."""
    if "chunks" in plan.fixed:
        return []
    usual, extra = chunk_counts(plan.profile, len(plan.machine), plan.batch_size)
    lines = []
    if plan.chunks == max(usual + extra) < plan.batch_size:
        lines.append(f"(more micro-batches than {plan.chunks} are tried on demand only: chunks=)")
    if len(plan.profile.sizes) == 1 and plan.chunks > max(usual):
        lines.append(
            "(so many micro-batches, as what each takes beside its samples is unknown: measure "
            "several sizes)"
        )
    return lines


def _source(plan: Plan) -> list[str]:
    """Where the costs of the layers come from, and how far they can be believed."""
    profile, samples = plan.profile, sizes_of(plan.batch_size, plan.chunks)[0]
    source = f"layers: {profile.how}" if profile.how else "layers as profiled"
    if profile.source in ("", "measured"):
        source = source.replace("layers: measured", "layers measured")
    *others, largest = map(str, profile.sizes)
    listed = ", ".join(others) + " and " * bool(others) + _count(int(largest), "sample")
    line = f"{source}, with micro-batches of {listed}"
    if not profile.sizes[0] <= samples <= profile.sizes[-1]:
        line += f" (those of {samples} are estimated from these)"
    lines = [line]
    if profile.source == "estimated":
        lines.append("an estimate from the data sheet, never compared with a measurement")
    if profile.spread > _SPREAD:
        busy = (
            f" (load {profile.load_average:.1f} when it was measured)"
            if profile.load_average
            else ""
        )
        lines.append(f"times \u00b1{profile.spread:.0%}: rounds differ by so much{busy}")
    return lines


# -- the verdict ----------------------------------------------------------------------------------


def _verdict(plan: Plan) -> tuple[str, bool]:
    """Whether this is the way to go, in words; and whether it is."""
    words = [*_other_schedules(plan), *_other_pipes(plan)]
    fewer = len(plan.balance) == 1 < len(plan.machine) and not plan.fixed
    if fewer:
        words.append("No pipeline that was found is faster than one of these devices alone.")
    others = [(a.time, a.name) for a in plan.alternatives if not a.pipeline and a.time]
    time, name = min(others, default=(math.inf, ""))
    if time < plan.step_time:
        ratio = plan.step_time / time
        faster = f"{ratio:.2f} times " * (ratio >= 1.005)
        words.append(
            f"The plain truth: {name} would be {faster}as fast as this plan "
            f"({duration(time)} a step). Use {_instead(name)}, unless something else speaks for a "
            "pipeline."
        )
    elif not fewer:
        which = "Nothing else" if words else "Nothing"
        words.append(f"{which} that was looked at is faster than this plan.")
    return " ".join(words), time >= plan.step_time


def _other_schedules(plan: Plan) -> list[str]:
    best = next((other for other in plan.compared if other.excess <= 1), None)
    if best is None or best.time * _WORTH >= plan.step_time:
        return []
    changed = ", and change the last bits of gradients" * best.form.split
    faster = plan.step_time / best.time
    return [f"Under schedule={best.schedule!r} it would be {faster:.2f} times as fast{changed}."]


def _other_pipes(plan: Plan) -> list[str]:
    pipes = [(a.time, a.name) for a in plan.alternatives if a.pipeline and a.time]
    time, name = min(pipes, default=(math.inf, ""))
    if time * _WORTH >= plan.step_time:
        return []
    return [f"{name[0].upper()}{name[1:]} would be {plan.step_time / time:.2f} times as fast."]


def _instead(name: str) -> str:
    if "copies" not in name:
        return "no pipe at all"
    if "pipeline" in name:
        return "DistributedDataParallel around pipes"
    return "torch.nn.parallel.DistributedDataParallel, a process for each device"


# -- stages ---------------------------------------------------------------------------------------

_HEADER = (
    "stage", "device", "layers", "forward", "backward", "send", "in flight", "memory", "+ .grad"
)  # fmt: skip
_MARKS = {"store": "", "recompute": " + again", "offload": " + host"}


def _rows(plan: Plan) -> Iterator[tuple[str, ...]]:
    for s, stage in enumerate(plan.stages):
        yield (
            str(s),
            stage.device,
            _run(stage.layers),
            duration(stage.forward),
            duration(stage.backward) + _MARKS[stage.mode],
            duration(stage.send) if stage.send else "",
            str(stage.in_flight),
            _of(stage.memory, stage.limit),
            in_bytes(stage.gradients),
        )


def _table(plan: Plan) -> list[str]:
    rows = [_HEADER, *_rows(plan)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if k in (1, 2, 7) else cell.rjust(width)
            for k, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _counted(plan: Plan) -> list[str]:
    """What memory is made of."""
    chain, flight = plan.terms.chain(plan.chunks), plan.chosen.form.in_flight
    stages = pairwise(accumulate(plan.balance, initial=0))
    held = [
        chain.held(i, j, q, flight[0], mode)
        for (i, j), q, mode in zip(stages, flight, plan.chosen.modes, strict=True)
    ]
    start = "memory: parameters, gradients, optimizer, what is stored for backward"
    if not chain.peaks:
        widest = max(a + b for a, b in pairwise([*chain.inputs, 0.0]))
        words = (
            f"{start}; gradients of activations come on top for a moment, {in_bytes(widest)} in "
            "the widest layer"
        )
    else:
        most, early = (max(getattr(one, what) for one in held) for what in ("transient", "arrived"))
        came = f" and inputs that came early (up to {in_bytes(early)})" * bool(early)
        words = f"{start}, what is transient (up to {in_bytes(most)}){came}"
    return textwrap.wrap(words, _WIDTH)


def _copied(plan: Plan) -> list[str]:
    """What comes on top where a step finds gradients, and on which devices it is too much."""
    held = list(plan.chosen.on_device)
    for d, stage in zip(plan.device_of, plan.stages, strict=True):
        held[d] += stage.gradients
    room = zip(held, plan.machine.memory, strict=False)
    short = [plan.machine.name(d) for d, (needs, limit) in enumerate(room) if needs > limit]
    words = (
        "+ .grad: so much more if gradients are there when a step begins (no zero_grad() before), "
        "for it copies them"
    )
    words += f"; too much for {', '.join(short)}" * bool(short)
    return textwrap.wrap(words, _WIDTH)


def _shared_devices(plan: Plan) -> list[str]:
    """What devices with several stages hold at once."""
    lines = []
    for d, (memory, own) in enumerate(
        zip(plan.chosen.on_device, plan.chosen.form.stages_of, strict=True)
    ):
        if len(plan.balance) > plan.chosen.form.devices:
            stages, limit = ", ".join(map(str, own)), plan.machine.memory[d]
            lines.append(f"{plan.machine.name(d)}, stages {stages} at once: {_of(memory, limit)}")
    return lines


def _again(plan: Plan) -> list[str]:
    lines = {
        "recompute": "+ again: this stage stores its inputs only, and recomputes its forward",
        "offload": "+ host: this stage sends what it stores to the host, and fetches it again",
    }
    return [line for mode, line in lines.items() if mode in plan.chosen.modes]


def _figures(plan: Plan) -> list[str]:
    rate = plan.samples_per_second
    spread = f" \u00b1{plan.profile.spread:.0%}" if plan.profile.spread > _SPREAD else ""
    lines = [
        f"step time   {duration(plan.step_time)}{spread}, simulated, without loss and optimizer "
        f"({f'{rate:,.0f}' if rate >= 100 else f'{rate:.3g}'} samples per second)"
    ]
    if len(plan.balance) > 1:
        lines += [
            f"bubble      {plan.bubble:.1%} of the devices' time",
            f"bound       {duration(plan.bound)} for any order of these actions: the simulated "
            f"step is {plan.certificate:.3f} times that",
        ]
    if plan.interpreter_time > _NOTICED * plan.step_time:
        lines.append(
            f"interpreter {duration(plan.interpreter_time)} of Python in all forwards, one at a "
            "time; what the pipe itself does is not in it"
        )
    return lines


def _bottleneck(plan: Plan) -> list[str]:
    """Whether the interpreter holds the devices up."""
    if not plan.interpreter_time or (plan.interpreter_time < _TIGHT * plan.simulation.makespan):
        return []
    return textwrap.wrap(
        "The interpreter is the bottleneck: one process runs the Python of one stage at a time, "
        f"and that alone takes {duration(plan.interpreter_time)} a step, the devices "
        f"{duration(plan.simulation.makespan)}. Fewer micro-batches, compiled layers, CUDA "
        "graphs in layers or a free-threaded Python make it faster, more devices do not.",
        _WIDTH,
    )


# -- alternatives ---------------------------------------------------------------------------------


def _alternatives(plan: Plan) -> list[str]:
    if not plan.alternatives:
        return []
    lines, width = ["Alternatives"], max(len(other.name) for other in plan.alternatives)
    for other in plan.alternatives:
        times = "does not fit"
        if other.time is not None:
            times = f"{duration(other.time):>9}  {_more(other.time, plan.step_time):>6}"
        lines.append(f"  {other.name.ljust(width)}  {times:<17}  {other.note}".rstrip())
    return lines


def _schedules(plan: Plan) -> list[str]:
    """Step time and memory of the schedules that were not chosen, if they were looked at.

    And whether halves of backwards, which they or the plan itself need, are estimated.
    """
    if len(plan.balance) == 1:
        return []
    guessed = plan.terms.guessed and (plan.chosen.form.split or plan.compared)
    note = "(halves of backwards are estimated: half of it for each layer that has weights)"
    if not plan.compared:
        lines = ["plan.compare() says what the other schedules would take"]
        return [*lines, note] if guessed else lines
    first = plan.compared[0].schedule
    lines = [f"Under other schedules (schedule={first!r} asks for one, and looks longer)"]
    for other in plan.compared:
        if other.excess <= 1:
            times = f"{duration(other.time):>9}  {_more(other.time, plan.step_time):>6}"
            times += f"  {in_bytes(max(other.on_device)):>8} at most"
        else:
            times = _too_much(plan, other)
        lines.append(f"  {other.schedule:<23}  {times}; {_shape(other)}")
    if AUTO not in (plan.schedule, *(other.schedule for other in plan.compared)):
        lines.append(
            f"  {AUTO:<23}  made to measure; not tried for so many stages and micro-batches"
        )
    return [*lines, f"  {note}"] if guessed else lines


def _too_much(plan: Plan, other: Draft) -> str:
    pairs = zip(other.on_device, plan.machine.memory, strict=False)
    d = next(d for d, (needs, limit) in enumerate(pairs) if needs > limit)
    needs = in_bytes(other.on_device[d], up=True)
    return f"does not fit: {plan.machine.name(d)} would need {needs}"


def _shape(other: Draft) -> str:
    shape = f"{_count(len(other.balance), 'stage')}, {_count(other.chunks, 'micro-batch', 'es')}"
    again = sum(mode == "recompute" for mode in other.modes)
    return shape + (f", recomputes {_count(again, 'stage')}" if again else "")


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


def _count(number: int, what: str, plural: str = "s") -> str:
    return f"{number} {what}{'' if number == 1 else plural}"


# -- HTML -----------------------------------------------------------------------------------------

_NO_PICTURE = (
    "<p>The step is drawn by matplotlib, which is not here: pip install 'syncpipe[plot]'.</p>"
)


def save(path: str | os.PathLike[str], plan: Plan) -> None:
    """Writes the page.

    Args:
        path: ends in ``.html``.
        plan: to be shown.

    Raises:
        ValueError: it ends in something else.
    """
    if Path(path).suffix.lower() != ".html":
        raise ValueError(
            f"path={os.fspath(path)!r} must end in .html; plan.timeline().save(path) draws the "
            "simulated step alone"
        )
    verdict, good = _verdict(plan)
    template = Template(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
    page = template.substitute(
        title=_clean(_introduction(plan)),
        way=_clean(" ".join(_way(plan))),
        source=_clean("; ".join(_source(plan))),
        kind="good" if good else "bad",
        verdict=_clean(verdict),
        figures="".join(
            f"<div><b>{_clean(number)}</b> {_clean(what)}</div>" for number, what in _numbers(plan)
        ),
        layers="".join(_layers(plan)),
        stages=_cells([_HEADER, *_rows(plan)]),
        notes=_clean(" ".join([*_counted(plan), *_copied(plan), *_again(plan)])),
        step=_picture(plan),
        memory="".join(_lanes(plan)),
        alternatives="".join(_bars(plan)),
        text=_clean(text(plan)),
    )
    Path(path).write_text(page, encoding="utf-8")


def _numbers(plan: Plan) -> Iterator[tuple[str, str]]:
    spread = f" \u00b1{plan.profile.spread:.0%}" if plan.profile.spread > _SPREAD else ""
    yield duration(plan.step_time) + spread, "step, without loss and optimizer"
    if plan.step_time:
        yield f"{plan.samples_per_second:,.4g}", "samples per second"
    yield f"{plan.bubble:.1%}", "bubble"
    yield in_bytes(max(plan.chosen.on_device)), "most memory on a device"
    yield f"{plan.certificate:.3f}", f"times the bound, {duration(plan.bound)}"


def _layers(plan: Plan) -> Iterator[str]:
    """A row for each layer: its name, and bars of time and memory."""
    chain = plan.terms.chain(plan.chunks)
    times = [f + b for f, b in zip(chain.forward, chain.backward, strict=True)]
    own = [max(0.0, s - t) for s, t in zip(chain.stored, chain.shared, strict=True)]
    sizes = [a + b for a, b in zip(chain.fixed, own, strict=True)]
    longest, largest = max(times) or 1.0, max(sizes) or 1.0
    names = [layer.name for layer in plan.profile.layers]
    for s, (i, j) in enumerate(pairwise(accumulate(plan.balance, initial=0))):
        stage = plan.stages[s]
        time = duration(stage.forward + stage.backward)
        words = f"stage {s} on {stage.device}: {time} for a micro-batch"
        mode = "" if stage.mode == "store" else f", {stage.mode}s"
        yield f'<tr class="cut"><th colspan="3">{_clean(words + mode)}</th></tr>'
        for k in range(i, j):
            bars = (
                (
                    ("forward", chain.forward[k] / longest),
                    ("backward", chain.backward[k] / longest),
                ),
                (("fixed", chain.fixed[k] / largest), ("stored", own[k] / largest)),
            )
            said = f"{duration(times[k])}", in_bytes(sizes[k])
            cells = "".join(
                "<td><span class='bar'>"
                + "".join(f'<i class="{look}" style="width:{100 * w:.2f}%"></i>' for look, w in row)
                + f"</span><small>{words}</small></td>"
                for row, words in zip(bars, said, strict=True)
            )
            yield f"<tr><td>{_clean(names[k])}</td>{cells}</tr>"


def _cells(rows: Sequence[Sequence[str]]) -> str:
    head, *rest = (
        "".join(f"<{tag}>{_clean(cell)}</{tag}>" for cell in row)
        for tag, row in zip(["th", *["td"] * len(rows)], rows, strict=False)
    )
    return f"<tr>{head}</tr>" + "".join(f"<tr>{row}</tr>" for row in rest)


def _picture(plan: Plan) -> str:
    """The step, as SVG."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step.svg"
        try:
            plan.timeline().save(path)
        except ImportError:
            return _NO_PICTURE
        found = path.read_text(encoding="utf-8")
    return found[found.index("<svg") :]


def _lanes(plan: Plan) -> Iterator[str]:
    """What each device holds, up to its limit."""
    chosen, makespan = plan.chosen, plan.simulation.makespan or 1.0
    stages = plan.terms.footprints(chosen.form, chosen.balance, chosen.modes)
    lanes = levels(chosen.form, plan.simulation, stages)
    for d, lane in enumerate(lanes):
        peak, limit = max(level for _, level in lane), plan.machine.memory[d]
        full = peak if math.isinf(limit) else limit
        path = "M0 100" + "".join(
            f"H{1000 * time / makespan:.1f}V{100 * (1 - level / (full or 1.0)):.1f}"
            for time, level in lane
        )
        name = _clean(plan.machine.name(d))
        yield (
            f'<div class="lane"><span>{name}</span><svg viewBox="0 0 1000 100" role="img" '
            f'preserveAspectRatio="none" aria-label="memory of {name}"><path d="{path}H1000V100z"/>'
            f"</svg><span><b>{in_bytes(peak)}</b>{_limit(peak, limit)}</span></div>"
        )


def _limit(peak: float, limit: float) -> str:
    return "" if math.isinf(limit) else f" of {in_bytes(limit)} ({peak / limit:.0%})"


def _bars(plan: Plan) -> Iterator[str]:
    """A row for the plan and for everything that it was compared with, the fastest first."""
    own = f"{TITLES[plan.schedule]}, {in_bytes(max(plan.chosen.on_device))} at most"
    rows: list[tuple[str, float | None, str]] = [("this plan", plan.step_time, own)]
    rows += [(other.name, other.time, other.note) for other in plan.alternatives]
    for other in plan.compared:
        fits = other.excess <= 1
        note = f"{in_bytes(max(other.on_device))} at most; {_shape(other)}"
        note = note if fits else _too_much(plan, other)
        rows.append((f"schedule {TITLES[other.schedule]}", other.time if fits else None, note))
    rows.sort(key=lambda row: math.inf if row[1] is None else row[1])
    most = max(time for _, time, _ in rows if time is not None) or 1.0
    for name, time, note in rows:
        look = "mine" if name == "this plan" else "other"
        said = "<em>does not fit</em>"
        if time is not None:
            more = _more(time, plan.step_time)
            bar = f'<span class="bar"><i class="{look}" style="width:{100 * time / most:.2f}%">'
            said = f"{bar}</i></span><small>{duration(time)}, {more}</small>"
        yield (
            f'<tr class="{look}"><td>{_clean(name)}</td><td>{said}</td><td>{_clean(note)}</td></tr>'
        )


def _clean(words: str) -> str:
    """Text for HTML, without what that cannot hold."""
    return escape(re.sub(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "?", words))
