"""Traces an ordinary run of a model into a ``torch.fx.Graph``.

PyTorch's functions, the methods and sizes of tensors, and calls of leaf modules become nodes. All
values are real, so the model's own Python decides its control flow. A decision by a size becomes a
guard. Modules that are no leaves are inlined: their forward runs, and its operations are traced.
"""

from __future__ import annotations

import builtins
import dataclasses
import enum
import functools
import linecache
import math
import operator
import random
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from types import FrameType, MemberDescriptorType, MethodType, SimpleNamespace
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor, fx, nn
from torch.nn.modules import transformer
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from syncpipe.data.batch_classes import batch_kind
from syncpipe.data.trees import entries, equal, flatten, tensors_in
from syncpipe.layers.conversion.origin import MISSING, PLAIN, Read, alike, attribute
from syncpipe.layers.conversion.patches import Patches
from syncpipe.layers.conversion.signature import is_input
from syncpipe.runtime import interrupts
from syncpipe.storage import storage_of

__all__ = ["CHECKS", "DEVICE", "Function", "Tracer", "Whole", "guard", "tracing"]

_T = TypeVar("_T")

#: Attributes whose numbers do not depend on the sizes of the batch.
_CONSTANT = frozenset(
    {"dim", "ndim", "ndimension", "itemsize", "element_size", "get_device", "_version", "stride",
     "storage_offset", "data_ptr", "__hash__", "dtype", "device", "requires_grad"}
)  # fmt: skip
#: Functions by which Python decides by a value.
_DECIDES = frozenset(
    {"__bool__", "__int__", "__float__", "__index__", "is_nonzero", "equal", "allclose",
     "__contains__"}
)  # fmt: skip
#: Decisions that a guard can check, and the function to check them by.
_GUARDED: dict[str, Any] = {
    **dict.fromkeys(("__bool__", "is_nonzero", "item"), operator.truth), "equal": torch.equal,
}  # fmt: skip
#: Functions that read values out of a tensor, write values into it, or walk its autograd graph.
_VALUE_ACCESS = frozenset({"tolist", "numpy", "__array__", "untyped_storage", "storage", "__set__",
                    "__complex__", "__delete__", "backward", "grad", "register_hook"})  # fmt: skip
#: Attributes of ``nn.Module`` itself, whose reads are not recorded.
_INTERNAL = frozenset({*vars(nn.Module), *vars(nn.Module())}) - {"training"}
#: Target of the node for the device of a layer.
DEVICE = "_device"
#: Number of the last reads of dtypes that may be the source of a dtype argument.
_DTYPE_READS = 64
#: Operations of the first and last nodes of a trace.
_ENDS = ("placeholder", "output")
_TREES = (tuple, list, torch.Size, dict, slice)
#: The most frequent leaves of trees.
_LEAVES = frozenset({Tensor, nn.Parameter, fx.Node, *PLAIN})
#: Packages whose functions with a cache get no numbers with a node.
_UNCACHED = {"torch", "syncpipe", *sys.stdlib_module_names}
_NOT_THE_MODEL = (torch.__file__.removesuffix("__init__.py"), __file__.removesuffix("trace.py"))


#: A call of an inlined module: the step and the path of each enclosing call, and its own.
_Call = tuple[tuple[int, str], ...]


class Whole(NamedTuple):
    """A module that is not, or cannot be, inlined: no layer begins in it.

    Attributes:
        path: the path of the module.
        line: the line of code that causes this, or empty.
        reason: the reason, for messages.
    """

    path: str
    line: str
    reason: str


@dataclasses.dataclass
class _Write:
    """An attribute that a forward sets, with its value before (``own``: of the instance)."""

    call: _Call
    path: str
    owner: Any
    key: str
    before: Any
    own: bool
    read_before: bool
    fault: Whole
    changed: bool = False
    readers: set[_Call] = dataclasses.field(default_factory=set)


class _Inlined(NamedTuple):
    """What went into a call of an inlined module, and what came out of it."""

    given: tuple[Any, dict[str, Any]]
    result: Any
    form: str
    line: str
    grad: bool


class Function:
    """A callable with a name that generated code can use."""

    def __init__(self, fn: Callable[..., Any], name: str) -> None:
        self.fn = fn
        self.__name__ = self.__qualname__ = name
        self.__module__ = ""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(*args, **kwargs)

    def __repr__(self) -> str:
        return f"{self.__name__}#{hash(self.fn)}"


def _check(value: Any, traced: Any, line: str) -> None:
    if value != traced:
        raise ValueError(
            f"the model was converted with a sample for which this was {traced!r}; here it is "
            f"{value!r}, and the model would do something else:\n  {line}\nConvert it with a "
            "sample like this call, or move this line into a module of its own"
        )


def _check_pieces(pieces: Sequence[Any], traced: int, line: str) -> None:
    _check(len(pieces), traced, line)


def _check_form(result: Any, traced: str, path: str) -> None:
    _check(_form(result), traced, f"what {path} returns")


def _form(value: Any) -> str:
    """What Python could decide by in the result of a module, besides numbers."""
    if isinstance(value, (bool, str, type(None))):
        return repr(value)
    kind, parts = type(value).__name__, _parts(value)
    if isinstance(value, Tensor) or parts is None:
        return "Tensor" if isinstance(value, Tensor) else kind
    return f"{kind}({', '.join(f'{key}: {_form(each)}' for key, each in parts.items())})"


#: Raises if Python would decide otherwise than in the trace.
guard = Function(_check, "guard")
#: Raises if a function (for example ``split``) returns another number of tensors.
_pieces = Function(_check_pieces, "pieces")
#: Raises if a module returns None or a flag instead of a tensor, for example.
_same_form = Function(_check_form, "same_form")
CHECKS = (guard, _pieces, _same_form)


# Trees of values


