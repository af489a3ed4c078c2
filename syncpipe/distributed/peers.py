"""Processes that work together: what each does, who failed, and why.

Nobody waits to tell. Each process writes into the store where they met, under its own key, the last
calls that it began, and in which it takes part. A process that waits for long, or that loses a
connection, reads there what the others do. If that is something else, or one does not take part, it
closes its connections. That wakes the others, which read the same, so all raise with the reason.
"""

from __future__ import annotations

import math
import os
import pickle
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from numbers import Real
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from syncpipe.distributed.private import default_group, default_store, naming

__all__ = ["LostProcess", "Peers", "RemoteError", "checked_number", "given_group"]

_T = TypeVar("_T")
PATIENCE = 5.0  # seconds of a call, after which a thread looks what the others do
_LOOK = 1.0  # seconds between two of its looks
_WAIT = 0.25  # so often a process that waits in Python hears of Ctrl-C
_ANSWER = 8.0  # seconds for others to notice that a connection is lost: longer than PATIENCE
_KEPT = 16  # calls that stay in the store; so far processes can be apart
_NUMBERS: Counter[str] = Counter()  # how many peers have been made over a process group


class RemoteError(RuntimeError):
    """A call failed in another process, with the error that is named here."""


class LostProcess(RuntimeError):
    """A process is gone, or does something else: from here on the others cannot go on with it."""


