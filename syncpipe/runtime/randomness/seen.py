"""What is seen of a layer while it runs for the first time, by a profile function.

A layer that saves or sets a state (``fork_rng``, ``torch.utils.checkpoint``) leaves the state as it
was, so that one does not see it by comparing states. But a profile function sees its calls. It
slows the layer down, so there is one only when a layer runs for the first time in a mode. It also
sees what puts Python code into the graph. Where there is some, backward may draw as well, and is
run and learned likewise.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from syncpipe.runtime.randomness.private_generator import PrivateGenerator

__all__ = ["Seen"]


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
            generator = isinstance(getattr(arg, "__self__", None), torch.Generator)
            if generator and frame.f_code is not _OURS:
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


#: What a layer does not do itself: an operation that takes no generator draws from its own.
_OURS = PrivateGenerator.borrowed.__code__
#: Where ``torch.compile`` begins to look at frames (``torch.compiler.disable`` does it elsewhere).
_COMPILED = "_TorchDynamoContext.__call__"
#: The C functions by which Python code comes to run in backward.
_BEHIND = frozenset(
    {
        "apply", "register_hook", "register_prehook", "_register_hook_dict",
        "_push_saved_tensors_default_hooks",
    }
)  # fmt: skip