def map_tree(fn: Callable[[Any], Any], tree: Any, build: Callable[..., Any] | None = None) -> Any:
    """A tree with ``fn`` applied to its leaves, or the tree itself if no leaf changes.

    Trees are nested tuples, lists, slices, mappings, named tuples and dataclasses. Trees other than
    plain tuples, lists, dicts and slices are made by ``build(class, args, kwargs)``, by default by
    their class.
    """
    kind = type(tree)
    if kind is tuple or kind is list:  # the most frequent trees
        items = [map_tree(fn, value, build) for value in tree]
        return tree if all(map(operator.is_, items, tree)) else kind(items)
    if kind is dict:
        new = {key: map_tree(fn, value, build) for key, value in tree.items()}
        return tree if all(new[key] is tree[key] for key in tree) else new
    if kind in _LEAVES or (parts := _parts(tree)) is None:
        return fn(tree)
    new = {key: map_tree(fn, value, build) for key, value in parts.items()}
    if all(new[key] is parts[key] for key in parts):
        return tree if build is None or kind in _TREES else fn(tree)
    if kind in _TREES:
        made: Any = tuple if build else kind
        return slice(*new.values()) if kind is slice else made(new.values())
    named = dataclasses.is_dataclass(tree) or isinstance(tree, tuple)
    args, kwargs = ((), new) if named else ((new,), {})
    return kind(*args, **kwargs) if build is None else build(kind, args, kwargs)


def _parts(value: Any) -> dict[Any, Any] | None:
    """The children of a tree by key, attribute or index; None for a leaf."""
    if batch_kind(value):
        return None
    if type(value) in (tuple, list, torch.Size):
        return dict(enumerate(value))
    if isinstance(value, slice):
        return {name: getattr(value, name) for name in ("start", "stop", "step")}
    if isinstance(value, tuple):
        if not hasattr(value, "_fields") or type(value).__module__ == "torch.return_types":
            return None
        return dict(zip(value._fields, value, strict=True))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
    return dict(value) if isinstance(value, Mapping) else None


def _copied(tree: Any) -> Any:
    """A tree with tuples, lists and dicts of its own, for code may change these."""
    kind = type(tree)
    if kind is tuple and not any(type(each) in (tuple, list, dict) for each in tree):
        return tree  # the most frequent one
    if kind is tuple or kind is list:
        return kind(map(_copied, tree))
    return {key: _copied(each) for key, each in tree.items()} if kind is dict else tree


