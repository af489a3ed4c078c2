"""docs/huggingface.ipynb: it runs from top to bottom, in a kernel of its own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.test_docs import LINK, ROOT

nbformat: Any = pytest.importorskip("nbformat")
nbclient: Any = pytest.importorskip("nbclient")
for package in ("ipykernel", "transformers", "peft", "matplotlib", "safetensors"):
    pytest.importorskip(package)

NOTEBOOK = ROOT / "docs" / "huggingface.ipynb"
CHECKS = """
assert (base.lm_head.weight is base.model.embed_tokens.weight) == {tied}
assert losses[-1] < losses[0] - 0.1
names = list(get_peft_model_state_dict(model))
assert names and all("lora_" in name for name in names)
"""


def cells(kind: str) -> list[Any]:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    return [cell for cell in notebook.cells if cell.cell_type == kind]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "not tied"])
def test_it_runs(tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.getenv("PYTHONPATH", "")]))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    for cell in notebook.cells:
        cell.source = cell.source.replace("embeddings=True", f"embeddings={tied}")
    notebook.cells.append(nbformat.v4.new_code_cell(CHECKS.format(tied=tied)))
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=500, resources=resources).execute()
    shown = [
        output.data
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if output.output_type == "execute_result"
    ]
    assert sum("image/svg+xml" in data for data in shown) == 2
    assert {path.name for path in (tmp_path / "lora-adapters").glob("*.safetensors")} == {
        "adapter_model.safetensors"
    }


def test_it_is_kept_without_outputs() -> None:
    for cell in cells("code"):
        assert cell.outputs == []
        assert cell.execution_count is None


def test_its_links_lead_to_a_file() -> None:
    for cell in cells("markdown"):
        for link in LINK.findall(cell.source):
            assert (NOTEBOOK.parent / link).exists(), link
