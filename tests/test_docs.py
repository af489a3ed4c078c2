"""The README and the pages of docs/: their Python runs, and their links lead somewhere.

The Python blocks of a page follow each other in one session. A block that is not to be run says so
by its language. One that needs a package that is not here, and that nobody needs, is left out.
"""

from __future__ import annotations

import ast
import importlib
import os
import re
import runpy
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NOT_RUN = {"bash", "diff", "text"}
OPTIONAL = {
    "accelerate",
    "lightning",
    "peft",
    "safetensors",
    "torch_geometric",
    "timm",
    "torchmetrics",
    "torchvision",
    "transformers",
}
LINK = re.compile(r"\]\(([^)\s]+)\)")


class Block(NamedTuple):
    """What stands between two fences, and on which line it begins (from 0)."""

    language: str
    line: int
    text: str


def blocks_of(page: Path) -> list[Block]:
    found: list[Block] = []
    language, start, inside = "", 0, False
    lines = page.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines):
        if not line.startswith("```"):
            continue
        if inside:
            assert line == "```", f"{page.name}:{number + 1}: a block begins inside of another one"
            found.append(Block(language, start, "\n".join(lines[start:number])))
        else:
            language, start = line[3:], number + 1
        inside = not inside
    assert not inside, f"{page.name}: the block of line {start} has no end"
    return found


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Files that a page writes are gone afterwards, and so is a process group."""
    monkeypatch.chdir(tmp_path)
    yield
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def missing(text: str) -> bool:
    """Whether code imports an optional package that is not installed."""
    found = re.findall(r"^(?:import|from) (\w+)", text, flags=re.M)
    return any(name in OPTIONAL and find_spec(name) is None for name in found)


@contextmanager
def new_session(name: str) -> Iterator[dict[str, Any]]:
    """Globals for code that is run, which are empty afterwards."""
    session: dict[str, Any] = {"__name__": name}
    try:
        yield session
    finally:
        # torch.compile keeps these globals for longer, with names of its own ("__...") in them.
        for name in [name for name in session if not name.startswith("__")]:
            del session[name]


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_code_of_a_page_runs(page: Path) -> None:
    if page.name == "distributed.md" and torch.__version__ < "2.13":
        pytest.skip("stage needs PyTorch 2.13")
    with new_session(f"page_{page.stem}") as session:
        for language, line, text in blocks_of(page):
            assert language in {"python", *NOT_RUN}, f"{name_of(page)}:{line}: of which language?"
            if language == "python" and not missing(text):
                # As many lines before it as in the page, so that tracebacks show where it stands.
                exec(compile("\n" * line + text, str(page), "exec"), session)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_links_of_a_page_lead_to_a_file_and_a_heading(page: Path) -> None:
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        if link.startswith(("https://", "http://")):
            continue
        path, _, heading = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{name_of(page)} links to {link}"
        if heading:
            assert heading in headings_of(target), f"{name_of(page)} links to {link}"


def headings_of(page: Path) -> set[str]:
    """As anchors: lower case, spaces as hyphens, without punctuation."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    found = re.findall(r"^#+ (.*)$", text, flags=re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in found}


def test_the_reference_is_what_the_docstrings_say() -> None:
    script = ROOT / "docs" / "reference.py"
    text = runpy.run_path(str(script))["page"]()
    page = script.with_suffix(".md").read_text(encoding="utf-8")
    assert page == text, "it is stale: python docs/reference.py"
    for package in ("", "skip", "balance", "planner", "schedules", "timeline", "distributed"):
        module = importlib.import_module(f"syncpipe.{package}".rstrip("."))
        assert all(re.search(rf"^### {name}$", text, flags=re.M) for name in module.__all__)


#: Words of what plugs in, which files that one reads first do without.
EXTENSIONS = re.compile(r"replica|\btie(?=[sd]?\b)|substitut|offload|halves|selective", re.I)
#: Where they are nevertheless: as options of the pipe, as what is placed by them, and as fields
#: that wrappers set. (A schedule is data, and has them all.)
NAMED = {
    "pipe/pipe.py": {"replica", "tie", "offload", "selective"},
    "pipe/layout.py": {"replica", "tie"},
    "stages/pipeline.py": {"replica"},
    "stages/run.py": {"substitut"},
}


