"""How the modules of the package hang together."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from torch import nn

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
    ["data", "format", "progress", "schedules", "skip", "storage"],
    ["compare", "options", "runtime"],
    ["checkpoints", "hints", "state", "timeline"],
    ["layers"],
    ["balance", "stages"],
    ["planner", "training"],
    ["pipe"],
    ["distributed", "integrations", "verification"],
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


def _is_private(name: str) -> bool:
    return any(part[:1] == "_" != part[1:2] for part in name.split("."))


def uses_of_pytorch(tree: ast.Module) -> Iterator[str]:
    """Names of PyTorch that a module uses: dotted from ``torch``, or ``.x`` of any object."""
    of_tensors = {"_version", "_base", "_backward_hooks", "_post_accumulate_grad_hooks", "_cdata"}
    of_objects = {*filter(_is_private, dir(nn.Module())), *of_tensors}
    names = {"torch": "torch"}

    def dotted(node: ast.AST) -> str | None:
        if isinstance(node, ast.Name):
            return names.get(node.id)
        base = dotted(node.value) if isinstance(node, ast.Attribute) else None
        return f"{base}.{node.attr}" if base else None

    own = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value and dotted(node.value):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            names[ast.unparse(target)] = dotted(node.value)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if (found := dotted(node)) or node.attr in of_objects - own:
                yield found or f".{node.attr}"
        elif isinstance(node, ast.FunctionDef) and node.name in of_objects - own:
            yield f".{node.name}"


def test_what_is_not_the_public_contract_of_pytorch_is_listed():
    page = (PACKAGE.parent / "tests" / "private_names.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`[^|]+) \| ([^|]+) \| (2\.[^|]+) \|$", page, re.M)
    listed: dict[str, set[str]] = defaultdict(set)
    for names, files, _ in rows:
        for name in re.findall("`([^`]+)`", names):
            listed[name] |= {*re.findall("`([^`]+)`", files)}
    used: dict[str, set[str]] = defaultdict(set)
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found = {*filter(_is_private, uses_of_pytorch(tree))}
        for name in found - {"torch._C"}:
            if not any(other.startswith(f"{name}.") for other in found):
                used[name.removeprefix("torch.")].add(path.relative_to(PACKAGE).as_posix())
    assert len(used) > 50
    assert listed.keys() == used.keys()
    assert all(files & used[name] or not files for name, files in listed.items()), "wrong files"
