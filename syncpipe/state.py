"""All that a run of layers can change, and how it is put back.

sandboxed   random states, and settings of the thread
unchanged   these, and all of a module but its parameters: modes, buffers, what hangs on it
State       all of modules: parameters and gradients as well, and objects of the user's

What puts things back may be called more than once, in case Ctrl-C comes in the middle of it (see
``runtime.interrupts``).
"""

from __future__ import annotations

import _random
import contextvars
import random
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from syncpipe.runtime.interrupts import undone
from syncpipe.runtime.random_numbers import LOCKS, Generators, NoDispatch, NoFunctions
from syncpipe.runtime.thread_state import settled

__all__ = ["SIMPLE", "Change", "State", "same_bits", "sandboxed", "unchanged"]

_T = TypeVar("_T")
#: What is compared by its value.
SIMPLE = (int, float, complex, str, bytes, bool, type(None))
_FOREIGN = {*sys.stdlib_module_names, "torch", "numpy", "syncpipe"}


def sandboxed(
    run: Callable[[], _T], devices: Iterable[torch.device], threads: int | None = None
) -> _T:
    """Calls a function in training's settings; puts random states and settings back after it.

    Args:
        run: the function. It is called with gradients enabled and out of inference mode. Autocast
            is the caller's, but without its cache, which would outlive the copies of the layers.
        devices: where it works; the generators of these and of the CPU are put back.
        threads: how many intra-op threads it has; None for as many as there are.
    """

    def run_alone() -> _T:
        if threads is not None:
            torch.set_num_threads(threads)
        torch.set_autocast_cache_enabled(False)
        with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
            torch._C._set_grad_enabled(True)
            return contextvars.copy_context().run(run)  # the store of skips is not left behind

    return _undone(lambda: settled(run_alone), _settings(devices, threads))


def _undone(run: Callable[[], _T], calls: list[partial[Any]]) -> _T:
    def undo() -> None:
        with LOCKS.states:
            for call in calls:
                call()

    return undone(run, undo)


def _settings(devices: Iterable[torch.device], threads: int | None) -> list[partial[Any]]:
    """What puts everything back."""
    python: Any = random._inst
    _, numbers, gauss = python.getstate()
    undo: list[partial[Any]] = [
        partial(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled()),
        partial(_random.Random.setstate, python, numbers),
        partial(setattr, python, "gauss_next", gauss),
    ]
    if threads is not None:
        undo.append(partial(torch.set_num_threads, torch.get_num_threads()))
    generators: dict[tuple[str, int], torch.Generator] = {}
    for device in [torch.device("cpu"), *devices]:
        found = Generators(device)
        generators.update(found.pick(found.all))
    with LOCKS.states, NoDispatch(), NoFunctions():
        for generator in generators.values():
            undo.append(partial(torch.Generator.set_state, generator, generator.get_state()))
    return undo


def unchanged(module: nn.Module, run: Callable[[], _T]) -> _T:
    """Calls a function that runs a module, and puts back what that changed, but for parameters.

    Of these only the weights of embeddings that shorten their rows as they go (``max_norm``) are
    put back; objects of the user's that hang on the module are not.
    """
    own = [*module.parameters(), *module.buffers()]
    renormed = {
        id(part.weight)
        for part in module.modules()
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.max_norm is not None
    }
    leave = [p for p in module.parameters() if id(p) not in renormed]
    devices = {tensor.device for tensor in own if not tensor.is_meta}
    return State({"": module}, leave, objects=False).restored(run, devices)


class Change(NamedTuple):
    """Something that is not what it was.

    Attributes:
        kind: ``"generator"``, ``"parameter"``, ``"buffer"`` or ``"attribute"``.
        name: where it is, from the layer on.
    """

    kind: str
    name: str