class Peers:
    """The processes of a group. One thread at a time makes calls.

    ``groups`` are process groups that end with the peers, and are closed when a call fails. By the
    first of them, on gloo, the processes agree.
    """

    def __init__(self, group: Any, what: str, unit: str, timeout: float = math.inf) -> None:
        self._what, self._unit, self._timeout = what, unit, timeout
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._ranks = dist.get_process_group_ranks(group)
        self._backend = dist.get_backend(group)
        name = f"syncpipe/{group.group_name}/{'-'.join(map(str, self._ranks))}"
        _NUMBERS[name] += 1  # alike everywhere: all make the same, in turn
        self._prefix = f"{name}/{_NUMBERS[name]}"
        self._keys = [f"{self._prefix}/{rank}" for rank in range(self.size)]
        self._store = default_store()
        #: The last calls by number; up to which one a process takes part, and why no longer.
        self._row = SimpleNamespace(
            calls={}, last=0, refused=0, until=math.inf, gone="", answers=False
        )
        self._write = partial(_written, self._store, self._keys[self.rank], self._row)
        self._write()
        self._begun, self._stop = math.inf, threading.Event()
        self.groups: list[Any] = []
        self._messages = self.new_group("messages", "gloo")
        own = self.name(self.rank), self._row, self._write
        weakref.finalize(self, _leave, self._stop, os.getpid(), *own)
        weakref.finalize(self, _destroy, self.groups, os.getpid()).atexit = False
        given = weakref.ref(self), self._stop
        self._watch = threading.Thread(target=_watch, args=given, daemon=True, name="peers")

    def new_group(
        self, name: str, backend: str | None = None, ranks: Sequence[int] | None = None
    ) -> Any:
        """Makes a process group of all, or of some, of which others know nothing."""
        world = [self._ranks[rank] for rank in ranks or range(self.size)]
        options: dict[str, Any] = {"use_local_synchronization": True}
        if self._timeout < math.inf:
            options["timeout"] = timedelta(seconds=self._timeout + 5)  # we are to say so first
        with naming(f"{self._prefix}/{name}"):
            self.groups.append(dist.new_group(world, backend=backend or self._backend, **options))
        return self.groups[-1]

    @contextmanager
    def call(self, name: str) -> Iterator[None]:
        """Makes a call, which is the same in all processes. One that fails ends all of them, but
        for one that all refuse before anything is ``sent``."""
        row, self.sent = self._row, False
        if row.gone:
            raise RuntimeError(
                f"this {self._what} has ended: {row.gone}. Start the processes anew, from a "
                "checkpoint"
            )
        row.last += 1
        row.calls[row.last] = name
        row.calls.pop(row.last - _KEPT, None)
        self._write()
        self._begun = time.monotonic()
        if row.last == 1:
            self._watch.start()
        try:
            yield
        except BaseException as error:
            if isinstance(error, Exception) and not self.sent and self._all_refuse():
                raise
            found = self._failed(error)
            raise found from found.__cause__
        finally:
            self._begun = math.inf

    def _all_refuse(self) -> bool:
        self._row.refused = last = self._row.last
        self._write()
        return not self._silent(PATIENCE, lambda row: row.refused >= last)

    def _silent(self, seconds: float, says: Callable[[Any], bool]) -> list[str]:
        """Waits until all have something in their rows, or nobody will; who does not have it."""
        until = time.monotonic() + seconds
        while True:
            rows = self._rows()
            if not rows:
                return ["the process that keeps the store of all"]
            silent = [r for r in range(self.size) if r not in rows or not says(rows[r])]
            if not silent or time.monotonic() > until or self.why():
                return list(map(self.name, silent))
            time.sleep(0.05)

    def _failed(self, error: BaseException) -> BaseException:
        """Ends working together. What to raise: the error, or the reason that another one gave."""
        row, lost = self._row, _is_of_connection(error)
        own = "" if lost else f"{self.name(self.rank)} failed with {_described(error)}"
        row.until, row.gone = -1, row.gone or (self.why() if lost else own)
        self._write()
        self.close()
        if not row.gone:  # it is the one that does not say so
            silent = ", ".join(self._silent(_ANSWER, lambda row: row.until < 0 or row.answers))
            silent = silent or f"a process outside of this {self._what}"
            row.gone = self.why() or (
                f"{silent} does not answer any more, and has probably been killed; "
                f"{self.name(self.rank)} lost its connection: {error}"
            )
            self._write()
        if row.gone == own or not isinstance(error, Exception):
            return error
        kind = RemoteError if " failed with " in row.gone else LostProcess
        return kind(f"{row.gone} (the {self._what} has ended in all processes)")

    def why(self) -> str:
        """Why this call cannot come to its end, as others say; empty if nobody knows."""
        mine, last, rows = dict(self._row.calls), self._row.last, self._rows()
        for rank, row in rows.items():
            for k, theirs in row.calls.items():
                if (ours := mine.get(k, theirs)) != theirs:
                    pair = sorted([(rank, theirs), (self.rank, ours)])
                    said = " and ".join(f"{call} in {self.name(r)}" for r, call in pair)
                    return f"call {k} is {said}"
            if row.gone and row.until < last:
                return str(row.gone)
        if time.monotonic() - self._begun < self._timeout:
            return ""
        late = [self.name(rank) for rank, row in rows.items() if row.last < last]
        return (
            f"{', '.join(late)} did not come to call {last} of a {self._what} within "
            f"{self._timeout:g} s: did its data end earlier? If it only takes longer, give a "
            "larger timeout"
            if late
            else f"call {last} of a {self._what} took longer than timeout={self._timeout:g} s"
        )

    def close(self) -> None:
        """Closes the connections of all groups, so that nobody waits in them any more."""
        for group in self.groups:
            with suppress(Exception):  # it is gone
                _close(group)

    # --- what all do together --------------------------------------------------------------------

    def agree(self, act: Callable[[], tuple[Mapping[str, Any], _T]]) -> list[_T]:
        """What all find who act at the same time, and wait for nobody in that.

        Args:
            act: returns what has to be the same in all processes, by name, and what it found.

        Raises:
            ValueError: something is not the same.
            RuntimeError: another process raised an error, with that; this one raises its own.
        """
        try:
            alike, found = act()
        except BaseException as error:
            self._exchange((_described(error), {}, None))
            raise
        rows = self._exchange(("", alike, found))
        for rank, (refused, theirs, _) in enumerate(rows):
            name = self.name(rank)
            if refused:
                whose = "" if "(" in name else f" of the {self._what}"
                raise RuntimeError(f"{name}{whose} refused, so all do: {refused}")
            for key in {**rows[0][1], **theirs}:
                a, b = (each.get(key, "no such thing") for each in (rows[0][1], theirs))
                if a != b:
                    raise ValueError(
                        f"processes differ in {key}: {self.name(0)} has {a}, {name} has {b}. "
                        "Give all the same"
                    )
        return [found for _, _, found in rows]

    def _exchange(self, message: Any) -> list[Any]:
        self.sent, own = True, pickle.dumps(message)
        sizes = [int(size) for size in self.gather(torch.tensor([len(own)]), self._messages)]
        own = own.ljust(max(sizes))
        rows = self.gather(torch.frombuffer(bytearray(own), dtype=torch.uint8), self._messages)
        return [pickle.loads(bytes(row.tolist())) for row in rows]

    def gather(self, own: Tensor, group: Any) -> list[Tensor]:
        """That of each process, all of one shape."""
        rows = [torch.empty_like(own) for _ in range(self.size)]
        self.wait(dist.all_gather(rows, own, group, async_op=True), own)
        return rows

    def wait(self, work: Any, tensor: Tensor) -> None:
        """Waits for a collective; on an accelerator the current stream does, not the host."""
        while tensor.device.type == "cpu" and not work.is_completed():
            with suppress(RuntimeError):  # the time is over
                work.wait(timedelta(seconds=_WAIT))
        work.wait()

    # --- the store -------------------------------------------------------------------------------

    def name(self, rank: int) -> str:
        """By its number among all processes, and in the group if that is another one."""
        unit, there = self._unit, self._ranks[rank]
        if self._ranks == list(range(self.size)):
            return f"{unit} {rank}"
        few = self._ranks if self.size < 9 else [*self._ranks[:3], "...", self._ranks[-1]]
        all_of = ", ".join(map(str, few))
        return f"{unit} {there} ({unit} {rank} of the {self._what} of {unit}s {all_of})"

    def _rows(self) -> dict[int, Any]:
        """What all have written, this process as well."""
        with suppress(RuntimeError):  # the store is gone with the process that kept it
            return {r: pickle.loads(self._store.get(key)) for r, key in enumerate(self._keys)}
        return {}


