"""Takes statements that wait, hold, record, lock or order out of the package: which test goes red?

    python -m tests.mutations               # all of them, with every detector that can run here
    python -m tests.mutations keep engine   # those with one of these words in text or path
    python -m tests.mutations --list        # what there is, without running anything
    python -m tests.mutations --detectors streams threads   # with some of the detectors

A statement that can go without a test that notices is either not needed or not tested. Statements
are found by what they call, wherever they are, so that the table follows the package when it is
redrawn.

Each mutant is a copy of the package, on which the detectors run one after another until a test
fails. They run once without any change first, where nothing may be red; and whoever does not run a
statement there need not look for it.
"""

from __future__ import annotations

import argparse
import ast
import collections
import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent

#: Where nothing runs at the same time as anything else.
PURE = {"balance", "commands", "layers", "planner", "schedules", "timeline", "verification"}

#: Calls whose result nobody uses, so that they are there for what they do.
CALLS = re.compile(
    r"wait|(^|_)(keep|record|receive|hold|held|synchronize|stamp|adopt|claim|bring|notify|lock"
    r"|register|release|acquire|fetch|undo|restore|restoring|follow|leave)(_|$)"
    r"|put_back|multithreading|at_fork|without_generators|cancel|deliver|invalidate|for_caller"
    r"|note_versions"
)
#: Calls by such names that hold nothing, or without which nothing works at all.
NOT = re.compile(r"register_(hook|prehook|buffer|parameter|autograd|fake)|_record$|add_to_record")
#: Contexts that lock, or that say on whose streams and in whose state something runs.
CONTEXTS = re.compile(r"lock|active\(|as_caller|\.use\(|applied\(|NoDispatch|NoFunctions|holding\(")
#: Order that a program could do without, but for its numbers.
ORDERS = re.compile(r"^(sorted|reversed)$")


_PYTEST = ("-m", "gpu or not gpu", "-q", "-n0", "-p", "no:cacheprovider", "--tb=no")
_PYTEST += ("--timeout=120",)  # a mutant may well hang: no test of these takes so long


class Detector(NamedTuple):
    """Tests that may notice.

    Attributes:
        about: a regular expression for the paths of what they can notice anything of.
        arguments: of pytest; or a module with a fuzz, and its arguments.
        simulated: whether they run on the simulated devices.
        every: of how many tests one runs, in any order; many differ in little from each other.
        seconds: after which a run counts as hanging.
        runs: the statements that it runs, as ``Mutant.key``; filled by :func:`looked_at`.
    """

    about: str
    arguments: Sequence[str]
    simulated: bool = False
    every: int = 1
    seconds: float = 600.0
    runs: frozenset[str] = frozenset()

    @property
    def fuzz(self) -> bool:
        return not self.arguments[0].startswith("tests/")


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """As a plugin of pytest: some of the tests, mixed, so that it soon meets all kinds."""
    items[:] = items[:: int(os.environ["SYNCPIPE_EVERY"])]
    random.Random(0).shuffle(items)


def _files(*names: str) -> list[str]:
    return [f"tests/{name}" for name in names]


_HERE = "^(?!distributed/)"

#: Only accelerators come here.
_DEVICES = r"(stages/offload|runtime/streams)\.py"

#: A few cases of the fuzz notice most. Tests that take a statement out themselves are left out:
#: they find it missing, whatever it was good for.
DETECTORS: dict[str, Detector] = {
    "devices": Detector(_HERE, ["tests.simulated.fuzz", "--models=40"], simulated=True),
    "models": Detector(f"{_HERE}(?!{_DEVICES})", ["tests.fuzz", "--models=40"]),
    "simulated": Detector(
        _HERE,
        [
            *_files(
                "accelerators/test_accelerators_streams.py",
                "accelerators/test_accelerators_offload.py",
                "accelerators/test_accelerators_memory.py",
                "accelerators/test_accelerators_copies.py",
                "training/stream/test_equivalence.py",
            ),
            "-k=not left_out",
        ],
        simulated=True,
        every=3,
    ),
    "threads": Detector(
        f"{_HERE}(?!{_DEVICES})",
        _files(
            "runtime",
            "training/failures",
            "training/stream",
            "training/test_train_memory.py",
            "training/test_nested_calls.py",
            "training/test_weight_gradients.py",
            "timeline/test_trace.py",
            "verification/test_restored.py",
        ),
        every=2,
    ),
    "more devices": Detector(
        _HERE, ["tests.simulated.fuzz", "--first=40", "--models=260"], simulated=True
    ),
    "more models": Detector(f"{_HERE}(?!{_DEVICES})", ["tests.fuzz", "--first=40", "--models=210"]),
    "processes": Detector(
        "^distributed/",
        _files(
            "distributed/test_failures.py",
            "distributed/test_gradients.py",
            "distributed/stages/test_stage_failures.py",
        ),
    ),
    "ranks": Detector(
        "^distributed/", _files("accelerators/test_accelerators_ranks.py"), simulated=True
    ),
}


