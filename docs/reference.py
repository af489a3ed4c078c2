"""Writes docs/reference.md: every public name, its signature, the first sentence of its docstring,
its arguments, what it returns and what it raises.

    python docs/reference.py          # writes it
    python docs/reference.py --check  # fails if it is stale
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from textwrap import dedent, fill
from typing import Any, Literal, get_args, get_origin

PAGE = Path(__file__).with_name("reference.md")
PACKAGES = ["", "checkpoints", "skip", "balance", "planner", "schedules", "timeline", "distributed"]
HEAD = """\
# Reference

Every public name with its signature, what it does, its arguments, results and errors.
`python docs/reference.py` makes this page from the docstrings. `help(syncpipe.Pipe.train_batch)`
prints the whole docstring, with examples.
"""


def page() -> str:
    """The text of the page."""
    parts, listed = [HEAD], set[int]()
    for package in PACKAGES:
        name = f"syncpipe.{package}".rstrip(".")
        module = importlib.import_module(name)
        parts.append(f"## {name}\n")
        for public in module.__all__:
            found = getattr(module, public)
            if not callable(found) or id(found) not in listed:  # once, where it is shortest
                parts += entries(public, found)
            listed.add(id(found))
    return "\n".join(parts)


def entries(name: str, found: Any) -> Iterator[str]:
    """The sections of one name, and of the members of a class."""
    yield f"### {name}\n"
    if not callable(found):
        yield f"A `{type(found).__name__}`.\n"
        return
    if get_origin(found) is Literal:
        yield f"One of {', '.join(f'`{value!r}`' for value in get_args(found))}.\n"
        return
    plain = isinstance(found, type) and issubclass(found, Enum | Exception)
    yield from described(name, found, "" if plain else signature(found))
    if inspect.isclass(found):
        for member, value in members(found):
            shown = "" if isinstance(value, property) or not callable(value) else signature(value)
            yield f"#### {name}.{member}\n"
            yield from described(member, getattr(value, "fget", None) or value, shown)


def described(name: str, found: Any, shown: str) -> Iterator[str]:
    """Signature, first sentence, arguments, results and errors of one docstring."""
    if shown:
        line = fill(f"{name}{shown}", 100, subsequent_indent="    ", break_long_words=False)
        yield f"```text\n{line}\n```\n"
    text = re.sub(r":\w+:`[~.]*([^`]*)`", r"`\1`", inspect.getdoc(found) or "").replace("``", "`")
    yield wrapped(text.split("\n\n")[0].removesuffix("::")) + "\n"
    for title, body in re.findall(r"^(\w+):\n((?:(?:    .*)?\n?)+)", text, flags=re.M):
        if title == "Returns":
            yield wrapped(f"Returns: {body}") + "\n"
        elif title in ("Args", "Raises"):
            begin = "- Raises " if title == "Raises" else "- "
            for part in re.split(r"^(?=\S)", dedent(body).strip(), flags=re.M):
                if part:
                    yield wrapped(begin + re.sub(r"^([\w*, ]+): ", r"`\1`: ", part), "  ")
            yield ""


def wrapped(text: str, indent: str = "") -> str:
    """A paragraph in lines of 100 characters."""
    return fill(" ".join(text.split()), 100, subsequent_indent=indent, break_long_words=False)


def members(kind: type) -> Iterator[tuple[str, Any]]:
    """The public methods and properties that the package has given a class, in their order."""
    seen = {field.name for field in dataclasses.fields(kind)} if is_record(kind) else set()
    seen |= {"forward", "train"}  # those of every nn.Module
    for owner in kind.__mro__:
        if owner.__module__.startswith("syncpipe"):
            for name, value in vars(owner).items():
                if isinstance(value, (staticmethod, classmethod)):
                    value = getattr(kind, name)
                documented = inspect.getdoc(value) and (callable(value) or is_property(value))
                if not name.startswith("_") and name not in seen and documented:
                    yield name, value
                seen.add(name)


def is_record(kind: type) -> bool:
    """Whether it is a dataclass, whose fields are in its signature."""
    return dataclasses.is_dataclass(kind)


def is_property(value: Any) -> bool:
    """Whether it is read as an attribute."""
    return isinstance(value, property) or hasattr(value, "func")  # cached_property


def signature(function: Any) -> str:
    """A signature without annotations."""
    try:
        given = inspect.signature(function)
    except (TypeError, ValueError):
        return ""
    parameters = [
        parameter.replace(annotation=parameter.empty, default=shown(parameter.default))
        for name, parameter in given.parameters.items()
        if name != "self" and not name.startswith("_")
    ]
    return str(given.replace(parameters=parameters, return_annotation=given.empty))


def shown(default: Any) -> Any:
    """A default without an address or a long list in it."""
    missing = default is inspect.Parameter.empty
    return default if missing or (len(text := repr(default)) < 40 and " at 0x" not in text) else ...


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(0 if PAGE.read_text(encoding="utf-8") == page() else f"stale: python {__file__}")
    PAGE.write_text(page(), encoding="utf-8")
