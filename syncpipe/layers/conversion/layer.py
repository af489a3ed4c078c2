"""Cuts the trace of a model into a chain of segments, and makes layers of them.

Every leaf module, and every operation that uses a parameter itself, begins a segment. Between two
of these the cut is where the fewest bytes cross. A value that the next segment uses is passed to
that segment. A value used later goes to its first user as a skip, and from user to user, so it
bypasses the devices in between::

    layer 0 --- x, y ---> layer 1 --- z ---> layer 2 --- z ---> layer 3
       \\----------------------- mask ----------------------/

Training and evaluation are cut at the same leaf modules. Operations of one mode only (in an
``if self.training``) belong to the segment around them. The values that cross a cut are determined
per mode.

A layer holds modules of the model at their paths, so names are the model's::

    held by layer 3                 3 / transformer.h.0.ln_1.weight
    state_dict, named_parameters        transformer.h.0.ln_1.weight, in the order of the model
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from itertools import chain, pairwise
from math import inf
from textwrap import indent
from typing import Any, Self

import torch
from torch import Tensor, fx, nn
from torch.fx.graph import _custom_builtins

from syncpipe.data.trees import map_tensors, tensors_in
from syncpipe.layers.conversion.origin import Origin
from syncpipe.layers.conversion.signature import Signature
from syncpipe.layers.conversion.trace import DEVICE, Function, Tracer
from syncpipe.skip import Namespace, store
from syncpipe.skip.skippable import Declaration
from syncpipe.storage import storage_of

__all__ = ["ConvertedLayer", "Holder", "ModelNames", "layers_of"]

_grad_off = Function(torch._C._set_grad_enabled, "set_grad_enabled")
_grad_mode = Function(torch.is_grad_enabled, "is_grad_enabled")
_FLOATS = ("torch.float16", "torch.bfloat16", "torch.float32", "torch.float64")


@dataclass
class _Segment:
    """The nodes of a layer in one mode, and the values that it exchanges, by the other layer.

    The inputs of the model come from layer -1. The output of the last segment is the model's.
    """

    nodes: list[fx.Node]
    comes: dict[int, list[fx.Node]] = field(default_factory=dict)
    goes: dict[int, list[fx.Node]] = field(default_factory=dict)

    def modes(self, run: Tracer) -> set[str]:
        """Paths of the modules whose mode may have decided the nodes of this segment."""
        calls = {n.meta["call"][:k]: n.meta["at"] for n in self.nodes for k in range(1, 9)}
        return {path for at, call, path in run.modes if at <= calls.get(call, -1)}

    def lines(self) -> list[Any]:
        """What the code of this segment is made of; segments with equal lines have one code."""
        lines = [
            (n.meta["key"], n.meta["name"], n.meta["grad"], n.op, n.target, n.meta.get("common"),
             fx.node.map_arg((n.args, n.kwargs), lambda used: ("node", used.meta["key"])))
            for n in self.nodes
        ]  # fmt: skip
        return [*lines, *self.boundary()]

    def boundary(self) -> list[Any]:
        """The keys of the values exchanged; segments with equal keys can replace each other."""
        ways = self.comes, self.goes
        return [[(k, [n.meta["key"] for n in way[k]]) for k in sorted(way)] for way in ways]


def layers_of(
    model: nn.Module, runs: Sequence[Tracer], signature: Signature, origin: Origin
) -> list[ConvertedLayer]:
    """The layers of a model, as many as possible, with the code of both modes.

    The last layer holds the parameters and buffers that no layer uses, so checkpoints are complete.
    If a layer has such a tensor under another name, that layer holds it.
    """
    found, namespace = list(zip(*_segments(runs, model), strict=True)), Namespace()
    layers = [ConvertedLayer(k, each, namespace, model, origin) for k, each in enumerate(found)]
    modes = [
        set[str]().union(*(s.modes(run) for s, run in zip(each, runs, strict=True)))
        for each in found
    ]
    if any(a.boundary() != b.boundary() for a, b in found):  # all layers must use one mode
        modes = [set().union(*modes)] * len(modes)
    for layer, paths in zip(layers, modes, strict=True):
        layer.select(model, paths)
    layers[0]._model_signature = signature
    members, used = _members(model), list(map(_members, layers))
    homes = {t: layer for layer, own in zip(layers, used, strict=True) for t in own.values()}
    for path, tensor in members.items():
        if not any(path in own for own in used):
            homes.setdefault(tensor, layers[-1]).hold(model, path)
    names = list(members), list(model.state_dict())
    several = len({tensor.device for tensor in members.values()}) > 1
    for layer in layers:
        layer._names = names
        layer._gathers = several and bool(_members(layer))
        if any(kind in code.text for kind in _FLOATS for code in layer._codes):
            layer._code_dtype = layer._dtype
    return layers


def _members(module: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of a module by name; shared ones under all of their names."""
    parameters = module.named_parameters(remove_duplicate=False)
    return dict(chain(parameters, module.named_buffers(remove_duplicate=False)))


