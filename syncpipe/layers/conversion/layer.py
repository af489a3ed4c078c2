"""Cuts what a model does into a chain of segments, and makes layers of them.

Every leaf module begins a segment, and so does everything that uses a parameter by itself. Between
two of these the cut is where the fewest bytes are on their way. A value that the next segment uses
is handed to it; one that is used later goes there as a skip, and from there on to its next use, so
it passes over the devices between::

    layer 0 --- x, y ---> layer 1 --- z ---> layer 2 --- z ---> layer 3
       \\----------------------- mask ----------------------/

Training and evaluation are cut at the same leaf modules. What one of them does more, in an
``if self.training``, is in the segment around it, and a value that one of them does not have is an
Ellipsis there.

A layer holds modules of the model at their paths, so that names are the model's::

    held by layer 3                 3 / transformer.h.0.ln_1.weight
    state_dict, named_parameters        transformer.h.0.ln_1.weight, in the order of the model
"""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from itertools import pairwise
from math import inf
from textwrap import indent
from typing import Any, Self

import torch
from torch import Tensor, fx, nn
from torch.fx.graph import _custom_builtins

from syncpipe.data import storage_of
from syncpipe.layers.conversion.signature import Signature
from syncpipe.layers.conversion.trace import (
    DEVICE,
    Function,
    Tracer,
    leaves_of,
    map_tree,
    nodes_of,
)
from syncpipe.skip import Namespace, store
from syncpipe.skip.skippable import Declaration

__all__ = ["ConvertedLayer", "Holder", "ModelNames", "index_keys", "layers_of"]

_grad_off = Function(torch._C._set_grad_enabled, "set_grad_enabled")
_grad_now = Function(torch.is_grad_enabled, "is_grad_enabled")
#: Names that arguments cannot have in generated code.
_TAKEN = {*dir(builtins), *keyword.kwlist, *_custom_builtins, "self"}
_FLOATS = ("torch.float16", "torch.bfloat16", "torch.float32", "torch.float64")
#: A value: its node in training, and that in evaluation; None where it is not there.
_Value = tuple[fx.Node | None, fx.Node | None]
#: A function of what a segment takes and pops, and what it uses by a name.
_Code = tuple[str, dict[str, Any]]


@dataclass
class _Segment:
    """What a layer does in each mode, takes and gives, and gets and sends as skips by name.

    The first one takes the inputs of the model; the last one gives its output, not a value.
    """

    nodes: list[list[fx.Node]]
    takes: list[_Value] = field(default_factory=list)
    gives: list[_Value] | None = field(default_factory=list)
    pops: dict[str, _Value] = field(default_factory=dict)
    stashes: dict[str, _Value] = field(default_factory=dict)


def layers_of(
    model: nn.Module, training: Tracer, evaluation: Tracer, signature: Signature
) -> list[ConvertedLayer]:
    """The layers of a model, as many as there can be, that do what two traces say."""
    segments, namespace = _segments(training, evaluation, model), Namespace()
    outputs = [training.output, evaluation.output]
    layers = [
        ConvertedLayer(segment, outputs, namespace, None if k else signature)
        for k, segment in enumerate(segments)
    ]
    _distribute(model, layers, segments)
    return layers


# Cutting


