"""A plan as text and as a page of HTML."""

from __future__ import annotations

import math
import os
import re
import textwrap
from collections.abc import Iterator, Sequence
from html import escape
from itertools import pairwise
from pathlib import Path
from string import Template
from typing import Any

from syncpipe.format import columns, count, duration, in_bytes
from syncpipe.planner.alternatives import Alternative
from syncpipe.planner.candidates import ADAM
from syncpipe.planner.chain import chunk_counts, sizes_of
from syncpipe.planner.search import AUTO, TITLES

__all__ = ["limited_by", "save", "text"]

#: :class:`.planning.Plan`, which imports this module.
Plan = Any

_WIDTH = 96
#: The interpreter's share of the step from which it is reported, and from which it is the limit.
_NOTICED, _TIGHT = 0.1, 0.9
_WORTH = 1.01  # the speed-up from which an alternative is recommended
_USUAL = 4  # micro-batches for each device; more need a profile of small micro-batches
_OPEN = 20  # the number of layers from which their list is folded
_SPREAD = 0.05  # the spread of measured times from which it is reported


def text(plan: Plan) -> str:
    """The text of ``print(plan)``."""
    ways = [
        f"{_time(plan, one):>17}  {one.name}" + f": {one.note}" * bool(one.note)
        for one in _ranked(plan)
    ]
    blocks = [
        [_title(plan), *_setup(plan), *_sources(plan)],
        _wrapped([_verdict(plan)[0]]),
        [*columns([_HEADER, *_rows(plan)], left=(1, 2, 7)), *_wrapped(_notes(plan))],
        _wrapped([f"{name:<11} {number}{of}" for name, number, of in _figures(plan)], indent=12),
        _wrapped(["Alternatives", *ways] if ways[1:] else [], indent=19),
        _wrapped(_remarks(plan)),
    ]
    return "\n\n".join("\n".join(lines) for lines in blocks if lines)


def _wrapped(lines: Sequence[str], indent: int = 0) -> list[str]:
    hanging = " " * indent
    return [
        part for line in lines for part in textwrap.wrap(line, _WIDTH, subsequent_indent=hanging)
    ]


def _title(plan: Plan) -> str:
    samples, devices = count(plan.batch_size, "sample"), count(len(plan.machine), "device")
    return f"Plan for mini-batches of {samples} on {devices}"


def _setup(plan: Plan) -> Iterator[str]:
    """The schedule, the numbers of stages and micro-batches, and why these are no larger."""
    n, m, used = len(plan.balance), plan.chunks, plan.chosen.shape.devices
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
        yield f"(more than {m} micro-batches are tried only if chunks= gives them)"
    if len(plan.profile.sizes) == 1 and m > _USUAL * len(plan.machine):
        yield (
            "(the fixed cost of a micro-batch is unknown, which favors many of them: measure "
            "several sizes)"
        )


def _sources(plan: Plan) -> Iterator[str]:
    """The source of the layers' costs, and doubts about them."""
    profile, samples = plan.profile, sizes_of(plan.batch_size, plan.chunks)[0]
    source = f"layers: {profile.how or 'as given'}"
    *others, largest = map(str, profile.sizes)
    listed = ", ".join(others) + " and " * bool(others) + count(int(largest), "sample")
    beyond = not profile.sizes[0] <= samples <= profile.sizes[-1]
    more = f" (times for {samples} are extrapolated)" * beyond
    yield f"{source}, with micro-batches of {listed}{more}"
    if profile.source == "estimated":
        yield "times are estimated from the data sheet, not measured"
    load = profile.load_average
    if profile.spread > _SPREAD:
        busy = f" (load {load:.1f} during the measurement)" * bool(load)
        yield f"times {_spread(plan).strip()}: rounds or layers contradict each other{busy}"
    elif load > (os.cpu_count() or 1):
        what = "other programs may have made all times longer"
        yield f"load {load:.1f} during the measurement: {what}"


def _spread(plan: Plan) -> str:
    spread = plan.profile.spread
    return f" \u00b1{spread:.0%}" if spread > _SPREAD else ""