class State:
    """Modules as they are now. Values are copied to the CPU's memory.

    Args:
        modules: these, by name, and all that is in them.
        leave: objects that are left alone.
        objects: whether objects of the user's are looked into.

    Attributes:
        leaves: the tensors that get gradients.

    Raises:
        ValueError: a parameter has no value yet.
    """

    def __init__(
        self, modules: dict[str, nn.Module], leave: Iterable[Any] = (), *, objects: bool = True
    ) -> None:
        self._objects = objects
        self._calls: list[partial[Any]] = []
        self._looks: list[tuple[str, Callable[[], list[str]]]] = []
        self._seen: dict[int, Any] = {id(thing): thing for thing in leave}
        self._pending: list[tuple[str, str, Any]] = []
        self._hooks: list[dict[Any, Any]] = []  # steps of optimizers in backward, say
        self.leaves: list[Tensor] = []
        process: Any = random
        self._visit("attribute", "that of Python's random", process._inst)
        if (numpy := sys.modules.get("numpy.random")) is not None:
            self._visit("attribute", "that of numpy.random", numpy.get_state.__self__)
        self._pending += [("attribute", name, module) for name, module in modules.items()]
        while self._pending:
            self._visit(*self._pending.pop())

    def add_leaf(self, leaf: Tensor) -> None:
        """Another tensor that gets gradients."""
        if id(leaf) not in self._seen:
            self._visit("attribute", "", leaf)

    def restored(
        self,
        run: Callable[[], _T],
        devices: Iterable[torch.device],
        threads: int | None = None,
    ) -> _T:
        """Calls a function, with no gradients there, and puts all back as it was.

        Hooks that run when a gradient is there (``register_post_accumulate_grad_hook``) do not.

        Args:
            run: the function.
            devices: where it works; their random states are put back, too.
            threads: as of :func:`sandboxed`.
        """

        def alone() -> _T:
            for leaf in self.leaves:
                leaf.grad = None
            for hooks in self._hooks:
                hooks.clear()
            return run()

        def sandbox() -> _T:
            return sandboxed(alone, devices, threads)

        return _undone(sandbox, self._calls)

    def changes(self) -> list[Change]:
        """What is not what it was."""
        return [Change(kind, name) for kind, look in self._looks for name in look()]

    # --- the walk --------------------------------------------------------------------------------

    def _visit(self, kind: str, name: str, value: Any) -> None:
        if isinstance(value, (*SIMPLE, type, FunctionType, MethodType, ModuleType)):
            return
        if id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, Tensor):
            self._tensor(kind, name, value)
        elif isinstance(value, nn.Module):
            self._module(name, value)
        elif isinstance(value, torch.Generator):
            state = value.get_state()
            self._undo(torch.Generator.set_state, value, state)
            self._look("generator", lambda: [name] * (not torch.equal(value.get_state(), state)))
        elif isinstance(value, random.Random):
            _, numbers, gauss = before = value.getstate()
            self._undo(_random.Random.setstate, value, numbers)
            self._undo(setattr, value, "gauss_next", gauss)
            self._look("generator", lambda: [name] * (value.getstate() != before))
        elif type(value).__module__.startswith("numpy"):
            self._numpy(kind, name, value)
        elif isinstance(value, dict):
            self._dict(kind, value, lambda key: f"{name}[{key!r}]")
        elif isinstance(value, list | set | deque | bytearray):
            self._container(kind, name, value)
        elif isinstance(value, tuple):
            self._pending += [(kind, f"{name}[{k}]", item) for k, item in enumerate(value)]
        elif self._objects and _is_users(value):
            self._dict(kind, vars(value), lambda key: f"{name}.{key}")

    def _module(self, name: str, module: nn.Module) -> None:
        prefix = f"{name}." if name else ""
        if isinstance(module, torch.jit.ScriptModule):
            self._pending += [
                *(("parameter", prefix + key, p) for key, p in module.named_parameters()),
                *(("buffer", prefix + key, b) for key, b in module.named_buffers()),
            ]
            self._undo(setattr, module, "training", module.training)
            return
        for own, kind in ((module._parameters, "parameter"), (module._buffers, "buffer")):
            self._seen[id(own)] = own
            self._dict(kind, own, lambda key: f"{prefix}{key}")
        self._seen[id(module._modules)] = module._modules
        self._dict("attribute", module._modules, lambda key: f"{prefix}{key}")
        self._dict("attribute", vars(module), lambda key: f"{prefix}{key}")

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
        copy = data.to("cpu", copy=True)
        self._undo(Tensor.copy_, data, copy)
        self._look(kind, lambda: [name] * (not same_bits(data.to("cpu"), copy)))
        if tensor.is_leaf and (tensor.is_floating_point() or tensor.is_complex()):
            self._undo(setattr, tensor, "requires_grad", tensor.requires_grad)
            self._undo(setattr, tensor, "grad", tensor.grad)
            if tensor.requires_grad:
                self.leaves.append(tensor)
        hooks = getattr(tensor, "_post_accumulate_grad_hooks", None)
        if hooks:
            self._hooks.append(hooks)
            self._undo(type(hooks).update, hooks, dict(hooks))

    def _dict(self, kind: str, own: dict[Any, Any], name: Callable[[Any], str]) -> None:
        copy = dict(own)
        if type(own).clear in (dict.clear, OrderedDict.clear):
            self._undo(type(own).clear, own)
            plain = dict if isinstance(own, defaultdict) else type(own)
            self._undo(plain.update, own, copy)

        def changed() -> list[str]:
            keys = dict.fromkeys([*copy, *own])
            return [name(key) for key in keys if not _unchanged(key, copy, own)]

        self._look(kind, changed)
        self._pending += [(kind, name(key), value) for key, value in copy.items()]

    def _container(self, kind: str, name: str, own: Any) -> None:
        copy = list(own)
        if type(own) not in (list, set, deque, bytearray):
            return
        self._undo(type(own).clear, own)
        self._undo(type(own).update if isinstance(own, set) else type(own).extend, own, copy)

        def changed() -> list[str]:
            now = list(own)
            same = len(now) == len(copy) and all(map(_same, now, copy))
            return [] if same else [name]

        self._look(kind, changed)
        self._pending += [(kind, f"{name}[{k}]", item) for k, item in enumerate(copy)]

    def _numpy(self, kind: str, name: str, value: Any) -> None:
        numpy = sys.modules["numpy"]
        if isinstance(value, numpy.ndarray) and value.flags.writeable:
            before = value.copy()
            self._undo(numpy.copyto, value, before)
            self._look(kind, lambda: [name] * (not numpy.array_equal(value, before)))
        generator = getattr(value, "bit_generator", getattr(value, "_bit_generator", None))
        if generator is not None:
            state = generator.state
            self._undo(setattr, generator, "state", state)
            self._look("generator", lambda: [name] * (str(generator.state) != str(state)))

    def _undo(self, function: Callable[..., Any], *args: Any) -> None:
        self._calls.append(partial(function, *args))

    def _look(self, kind: str, look: Callable[[], list[str]]) -> None:
        self._looks.append((kind, look))


def _is_users(value: Any) -> bool:
    """Whether it is an object of a class that is neither Python's nor PyTorch's nor ours."""
    return hasattr(value, "__dict__") and type(value).__module__.partition(".")[0] not in _FOREIGN


def _unchanged(key: Any, before: dict[Any, Any], now: dict[Any, Any]) -> bool:
    return key in before and key in now and _same(before[key], now[key])


def _same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and isinstance(a, SIMPLE) and a == b)


def same_bits(a: Any, b: Any) -> bool:
    """Whether two values are the same, to the last bit; of objects only the type is looked at."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return type(a) is type(b) and (not isinstance(a, SIMPLE) or a == b)
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())
