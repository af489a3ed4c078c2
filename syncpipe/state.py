"""All that a run of layers can change, and how it is put back.

restoring_settings   random states, and settings of the thread
restoring_module     these, and all of a module but its parameters: modes, buffers, what hangs on it
State                all of modules: parameters and gradients as well, and objects of the user's

What puts things back may be called more than once, in case Ctrl-C comes in the middle of it (see
``runtime.interrupts``).
"""

from __future__ import annotations

import contextvars
import operator
import random
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from syncpipe.runtime.interrupts import run_and_undo
from syncpipe.runtime.random_numbers import LOCKS, Generators, put_back_states, states_of
from syncpipe.runtime.thread_state import restoring_thread

__all__ = ["SIMPLE", "State", "restoring_module", "restoring_settings", "same_bits", "same_value"]

_T = TypeVar("_T")
#: What is compared by its value.
SIMPLE = (int, float, complex, str, bytes, bool, type(None))
_NO_STATE = (*SIMPLE, type, FunctionType, MethodType, ModuleType)
_FOREIGN = {*sys.stdlib_module_names, "torch", "numpy", "syncpipe"}


def restoring_settings(
    run: Callable[[], _T], devices: Iterable[torch.device], threads: int | None = None
) -> _T:
    """Calls a function in training's settings; puts random states and settings back after it.

    Autocast is the caller's, but without its cache, which would outlive the copies of the layers.
    Generators are those of the CPU and of ``devices``; ``threads`` is how many it has to compute.
    """

    def run_alone() -> _T:
        if threads is not None:
            torch.set_num_threads(threads)
        torch.set_autocast_cache_enabled(False)
        with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
            torch._C._set_grad_enabled(True)
            return contextvars.copy_context().run(run)  # the store of skips is not left behind

    undo: list[Callable[[], Any]] = [
        partial(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled()),
        partial(random.setstate, random.getstate()),
    ]
    if threads is not None:
        undo.append(partial(torch.set_num_threads, torch.get_num_threads()))
    generators: dict[tuple[str, int], torch.Generator] = {}
    for device in [torch.device("cpu"), *devices]:
        found = Generators(device)
        generators.update(found.pick(found.all))
    states = {key: _held(key, states_of, [generators[key]]) for key in generators}

    def put_back() -> None:
        for call in undo:
            call()
        for key, state in states.items():
            _held(key, put_back_states, [generators[key]], state)

    return run_and_undo(lambda: restoring_thread(run_alone), put_back)


def _held(key: tuple[str, int], call: Callable[..., _T], *args: Any) -> _T:
    """Reads or sets the state of a generator while no layer has its own there."""
    with LOCKS[key]:
        return call(*args)


def restoring_module(module: nn.Module, run: Callable[[], _T], *, gradients: bool = False) -> _T:
    """Calls a function that runs a module, and puts back what that changed, but for parameters.

    Of these only the weights of embeddings that shorten their rows as they go (``max_norm``) are
    put back, and if asked for ``gradients``, of which none are there meanwhile; objects of the
    user's that hang on the module are not.
    """
    renormed = {
        id(part.weight)
        for part in module.modules()
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.max_norm is not None
    }
    leave = [p for p in module.parameters() if id(p) not in renormed]
    own = [*module.parameters(), *module.buffers()]
    devices = {tensor.device for tensor in own if not tensor.is_meta}
    state = State({"": module}, leave, objects=False)
    for leaf in leave if gradients else ():
        state.add_gradient(leaf)
    return state.restoring(run, devices)


