"""What else one could do with the same devices, so that a plan can be believed, or left alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from syncpipe.balance import balance_cost
from syncpipe.balance.profile import in_bytes
from syncpipe.planner.chain import Mode, ends_of
from syncpipe.planner.draft import Draft, Form, Terms, one_f_one_b_form
from syncpipe.planner.replicas import replicated, runnable
from syncpipe.planner.search import families, search
from syncpipe.planner.words import duration
from syncpipe.schedules import gpipe

__all__ = ["Alternative", "alternatives_of", "block_partitions"]


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
    """The even split, torchgpipe's ways, one device, shared stages, data parallelism."""
    found: list[Alternative] = []
    if len(chosen.balance) > 1:
        if chosen.form.slots or chosen.schedule == "gpipe":
            found += _other_cuts(terms, chosen)
        found.append(_one_device(terms))
        found += _shared_stages(terms)
    return (*found, *_data_parallel(terms))


def _other_cuts(terms: Terms, chosen: Draft) -> Iterator[Alternative]:
    """The same schedule with the layers cut as others would."""
    n, m, chain = len(chosen.balance), chosen.chunks, terms.chain(chosen.chunks)
    blocks = block_partitions([b - a for a, b in pairwise(chain.sums["time"])], n)
    overlap = one_f_one_b_form(m, families(n, m)[1]) if chosen.form.slots else chosen.form
    modes: list[Mode] = ["recompute"] * n
    name = "torchgpipe (its balance, GPipe, all but one micro-batch recomputed)"
    drafts = {
        "an equal number of layers for each stage": terms.draft(
            chosen.form, balance_cost([1] * len(chain), n)
        ),
        "torchgpipe's balance": terms.draft(overlap, blocks, modes),
        name: terms.draft(Form(gpipe(m, n)), blocks, modes),
    }
    for name, draft in drafts.items():
        assert draft is not None
        text = f"balance={_listed(draft.balance)}"
        if draft.excess > 1:
            limits = terms.machine.memory
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
    text = f"balance={_listed(best.balance)}, chunks={best.chunks}"
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
        name = f"data parallelism, {d} copies" + f" of a pipeline of {n} stages" * (n > 1)
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


def _listed(balance: Sequence[int]) -> str:
    """A balance, the middle of a long one left out."""
    if len(balance) <= 16:
        return str(list(balance))
    first, last = (", ".join(map(str, part)) for part in (balance[:8], balance[-4:]))
    return f"[{first}, .., {last}]"


def block_partitions(cost: Sequence[float], n: int) -> tuple[int, ...]:
    """The balance that torchgpipe's ``balance_cost`` would choose, one for one.

    The algorithm comes from Imre Bárány et al., "Block Partitions of Sequences"
    (https://arxiv.org/abs/1308.2452). Costs are mapped to [0, 1]. While the largest and the
    smallest block differ by more than 1, the smallest is given the layer at its boundary that lies
    on the way to the largest. With many equal costs torchgpipe may end with a stage without layers,
    or never; then this stops, and moves boundaries just so far that each stage has a layer.

    Args:
        cost: of each layer; finite numbers.
        n: the number of stages, at most that of layers.
    """
    least, spread = min(cost), max(cost) - min(cost)
    scaled = [(number - least) / spread if spread else 0.0 for number in cost]
    ends = [len(cost) // n * j for j in range(n)] + [len(cost)]
    sizes = [sum(scaled[a:b]) for a, b in pairwise(ends)]

    def largest_of() -> int:
        return max(range(n), key=lambda j: (sizes[j], j))

    largest = largest_of()
    size = sizes[largest]
    # It takes a fraction of layers x stages steps, and leaves the sequence when it will not end.
    for _ in range(len(cost) ** 2 * n):
        smallest = min(range(n), key=sizes.__getitem__)
        if size <= sizes[smallest] + 1:
            break
        giver, end, move = smallest + 1, smallest + 1, 1
        if largest < smallest:
            giver, end, move = smallest - 1, smallest, -1
        ends[end] += move
        if not 0 <= ends[end] <= len(cost):
            break
        for j in (giver, smallest):  # summed anew: differences would round otherwise
            sizes[j] = sum(scaled[ends[j] : ends[j + 1]])
        if giver == largest:
            largest = largest_of()
            size = sizes[largest]
    for j in range(1, n):  # each block has at least one layer
        ends[j] = min(max(ends[j], ends[j - 1] + 1), len(cost) - (n - j))
    return tuple(b - a for a, b in pairwise(ends))
