"""Snapshots of everything that a run of layers can change, and their restoration.

restoring_settings   random states and thread settings
restoring_module     these, and a module's modes, buffers and attributes, but no parameters
State                these, and the parameters, gradients and objects of the user's in modules

Functions that restore may run more than once, because Ctrl-C may interrupt them (see
``runtime.interrupts``).
"""

from __future__ import annotations

import contextvars
import random
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import cache, partial
from operator import attrgetter, eq, methodcaller
from types import FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from syncpipe.compare import SIMPLE, same_bits
from syncpipe.runtime.interrupts import run_and_undo
from syncpipe.runtime.random_numbers import LOCKS, Generators, put_back_states, states_of
from syncpipe.runtime.thread_state import restoring_thread
from syncpipe.storage import renorming

__all__ = ["State", "restorer", "restoring_module", "restoring_settings", "same_value"]

_T = TypeVar("_T")
_NO_STATE = (*SIMPLE, type, FunctionType, MethodType, ModuleType)
_FOREIGN = {*sys.stdlib_module_names, "torch", "numpy", "syncpipe"}


def restoring_settings(
    run: Callable[[], _T], devices: Iterable[torch.device], threads: int | None = None
) -> _T:
    """Calls a function with grad mode on, then restores random states and thread settings.

    Autocast stays as it is, without its cache, which would outlive copies of the layers.
    ``threads`` is the number of intra-op threads during the call. The random states are those of
    the CPU and of ``devices``.
    """

    def run_alone() -> _T:
        if threads is not None:
            torch.set_num_threads(threads)
        torch.set_autocast_cache_enabled(False)
        with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
            torch._C._set_grad_enabled(True)
            return contextvars.copy_context().run(run)  # discards changes of the store of skips

    python_state, threads_before = random.getstate(), torch.get_num_threads()
    generators: dict[tuple[str, int], torch.Generator] = {}
    for device in [torch.device("cpu"), *devices]:
        found = Generators(device)
        generators.update(found.pick(found.all))
    states = {key: _with_lock(key, states_of, [generators[key]]) for key in generators}

    def put_back() -> None:
        random.setstate(python_state)
        if threads is not None:
            torch.set_num_threads(threads_before)
        for key, state in states.items():
            _with_lock(key, put_back_states, [generators[key]], state)

    return run_and_undo(lambda: restoring_thread(run_alone), put_back)


def _with_lock(key: tuple[str, int], call: Callable[..., _T], *args: Any) -> _T:
    """Reads or sets the state of a generator while no layer has leased it."""
    with LOCKS[key]:
        return call(*args)


def restoring_module(module: nn.Module, run: Callable[[], _T], *, gradients: bool = False) -> _T:
    """Calls a function that runs a module, then restores the module's modes, buffers, attributes.

    Of parameters it restores the weights of embeddings with ``max_norm``, which a forward changes,
    and with ``gradients`` all ``.grad``, which are None during the call. It does not look into
    objects of the user's.
    """
    return restorer(module, gradients=gradients)(run)


def restorer(module: nn.Module, *, gradients: bool = False) -> Callable[[Callable[[], _T]], _T]:
    """As :func:`restoring_module`, for several calls that begin with the module as it is."""
    renormed = {id(part.weight) for part in renorming(module)}
    leave = [p for p in module.parameters() if id(p) not in renormed]
    own = [*module.parameters(), *module.buffers()]
    devices = {tensor.device for tensor in own if not tensor.is_meta}
    state = State({"": module}, leave, objects=False)
    for leaf in leave if gradients else ():
        state.add_gradient(leaf)
    return partial(state.restoring, devices=devices)


class _Part:
    """A value that a run can change in place, as it was: one of very many in a snapshot."""

    __slots__ = ("before", "kind", "name", "read", "same", "value", "write")

    def __init__(
        self,
        kind: str,
        name: str,
        value: Any,
        read: Callable[[Any], Any],
        write: Callable[[Any, Any], Any],
        same: Callable[[Any, Any], bool] = eq,
    ) -> None:
        self.kind, self.name, self.value = kind, name, value
        self.read, self.write, self.same = read, write, same
        self.before = read(value)

    def restore(self) -> None:
        self.write(self.value, self.before)

    def changed(self) -> list[str]:
        return [] if self.same(self.read(self.value), self.before) else [self.name]