class State:
    """Modules, by name, and all that is in them, as they are now; copied to the CPU's memory.

    Args:
        leave: objects that are left alone.
        objects: whether objects of the user's are looked into.

    Attributes:
        leaves: the tensors that get gradients.
    """

    def __init__(
        self, modules: dict[str, nn.Module], leave: Iterable[Any] = (), *, objects: bool = True
    ) -> None:
        self._objects = objects
        self._undo: list[Callable[[], Any]] = []
        self._looks: list[tuple[str, Callable[[], list[str]]]] = []
        self._seen: dict[int, Any] = {id(thing): thing for thing in leave}
        self._pending: list[tuple[str, str, Any]] = []
        self._hooks: list[dict[Any, Any]] = []  # steps of optimizers in backward, say
        self.leaves: list[Tensor] = []
        python: Any = random
        self._visit("attribute", "that of Python's random", python._inst)
        if (numpy := sys.modules.get("numpy.random")) is not None:
            self._visit("attribute", "that of numpy.random", numpy.get_state.__self__)
        self._pending += [("attribute", name, module) for name, module in modules.items()]
        while self._pending:
            self._visit(*self._pending.pop())

    def add_leaf(self, leaf: Tensor) -> None:
        """Another tensor that gets gradients."""
        self._visit("attribute", "", leaf)

    def restoring(
        self, run: Callable[[], _T], devices: Iterable[torch.device], threads: int | None = None
    ) -> _T:
        """As :func:`restoring_settings`, with no gradients there, and all put back as it was.

        Hooks that run when a gradient is there (``register_post_accumulate_grad_hook``) do not.
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

        return run_and_undo(lambda: restoring_settings(alone, devices, threads), undo)

    def changes(self) -> list[tuple[str, str]]:
        """What is not what it was: of which kind, and where it is, from the layer on.

        Kinds are ``"generator"``, ``"parameter"``, ``"buffer"`` and ``"attribute"``.
        """
        return [(kind, name) for kind, look in self._looks for name in look()]

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
            self._keep("generator", name, value.get_state, value.set_state, torch.equal)
        elif isinstance(value, random.Random):
            self._keep("generator", name, value.getstate, value.setstate)
        elif type(value).__module__.startswith("numpy"):
            self._numpy(kind, name, value)
        elif isinstance(value, dict):
            self._dict(kind, value, lambda key: f"{name}[{key!r}]")
        elif type(value) in (list, set, deque, bytearray):
            self._container(kind, name, value)
        elif isinstance(value, list | tuple | set | deque):
            self._pending += [(kind, f"{name}[{k}]", item) for k, item in enumerate(value)]
        elif (
            self._objects
            and hasattr(value, "__dict__")
            and type(value).__module__.partition(".")[0] not in _FOREIGN
        ):
            self._dict(kind, vars(value), lambda key: f"{name}.{key}")

    def _keep(
        self,
        kind: str,
        name: str,
        read: Callable[[], Any],
        write: Callable[[Any], Any],
        same: Callable[[Any, Any], bool] = operator.eq,
    ) -> None:
        """Has something put back, and looked at."""
        before = read()
        self._undo.append(lambda: write(before))
        self._looks.append((kind, lambda: [] if same(read(), before) else [name]))

    def _module(self, name: str, module: nn.Module) -> None:
        prefix = f"{name}." if name else ""
        if (inlined := getattr(module, "_inlined", None)) is not None:  # it shares its mode
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
            self._dict(kind, own, lambda key: f"{prefix}{key}")

    def _tensor(self, kind: str, name: str, tensor: Tensor) -> None:
        if is_lazy(tensor):
            raise ValueError(
                f"{name} is a lazy {kind} that has no value yet, and its first forward could not "
                "be taken back: run the model once, pipe(input), and verify it then"
            )
        if tensor.is_meta:
            return
        data = tensor.data
        if data.layout is torch.strided:
            for dim, (size, stride) in enumerate(zip(data.shape, data.stride(), strict=True)):
                if size > 1 and not stride:  # expanded: all of it is one place in memory
                    data = data.narrow(dim, 0, 1)
        self._keep(kind, name, lambda: data.to("cpu", copy=True), data.copy_, same_bits)
        self.add_gradient(tensor)

    def add_gradient(self, tensor: Tensor) -> None:
        """The gradient of a tensor, and what runs when there is one."""
        if tensor.is_leaf and (tensor.is_floating_point() or tensor.is_complex()):
            for own in ("requires_grad", "grad"):
                self._undo.append(partial(setattr, tensor, own, getattr(tensor, own)))
            if tensor.requires_grad:
                self.leaves.append(tensor)
        if hooks := getattr(tensor, "_post_accumulate_grad_hooks", None):
            self._hooks.append(hooks)
            self._undo.append(partial(hooks.update, dict(hooks)))

    def _dict(self, kind: str, own: dict[Any, Any], name: Callable[[Any], str]) -> None:
        before = dict(own)
        methods = [
            [getattr(kind, name) for name in ("clear", "update", "__setitem__")]
            for kind in (type(own), dict, OrderedDict)
        ]
        if methods[0] in methods[1:]:  # a frozen config refuses some of them
            self._undo += [own.clear, partial(own.update, before)]

        def changed() -> list[str]:
            keys = {**before, **own}
            return [name(key) for key in keys if not same_value(before.get(key), own.get(key))]

        self._looks.append((kind, changed))
        self._pending += [(kind, name(key), value) for key, value in before.items()]

    def _container(self, kind: str, name: str, own: Any) -> None:
        def write(before: list[Any]) -> None:
            own.clear()
            (own.update if isinstance(own, set) else own.extend)(before)

        def same(now: list[Any], before: list[Any]) -> bool:
            return len(now) == len(before) and all(map(same_value, now, before))

        self._keep(kind, name, lambda: list(own), write, same)
        self._pending += [(kind, f"{name}[{k}]", item) for k, item in enumerate(own)]

    def _numpy(self, kind: str, name: str, value: Any) -> None:
        numpy = sys.modules["numpy"]
        if isinstance(value, numpy.ndarray) and value.flags.writeable:
            self._keep(kind, name, value.copy, partial(numpy.copyto, value), numpy.array_equal)
        source = getattr(value, "bit_generator", getattr(value, "_bit_generator", None))
        if source is not None:

            def same(now: Any, before: Any) -> bool:
                return str(now) == str(before)  # there may be arrays in them

            write = partial(setattr, source, "state")
            self._keep("generator", name, lambda: source.state, write, same)


def same_value(a: Any, b: Any) -> bool:
    """Whether it makes no difference that the second of two values is in the first one's place.

    A tensor may have been converted to another dtype (``self.mean = self.mean.to(x)``).
    """
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a is b or (a.shape == b.shape and not a.is_meta and torch.equal(a.to(b), b))
    return a is b or (type(a) is type(b) and isinstance(a, SIMPLE) and a == b)


def same_bits(a: Any, b: Any) -> bool:
    """Whether two values are the same, to the last bit; of objects only the type is looked at."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return type(a) is type(b) and (not isinstance(a, SIMPLE) or a == b)
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())
