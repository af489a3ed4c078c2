"""The script of docs/distributed.md, under torchrun."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_script_of_the_page_runs_under_torchrun(tmp_path):
    page = (ROOT / "docs" / "distributed.md").read_text(encoding="utf-8")
    script = re.search(r"```python\n(.*?)```", page, flags=re.S)
    (tmp_path / "train.py").write_text(script[1], encoding="utf-8")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", "train.py"),
        ],
        cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    losses = [float(found) for found in re.findall(r"epoch \d: loss ([\d.]+)", done.stdout)]
    assert len(losses) == 3
    assert losses[-1] < losses[0]