def test_what_to_read_is_whole_files_for_an_afternoon() -> None:
    page = (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8")
    table = page[page.index("## What to read") : page.index("Everything else plugs in")]
    paths = re.findall(r"`([\w/]+\.py)`", table)
    assert len(paths) > 15
    lines = 0
    for path in paths:
        text = (ROOT / "syncpipe" / path).read_text(encoding="utf-8")
        lines += text.count("\n")
        words = {word.lower() for word in EXTENSIONS.findall(text)}
        assert words <= NAMED.get(path, set()) or path.startswith("schedules/"), (path, words)
    assert lines <= 4200
    for name, path in re.findall(r"^\| `([A-Z]+)` \| `([\w/]+\.py)`", page, flags=re.M):
        tree = ast.parse((ROOT / "syncpipe" / path).read_text(encoding="utf-8"))
        targets = [node.targets[0] for node in tree.body if isinstance(node, ast.Assign)]
        targets += [node.target for node in tree.body if isinstance(node, ast.AnnAssign)]
        assert name in map(ast.unparse, targets)


def test_pages_are_short() -> None:
    words = {name_of(page): len(page.read_text(encoding="utf-8").split()) for page in PAGES}
    assert words.pop("README.md") <= 1100
    del words["docs/reference.md"], words["docs/glossary.md"]
    assert sum(words.values()) <= 16_000


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    pytest.importorskip("material")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    subprocess.run([*command, "--config-file", "docs/site/mkdocs.yml"], cwd=ROOT, check=True)
    pages = {page.name for page in (ROOT / "docs").glob("*.md")}
    assert {page.removesuffix(".md") for page in pages} <= {x.stem for x in tmp_path.glob("*.html")}
    assert "syncpipe" in (tmp_path / "search" / "search_index.json").read_text(encoding="utf-8")
    text = (tmp_path / "benchmarks.html").read_text(encoding="utf-8")
    assert "../benchmarks/results" not in text  # leads out of the site


GLOO = torch.distributed.is_available() and torch.distributed.is_gloo_available()
needs_gloo = pytest.mark.skipif(not GLOO, reason="needs gloo")


#: torchrun, but what takes long to import is imported once, before it forks the processes.
TORCHRUN = """
import contextlib
with contextlib.suppress(ImportError):
    import syncpipe.distributed, torch.distributed.pipelining, sklearn.datasets
from torch.distributed.run import main
main()
"""


def losses_of(folder: Path, *command: str, nodes: int = 1) -> list[float]:
    """The losses that a script prints under torchrun, on machines that are this one."""
    how, forks = ["--standalone"], ["--start-method", "fork", "--run-path"]
    if nodes > 1:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            endpoint = f"127.0.0.1:{free.getsockname()[1]}"
        how = ["--nnodes", str(nodes), "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint]
        how += ["--rdzv-id", "docs", "--local-addr", "127.0.0.1"]
    running = [
        subprocess.Popen(
            [sys.executable, "-c", TORCHRUN, *how, *forks, *command],
            cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )
        for _ in range(nodes)
    ]  # fmt: skip
    try:
        said = [each.communicate(timeout=800) for each in running]
    finally:
        for each in running:
            each.kill()
    for each, (_, errors) in zip(running, said, strict=True):
        assert each.returncode == 0, errors
    output = "".join(output for output, _ in said)
    return [float(found) for found in re.findall(r"epoch \d: loss ([\d.]+)", output)]


@needs_gloo
def test_the_script_of_the_page_about_data_parallel_pipes_trains(tmp_path):
    page = (ROOT / "docs" / "distributed.md").read_text(encoding="utf-8")
    script = re.search(r"```python\n(.*?)```", page, flags=re.S)
    assert script is not None
    (tmp_path / "train.py").write_text(script[1], encoding="utf-8")
    losses = losses_of(tmp_path, "--nproc-per-node", "2", str(tmp_path / "train.py"))
    assert len(losses) == 3  # printed by one process
    assert losses[-1] < losses[0]


@needs_gloo
@pytest.mark.skipif(torch.__version__ < "2.13", reason="stage needs PyTorch 2.13")
def test_the_script_of_the_page_about_stages_trains_on_two_nodes_of_two_processes(tmp_path):
    pytest.importorskip("sklearn")
    script = str(ROOT / "docs" / "examples" / "train_stages.py")
    (loss,) = losses_of(tmp_path, "--nproc-per-node", "2", script, "--tiny", nodes=2)
    assert loss < 1.5  # of ten classes; it begins at 2.3