# Cutting


def _segments(runs: Sequence[Tracer], model: nn.Module) -> list[list[_Segment]]:
    nodes = [run.live for run in runs]
    starts = [[n for n in each if _is_start(n, model)] for each in nodes]
    names = [[f"{n.meta['owner']} {n.op} {n.target!r}" for n in each] for each in starts]
    costs = list(map(_cut_costs, nodes))
    matched = [
        [each.index(start[k + at]) for each, start, at in zip(nodes, starts, blocks, strict=False)]
        for blocks in SequenceMatcher(None, names[0], names[1], False).get_matching_blocks()
        for k in range(blocks.size)
    ]
    cuts: list[list[int]] = [[0] for _ in runs]
    for before, after in pairwise(matched):
        places = [
            min(range(a + 1, b + 1), key=cost.__getitem__)
            for a, b, cost in zip(before, after, costs, strict=True)
        ]
        if all(cost[p] < inf for p, cost in zip(places, costs, strict=True)):
            for cut, p in zip(cuts, places, strict=True):
                cut.append(p)
    return [_connect(*each) for each in zip(nodes, cuts, strict=True)]


def _is_start(node: fx.Node, model: nn.Module) -> bool:
    if node.op == "call_module":
        module = model.get_submodule(str(node.target))
        return not node.meta["writes"] or next(module.parameters(), None) is not None
    return any(isinstance(used.meta["value"], nn.Parameter) for used in node.all_input_nodes)


def _cut_costs(nodes: list[fx.Node]) -> list[float]:
    """The cost of a cut before each node: the number of bytes that cross it.

    It is inf between a tensor and a write into an alias of it if the tensor is used after that
    write: on another device the tensor would be a copy, which the write misses.
    """
    last_use = {used: p for p, node in enumerate(nodes) for used in node.all_input_nodes}
    tensors = {node: tensors_in(node.meta["value"]) for node in (*nodes, *last_use)}
    memory = {node: set(map(storage_of, found)) for node, found in tensors.items()}
    costs = [0.0] * (len(nodes) + 1)
    for p, node in enumerate(nodes):
        crossing = max(1, sum(tensor.nbytes for tensor in tensors[node]))
        for k in range(p + 1, last_use.get(node, 0) + 1):
            costs[k] += crossing
        if not node.meta["writes"]:
            continue
        used = node.all_input_nodes
        written = set[int]().union(*(memory[each] for each in used))
        for q, alias in enumerate(nodes[:p]):
            if written & memory[alias] and alias not in used and last_use.get(alias, 0) > p:
                costs[q + 1 : p + 1] = [inf] * (p - q)
    return costs


def _connect(nodes: list[fx.Node], cuts: list[int]) -> list[_Segment]:
    """The segments between cuts, with the values that they exchange."""
    segments = [_Segment(nodes[a:b]) for a, b in pairwise([*cuts, len(nodes)])]
    segments[0].comes[-1] = [node for node in nodes if node.op == "placeholder"]
    home = {node: k for k, segment in enumerate(segments) for node in segment.nodes}
    for node, at in home.items():
        for k in sorted({home[user] for user in node.users if user in home} - {at}):
            segments[at].goes.setdefault(k, []).append(node)
            segments[k].comes.setdefault(at, []).append(node)
            at = k
    return segments


