"""Compares two recordings of one model: with other sizes, or in the other mode.

What a forward does must not depend on what is not written down. Where two recordings differ in
what one module did, that module decided by a size, a mode or a value, so it cannot be opened.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from syncpipe.layers.conversion.recording.nodes import (
    Build,
    Frame,
    Node,
    Select,
    map_tree,
    nodes_in,
)

__all__ = ["Fault", "Recorded", "differences", "live"]

#: The module that is at fault, the line in its code, and what is wrong.
Fault = tuple[str, str, str]


class Recorded(Protocol):
    """What a recording is compared by."""

    frame: Frame
    output: Any


def live(recording: Recorded) -> set[Node]:
    """The nodes that somebody misses if they are not done."""
    pending = nodes_in(recording.output)
    pending += [node for node in _nodes(recording.frame) if not node.pure]
    found: set[Node] = set()
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += node.inputs
    return found


def _nodes(frame: Frame) -> list[Node]:
    found: list[Node] = []
    for entry in frame.entries:
        found += _nodes(entry) if isinstance(entry, Frame) else [entry]
    return found


def differences(
    a: Recorded, b: Recorded, *, selects: Callable[[str], bool] = lambda owner: False
) -> list[Fault]:
    """Where two recordings differ.

    Args:
        a: a recording.
        b: another one of the same model.
        selects: for a module, whether a constant that differs between the two is no fault; ``a``
            then holds a :class:`Select` of both.

    Returns:
        For each call of a module that differs the first difference.
    """
    comparison = _Comparison(live(a), live(b), selects)
    comparison.frames(a.frame, b.frame)
    if not comparison.found:
        merged = comparison.merged(a.output, b.output, constants=False)
        if merged is None:
            comparison.found.append(("", "", "what the model returns is put together differently"))
    return comparison.found


_DIFFERENT = object()


class _Comparison:
    def __init__(
        self, live_a: set[Node], live_b: set[Node], selects: Callable[[str], bool]
    ) -> None:
        self.live_a, self.live_b, self.selects = live_a, live_b, selects
        self.found: list[Fault] = []
        self.doubtful: list[tuple[Any, ...]] = []  # calls that differ: what they gave may as well
        self.why = ""

    def frames(self, a: Frame, b: Frame) -> None:
        left = [e for e in a.entries if isinstance(e, Frame) or e in self.live_a]
        right = [e for e in b.entries if isinstance(e, Frame) or e in self.live_b]
        for one, two in zip(left, right, strict=False):
            what = self._entries(one, two)
            if what:
                self._differ(a, one if isinstance(one, Node) else two, what)
                return
        if len(left) != len(right):
            longer = left if len(left) > len(right) else right
            self._differ(a, longer[min(len(left), len(right))], "more is done in one than another")

    def _entries(self, one: Node | Frame, two: Node | Frame) -> str:
        """What differs, in words."""
        if isinstance(one, Frame) or isinstance(two, Frame):
            if type(one) is not type(two) or one.owner != two.owner:
                return "another module is called"
            assert isinstance(one, Frame)
            assert isinstance(two, Frame)
            self.frames(one, two)
            return ""
        if one.kind != two.kind or one.target != two.target:
            return f"another thing is done ({one.target}, {two.target})"
        for name in ("args", "kwargs"):
            constants = one.kind != "check" and self.selects(one.owner)
            merged = self.merged(getattr(one, name), getattr(two, name), constants=constants)
            if merged is None:
                return self.why
            setattr(one, name, merged)
        return ""

    def _differ(self, frame: Frame, entry: Any, what: str) -> None:
        self.found.append((frame.owner, entry.line if isinstance(entry, Node) else "", what))
        self.doubtful.append(frame.key)

    def merged(self, a: Any, b: Any, *, constants: bool) -> Any:
        """A tree for both of two trees; None if there is none."""
        left: list[Any] = []
        right: list[Any] = []
        if _shape(a, left) != _shape(b, right):
            self.why = "what is passed is put together differently from time to time"
            return None
        new = [self._leaf(one, two, constants) for one, two in zip(left, right, strict=True)]
        if any(leaf is _DIFFERENT for leaf in new):
            return None
        if all(leaf is one for leaf, one in zip(new, left, strict=True)):
            return a
        following = iter(new)
        return map_tree(lambda _: next(following), a)

    def _leaf(self, one: Any, two: Any, constants: bool) -> Any:
        if isinstance(one, Node) or isinstance(two, Node):
            both = isinstance(one, Node) and isinstance(two, Node)
            same = both and (one.key == two.key or (self._in_doubt(one) and self._in_doubt(two)))
            if both and one.kind == two.kind == "constant" and not same:
                kind = type(one.value).__name__
                self.why = f"it passes a {kind} that is made anew in every call"
                if "Cache" in kind:
                    self.why += " (for training: use_cache=False)"
            elif not same:
                self.why = "it passes something else from time to time"
            return one if same else _DIFFERENT
        if one is two or (type(one) is type(two) and (one == two or repr(one) == repr(two))):
            return one
        self.why = f"it depends on sizes or on the mode whether this is {one!r} or {two!r}"
        return Select(one, two) if constants else _DIFFERENT

    def _in_doubt(self, node: Node) -> bool:
        return any(node.key[: len(key)] == key for key in self.doubtful)


def _shape(tree: Any, leaves: list[Any]) -> Any:
    """The structure of a tree; its leaves go to the list, in the order of ``map_tree``."""
    if isinstance(tree, Build):
        return tree.cls, [(key, _shape(value, leaves)) for key, value in tree.fields.items()]
    if isinstance(tree, dict):
        return dict, [(key, _shape(value, leaves)) for key, value in tree.items()]
    if isinstance(tree, (tuple, list)):
        return type(tree), [_shape(value, leaves) for value in tree]
    if isinstance(tree, slice):
        return slice, [_shape(part, leaves) for part in (tree.start, tree.stop, tree.step)]
    leaves.append(tree)
    return None
