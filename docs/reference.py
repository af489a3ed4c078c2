"""Writes docs/reference.md: every public name, its signature and the first line of its docstring.

    python docs/reference.py          # writes it
    python docs/reference.py --check  # fails if it is stale

The rest of a docstring (arguments, shapes, units, errors) is shown by ``help(syncpipe.Pipe)``.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from textwrap import fill
from typing import Any, Literal, get_args, get_origin

PAGE = Path(__file__).with_name("reference.md")
PACKAGES = ["", "checkpoints", "skip", "balance", "planner", "schedules", "timeline", "distributed"]
HEAD = """\
# Reference

Every public name with its signature and what it does, made from the docstrings by
`python docs/reference.py`. The rest, arguments, shapes, units and errors, is in the docstrings:
`help(syncpipe.Pipe.train_batch)`, or a tooltip of your editor.
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
    """The lines of one name, and of the members of a class."""
    if not callable(found):
        yield item(name, f"A `{type(found).__name__}`.")
        return
    if get_origin(found) is Literal:
        yield item(name, f"One of {', '.join(map(repr, get_args(found)))}.")
        return
    plain = isinstance(found, type) and issubclass(found, Enum | Exception)
    yield item(name if plain else name + signature(found), first_line(found))
    if inspect.isclass(found):
        for member, value in members(found):
            shown = "" if isinstance(value, property) or not callable(value) else signature(value)
            text = first_line(value.fget if isinstance(value, property) else value)
            yield item(f".{member}{shown}", text, indent="  ")


def item(code: str, text: str, indent: str = "") -> str:
    """One entry of a list; the code is not broken, however long it is."""
    inside = indent + "  "
    text = fill(text, 100, initial_indent=inside, subsequent_indent=inside)
    return f"{indent}- `{code}`\n{text}\n"


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


def first_line(found: Any) -> str:
    """The first sentence, or line, of a docstring."""
    text = (inspect.getdoc(found) or "").split("\n\n")[0]
    return " ".join(text.split()).removesuffix("::")


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(0 if PAGE.read_text(encoding="utf-8") == page() else f"stale: python {__file__}")
    PAGE.write_text(page(), encoding="utf-8")
