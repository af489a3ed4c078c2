"""What a model did, written down: nodes, and the trees of values that they take."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

__all__ = [
    "HERE",
    "Build",
    "Frame",
    "Node",
    "Select",
    "fields_of",
    "leaves_of",
    "map_tree",
    "nodes_in",
    "rebuilt",
]


class Node:
    """One thing that the model did, and what it gave.

    Attributes:
        kind: ``input`` (a tensor of the caller's), ``attribute`` (a parameter or buffer),
            ``constant``, ``module`` (a module that was called), ``call``, ``method``, ``get`` (an
            attribute of a tensor), ``item`` (a part of what another node gave), ``check`` (a value
            that Python decided by).
        target: a path, a name or a callable, by kind.
        args: what it takes, with nodes for values.
        kwargs: likewise.
        key: its place in what the model did, the same in every recording that goes the same way.
        owner: the path of the module whose forward did it.
        line: where that is in the model's code.
        value: what it gave, as long as that is needed.
        writes: whether it writes into one of its arguments.
        grad: whether gradients were on.
        items: parts of what it gave.
    """

    __slots__ = (
        "args", "grad", "items", "key", "kind", "kwargs", "line", "owner", "target", "value",
        "writes",
    )  # fmt: skip

    def __init__(
        self,
        kind: str,
        target: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        key: tuple[Any, ...] = (),
        owner: str = "",
        line: str = "",
    ) -> None:
        self.kind, self.target, self.args, self.kwargs = kind, target, args, kwargs or {}
        self.key, self.owner, self.line = key, owner, line
        self.value: Any = None
        self.writes, self.grad = False, True
        self.items: list[Node] = []

    @property
    def inputs(self) -> list[Node]:
        """The nodes whose values it takes."""
        return nodes_in((self.args, self.kwargs))

    @property
    def pure(self) -> bool:
        """Whether nobody misses it where nobody uses what it gives."""
        if self.kind in ("call", "method"):
            return isinstance(self.value, (int, float))
        return self.kind not in ("module", "check")

    def __repr__(self) -> str:
        return f"Node({self.kind} {self.target} {self.key})"


class Frame:
    """One call of a module that was opened: what its forward did, in order."""

    __slots__ = ("entries", "key", "owner")

    def __init__(self, owner: str, key: tuple[Any, ...]) -> None:
        self.owner, self.key = owner, key
        self.entries: list[Node | Frame] = []


class _Here:
    """Stands for the device where a layer is."""

    def __repr__(self) -> str:
        return "<device>"


HERE = _Here()


@dataclasses.dataclass(eq=False)
class Build:
    """A dataclass or named tuple that is built of values."""

    cls: type
    fields: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Select:
    """A constant that is one in training and another one in evaluation."""

    training: Any
    evaluation: Any


def map_tree(fn: Callable[[Any], Any], tree: Any) -> Any:
    """A tree with ``fn`` applied to its leaves; where nothing changes it is the very same.

    Dataclasses and named tuples become a :class:`Build` where something in them changes.
    """
    kind = type(tree)
    if kind in (tuple, list, torch.Size):
        new = [map_tree(fn, value) for value in tree]
        same = all(a is b for a, b in zip(new, tree, strict=True))
        return tree if same else list(new) if kind is list else tuple(new)
    if kind is dict:
        mapped = {key: map_tree(fn, value) for key, value in tree.items()}
        return tree if all(mapped[key] is tree[key] for key in tree) else mapped
    if kind is slice:
        parts = [map_tree(fn, part) for part in (tree.start, tree.stop, tree.step)]
        same = all(a is b for a, b in zip(parts, (tree.start, tree.stop, tree.step), strict=True))
        return tree if same else slice(*parts)
    if kind is Build:
        return Build(tree.cls, {key: map_tree(fn, value) for key, value in tree.fields.items()})
    fields = fields_of(tree)
    if fields is not None:
        built = {key: map_tree(fn, value) for key, value in fields.items()}
        return tree if all(built[key] is fields[key] for key in built) else Build(kind, built)
    return fn(tree)


def fields_of(value: Any) -> dict[str, Any] | None:
    """The fields of a dataclass or named tuple, by name; None for anything else."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return dict(zip(value._fields, value, strict=True))
    if isinstance(value, tuple) and type(value).__module__ == "torch.return_types":
        return None
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
    return None


def nodes_in(tree: Any) -> list[Node]:
    """The nodes in a tree, in order."""
    found: list[Node] = []

    def visit(leaf: Any) -> Any:
        if isinstance(leaf, Node):
            found.append(leaf)
        return leaf

    map_tree(visit, tree)
    return found


def rebuilt(fn: Callable[[Any], Any], tree: Any) -> Any:
    """A tree with ``fn`` applied to its leaves, of the same types."""
    kind = type(tree)
    if kind in (tuple, list, torch.Size):
        new = [rebuilt(fn, value) for value in tree]
        return tree if all(a is b for a, b in zip(new, tree, strict=True)) else kind(new)
    if kind is dict:
        return {key: rebuilt(fn, value) for key, value in tree.items()}
    if kind is slice:
        return slice(*(rebuilt(fn, part) for part in (tree.start, tree.stop, tree.step)))
    fields = fields_of(tree)
    if fields is not None:
        named = {key: rebuilt(fn, value) for key, value in fields.items()}
        return tree if all(named[key] is fields[key] for key in named) else kind(**named)
    return fn(tree)


def leaves_of(tree: Any) -> list[Any]:
    """The leaves of a tree, in order."""
    found: list[Any] = []

    def visit(leaf: Any) -> Any:
        found.append(leaf)
        return leaf

    map_tree(visit, tree)
    return found
