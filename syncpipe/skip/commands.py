"""``stash`` and ``pop``: what the forward of a skippable layer may yield."""

from __future__ import annotations

from typing import Any


class stash:
    """Sends a value to the later layer that pops this name: ``yield stash(name, value)``.

    By itself it does nothing, the ``yield`` hands it over.

    Args:
        name: one of the names declared as ``@skippable(stash=[...])``.
        value: a tensor, None, or anything else that the popping layer understands.
    """

    __slots__ = ("name", "value")

    def __init__(self, name: str, value: Any) -> None:
        self.name = name
        self.value = value

    def __repr__(self) -> str:
        return f"stash({self.name!r})"


class pop:
    """Takes the value that an earlier layer stashed: ``value = yield pop(name)``.

    By itself it does nothing, the ``yield`` hands it over.

    Args:
        name: one of the names declared as ``@skippable(pop=[...])``.
    """

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"pop({self.name!r})"
