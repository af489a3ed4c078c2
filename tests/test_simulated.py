"""Runs the tests on simulated accelerators, each file in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import simulated

FOLDER = Path(simulated.__file__).parent
FILES = sorted(path.name for path in FOLDER.glob("test_*.py"))


@pytest.mark.timeout(900)  # the first one builds the devices
@pytest.mark.parametrize("file", FILES)
def test_on_simulated_devices(file):
    reason = simulated.unavailable()
    if reason is not None:
        pytest.skip(reason)
    command = [sys.executable, "-m", "pytest", str(FOLDER / file), "-q", "-p", "no:cacheprovider"]
    run = subprocess.run(command, cwd=FOLDER.parents[1], capture_output=True, text=True)
    print(run.stdout, run.stderr)
    assert run.returncode == 0, f"{file} failed; by hand: pytest {FOLDER / file}"
    assert " passed" in run.stdout


def test_this_process_has_none():
    assert not simulated.loaded()
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is None or accelerator.type != "sim"