class _Run:
    """One trace as a list of nodes, and for each place in it what a cut before it costs.

    That is the bytes on their way. No cut may be where memory is written that is used under another
    name later: on another device that would be a copy, which does not see what is written.
    """

    def __init__(self, trace: Tracer, model: nn.Module) -> None:
        live = trace.live
        self.nodes = [n for n in [*trace.inputs, *trace.nodes] if n in live]
        self.place = {node: p for p, node in enumerate(self.nodes)}
        self.outputs = [node for node in nodes_of(trace.output) if node in self.place]
        self.starts = [node for node in self.nodes if _begins(node, model)]
        last_use: dict[fx.Node, int] = {}
        for p, node in enumerate(self.nodes):
            last_use |= dict.fromkeys((u for u in node.all_input_nodes if u in self.place), p)
        last_use |= dict.fromkeys(self.outputs, len(self.nodes))
        self.costs = [0.0] * (len(self.nodes) + 2)
        memory: dict[int, list[fx.Node]] = {}
        for p, node in enumerate(self.nodes):
            tensors = [t for t in leaves_of(node.meta["value"]) if isinstance(t, Tensor)]
            for place in range(p + 1, last_use.get(node, 0) + 1):
                self.costs[place] += max(1, sum(tensor.nbytes for tensor in tensors))
            if isinstance(node.meta["value"], Tensor):
                memory.setdefault(storage_of(node.meta["value"]), []).append(node)
        for p, node in enumerate(self.nodes):
            values = [used.meta["value"] for used in node.all_input_nodes if node.meta["writes"]]
            for number in {storage_of(value) for value in values if isinstance(value, Tensor)}:
                for alias in memory.get(number, []):
                    if self.place[alias] < p < last_use.get(alias, 0):
                        places = range(self.place[alias] + 1, p + 1)
                        self.costs[places.start : places.stop] = [inf] * len(places)

    def cut(self, before: fx.Node, after: fx.Node) -> int | None:
        """The best place for a cut behind one node and not behind another, if there is one."""
        places = range(self.place[before] + 1, self.place[after] + 1)
        best = min(places, key=self.costs.__getitem__)
        return best if self.costs[best] < inf else None


def _begins(node: fx.Node, model: nn.Module) -> bool:
    """Whether a segment may begin here."""
    if node.op == "call_module":
        module = model.get_submodule(str(node.target))
        return not node.meta["writes"] or next(module.parameters(), None) is not None
    return any(isinstance(used.meta["value"], nn.Parameter) for used in node.all_input_nodes)


def _segments(training: Tracer, evaluation: Tracer, model: nn.Module) -> list[_Segment]:
    runs = [_Run(training, model), _Run(evaluation, model)]
    inputs = list(zip(training.inputs, evaluation.inputs, strict=True))
    twins = dict([*_twins(training, evaluation), *inputs])
    begins = set(runs[1].starts)
    starts = [(node, twins[node]) for node in runs[0].starts if twins.get(node) in begins]
    cuts: list[list[int]] = [[0, 0]]
    for before, after in pairwise(starts):
        places = [run.cut(a, b) for run, a, b in zip(runs, before, after, strict=True)]
        if None not in places:
            cuts.append(places)  # type: ignore[arg-type]
    cuts.append([len(run.nodes) for run in runs])
    found = [
        _Segment([run.nodes[a:b] for run, a, b in zip(runs, start, end, strict=True)])
        for start, end in pairwise(cuts)
    ]
    _connect(found, runs, twins)
    found[0].takes = [*inputs]
    return found


def _twins(a: Tracer, b: Tracer) -> Iterator[tuple[fx.Node, fx.Node]]:
    """What two runs both do: pairs of nodes, in order."""
    runs = a.nodes, b.nodes
    one, two = ([f"{n.meta['owner']} {n.op} {n.target!r}" for n in run] for run in runs)
    for i, j, size in SequenceMatcher(None, one, two, False).get_matching_blocks():
        yield from zip(runs[0][i : i + size], runs[1][j : j + size], strict=True)


def _connect(found: list[_Segment], runs: list[_Run], twins: dict[fx.Node, fx.Node]) -> None:
    """Finds out what goes from which segment to which."""
    last = len(found) - 1
    home = {node: k for k, segment in enumerate(found) for nodes in segment.nodes for node in nodes}
    values: dict[fx.Node, _Value] = {}
    for a, b in twins.items():
        if home.get(a, -1) == home.get(b, -2):
            values[a] = values[b] = (a, b)
    for m, run in enumerate(runs):
        for node in run.nodes:
            values.setdefault(node, (None, node) if m else (node, None))
    uses: dict[_Value, set[int]] = {value: set() for value in values.values()}
    used = [(used, k) for node, k in home.items() for used in node.all_input_nodes]
    for node, k in [*used, *((node, last) for run in runs for node in run.outputs)]:
        if home.get(node, k) != k:
            uses[values[node]].add(k)
    found[last].gives = None
    for number, (value, segments) in enumerate(uses.items()):
        at = home[value[0] or value[1]]  # type: ignore[index]
        for k in sorted(segments):
            gives = found[at].gives
            if k == at + 1 and gives is not None:
                gives.append(value)
                found[k].takes.append(value)
            else:
                found[at].stashes[f"{number}@{k}"] = found[k].pops[f"{number}@{k}"] = value
            at = k