# Writing


def _generate(
    segment: _Segment, comes: list[int], goes: list[int], layer: ConvertedLayer, model: nn.Module
) -> _Code:
    """Generate the code of a segment, which deletes names after their last use.

    The function has one argument per layer in ``comes`` and returns one entry per layer in
    ``goes``: a value, or a tuple if there is not exactly one. Modules, tensors and constants that
    the code uses become attributes of the layer.
    """
    graph, known = fx.Graph(), dict[fx.Node, fx.Node]()
    for k, other in enumerate(comes):
        way, argument = segment.comes.get(other, []), f"from_{other}" if k else "handed"
        if len(way) == 1:
            known[way[0]] = graph.create_node("placeholder", argument, name=way[0].meta["name"])
            continue
        given = graph.placeholder(argument)
        for at, value in enumerate(way):
            name = value.meta["name"]
            known[value] = graph.create_node(
                "call_function", operator.getitem, (given, at), name=name
            )

    def local(leaf: Any) -> Any:
        if not isinstance(leaf, fx.Node):
            return leaf
        if leaf.target == DEVICE:
            given = next((n for n in known if isinstance(n.meta["value"], Tensor)), None)
            if given is not None:
                return graph.call_function(getattr, (known[given], "device"))
        if leaf not in known:  # a parameter, a buffer or a constant
            name, value = str(leaf.target), leaf.meta["value"]
            kind = leaf.meta["key"][0]
            if kind == "number":
                numbers = graph.get_attr("_numbers")
                known[leaf] = graph.call_function(operator.getitem, (numbers, name))
                return known[leaf]
            known[leaf] = graph.get_attr(name)
            if kind in ("attribute", "module"):
                layer.hold(model, name)
            elif kind == "object" and isinstance(value, Tensor):
                layer.register_buffer(name, value, persistent=False)
            elif kind == "object":
                layer.__dict__[name] = value
        return known[leaf]

    before: fx.Node | None = None  # the grad mode to restore, while gradients are off
    for node in segment.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if before is None and not node.meta["grad"]:
            before = graph.call_function(_grad_mode)
            graph.call_function(_grad_off, (False,))
        elif before is not None and node.meta["grad"]:
            graph.call_function(_grad_off, (before,))
            before = None
        if node.op == "call_module":
            layer.hold(model, str(node.target))
        args, kwargs = fx.node.map_aggregate((node.args, node.kwargs), local)
        known[node] = graph.create_node(node.op, node.target, args, kwargs, node.meta["name"])
    sent = [list(map(local, segment.goes.get(other, []))) for other in goes]
    if segment.nodes[-1].op == "output":
        sent[0] = list(fx.node.map_aggregate(segment.nodes[-1].args, local))
    graph.output(tuple(map(_packed, sent)))
    code = graph.python_code("self")
    names = {n: v for n, v in code.globals.items() if n not in _custom_builtins}
    common = segment.nodes[-1].meta.get("common", frozenset())
    return _Code(code.src.strip() + "\n", names, common)


class _Code:
    """The generated function of a segment: its source, and the objects that it uses by name.

    ``common`` has the indices of leaves of the model's output that do not depend on the input.
    """

    def __init__(self, text: str, names: dict[str, Any], common: frozenset[int]) -> None:
        self.text, self.names, self.common = text, names, common
        known: dict[str, Any] = {name: each.obj for name, each in _custom_builtins.items()}
        known |= names
        exec(compile(text, "<syncpipe.sequential>", "exec"), known)
        self.run = known["forward"]

    def __reduce__(self) -> Any:
        return _Code, (self.text, self.names, self.common)


# Layers


