"""Random numbers that do not depend on which thread comes first.

Threads share generators: the CPU has one for the whole process, an accelerator one for each
device. So what a layer draws is seeded from

    (one draw from the caller's generator per call, index of the layer, index of the micro-batch)

and nothing else. While it draws it holds the generators (a lock for each), and they get back the
states that they had. It holds them for its whole forward, or, where PyTorch's own modules draw and
nothing else does (``nn.Dropout`` in a block), for theirs; between two of these its own states are
put aside:

    block of stage 0   Linear  [Dropout]  Linear  GELU      Linear                [ ]: holds them
    block of stage 1       Linear  GELU  [Dropout]  Linear  GELU

Which layers draw is learned anew in each call from the first micro-batch, for which layers that
nobody knows hold all generators; those that do not draw then run freely. A thread of the user's may
draw meanwhile, and a layer for the first time in a later micro-batch, unseen. But what counts is
whether a recomputation gives what the forward gave, and that is always compared, but for layers
that can do nothing else (:func:`fingerprint`, :func:`never_draws`).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import cache, partial
from itertools import zip_longest
from operator import methodcaller
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

from syncpipe.data import tensors_in
from syncpipe.runtime.interrupts import forkable, run_and_undo

_T = TypeVar("_T")
_Key = tuple[str, int]
_CPU: _Key = ("cpu", 0)

# Entered together they shield our own bookkeeping from the modes that are meant for the layers.
# Both are PyTorch's own and used by ``with`` itself: Ctrl-C cannot come in between.
NoDispatch: Any = torch._C._DisableTorchDispatch
NoFunctions: Any = torch._C.DisableTorchFunction


class _Locks:
    """One lock for each generator of the process, and one for reading and setting any state.

    ``get_state`` makes its result while it holds the generator's own mutex. If the garbage
    collector then lets go of tensors, it lets go of the GIL, too; another thread that calls a
    method of the generator would hold the GIL and wait for the mutex for ever (seen with torch
    2.13). Whoever has ``states`` makes such a call, all others wait without the GIL.
    """

    def __init__(self) -> None:
        self.states = forkable()
        self._guard = forkable()
        self._made: dict[_Key, Any] = {}

    def __getitem__(self, key: _Key) -> Any:
        with self._guard:
            return self._made.setdefault(key, forkable())


LOCKS = _Locks()


class Generators:
    """The generators from which layers on one device can draw: the CPU's and the device's own.

    Sets of them are bit masks: ``all``; and ``in_modules``, the CPU's, held by modules that
    :func:`let_modules_hold` (0 on accelerators, whose generator no other thread wants).
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
        """The generators in a bit mask; in the one order in which their locks are taken."""
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
    with LOCKS.states, NoDispatch():  # a backend may make them by operators
        return list(map(torch.Generator.get_state, generators))  # out of a profile function's sight


def put_back_states(generators: Sequence[torch.Generator], states: Sequence[Tensor]) -> None:
    with LOCKS.states, NoDispatch():
        list(map(torch.Generator.set_state, generators, states))


def changed(generators: Sequence[torch.Generator], before: Sequence[Tensor]) -> int:
    """A bit mask of the generators whose state is another one now."""
    with NoDispatch(), NoFunctions():
        pairs = zip(before, states_of(generators), strict=True)
        return sum((not torch.equal(a, b)) << k for k, (a, b) in enumerate(pairs))


def draw_seed() -> int:
    """Draws the seed of a call from the caller's CPU generator, and nothing more."""
    with LOCKS[_CPU], LOCKS.states, NoDispatch(), NoFunctions(), torch._C._DisableFuncTorch():
        return int(torch.empty((), dtype=torch.int64, device="cpu").random_().item())


