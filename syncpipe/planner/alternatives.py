"""What else one could do with the same devices, so that a plan can be believed, or left alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from syncpipe.balance import balance_cost
from syncpipe.balance.profile import in_bytes
from syncpipe.planner.chain import ends_of
from syncpipe.planner.draft import Draft, Form, Terms
from syncpipe.planner.replicas import replicated, runnable
from syncpipe.planner.search import search
from syncpipe.planner.words import count, duration, listed
from syncpipe.schedules import gpipe

__all__ = ["Alternative", "alternatives_of"]


@dataclass(frozen=True)
class Alternative:
    """Another way to train.

    Attributes:
        name: what it is.
        time: seconds for one mini-batch; None if it does not fit.
        note: how it would be done, or why it does not fit.
        pipeline: whether a pipe can run it.
    """

    name: str
    time: float | None
    note: str = ""
    pipeline: bool = True


def alternatives_of(terms: Terms, chosen: Draft) -> tuple[Alternative, ...]:
    """The even split, torchgpipe's way, one device, shared stages, data parallelism."""
    found: list[Alternative] = []
    if len(chosen.balance) > 1:
        if chosen.form.slots or chosen.schedule == "gpipe":
            found += _other_cuts(terms, chosen)
        found.append(_one_device(terms))
        found += _shared_stages(terms)
    return (*found, *_data_parallel(terms))


def _other_cuts(terms: Terms, chosen: Draft) -> Iterator[Alternative]:
    """An equal number of layers under the same schedule, and torchgpipe's way."""
    n, m, limits = len(chosen.balance), chosen.chunks, terms.machine.memory
    times = [b - a for a, b in pairwise(terms.chain(m).sums["time"])]
    equal = terms.draft(chosen.form, tuple(balance_cost([1] * len(times), n)))
    even = terms.draft(Form(gpipe(m, n)), tuple(balance_cost(times, n)), ["recompute"] * n)
    for name, draft in (
        ("an equal number of layers for each stage", equal),
        ("torchgpipe's way (even in time, GPipe, all but one micro-batch recomputed)", even),
    ):
        assert draft is not None
        text = f"balance={listed(draft.balance)}"
        if draft.excess > 1:
            d = max(range(n), key=lambda d: draft.on_device[d] / limits[d])
            text += f": stage {d} needs {in_bytes(draft.on_device[d])} of {in_bytes(limits[d])}"
        yield Alternative(name, draft.time if draft.excess <= 1 else None, text)


def _one_device(terms: Terms) -> Alternative:
    """The fastest of those into which all fits."""
    machine = terms.machine
    kinds = {kind: d for d, kind in enumerate(zip(machine.memory, machine.speed, strict=True))}
    found = [one for d in kinds.values() for one in search(terms.on(machine.ordered([d])))[:1]]
    best = min(found, key=lambda one: one.time, default=None)
    if best is None:
        largest = in_bytes(max(machine.memory))
        return Alternative("one device", None, f"does not fit into {largest}", False)
    text = f"balance={listed(best.balance)}, chunks={best.chunks}"
    text += ", recomputes stages [0]" * (best.modes[0] == "recompute")
    return Alternative("one device", best.time, text, False)


def _shared_stages(terms: Terms) -> Iterator[Alternative]:
    """PipeDream's stages on several devices each, as a pipe runs them."""
    machine, batch = terms.machine, terms.batch_size
    devices = len(machine)
    if devices == 1 or not machine.uniform or batch < devices:
        return
    found = replicated(terms.profile, devices, machine.bandwidth[0][1], samples=batch // devices)
    if max(found.replicas) == 1:
        return
    found = runnable(found, terms.profile, machine, batch, terms.param_scale)
    name = f"stages with replicas, {found.configuration} (replicas=True)"
    largest = in_bytes(max(found.memory))
    if any(a > b for a, b in zip(found.memory, machine.memory, strict=True)):
        yield Alternative(name, None, f"a device would need {largest}")
    else:
        yield Alternative(name, found.step, f"{largest} at most, chunks={found.chunks}")


def _data_parallel(terms: Terms) -> list[Alternative]:
    """The two fastest ways to have copies of the model, or of a shorter pipeline, on equal devices.

    A ring all-reduce over ``d`` copies sends ``2 (d-1) / d`` of the gradients of a stage.
    """
    machine, layers = terms.machine, terms.profile.layers
    devices, found = len(machine), []
    for d in range(2, devices + 1) if machine.uniform else ():
        n = devices // d
        if devices % d or terms.batch_size % d or n > len(layers):
            continue
        part = Terms(terms.profile, machine.head(n), terms.batch_size // d, terms.param_scale)
        name = f"data parallelism, {d} copies" + f" of a pipeline of {count(n, 'stage')}" * (n > 1)
        share = search(part, stages=n)
        if not share:
            text = f"does not fit into {in_bytes(machine.memory[0])}"
            found.append(Alternative(name, None, text, False))
            continue
        trained = [layer.parameter_bytes - layer.frozen_bytes for layer in layers]
        largest = max(math.fsum(trained[i:j]) for i, j in ends_of(share[0].balance))
        average = 2 * (d - 1) / d * largest / machine.bandwidth[0][1]
        note = f"{duration(average)} of it to average gradients, not overlapped"
        found.append(Alternative(name, share[0].time + average, note, False))
    return sorted(found, key=lambda one: math.inf if one.time is None else one.time)[:2]
