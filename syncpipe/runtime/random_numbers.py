"""Random numbers that do not depend on the timing of threads.

Threads share generators: the CPU has one per process, an accelerator one per device. So each layer
that draws is seeded from

    (one draw from the caller's generator per call, index of the layer, index of the micro-batch)

and nothing else. The layer holds a lock on each generator while it draws, and then restores the
generator's state. It holds the locks for its whole forward. If only PyTorch's own modules draw in
it (``nn.Dropout`` in a block), each of these modules holds them for its own forward, and the layer
saves its states in between:

    block of stage 0   Linear  [Dropout]  Linear  GELU      Linear                [ ]: holds them
    block of stage 1       Linear  GELU  [Dropout]  Linear  GELU

The first micro-batch of each call shows which layers draw: unknown layers hold all generators for
it, and layers that do not draw then run without locks. A user's thread that draws meanwhile, and a
layer that first draws in a later micro-batch, are not seen. But each recomputation is compared with
its forward, except for layers that cannot differ (:func:`fingerprint`, :func:`never_draws`).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import cache, partial
from itertools import chain, zip_longest
from operator import methodcaller
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

from syncpipe.data.trees import tensors_in
from syncpipe.runtime.interrupts import forkable_lock, run_and_undo
from syncpipe.storage import modules_of

_T = TypeVar("_T")
_Key = tuple[str, int]
_CPU: _Key = ("cpu", 0)

# Together they hide our own bookkeeping from modes that the user set for the layers.
# Both are C context managers, which Ctrl-C cannot interrupt.
NoDispatch: Any = torch._C._DisableTorchDispatch
NoFunctions: Any = torch._C.DisableTorchFunction


class _Locks:
    """One lock per generator of the process, and the lock ``states`` for reading or setting states.

    ``get_state`` allocates its result under the generator's own mutex. If the garbage collector
    frees tensors then, it releases the GIL, and another thread that calls a method of the generator
    holds the GIL and waits for the mutex for ever (seen with torch 2.13). Under ``states`` only one
    thread makes such calls, and the others wait without the GIL.
    """

    def __init__(self) -> None:
        self.states = forkable_lock()
        self._guard = forkable_lock()
        self._made: dict[_Key, Any] = {}

    def __getitem__(self, key: _Key) -> Any:
        with self._guard:
            return self._made.setdefault(key, forkable_lock())


LOCKS = _Locks()


class Generators:
    """The generators from which layers on one device can draw: the CPU's and the device's own.

    Sets of generators are bit masks: ``all``; and ``in_modules``, the CPU's, held by single modules
    (:func:`let_modules_hold`; 0 on accelerators, whose generator no other thread uses).
    """

    def __init__(self, device: torch.device) -> None:
        self.own, self._keys = [torch.default_generator], [_CPU]
        generator = None if device.type in ("cpu", "meta") else _device_generator(device)
        if generator is not None:
            self.own.append(generator)
            self._keys.append((device.type, device.index))
        self.all = (1 << len(self.own)) - 1
        self.in_modules = self.all + 1 if device.type == "cpu" else 0

    def pick(self, which: int) -> list[tuple[_Key, torch.Generator]]:
        """The generators in a bit mask, in the order in which their locks are taken."""
        pairs = zip(self._keys, self.own, strict=True)
        return [pair for k, pair in enumerate(pairs) if which >> k & 1]


def _device_generator(device: torch.device) -> torch.Generator | None:
    module: Any = torch.get_device_module(device)
    generators = getattr(module, "default_generators", None)
    if generators is None:
        return torch.mps._get_default_mps_generator() if device.type == "mps" else None
    if not len(generators) and hasattr(module, "init"):
        module.init()
        generators = module.default_generators
    generator: torch.Generator = generators[device.index]
    return generator


def states_of(generators: Sequence[torch.Generator]) -> list[Tensor]:
    with LOCKS.states, NoDispatch():  # a backend may read states by operators
        return list(map(torch.Generator.get_state, generators))  # `map` hides it from profilers


def put_back_states(generators: Sequence[torch.Generator], states: Sequence[Tensor]) -> None:
    with LOCKS.states, NoDispatch():
        list(map(torch.Generator.set_state, generators, states))


def changed_generators(generators: Sequence[torch.Generator], before: Sequence[Tensor]) -> int:
    """A bit mask of the generators whose state has changed."""
    with NoDispatch(), NoFunctions():
        pairs = zip(before, states_of(generators), strict=True)
        return sum((not torch.equal(a, b)) << k for k, (a, b) in enumerate(pairs))


def draw_seed() -> int:
    """Draws the seed of a call: one number from the CPU's global generator."""
    with LOCKS[_CPU], LOCKS.states, NoDispatch(), NoFunctions(), torch._C._DisableFuncTorch():
        return int(torch.empty((), dtype=torch.int64, device="cpu").random_().item())