def _ranked(plan: Plan) -> list[Alternative]:
    """The plan and its alternatives, the fastest first; in a tie the plan comes first."""
    note = f"{in_bytes(max(plan.chosen.on_device))} at most"
    every = [Alternative("this plan", plan.step_time, note, draft=plan.chosen)]
    every += [*plan.alternatives, *plan.compared]
    return sorted(every, key=lambda one: one.time or math.inf)


def _verdict(plan: Plan) -> tuple[str, bool]:
    """A verdict on the plan in words, and whether it is good."""
    words, step = [], plan.step_time
    faster = [(step / one.time, one) for one in _ranked(plan) if one.time and one.time < step]
    for times, one in [pair for pair in faster if not pair[1].instead][:1]:
        if times > _WORTH:
            words.append(f"As a pipe, {one.name} would be {times:.2f} times as fast.")
    alone = plan.chosen.shape.devices == 1 < len(plan.machine) and not plan.fixed
    if alone:
        words.append("No pipeline that was tried is faster than one of these devices alone.")
    better = [pair for pair in faster if pair[1].instead and pair[0] > _WORTH][:1]
    for times, one in better:
        words.append(
            f"Without a pipe, {one.name} would be {times:.2f} times as fast as this plan ("
            f"{duration(step / times)} a step). Use {one.instead}, unless you need a pipeline for "
            "other reasons."
        )
    if not better and not alone:
        which = "Nothing else" if words else "Nothing"
        much = f" by more than {_WORTH - 1:.0%}" * bool(faster)
        words.append(f"{which} that was tried is faster than this plan{much}.")
    return " ".join(words), not better


_HEADER = (
    "stage", "device", "layers", "forward", "backward", "send", "in flight", "memory", "+ .grad"
)  # fmt: skip
_MODES = {
    "recompute": "+ recompute: this stage stores only its inputs, and recomputes its forward; or "
    "only so many of its layers.",
    "offload": "+ offload: this stage moves stored activations to the host and back.",
}


def _rows(plan: Plan) -> Iterator[tuple[str, ...]]:
    for s, stage in enumerate(plan.stages):
        yield (
            str(s),
            stage.device,
            _name_range(stage.layers),
            duration(stage.forward),
            duration(stage.backward) + _mode(stage),
            duration(stage.send) if stage.send else "",
            str(stage.in_flight),
            _share(stage.memory, stage.limit),
            in_bytes(stage.gradients),
        )


def _mode(stage: Any) -> str:
    some, whole = len(stage.recomputed), len(stage.layers)
    part = f" {some} of {whole}" if 0 < some < whole else ""
    return "" if stage.mode == "store" else f" + {stage.mode}{part}"


def _name_range(names: Sequence[str]) -> str:
    short = []
    for name in (names[0], names[-1]):
        name = name if name.isprintable() else repr(name)[1:-1]
        short.append(name if len(name) <= 24 else f"{name[:11]}..{name[-11:]}")
    return f"{short[0]} to {short[1]} ({len(names)})" if len(names) > 1 else short[0]


def _share(memory: float, limit: float) -> str:
    """Bytes, and their share of the limit if that is finite."""
    if math.isinf(limit):
        return in_bytes(memory)
    return f"{in_bytes(memory)} of {in_bytes(limit)} ({memory / limit:.0%})"


