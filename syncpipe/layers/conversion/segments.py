"""Cuts a trace into a chain of segments, and writes the code of each: these are the layers.

Every leaf module begins a segment, and so does everything that uses a parameter by itself. Between
two of these the cut is where the fewest bytes are on their way. A value that the next segment uses
is handed to it; one that is used later goes there as a skip, and from there on to its next use, so
it passes over the devices between::

    layer 0 --- x, y ---> layer 1 --- z ---> layer 2 --- z ---> layer 3
       \\----------------------- mask ----------------------/
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.graph import _custom_builtins

from syncpipe.data import storage_of
from syncpipe.layers.conversion.leaves import live, nodes_of
from syncpipe.layers.conversion.trace import (
    DEVICE,
    Function,
    Text,
    Tracer,
    guard,
    leaves_of,
    map_tree,
)

__all__ = ["Segment", "code_of", "segments"]

_grad_off = Function(torch._C._set_grad_enabled, "set_grad_enabled")
_grad_now = Function(torch.is_grad_enabled, "is_grad_enabled")


@dataclass
class Segment:
    """What a layer does, takes and gives.

    Attributes:
        nodes: what it does, in order.
        takes: what the segment before hands to it; of the first one the inputs of the model.
        gives: what it hands to the next one; None for the last one, which gives the output.
        pops: what comes to it as a skip, with the name of the skip.
        stashes: what it sends on as a skip, likewise.
    """

    nodes: list[fx.Node]
    takes: list[fx.Node] = field(default_factory=list)
    gives: list[fx.Node] | None = field(default_factory=list)
    pops: list[tuple[str, fx.Node]] = field(default_factory=list)
    stashes: list[tuple[str, fx.Node]] = field(default_factory=list)

    @property
    def given(self) -> list[fx.Node]:
        """All that it gives, but for the output."""
        return [*(self.gives or ()), *(node for _, node in self.stashes)]


def segments(trace: Tracer, model: nn.Module) -> list[Segment]:
    """Cuts a trace into segments, as many as there can be."""
    needed = live(trace)
    nodes = [node for node in [*trace.inputs, *trace.root.nodes()] if node in needed]
    place = {node: p for p, node in enumerate(nodes)}
    last_use: dict[fx.Node, int] = {}
    for p, node in enumerate(nodes):
        last_use.update(dict.fromkeys((used for used in node.all_input_nodes if used in place), p))
    last_use.update({node: len(nodes) for node in nodes_of(trace.output) if node in place})
    crossing = _bytes_crossing(nodes, place, last_use)
    banned = _banned(nodes, place, last_use)
    starts = [p for p, node in enumerate(nodes) if _begins(node, model)]
    cuts = [0]
    for before, after in pairwise(starts):
        allowed = [p for p in range(before + 1, after + 1) if p not in banned]
        if allowed:
            cuts.append(min(allowed, key=lambda p: (crossing[p], p)))
    found = [Segment(nodes[a:b]) for a, b in zip(cuts, [*cuts[1:], len(nodes)], strict=True)]
    _connect(found, trace, place)
    return found


def _begins(node: fx.Node, model: nn.Module) -> bool:
    """Whether a segment may begin here."""
    if node.op == "call_module":
        module = model.get_submodule(str(node.target))
        return not node.meta["writes"] or next(module.parameters(), None) is not None
    return any(isinstance(used.meta["value"], nn.Parameter) for used in node.all_input_nodes)


def _bytes_crossing(
    nodes: list[fx.Node], place: dict[fx.Node, int], last_use: dict[fx.Node, int]
) -> list[int]:
    """For each place in the list how many bytes a cut before it has on their way."""
    change = [0] * (len(nodes) + 2)
    for node, last in last_use.items():
        inside = [leaf for leaf in leaves_of(node.meta["value"]) if isinstance(leaf, Tensor)]
        size = max(1, sum(tensor.nbytes for tensor in inside))
        change[place[node] + 1] += size
        change[last + 1] -= size
    total, found = 0, []
    for step in change:
        total += step
        found.append(total)
    return found


def _banned(
    nodes: list[fx.Node], place: dict[fx.Node, int], last_use: dict[fx.Node, int]
) -> set[int]:
    """Where no cut may be: memory that is written there is used under another name later.

    On another device that would be a copy, which does not see what is written.
    """
    banned: set[int] = set()
    memory: dict[int, list[fx.Node]] = {}
    for node in nodes:
        if isinstance(node.meta["value"], Tensor):
            memory.setdefault(storage_of(node.meta["value"]), []).append(node)
    for p, node in enumerate(nodes):
        if not node.meta.get("writes"):
            continue
        values = [used.meta["value"] for used in node.all_input_nodes]
        written = {storage_of(value) for value in values if isinstance(value, Tensor)}
        for alias in {a for number in written for a in memory.get(number, [])}:
            if place[alias] < p < last_use.get(alias, 0):
                banned.update(range(place[alias] + 1, p + 1))
    return banned


def _connect(found: list[Segment], trace: Tracer, place: dict[fx.Node, int]) -> None:
    """Finds out what goes from which segment to which."""
    home = {node: k for k, segment in enumerate(found) for node in segment.nodes}
    uses: dict[fx.Node, list[int]] = {}
    for k, segment in enumerate(found):
        inputs = [used for node in segment.nodes for used in node.all_input_nodes]
        if k == len(found) - 1:
            inputs += nodes_of(trace.output)
        for used in inputs:
            if used in home and (not uses.get(used) or uses[used][-1] != k) and home[used] != k:
                uses.setdefault(used, []).append(k)
    for node in sorted(uses, key=place.__getitem__):
        at = home[node]
        for k in uses[node]:
            gives = found[at].gives
            if k == at + 1 and gives is not None:
                gives.append(node)
                found[k].takes.append(node)
            else:
                found[at].stashes.append((f"{place[node]}@{k}", node))
                found[k].pops.append((f"{place[node]}@{k}", node))
            at = k
    found[0].takes = list(trace.inputs)
    found[-1].gives = None


def code_of(segment: Segment, output: Any) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    """The code of a segment: a function of what it takes and pops.

    Names are dropped after their last use.

    Args:
        segment: a segment.
        output: what the model gives, as the last segment does.

    Returns:
        The code, objects that it uses by a name, and tensors that it uses as attributes of the
        layer.
    """
    graph, known = fx.Graph(), dict[fx.Node, fx.Node]()
    objects: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    device: list[fx.Node] = []
    for node in [*segment.takes, *(node for _, node in segment.pops)]:
        known[node] = graph.placeholder(node.name)

    def here(leaf: Any) -> Any:
        if isinstance(leaf, fx.Node):
            if leaf not in known:  # a parameter, a buffer or a constant
                known[leaf] = graph.get_attr(str(leaf.target))
                if leaf.meta["key"][0] == "constant":
                    tensors[str(leaf.target)] = leaf.meta["value"]
            return known[leaf]
        if leaf is DEVICE:
            given = next((n for n in known if isinstance(n.meta["value"], Tensor)), None)
            if given is not None and not device:
                device.append(graph.call_function(getattr, (known[given], "device")))
            return device[0] if device else leaf
        if isinstance(leaf, Text):
            objects.update(leaf.values)
        return leaf

    grad: fx.Node | None = None
    for node in segment.nodes:
        if node.op == "placeholder":
            continue
        if node.meta["grad"] is (grad is not None):
            if grad is None:
                grad = graph.call_function(_grad_now)
                graph.call_function(_grad_off, (False,))
            else:
                graph.call_function(_grad_off, (grad,))
                grad = None
        args, kwargs = map_tree(here, (node.args, node.kwargs))
        if node.target is guard:
            args = (args[0], *node.args[1:])
        known[node] = graph.create_node(node.op, node.target, args, kwargs, node.name)
    if grad is not None:
        graph.call_function(_grad_off, (grad,))
    graph.output(map_tree(here, output if segment.gives is None else tuple(segment.given)))
    written = graph.python_code("self")
    own = {name: v for name, v in written.globals.items() if name not in _custom_builtins}
    return written.src.strip() + "\n", {**own, **objects}, tensors