def _cell_seed(seed: int, layer: int, i: int) -> int:
    """A seed for one layer and micro-batch.

    The CPU's generator looks at the low 32 bits only, so these are kept apart for the cells of a
    call: a bijection (the finalizer of MurmurHash3) of ``seed + a different number each``. Every
    65,536 micro-batches the numbers begin again, between those of layers (at the golden ratio).
    """
    again, i = divmod(i, 1 << 16)
    low = (seed + (i << 16) + layer + 40503 * again) & 0xFFFFFFFF
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
    """What a layer draws for one micro-batch, and who it holds the generators from meanwhile.

    While a pipe runs that the layer itself uses, the generators are given up: that pipe takes locks
    of stages, and these come before the locks of generators.

    Attributes:
        draws: the generators that it draws from, or whose states it uses, as far as was observed.
        touches: whether it saves or sets the state of a generator. ``fork_rng`` and
            ``torch.utils.checkpoint`` do that, and comparing states does not see it.
        nests: whether it uses a pipe.
        ends: for the generator of an accelerator the fingerprint of its last state, if asked for.
    """

    def __init__(
        self, picked: list[tuple[_Key, torch.Generator]], seed: int = 0, *, observe: bool = False
    ) -> None:
        self._generators = [generator for _, generator in picked]
        self._locks = [LOCKS[key] for key, _ in picked]
        self._seed, self._observe = seed, observe
        self._before: list[Tensor] = []  # the states of others
        self._own: list[Tensor] = []  # its own, after the last module that drew
        self._outer: GeneratorLease | None = None
        self.held = self.drew_outside = self.touches = self.nests = False
        self.draws = 0
        self.ends: dict[_Key, list[Tensor]] = {}

    def holding(self, run: Callable[[], _T]) -> _T:
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
        """Runs something in which modules draw; each holds the generators for itself."""
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
        """Runs a module that draws, somewhere in the layer."""

        def drawing() -> _T:
            try:
                return run()
            finally:
                self._own = states_of(self._generators)

        if not self.held:
            return self.holding(drawing)
        if not self._observe:
            return run()
        self.drew_outside |= bool(changed(self._generators, self._own))
        return drawing()

    def released(self, run: Callable[[], _T]) -> _T:
        """Runs something that takes other locks, for others as if the turn had not begun yet."""
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
            # Also for the turns around this one; in C, so that no count is lost to Ctrl-C.
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
                except BaseException as error:  # Ctrl-C; whoever took the lock will release it
                    interrupt = error
        if interrupt is not None:
            raise interrupt

    def observed(self, layer: Callable[[Any], Any], value: Any) -> Any:
        """Runs a layer while it holds all generators, and sees from which it draws."""
        start = self._own = states_of(self._generators)
        self.touches = sys.getprofile() is not None  # somebody else looks: there can be only one

        def looked_at() -> Any:
            if not self.touches:
                sys.setprofile(self._note_generator_call)
            return layer(value)

        def end() -> None:
            if sys.getprofile() == self._note_generator_call:
                sys.setprofile(None)

        output = run_and_undo(looked_at, end)
        self.draws = changed(self._generators, start)
        self.drew_outside |= bool(changed(self._generators, self._own))
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
    """Runs something that takes other locks: gives up the generators that the thread holds."""
    return run() if _thread.lease is None else _thread.lease.released(run)


def with_cpu_generator(run: Callable[[], _T]) -> _T:
    """Runs something on the calling thread that draws from the CPU's generator as the caller would.

    Layers that draw at the same time wait, and do not take back what was drawn in here.
    """
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
    """Runs a layer that draws its own random numbers for one micro-batch.

    Args:
        generators: those of the layer's device.
        which: those that the layer is expected to draw from.
        cell: seed of the call, index of the layer, index of the micro-batch.
        layer: the layer, or a function.
        value: its input.
        observe: find out from which generators it draws, or whose states it uses.
        module: what the layer calls; None: it is a function.
        mark: note where those of accelerators stand in the end, which tells how much was drawn.
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
    """What tells the outputs of two runs of a layer apart, if it did something else.

    Only on the CPU, where a layer that does the same gives the same to the last bit; elsewhere the
    states of generators have to do. Of what is longer it has sums of every 251st word, so that it
    matters where one stands.
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


#: These draw in training, in their own forward and nowhere else.
_DROPOUT: frozenset[type] = frozenset(
    {
        nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout,
        nn.FeatureAlphaDropout, nn.RReLU,
    }
)  # fmt: skip
#: Files of ``torch.nn.modules`` whose modules never draw, but for a few.
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
#: What ``module(...)`` calls in place of ``_call_impl``: an attribute of ``nn.Module`` made for
#: ``compile``, which is left out of what is pickled or copied.
_CALL = "_compiled_call_impl"


#: By the identity of such a module the calls that it holds generators for.
_leasing: dict[int, set[object]] = {}
_leasing_lock = forkable()


def modules_that_draw(roots: Iterable[nn.Module]) -> list[nn.Module]:
    """The modules of PyTorch that draw, in training, in their own forward and nowhere else."""
    found: dict[nn.Module, None] = {}
    pending: list[nn.Module | None] = [*roots]
    while pending:  # (``modules()`` takes several Python calls for each: this is done in each call)
        module = pending.pop()
        if module is not None:
            pending.extend(module._modules.values())
            if type(module) in _DROPOUT:
                found[module] = None
    return [*found]


def let_modules_hold(modules: Sequence[nn.Module], run: Callable[[], _T]) -> _T:
    """Lets modules that draw hold the generators in a layer's turn while something runs."""
    if not modules:
        return run()
    call = object()

    def begin() -> _T:
        with _leasing_lock:
            for module in modules:
                _leasing.setdefault(id(module), set()).add(call)
                if module.__dict__.get(_CALL) is None:
                    module.__dict__[_CALL] = MethodType(_call, module)
        return run()

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
    """Whether ``module.compile()`` was called; in a call :func:`let_modules_hold` sets the same."""
    return module._compiled_call_impl is not None and not _leases(module)


def never_draws(module: nn.Module) -> bool:
    """Whether a layer is made of PyTorch's own modules that never draw, without any hook."""
    return all(map(_is_deterministic, module.modules()))


def _is_known(module: nn.Module) -> bool:
    return all(_is_deterministic(m) or (_leases(m) and _is_plain(m)) for m in module.modules())


def _is_deterministic(module: nn.Module) -> bool:
    known = type(module).__module__ in _DETERMINISTIC_FILES and not isinstance(module, _DRAWING)
    return known and module.__dict__.get(_CALL) is None and _is_plain(module)


def _is_plain(module: nn.Module) -> bool:
    return "forward" not in module.__dict__ and not has_hooks(module)


def has_hooks(module: nn.Module) -> bool:
    """Whether hooks run around the forward of a module, or its backward."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )
