"""Writes the code of a layer: the modules that it calls, and the glue between them."""

from __future__ import annotations

import builtins
import keyword
import math
import re
import types
from collections.abc import Iterable
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from syncpipe.layers.conversion.recording.nodes import HERE, Build, Node, Select

__all__ = ["COLLECTED", "Writer", "check", "path_in_code"]

_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "true_divide": "/", "truediv": "/",
    "floordiv": "//", "floor_divide": "//", "mod": "%", "remainder": "%", "pow": "**",
    "matmul": "@", "gt": ">", "ge": ">=", "lt": "<", "le": "<=", "eq": "==", "ne": "!=",
    "and_": "&", "or_": "|", "xor": "^", "__and__": "&", "__or__": "|", "__xor__": "^",
    "__add__": "+", "__sub__": "-", "__mul__": "*", "__truediv__": "/", "__floordiv__": "//",
    "__eq__": "==", "__ne__": "!=", "__gt__": ">", "__ge__": ">=", "__lt__": "<", "__le__": "<=",
    "__matmul__": "@", "__pow__": "**", "__mod__": "%",
}  # fmt: skip
_SWAPPED = {"__radd__": "+", "__rsub__": "-", "__rmul__": "*", "__rtruediv__": "/",
            "__rdiv__": "/", "__rpow__": "**", "__rfloordiv__": "//", "__rmod__": "%",
            "__rmatmul__": "@"}  # fmt: skip


#: Where lines go that decide otherwise, while it is tried whether that matters.
COLLECTED: ContextVar[list[str] | None] = ContextVar("syncpipe_decisions", default=None)


def check(value: Any, recorded: Any, line: str) -> None:
    """Refuses a call in which Python would decide otherwise than when the model was recorded.

    Raises:
        ValueError: with the line that decides.
    """
    if bool(value) != recorded if isinstance(recorded, bool) else value != recorded:
        collected = COLLECTED.get()
        if collected is not None:
            collected.append(line)
            return
        raise ValueError(
            f"the model was converted with a sample for which this was {recorded!r}; here it is "
            f"{value!r}, and the model would do something else:\n  {line}\nConvert it with a "
            "sample like this call, or move this line into a module of its own"
        )


