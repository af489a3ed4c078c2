"""The scripts of docs/distributed.md, under torchrun."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def losses_of(folder: Path, *command: str) -> list[float]:
    """The losses that a script prints under torchrun."""
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", *command],
        cwd=folder, capture_output=True, text=True, timeout=800, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [float(found) for found in re.findall(r"epoch \d: loss ([\d.]+)", done.stdout)]


def test_the_script_of_the_page_about_data_parallel_pipes_trains(tmp_path):
    page = (ROOT / "docs" / "distributed.md").read_text(encoding="utf-8")
    script = re.search(r"```python\n(.*?)```", page, flags=re.S)
    assert script is not None
    (tmp_path / "train.py").write_text(script[1], encoding="utf-8")
    losses = losses_of(tmp_path, "--nproc-per-node", "2", "train.py")
    assert len(losses) == 3  # printed by one process
    assert losses[-1] < losses[0]


def test_the_script_of_the_page_about_stages_trains_on_four_ranks(tmp_path):
    pytest.importorskip("sklearn")
    script = str(ROOT / "docs" / "train_stages.py")
    (loss,) = losses_of(tmp_path, "--nproc-per-node", "4", script, "1")
    assert loss < 1.5  # of ten classes; it begins at 2.3
