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


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A copy of what is built."""
    pytest.importorskip("setuptools.command.bdist_wheel")  # of setuptools 70.1 or later
    copy = tmp_path / "source"
    shutil.copytree(ROOT / "syncpipe", copy / "syncpipe")
    for name in (
        "setup.py",
        "pyproject.toml",
        "README.md",
        "CHANGELOG.md",
        "LICENSE",
        "MANIFEST.in",
    ):
        shutil.copy(ROOT / name, copy)
    return copy


def wheel_of(source: Path, folder: Path) -> Path:
    command = f"pip wheel --quiet --no-deps --no-build-isolation --no-index --wheel-dir {folder} ."
    subprocess.run([sys.executable, "-m", *command.split()], cwd=source, check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def test_a_wheel_has_the_package_its_types_and_its_page(source: Path, tmp_path: Path) -> None:
    wheel = wheel_of(source, tmp_path)
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
    links = re.findall(r"\]\(([^)]+)\)", metadata)
    assert len(links) > 5
    assert not [link for link in links if not link.startswith(("https://", "#"))]


def test_a_second_wheel_from_one_folder_has_no_modules_of_the_first(
    source: Path, tmp_path: Path
) -> None:
    (source / "syncpipe" / "gone.py").write_text("")
    for folder in (tmp_path / "first", tmp_path / "second"):
        with zipfile.ZipFile(wheel_of(source, folder)) as opened:
            assert ("syncpipe/gone.py" in opened.namelist()) == (folder.name == "first")
        (source / "syncpipe" / "gone.py").unlink(missing_ok=True)


def test_a_source_distribution_can_be_built_from(source: Path, tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "setup.py", "--quiet", "sdist", "--dist-dir", str(tmp_path)],
        cwd=source, check=True,
    )  # fmt: skip
    (archive,) = tmp_path.glob("*.tar.gz")
    shutil.unpack_archive(archive, tmp_path / "unpacked", filter="data")
    (folder,) = (tmp_path / "unpacked").iterdir()
    assert {"CHANGELOG.md", "LICENSE", "README.md", "setup.py"} <= {
        x.name for x in folder.iterdir()
    }
    with (
        zipfile.ZipFile(wheel_of(source, tmp_path / "clone")) as direct,
        zipfile.ZipFile(wheel_of(folder, tmp_path / "archive")) as unpacked,
    ):
        assert set(direct.namelist()) == set(unpacked.namelist())


def test_the_packages_are_listed_before_they_are_imported() -> None:
    code = "import syncpipe, sys; assert 'checkpoints' in dir(syncpipe); syncpipe.checkpoints.save"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
