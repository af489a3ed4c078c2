"""Cuts what a model does into a chain of segments, and writes the code of each: the layers.

Every leaf module begins a segment, and so does everything that uses a parameter by itself. Between
two of these the cut is where the fewest bytes are on their way. A value that the next segment uses
is handed to it; one that is used later goes there as a skip, and from there on to its next use, so
it passes over the devices between::

    layer 0 --- x, y ---> layer 1 --- z ---> layer 2 --- z ---> layer 3
       \\----------------------- mask ----------------------/

Training and evaluation are cut at the same leaf modules. What one of them does more, in an
``if self.training``, is in the segment around it, and a value that one of them does not have is an
Ellipsis there.
"""

from __future__ import annotations

import builtins
import keyword
from collections.abc import Iterator
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.graph import _custom_builtins

from syncpipe.data import storage_of
from syncpipe.layers.conversion.trace import (
    DEVICE,
    Call,
    Function,
    Tracer,
    leaves_of,
    map_tree,
    nodes_of,
)

__all__ = ["Code", "Segment", "Value", "code_of", "segments"]

_grad_off = Function(torch._C._set_grad_enabled, "set_grad_enabled")
_grad_now = Function(torch.is_grad_enabled, "is_grad_enabled")

#: Names that arguments cannot have in generated code.
_TAKEN = {*dir(builtins), *keyword.kwlist, *_custom_builtins, "self"}
#: A value: its node in training, and that in evaluation; None where it is not there.
Value = tuple[fx.Node | None, fx.Node | None]


@dataclass
class Segment:
    """What a layer does, takes and gives.

    Attributes:
        nodes: what it does, in order: in training, and in evaluation.
        takes: what the segment before hands to it; of the first one the inputs of the model.
        gives: what it hands to the next one; None for the last one, which gives the output.
        pops: what comes to it as a skip, with the name of the skip.
        stashes: what it sends on as a skip, likewise.
    """

    nodes: list[list[fx.Node]]
    takes: list[Value] = field(default_factory=list)
    gives: list[Value] | None = field(default_factory=list)
    pops: list[tuple[str, Value]] = field(default_factory=list)
    stashes: list[tuple[str, Value]] = field(default_factory=list)


@dataclass
class Code:
    """The code of a segment in one mode: a function of what it takes and pops.

    Attributes:
        text: of the function.
        known: what it uses by a name.
        attributes: what it uses as attributes of the layer, and the model does not have.
        needed: the places of its arguments that only this mode has, and that it uses.
    """

    text: str
    known: dict[str, Any]
    attributes: dict[str, Any]
    needed: list[int]


class _Run:
    """One trace, as a list of nodes that may be cut."""

    def __init__(self, trace: Tracer, model: nn.Module) -> None:
        live = trace.live
        self.nodes = [n for n in [*trace.inputs, *trace.root.nodes()] if n in live]
        self.place = {node: p for p, node in enumerate(self.nodes)}
        self.outputs = [node for node in nodes_of(trace.output) if node in self.place]
        last_use: dict[fx.Node, int] = {}
        for p, node in enumerate(self.nodes):
            last_use |= dict.fromkeys((u for u in node.all_input_nodes if u in self.place), p)
        last_use |= dict.fromkeys(self.outputs, len(self.nodes))
        self.bytes = self._bytes_crossing(last_use)
        self.banned = self._banned(last_use)
        self.starts = [node for node in self.nodes if _begins(node, model)]

    def cut(self, before: fx.Node, after: fx.Node) -> int | None:
        """The best place for a cut behind one node and not behind another; None: there is none."""
        places = range(self.place[before] + 1, self.place[after] + 1)
        allowed = [p for p in places if p not in self.banned]
        return min(allowed, key=lambda p: (self.bytes[p], p)) if allowed else None

    def _bytes_crossing(self, last_use: dict[fx.Node, int]) -> list[int]:
        """For each place in the list how many bytes a cut before it has on their way."""
        found = [0] * (len(self.nodes) + 2)
        for node, last in last_use.items():
            inside = [leaf for leaf in leaves_of(node.meta["value"]) if isinstance(leaf, Tensor)]
            size = max(1, sum(tensor.nbytes for tensor in inside))
            for p in range(self.place[node] + 1, last + 1):
                found[p] += size
        return found

    def _banned(self, last_use: dict[fx.Node, int]) -> set[int]:
        """Where no cut may be: memory that is written there is used under another name later.

        On another device that would be a copy, which does not see what is written.
        """
        banned: set[int] = set()
        memory: dict[int, list[fx.Node]] = {}
        for node in self.nodes:
            if isinstance(node.meta["value"], Tensor):
                memory.setdefault(storage_of(node.meta["value"]), []).append(node)
        for p, node in enumerate(self.nodes):
            values = [used.meta["value"] for used in node.all_input_nodes if node.meta["writes"]]
            written = {storage_of(value) for value in values if isinstance(value, Tensor)}
            for alias in {a for number in written for a in memory.get(number, [])}:
                if self.place[alias] < p < last_use.get(alias, 0):
                    banned.update(range(self.place[alias] + 1, p + 1))
        return banned


def _begins(node: fx.Node, model: nn.Module) -> bool:
    """Whether a segment may begin here."""
    if node.op == "call_module":
        module = model.get_submodule(str(node.target))
        return not node.meta["writes"] or next(module.parameters(), None) is not None
    return any(isinstance(used.meta["value"], nn.Parameter) for used in node.all_input_nodes)


