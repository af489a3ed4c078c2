"""Processes that hold copies of one pipe: what they tell each other on the host, in bounded time.

Two process groups of its own: ``data`` for gradients, on the backend of the group that was given,
and one on gloo for a few numbers in each call, so that nobody waits for a device to learn how the
others are. Nobody else starts collectives in them, so what goes on elsewhere (a barrier, another
model) cannot be mistaken for an answer. Whoever waits looks now and then into the store of the
process group, where a process that ends leaves a note why.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

__all__ = ["LostProcess", "Processes", "RemoteError"]

_LOOK_SECONDS = 0.5  # whoever waits looks that often whether somebody has left
_NOTE_SECONDS = 2.0  # a connection may be lost before its process has left its note


class RemoteError(RuntimeError):
    """A call failed in another process, which has raised the error that is named here."""


class LostProcess(RuntimeError):
    """A process is gone, or does something else: from here on the others cannot go on with it."""


class Processes:
    """The processes of a group. Everything but ``__init__`` is for one thread at a time.

    Args:
        group: a process group; None for all processes.
        timeout: seconds to wait for another process.

    Attributes:
        rank: the number of this one in the group.
        size: how many there are.
        data: the group for gradients.
        ended: how many calls came to their end here, well or not.
    """

    def __init__(self, group: dist.ProcessGroup | None, timeout: float) -> None:
        group = dist.group.WORLD if group is None else group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.ended = 0
        self._timeout = timeout
        self._process = os.getpid()
        ranks = dist.get_process_group_ranks(group)
        backend = dist.get_backend_config(group)
        options: dict[str, Any] = {
            "timeout": timedelta(seconds=timeout + 5),  # so that we are the ones to say so
            # Processes that are not in the group know nothing of this.
            "use_local_synchronization": self.size < dist.get_world_size(),
        }
        self.data = dist.new_group(ranks, backend=backend, **options)
        self._control = dist.new_group(ranks, backend="gloo", **options)
        self._gloo = {
            kind
            for kind, name in distributed_c10d.BackendConfig(
                distributed_c10d.Backend(backend)
            ).device_backend_map.items()
            if name == "gloo"
        }
        self._store = distributed_c10d.PrefixStore(
            f"syncpipe/{self._control.group_name}", distributed_c10d._get_default_store()
        )
        atexit.register(self._end)

    @property
    def inherited(self) -> bool:
        """Whether this is a fork of the process that is in the group."""
        return self._process != os.getpid()

    def exchange(self, numbers: Sequence[float]) -> list[list[float]]:
        """Tells everybody some numbers, and returns those of everybody.

        Raises:
            LostProcess: not everybody was there.
        """
        own = torch.tensor(numbers, dtype=torch.float64)
        rows = [torch.empty_like(own) for _ in range(self.size)]
        self.wait(self._started(dist.all_gather, rows, own, group=self._control), own)
        return [row.tolist() for row in rows]

    def objects(self, own: Any) -> list[Any]:
        """The same with any objects that can be pickled; for rare occasions."""
        found: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(found, own, group=self._control)
        except RuntimeError as error:
            raise self._lost(str(error)) from error
        return found

    def all_reduce(self, tensor: Tensor) -> Any:
        """Starts to add up a tensor over all processes, in place; returns what to wait for."""
        return self._started(dist.all_reduce, tensor, group=self.data)

    def broadcast(self, tensor: Tensor) -> Any:
        """Starts to overwrite a tensor by that of process 0; returns what to wait for."""
        return self._started(dist.broadcast, tensor, group=self.data, group_src=0)

    def _started(self, collective: Callable[..., Any], *args: Any, **options: Any) -> Any:
        try:
            return collective(*args, **options, async_op=True)
        except RuntimeError as error:
            raise self._lost(str(error)) from error

    def wait(self, work: Any, tensor: Tensor) -> None:
        """Waits for a collective; on an accelerator the current stream does, not the host.

        Raises:
            LostProcess: it failed, or it takes too long.
        """
        if tensor.device.type not in self._gloo:
            work.wait()
            return
        begun, note = time.monotonic(), ""
        while not _completed(work):
            if note:  # who left it may have done his part right before that
                raise LostProcess(note)
            note = self._look(time.monotonic() - begun)
        try:
            work.wait()
        except RuntimeError as error:
            raise self._lost(str(error)) from error

    def _look(self, waited: float) -> str:
        """What somebody left behind, if anybody has left.

        Raises:
            LostProcess: it takes too long.
        """
        notes = self._notes()
        if notes:
            return notes[0]
        if waited > self._timeout:
            here = {str(self.rank), *self._waiting()}
            missing = [str(rank) for rank in range(self.size) if str(rank) not in here]
            raise self._left(
                f"process {', '.join(missing) or '?'} did not come to call {self.ended + 1} of a "
                f"data-parallel pipe within {self._timeout:g} s, in which process {self.rank} "
                "waited for it. All processes make the same calls: did its data end earlier? If "
                "it only takes longer, give data_parallel a larger timeout"
            )
        self._set(f"waits/{self.rank}", str(self.ended))
        return ""

    def _lost(self, text: str) -> LostProcess:
        """What to raise when a collective failed."""
        until = time.monotonic() + _NOTE_SECONDS
        while not (notes := self._notes()) and time.monotonic() < until:
            time.sleep(0.05)
        if notes:
            return LostProcess(notes[0])
        return self._left(f"process {self.rank} lost the connection to another process: {text}")

    def _left(self, text: str) -> LostProcess:
        self._set(f"gone/{self.rank}", json.dumps([self.ended, text]))
        return LostProcess(text)

    def _notes(self) -> list[str]:
        """What those left behind who will not take part in this call."""
        found = []
        for rank in range(self.size):
            note = None if rank == self.rank else self._get(f"gone/{rank}")
            if note is not None:
                ended, text = json.loads(note)
                if ended <= self.ended:
                    found.append(text)
        return found

    def _waiting(self) -> list[str]:
        """Those that wait for this very call, like us."""
        ranks = map(str, range(self.size))
        return [rank for rank in ranks if self._get(f"waits/{rank}") == str(self.ended)]

    def _get(self, key: str) -> str | None:
        try:
            return self._store.get(key).decode() if self._store.check([key]) else None
        except RuntimeError:  # it is gone with the process that kept it, as its connections are
            return None

    def _set(self, key: str, value: str) -> None:
        try:
            self._store.set(key, value)
        except RuntimeError:
            return

    def leave(self, error: BaseException | None) -> LostProcess:
        """Leaves a note that this process takes part in nothing any more; returns what it says."""
        reason = "" if error is None else f" with {described(error)}"
        return self._left(
            f"process {self.rank} has ended{reason}, after {self.ended} calls of a data-parallel "
            "pipe, in which the others wait for it"
        )

    def _end(self) -> None:
        if not self.inherited:
            self.leave(getattr(sys, "last_exc", None) or getattr(sys, "last_value", None))


def _completed(work: Any) -> bool:
    """Waits for a while; whether a collective has come to its end, well or not."""
    with suppress(RuntimeError):  # the time is over
        work.wait(timedelta(seconds=_LOOK_SECONDS))
    return bool(work.is_completed())


def described(error: BaseException) -> str:
    """An exception in one line, with its notes."""
    parts = [f"{type(error).__name__}: {error}".rstrip(": "), *getattr(error, "__notes__", ())]
    return "; ".join(parts)