# Writing


def _written(segment: _Segment, mode: int, output: Any, layer: nn.Module) -> _Code:
    """The code of a segment in one mode (0: training). Names are dropped after their last use.

    What it uses as attributes of the layer that the model does not have is put there.
    """
    graph, known = fx.Graph(), dict[fx.Node, fx.Node]()
    device: list[fx.Node] = []
    arguments = [*segment.takes, *segment.pops.values()]
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
                    name, value = str(leaf.target), leaf.meta["value"]
                    if isinstance(value, Tensor):
                        layer.register_buffer(name, value, persistent=False)
                    else:
                        layer.__dict__[name] = value
            return known[leaf]
        if leaf is DEVICE:
            given = next((n for n in known if isinstance(n.meta["value"], Tensor)), None)
            if given is not None and not device:
                device.append(graph.call_function(getattr, (known[given], "device")))
            return device[0] if device else leaf
        return leaf

    before: fx.Node | None = None  # whether gradients were on, while they are off
    for node in segment.nodes[mode]:
        if node.op == "placeholder":
            continue
        if before is None and not node.meta["grad"]:
            before = graph.call_function(_grad_now)
            graph.call_function(_grad_off, (False,))
        elif before is not None and node.meta["grad"]:
            graph.call_function(_grad_off, (before,))
            before = None
        args, kwargs = map_tree(here, (node.args, node.kwargs))
        known[node] = graph.create_node(node.op, node.target, args, kwargs, node.meta["name"])
    if before is not None:
        graph.call_function(_grad_off, (before,))
    if segment.gives is None:
        graph.output(map_tree(here, output))
    else:
        given = [*segment.gives, *segment.stashes.values()]
        values: list[Any] = [... if v[mode] is None else here(v[mode]) for v in given]
        graph.output(tuple(values))
    code = graph.python_code("self")
    names = {n: v for n, v in code.globals.items() if n not in _custom_builtins}
    return code.src.strip() + "\n", names


def _compiled(code: _Code) -> Callable[..., Any]:
    names = {name: each.obj for name, each in _custom_builtins.items()} | code[1]
    exec(compile(code[0], "<syncpipe.sequential>", "exec"), names)
    forward: Any = names["forward"]
    return forward  # type: ignore[no-any-return]


# Layers


class Holder(nn.Module):
    """Stands where a module of the original was that was inlined, and holds what is in it."""


