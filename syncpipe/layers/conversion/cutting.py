"""Cuts what a model did into a chain of layers.

Every module that was left whole begins a layer, and so does everything that uses a parameter by
itself. Between two of these the cut is where the fewest bytes are on their way. A value that the
next layer uses is handed to it; one that is used later goes there as a skip, and from there on to
its next use, so it passes over the devices between::

    layer 0 --- x, y ---> layer 1 --- z ---> layer 2 --- z ---> layer 3
       \\----------------------- mask ----------------------/
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from torch import Tensor, nn

from syncpipe.layers.conversion.recording.compare import live
from syncpipe.layers.conversion.recording.nodes import Frame, Node, nodes_in
from syncpipe.layers.conversion.recording.recorder import Recorder
from syncpipe.tree import storage_of

__all__ = ["Piece", "cut"]

#: What is not handed from layer to layer: every layer that uses it has it.
_OWNED = ("attribute", "constant")


@dataclass
class Piece:
    """One layer, before it is one.

    Attributes:
        nodes: what it does, in order.
        takes: what the layer before hands to it.
        gives: what it hands to the next one; None for the last one, which gives the output.
        pops: what comes to it as a skip, with the name of the skip.
        stashes: what it sends on as a skip, likewise.
    """

    nodes: list[Node]
    takes: list[Node] = field(default_factory=list)
    gives: list[Node] | None = field(default_factory=list)
    pops: list[tuple[str, Node]] = field(default_factory=list)
    stashes: list[tuple[str, Node]] = field(default_factory=list)

    @property
    def given(self) -> list[Node]:
        """All that it gives, but for the output."""
        return [*(self.gives or ()), *(node for _, node in self.stashes)]


def cut(recording: Recorder, model: nn.Module) -> list[Piece]:
    """Cuts a recording into layers, as many as there can be."""
    nodes = _in_order(recording)
    place = {node: p for p, node in enumerate(nodes)}
    last_use: dict[Node, int] = {}
    for p, node in enumerate(nodes):
        last_use.update(dict.fromkeys((used for used in node.inputs if used in place), p))
    returned = [node for node in nodes_in(recording.output) if node in place]
    last_use.update(dict.fromkeys(returned, len(nodes)))
    crossing = _bytes_crossing(nodes, place, last_use)
    banned = _banned(nodes, place, last_use)
    starts = [p for p, node in enumerate(nodes) if _begins(node, model)]
    cuts = [0]
    for before, after in pairwise(starts):
        allowed = [p for p in range(before + 1, after + 1) if p not in banned]
        if allowed:
            cuts.append(min(allowed, key=lambda p: (crossing[p], p)))
    pieces = [Piece(nodes[a:b]) for a, b in zip(cuts, [*cuts[1:], len(nodes)], strict=True)]
    _connect(pieces, recording, place)
    return pieces


def _in_order(recording: Recorder) -> list[Node]:
    """The nodes that count, one after another, the inputs first."""
    needed = live(recording)

    def walk(frame: Frame) -> list[Node]:
        found: list[Node] = []
        for entry in frame.entries:
            if isinstance(entry, Frame):
                found += walk(entry)
            elif entry in needed:
                found += _with_items(entry)
        return found

    def _with_items(node: Node) -> list[Node]:
        found = [node]
        for item in node.items:
            if item in needed:
                found += _with_items(item)
        return found

    return [node for node in recording.inputs if node in needed] + walk(recording.frame)


def _begins(node: Node, model: nn.Module) -> bool:
    """Whether a layer may begin here."""
    if node.kind == "module":
        module = model.get_submodule(node.target)
        return not node.writes or next(module.parameters(), None) is not None
    return any(
        used.kind == "attribute" and isinstance(used.value, nn.Parameter) for used in node.inputs
    )


def _bytes_crossing(
    nodes: list[Node], place: dict[Node, int], last_use: dict[Node, int]
) -> list[int]:
    """For each place in the list how many bytes a cut before it has on their way."""
    change = [0] * (len(nodes) + 2)
    for node in nodes:
        if node in last_use and node.kind not in _OWNED:
            size = node.value.nbytes if isinstance(node.value, Tensor) else 1
            change[place[node] + 1] += size
            change[last_use[node] + 1] -= size
    total, found = 0, []
    for step in change:
        total += step
        found.append(total)
    return found


def _banned(nodes: list[Node], place: dict[Node, int], last_use: dict[Node, int]) -> set[int]:
    """Where no cut may be: memory that is written there is used under another name later.

    On another device that would be a copy, which does not see what is written.
    """
    banned: set[int] = set()
    memory: dict[int, list[Node]] = {}
    for node in nodes:
        if isinstance(node.value, Tensor):
            memory.setdefault(storage_of(node.value), []).append(node)
    for p, node in enumerate(nodes):
        if not node.writes:
            continue
        targets = [used.value for used in node.inputs if isinstance(used.value, Tensor)]
        for alias in {a for t in targets for a in memory.get(storage_of(t), [])}:
            if place[alias] < p < last_use.get(alias, 0):
                banned.update(range(place[alias] + 1, p + 1))
    return banned


def _connect(pieces: list[Piece], recording: Recorder, place: dict[Node, int]) -> None:
    """Finds out what goes from which layer to which."""
    home = {node: k for k, piece in enumerate(pieces) for node in piece.nodes}
    uses: dict[Node, list[int]] = {}
    for k, piece in enumerate(pieces):
        inputs = [used for node in piece.nodes for used in node.inputs]
        if k == len(pieces) - 1:
            inputs += nodes_in(recording.output)
        for used in inputs:
            if used in home and (not uses.get(used) or uses[used][-1] != k) and home[used] != k:
                uses.setdefault(used, []).append(k)
    for node in sorted(uses, key=place.__getitem__):
        at = home[node]
        for k in uses[node]:
            if k == at + 1:
                gives = pieces[at].gives
                assert gives is not None
                gives.append(node)
                pieces[k].takes.append(node)
            else:
                pieces[at].stashes.append((f"{place[node]}@{k}", node))
                pieces[k].pops.append((f"{place[node]}@{k}", node))
            at = k
    pieces[-1].gives = None
