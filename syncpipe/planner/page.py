"""A plan as text, and as a page of HTML: the verdict first."""

from __future__ import annotations

import math
import os
import re
import tempfile
import textwrap
from collections.abc import Iterator
from html import escape
from itertools import pairwise
from pathlib import Path
from string import Template
from typing import Any

from syncpipe.balance.profile import in_bytes
from syncpipe.planner.alternatives import Alternative
from syncpipe.planner.chain import chunk_counts, sizes_of
from syncpipe.planner.draft import levels
from syncpipe.planner.search import AUTO, TITLES
from syncpipe.planner.words import columns, count, duration, layers_named, memory_of

__all__ = ["save", "text"]

#: :class:`.planning.Plan`, which shows itself by this page.
Plan = Any

_WIDTH = 96
#: Time of the interpreter is told from this part of the step on, and is the bottleneck from this
#: part of the devices' on: it is a lower bound.
_NOTICED, _TIGHT = 0.1, 0.9
#: What a pipe could run instead is worth a word if it takes so much less, relative.
_WORTH = 1.01
#: More micro-batches for each device are unusual, unless small ones were measured.
_USUAL = 4
#: Measured times that differ by more than this are told.
_SPREAD = 0.05


def text(plan: Plan) -> str:
    """What ``print(plan)`` shows."""
    verdict, _ = _verdict(plan)
    blocks = [
        [_title(plan), *_way(plan), *_source(plan)],
        textwrap.wrap(verdict, _WIDTH),
        [*columns([_HEADER, *_rows(plan)], left=(1, 2, 7)), *_notes(plan)],
        [f"{name:<11} {number}{what}" for name, number, what in _figures(plan)],
        _alternatives(plan),
    ]
    return "\n\n".join("\n".join(lines) for lines in blocks if lines)


def _title(plan: Plan) -> str:
    samples, devices = count(plan.batch_size, "sample"), count(len(plan.machine), "device")
    return f"Plan for mini-batches of {samples} on {devices}"


def _way(plan: Plan) -> Iterator[str]:
    """The schedule, how many stages and micro-batches, and why no more of them."""
    n, m, used = len(plan.balance), plan.chunks, plan.chosen.form.devices
    what = "one device, no pipeline"
    if used > 1:
        what = f"{TITLES[plan.schedule]}, {count(n, 'stage')}"
        what += f" on {count(used, 'device')}" * (n != used)
    size, rest = sizes_of(plan.batch_size, m)
    last = f", the last of {rest}" * (rest < size)
    yield f"{what}, {count(m, 'micro-batch', 'es')} of {count(size, 'sample')}{last}"
    left = len(plan.machine) - used
    if left:
        why = "as asked" if "stages" in plan.fixed else "no faster plan with more stages was found"
        yield f"({count(left, 'device')} left over: {why})"
    if "chunks" in plan.fixed:
        return
    if m == max(chunk_counts(plan.batch_size)) < plan.batch_size:
        yield f"(more micro-batches than {m} are tried on demand only: chunks=)"
    if len(plan.profile.sizes) == 1 and m > _USUAL * len(plan.machine):
        yield (
            "(so many micro-batches, as what each takes beside its samples is unknown: measure "
            "several sizes)"
        )


def _source(plan: Plan) -> Iterator[str]:
    """Where the costs of the layers come from, and how far they can be believed."""
    profile, samples = plan.profile, sizes_of(plan.batch_size, plan.chunks)[0]
    source = f"layers: {profile.how}" if profile.how else "layers as profiled"
    if profile.source in ("", "measured"):
        source = source.replace("layers: measured", "layers measured")
    *others, largest = map(str, profile.sizes)
    listed = ", ".join(others) + " and " * bool(others) + count(int(largest), "sample")
    beyond = not profile.sizes[0] <= samples <= profile.sizes[-1]
    more = f" (those of {samples} are estimated from these)" * beyond
    yield f"{source}, with micro-batches of {listed}{more}"
    if profile.source == "estimated":
        yield "an estimate from the data sheet, never compared with a measurement"
    load = profile.load_average
    if profile.spread > _SPREAD:
        busy = f" (load {load:.1f} when it was measured)" * bool(load)
        yield f"times {_spread(plan).strip()}: rounds differ by so much{busy}"
    elif load > (os.cpu_count() or 1):
        what = "what else ran may have made all times longer"
        yield f"load {load:.1f} when it was measured: {what}"


