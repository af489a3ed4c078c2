"""Ranks for tests: processes that are forked from one that has imported everything already.

``python -m tests.distributed.forked MODULE FUNCTION RANKS FOLDER`` calls ``FUNCTION(rank)`` in each
rank, within a process group of gloo, and leaves what it returns in the folder.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

SECONDS = 120


def results_of(function: Callable[[int], Any], ranks: int, folder: Path) -> list[Any]:
    """What a function at the top level of a module returns on each rank."""
    where = [function.__module__, function.__name__, str(ranks), str(folder)]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", __name__, *where],
        env=environment, timeout=SECONDS, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-6000:]
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(ranks)]


def main(module: str, name: str, ranks: int, folder: Path) -> int:
    torch.set_num_threads(1)
    function = getattr(importlib.import_module(module), name)
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            _live(function, rank, ranks, folder)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    return int(any(codes))


def _live(function: Callable[[int], Any], rank: int, ranks: int, folder: Path) -> None:
    code = 1
    try:
        meeting = f"file://{folder}/meet"
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks)
        torch.save(function(rank), folder / f"{rank}.pt")
        dist.destroy_process_group()
        code = 0
    except BaseException:
        print(f"rank {rank}:", file=sys.stderr)
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])))