def segments(training: Tracer, evaluation: Tracer, model: nn.Module) -> list[Segment]:
    """Cuts what a model does into segments, as many as there can be."""
    runs = [_Run(training, model), _Run(evaluation, model)]
    twins = dict(_twins(training.root, evaluation.root))
    twins.update(zip(training.inputs, evaluation.inputs, strict=True))
    begins = set(runs[1].starts)
    starts = [(node, twins[node]) for node in runs[0].starts if twins.get(node) in begins]
    cuts: list[list[int]] = [[0, 0]]
    for before, after in pairwise(starts):
        places = [run.cut(a, b) for run, a, b in zip(runs, before, after, strict=True)]
        if None not in places:
            cuts.append(places)  # type: ignore[arg-type]
    cuts.append([len(run.nodes) for run in runs])
    found = [
        Segment([run.nodes[a:b] for run, a, b in zip(runs, start, end, strict=True)])
        for start, end in pairwise(cuts)
    ]
    _connect(found, runs, twins)
    found[0].takes = list(zip(training.inputs, evaluation.inputs, strict=True))
    return found


def _twins(a: Call, b: Call) -> Iterator[tuple[fx.Node, fx.Node]]:
    """What two runs both do: pairs of nodes, in order."""

    def names(call: Call) -> list[str]:
        return [e.owner if isinstance(e, Call) else f"{e.op} {e.target!r}" for e in call.entries]

    for i, j, size in SequenceMatcher(None, names(a), names(b), False).get_matching_blocks():
        for k in range(size):
            one, two = a.entries[i + k], b.entries[j + k]
            if isinstance(one, Call) and isinstance(two, Call):
                yield from _twins(one, two)
            elif isinstance(one, fx.Node) and isinstance(two, fx.Node):
                yield one, two


def _connect(found: list[Segment], runs: list[_Run], twins: dict[fx.Node, fx.Node]) -> None:
    """Finds out what goes from which segment to which."""
    home = {node: k for k, segment in enumerate(found) for nodes in segment.nodes for node in nodes}
    values: dict[fx.Node, Value] = {}
    for a, b in twins.items():
        if home.get(a, -1) == home.get(b, -2):
            values[a] = values[b] = (a, b)
    for m, run in enumerate(runs):
        for node in run.nodes:
            values.setdefault(node, (None, node) if m else (node, None))
    uses: dict[Value, set[int]] = {value: set() for value in values.values()}
    for node, k in home.items():
        for used in node.all_input_nodes:
            if home.get(used, k) != k:
                uses[values[used]].add(k)
    for node in (node for run in runs for node in run.outputs):
        if home[node] != len(found) - 1:
            uses[values[node]].add(len(found) - 1)
    found[-1].gives = None
    for number, (value, segments) in enumerate(uses.items()):
        at = home[value[0] or value[1]]  # type: ignore[index]
        for k in sorted(segments):
            gives = found[at].gives
            if k == at + 1 and gives is not None:
                gives.append(value)
                found[k].takes.append(value)
            else:
                found[at].stashes.append((f"{number}@{k}", value))
                found[k].pops.append((f"{number}@{k}", value))
            at = k


def code_of(segment: Segment, mode: int, output: Any) -> Code:
    """The code of a segment. Names are dropped after their last use.

    Args:
        segment: a segment.
        mode: 0 for training, 1 for evaluation.
        output: what the model gives then, as the last segment does.
    """
    graph, known = fx.Graph(), dict[fx.Node, fx.Node]()
    attributes: dict[str, Any] = {}
    device: list[fx.Node] = []
    arguments = [*segment.takes, *(value for _, value in segment.pops)]
    functions = [node.target for nodes in segment.nodes for node in nodes]
    taken = {*_TAKEN, *(fn.__name__ for fn in functions if isinstance(fn, Function))}
    for k, value in enumerate(arguments):
        name = next(node.meta["name"] for node in value if node is not None)
        name = f"{name}_{k}" if name in taken else name
        taken.add(name)
        argument = graph.placeholder(name)
        if (own := value[mode]) is not None:
            known[own] = argument

    def here(leaf: Any) -> Any:
        if isinstance(leaf, fx.Node):
            if leaf not in known:  # a parameter, a buffer or a constant
                known[leaf] = graph.get_attr(str(leaf.target))
                if leaf.meta["key"][0] == "object":
                    attributes[str(leaf.target)] = leaf.meta["value"]
            return known[leaf]
        if leaf is DEVICE:
            given = next((n for n in known if isinstance(n.meta["value"], Tensor)), None)
            if given is not None and not device:
                device.append(graph.call_function(getattr, (known[given], "device")))
            return device[0] if device else leaf
        return leaf

    def add(op: str, target: Any, args: Any, kwargs: Any, name: str | None) -> fx.Node:
        return graph.create_node(op, target, args, kwargs, name)

    grad: fx.Node | None = None
    for node in segment.nodes[mode]:
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
        known[node] = add(node.op, node.target, args, kwargs, node.meta["name"])
    if grad is not None:
        graph.call_function(_grad_off, (grad,))
    if segment.gives is None:
        graph.output(map_tree(here, output))
    else:
        given = [*segment.gives, *(value for _, value in segment.stashes)]
        values: list[Any] = [... if v[mode] is None else here(v[mode]) for v in given]
        graph.output(tuple(values))
    written = graph.python_code("self")
    own_names = {n: v for n, v in written.globals.items() if n not in _custom_builtins}
    needed = [
        k for k, value in enumerate(arguments)
        if value[1 - mode] is None and known[value[mode]].users  # type: ignore[index]
    ]  # fmt: skip
    return Code(written.src.strip() + "\n", own_names, attributes, needed)