def _spread(plan: Plan) -> str:
    spread = plan.profile.spread
    return f" \u00b1{spread:.0%}" if spread > _SPREAD else ""


def _others(plan: Plan) -> list[Alternative]:
    """What else was looked at, the fastest first."""
    every: list[Alternative] = [*plan.alternatives, *plan.compared]
    return sorted(every, key=lambda one: math.inf if one.time is None else one.time)


def _verdict(plan: Plan) -> tuple[str, bool]:
    """Whether this is the way to go, in words; and whether it is."""
    words, step = [], plan.step_time
    times = [(one.time, one) for one in _others(plan) if one.time]
    time, other = next((pair for pair in times if pair[1].pipeline), (math.inf, None))
    if other and time * _WORTH < step:
        words.append(f"As a pipe, {other.name} would be {step / time:.2f} times as fast.")
    fewer = plan.chosen.form.devices == 1 < len(plan.machine) and not plan.fixed
    if fewer:
        words.append("No pipeline that was found is faster than one of these devices alone.")
    time, other = next((pair for pair in times if not pair[1].pipeline), (math.inf, None))
    if other and time < step:
        faster = f"{step / time:.2f} times " * (step / time >= 1.005)
        instead = "no pipe at all"
        if "pipeline" in other.name:
            instead = "DistributedDataParallel around pipes"
        elif "copies" in other.name:
            instead = "torch.nn.parallel.DistributedDataParallel, a process for each device"
        words.append(
            f"The plain truth: {other.name} would be {faster}as fast as this plan "
            f"({duration(time)} a step). Use {instead}, unless something else speaks for a "
            "pipeline."
        )
    elif not fewer:
        which = "Nothing else" if words else "Nothing"
        words.append(f"{which} that was looked at is faster than this plan.")
    python, devices = plan.interpreter_time, plan.simulation.makespan
    if python and python >= _TIGHT * devices:
        words.append(
            "The interpreter is the bottleneck: one process runs the Python of one stage at a "
            f"time, and that alone takes {duration(python)} a step, the devices "
            f"{duration(devices)}. Fewer micro-batches, compiled layers, CUDA graphs in layers or "
            "a free-threaded Python make it faster, more devices do not."
        )
    return " ".join(words), time >= step


_HEADER = (
    "stage", "device", "layers", "forward", "backward", "send", "in flight", "memory", "+ .grad"
)  # fmt: skip
_MODES = {
    "recompute": "+ recompute: this stage stores its inputs only, and recomputes its forward",
    "offload": "+ offload: this stage sends what it stores to the host, and fetches it back",
}


def _rows(plan: Plan) -> Iterator[tuple[str, ...]]:
    for s, stage in enumerate(plan.stages):
        yield (
            str(s),
            stage.device,
            layers_named(stage.layers),
            duration(stage.forward),
            duration(stage.backward) + f" + {stage.mode}" * (stage.mode != "store"),
            duration(stage.send) if stage.send else "",
            str(stage.in_flight),
            memory_of(stage.memory, stage.limit),
            in_bytes(stage.gradients),
        )


