"""Peers: who can take part, and whether they do what the plain loop does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from benchmarks.common import Outcome, Part, gradients, number
from benchmarks.peers.libraries import (
    LIBRARIES,
    WHOLE,
    Peer,
    Task,
    missing,
    plain,
    theirs,
)

#: How far gradients may be from the plain loop's, see ``distance``. A deep network with BatchNorm
#: makes a rounding error a million to a thousand million times as large: in single precision that
#: would hide any mistake, in double precision it hides none.
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3}


@dataclass
class Field:
    """Who takes part, and what has been found out about them.

    Attributes:
        task: what all of them train.
        part: where it is reported.
        peers: those that agree with the plain loop, which is the first.
        extra: columns by label of the peer.
        jobs: to be measured besides, by label, with what stands in their rows.
    """

    task: Task
    part: Part
    peers: list[Peer] = field(default_factory=list)
    extra: dict[str, dict[str, Any]] = field(default_factory=dict)
    jobs: dict[str, tuple[dict[str, str], Callable[[], float]]] = field(default_factory=dict)


def gathered(
    task: Task, part: Part, own: Iterable[Peer], device: torch.device, modes: Sequence[str]
) -> Field:
    """All that run here and give what the plain loop gives; notes about the others.

    Args:
        task: what is trained.
        part: where notes go.
        own: our own peers.
        device: for all partitions of the older libraries.
        modes: of re-materialization that these are tried with.

    Raises:
        SystemExit: one of our own gives something else.
    """
    found, far = Field(task, part), [0.0]
    small = task.small()
    task.model.double()
    try:
        peers = plain(task)
        small.step(peers[0])
        expected = outcome(small, peers[0])
        found.peers.append(peers[0])
        # BatchNorm on the whole mini-batch is another function, right as it is.
        norms = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in task.model.modules())
        if norms:
            found.peers.append(peers[1])
            note = f"'{WHOLE}' is not checked: its BatchNorm sees the whole mini-batch."
            tell(part, note)
        for peer in [*([] if norms else peers[1:]), *own]:
            far.append(distance(outcome(small, peer), expected))
            why = too_far(far[-1], expected)
            if why is not None:
                raise SystemExit(f"{peer.label}: {why}; nothing measured")
            found.peers.append(peer)
        for library in LIBRARIES:
            agreeing = _older(small, part, library, device, modes, expected)
            found.peers += [peer for peer, _ in agreeing]
            far += [gap for _, gap in agreeing]
    finally:
        task.model.float()
        task.model.zero_grad()
    tell(
        part,
        "First each of them was seen to leave the plain loop's loss and gradients, in double "
        f"precision and on one sample in each micro-batch: all to within {number(max(far))} of "
        f"their norm ({TOLERANCE[torch.float64]:.0e} was allowed; it is rounding).",
    )
    return found


def _older(
    small: Task,
    part: Part,
    library: str,
    device: torch.device,
    modes: Sequence[str],
    expected: Outcome,
) -> list[tuple[Peer, float]]:
    why = missing(library)
    if why is not None:
        tell(part, f"Skipped: {library}: {why}.")
        return []
    agreeing = []
    try:
        for peer in theirs(small, library, device, modes):
            gap = distance(outcome(small, peer), expected)
            why = too_far(gap, expected)
            if why is None:
                agreeing.append((peer, gap))
            else:
                tell(part, f"Not measured: {peer.label}: {why}.")
    except (Exception, SystemExit) as error:  # theirs, not ours; without a gradient is an exit
        first = (str(error).splitlines() or [""])[0]
        tell(part, f"Not measured: {library} does not run here: {type(error).__name__}: {first}")
    return agreeing


def outcome(task: Task, peer: Peer) -> Outcome:
    """What a training step leaves."""
    loss = task.step(peer)
    return loss, gradients(task.model)


def too_far(gap: float, expected: Outcome) -> str | None:
    """Whether a distance is more than rounding, in words."""
    if gap <= TOLERANCE[expected[1][0].dtype]:
        return None
    return f"its gradients are not the plain loop's (distance {gap:.1g})"


def distance(got: Outcome, expected: Outcome) -> float:
    """The largest distance of the loss or a gradient, relative to the norm that it should have.

    A tensor whose norm is less than a thousandth of the largest one is measured by that instead:
    it may be zero but for rounding.
    """
    pairs = list(zip([got[0], *got[1]], [expected[0], *expected[1]], strict=True))
    norms = [float(wanted.norm()) for _, wanted in pairs]
    least = 1e-3 * max(norms)
    if any(found.shape != wanted.shape for found, wanted in pairs) or not least > 0:
        return float("inf")
    gaps = [float((found - wanted).norm()) for found, wanted in pairs]
    far = [gap / max(norm, least) for gap, norm in zip(gaps, norms, strict=True)]
    return float("inf") if any(gap != gap for gap in far) else max(far)


def threads_seen(task: Task, peer: Peer) -> str:
    """The intra-op threads of each thread that ran a layer in a step."""
    seen: dict[int, int] = {}

    def look(*_: object) -> None:
        seen[threading.get_ident()] = torch.get_num_threads()

    hooks = [layer.register_forward_pre_hook(look) for layer in task.model]
    try:
        task.step(peer)
    finally:
        for hook in hooks:
            hook.remove()
    return " + ".join(map(str, sorted(seen.values())))


def tell(part: Part, note: str) -> None:
    """Adds a note, once."""
    if note not in part.notes:
        part.notes.append(note)