def _notes(plan: Plan) -> list[str]:
    """Notes on memory, on gradients, on modes, and on devices with several stages."""
    chain, chosen, names = plan.terms.chain(plan.chunks), plan.chosen, plan.machine.names
    scale = plan.terms.param_scale
    adam = ": Adam's states in the parameters' dtype" * (scale == ADAM)
    words = f"memory: parameters, gradients, optimizer (param_scale={scale:g}{adam}), activations"
    words += " stored for backward"
    if chain.peaks:
        held = plan.terms.stages(chosen.shape, plan.balance, chosen.modes)
        most, early = max(x.transient for x in held), max(x.arrived for x in held)
        words += f", transient memory (up to {in_bytes(most)})"
        words += f" and early inputs (up to {in_bytes(early)})" * bool(early)
    else:
        widest = in_bytes(max(map(sum, pairwise(chain.inputs))))
        words += f"; gradients of activations are not included, {widest} in the widest layer"
    needs = list(chosen.on_device)
    for d, stage in zip(plan.device_of, plan.stages, strict=True):
        needs[d] += stage.gradients
    room = zip(needs, plan.machine.memory, strict=False)
    short = [names[d] for d, (held, limit) in enumerate(room) if held > limit]
    grad = (
        "+ .grad: additional memory if a step begins with gradients (without zero_grad()), because "
        "it copies them" + f"; too much for {', '.join(short)}" * bool(short)
    )
    several = [
        f"{names[d]}, stages {', '.join(map(str, own))} at once: "
        + _share(chosen.on_device[d], plan.machine.memory[d])
        for d, own in enumerate(chosen.shape.stages_of)
        if len(own) > 1
    ]
    used = [line for mode, line in _MODES.items() if mode in [x.mode for x in plan.stages]]
    return [f"{words}.", f"{grad}.", *used, *several]


def _figures(plan: Plan) -> Iterator[tuple[str, str, str]]:
    """Names, values and explanations."""
    rate = plan.samples_per_second
    rate_text = f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"
    what = f", simulated, without loss and optimizer ({rate_text} samples per second)"
    yield "step time", duration(plan.step_time) + _spread(plan), what
    if len(plan.balance) > 1:
        yield "bubble", f"{plan.bubble:.1%}", " of the devices' time"
        what = f"the simulated step is {plan.certificate:.3f} times the bound"
        yield "bound", duration(plan.bound), f" for any order of these actions: {what}"
    yield "limited by", limited_by(plan), ""
    if plan.interpreter_time > _NOTICED * plan.step_time:
        what = " of Python in all forwards, one at a time, without that of the pipe itself"
        yield "interpreter", duration(plan.interpreter_time), what


def limited_by(plan: Plan) -> str:
    """The largest cause of time that the devices do not share evenly, as text."""
    played, step, busy = plan.simulation, plan.step_time, plan.simulation.busy
    if plan.interpreter_time >= _TIGHT * step:
        return (
            "Python, which one thread runs at a time: use fewer micro-batches, compiled layers, "
            "CUDA graphs in layers or a free-threaded Python; more devices do not help"
        )
    if len(busy) == 1:
        return "the one device"
    d = max(range(len(busy)), key=busy.__getitem__)
    again = sum(s.duration for s in played.spans if s.row == d and s.kind == "recompute")
    for backward, stage, place in zip(
        played.costs.times["backward"], plan.stages, plan.device_of, strict=True
    ):
        again += plan.chunks * (backward - stage.backward) * (place == d)  # by layer
    mean, sent, name = sum(busy) / len(busy), 2 * sum(played.costs.transfer), plan.machine.names[d]
    more = busy[d] - again - mean
    return max(
        (again, f"memory: {name} recomputes {again / step:.0%} of the step"),
        (more, f"{name}, which is busy {more / (mean or 1.0):.0%} longer than the mean"),
        (sent, f"transfers between devices, {sent / step:.0%} of the step"),
        (step - busy[d] - sent, f"the bubble, {plan.bubble:.0%} of the devices' time: a larger "
         "batch_size has more micro-batches"),
    )[1]  # fmt: skip


def _time(plan: Plan, one: Alternative) -> str:
    """The time of an alternative, and its difference from that of the plan."""
    if one.time is None:
        return "does not fit"
    percent = round(100 * (one.time / plan.step_time - 1)) if plan.step_time else 0
    return f"{duration(one.time)}  {f'{percent:+d}%' if percent else 'same':>6}"


def _remarks(plan: Plan) -> list[str]:
    if len(plan.balance) == 1:
        return []
    compared = [one.draft.shape.name for one in plan.compared if one.draft]
    lines = ["plan.compare() estimates the other schedules."]
    if compared:
        lines = ["plan(schedule=...) searches longer for one of these schedules."]
    if compared and AUTO not in (*compared, plan.schedule):
        lines.append(f"schedule={AUTO!r} was not tried: too many stages and micro-batches.")
    layers = plan.profile.layers
    guessed = any(x.weight_share is None and x.parameter_bytes > x.frozen_bytes for x in layers)
    if guessed and (plan.chosen.shape.split or compared):
        lines.append("Backward halves were not measured: each is half of a layer with weights.")
    return lines


