"""Running the generator of a skippable layer: its commands are obeyed, its result returned."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from typing import Any

from torch import nn

from . import store
from .commands import pop, stash
from .declaration import Declaration, key_of
from .namespace import describe


def driven(
    generator_forward: Callable[..., Generator[Any, Any, Any]], declaration: Declaration
) -> Callable[..., Any]:
    """The forward that callers see: it runs the generator and does what it yields."""

    @functools.wraps(generator_forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        generator = generator_forward(self, *args, **kwargs)
        open_stashes, open_pops = list(declaration.stash), list(declaration.pop)
        reply: Any = None
        try:
            while True:
                try:
                    command = generator.send(reply)
                except StopIteration as stop:
                    output = stop.value
                    break
                if type(command) is stash:
                    _cross_off(self, "stash", command.name, open_stashes, declaration.stash)
                    store.put(key_of(self, command.name), command.value, self)
                    reply = None
                elif type(command) is pop:
                    _cross_off(self, "pop", command.name, open_pops, declaration.pop)
                    reply = store.take(key_of(self, command.name), self)
                else:
                    raise TypeError(_not_a_command(self, command))
        finally:
            generator.close()  # leaves the 'with' blocks of the generator now, whatever happened
        if open_stashes or open_pops:
            raise RuntimeError(_left_open(self, open_stashes, open_pops))
        return output

    forward._syncpipe_skips = declaration  # type: ignore[attr-defined]
    return forward


def _cross_off(
    layer: nn.Module, verb: str, name: str, still_open: list[str], declared: tuple[str, ...]
) -> None:
    if name in still_open:
        still_open.remove(name)
        return
    cls = type(layer).__name__
    if name in declared:
        what = describe(key_of(layer, name))
        raise RuntimeError(f"{cls} {_VERBS[verb]} {what} twice in one forward: do it once")
    names = [*declared, name]
    raise RuntimeError(
        f"{cls} {_VERBS[verb]} {name!r} without having declared it: "
        f"add it to the decorator, @skippable({verb}={names!r})"
    )


_VERBS = {"stash": "stashes", "pop": "pops"}


def _not_a_command(layer: nn.Module, command: object) -> str:
    return (
        f"{type(layer).__name__}.forward yielded an object of type {type(command).__name__}: "
        "a skippable layer yields stash(name, value) or pop(name), and returns its output"
    )


def _left_open(layer: nn.Module, stashes: list[str], pops: list[str]) -> str:
    faults = []
    if stashes:
        faults.append(f"stash {stashes} (stash None if there is nothing to send)")
    if pops:
        faults.append(f"pop {pops} (pop it even if its value is not used)")
    return f"{type(layer).__name__} declares skips, but its forward did not {' nor '.join(faults)}"