class _DictPart(_Part):
    """A dict, of which each entry that differs has a name of its own."""

    __slots__ = ()

    def changed(self) -> list[str]:
        before, now = self.before, self.value
        keys = {**before, **now}
        return [_entry(self.name, k) for k in keys if not same_value(before.get(k), now.get(k))]


def _entry(name: str, key: Any) -> str:
    """The name of an entry of ``name[`` (items), ``name.`` or an empty name (attributes)."""
    return f"{name}{key!r}]" if name.endswith("[") else f"{name}{key}"


class State:
    """A snapshot, in the CPU's memory, of modules and all that they refer to.

    Args:
        modules: by the prefix of their names.
        leave: objects to leave out.
        objects: whether to look into objects of the user's.

    Attributes:
        leaves: the tensors that get gradients.
    """

    def __init__(
        self, modules: dict[str, nn.Module], leave: Iterable[Any] = (), *, objects: bool = True
    ) -> None:
        self._objects = objects
        self._undo: list[Callable[[], Any]] = []
        self._parts: list[_Part] = []
        self._seen: dict[int, Any] = {id(thing): thing for thing in leave}
        self._pending: list[tuple[str, str, Any]] = []
        self._hooks: list[dict[Any, Any]] = []  # for example optimizer steps in backward
        self.leaves: list[Tensor] = []
        python: Any = random
        self._visit("attribute", "that of Python's random", python._inst)
        if (numpy := sys.modules.get("numpy.random")) is not None:
            self._visit("attribute", "that of numpy.random", numpy.get_state.__self__)
        self._pending += [("attribute", name, module) for name, module in modules.items()]
        while self._pending:
            self._visit(*self._pending.pop())

    def add_leaf(self, leaf: Tensor) -> None:
        self._visit("attribute", "", leaf)

    def restoring(
        self, run: Callable[[], _T], devices: Iterable[torch.device], threads: int | None = None
    ) -> _T:
        """As :func:`restoring_settings`; restores all of this snapshot as well.

        During the call all ``.grad`` are None, and no ``register_post_accumulate_grad_hook`` runs.
        """

        def alone() -> _T:
            for leaf in self.leaves:
                leaf.grad = None
            for hooks in self._hooks:
                hooks.clear()
            return run()

        def undo() -> None:
            with LOCKS.states:
                for call in self._undo:
                    call()
                for part in self._parts:
                    part.restore()

        return run_and_undo(lambda: restoring_settings(alone, devices, threads), undo)

    def changes(self) -> list[tuple[str, str]]:
        """The kind and path of everything that differs from the snapshot.

        Kinds are ``"generator"``, ``"parameter"``, ``"buffer"`` and ``"attribute"``.
        """
        return [(part.kind, name) for part in self._parts for name in part.changed()]

    # --- the walk --------------------------------------------------------------------------------

    def _visit(self, kind: str, name: str, value: Any) -> None:
        if isinstance(value, _NO_STATE) or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, Tensor):
            self._tensor(kind, name, value)
        elif isinstance(value, nn.Module):
            self._module(name, value)
        elif isinstance(value, torch.Generator):
            read, write = methodcaller("get_state"), lambda own, state: own.set_state(state)
            self._parts.append(_Part("generator", name, value, read, write, torch.equal))
        elif isinstance(value, random.Random):
            read, write = methodcaller("getstate"), lambda own, state: own.setstate(state)
            self._parts.append(_Part("generator", name, value, read, write))
        elif type(value).__module__.startswith("numpy"):
            self._numpy(kind, name, value)
        elif isinstance(value, dict):
            self._dict(kind, f"{name}[", value)
        elif type(value) in (list, set, deque, bytearray):
            self._container(kind, name, value)
        elif isinstance(value, list | tuple | set | deque):
            self._pending += [(kind, f"{name}[{k}]", item) for k, item in enumerate(value)]
        elif (
            self._objects
            and hasattr(value, "__dict__")
            and type(value).__module__.partition(".")[0] not in _FOREIGN
        ):
            self._dict(kind, f"{name}.", vars(value))

    def _module(self, name: str, module: nn.Module) -> None:
        prefix = f"{name}." if name else ""
        if (inlined := getattr(module, "_inlined", None)) is not None:  # shares the training mode
            self._undo.append(partial(setattr, inlined, "training", inlined.training))
        if isinstance(module, torch.jit.ScriptModule):
            self._pending += [("parameter", prefix + n, p) for n, p in module.named_parameters()]
            self._pending += [("buffer", prefix + n, b) for n, b in module.named_buffers()]
            self._undo.append(partial(setattr, module, "training", module.training))
            return
        parts: list[Any] = [module._parameters, module._buffers, module._modules, vars(module)]
        kinds = "parameter", "buffer", "attribute", "attribute"
        for own, kind in zip(parts, kinds, strict=True):
            self._seen[id(own)] = own
            self._dict(kind, prefix, own)

    def _tensor(self, kind: str, name: str, tensor: Tensor) -> None:
        if is_lazy(tensor):
            raise ValueError(
                f"{name} is a lazy {kind} without a value yet, and its first forward could not be "
                "undone: run the model once, pipe(input), and verify it then"
            )
        if tensor.is_meta:
            return
        data = tensor.data
        if data.layout is torch.strided:
            for dim, (size, stride) in enumerate(zip(data.shape, data.stride(), strict=True)):
                if size > 1 and not stride:  # expanded: all entries share memory
                    data = data.narrow(dim, 0, 1)
        self._parts.append(_Part(kind, name, data, _on_cpu, Tensor.copy_, same_bits))
        self.add_gradient(tensor)

    def add_gradient(self, tensor: Tensor) -> None:
        if tensor.is_leaf and (tensor.is_floating_point() or tensor.is_complex()):
            for own in ("requires_grad", "grad"):
                self._undo.append(partial(setattr, tensor, own, getattr(tensor, own)))
            if tensor.requires_grad:
                self.leaves.append(tensor)
        if hooks := getattr(tensor, "_post_accumulate_grad_hooks", None):
            self._hooks.append(hooks)
            self._undo.append(partial(hooks.update, dict(hooks)))

    def _dict(self, kind: str, name: str, own: dict[Any, Any]) -> None:
        part = _DictPart(kind, name, own, dict, _refill if _is_plain(type(own)) else _leave)
        self._parts.append(part)
        self._pending += [
            (kind, _entry(name, key), value)
            for key, value in part.before.items()
            if not (isinstance(value, _NO_STATE) or id(value) in self._seen)
        ]

    def _container(self, kind: str, name: str, own: Any) -> None:
        self._parts.append(_Part(kind, name, own, list, _refill, _same_items))
        self._pending += [(kind, f"{name}[{k}]", item) for k, item in enumerate(own)]

    def _numpy(self, kind: str, name: str, value: Any) -> None:
        numpy = sys.modules["numpy"]
        if isinstance(value, numpy.ndarray) and value.flags.writeable:
            read, write, same = methodcaller("copy"), numpy.copyto, numpy.array_equal
            self._parts.append(_Part(kind, name, value, read, write, same))
        source = getattr(value, "bit_generator", getattr(value, "_bit_generator", None))
        if source is not None:
            self._parts.append(
                _Part("generator", name, source, attrgetter("state"), _set_state, _same_text)
            )


