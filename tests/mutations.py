"""Takes out each wait of the stream code, and each that keeps memory; what goes red?

    python -m tests.mutations              # all lines, with every detector that can run here
    python -m tests.mutations keep_until_copied   # lines with one of these words
    python -m tests.mutations simulated    # one of the detectors only

A line that can go without a test that notices is either not needed or not tested. Each is taken
out of a copy of the package, one at a time, and the tests of a detector run on that copy until
the first one fails.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
FILES = (
    "runtime/streams.py", "stages/call.py", "stages/parcel.py", "stages/sharing/ties.py",
    "stages/sharing/copies.py", "stages/sharing/replicas.py", "stages/dealing.py",
    "stages/transfer.py", "forward.py", "distributed/reduction.py",
)  # fmt: skip
CALLS = {
    "keep", "keep_until_copied", "receive", "record_on_stream", "record_stream", "wait",
    "wait_event", "wait_for", "wait_for_caller",
}  # fmt: skip

_PYTEST = ("-m", "pytest", "-x", "-q", "-n0", "-p", "no:cacheprovider", "--tb=no", "--timeout=120")

#: What may notice: for each detector the arguments of Python. Tests that take a line out themselves
#: are left out: they find it missing, whatever it was good for.
DETECTORS: dict[str, Sequence[str]] = {
    "happens-before": (
        *_PYTEST,
        "tests/streams/test_streams_lanes.py",
        "tests/streams/test_streams.py",
        "tests/streams/test_streams_training.py",
        "-k=not race_without and not all_sites and not race_if and not mutations",
    ),
    "simulated": ("-m", "tests.simulated.fuzz", "--models=300", "--seed=1", "--stop"),
}


class Mutation(NamedTuple):
    """A statement that can be taken out.

    Attributes:
        file: below ``syncpipe/``.
        first: its first line, from 1.
        last: its last line.
        text: what it says.
    """

    file: str
    first: int
    last: int
    text: str

    def apply(self, root: Path) -> None:
        """Takes the statement out of the copy of the project at ``root``."""
        path = root / "syncpipe" / self.file
        lines = path.read_text(encoding="utf-8").splitlines()
        begin = lines[self.first - 1]
        indent = begin[: len(begin) - len(begin.lstrip())]
        lines[self.first - 1 : self.last] = [f"{indent}pass"]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def mutations() -> Iterator[Mutation]:
    """Every statement of the stream code that is one of ``CALLS``."""
    for file in FILES:
        source = (ROOT / "syncpipe" / file).read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(source)):
            call = node.value if isinstance(node, ast.Expr) else None
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
                continue
            if call.func.attr in CALLS:
                yield Mutation(file, node.lineno, node.end_lineno or 0, ast.unparse(call))


def red_by(mutation: Mutation | None, arguments: Sequence[str]) -> str:
    """The first test that fails without the statement; nothing if none does."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for name in ("syncpipe", "tests"):
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, root / name, ignore=ignored)
        shutil.copy(ROOT / "pyproject.toml", root)
        if mutation is not None:
            mutation.apply(root)
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=root, env={**os.environ, "PYTHONPATH": str(root)},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    if done.returncode == 0:
        return ""
    for line in done.stdout.splitlines():
        if line.startswith(("FAILED ", "ERROR ")):
            return line.split(" ")[1].removeprefix("tests/")
        if line.startswith("--seed "):
            return line
    return f"pytest ended with {done.returncode}: {done.stdout[-300:]}{done.stderr[-300:]}"


def main(words: Sequence[str]) -> int:
    """Prints the table; returns the number of statements that nobody missed."""
    chosen = {name: DETECTORS[name] for name in DETECTORS if name in words} or DETECTORS
    words = [word for word in words if word not in DETECTORS]
    missed = 0
    for mutation in mutations():
        place = f"{mutation.file}:{mutation.first}"
        if words and not any(word in mutation.text for word in words):
            continue
        reds = {name: red_by(mutation, arguments) for name, arguments in chosen.items()}
        missed += not any(reds.values())
        for name, red in reds.items():
            print(f"{place:24} {mutation.text[:56]:56}  {name}: {red or '-'}", flush=True)
    print(f"{missed} statements can go and nobody notices")
    return missed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) > 0)