def _notes(plan: Plan) -> list[str]:
    """What memory is made of, what comes on top where a step finds gradients, on which devices that
    is too much, and what devices with several stages hold at once.
    """
    chain, chosen, name = plan.terms.chain(plan.chunks), plan.chosen, plan.machine.name
    words = "memory: parameters, gradients, optimizer, what is stored for backward"
    if chain.peaks:
        held = plan.terms.stages(chosen.form, plan.balance, chosen.modes)
        most, early = max(x.transient for x in held), max(x.arrived for x in held)
        words += f", what is transient (up to {in_bytes(most)})"
        words += f" and inputs that came early (up to {in_bytes(early)})" * bool(early)
    else:
        widest = max(map(sum, pairwise(chain.inputs)))
        words += (
            f"; gradients of activations come on top for a moment, {in_bytes(widest)} in the "
            "widest layer"
        )
    lines, needs = textwrap.wrap(words, _WIDTH), list(chosen.on_device)
    for d, stage in zip(plan.device_of, plan.stages, strict=True):
        needs[d] += stage.gradients
    room = zip(needs, plan.machine.memory, strict=False)
    short = [name(d) for d, (held, limit) in enumerate(room) if held > limit]
    words = (
        "+ .grad: so much more if gradients are there when a step begins (no zero_grad() before), "
        "for it copies them"
    )
    lines += textwrap.wrap(words + f"; too much for {', '.join(short)}" * bool(short), _WIDTH)
    lines += [line for mode, line in _MODES.items() if mode in chosen.modes]
    for d, own in enumerate(chosen.form.stages_of):
        if len(own) > 1:
            held = memory_of(chosen.on_device[d], plan.machine.memory[d])
            lines.append(f"{name(d)}, stages {', '.join(map(str, own))} at once: {held}")
    return lines


def _figures(plan: Plan) -> Iterator[tuple[str, str, str]]:
    """What, how much, and of what."""
    rate = plan.samples_per_second
    told = f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"
    what = f", simulated, without loss and optimizer ({told} samples per second)"
    yield "step time", duration(plan.step_time) + _spread(plan), what
    if len(plan.balance) > 1:
        yield "bubble", f"{plan.bubble:.1%}", " of the devices' time"
        what = f"the simulated step is {plan.certificate:.3f} times that"
        yield "bound", duration(plan.bound), f" for any order of these actions: {what}"
    if plan.interpreter_time > _NOTICED * plan.step_time:
        what = " of Python in all forwards, one at a time; what the pipe itself does is not in it"
        yield "interpreter", duration(plan.interpreter_time), what


def _alternatives(plan: Plan) -> list[str]:
    others = _others(plan)
    lines = ["Alternatives"][: len(others)]
    for other in others:
        told = "     does not fit"
        if other.time is not None:
            told = f"{duration(other.time):>9}  {_more(other.time, plan.step_time):>6}"
        words = f"{told}  {other.name}" + f": {other.note}" * bool(other.note)
        lines += textwrap.wrap(words, _WIDTH, subsequent_indent=" " * 19)
    if len(plan.balance) == 1:
        return lines
    if not plan.compared:
        lines.append("plan.compare() says what the other schedules would take")
    elif not any(repr(AUTO) in other.name for other in plan.compared) and plan.schedule != AUTO:
        lines.append(f"(schedule={AUTO!r} not tried for so many stages and micro-batches)")
    if plan.compared:
        lines.append("(plan(schedule=...) asks for one of these schedules, and looks longer)")
    guessed = any(
        x.weight_share is None and x.parameter_bytes > x.frozen_bytes for x in plan.profile.layers
    )
    if guessed and (plan.chosen.form.split or plan.compared):
        lines.append("(halves of backwards are estimated: half for each layer that has weights)")
    return lines


def _more(time: float, base: float) -> str:
    percent = round(100 * (time / base - 1)) if base else 0
    return f"{percent:+d}%" if percent else "same"


# -- HTML -----------------------------------------------------------------------------------------

_NO_PICTURE = (
    "<p>The step is drawn by matplotlib, which is not here: pip install 'syncpipe[plot]'.</p>"
)


