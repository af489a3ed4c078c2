"""The suite itself: what it promises to every test."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

from tests.mutations import DETECTORS, mutants

TESTS = Path(__file__).parent
# Each makes pipes without naming devices.
WITHOUT_DEVICES = [
    "layers/test_placement.py::test_without_an_accelerator_each_partition_gets_a_cpu_worker",
    "inputs/test_trees.py::test_a_lone_no_chunk_tensor_goes_through_where_nothing_has_to_be_cut",
    "pipe/test_replicas.py::test_devices_are_listed_stage_by_stage_and_there_are_workers_by_default",
]


def test_tests_that_name_no_devices_get_cpu_workers():
    tests = [str(TESTS / name) for name in WITHOUT_DEVICES]
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider"]
    command += ["-p", "tests.support.pretend"]  # that there are some
    done = subprocess.run(
        [*command, *tests],
        capture_output=True, text=True, timeout=260, check=False, cwd=TESTS.parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert f"{len(tests)} passed" in done.stdout


def test_importing_tests_changes_nothing():
    """Else what passes depends on which tests are collected together."""
    for path in TESTS.rglob("*.py"):
        # These are made to have effects, or imported by nobody.
        if path.name not in ("conftest.py", "__main__.py", "pretend.py", "user.py"):
            check_imported(path)


def check_imported(path: Path) -> None:
    for statement in ast.parse(path.read_text(encoding="utf-8")).body:
        where = f"{path.relative_to(TESTS)}:{statement.lineno}"
        targets = getattr(statement, "targets", [getattr(statement, "target", None)])
        for target in targets:
            assert not isinstance(target, ast.Attribute | ast.Subscript), where
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            called = ast.unparse(statement.value.func)
            assert "register" in called or called == "pytest.importorskip", where


def test_mutants_are_found_wherever_the_package_waits_locks_and_orders():
    found = list(mutants())
    what = " ".join(mutant.what for mutant in found)
    for word in ("wait", "receive", "record", "keep", "lock", "sorted", "reversed"):
        assert word in what
    for mutant in found:
        before = (TESTS.parent / "syncpipe" / mutant.file).read_text(encoding="utf-8")
        assert mutant.source != before
        compile(mutant.source, mutant.file, "exec")


def test_files_that_are_run_by_name_are_there():
    ci = (TESTS.parent / ".ci" / "run").read_text(encoding="utf-8")
    named = re.findall(r"tests/[\w/.]+", ci[ci.index("pure_tests=") :])
    named += [a for d in DETECTORS.values() for a in d.arguments if a.startswith("tests/")]
    assert len(named) > 10
    for name in named:
        assert (TESTS.parent / name).exists(), name
