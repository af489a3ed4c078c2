"""Processes that run functions of the tests, all at the same time.

``python -m tests.distributed.processes`` imports PyTorch once. For each line "SIZE FOLDER" it forks
a process, and that forks SIZE others, which make a process group of gloo. Each of these reads which
function to run, leaves in the folder what it returned, or how it failed, and says so.
"""

from __future__ import annotations

import atexit
import faulthandler
import functools
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

#: What their functions import, each of which takes a second.
IMPORTED = (
    "sklearn.datasets", "syncpipe.distributed", "torch.distributed.fsdp",
    "torch.distributed.pipelining", "torch.distributed.tensor.parallel",
)  # fmt: skip
SECONDS = 600  # for one function: nothing but a hang takes so long on a busy machine


class Ranks:
    """Processes of one group, which meet in a folder."""

    def __init__(self, size: int, folder: Path) -> None:
        self._folder, self._size, self._calls = folder, size, 0
        self._there = set(range(size))
        for name in ("calls", "answers"):
            os.mkfifo(folder / name)
        server().stdin.write(f"{size} {folder}\n")
        server().stdin.flush()
        self.calls = (folder / "calls").open("w")
        self.answers = (folder / "answers").open()

    def run(self, function: Callable[..., Any], *args: Any, gone: Sequence[int] = ()) -> list[Any]:
        """What a function of a module returns in each process, or None of those that are gone."""
        self._calls += 1
        call = [self._calls, function.__module__, function.__name__, *args]
        print(json.dumps(call), file=self.calls, flush=True)
        waiting, results = set(self._there), [None] * self._size
        while waiting:
            rank, what = self.answers.readline().split()
            waiting.discard(int(rank))
            if what == "gone":
                self._there.discard(int(rank))
        assert self._there == {*range(self._size)} - {*gone}, "processes that ended, or took long"
        for rank in self._there:
            answer = torch.load(self._folder / f"{self._calls}-{rank}.pt", weights_only=False)
            assert "error" not in answer, f"process {rank}:\n{answer['error']}"
            results[rank] = answer["result"]
        return results


@contextmanager
def ranks(size: int, folder: Path) -> Iterator[Ranks]:
    """Some processes, for as long as the block lasts."""
    found = Ranks(size, folder)
    try:
        yield found
    finally:
        found.calls.close()  # which ends all
        found.answers.read()
        found.answers.close()


@functools.cache
def server() -> subprocess.Popen[str]:
    """The process from which all are forked; it ends with this one."""
    started = subprocess.Popen(
        [sys.executable, "-m", __name__],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        text=True,
    )
    atexit.register(started.communicate)
    return started


def told(call: Callable[[], Any]) -> str:
    """The exception that a call raises, in words, with its notes and its cause."""
    try:
        call()
    except BaseException as error:
        cause = [] if error.__cause__ is None else [f"from {error.__cause__!r}"]
        notes = getattr(error, "__notes__", ())
        return " ".join([f"{type(error).__name__}: {error}", *notes, *cause])
    return "nothing"


def main() -> None:
    for module in IMPORTED:
        with suppress(ImportError):
            importlib.import_module(module)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        size, folder = line.rstrip("\n").split(" ", 1)
        if not os.fork():
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _lead(int(size), folder)
            os._exit(0)


def _lead(size: int, folder: str) -> None:
    os.dup2(os.open(f"{folder}/calls", os.O_RDONLY), 0)
    os.dup2(os.open(f"{folder}/answers", os.O_WRONLY), 1)
    children, pipes = {}, []
    for rank in range(size):
        readable, writable = os.pipe()
        child = os.fork()
        if not child:
            _live(rank, size, folder, readable)
            os._exit(0)  # at once: gloo's threads may still let go of tensors
        os.close(readable)
        children[child] = rank
        pipes.append(writable)

    def wait() -> None:
        for _ in range(size):
            os.write(1, f"{children[os.wait()[0]]} gone\n".encode())

    threading.Thread(target=wait, daemon=True).start()
    for line in os.fdopen(os.dup(0)):
        for writable in pipes:
            with suppress(BrokenPipeError):
                os.write(writable, line.encode())
    for child in children:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def _live(rank: int, size: int, folder: str, readable: int) -> None:
    torch.set_num_threads(1)  # else threads of autograd do, at once, of which one may fail
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore it in the background
    answers = os.dup(1)
    os.dup2(2, 1)
    meeting = f"file://{folder}/meet"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size)
    for line in os.fdopen(readable):
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        call, module, function, *args = json.loads(line)
        try:
            torch.manual_seed(0)
            answer = {"result": getattr(importlib.import_module(module), function)(*args)}
        except SystemExit as error:
            if isinstance(error.__cause__, Exception):  # it ends as by an error that nobody catches
                raise error.__cause__ from None
            raise
        except BaseException:
            answer = {"error": traceback.format_exc()}
        torch.save(answer, f"{folder}/{call}-{rank}.pt")
        os.write(answers, f"{rank} done\n".encode())
        faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
