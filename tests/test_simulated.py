"""Runs the tests marked ``gpu`` on simulated accelerators, in processes of their own."""

from __future__ import annotations

import faulthandler
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import simulated

TESTS = Path(__file__).parent
FILES = [
    *sorted(path for path in TESTS.rglob("test_*.py") if "pytest.mark.gpu" in path.read_text()),
    *sorted(TESTS.glob("simulated/test_*.py")),
]
FILES = [path for path in dict.fromkeys(FILES) if path != Path(__file__)]
#: A process takes as long to start as some of them to run.
PROCESSES = 2


@pytest.mark.simulated
@pytest.mark.timeout(3600)  # tests in there have limits of their own
@pytest.mark.parametrize("k", range(PROCESSES))
def test_on_simulated_devices(k):
    reason = simulated.unavailable()
    if reason is not None:
        pytest.skip(reason)
    faulthandler.cancel_dump_traceback_later()  # the process has limits of its own
    names = [str(path.relative_to(TESTS.parent)) for path in FILES[k::PROCESSES]]
    command = [sys.executable, "-m", "pytest", *names, "-m", "gpu", "-n0", "-q", "--durations=5"]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider"],
        cwd=TESTS.parent, env={**os.environ, "SYNCPIPE_SIMULATED": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    print(done.stdout, done.stderr)
    assert done.returncode == 0, f"it failed; by hand: SYNCPIPE_SIMULATED=1 pytest -n0 {names}"
    assert " passed" in done.stdout


@pytest.mark.skipif(simulated.loaded(), reason="this is such a process")
def test_this_process_has_none():
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is None or accelerator.type != "sim"
