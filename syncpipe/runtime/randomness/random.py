"""Random numbers that do not depend on which thread comes first.

Threads share generators: the CPU has one for the whole process, an accelerator one for each
device. So a layer that draws runs with the generator to itself (a lock), seeded from

    (one draw from the caller's generator per call, index of the layer, index of the micro-batch)

and the generator gets its old state back afterwards. Nothing else enters: not the balance, the
devices, the schedule or the checkpoint mode. A recomputation seeds the same way, so it draws what
was drawn before. Which layers draw is learned anew in each call from the first micro-batch, for
which all layers run that way; the others then run freely. Layers of PyTorch that are known not
to draw skip even that.

A layer that saves or sets a state (``fork_rng``, ``torch.utils.checkpoint``) leaves the state as it
was, so that one does not see it. But a profile function sees its calls. It slows the layer down, so
there is one only when a layer runs for the first time in a mode. It also sees what puts Python code
into the graph. Where there is some, backward may draw as well, and is run and learned likewise.

A layer or a loss function may itself use a pipe. While that one runs, the generators are given
up: it takes locks of stages, and these come before the locks of generators.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from syncpipe.runtime.interrupts import undone
from syncpipe.runtime.randomness.generators import CPU, LOCKS, Generators, NoDispatch, NoFunctions
from syncpipe.runtime.randomness.private_generator import PrivateGenerator

__all__ = [
    "Seen",
    "draw_again",
    "draw_seed",
    "never_draws",
    "outside_of_turn",
    "run_seeded",
    "run_watched",
    "undisturbed_draws",
]

_T = TypeVar("_T")


class _Turns:
    """Who has generators to himself, so that others can tell whether anybody had."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._last = 0
        self.inside: set[int] = set()

    def begin(self) -> int:
        """Begins a turn, which is ``inside`` until somebody takes its number out."""
        number = next(self._numbers)
        self.inside.add(number)  # before `_last`, or `quiet` could take it for one that is over
        self._last = number
        return number

    def quiet(self) -> int | None:
        """The number of the last turn; None while there is one."""
        return None if self.inside else self._last

    def renew(self) -> None:
        """In a forked child."""
        self.__init__()  # type: ignore[misc]


_turns = _Turns()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_turns.renew)


def draw_seed() -> int:
    """Draws the seed of a call from the caller's CPU generator, and nothing more."""
    turn: _Turn | None = getattr(_here, "turn", None)
    if turn is not None and turn.seen is not None:
        turn.seen.share()
    with LOCKS[CPU], LOCKS.states, NoDispatch(), NoFunctions():
        _turns.inside.discard(_turns.begin())  # nobody sees the state before this turn is over
        return int(torch.empty((), dtype=torch.int64, device="cpu").random_().item())


@contextmanager
def undisturbed_draws() -> Iterator[None]:
    """A context in which the calling thread draws from the CPU's generator as the caller would.

    Layers that draw at the same time wait, and do not take back what was drawn in here.
    """
    with LOCKS[CPU]:
        turn = _Turn([], [LOCKS[CPU]])
        try:
            turn.begin()
            yield
        finally:
            turn.end()


def _mix(seed: int, layer: int, i: int) -> int:
    """A seed for one cell.

    The CPU's generator looks at the low 32 bits only, so these are kept apart for any two cells
    of a call: a bijection (the finalizer of MurmurHash3) of ``seed + a different number each``.
    """
    low = (seed + (i << 16) + layer) & 0xFFFFFFFF
    low ^= low >> 16
    low = low * 0x85EBCA6B & 0xFFFFFFFF
    low ^= low >> 13
    low = low * 0xC2B2AE35 & 0xFFFFFFFF
    low ^= low >> 16
    return (seed >> 32 << 32 | low) & 0x7FFFFFFFFFFFFFFF


class Seen:
    """What was seen of a layer that ran by :func:`run_seeded`.

    Attributes:
        draws: bit mask of the generators that it draws from, or whose states it uses.
        touches: whether it saves or sets the state of a generator.
        behind: whether it puts Python code into the graph.
        nests: whether it uses a pipe.
        compiled: whether it is compiled, at least in part.
    """

    __slots__ = ("behind", "compiled", "draws", "nests", "private", "touches")

    def __init__(self) -> None:
        self.draws = 0
        self.touches = self.behind = self.nests = self.compiled = False
        self.private: PrivateGenerator | None = None

    def look(self, frame: Any, event: str, arg: Any) -> None:
        """The profile function."""
        if event == "c_call":
            name, where = arg.__name__, frame.f_code.co_qualname
            if isinstance(getattr(arg, "__self__", None), torch.Generator):
                self.share()  # comes before the call itself
                self.touches = True
            elif name in _BEHIND:
                self.behind = True
            elif name == "set_eval_frame" and where.startswith(_COMPILED):
                self.compiled = True
                if self.private is not None:  # what is compiled runs in another way in a mode
                    self.private.leave()
                    self.share()

    def share(self) -> None:
        """From here on a layer that drew privately draws from the generator of the process."""
        private, self.private = self.private, None
        if private is not None:
            private.end()

    def run(self, layer: Callable[[Any], Any], value: Any) -> Any:
        """Runs a layer and looks at the calls that it makes on this thread."""
        if sys.getprofile() is not None:  # somebody else looks, and there can be only one
            self.touches = self.behind = True
            return layer(value)
        look = self.look
        try:
            sys.setprofile(look)
            return layer(value)
        finally:
            if sys.getprofile() == look:
                sys.setprofile(None)


