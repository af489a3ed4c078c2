"""What is seen of code that runs for the first time in a call, by a profile function.

What saves or sets a state (``fork_rng``, ``torch.utils.checkpoint``) leaves the state as it was, so
that one does not see it by comparing states. But a profile function sees its calls.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["Seen"]


class Seen:
    """What was seen of code that ran by :func:`run_seeded`.

    Attributes:
        draws: bit mask of the generators that it draws from, or whose states it uses.
        touches: whether it saves or sets the state of a generator.
        nests: whether it uses a pipe.
        ends: for each generator that it had to itself the fingerprint of the last state, if asked
            for.
    """

    __slots__ = ("draws", "ends", "nests", "touches")

    def __init__(self) -> None:
        self.draws = 0
        self.ends: dict[tuple[str, int], list[list[int]]] = {}
        self.touches = self.nests = False

    def look(self, frame: Any, event: str, arg: Any) -> None:
        """The profile function."""
        if event == "c_call" and isinstance(getattr(arg, "__self__", None), torch.Generator):
            self.touches = True

    def run(self, code: Callable[[Any], Any], value: Any) -> Any:
        """Runs code and looks at the calls that it makes on this thread."""
        if sys.getprofile() is not None:  # somebody else looks, and there can be only one
            self.touches = True
            return code(value)
        look = self.look
        try:
            sys.setprofile(look)
            return code(value)
        finally:
            if sys.getprofile() == look:
                sys.setprofile(None)