# -- HTML -----------------------------------------------------------------------------------------

_NO_PICTURE = "<p>The picture of the step needs matplotlib: pip install 'syncpipe[plot]'.</p>"


def save(path: str | os.PathLike[str], plan: Plan) -> None:
    """Write the page; raise ``ValueError`` if the path does not end in ``.html``."""
    if Path(path).suffix.lower() != ".html":
        raise ValueError(
            f"path={os.fspath(path)!r} must end in .html; for a picture of the step alone use "
            "plan.timeline().save(path)"
        )
    verdict, good = _verdict(plan)
    figures = [*_figures(plan), ("memory", in_bytes(max(plan.chosen.on_device)), " at most")]
    svg = plan.timeline()._repr_svg_() or _NO_PICTURE
    parts = {
        "title": _html(_title(plan)),
        "way": _html(" ".join(_setup(plan))),
        "source": _html("; ".join(_sources(plan))),
        "kind": "good" if good else "bad",
        "verdict": _html(verdict),
        "notes": _html(" ".join(_notes(plan))),
        "remarks": _html(" ".join(_remarks(plan))),
        "figures": (f"<div>{name} <b>{_html(x)}</b>{_html(of)}</div>" for name, x, of in figures),
        "stages": [_row(*_HEADER, tag="th"), *(_row(*map(_html, row)) for row in _rows(plan))],
        "layers": _layer_rows(plan),
        "open": " open" * (len(plan.profile.layers) < _OPEN),
        "step": svg[max(0, svg.find("<svg")) :],
        "memory": _memory_rows(plan),
        "alternatives": _alternative_rows(plan),
    }
    template = Template(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
    page = template.substitute({name: "".join(part) for name, part in parts.items()})
    Path(path).write_text(page, encoding="utf-8")


def _row(*cells: str, look: str = "", tag: str = "td") -> str:
    return f'<tr class="{look}">{"".join(f"<{tag}>{cell}</{tag}>" for cell in cells)}</tr>'


def _layer_rows(plan: Plan) -> Iterator[str]:
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
        yield f'<tr class="cut"><th colspan="3">{_html(words)}</th></tr>'
        for k in range(i, j):
            time = _bar(duration(times[k]), longest, forward=x.forward[k], backward=x.backward[k])
            memory = _bar(in_bytes(sizes[k]), largest, fixed=x.fixed[k], stored=own[k])
            yield _row(_html(plan.profile.layers[k].name), time, memory)


def _bar(words: str, whole: float, **parts: float) -> str:
    made = (f'<i class="{k}" style="width:{100 * x / whole:.2f}%"></i>' for k, x in parts.items())
    return f'<span class="bar">{"".join(made)}</span><small>{words}</small>'


def _memory_rows(plan: Plan) -> Iterator[str]:
    """A row for each device: its peak memory and its limit."""
    chosen, chain = plan.chosen, plan.terms.chain(plan.chunks)
    for d, own in enumerate(chosen.shape.stages_of):
        held, limit = chosen.on_device[d], plan.machine.memory[d]
        fixed = sum(chain.run(*chosen.ends[j]).fixed for j in own)
        whole = (held if math.isinf(limit) else limit) or 1.0
        bar = _bar(_share(held, limit), whole, fixed=fixed, stored=held - fixed)
        yield _row(_html(plan.machine.names[d]), bar)


def _alternative_rows(plan: Plan) -> Iterator[str]:
    ways = _ranked(plan)
    most = max(one.time or 0.0 for one in ways) or 1.0
    for one in ways:
        look, time = "mine" if one.draft is plan.chosen else "other", _time(plan, one)
        bar = _bar(time, most, **{look: one.time}) if one.time is not None else f"<em>{time}</em>"
        yield _row(_html(one.name), bar, _html(one.note), look=look)


def _html(words: str) -> str:
    """Text escaped for HTML, with characters that HTML cannot hold replaced."""
    return escape(re.sub(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "?", words))
