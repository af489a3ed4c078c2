"""Namespaces keep skips of the same name apart."""

from __future__ import annotations

from dataclasses import dataclass, field
from uuid import UUID, uuid4


@dataclass(frozen=True, repr=False)
class Namespace:
    """A token that sets the skips of some layers apart from all other skips.

    Two skips are the same only if they have the same name and the same namespace, so a block
    with skips inside can be used several times in a model: give every use a namespace of its own.

    Every ``Namespace()`` differs from every other. A copy (``copy``, ``deepcopy``, pickle) equals
    its original, so layers that share a namespace still share it after they were copied, together
    or one by one.
    """

    # uuid4 draws from the operating system: it moves no random generator that a user seeds.
    _id: UUID = field(default_factory=uuid4, init=False)

    def __repr__(self) -> str:
        return f"Namespace({self._id.hex[:8]})"


SkipKey = tuple[Namespace | None, str]
"""What identifies a skip: the namespace, None for the common one, and the name."""


def describe(key: SkipKey) -> str:
    """Writes a skip the way error messages show it."""
    namespace, name = key
    return repr(name) if namespace is None else f"{name!r} in {namespace!r}"
