"""Processes that run functions of the tests, all at the same time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

SECONDS = 120  # more than a child allows itself


class Ranks:
    """Processes of one group; they import PyTorch once for many tests.

    Args:
        size: how many.
        folder: where they meet.
    """

    def __init__(self, size: int, folder: Path) -> None:
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        self.processes = [
            subprocess.Popen(
                [
                    *(sys.executable, "-m", "tests.distributed.child"),
                    *(str(rank), str(size), f"file://{folder}/meet"),
                ],
                cwd=Path(__file__).parents[2],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(size)
        ]
        self._answers: list[SimpleQueue[str]] = [SimpleQueue() for _ in range(size)]
        for process, answers in zip(self.processes, self._answers, strict=True):
            threading.Thread(target=_read, args=(process, answers), daemon=True).start()

    def run(self, name: str, *args: Any) -> list[Any]:
        """What ``module:function`` returns in each process, or None of one that is gone.

        Raises:
            AssertionError: it failed in any.
        """
        self.start(name, *args)
        return self.results()

    def start(self, name: str, *args: Any) -> None:
        """Lets all begin with a function."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps([name, *args]) + "\n")
            process.stdin.flush()

    def results(self) -> list[Any]:
        """Waits for what was started."""
        found = []
        for rank, answers in enumerate(self._answers):
            try:
                found.append(json.loads(answers.get(timeout=SECONDS) or "{}"))
            except Empty:
                raise AssertionError(f"process {rank} does not answer") from None
        for rank, answer in enumerate(found):
            assert "error" not in answer, f"process {rank}:\n{answer['error']}"
        return [answer.get("result") for answer in found]

    def end(self) -> None:
        """Ends all that still run."""
        for process in self.processes:
            process.kill()
            process.communicate()


def _read(process: Any, answers: SimpleQueue[str]) -> None:
    for line in process.stdout:
        answers.put(line)
    answers.put("")


@contextmanager
def ranks(size: int, folder: Path) -> Any:
    """Some processes, for as long as the block lasts."""
    found = Ranks(size, folder)
    try:
        yield found
    finally:
        found.end()
