"""The script of docs/distributed-stages.md, under torchrun."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def test_the_script_of_the_page_trains_on_four_ranks(tmp_path):
    pytest.importorskip("sklearn")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "4", str(ROOT / "docs" / "train_stages.py"), "1"),
        ],
        cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (loss,) = re.findall(r"epoch \d: loss ([\d.]+)", done.stdout)  # printed on one rank
    assert float(loss) < 1.5  # of ten classes; it begins at 2.3