class Holder(nn.Module):
    """A submodule of a layer at the path of an inlined module; holds the contents of that module.

    It shares the mode of the inlined module: setting one sets the other.
    """

    _origin, _path, _seen = Origin(), "", True

    def __init__(self, origin: Origin, path: str) -> None:
        super().__init__()
        self._origin, self._path = origin, path
        self.__dict__["training"] = self._seen = (
            True if self._inlined is None else self._inlined.training
        )

    @property
    def _inlined(self) -> nn.Module | None:
        return self._origin.modules.get(self._path)

    @property
    def training(self) -> bool:
        own, module = self.__dict__, self._inlined
        if module is not None and module.training is not self._seen:
            own["training"] = own["_seen"] = module.training
        return bool(own["training"])

    @training.setter
    def training(self, mode: bool) -> None:
        self.__dict__["training"] = mode
        if self._path and self._inlined is not None:  # the mode of the model is set by all layers
            self._inlined.training = self._seen = mode

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "training": self.training}


class _Merged(Holder):
    """The holders of one path as one module, for copies without the inlined module."""

    def train(self, mode: bool = True) -> Self:
        for part in self.__dict__["parts"]:
            part.train(mode)
        return super().train(mode)


def _merge(parts: list[Any]) -> Any:
    if not isinstance(parts[0], Holder):
        return parts[0]
    joined = _Merged(parts[0]._origin, parts[0]._path)
    joined.__dict__["parts"] = parts
    for part in parts:
        joined._parameters.update(part._parameters)
        joined._buffers.update(part._buffers)
        joined._modules.update(part._modules)
    for name in joined._modules:
        joined._modules[name] = _merge([p._modules[name] for p in parts if name in p._modules])
    return joined


