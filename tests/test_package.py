"""What people install: the wheel has all that it should, and nothing else."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import syncpipe

ROOT = Path(__file__).parents[1]


def test_a_wheel_has_the_package_its_types_and_its_page(tmp_path: Path) -> None:
    pytest.importorskip("setuptools.command.bdist_wheel")  # of setuptools 70.1 or later
    source = tmp_path / "source"
    shutil.copytree(ROOT / "syncpipe", source / "syncpipe")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, source)
    command = "pip wheel --quiet --no-deps --no-build-isolation --no-index --wheel-dir . ./source"
    subprocess.run([sys.executable, "-m", *command.split()], cwd=tmp_path, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name == f"syncpipe-{syncpipe.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as opened:
        names = set(opened.namelist())
        info = f"syncpipe-{syncpipe.__version__}.dist-info"
        metadata = opened.read(f"{info}/METADATA").decode()
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "syncpipe").rglob("*.py")}
    assert modules | {"syncpipe/py.typed", "syncpipe/planner/page.html"} <= names
    assert not [name for name in names if not name.startswith(("syncpipe/", info))]
    assert re.findall(r"^Requires-Dist: (\S+)$", metadata, flags=re.M) == ["torch>=2.11"]
    assert "License-File: LICENSE" in metadata