#: Where ``torch.compile`` begins to look at frames (``torch.compiler.disable`` does it elsewhere).
_COMPILED = "_TorchDynamoContext.__call__"
#: The C functions by which Python code comes to run in backward.
_BEHIND = frozenset(
    {
        "apply", "register_hook", "register_prehook", "_register_hook_dict",
        "_push_saved_tensors_default_hooks",
    }
)  # fmt: skip


class _Turn:
    """Generators that the calling thread has to itself, by locks that it holds.

    Args:
        generators: those whose state is put back at the end.
        locks: the locks.
    """

    __slots__ = ("_generators", "_locks", "_number", "_outer", "before", "seen")

    def __init__(self, generators: list[torch.Generator], locks: list[Any]) -> None:
        self._generators = generators
        self._locks = locks
        self._outer = getattr(_here, "turn", None)
        self._number = 0
        self.before: list[Tensor] = []
        self.seen: Seen | None = None

    def begin(self) -> None:
        """The locks are held."""
        self._number = _turns.begin()
        with LOCKS.states:
            self.before[:] = [generator.get_state() for generator in self._generators]
        _here.turn = self

    def end(self) -> None:
        """The states are what they were."""
        _here.turn = self._outer
        _turns.inside.discard(self._number)

    def outside(self, run: Callable[[], _T]) -> _T:
        """Runs something meanwhile, for others as if the turn had not begun yet."""
        look = None if self.seen is None else self.seen.look
        looking = look is not None and sys.getprofile() == look
        if looking:
            sys.setprofile(None)
        try:
            return self._outside(run)
        finally:
            if looking:
                sys.setprofile(look)

    def _outside(self, run: Callable[[], _T]) -> _T:
        if self.seen is not None:
            self.seen.nests = True
        with LOCKS.states, NoDispatch(), NoFunctions():
            now = [generator.get_state() for generator in self._generators]
            self.set(self.before)
        self.end()
        try:
            for lock in self._locks:
                lock.release()
            return run()
        finally:
            try:
                self._hold()
            finally:  # has nothing left to do, unless Ctrl-C came right before it
                self._hold()
            with NoDispatch(), NoFunctions():
                self.begin()
                with LOCKS.states:
                    self.set(now)

    def _hold(self) -> None:
        interrupt: BaseException | None = None
        for lock in self._locks:
            while not lock._is_owned():
                try:
                    lock.acquire()
                except BaseException as error:  # Ctrl-C; whoever took the lock will release it
                    interrupt = error
        if interrupt is not None:
            raise interrupt

    def set(self, states: list[Tensor]) -> None:
        """Sets the states of the generators."""
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)


_here = threading.local()  # its attribute `turn` is the one that the thread has


def outside_of_turn(run: Callable[[], _T]) -> _T:
    """Runs something that takes other locks: gives up the generators that the thread has."""
    turn: _Turn | None = getattr(_here, "turn", None)
    return run() if turn is None else turn.outside(run)


def run_seeded(
    generators: Generators,
    which: int,
    cell: tuple[int, int, int],
    layer: Callable[[Any], Any],
    value: Any,
    *,
    observe: bool,
    look: bool = False,
    private: bool = False,
) -> tuple[Any, Seen]:
    """Runs a layer that draws its own random numbers for one micro-batch.

    Ctrl-C may come between any two lines. So locks are held by ``with`` itself, and the states are
    put back by one call.

    Args:
        generators: those of the layer's device.
        which: bit mask of the generators that the layer is expected to draw from.
        cell: seed of the call, index of the layer, index of the micro-batch.
        layer: the layer.
        value: its input.
        observe: find out from which generators it draws.
        look: find out whether it uses their states, and puts Python code into the graph.
        private: other threads may draw at any time, so it gets a generator of its own.

    Returns:
        The layer's output, and what was seen.
    """
    picked = generators.pick(which)
    mine = [generator for _, generator in picked]
    seed, seen = _mix(*cell), Seen()
    if private and which == 1 and not torch._C._len_torch_dispatch_stack():
        seen.private = own = PrivateGenerator(torch.Generator().manual_seed(seed))
        if not look:
            output, seen.draws = own.run(layer, value), int(own.drew)
            return output, seen
        layer = partial(own.run, layer)

    def seeded() -> Any:
        with LOCKS.states:
            for generator in mine:
                generator.manual_seed(seed)
            start = [generator.get_state() for generator in mine] if observe else []
        output = seen.run(layer, value) if look else layer(value)
        if observe:
            seen.draws = generators.all if seen.touches else _changed(mine, start)
            if seen.private is not None:
                seen.draws |= seen.private.drew
        return output

    return _in_turn(mine, [LOCKS[key] for key, _ in picked], seeded, seen), seen