class Writer:
    """Names values, and writes what is done with them.

    Attributes:
        constants: what the code uses by a name.
    """

    def __init__(self) -> None:
        self._names: dict[Node, str] = {}
        self._taken: set[str] = {"self", "torch", "F", "check", *dir(builtins)}
        self.constants: dict[str, Any] = {}
        self._here: list[Node] = []

    def name(self, node: Node) -> str:
        """The name of a value, the same in all layers."""
        if node not in self._names:
            self._names[node] = self._new(_wish(node))
        return self._names[node]

    def _new(self, wish: str) -> str:
        wish = re.sub(r"\W+", "_", wish).strip("_") or "x"
        if wish[0].isdigit() or keyword.iskeyword(wish):
            wish = f"_{wish}"
        name, k = wish, 1
        while name in self._taken:
            name, k = f"{wish}_{k}", k + 1
        self._taken.add(name)
        return name

    def constant(self, value: Any, wish: str) -> str:
        """A name for something that cannot be written out."""
        for name, known in self.constants.items():
            if known is value:
                return name
        name = self._new(wish)
        self.constants[name] = value
        return name

    def layer(self, nodes: list[Node], takes: Iterable[Node], gives: Any) -> str:
        """The code of a layer: a function of what it takes.

        Args:
            nodes: what it does.
            takes: the values that it takes.
            gives: a tree of what it returns.
        """
        self.constants = {}
        takes = list(takes)
        self._here = [node for node in takes if isinstance(node.value, Tensor)]
        parameters = "".join(f", {self.name(node)}" for node in takes)
        lines = [f"def forward(self{parameters}):"]
        graded = True
        for node in nodes:
            if node.kind == "input":
                continue
            if node.grad != graded and node.kind != "item":
                graded = node.grad
                if not graded:
                    lines.append("    with torch.no_grad():")
            lines += [("    " if graded else "        ") + line for line in self._statement(node)]
            if isinstance(node.value, Tensor):
                self._here.append(node)
        return "\n".join([*lines, f"    return {self._value(gives)}"]) + "\n"

    def _statement(self, node: Node) -> list[str]:
        if node.kind == "check":
            value, recorded = node.args
            return [f"check({self._value(value)}, {recorded!r}, {node.line!r})"]
        if node.kind == "item" and node.target[0] == "after":
            self._names[node] = self.name(node.target[1])
            return []
        if node.kind == "method" and node.target == "__setitem__":
            x, index, value = node.args
            return [f"{self._value(x)}[{self._index(index)}] = {self._value(value)}"]
        if node.value is None and node.kind in ("call", "method"):
            return [self._done(node)]
        return [f"{self.name(node)} = {self._done(node)}"]

    def _done(self, node: Node) -> str:
        args, kwargs, target = node.args, node.kwargs, node.target
        if node.kind == "item":
            kind, at = target
            base = self._value(args[0])
            return f"{base}.{at}" if kind == "attribute" else f"{base}[{at!r}]"
        if node.kind == "get":
            return f"{self._operand(args[0])}.{target}"
        name = target if isinstance(target, str) else getattr(target, "__name__", "")
        operator = isinstance(target, str) or type(target) is types.BuiltinFunctionType
        if node.kind != "module" and operator and not kwargs:
            written = self._operator(name, args)
            if written is not None:
                return written
        if node.kind == "method":
            return f"{self._operand(args[0])}.{target}({self._arguments(args[1:], kwargs)})"
        called = path_in_code(target) if node.kind == "module" else self._function(target)
        return f"{called}({self._arguments(args, kwargs)})"

    def _operator(self, name: str, args: tuple[Any, ...]) -> str | None:
        if len(args) == 2 and (name in _INFIX or name in _SWAPPED):
            a, b = args if name in _INFIX else args[::-1]
            sign = _INFIX.get(name) or _SWAPPED[name]
            return f"{self._operand(a)} {sign} {self._operand(b)}"
        if name == "__getitem__":
            return f"{self._operand(args[0])}[{self._index(args[1])}]"
        if len(args) == 1 and name in ("neg", "__invert__", "invert"):
            return f"{'-' if name == 'neg' else '~'}{self._operand(args[0])}"
        return None

    def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        return ", ".join(
            [*map(self._value, args), *(f"{k}={self._value(v)}" for k, v in kwargs.items())]
        )

    def _operand(self, value: Any) -> str:
        text = self._value(value)
        return f"({text})" if text.startswith("-") or isinstance(value, Select) else text

    def _index(self, index: Any) -> str:
        if type(index) is tuple and index:
            return ", ".join(map(self._index, index)) + ("," if len(index) == 1 else "")
        if isinstance(index, slice):
            parts = [index.start, index.stop, index.step]
            start, stop, step = ("" if part is None else self._value(part) for part in parts)
            return f"{start}:{stop}" + (f":{step}" if step else "")
        return self._value(index)

    def _value(self, value: Any) -> str:
        """A tree of values, written out."""
        if isinstance(value, Node):
            if value.kind == "attribute":
                return path_in_code(value.target)
            if value.kind == "constant":
                return self._constant(value.value)
            return self.name(value)
        if value is HERE:
            return f"{self.name(self._here[0])}.device" if self._here else "self.device"
        if isinstance(value, Select):
            a, b = self._value(value.training), self._value(value.evaluation)
            plain = (a, b) == ("True", "False")
            return "self.training" if plain else f"{a} if self.training else {b}"
        if isinstance(value, Build):
            fields = ", ".join(f"{k}={self._value(v)}" for k, v in value.fields.items())
            return f"{self._function(value.cls)}({fields})"
        kind = type(value)
        if kind in (tuple, torch.Size):
            inner = ", ".join(map(self._value, value))
            return f"({inner},)" if len(value) == 1 else f"({inner})"
        if kind is list:
            return f"[{', '.join(map(self._value, value))}]"
        if kind is dict:
            return "{" + ", ".join(f"{k!r}: {self._value(v)}" for k, v in value.items()) + "}"
        if kind is slice:
            parts = (value.start, value.stop, value.step)
            return f"slice({', '.join(map(self._value, parts))})"
        if kind is float and not math.isfinite(value):
            return f"float({str(value)!r})"
        if kind in (int, float, bool, str, bytes, complex, type(None)):
            return repr(value)
        if value is Ellipsis:
            return "..."
        if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
            return str(value)
        if isinstance(value, torch.device):
            return f"torch.device({str(value)!r})"
        return self._constant(value)

    def _constant(self, value: Any) -> str:
        if isinstance(value, Tensor):
            return f"self.{self.constant(value, 'constant')}"
        return self._function(value)

    def _function(self, target: Any) -> str:
        """What a function is called by in the code."""
        name = getattr(target, "__name__", "")
        for room, where in (("F", F), ("torch", torch)):
            if name and getattr(where, name, None) is target:
                return f"{room}.{name}"
        if isinstance(target, types.BuiltinFunctionType) and name in ("bool", "len"):
            return name
        owner = getattr(target, "__self__", None)
        if isinstance(owner, type) and name == "apply":
            return f"{self.constant(owner, owner.__name__)}.apply"
        return self.constant(target, name or type(target).__name__)


def path_in_code(path: str) -> str:
    """A dotted path as an expression: ``self.transformer.h[0].attn``."""
    text = "self"
    for part in path.split("."):
        if part.isdigit():
            text += f"[{part}]"
        elif part.isidentifier() and not keyword.iskeyword(part) and not hasattr(nn.Module, part):
            text += f".{part}"
        else:
            text += f"[{part!r}]"
    return text


def _wish(node: Node) -> str:
    """What one would call a value."""
    if node.kind == "item":
        return f"{_wish(node.args[0])}_{node.target[1]}"
    if node.kind == "module":
        parts = node.target.split(".")
        start = max(len(parts) - 2, 0)
        while start and parts[start].isdigit():
            start -= 1
        return "_".join(parts[start:])
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "x")
    return str(name)