class ConvertedLayer(Holder):
    """Consecutive modules of a model, with the code between them; ``print`` shows the code.

    The modules are the model's own, at their paths. Values for layers after the next one are skips.
    The first layer has the signature of the model.
    """

    def __init__(
        self,
        k: int,
        segments: Sequence[_Segment],
        namespace: Namespace,
        model: nn.Module,
        origin: Origin,
    ) -> None:
        super().__init__(origin, "")
        self._model_signature: Signature | None = None
        # The adjacent layer first, then the layers at the other ends of skips.
        comes = list(dict.fromkeys([k - 1, *(a for s in segments for a in s.comes)]))
        goes = list(dict.fromkeys([k + 1, *(b for s in segments for b in s.goes)]))
        self._syncpipe_skips = Declaration(
            tuple([f"{k} to {b}" for b in goes[1:]]), tuple([f"{a} to {k}" for a in comes[1:]])
        )
        self._skip_namespaces = dict.fromkeys(self._syncpipe_skips.names, namespace)
        one, other = segments
        self._codes = [_generate(one, comes, goes, self, model)] * 2
        if one.lines() != other.lines():
            self._codes[1] = _generate(other, comes, goes, self, model)
        self._code_dtype: torch.dtype | None = None  # set if the code contains dtypes
        self._gathers = False  # whether the model was on several devices
        #: Numbers of inlined modules in the code; paths of the modules whose mode selects the code.
        self._numbers: dict[str, float] = {}
        self._modes: list[str] = []
        #: The names of parameters and buffers in the model, and those in its state_dict, in order.
        self._names: tuple[list[str], list[str]] = [], []

    @property
    def _device(self) -> torch.device:
        return next(chain(self.parameters(), self.buffers()), torch.empty(0)).device

    @property
    def _dtype(self) -> torch.dtype | None:
        tensors = chain(self.parameters(), self.buffers())
        return next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), None)

    @property
    def common_outputs(self) -> frozenset[int]:
        """Indices of the leaves of the model's output that are equal in every micro-batch."""
        return self._code().common

    def forward(self, input: Any) -> Any:
        """Run the code of the current mode.

        Args:
            input: the value from the layer before, or a tuple if there is not exactly one; for the
                first layer the arguments of the model (a tensor, a tuple, a dict).

        Raises:
            TypeError: the dtype of the parameters was changed, and the code contains dtypes.
            RuntimeError: modules that the code depends on are in different modes.
        """
        if self._code_dtype is not None and self._code_dtype != self._dtype:
            raise TypeError(
                "the dtype of the parameters was changed after the model was converted, and this "
                f"code contains the old dtype: change it first, then convert\n{self}"
            )
        skips, namespaces = self._syncpipe_skips, self._skip_namespaces
        code = self._code()
        if self._model_signature is not None:
            signature = self._model_signature.of(code is self._codes[0])
            input = _packed(signature.tensors(input))
        given = [store.take((namespaces[name], name), self) for name in skips.pop]
        if self._gathers:
            device = self._device
            input, given = map_tensors(lambda ts: [t.to(device) for t in ts], (input, given))
        with torch.set_grad_enabled(torch.is_grad_enabled()):  # also after an error
            sent = code.run(self, input, *given)
        for name, value in zip(skips.stash, sent[1:], strict=True):
            store.put((namespaces[name], name), value, self)
        return sent[0]

    def __getstate__(self) -> dict[str, Any]:
        self._origin.follow_numbers()
        return super().__getstate__()

    def _code(self) -> _Code:
        if not self._modes:
            return self._codes[0 if self.training else 1]
        modes = {path: self._find(path).training for path in self._modes}
        if len(set(modes.values())) > 1:
            one, other = (
                [path or "the model" for path in modes if modes[path] is mode]
                for mode in (True, False)
            )
            raise RuntimeError(
                f"{', '.join(one)} cannot train while {', '.join(other)} evaluates: what this "
                "layer does depends on both, and was traced with both in one mode. Set the modes "
                f"of both, or move what depends on a mode into a module of its own\n{self}"
            )
        return self._codes[0 if modes[self._modes[0]] else 1]

    def _find(self, path: str) -> nn.Module:
        at: nn.Module = self
        for part in filter(None, path.split(".")):
            at = at._modules[part]  # type: ignore[assignment]
        return at

    def select(self, model: nn.Module, paths: Iterable[str]) -> None:
        """Select the code by the modes of these modules, if the code of both modes differs."""
        one, other = self._codes
        if one.text != other.text:
            self._modes = sorted(paths)
        for path in filter(None, self._modes):
            self.hold(model, path)

    def hold(self, model: nn.Module, path: str) -> None:
        at: nn.Module = self
        *way, name = path.split(".")
        for k, part in enumerate(way, 1):
            holder = Holder(self._origin, ".".join(way[:k]))
            at = at._modules.setdefault(part, holder)  # type: ignore[assignment]
            model = model._modules[part]  # type: ignore[assignment]
        if path in self._origin.modules:
            at._modules.setdefault(name, Holder(self._origin, path))
            return
        for kind in ("_modules", "_parameters", "_buffers"):
            if name in getattr(model, kind):
                getattr(at, kind)[name] = getattr(model, kind)[name]
                if kind != "_modules":
                    self._origin.hold(at, model, kind, name)
        at._non_persistent_buffers_set |= model._non_persistent_buffers_set & {name}

    def __repr__(self) -> str:
        texts = list(dict.fromkeys(code.text.rstrip() for code in self._codes))
        if len(texts) > 1:
            texts = ["# in training", texts[0], "# in evaluation", texts[1]]
        code, indexed = "", "\n".join(texts)
        while code != indexed:
            code, indexed = indexed, re.sub(r'getattr\(([\w.\[\]]+), "(\d+)"\)', r"\1[\2]", indexed)
        return f"{type(self).__name__}(\n{indent(code, '  ')}\n)"


def _packed(values: Sequence[Any]) -> Any:
    return values[0] if len(values) == 1 else tuple(values)


# What holds such layers


