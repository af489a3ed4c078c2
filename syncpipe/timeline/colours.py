"""The colours of micro-batches, in all pictures."""

from __future__ import annotations

__all__ = ["PALETTE", "shaded"]

#: By micro-batch, again and again. Chosen so that neighbours differ for the colour-blind, too (the
#: least CIELAB distance is 37 with Machado's models), and also in light shades.
PALETTE = (
    "#2F6DB5", "#A89A1C", "#5AAFE0", "#C8483C", "#7B62B8", "#1A9A87", "#E9822B", "#8A5A36",
)  # fmt: skip


def shaded(colour: str, shade: float) -> str:
    """A colour so far on the way to white, or, below 0, to black."""
    channels = (int(colour[k : k + 2], 16) for k in (1, 3, 5))
    goal = 255 if shade > 0 else 0
    mixed = (round(c + (goal - c) * abs(shade)) for c in channels)
    return "#" + "".join(f"{channel:02x}" for channel in mixed)
