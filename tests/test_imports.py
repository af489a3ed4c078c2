"""How the modules of the package hang together."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import syncpipe

PACKAGE = Path(syncpipe.__file__).parent


def modules() -> dict[str, Path]:
    """Each module of the package, by its name."""
    names = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        names[".".join(parts).removesuffix(".__init__")] = path
    return names


def imports(name: str, known: dict[str, Path]) -> Iterator[str]:
    """What a module imports of the package, also in functions and for type checkers only."""
    path = known[name]
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*start, *filter(None, [node.module])])
            for alias in node.names:
                found = {f"{origin}.{alias.name}", origin} & known.keys()
                yield from [max(found, key=len)] if found else []


def test_no_modules_import_each_other_in_a_circle():
    known = modules()
    graph = {name: set(imports(name, known)) for name in known}
    assert sum(map(len, graph.values())) > 100  # it looks at what it should
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(" imports ".join(reversed(error.args[1]))) from None


#: From the ground up; what stands on one floor does not import from its neighbours.
FLOORS = [
    ["words"],
    ["data", "schedules", "skip"],
    ["options", "runtime"],
    ["hints", "state"],
    ["checkpoints", "compare"],
    ["layers", "timeline"],
    ["balance", "stages"],
    ["layout", "planner", "training"],
    ["pipe"],
    ["distributed", "verification"],
    [""],  # the public names
    ["commands"],
    ["__main__"],
]


def test_imports_point_down():
    floor = {room: k for k, rooms in enumerate(FLOORS) for room in rooms}
    known = modules()
    for name in known:
        for other in imports(name, known):
            here, there = (f"{m}.".split(".")[1] for m in (name, other))
            assert here == there or floor[here] > floor[there], f"{name} imports {other}"