def _refuse(cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise LookupError(cls)


# Numbers with their node


class _Number:
    """A number with the node that computed it."""

    node: fx.Node
    tracer: Tracer

    def __reduce_ex__(self, protocol: Any) -> Any:
        return type(plain(self)), (plain(self),)


_Int: Any = type("_Int", (_Number, int), {})
_Float: Any = type("_Float", (_Number, float), {})


def plain(value: Any) -> Any:
    """A number without its node; other values unchanged."""
    return value.node.meta["value"] if isinstance(value, _Number) else value


def _method(fn: Callable[..., Any], kind: str, *, swapped: bool = False) -> Callable[..., Any]:
    """A method of a number, of one kind: it computes another number, compares, uses or shows it."""

    def method(self: Any, *others: Any) -> Any:
        takes = kind in ("computes", "compares")
        if takes and not all(isinstance(other, (int, float)) for other in others):
            return NotImplemented
        args = (*others, self) if swapped else (self, *others)
        result = fn(*map(plain, args))
        if kind == "shows" or self.tracer.idle:
            return result
        number = self.tracer.computed(fn, args, result) if takes else self
        if kind in ("compares", "uses"):
            self.tracer.decided(number)
        return number if kind == "computes" else result

    return method


for _name in ("add", "sub", "mul", "floordiv", "truediv", "mod", "pow", "and_", "or_", "xor",
              "lshift", "rshift"):  # fmt: skip
    _fn, _op = getattr(operator, _name), _name.rstrip("_")
    setattr(_Number, f"__{_op}__", _method(_fn, "computes"))
    setattr(_Number, f"__r{_op}__", _method(_fn, "computes", swapped=True))
for _kind, _fns in {
    "computes": (operator.neg, operator.abs, operator.pos),
    "compares": (operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne),
    "uses": (hash, bool, int, float, round, divmod, math.trunc),
    "shows": (repr, str, format),
}.items():
    for _each in _fns:
        setattr(_Number, f"__{_each.__name__}__", _method(_each, _kind))


# The trace


class Tracer(TorchFunctionMode):
    """The trace of one run of a model, within :func:`tracing`.

    The ``meta`` of a node has:

        at        its index                      value     its value
        call      the enclosing call             grad      whether gradients were on
        key       the call and its step there,   seconds   the time of a module
                  equal in every run that takes  name      its name in the code
                  the same path                  writes    it writes into an argument
        owner     the path of the module whose   of_input  it depends on the model's arguments
                  forward made it                pure      it may be dropped if unused
        line      the line of code               dtypes    nodes whose dtype may be an argument
        reads     the attributes that alone determine a number

    Args:
        leaves: the leaf modules by path.
        paths: the paths of all modules.
        objects: what the model uses besides its own tensors and plain values, by names in the code;
            shared by all traces of the model.
        names: the names of the tensors in the arguments.
        as_compiled: whether libraries take the model to be compiled, and skip checks of values.

    Attributes:
        nodes: the nodes in order, from the placeholders to the output.
        result: the output of the model.
        steps: the number of nodes and inner calls of each call.
        faults: why modules cannot be inlined.
        reads: the attributes of modules, and of objects in them, that were read, by name.
        modes: each read of a module's mode, as (index of the next node, call, path).
        mode_matters: whether an inlined module, or code that is not PyTorch's, read a mode.
        decisive: the names of attributes by which Python decided.
        reentrant: whether PyTorch's reentrant checkpoint was called.
    """

    #: The trace of the run that is going on.
    current: ClassVar[Tracer | None] = None

    def __init__(
        self,
        model: nn.Module,
        leaves: Any,
        paths: Mapping[nn.Module, str],
        objects: dict[str, Any],
        names: list[str],
        as_compiled: bool,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        super().__init__()
        self._leaves, self.paths, self._objects = leaves, paths, objects
        self._as_compiled = as_compiled
        self._device, self._graph = next(model.parameters()).device, fx.Graph()
        self._devices = {(p.device.type, p.device.index) for p in model.parameters()}
        self._call: _Call = ((0, ""),)
        self.steps: dict[_Call, int] = {self._call: 0}
        self._faults: list[tuple[_Call, Whole]] = []
        self._inlined: dict[_Call, _Inlined] = {}
        self.reentrant = self.mode_matters = False
        self.reads, self.decisive = dict[str, Read](), set[str]()
        self._readers: dict[str, set[_Call]] = {}
        self.modes: list[tuple[int, _Call, str]] = []
        self.watched = {id(module): path for module, path in paths.items()}
        self._numbers, self._dtypes = dict[str, Any](), list[tuple[torch.dtype, fx.Node]]()
        self._writes: dict[tuple[int, str], _Write] = {}
        self.untraced_reads = set[tuple[int, str]]()  # in leaf modules
        self._nodes: dict[int, fx.Node] = {}
        self._paused, self._thread = False, threading.get_ident()
        self._mode, self._python_random = _mode(self._device), random.getstate()
        self._tensors: dict[int, tuple[str, Tensor]] = {}  # of the model
        for module, path in paths.items():
            for key, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None:
                    name = f"{path}.{key}" if path else key
                    self._tensors.setdefault(id(tensor), (name, tensor))
        self._device_node = self._add("get_attr", DEVICE, key=("device", DEVICE))
        inputs = [leaf for leaf in flatten((args, kwargs), batches=True)[0] if is_input(leaf)]
        self._batches = {id(leaf): leaf for leaf in inputs if batch_kind(leaf)}
        for name, value in zip(names, inputs, strict=True):
            node = self._add("placeholder", name, key=("input", name), value=value)
            if batch_kind(value):
                self._add_batch(value, node)

        def run() -> Any:
            for replaced in list(self._replacements()):
                self._patches.put(*replaced)
            self._patches.put(Tracer, "current", self)
            with torch.enable_grad(), self:
                self.result = model(*args, **kwargs)
                self._check_draws()
                output = self._lift(self.result)
                self._paused = True
                self._restore()
                return output

        self._patches = Patches()
        output = self._patches.around(run)
        node = self._add("output", "output", (output,), key=("output",))
        node.meta.update(line="", common=self._constant_outputs())
        self.nodes = [node for node in self._graph.nodes if node.op != "get_attr"]

    @property
    def live(self) -> list[fx.Node]:
        """The nodes without unused pure ones."""
        missed = set[fx.Node]()
        for node in reversed(self.nodes):
            if node in missed or not node.meta["pure"]:
                missed |= {node, *node.all_input_nodes}
        return [node for node in self.nodes if node in missed]

    @property
    def faults(self) -> list[Whole]:
        """Why modules cannot be inlined."""
        return [fault for _, fault in self._faults]

    def keep(self, paths: Iterable[str]) -> bool:
        """Make leaves of modules that were inlined: one node of each call of them.

        Returns False if that takes another run, because more than the result left such a call.
        """
        new = [call for call in self._inlined if call[-1][1] in paths]
        outer = [call for call in new if not any(call[:k] in new for k in range(1, len(call)))]
        if any(self._in_leaf(write.path) for write in self._writes.values()):
            return False
        return all(self._keep(call) for call in outer)

    def _keep(self, call: _Call) -> bool:
        def within(other: _Call) -> bool:
            return other[: len(call)] == call

        given, result, form, line, grad = self._inlined[call]
        inside = {node: None for node in self.nodes if within(node.meta["call"])}
        leaves, used = flatten(result)[0], list[fx.Node]()
        results: dict[int, Any] = {
            id(t): self._nodes.get(id(t)) for t in leaves if isinstance(t, Tensor)
        }
        outside = {each for node in inside for each in node.all_input_nodes} - inside.keys()
        written = {each for n in inside if n.meta["writes"] for each in n.all_input_nodes}
        try:
            args, kwargs = map_tree(self._known, given, _refuse)
        except LookupError:
            return False
        fx.node.map_arg((args, kwargs), used.append)
        if (
            not results
            or not {*results.values()} <= inside.keys()
            or any(_varies(leaf) for leaf in leaves if id(leaf) not in results)
            or any(isinstance(leaf, torch.dtype) for leaf in flatten(given)[0])
            or any(within(at) for w in self._writes.values() for at in (w.call, *w.readers))
            or _memory(written) & _memory(outside)
            or inside.keys() & used
            or any(n.users.keys() - inside.keys() for n in inside if n not in results.values())
        ):
            return False
        self._call = call[:-1]
        first = next(iter(inside))
        with self._graph.inserting_before(first):
            key = (*call[:-1], call[-1][0])
            node = new = self._add("call_module", call[-1][1], args, kwargs, key=key)
            for leaf in leaves:
                self._nodes.pop(id(leaf), None)
            self._with_nodes(node, result, [], form)
        while new is not first:
            new.meta.update(line=line, grad=grad, at=first.meta["at"])
            new = new.next
        seconds = sum(each.meta.get("seconds", 0.0) for each in inside)
        node.meta.update(pure=False, seconds=seconds)
        moved = {old: self._nodes[at] for at, old in results.items()}
        for old, new in moved.items():
            old.replace_all_uses_with(new)
        for each in self._graph.nodes:
            sources = each.meta["dtypes"]
            each.meta["dtypes"] = [
                moved.get(n, n) for n in sources if n not in inside or n in moved
            ]
        for old in reversed(inside):
            self._graph.erase_node(old)
        self.nodes = [node for node in self._graph.nodes if node.op != "get_attr"]
        self._inlined = {at: each for at, each in self._inlined.items() if not within(at)}
        self._faults = [each for each in self._faults if not within(each[0])]
        self.modes = [each for each in self.modes if not within(each[1])]
        for name, calls in self._readers.items():
            calls -= {each for each in calls if within(each)}
            if not calls:
                self.reads.pop(name, None)
        return True

    def fold(self, followed: set[str]) -> None:
        """Replace number nodes by their values, except those of ``followed`` attributes."""
        for node in self._graph.nodes:
            if node.meta["reads"] and not node.meta["reads"] & followed:
                for user in list(node.users):
                    value = lambda n, node=node: node.meta["value"] if n is node else n  # noqa: E731
                    user.args, user.kwargs = fx.node.map_arg((user.args, user.kwargs), value)

    def follow_dtypes(self, other: Tracer) -> None:
        """Replace dtypes that differ in another run by the dtypes of tensors."""
        theirs = {node.meta["key"]: node for node in other._graph.nodes}
        for node in self.nodes:
            twin, dtype = theirs.get(node.meta["key"]), _dtype_of(node)
            if twin is None or dtype is None or _dtype_of(twin) in (None, dtype):
                continue
            for source in node.meta["dtypes"]:
                like = theirs.get(source.meta["key"])
                if like is not None and like.meta["value"].dtype is _dtype_of(twin):
                    early = source.op != "get_attr"
                    with self._graph.inserting_after(source if early else node.prev):
                        found = self._graph.call_function(getattr, (source, "dtype"))
                    key = (*node.meta["key"], "dtype")
                    found.meta.update({**(source if early else node).meta, "key": key})
                    found.meta.update(value=dtype, pure=True, writes=False, name="dtype", dtypes=())
                    put = lambda a, d=dtype, f=found: f if a is d else a  # noqa: E731
                    node.args, node.kwargs = fx.node.map_aggregate((node.args, node.kwargs), put)
                    break
        self.nodes = [node for node in self._graph.nodes if node.op != "get_attr"]

    # What reaches the trace of the run

    def _replacements(self) -> Iterator[tuple[Any, str, Any]]:
        """What is patched during the run, besides :func:`tracing`: object, name, replacement."""
        for cls in {type(batch) for batch in self._batches.values()}:
            yield cls, "__getattribute__", self._trace_batch(cls.__getattribute__)
            for name in ("__setattr__", "__setitem__"):
                if hasattr(cls, name):
                    yield cls, name, self._refuse_batch_set(getattr(cls, name))
        yield builtins, "len", self._len
        yield nn.TransformerEncoder, "forward", _encode
        for of, name in _DECIDING:
            yield of, name, self._trace_decision(getattr(of, name))
        if self._as_compiled and hasattr(torch.compiler, "_is_compiling_flag"):
            yield torch.compiler, "_is_compiling_flag", True

    @property
    def idle(self) -> bool:
        """Whether nothing is recorded: within an operation, and in other threads."""
        return self._paused or threading.get_ident() != self._thread

    def called(
        self, call: Callable[..., Any], module: nn.Module, args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """Record the call of a module: a node of a leaf module, or the nodes of an inlined one."""
        path = self.paths[module]
        if path == self._call[-1][1]:  # the model, or super().__call__()
            return call(module, *args, **kwargs)
        if path in self._leaves:
            bound = functools.partial(call, module)
            return self.perform("call_module", path, bound, args, kwargs)
        outer = self._call
        self._call = inner = (*outer, (self.steps[outer], path))
        self.steps[outer] += 1
        self.steps[inner] = 0
        given, line, grad = _copied((args, kwargs)), line_in_model(), torch.is_grad_enabled()
        try:
            result = call(module, *args, **kwargs)
            if _mode(self._device) == self._mode:
                self._inlined[inner] = _Inlined(given, _copied(result), _form(result), line, grad)
            return result
        finally:
            self._check_draws()
            self._call = outer

    def add_read(self, owner: Any, key: str, value: Any = MISSING) -> Any:
        """Record that an attribute was read; returns its value, a float with its node."""
        module, path = isinstance(owner, nn.Module), self.watched[id(owner)]
        if key == "training" and module:
            self.mode_matters = True
            self.modes.append((len(self._graph.nodes), self._call, path))
            return value
        if module and (
            key in _INTERNAL
            or any(key in getattr(owner, kind) for kind in ("_modules", "_parameters", "_buffers"))
        ):
            return value
        # The reads inside of properties and methods are recorded themselves.
        written = self._writes.get((id(owner), key))
        if written is not None:
            written.readers.add(self._call)
        if attribute(owner, key) is not value or written is not None:
            return value
        name = ".".join(filter(None, (path, key)))
        read = self.reads.setdefault(name, Read(name, owner, key, value))
        self._readers.setdefault(name, set()).add(self._call)
        if read.owner is not owner:
            return value
        if type(value) is float:
            if name not in self._numbers:
                node = self._add("get_attr", name, key=("number", name))
                node.meta["reads"] = frozenset({name})
                self._numbers[name] = self._number(node, value)
            return self._numbers[name]
        self._add_object(value, name)
        return value

    def _add_batch(self, value: Any, node: fx.Node) -> None:
        """Make nodes for the tensors in a batch of a registered class, read by the first layer."""
        for get, key, entry in entries(value):
            path = (*node.meta["key"], key)
            if isinstance(entry, Tensor):
                self._add("call_function", get, (node, key), key=path, value=entry)
            elif isinstance(entry, (tuple, list, dict)):
                self._add_batch(entry, self._add("call_function", get, (node, key), key=path))

    def _trace_batch(self, get: Callable[..., Any]) -> Callable[..., Any]:
        """Record numbers and tensors that a batch of a registered class computes as attributes."""

        def read(batch: Any, key: str) -> Any:
            if self.idle or key[:1] == "_" or id(batch) not in self._batches:
                return get(batch, key)
            self._paused = True
            try:
                value = get(batch, key)
            finally:
                self._paused = False
            if type(value) not in (int, float) and not isinstance(value, Tensor):
                return value
            if id(value) in self._nodes:
                return value
            node = self._nodes[id(batch)]
            with self._graph.inserting_after(node):
                key_of = (*node.meta["key"], key)
                found = self._add("call_function", getattr, (node, key), key=key_of)
            if isinstance(value, Tensor):
                self._set(value, found)
                return value
            return self._number(found, value)

        return read

    def _refuse_batch_set(self, put: Callable[..., Any]) -> Callable[..., Any]:
        def written(batch: Any, key: Any, value: Any) -> None:
            if not self.idle and id(batch) in self._batches:
                self._fault(f"its forward sets {key} of a {type(batch).__name__} that it was given")
            put(batch, key, value)

        return written

    def _add_object(self, value: Any, name: str) -> None:
        """Record reads from an object that is an attribute, or in one (for example a config)."""
        kind = type(value)
        if id(value) in self.watched:
            return
        if kind in (list, tuple, dict):
            self.watched[id(value)] = name
            for key, each in _parts(value).items():  # type: ignore[union-attr]
                self._add_object(each, f"{name}[{key!r}]")
        own = hasattr(value, "__dict__") or hasattr(kind, "__slots__")
        if not own or callable(value) or kind.__module__.startswith("torch"):
            return
        if isinstance(value, (type, tuple, Tensor, enum.Enum)):
            return
        with suppress(TypeError):  # a type that cannot be patched
            self.watched[id(value)] = name
            self._patches.put(kind, "__getattribute__", _trace_get(kind.__getattribute__))
            self._patches.put(kind, "__setattr__", _trace_set(kind.__setattr__))

    def add_write(self, owner: Any, key: str, value: Any) -> None:
        path, at, before = self.watched[id(owner)], (id(owner), key), attribute(owner, key)
        name = ".".join(filter(None, (path, key)))
        if at not in self._writes:
            what = f"its forward sets the attribute {name}"
            if self._in_leaf(path):
                what = f"its forward sets {name}, of a module that is called as it is"
            whole = Whole(self._call[-1][1], line_in_model(), what)
            slot = isinstance(getattr(type(owner), key, None), MemberDescriptorType)
            own, read = slot or key in vars(owner), name in self.reads
            self._writes[at] = _Write(self._call, path, owner, key, before, own, read, whole)
        self._paused = True
        self._writes[at].changed |= not alike(value, before)
        self._paused = False

    def _restore(self) -> None:
        """Restore the attributes that the forward has set, because layers do not set them.

        That is a fault, unless the value is unchanged, or is read only after it was set. A leaf
        module may read it in its forward.
        """
        called = [f"{node.target}." for node in self._graph.nodes if node.op == "call_module"]
        for at, each in self._writes.items():
            now = attribute(each.owner, each.key)
            same = not self._from_input(now) and alike(now, each.before)
            untraced = at in self.untraced_reads or f"{each.path}.".startswith(tuple(called))
            if (each.changed and untraced) or (not same and (each.read_before or not each.readers)):
                self._faults.append((each.call, each.fault))
            if each.own and each.before is not MISSING:
                object.__setattr__(each.owner, each.key, each.before)
            elif each.own:
                object.__delattr__(each.owner, each.key)
            else:
                vars(each.owner).pop(each.key, None)

    def _from_input(self, value: Any) -> bool:
        """Whether a value depends on the arguments of the model."""
        nodes = [
            each.node if isinstance(each, _Number) else self._nodes.get(id(each))
            for each in flatten(value)[0]
        ]
        return any(node.meta["of_input"] for node in nodes if node is not None)

    def _constant_outputs(self) -> frozenset[int]:
        """Indices of the output tensors that do not depend on the arguments of the model."""
        leaves = enumerate(flatten(self.result, batches=True)[0])
        return frozenset(
            k for k, leaf in leaves if isinstance(leaf, Tensor) and not self._from_input(leaf)
        )

    def applied(self, cls: Any, own: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Record the call of an ``autograd.Function``."""
        if cls is CheckpointFunction:  # the pipe itself recomputes
            self.reentrant = True
            return args[0](*args[2:])
        target = Function(own, f"{cls.__name__}_apply")
        return self.perform("call_function", target, own, args, kwargs)

    def _len(self, value: Any, *, _len: Callable[[Any], int] = len) -> int:
        if isinstance(value, Tensor) and value.dim() and not self.idle:
            return value.shape[0]
        return _len(value)

    def _trace_decision(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """A function that decides by the values of a tensor, as one node."""
        target = Function(fn, fn.__name__.lstrip("_"))

        def called(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if self.idle or not isinstance(tensor, Tensor):
                return fn(tensor, *args, **kwargs)
            return self.perform("call_function", target, fn, (tensor, *args), kwargs)

        return called

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        attribute = name == "__get__"
        if attribute:
            name = func.__self__.__name__
        if name in ("shape", "size"):
            node = self._node_of(args[0])
            if node is None or node.op == "get_attr":  # sizes of parameters are constant
                return func(*args, **kwargs)
        if name in _VALUE_ACCESS:
            self._fault(f"Python takes values out of a tensor, or puts them in ({name})")
        decides = name in _DECIDES or (name == "item" and args[0].dtype is torch.bool)
        if decides and (ask := _GUARDED.get(name)) and self._from_flags(args):
            return self._guarded(ask, args)
        if decides:
            self._fault("what it does next depends on the values in a tensor")
        if name == "dtype" and (node := self._node_of(args[0])) is not None:
            self._dtypes.append((func(*args), node))
        if decides or name in _CONSTANT or name in _VALUE_ACCESS:
            return func(*map_tree(plain, args), **kwargs)
        if attribute:
            given = (args[0], name)
            return self.perform("call_function", getattr, lambda x, _: func(x), given, {})
        own: Any = getattr(Tensor, name, None)
        if own is not func:
            return self.perform("call_function", _printable(func), func, args, kwargs)
        written: Any = getattr(operator, name, None)  # fx prints it as an operator
        if written is not None and not kwargs:
            return self.perform("call_function", written, func, args, {})
        return self.perform("call_method", name, func, args, kwargs)

    def _from_flags(self, tensors: Any) -> bool:
        """Whether values depend only on integers and flags in the arguments of the model.

        Decisions by these (ids and masks) are equal in most calls.
        """
        pending = [self._node_of(tensor) for tensor in tensors_in(tensors)]
        for node in pending:
            value = None if node is None else node.meta["value"]
            if node is not None and not tensors_in(value):
                continue  # sizes and dtypes, of whatever tensors
            floats = isinstance(value, Tensor) and value.dtype.is_floating_point
            if node is None or (node.op == "placeholder" and floats) or node.op == "call_module":
                return False
            if node.meta["key"][0] == "attribute" and isinstance(value, nn.Parameter):
                return False
            pending += node.all_input_nodes
        return True

    def _guarded(self, ask: Callable[..., bool], args: Any) -> bool:
        """A decision by values, with a guard that repeats it in each call."""
        given, self._paused = self._lift(args), True
        value = ask(*args)
        self._paused = False
        node = self._add("call_function", Function(ask, ask.__name__), given)
        node.meta["value"] = value
        self._add("call_function", guard, (node, value, line_in_model()))
        return value

    # Nodes

    def perform(
        self, op: str, target: Any, fn: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        if op == "call_module" or isinstance(target, Function):  # others do not draw
            self._check_draws()
        named = dict(kwargs)
        if isinstance(named.get("device"), str):
            named["device"] = torch.device(named["device"])
        if op == "call_method" and target == self._device.type:  # x.cuda()
            target, args = "to", (args[0], self._device)
            fn = Tensor.to
        elif target == "to" and type(args[-1]) is str:
            args = (*args[:-1], torch.device(args[-1]))
        given = self._lift(args), self._lift(named)
        tensors, self._paused = tensors_in((*args, *kwargs.values())), True
        versions = _versions(tensors)
        mode, start = _mode(self._device), time.perf_counter()
        try:
            result = fn(*map_tree(plain, args), **map_tree(plain, kwargs))
        finally:
            self._paused = False
        seconds = time.perf_counter() - start
        pairs = zip(tensors, versions, _versions(tensors), strict=True)
        written = [tensor for tensor, before, after in pairs if before != after]
        if op == "call_module" or isinstance(target, Function):
            self._python_random = random.getstate()
        elif not (written or isinstance(result, Tensor)):
            lone = not any(isinstance(leaf, fx.Node) for leaf in flatten(given)[0])
            lone |= target is getattr and not _varies(result)
            counts = any(map(_varies, flatten(result)[0]))
            if not counts or (lone and not tensors_in(result)):
                return result
        node = self._add(op, target, *given)
        node.meta.update(seconds=seconds, writes=bool(written))
        if (dtype := _dtype_of(node)) is not None:
            node.meta["dtypes"] = [n for d, n in self._dtypes[:-_DTYPE_READS:-1] if d is dtype]
        if mode != self._mode:
            self._fault("the model runs this under another mode (autocast, inference_mode)")
        if op != "call_module" and type(result) in (tuple, list):
            self._add("call_function", _pieces, (node, len(result), line_in_model()))
        return self._with_nodes(node, result, written)

    def _with_nodes(
        self, node: fx.Node, result: Any, written: list[Tensor], form: str | None = None
    ) -> Any:
        """Register the result of a node, and return it with nodes for its numbers; ``form`` is
        that of a result that was changed since."""
        if node.op == "call_module" and not isinstance(result, Tensor):
            key, given = (*node.meta["key"], "form"), (node, form or _form(result), node.target)
            self._add("call_function", _same_form, given, key=key).meta["pure"] = False
        if isinstance(result, Tensor):
            if self._node_of(result) and not any(result is tensor for tensor in written):
                result = _alias(result)  # the function returned its argument
        elif isinstance(result, (int, float)) and (
            _varies(result) or isinstance(node.target, Function)
        ):
            node.meta["pure"] = node.op != "call_module"
            return self._number(node, result)
        elif isinstance(result, PLAIN):
            return result
        node.meta["pure"] |= isinstance(result, torch.Size)
        old = _parts(result)
        if old is None and isinstance(result, tuple):  # of PyTorch's own
            old = dict(enumerate(result))
        if old is None:
            self._set(result, node)
            return result
        named = dataclasses.is_dataclass(result) or hasattr(result, "_fields")
        get = getattr if named else operator.getitem
        node.meta["value"] = result
        new = {}
        for at, value in old.items():
            key = (*node.meta["key"], at)
            part = self._add("call_function", get, (node, at), key=key)
            new[at] = self._with_nodes(part, value, written)
        if all(new[at] is value for at, value in old.items()):
            return result
        if type(result) in (tuple, list, torch.Size):
            return type(result)(new.values())
        return new if type(result) is dict else result

    def _add(
        self,
        op: str,
        target: Any,
        args: Any = (),
        kwargs: Any = None,
        *,
        key: tuple[Any, ...] | None = None,
        value: Any = None,
        pure: bool = False,
    ) -> fx.Node:
        """Make a node; a node with an explicit ``key`` is no step of the call."""
        call = self._call
        name = target if isinstance(target, str) else getattr(target, "__name__", "value")
        node = self._graph.create_node(op, target, name="node")
        node.args = tuple(args)  # create_node() would look through them
        if kwargs:
            node.kwargs = dict(kwargs)
        used = node.all_input_nodes[: 1 if target in ("to", "type_as") else None]
        node.meta.update(
            of_input=op == "placeholder" or any(each.meta["of_input"] for each in used),
            call=call, key=key or (*call, self.steps[call]), owner=call[-1][1],
            line=line_in_model(), pure=pure or (key is not None and op not in _ENDS),
            at=len(self._graph.nodes), writes=False, value=None, reads=frozenset(), dtypes=(),
            grad=torch.is_grad_enabled(), name=_identifier(name),
        )  # fmt: skip
        self.steps[call] += key is None
        if value is not None:
            self._set(value, node)
        return node

    def _set(self, value: Any, node: fx.Node) -> None:
        node.meta["value"] = value
        self._nodes[id(value)] = node

    def _node_of(self, value: Any) -> fx.Node | None:
        """The node of a value, which tensors of the model get when they are used first."""
        node = self._nodes.get(id(value))
        if node is None and id(value) in self._tensors:
            name, _ = self._tensors[id(value)]
            node = self._add("get_attr", name, key=("attribute", name), value=value)
        return node

    # Sizes, and numbers computed of them

    def _number(self, node: fx.Node, value: Any) -> Any:
        node.meta["value"] = value = plain(value)
        traced = (_Int if isinstance(value, int) else _Float)(value)
        traced.node, traced.tracer = node, self
        return traced

    def computed(self, fn: Callable[..., Any], args: tuple[Any, ...], value: Any) -> Any:
        """Make the node of a number that was computed from others."""
        node = self._add("call_function", fn, self._lift(args), pure=True)
        of = [used.meta["reads"] for used in node.all_input_nodes]
        node.meta["reads"] = frozenset().union(*of) if all(of) else frozenset()
        return self._number(node, value)

    def decided(self, number: Any) -> None:
        """Record that Python used the value of a number."""
        if reads := number.node.meta["reads"]:
            self.decisive |= reads
            return
        self._add("call_function", guard, (number.node, plain(number), line_in_model()))

    # Arguments

    def _lift(self, tree: Any) -> Any:
        """A tree of values with each value replaced by its node."""
        return map_tree(self._lifted, _copied(tree), self._build)

    def _build(self, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        """A node that makes a dataclass, named tuple or mapping."""
        return self._add("call_function", _printable(cls), args, kwargs, pure=True)

    def _known(self, leaf: Any) -> Any:
        """A leaf that is a node or a plain value in the graph; raises a LookupError for others."""
        if isinstance(leaf, _Number):
            return leaf.node
        if isinstance(leaf, torch.device):
            same = {(leaf.type, leaf.index), (leaf.type, leaf.index or 0)} & self._devices
            return self._device_node if same or leaf == torch.device(self._device.type) else leaf
        if isinstance(leaf, PLAIN) and not isinstance(leaf, enum.Enum):
            return float(leaf) if isinstance(leaf, float) else leaf  # NumPy's are floats, too
        if (node := self._node_of(leaf)) is None:
            raise LookupError(leaf)
        return node

    def _lifted(self, leaf: Any) -> Any:
        with suppress(LookupError):
            return self._known(leaf)
        module = leaf.__self__ if isinstance(leaf, MethodType) else leaf
        if isinstance(module, nn.Module) and module in self.paths:
            return self._module_node(leaf, module, self.paths[module])
        if isinstance(leaf, nn.Module) or (isinstance(leaf, Tensor) and leaf.requires_grad):
            self._fault(f"a {type(leaf).__name__} that is no part of the model is used")
        by_value = not isinstance(leaf, Tensor)  # so equal objects have one name in every run
        known = self._objects.items()
        found = (n for n, old in known if old is leaf or (by_value and equal(old, leaf)))
        name = next(found, f"_{type(leaf).__name__}_{len(known)}")
        self._objects.setdefault(name, leaf)
        return self._add("get_attr", name, key=("object", name), value=leaf)

    def _module_node(self, leaf: Any, module: nn.Module, path: str) -> fx.Node:
        """The node of a module, or of its method, that is an argument of a call."""
        inside = self._in_leaf(path)
        if not inside or leaf is not module:
            owner = self._call[-1][1] if inside else path
            what = f"{path or 'the model'} (or a method of it) is passed to what calls it"
            self._faults.append((self._call, Whole(owner, line_in_model(), what)))
        return self._add("get_attr", path, key=("module", path), value=module)

    def _in_leaf(self, path: str) -> bool:
        """Whether a module is a leaf module or inside one."""
        return any(f"{path}.".startswith(f"{leaf}.") for leaf in self._leaves)

    def _check_draws(self) -> None:
        state = random.getstate()
        if state != self._python_random:
            self._fault("what it does next depends on Python's random numbers")
            self._python_random = state

    def _fault(self, what: str) -> None:
        self._faults.append((self._call, Whole(self._call[-1][1], line_in_model(), what)))


# Patches: what a trace records


def tracing(model: nn.Module, run: Callable[[], _T]) -> _T:
    """Calls a function in which each ``Tracer`` records what the model does.

    Classes are patched once for all runs, because each patch makes Python look up anew what is in
    a class and its subclasses.
    """
    patches, kinds = Patches(), {type(module) for module in model.modules()}

    def patched() -> _T:
        for cls in {cls for kind in kinds for cls in kind.__mro__ if issubclass(cls, nn.Module)}:
            for name, replaced in ("__call__", _trace_call), ("__setattr__", _trace_set):
                if name in cls.__dict__:
                    patches.put(cls, name, replaced(cls.__dict__[name]))
        for cls in kinds:
            patches.put(cls, "__getattribute__", _trace_get(cls.__getattribute__))
        apply = _trace_apply(torch.autograd.Function.__dict__["apply"])
        patches.put(torch.autograd.Function, "apply", classmethod(apply))
        script: Any = torch.jit.ScriptFunction
        patches.put(script, "__call__", _trace_script(script.__call__))
        for module, own in list(sys.modules.items()):
            if module.partition(".")[0] not in _UNCACHED:
                for name, cached in _cached_functions(module, len(getattr(own, "__dict__", ()))):
                    patches.put(own, name, _uncached(cached))
        return run()

    return patches.around(patched)


def _trace_call(call: Callable[..., Any]) -> Callable[..., Any]:
    def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        trace = Tracer.current
        if trace is None or trace.idle or module not in trace.paths:
            return call(module, *args, **kwargs)
        return trace.called(call, module, args, kwargs)

    return called


def _trace_get(get: Callable[..., Any]) -> Callable[..., Any]:
    def read(owner: Any, key: str) -> Any:
        trace = Tracer.current
        if trace is None or key[:2] == "__":
            return get(owner, key)
        if key == "training" and not _is_library(sys._getframe(1).f_code.co_filename):
            trace.mode_matters = True
        if trace.idle or id(owner) not in trace.watched:
            trace.untraced_reads.add((id(owner), key))
            return get(owner, key)
        try:
            value = get(owner, key)
        except AttributeError:
            trace.add_read(owner, key)
            raise
        return trace.add_read(owner, key, value)

    return read


def _trace_set(put: Callable[..., Any]) -> Callable[..., Any]:
    def written(owner: Any, key: str, value: Any) -> None:
        trace = Tracer.current
        if trace is not None and not trace.idle and id(owner) in trace.watched:
            trace.add_write(owner, key, value)
        put(owner, key, value)

    return written


def _trace_apply(apply: Any) -> Callable[..., Any]:
    def applied(cls: Any, *args: Any, **kwargs: Any) -> Any:
        own, trace = apply.__get__(None, cls), Tracer.current
        if trace is None or trace.idle:
            return own(*args, **kwargs)
        return trace.applied(cls, own, args, kwargs)

    return applied


def _trace_script(call: Callable[..., Any]) -> Callable[..., Any]:
    def called(function: Any, *args: Any, **kwargs: Any) -> Any:
        trace = Tracer.current
        if trace is None or trace.idle:
            return call(function, *args, **kwargs)
        target = Function(function, function.name)
        return trace.perform("call_function", target, function, args, kwargs)

    return called


def _uncached(cached: Any) -> Callable[..., Any]:
    """A cached function, without its cache for numbers with a node: keys compare by value."""

    def called(*args: Any, **kwargs: Any) -> Any:
        given = flatten((args, kwargs))[0] if Tracer.current is not None else ()
        numbers = any(isinstance(each, _Number) for each in given)
        return (cached.__wrapped__ if numbers else cached)(*args, **kwargs)

    return called


@functools.cache
def _cached_functions(module: str, _: int) -> list[tuple[str, Any]]:
    """The functions with a cache in an imported module with so many names."""
    own = list(getattr(sys.modules[module], "__dict__", {}).items())
    return [(name, each) for name, each in own if type(each) is functools._lru_cache_wrapper]


def line_in_model() -> str:
    """The innermost line of the model's code that is running, for messages; empty outside of it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != interrupts.__file__:
        if not _is_library(frame.f_code.co_filename):
            return _line(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back
    return ""


@functools.cache
def _is_library(file: str) -> bool:
    return file.startswith(_NOT_THE_MODEL)


@functools.cache
def _line(file: str, line: int, function: str) -> str:
    return f"{file}:{line}, in {function}: {linecache.getline(file, line).strip()}"


@functools.cache
def _identifier(name: str) -> str:
    """A name for generated code."""
    return re.sub(r"^(?=\d|$)", "value_", re.sub(r"\W", "_", name).strip("_"))


def _memory(nodes: Iterable[fx.Node]) -> set[Any]:
    return {storage_of(tensor) for node in nodes for tensor in tensors_in(node.meta["value"])}


def _dtype_of(node: fx.Node) -> torch.dtype | None:
    """The floating-point dtype among the arguments of a node."""
    found = list[torch.dtype]()
    fx.node.map_aggregate(
        (node.args, node.kwargs), lambda a: found.append(a) if type(a) is torch.dtype else a
    )
    return next((dtype for dtype in found if dtype.is_floating_point), None)


def _varies(leaf: Any) -> bool:
    """Whether a result may depend on the batch or on values."""
    return not isinstance(leaf, PLAIN) or (
        type(leaf) is not bool and isinstance(leaf, (int, float))
    )


def _printable(fn: Any) -> Any:
    """A callable that fx can print: itself if it has a name in torch, else a ``Function``."""
    try:
        path = fx.node._get_qualified_name(fn)
        if path.startswith("torch.") and operator.attrgetter(path[6:])(torch) == fn:
            return fn
    except Exception:  # no such name
        pass
    name = getattr(fn, "__name__", type(fn).__name__)
    return Function(fn, name if name.isidentifier() else "function")


def _versions(tensors: list[Tensor]) -> list[int | None]:
    """How often each tensor was written into; None where that is not counted."""
    with torch._C.DisableTorchFunction():
        return [None if tensor.is_inference() else tensor._version for tensor in tensors]


def _alias(tensor: Tensor) -> Tensor:
    """Another object for a tensor, distinct from the argument that a function returned."""
    with torch._C.DisableTorchFunction():
        return tensor.view_as(tensor) if tensor.layout is torch.strided else tensor


def _mode(device: torch.device) -> Any:
    """The global modes that operations depend on, except the grad mode."""
    mixed = device.type != "meta" and torch.is_autocast_enabled(device.type)
    return torch.is_inference_mode_enabled(), mixed, torch.get_default_dtype()


# PyTorch's transformers


def _encode(
    encoder: Any,
    src: Tensor,
    mask: Any = None,
    src_key_padding_mask: Any = None,
    is_causal: bool | None = None,
) -> Any:
    """Replaces ``nn.TransformerEncoder.forward``, which nests or not by values of the padding."""
    padding, nests = src_key_padding_mask, getattr(encoder, "use_nested_tensor", False)
    if encoder.training or not nests or mask is not None or padding is None:
        return _FORWARD(encoder, src, mask, padding, is_causal)
    trains = any(p.requires_grad for p in encoder.layers[0].parameters())
    x, padding = _nested(src, padding, getattr(encoder, "mask_check", True), trains)
    for layer in encoder.layers:
        x = layer(x, is_causal=bool(is_causal), src_key_padding_mask=padding)
    x = _padded(x, tuple(src.shape))
    return x if encoder.norm is None else encoder.norm(x)


class _FirstLayer(SimpleNamespace):
    """A fake first layer of an encoder (and its modules and weights) that keeps its arguments."""

    def __getattr__(self, name: str) -> Any:
        if name == "__torch_function__":  # which only tensors have
            raise AttributeError(name)
        return self

    def __call__(self, x: Tensor, *, src_key_padding_mask: Any, **more: Any) -> Tensor:
        self.given = x, src_key_padding_mask
        return x


def _nested(src: Tensor, padding: Tensor, check: bool, trains: bool) -> Any:
    """The arguments of the first layer: the input, nested if PyTorch nests it, and the padding."""
    first: Any = _FirstLayer(training=False, requires_grad=trains)
    encoder = SimpleNamespace(use_nested_tensor=True, mask_check=check, layers=[first], norm=None)
    _FORWARD(encoder, src, src_key_padding_mask=padding)
    return first.given


def _padded(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    return x.to_padded_tensor(0.0, shape) if x.is_nested else x


_FORWARD: Any = nn.TransformerEncoder.forward
_DECIDING: tuple[tuple[Any, str], ...] = (
    (transformer, "_detect_is_causal_mask"), (sys.modules[__name__], "_nested"),
    (sys.modules[__name__], "_padded"), (torch, "_check_tensor_all"),
)  # fmt: skip