def _written(store: Any, key: str, row: Any) -> None:
    with suppress(RuntimeError):
        store.set(key, pickle.dumps(row))


def _leave(
    stop: threading.Event, process: int, name: str, row: Any, write: Callable[[], None]
) -> None:
    """The process ends, or lets go of what it had in common with the others."""
    stop.set()
    if process != os.getpid():
        return
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    why = "" if error is None else f" with {_described(error)}"
    if not row.gone:
        row.until = row.last
        row.gone = f"{name} has ended{why}, after call {row.last}, and the others wait for it"
    write()


def _destroy(groups: list[Any], process: int) -> None:
    for group in groups if process == os.getpid() else []:
        with suppress(Exception):  # all may have been destroyed by the user
            dist.destroy_process_group(group)


def _close(group: Any) -> None:
    backend, size = str(dist.get_backend_config(group)), dist.get_world_size(group)
    for other in range(size) if "cpu:gloo" in backend else ():
        # Gloo closes all when one receive takes too long: from one that has not closed before.
        with suppress(Exception):
            work = dist.irecv(torch.empty(1), None, group, tag=2**20, group_src=other)
            work.wait(timedelta(milliseconds=1))  # type: ignore[union-attr]
    if size > 1 and "nccl" in backend:
        group.abort()


def _watch(found: weakref.ref[Peers], stop: threading.Event) -> None:
    while not stop.wait(_LOOK) and (peers := found()) is not None:
        waits = time.monotonic() - peers._begun > PATIENCE and not peers._row.gone
        if waits and (reason := peers.why()):
            peers._row.gone = reason
            peers.close()
        elif (
            waits
            and not peers._row.answers
            and any(row.until < 0 for row in peers._rows().values())
        ):
            peers._row.answers = True  # it computes, and is no reason for anything
            peers._write()
        del peers


def _is_of_connection(error: BaseException) -> bool:
    """Whether another process is the reason; PyTorch has no type of its own for it.

    Such errors are raised in ``torch.distributed``, or where this file waits.
    """
    code, trace = None, error.__traceback__
    while trace is not None:
        code, trace = trace.tb_frame.f_code, trace.tb_next
    there = code is not None and code.co_filename.startswith(os.path.dirname(dist.__file__))
    words = ("connection", "closed", "timed out", "timeout", "peer", "abort", "nccl")
    return (
        isinstance(error, RuntimeError)
        and (there or code is Peers.wait.__code__)
        and any(word in str(error).lower() for word in words)
    )


def _described(error: BaseException) -> str:
    parts = [f"{type(error).__name__}: {error}".rstrip(": "), *getattr(error, "__notes__", ())]
    return "; ".join(parts)


def checked_number(argument: str, number: Any) -> float:
    if not (isinstance(number, Real) and 0 < float(number) < math.inf):
        raise ValueError(f"{argument}={number!r} must be a number above 0")
    return float(number)


def given_group(group: Any, argument: str) -> dist.ProcessGroup:
    """The process group that was given: one, a mesh of one dimension, or None for that of all."""
    if group is None:
        return default_group()
    if isinstance(group, DeviceMesh):
        return group.get_group()  # refuses one of several dimensions
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"{argument} must be a process group of this process, or a DeviceMesh of one "
            f"dimension, not {type(group).__name__}"
        )
    return group
