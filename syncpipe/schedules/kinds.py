"""The kinds of actions, and all that is to be known of one: whoever adds a kind begins here.

A backward may come in two halves: ``backward_input`` computes the gradient that the stage to the
left waits for, ``backward_weight`` those of the parameters, for which nobody waits. Recomputations,
sums of replicas' gradients and updates of weights are in no schedule; they are put where they
belong when it is compiled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["HALVES", "KINDS", "LETTERS", "About", "Kind"]

Kind = Literal[
    "forward", "backward", "backward_input", "backward_weight", "recompute", "reduce", "update"
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class About:
    """What is to be known of a kind.

    Attributes:
        letter: in files; empty for what is in no schedule.
        shade: how far its looks are from the colour of its micro-batch, on the way to white, or if
            negative to black. A whole backward is between its halves.
        alive: what it adds to the number of micro-batches in flight on its stage.
        sends: what other stages wait for, the ``"activation"``, the ``"gradient"`` or nothing.
        urgency: the least is done first, where a device can choose: what brings gradients on.
        takes: the costs that its time is the sum of.
        words: in legends.
    """

    letter: str
    shade: float
    alive: int
    sends: Literal["activation", "gradient", ""]
    urgency: int
    takes: tuple[Kind, ...]
    words: str


HALVES: tuple[Kind, ...] = ("backward_input", "backward_weight")

#: In the order in which tables and legends name them.
KINDS: dict[Kind, About] = {
    #                    letter, shade, alive, sends, urgency, takes, words
    "forward":         About("F", 0.62, +1, "activation", 1, ("forward",), "forward"),
    "backward":        About("B", 0.0, -1, "gradient", 0, HALVES, "backward"),
    "backward_input":  About("I", 0.25, 0, "gradient", 0, HALVES[:1],
                             "backward, input half: the stage before waits for it"),
    "backward_weight": About("W", -0.36, -1, "", 2, HALVES[1:],
                             "backward, weight half: nobody waits for it"),
    "recompute":       About("", 0.62, 0, "", 0, ("recompute",), "forward again (recomputation)"),
    "reduce":          About("", -0.6, 0, "", 0, (), "gradients of replicas added up"),
    "update":          About("", -0.75, 0, "", 0, ("update",), "weights updated, without a flush"),
}  # fmt: skip

#: One for each kind that a schedule can have.
LETTERS: dict[Kind, str] = {kind: about.letter for kind, about in KINDS.items() if about.letter}
