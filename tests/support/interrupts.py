"""Ctrl-C at a chosen place."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch


class _Interrupt:
    """Ctrl-C at the n-th function that begins: there, above all, Python looks for signals."""

    def __init__(self, at: int) -> None:
        self.calls, self.at = 0, at

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
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


def interrupt_next() -> None:
    """Ctrl-C comes when the next function begins."""
    sys.settrace(_Interrupt(1))


def modes_on() -> tuple[int, int]:
    """How many of PyTorch's modes are on: function modes, and dispatch modes."""
    return torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()
