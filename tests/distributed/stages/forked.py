"""Ranks for tests: processes that are forked from one that has imported everything already.

``python -m tests.distributed.stages.forked MODULE FUNCTION RANKS FOLDER`` calls ``FUNCTION(rank,
folder)`` in each rank, within a process group of gloo, and leaves what it returns in the folder.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

SECONDS = 180


def results_of(
    function: Callable[[int, Path], Any], ranks: int, folder: Path, *, killed: bool = False
) -> list[Any]:
    """What a function at the top level of a module returns on each rank.

    Args:
        function: is called in each.
        ranks: how many.
        folder: where they meet.
        killed: whether the others go on when one is killed, which has left its result before.
    """
    where = [function.__module__, function.__name__, str(ranks), str(folder), str(int(killed))]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", __name__, *where],
        env=environment, timeout=SECONDS, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-6000:]
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(ranks)]


def main(module: str, name: str, ranks: int, folder: Path, killed: bool) -> int:
    torch.set_num_threads(1)
    function = getattr(importlib.import_module(module), name)
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            _live(function, rank, ranks, folder)
        children.append(child)
    failed = 0
    while children:  # as torchrun does, it ends all when one has failed
        child, status = os.wait()
        children.remove(child)
        if killed and os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
            continue
        if status and not failed:
            failed = 1
            for other in children:
                os.kill(other, signal.SIGTERM)
    return failed


def _live(function: Callable[[int, Path], Any], rank: int, ranks: int, folder: Path) -> None:
    code = 1
    faulthandler.dump_traceback_later(SECONDS - 60, exit=True)
    try:
        meeting = f"file://{folder}/meet"
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks)
        torch.save(function(rank, folder), folder / f"{rank}.pt")
        dist.destroy_process_group()
        code = 0
    except BaseException:
        print(f"rank {rank}:", file=sys.stderr)
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    sys.exit(
        main(sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]), sys.argv[5] == "1")
    )