class Mutant(NamedTuple):
    """One change.

    Attributes:
        file: below ``syncpipe/``.
        line: where, from 1.
        what: it is.
        source: the whole file with it.
        marked: the line where it is, with a note that it was run.
    """

    file: str
    line: int
    what: str
    source: str
    marked: str

    @property
    def key(self) -> str:
        return f"{self.file}:{self.line}"


def mutants() -> Iterator[Mutant]:
    """Every mutant of the package as it is."""
    for path in sorted((ROOT / "syncpipe").rglob("*.py")):
        file = path.relative_to(ROOT / "syncpipe")
        if file.parts[0] in PURE:
            continue
        source = path.read_text(encoding="utf-8")
        lines = source.splitlines(keepends=True)
        said: set[int] = set()
        for node in ast.walk(ast.parse(source)):
            for what, old, new in _changes(node, said):
                k, note = old.lineno, f"__import__('notes').note('{file}:{old.lineno}')"
                note += {"pass": "; "}.get(new, " or ")
                line = lines[k - 1].encode()
                marked = line[: old.col_offset].decode() + note + line[old.col_offset :].decode()
                yield Mutant(str(file), k, what, _replaced(lines, old, new), marked)


def _changes(node: ast.AST, said: set[int]) -> Iterator[tuple[str, Any, str]]:
    """What it would change, the node, and the text that replaces it; ``said`` are messages."""
    if isinstance(node, ast.Raise | ast.JoinedStr):  # the order of what is said
        said.update(map(id, ast.walk(node)))
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        name = _name(node.value.func)
        if CALLS.search(name) and not NOT.search(name):
            yield ast.unparse(node), node, "pass"
    elif isinstance(node, ast.With | ast.AsyncWith):
        for item in node.items:
            text = ast.unparse(item.context_expr)
            if CONTEXTS.search(text) and item.optional_vars is None:
                context = '__import__("contextlib").nullcontext()'
                yield f"with {text}", item.context_expr, context
    elif isinstance(node, ast.Call) and ORDERS.search(_name(node.func)) and id(node) not in said:
        yield ast.unparse(node), node.func, "(lambda found, **_: list(found))"


def _name(function: ast.expr) -> str:
    return getattr(function, "attr", None) or getattr(function, "id", "")


def _replaced(lines: Sequence[str], node: Any, text: str) -> str:
    """The file with other text in place of a node."""
    first, last = node.lineno - 1, node.end_lineno - 1
    before = lines[first].encode()[: node.col_offset].decode()
    after = lines[last].encode()[node.end_col_offset :].decode()
    return "".join([*lines[:first], before + text + after, *lines[last + 1 :]])


#: A module that writes down, once in each process, what is run.
NOTES = """
from pathlib import Path
noted = set()
def note(key):
    if key not in noted:
        noted.add(key)
        with Path(__file__).with_suffix(".txt").open("a") as file:
            print(key, file=file)
"""