class ConvertedLayer(Holder):
    """A run of modules of a model, with the code between them; ``print`` shows it.

    The modules are the model's own, at their paths. What it gives to later layers than the next
    one are skips. The first layer has the signature of the model.
    """

    def __init__(
        self,
        segment: _Segment,
        outputs: list[Any],
        namespace: Namespace,
        signature: Signature | None,
    ) -> None:
        super().__init__()
        self._signature, self._takes = signature, len(segment.takes)
        self._gives = None if segment.gives is None else len(segment.gives)
        self._syncpipe_skips = Declaration(tuple(segment.stashes), tuple(segment.pops))
        self._skip_namespaces = dict.fromkeys(self._syncpipe_skips.names, namespace)
        self._codes = [_written(segment, m, outputs[m], self) for m in (0, 1)]
        self._functions = list(map(_compiled, self._codes))
        self._retyped = False
        self._dtypes: set[torch.dtype] = set()  # of its parameters and buffers, as converted
        self._ranks: dict[str, float] = {}  # the names in the model, in order
        self.register_load_state_dict_post_hook(  # type: ignore[no-untyped-call]
            _named_as_in_the_model
        )

    @property
    def _device(self) -> torch.device:
        for tensor in (*self.parameters(), *self.buffers()):
            return tensor.device
        return torch.get_default_device()

    def forward(self, input: Any) -> Any:
        """Runs the code.

        Args:
            input: the value that the layer before hands on, a tuple of all if there is not just
                one; for the first layer the arguments of the model (a tensor, a tuple, a dict).
        """
        mode = 0 if self.training else 1
        if self._retyped:
            raise TypeError(
                "the dtype of the parameters was changed after the model was converted, and this "
                f"code has the dtype of then in it: change it first, then convert\n{self}"
            )
        if self._signature is not None:
            values: list[Any] = [*self._signature.tensors(input)]
        else:
            values = [input] if self._takes == 1 else list(input)
        namespaces = self._skip_namespaces
        for name in self._syncpipe_skips.pop:
            values.append(store.take((namespaces[name], name), self))
        graded = torch.is_grad_enabled()
        try:
            results = self._functions[mode](self, *values)
        finally:
            torch._C._set_grad_enabled(graded)
        if self._gives is None:
            return results
        for name, value in zip(self._syncpipe_skips.stash, results[self._gives :], strict=True):
            store.put((namespaces[name], name), value, self)
        return results[0] if self._gives == 1 else results[: self._gives]

    def hold(self, path: str, value: nn.Module | Tensor, *, persistent: bool = True) -> None:
        """Registers a module, parameter or buffer of the original at its path."""
        at: Any = self
        *way, name = path.split(".")
        for part in way:
            at = at._modules.setdefault(part, Holder())
        kind = {nn.Module: "_modules", nn.Parameter: "_parameters"}
        own = next((kind[cls] for cls in kind if isinstance(value, cls)), "_buffers")
        getattr(at, own)[name] = value
        if own == "_buffers" and not persistent:
            at._non_persistent_buffers_set.add(name)
        inner = [*value.parameters(), *value.buffers()] if isinstance(value, nn.Module) else [value]
        self._dtypes |= {tensor.dtype for tensor in inner if tensor.is_floating_point()}

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As of any module; within another one its keys are those of the model, in its order."""
        if "prefix" not in kwargs:
            return super().state_dict(*args, **kwargs)
        kwargs["prefix"] = outer = _outer(kwargs["prefix"])
        found = super().state_dict(*args, **kwargs)
        if self._gives is None:  # the last layer, which finds what the others have put there
            ranks = {outer + name: rank for name, rank in self._ranks.items()}
            for key in sorted((key for key in found if key in ranks), key=ranks.__getitem__):
                found[key] = found.pop(key)
        return found

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """As of any module; within another one the names are those of the model."""
        outer = _outer(f"{prefix}.")
        # Parameters of the model itself have no name before theirs.
        own = outer.removesuffix(".") if self._parameters or self._buffers else prefix
        for name, module in super().named_modules(memo, "", remove_duplicate):
            yield (f"{outer}{name}" if name else own), module

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        # Only a dtype that no parameter has can have been that of the parameters.
        gone = self._dtypes.isdisjoint(t.dtype for t in (*self.parameters(), *self.buffers()))
        named = any(kind in text for kind in _FLOATS for text, _ in self._codes)
        self._retyped = named and gone and bool(self._dtypes)
        return self

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, strict: bool, *messages: list[str]
    ) -> None:
        self.__dict__["_loading"] = prefix, messages
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, *messages)

    def __repr__(self) -> str:
        texts = list(dict.fromkeys(text.rstrip() for text, _ in self._codes))
        if len(texts) > 1:
            texts = ["# in training", texts[0], "# in evaluation", texts[1]]
        code, indexed = "", "\n".join(texts)
        while code != indexed:
            code, indexed = indexed, re.sub(r'getattr\(([\w.\[\]]+), "(\d+)"\)', r"\1[\2]", indexed)
        return f"{type(self).__name__}(\n{indent(code, '  ')}\n)"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_functions": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._functions = list(map(_compiled, self._codes))


def _named_as_in_the_model(layer: nn.Module, _: Any) -> None:
    """Takes the index of a layer out of what loading it has to say."""
    prefix, messages = layer.__dict__.pop("_loading")
    own = re.compile(rf"(^| ){re.escape(prefix)}")
    for texts in messages:
        texts[:] = [own.sub(rf"\1{_outer(prefix)}", text) for text in texts]


def _outer(prefix: str) -> str:
    """A prefix without its last part, the name of the layer itself."""
    head = prefix.removesuffix(".").rpartition(".")[0]
    return f"{head}." if head else ""


def _distribute(model: nn.Module, layers: list[ConvertedLayer], segments: list[_Segment]) -> None:
    """Gives each layer the modules, parameters and buffers that its segment uses.

    What no layer uses goes to the last one, so that nothing is missing in a checkpoint; a module
    that is in the model twice goes to the layer that has it.
    """
    ranks = _ranks(model)
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    homes: dict[str, int] = {}
    held: dict[Any, int] = {}

    def hold(k: int, path: str, value: nn.Module | Tensor) -> None:
        owner, _, name = path.rpartition(".")
        unsaved = model.get_submodule(owner)._non_persistent_buffers_set
        layers[k].hold(path, value, persistent=name not in unsaved)
        homes[path] = held[value] = k

    for k, segment in enumerate(segments):
        layers[k]._ranks = ranks
        for node in (node for nodes in segment.nodes for node in nodes):
            for used in node.all_input_nodes:
                if used.op == "get_attr" and used.target in tensors:
                    hold(k, str(used.target), tensors[str(used.target)])
            if node.op == "call_module":
                hold(k, str(node.target), model.get_submodule(str(node.target)))
    for path, module in model.named_modules(remove_duplicate=False):
        if any(f"{path}.".startswith(f"{p}.") for p in homes if p not in tensors):
            continue  # inside of what is held
        if path and not any(p.startswith(f"{path}.") for p in homes):
            hold(held.get(module, len(layers) - 1), path, module)
            continue
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            own = f"{path}.{name}".lstrip(".")
            if tensor is not None and own not in homes:
                hold(held.get(tensor, len(layers) - 1), own, tensor)


def _ranks(model: nn.Module) -> dict[str, float]:
    """The place of each name of a model: its parameters, buffers, and what else it saves."""
    known: dict[str, float] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name in (*module._parameters, *module._buffers):
            known[f"{path}.{name}".lstrip(".")] = len(known)
    last = -1.0
    for key in model.state_dict():
        last = known.setdefault(key, last + 2**-20)
    return known


# What holds such layers


def index_keys(state_dict: dict[str, Any], prefix: str, module: nn.Module) -> None:
    """Puts the index of the converted layer that holds it before each key of a model, in place.

    ``prefix`` is what stands before the keys of ``module``, whose children are the layers.
    """
    found: dict[str, Any] = {}
    taken: set[str] = set()
    for name, layer in module._modules.items():
        for key in layer.state_dict() if isinstance(layer, ConvertedLayer) else ():
            if prefix + key in state_dict:
                found[f"{prefix}{name}.{key}"] = state_dict[prefix + key]
                taken.add(prefix + key)
    for key in taken - found.keys():
        del state_dict[key]
    state_dict.update(found)


class ModelNames(nn.Module):
    """A module whose children are layers; where these were converted, it has the model's names."""

    def _named_members(
        self,
        members: Callable[[nn.Module], Any],
        prefix: str = "",
        recurse: bool = True,
        remove_duplicate: bool = True,
    ) -> Iterator[tuple[str, Any]]:
        layers = self._modules.values()
        ranks = next((c._ranks for c in layers if isinstance(c, ConvertedLayer)), None)
        if ranks is None or not recurse:
            yield from super()._named_members(members, prefix, recurse, remove_duplicate)
            return
        start = len(prefix) + 1 if prefix else 0
        named = dict(super()._named_members(members, prefix, True, False))
        seen: set[Any] = set()
        for name in sorted(named, key=lambda name: ranks.get(name[start:], len(ranks))):
            if not (remove_duplicate and named[name] in seen):
                yield name, named[name]
            seen.add(named[name])

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        index_keys(state_dict, prefix, self)
        super()._load_from_state_dict(state_dict, prefix, *args)
