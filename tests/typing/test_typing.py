"""What editors and type checkers see: a user's script, and the names of the package."""

from __future__ import annotations

import inspect
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import syncpipe
from syncpipe import Pipe

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(find_spec("mypy") is None, reason="needs mypy")
def test_a_script_of_a_user_type_checks() -> None:
    command = [sys.executable, "-m", "mypy", "--strict", "tests/typing/user.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_dir_has_the_public_names_and_no_others() -> None:
    names = dir(syncpipe)
    assert {*syncpipe.__all__} < {*names}
    assert not [name for name in names if name.startswith("_")]
    for name in names:
        found = getattr(syncpipe, name)
        assert inspect.ismodule(found) == (name not in syncpipe.__all__)
    with pytest.raises(AttributeError, match="module 'syncpipe' has no attribute 'runtimes'"):
        _ = syncpipe.runtimes


def test_what_takes_long_to_import_is_imported_when_it_is_used() -> None:
    code = (
        "import sys, syncpipe; heavy = 'torch.distributed.pipelining'; print(heavy in sys.modules);"
        "syncpipe.distributed.stage; print(heavy in sys.modules)"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


def test_tooltips_have_the_arguments_and_nothing_to_catch_wrong_ones() -> None:
    for function in (Pipe, Pipe.train_batch, Pipe.eval_batch, Pipe.train_stream):
        kinds = {p.kind for p in inspect.signature(function).parameters.values()}
        assert not kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