def copied(root: Path, mutant: Mutant | None) -> None:
    """Makes a copy of the project with one change, or one that notes which mutants are run."""
    for name in ("syncpipe", "tests", "benchmarks"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("results"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, root)
    if mutant is not None:
        (root / "syncpipe" / mutant.file).write_text(mutant.source, encoding="utf-8")
        return
    (root / "notes.py").write_text(NOTES)
    for each in mutants():
        path = root / "syncpipe" / each.file
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        lines[each.line - 1] = each.marked
        path.write_text("".join(lines), encoding="utf-8")


def reds_by(root: Path, detector: Detector) -> list[str]:
    """The tests that fail on a copy; nothing if none does."""
    command = [*detector.arguments, "--seed=1", "--stop"]
    if not detector.fuzz:
        command = ["pytest", *_PYTEST, "-x", "-p", "tests.mutations", *detector.arguments]
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    environment |= {"SYNCPIPE_EVERY": str(detector.every)}
    environment["SYNCPIPE_SIMULATED"] = str(int(detector.simulated))
    with (root / "output").open("w+") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", *command], cwd=root, env=environment, stdout=output,
            stderr=output, start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(detector.seconds)
        except subprocess.TimeoutExpired:
            return [f"hangs for {detector.seconds:.0f} s"]
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # it, and what it has left behind
            process.wait()
    if code == 0:
        return []
    text = (root / "output").read_text(encoding="utf-8", errors="replace")
    if "+ Timeout +" in text:
        return ["a test hangs"]
    found = [
        line.split(" - ")[0].removeprefix("FAILED ").removeprefix("ERROR ")
        for line in text.splitlines()
        if line.startswith(("FAILED ", "ERROR ", "--seed "))
    ]
    return found or [f"ended with {code}: {text[-300:]!r}"]


def judged(mutant: Mutant, detectors: dict[str, Detector]) -> tuple[str, str]:
    """The first detector that is red, and its test; two empty strings if none is."""
    with tempfile.TemporaryDirectory(prefix="mutant") as folder:
        copied(Path(folder), mutant)
        for name, detector in detectors.items():
            if mutant.key in detector.runs and (reds := reds_by(Path(folder), detector)):
                return name, reds[0]
    return "", ""


def looked_at(name: str) -> Detector:
    """A detector with the statements that it runs."""
    detector = DETECTORS[name]
    with tempfile.TemporaryDirectory(prefix="mutant") as folder:
        copied(Path(folder), None)
        if reds := reds_by(Path(folder), detector):
            raise SystemExit(f"{name}: red without any change: {', '.join(reds)}")
        notes = Path(folder, "notes.txt").read_text().split()
    runs = frozenset(key for key in notes if re.search(detector.about, key))
    print(f"{name} runs {len(runs)} of them", flush=True)
    return detector._replace(runs=runs)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; returns the number of mutants that nobody noticed."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--detectors", nargs="+", default=list(DETECTORS), choices=DETECTORS)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args(arguments)
    chosen = [
        mutant
        for mutant in mutants()
        if not options.words or any(w in f"{mutant.file} {mutant.what}" for w in options.words)
    ]
    if options.list:
        for mutant in chosen:
            print(f"{mutant.file}:{mutant.line}: {mutant.what}")
        print(len(chosen), "mutants")
        return 0
    names = usable(options.detectors)
    begun = time.monotonic()
    missed: list[Mutant] = []
    killed: collections.Counter[str] = collections.Counter()
    with ThreadPoolExecutor(options.processes) as pool:
        detectors = dict(zip(names, pool.map(looked_at, names), strict=True))
        found = pool.map(partial(judged, detectors=detectors), chosen)
        for mutant, (name, red) in zip(chosen, found, strict=True):
            if red:
                killed[name] += 1
            else:
                missed.append(mutant)
            told = f"{name}: {red.removeprefix('tests/')}" if red else "NOBODY"
            print(f"{mutant.file}:{mutant.line}: {mutant.what[:90]}\n    {told}", flush=True)
    seconds = time.monotonic() - begun
    print("\nNobody noticed:")
    for mutant in missed:
        print(f"  {mutant.file}:{mutant.line}: {mutant.what[:100]}")
    noticed = ", ".join(f"{count} by {name}" for name, count in killed.most_common())
    print(f"{len(chosen)} mutants in {seconds:.0f} s: {len(missed)} unnoticed, {noticed or 'none'}")
    return len(missed)


def usable(names: Sequence[str]) -> list[str]:
    """Of these detectors those that can run on this machine."""
    from tests import simulated

    reason = simulated.unavailable()
    if reason is None and any(DETECTORS[name].simulated for name in names):
        simulated.build()
    elif reason is not None:
        print(reason)
    return [name for name in names if reason is None or not DETECTORS[name].simulated]


if __name__ == "__main__":
    sys.exit(main() > 0)