def _on_cpu(tensor: Tensor) -> Tensor:
    return tensor.to("cpu", copy=True)


def _refill(own: Any, before: Any) -> None:
    """Give a dict, list, set, deque or bytearray these contents."""
    own.clear()
    (own.update if isinstance(own, (dict, set)) else own.extend)(before)


def _leave(own: Any, before: Any) -> None:
    """Do not restore a dict that refuses changes."""


@cache
def _is_plain(kind: type) -> bool:
    """Whether a class of dicts changes as dicts do: a frozen config overrides some methods."""
    methods = [
        [getattr(each, name) for name in ("clear", "update", "__setitem__")]
        for each in (kind, dict, OrderedDict)
    ]
    return methods[0] in methods[1:]


def _same_items(now: list[Any], before: list[Any]) -> bool:
    return len(now) == len(before) and all(map(same_value, now, before))


def _set_state(source: Any, state: Any) -> None:
    source.state = state


def _same_text(now: Any, before: Any) -> bool:
    return str(now) == str(before)  # states may contain arrays


def same_value(a: Any, b: Any) -> bool:
    """Whether two values of an attribute count as unchanged: identical, or equal if simple.

    Tensors may differ in dtype (``self.mean = self.mean.to(x)``).
    """
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a is b or (a.shape == b.shape and not a.is_meta and torch.equal(a.to(b), b))
    return a is b or (type(a) is type(b) and isinstance(a, SIMPLE) and a == b)
