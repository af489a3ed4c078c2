"""Ctrl-C at a chosen place."""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any

import torch


class _Interrupt:
    """Ctrl-C at the n-th function that begins: there, above all, Python looks for signals.

    Not in a generator expression: one that is left unfinished "begins" once more when it is
    closed, where Python prints the error and goes on.
    """

    def __init__(self, at: int) -> None:
        self.calls, self.at = 0, at

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        if frame.f_code.co_name == "<genexpr>":
            return
        self.calls += 1
        if self.calls == self.at:
            raise KeyboardInterrupt


def interrupted(at: int, call: Callable[[], Any]) -> tuple[int, bool]:
    """Calls a function; returns how many functions it began, and whether Ctrl-C came through."""
    interrupt = _Interrupt(at)
    before = sys.gettrace()
    sys.settrace(interrupt)
    try:
        call()
    except KeyboardInterrupt:
        return interrupt.calls, True
    finally:
        sys.settrace(before)
    return interrupt.calls, False


class Lines:
    """Ctrl-C at a line of some functions that the calling thread comes to.

    Attributes:
        seen: the lines so far, each with its file.
        came: whether Ctrl-C did.

    Args:
        wanted: whether it may come in a function.
        at: which line it is, or the how manieth; None for never.
    """

    def __init__(
        self, wanted: Callable[[CodeType], bool], at: tuple[str, int] | int | None
    ) -> None:
        self.seen: list[tuple[str, int]] = []
        self.came = False
        self._wanted, self._at = wanted, at

    def __call__(self, frame: Any, event: str, argument: Any) -> Any:
        if not self._wanted(frame.f_code):
            return None
        place = frame.f_code.co_filename, frame.f_lineno
        if event == "line" and place[1] not in _heads(place[0]):
            self.seen.append(place)
            if self._at in (place, len(self.seen)):
                sys.settrace(None)
                self.came = True
                raise KeyboardInterrupt
        return self

    def during(self, call: Callable[[], Any]) -> None:
        """Calls a function, out of which Ctrl-C may come."""
        sys.settrace(self)
        try:
            call()
        finally:
            sys.settrace(None)


@functools.cache
def _heads(filename: str) -> set[int]:
    """Where CPython does not look for signals as it does elsewhere.

    Lines of ``with`` (after the body they come again), of ``try``, and of ways out of ``except``.
    """
    found: set[int] = set()
    for node in ast.walk(ast.parse(Path(filename).read_text(encoding="utf-8"))):
        if isinstance(node, ast.With):
            found.update(range(node.lineno, node.body[0].lineno))
        elif isinstance(node, ast.Try):
            found.add(node.lineno)
        elif isinstance(node, ast.ExceptHandler) and isinstance(
            node.body[0], ast.Return | ast.Pass
        ):
            found.add(node.body[0].lineno)
    return found


def interrupt_next() -> None:
    """Ctrl-C comes when the next function begins."""
    sys.settrace(_Interrupt(1))


def modes_on() -> tuple[int, int]:
    """How many of PyTorch's modes are on: function modes, and dispatch modes."""
    return torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()
