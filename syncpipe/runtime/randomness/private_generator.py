"""Random numbers that no other thread of the process can disturb.

A thread of the user's that draws from the CPU's generator takes no locks of ours. While there are
such threads, layers on the CPU draw from a generator of their own, which costs some microseconds
for each operation.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from syncpipe.runtime.randomness.generators import CPU, LOCKS, NoDispatch, NoFunctions
from syncpipe.runtime.thread_state import settled

__all__ = ["PrivateGenerator", "is_random", "nobody_looks", "others_may_draw"]

_T = TypeVar("_T")
_C: Any = torch._C


def others_may_draw() -> bool:
    """Whether there are threads besides those of pipes, and the caller."""
    if threading.active_count() == 1:
        return False
    return sum(not thread.name.startswith("syncpipe ") for thread in threading.enumerate()) > 1


class PrivateGenerator(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode in which random operations on the CPU draw from a given generator.

    They draw what they would draw from the generator of the process in the same state.
    """

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generator: torch.Generator | None = generator
        self._start = generator.get_state()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or each operation would look as if the layer was compiled, and be slower

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._generator is not None and is_random(func) and not kwargs.get("generator"):
            own = _with_generator(func)
            if own is None:
                return self.borrowed(lambda: func(*args, **kwargs))
            return own(*args, **{**kwargs, "generator": self._generator})
        return func(*args, **kwargs)

    def run(self, layer: Callable[[Any], Any], value: Any) -> Any:
        """Runs a layer in this mode."""

        def within() -> Any:
            self.__enter__()  # type: ignore[no-untyped-call]
            try:
                return layer(value)
            finally:
                self.leave()

        return settled(within)

    def leave(self) -> None:
        """Ends the mode, once; for others, such as compiled code, nothing is in force then."""
        depth = _C._len_torch_dispatch_stack()
        if depth and _C._get_dispatch_stack_at(depth - 1) is self:
            self.__exit__(None, None, None)

    @property
    def drew(self) -> bool:
        """Whether anything was drawn, up to the end."""
        state = self.state
        return state is not None and not torch.equal(state, self._start)

    @property
    def state(self) -> Tensor | None:
        """That of the generator; None after the end."""
        return None if self._generator is None else self._generator.get_state()

    def end(self) -> None:
        """Goes on with the generator of the process."""
        state, self._generator = self.state, None
        if state is not None:
            with LOCKS.states, NoDispatch(), NoFunctions():
                torch.default_generator.set_state(state)

    def borrowed(self, draw: Callable[[], _T]) -> _T:
        """Draws by an operation that takes no generator."""
        generator = self._generator
        assert generator is not None
        with LOCKS[CPU]:
            with LOCKS.states, NoDispatch(), NoFunctions():
                before = torch.default_generator.get_state()
                torch.default_generator.set_state(generator.get_state())
            try:
                return draw()
            finally:
                with LOCKS.states, NoDispatch(), NoFunctions():
                    generator.set_state(torch.default_generator.get_state())
                    torch.default_generator.set_state(before)


@cache
def is_random(func: Any) -> bool:
    """Whether an operation may draw."""
    return torch.Tag.nondeterministic_seeded in func.tags


@cache
def _with_generator(func: Any) -> Any:
    """The overload of a random operation that takes a generator, if there is one."""
    names = [argument.name for argument in func._schema.arguments]
    if "generator" in names:
        return func
    packet = func.overloadpacket
    for name in packet.overloads():
        other = getattr(packet, name)
        arguments = other._schema.arguments
        without = [argument.name for argument in arguments if argument.name != "generator"]
        named = [argument.kwarg_only for argument in arguments if argument.name == "generator"]
        if without == names and named == [True]:
            return other
    return None


def nobody_looks() -> bool:
    """Whether no dispatch mode is in force but one of these, which changes no result."""
    depth = _C._len_torch_dispatch_stack()
    return depth == 0 or (depth == 1 and type(_C._get_dispatch_stack_at(0)) is PrivateGenerator)