class ModelNames(nn.Module):
    """A module whose children are layers; converted ones have the model's names in it."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # Registered first, so hooks of users see the model's names.
        self._register_state_dict_hook(_rename_saved)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(  # type: ignore[no-untyped-call]
            _clean_messages
        )

    def train(self, mode: bool = True) -> Self:
        """Set the mode, also of inlined modules."""
        super().train(mode)
        for origin in {layer._origin for layer in map(self._layer, self._modules) if layer}:
            for module in origin.modules.values():
                module.training = mode
        return self

    def __getattr__(self, name: str) -> Any:
        """An attribute of the model that a layer holds, with an inlined module as a whole."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            layers = [each for each in map(self._layer, self.__dict__.get("_modules", ())) if each]
            kinds = ("_modules", "_parameters", "_buffers")
            found = [each[name] for x in layers for k in kinds if name in (each := getattr(x, k))]
            if not found:
                raise
        layers[0]._origin.share()
        return layers[0]._origin.modules.get(name) or _merge(found)

    def _fqn_modifiers(self) -> dict[str, str]:
        """Indices of layers, which ``torch.distributed.checkpoint.state_dict`` drops from names."""
        return {f"layer {name}": name for name in self._modules if self._layer(name)}

    def _layer(self, name: str) -> ConvertedLayer | None:
        """The converted layer at the first part of a name, if it is one."""
        layer = self._modules.get(name.partition(".")[0])
        return layer if isinstance(layer, ConvertedLayer) else None

    def _in_model_order(self, named: dict[str, Any], of_state: bool) -> dict[str, Any]:
        layer = next(filter(None, map(self._layer, self._modules)), None)
        order = [] if layer is None else filter(named.__contains__, layer._names[of_state])
        return {name: named[name] for name in dict.fromkeys([*order, *named])}

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """As in ``nn.Module``; names are the model's, and layers have their index."""
        for name, module in super().named_modules(memo, "", remove_duplicate):
            layer = self._layer(name)
            # Parameters of the model itself have no name before theirs.
            if layer is not None and (module is not layer or layer._parameters or layer._buffers):
                name = name.partition(".")[2]
            yield ".".join(filter(None, (prefix, name))), module

    def _named_members(
        self,
        members: Callable[[nn.Module], Any],
        prefix: str = "",
        recurse: bool = True,
        remove_duplicate: bool = True,
    ) -> Iterator[tuple[str, Any]]:
        named, seen = dict(super()._named_members(members, "", recurse, False)), set[Any]()
        for name, value in self._in_model_order(named, of_state=False).items():
            if not (remove_duplicate and value in seen):
                yield f"{prefix}.{name}" if prefix else name, value
            seen.add(value)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, strict: bool, *messages: list[str]
    ) -> None:
        for origin in {layer._origin for layer in map(self._layer, self._modules) if layer}:
            for path, module in origin.modules.items():
                at = f"{prefix}{path}." if path else prefix
                for hook in module._load_state_dict_pre_hooks.values():
                    hook(state_dict, at, metadata, strict, *messages)
        moved = {  # several layers may have one name of the model
            f"{prefix}{name}.{key}": prefix + key
            for name, layer in self._modules.items()
            for key in (layer.state_dict() if isinstance(layer, ConvertedLayer) else ())
            if prefix + key in state_dict
        }
        found = {new: state_dict[old] for new, old in moved.items()}
        for key in set(moved.values()):
            del state_dict[key]
        state_dict.update(found)
        self.__dict__["_loading"] = prefix, messages
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, *messages)


def _clean_messages(module: ModelNames, _: Any) -> None:
    """Remove the indices of layers from the messages of loading."""
    prefix, messages = module.__dict__.pop("_loading")
    names = "|".join(re.escape(name) for name in module._modules if module._layer(name))
    index = re.compile(rf"(^| )({re.escape(prefix)})({names})\.")
    for texts in messages if names else ():
        texts[:] = [index.sub(r"\1\2", text) for text in texts]


def _rename_saved(module: ModelNames, state_dict: Any, prefix: str, _: Any) -> None:
    """Rename and sort the saved entries as in the model."""
    for own in (state_dict, getattr(state_dict, "_metadata", {})):
        named = {}
        for key in [key for key in own if key.startswith(prefix)]:
            name, value = key.removeprefix(prefix), own.pop(key)
            if module._layer(name) is None:
                named[name] = value
            elif "." in name:  # the layer itself is no module of the model
                named[name.partition(".")[2]] = value
        own.update((prefix + k, v) for k, v in module._in_model_order(named, of_state=True).items())


_clean_messages._syncpipe_own = True  # type: ignore[attr-defined]
_rename_saved._syncpipe_own = True  # type: ignore[attr-defined]