def _cell_seed(seed: int, layer: int, i: int) -> int:
    """The seed of one layer and micro-batch.

    The CPU's generator uses only the low 32 bits, so these differ for all cells of a call: a
    bijection (the finalizer of MurmurHash3) of ``seed`` plus a different number per cell. After
    65,536 micro-batches the numbers restart, shifted between the layers (by the golden ratio).
    """
    rounds, i = divmod(i, 1 << 16)
    low = (seed + (i << 16) + layer + 40503 * rounds) & 0xFFFFFFFF
    low ^= low >> 16
    low = low * 0x85EBCA6B & 0xFFFFFFFF
    low ^= low >> 13
    low = low * 0xC2B2AE35 & 0xFFFFFFFF
    low ^= low >> 16
    return (seed >> 32 << 32 | low) & 0x7FFFFFFFFFFFFFFF


@cache
def is_random(operation: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in operation.tags


class GeneratorLease:
    """Lets one layer hold and seed generators for one micro-batch, and observes its draws.

    The generators are released while a pipe runs inside the layer: the locks of that pipe's stages
    must be taken before the locks of generators.

    Attributes:
        draws: bit mask of the generators that the layer was seen to draw from.
        touches: whether the layer reads or sets the state of a generator, as ``fork_rng`` and
            ``torch.utils.checkpoint`` do; comparing states does not show it.
        nests: whether the layer runs a pipe.
        ends: by generator of an accelerator the fingerprint of its last state, if asked for.
    """

    def __init__(
        self, picked: list[tuple[_Key, torch.Generator]], seed: int = 0, *, observe: bool = False
    ) -> None:
        self._generators = [generator for _, generator in picked]
        self._locks = [LOCKS[key] for key, _ in picked]
        self._seed, self._observe = seed, observe
        self._before: list[Tensor] = []  # the states before the lease
        self._own: list[Tensor] = []  # the layer's states, after the last module that drew
        self._outer: GeneratorLease | None = None
        self.held = self.drew_outside = self.touches = self.nests = False
        self.draws = 0
        self.ends: dict[_Key, list[Tensor]] = {}

    def holding(self, run: Callable[[], _T]) -> _T:
        """Runs a function that draws: takes the locks, seeds, and restores the states after it."""

        def drawing() -> _T:
            if self._own:
                put_back_states(self._generators, self._own)
            else:
                with LOCKS.states:
                    for generator in self._generators:
                        generator.manual_seed(self._seed)
            return run()

        lock, other_lock, *_ = [*self._locks, nullcontext(), nullcontext()]
        with lock, other_lock:
            self._before = states_of(self._generators)
            return run_and_undo(
                lambda: self.while_leased(drawing, held=True),
                lambda: put_back_states(self._generators, self._before),
            )

    def while_leased(self, run: Callable[[], _T], *, held: bool = False) -> _T:
        """Runs a function with this lease; if not ``held``, modules that draw hold generators."""
        before = _thread.lease, self.held
        if _thread.lease is not self:
            self._outer = _thread.lease

        def end() -> None:
            _thread.lease, self.held = before

        def begin() -> _T:
            _thread.lease, self.held = self, held
            return run()

        return run_and_undo(begin, end)

    def in_module(self, run: Callable[[], _T]) -> _T:
        def drawing() -> _T:
            try:
                return run()
            finally:
                self._own = states_of(self._generators)

        if not self.held:
            return self.holding(drawing)
        if not self._observe:
            return run()
        self.drew_outside |= bool(changed_generators(self._generators, self._own))
        return drawing()

    def released(self, run: Callable[[], _T]) -> _T:
        """Runs a function that takes other locks, with the generators released and restored."""
        self.nests = True
        profile, held = sys.getprofile(), self.held
        profiling = profile is not None and profile == self._note_generator_call
        if profiling:
            sys.setprofile(None)
        own = states_of(self._generators) if held else []
        if held:
            put_back_states(self._generators, self._before)
        counts: list[Any] = []
        try:
            # Releases leases around this one, too; C code, so that Ctrl-C loses no count.
            counts.extend(map(methodcaller("_release_save"), self._locks if held else ()))
            _thread.lease = self._outer
            return run()
        finally:
            if held:
                self._acquire_again(counts)
                self._before = states_of(self._generators)
                put_back_states(self._generators, own)
            _thread.lease = self
            if profiling:
                sys.setprofile(profile)

    def _acquire_again(self, counts: list[Any]) -> None:
        interrupt: BaseException | None = None
        for lock, count in zip_longest(self._locks, counts):
            while not lock._is_owned():
                try:
                    lock._acquire_restore(count) if count else lock.acquire()
                except BaseException as error:  # Ctrl-C; the lock's holder will release it
                    interrupt = error
        if interrupt is not None:
            raise interrupt

    def observed(self, layer: Callable[[Any], Any], value: Any) -> Any:
        """Runs a layer that holds all generators, and observes which of them it draws from."""
        start = self._own = states_of(self._generators)
        self.touches = sys.getprofile() is not None  # the one profiler is in use: assume it

        def begin() -> Any:
            if not self.touches:
                sys.setprofile(self._note_generator_call)
            return layer(value)

        def end() -> None:
            if sys.getprofile() == self._note_generator_call:
                sys.setprofile(None)

        output = run_and_undo(begin, end)
        self.draws = changed_generators(self._generators, start)
        self.drew_outside |= bool(changed_generators(self._generators, self._own))
        return output

    def _note_generator_call(self, frame: Any, event: str, arg: Any) -> None:
        if event == "c_call" and isinstance(getattr(arg, "__self__", None), torch.Generator):
            self.touches = True


class _ThreadLease(threading.local):
    lease: GeneratorLease | None = None  # of a thread


_thread = _ThreadLease()


def holds_generators() -> bool:
    return _thread.lease is not None and _thread.lease.held


def without_generators(run: Callable[[], _T]) -> _T:
    """Runs a function that takes other locks; the thread releases its generators meanwhile."""
    return run() if _thread.lease is None else _thread.lease.released(run)


def with_cpu_generator(run: Callable[[], _T]) -> _T:
    """Runs a function that draws from the CPU's global generator, while layers wait for it."""
    lease = GeneratorLease([])
    lease._locks = [LOCKS[_CPU]]
    return lease.holding(run)


def run_seeded(
    generators: Generators,
    which: int,
    cell: tuple[int, int, int],
    layer: Callable[[Any], Any],
    value: Any,
    *,
    observe: bool,
    module: nn.Module | None = None,
    mark: bool = False,
) -> tuple[Any, GeneratorLease]:
    """Runs a layer with random numbers of its own for one micro-batch.

    Args:
        generators: the generators of the layer's device.
        which: bit mask of the generators that the layer is expected to draw from.
        cell: seed of the call, index of the layer, index of the micro-batch.
        layer: the layer, or a function.
        value: its input.
        observe: whether to find out which generators the layer draws from or reads.
        module: the module that ``layer`` calls; None for a function.
        mark: whether to note the last states of accelerators' generators (``ends``).
    """
    modules_can_hold = bool(generators.in_modules) and module is not None
    if observe and module is not None and modules_can_hold and _is_known(module):
        which, observe = generators.in_modules, False
    picked = generators.pick(which)
    lease = GeneratorLease(
        picked or generators.pick(generators.all), _cell_seed(*cell), observe=observe
    )
    if not picked:
        lease.draws = which
        return lease.while_leased(partial(layer, value)), lease

    def run() -> Any:
        output = lease.observed(layer, value) if observe else layer(value)
        for key, generator in picked if mark else ():
            if key != _CPU:
                lease.ends[key] = fingerprint(states_of([generator]))
        return output

    output = lease.holding(run)
    if lease.touches:
        lease.draws = generators.all
    elif lease.draws and modules_can_hold and not (lease.drew_outside or lease.nests):
        lease.draws = generators.in_modules
    return output, lease


def fingerprint(output: Any) -> list[Tensor]:
    """Checksums of a layer's output, to compare two runs of the layer.

    CPU tensors only, where the same computation gives the same bits; elsewhere the states of
    generators are compared. A long tensor has 251 sums, each of every 251st word, so that the
    position of a word matters.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return []
    found: list[Tensor] = []
    with NoDispatch(), NoFunctions():
        for tensor in tensors_in(output):
            if type(tensor) not in (Tensor, nn.Parameter) or tensor.device.type != "cpu":
                continue
            if tensor.layout is not torch.strided or tensor.is_quantized:
                continue
            words = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
            words = words.view(torch.uint8)
            if not (words.numel() % 8 or words.data_ptr() % 8 or words.storage_offset() % 8):
                words = words.view(torch.int64)
            rows, rest = divmod(words.numel(), 251)
            if rows:
                sums = words[: 251 * rows].view(rows, 251).sum(0, dtype=torch.int64)
                words = torch.cat([sums, words[words.numel() - rest :]])
            else:
                words = words.clone()
            found.append(words)
    return found


def same_fingerprints(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    with NoDispatch(), NoFunctions():
        return len(one) == len(other) and all(map(torch.equal, one, other))


#: Modules that draw in training, in their own forward only.
_DROPOUT: frozenset[type] = frozenset(
    {
        nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout,
        nn.FeatureAlphaDropout, nn.RReLU,
    }
)  # fmt: skip
#: Files of ``torch.nn.modules`` whose modules never draw, except ``_DRAWING``.
_DETERMINISTIC_FILES = frozenset(
    f"torch.nn.modules.{name}"
    for name in (
        "activation", "batchnorm", "channelshuffle", "container", "conv", "distance", "flatten",
        "fold", "instancenorm", "linear", "normalization", "padding", "pixelshuffle", "pooling",
        "sparse", "upsampling",
    )
)  # fmt: skip
_DRAWING = (
    nn.RReLU, nn.MultiheadAttention, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d,
    LazyModuleMixin,
)  # fmt: skip
#: The attribute of ``nn.Module`` that ``module(...)`` calls in place of ``_call_impl``. It exists
#: for ``compile``; pickles and copies leave it out.
_CALL = "_compiled_call_impl"


#: By the identity of a module that draws, the calls in which it holds generators.
_leasing: dict[int, set[object]] = {}
_leasing_lock = forkable_lock()


def let_modules_hold(roots: Iterable[nn.Module], run: Callable[[], _T]) -> _T:
    """Runs a function that takes locks of stages, so this thread releases its generators.

    Meanwhile PyTorch's own modules in ``roots`` that draw, in their own forward only, hold the
    generators for that forward.
    """
    every = dict.fromkeys(chain.from_iterable(map(modules_of, roots)))
    modules = [module for module in every if type(module) in _DROPOUT]
    if not modules:
        return without_generators(run)
    call = object()

    def begin() -> _T:
        with _leasing_lock:
            for module in modules:
                _leasing.setdefault(id(module), set()).add(call)
                if module.__dict__.get(_CALL) is None:
                    module.__dict__[_CALL] = MethodType(_call, module)
        return without_generators(run)

    def end() -> None:
        with _leasing_lock:
            for module in modules:
                calls = _leasing.get(id(module), set())
                calls.discard(call)
                if not calls and _leases(module):
                    del module.__dict__[_CALL]
                if not calls:
                    _leasing.pop(id(module), None)

    return run_and_undo(begin, end)


def _call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    call: Callable[..., Any] = module._call_impl
    if _thread.lease is None or not module.training:
        return call(*args, **kwargs)
    return _thread.lease.in_module(partial(call, *args, **kwargs))


def _leases(module: nn.Module) -> bool:
    return getattr(module.__dict__.get(_CALL), "__func__", None) is _call


def is_compiled(module: nn.Module) -> bool:
    """Whether ``module.compile()`` was called; :func:`let_modules_hold` uses the same attribute."""
    return module._compiled_call_impl is not None and not _leases(module)


def never_draws(module: nn.Module) -> bool:
    """Whether all modules of a layer are PyTorch's own, never draw, and have no hooks."""
    return all(map(_is_deterministic, modules_of(module)))


def _is_known(module: nn.Module) -> bool:
    return all(_is_deterministic(m) or (_leases(m) and _is_plain(m)) for m in module.modules())


def _is_deterministic(module: nn.Module) -> bool:
    known = type(module).__module__ in _DETERMINISTIC_FILES and not isinstance(module, _DRAWING)
    return known and module.__dict__.get(_CALL) is None and _is_plain(module)


def _is_plain(module: nn.Module) -> bool:
    return "forward" not in module.__dict__ and not has_hooks(module)


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks around its forward or backward."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )
