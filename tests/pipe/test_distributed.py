"""``DistributedDataParallel(pipe)`` on two gloo processes: the gradients of all ranks, averaged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
from torch import distributed

from tests.support.running import MODES

pytestmark = pytest.mark.skipif(
    not (distributed.is_available() and distributed.is_gloo_available()), reason="needs gloo"
)
KINDS = ["plain", "no_sync", "find_unused_parameters", "static_graph", "changing chunks"]
CASES = list(product(KINDS, MODES))


@pytest.fixture(scope="module")
def differences(tmp_path_factory):
    """For each rank and case how far the pipe is from the plain loop; one start for all cases."""
    folder = tmp_path_factory.mktemp("ddp")
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.support.ddp", str(rank)),
                *(f"file://{folder}/meet", f"{folder}/{rank}.json", json.dumps(CASES)),
            ],
            cwd=Path(__file__).parents[2],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            _, errors = rank.communicate(timeout=120)
            assert rank.returncode == 0, errors
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", MODES)
def test_training_with_ddp_is_training_with_averaged_gradients(differences, kind, mode):
    where = CASES.index((kind, mode))
    for rank in range(2):
        assert differences[rank][where] < 1e-6