def save(path: str | os.PathLike[str], plan: Plan) -> None:
    """Writes the page; a ``ValueError`` if the path does not end in ``.html``."""
    if Path(path).suffix.lower() != ".html":
        raise ValueError(
            f"path={os.fspath(path)!r} must end in .html; plan.timeline().save(path) draws the "
            "simulated step alone"
        )
    verdict, good = _verdict(plan)
    most = in_bytes(max(plan.chosen.on_device))
    figures = [*_figures(plan), ("memory", most, " on a device at most")]
    template = Template(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
    words = {
        "title": _title(plan),
        "way": " ".join(_way(plan)),
        "source": "; ".join(_source(plan)),
        "kind": "good" if good else "bad",
        "verdict": verdict,
        "notes": " ".join(_notes(plan)),
    }
    made = {
        "figures": (f"<div>{name} <b>{_clean(x)}</b>{_clean(of)}</div>" for name, x, of in figures),
        "stages": [_row(*_HEADER, tag="th"), *(_row(*map(_clean, row)) for row in _rows(plan))],
        "layers": _layers(plan),
        "step": [_picture(plan)],
        "memory": _lanes(plan),
        "alternatives": _bars(plan),
    }
    text = {name: _clean(text) for name, text in words.items()}
    page = template.substitute(text, **{name: "".join(parts) for name, parts in made.items()})
    Path(path).write_text(page, encoding="utf-8")


def _row(*cells: str, look: str = "", tag: str = "td") -> str:
    return f'<tr class="{look}">{"".join(f"<{tag}>{cell}</{tag}>" for cell in cells)}</tr>'


def _layers(plan: Plan) -> Iterator[str]:
    """A row for each layer: its name, and bars of time and memory."""
    x = plan.terms.chain(plan.chunks)
    times = [f + b for f, b in zip(x.forward, x.backward, strict=True)]
    own = [max(0.0, s - t) for s, t in zip(x.stored, x.shared, strict=True)]
    sizes = [a + b for a, b in zip(x.fixed, own, strict=True)]
    longest, largest = max(times) or 1.0, max(sizes) or 1.0
    for s, (stage, (i, j)) in enumerate(zip(plan.stages, plan.chosen.ends, strict=True)):
        mode = "" if stage.mode == "store" else f", {stage.mode}s"
        time = duration(stage.forward + stage.backward)
        words = f"stage {s} on {stage.device}: {time} for a micro-batch{mode}"
        yield f'<tr class="cut"><th colspan="3">{_clean(words)}</th></tr>'
        for k in range(i, j):
            time = _bar(duration(times[k]), longest, forward=x.forward[k], backward=x.backward[k])
            memory = _bar(in_bytes(sizes[k]), largest, fixed=x.fixed[k], stored=own[k])
            yield _row(_clean(plan.profile.layers[k].name), time, memory)


def _bar(words: str, whole: float, **parts: float) -> str:
    made = (f'<i class="{k}" style="width:{100 * x / whole:.2f}%"></i>' for k, x in parts.items())
    return f'<span class="bar">{"".join(made)}</span><small>{words}</small>'


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
    stages = plan.terms.stages(chosen.form, chosen.balance, chosen.modes)
    for d, lane in enumerate(levels(chosen.form, plan.simulation, stages)):
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
            f"</svg><span>{memory_of(peak, limit)}</span></div>"
        )


def _bars(plan: Plan) -> Iterator[str]:
    """A row for the plan and for everything that it was compared with, the fastest first."""
    own = f"{TITLES[plan.schedule]}, {in_bytes(max(plan.chosen.on_device))} at most"
    mine, others = Alternative("this plan", plan.step_time, own), _others(plan)
    faster = [other for other in others if other.time and other.time < plan.step_time]
    most = max(other.time or 0.0 for other in [mine, *others]) or 1.0
    for one in [*faster, mine, *others[len(faster) :]]:
        look, said = "mine" if one is mine else "other", "<em>does not fit</em>"
        if one.time is not None:
            words = f"{duration(one.time)}, {_more(one.time, plan.step_time)}"
            said = _bar(words, most, **{look: one.time})
        yield _row(_clean(one.name), said, _clean(one.note), look=look)


def _clean(words: str) -> str:
    """Text for HTML, without what that cannot hold."""
    return escape(re.sub(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "?", words))