def _in_turn(
    generators: list[torch.Generator],
    locks: list[Any],
    run: Callable[[], _T],
    seen: Seen | None = None,
) -> _T:
    """Runs something that has generators to itself; then their states are what they were."""
    with locks[0], locks[1] if len(locks) > 1 else nullcontext():
        turn = _Turn(generators, locks)
        turn.seen = seen
        try:
            turn.begin()
            undo = map(torch.Generator.set_state, generators, turn.before)
            return undone(run, undo, LOCKS.states)
        finally:
            turn.end()


def _changed(generators: list[torch.Generator], before: list[Tensor]) -> int:
    """A bit mask of the generators whose state is another one now."""
    pairs = zip(before, _states(generators), strict=True)
    return sum((not _same([a], [b])) << k for k, (a, b) in enumerate(pairs))


def _states(generators: list[torch.Generator]) -> list[Tensor]:
    with LOCKS.states, NoDispatch(), NoFunctions():
        return [generator.get_state() for generator in generators]


def _same(states: list[Any], others: list[Any]) -> bool:
    with NoDispatch(), NoFunctions():
        return all(torch.equal(a, b) for a, b in zip(states, others, strict=True))


#: The state of each generator before and after a layer.
_States = tuple[list[Tensor], list[Tensor]]


def run_watched(
    generators: Generators, layer: Callable[[Any], Any], value: Any
) -> tuple[Any, _States | None]:
    """Runs a layer that was not seen to draw, and will be computed again.

    Returns:
        Its output; and states, if they changed, by the layer or by another thread. While another
        layer has the generators to itself nothing can be said.
    """
    turns = _turns.quiet()
    mine = [generator for _, generator in generators.pick(generators.all)]
    before = _states(mine)
    output = layer(value)
    after = _states(mine)
    if _same(before, after) or turns is None or turns != _turns.quiet():
        return output, None
    return output, (before, after)


def draw_again(
    generators: Generators, states: _States, layer: Callable[[Any], Any], value: Any, where: str
) -> Any:
    """Recomputes a layer from the states that were noted in its forward.

    Raises:
        RuntimeError: it draws, but something else than in the forward.
    """
    before, after = states
    mine = [generator for _, generator in generators.pick(generators.all)]

    def again() -> tuple[Any, list[Any]]:
        with LOCKS.states:
            for generator, state in zip(mine, before, strict=True):
                generator.set_state(state)
        if len(mine) == 1 and not torch._C._len_torch_dispatch_stack():
            own = PrivateGenerator(torch.Generator().set_state(before[0]))
            return own.run(layer, value), [own.state]
        return layer(value), _states(mine)

    output, now = _in_turn(mine, [LOCKS[key] for key in generators.keys], again)
    if not _same(now, before) and not _same(now, after):
        raise RuntimeError(
            f"{where} draws random numbers, but did not for the first micro-batch of any call so "
            "far, and another thread drew at the same time: what it drew in the forward cannot be "
            "drawn again. It is known from the next call on; to have it known from the start, let "
            "it draw for every micro-batch, and give threads of your own a torch.Generator each"
        )
    return output


_QUIET: frozenset[type] = frozenset(
    {
        nn.Linear, nn.Bilinear, nn.Identity, nn.Flatten, nn.Unflatten, nn.Embedding,
        nn.EmbeddingBag, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d,
        nn.ConvTranspose3d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.LayerNorm,
        nn.GroupNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d,
        nn.LocalResponseNorm, nn.RMSNorm, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.ELU,
        nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Sigmoid, nn.Tanh, nn.Hardtanh,
        nn.Hardswish, nn.Hardsigmoid, nn.Softplus, nn.Softsign, nn.Softmax, nn.LogSoftmax,
        nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d,
        nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d, nn.AdaptiveMaxPool1d,
        nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d, nn.Upsample, nn.PixelShuffle,
        nn.PixelUnshuffle, nn.ZeroPad2d, nn.ConstantPad2d, nn.ReflectionPad2d,
        nn.ReplicationPad2d, nn.Sequential,
    }
)  # fmt: skip


def never_draws(module: nn.Module) -> bool:
    """Whether a layer is made of PyTorch's own modules that never draw, without any hook."""
    return (
        type(module) in _QUIET
        and not module._forward_hooks
        and not module._forward_pre_hooks
        and not module._backward_hooks
        and not module._backward_pre_hooks
        and "forward" not in module.__dict__
        and all(never_draws(child) for child in module.children())
    )
