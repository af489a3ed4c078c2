"""Processes that make the same calls: errors, exits and mismatched calls end all with a reason.

Each process writes its state, under its own key, into the store of ``init_process_group``: its last
calls, and up to which call it takes part. It never waits to do so. A process that waits for more
than ``PATIENCE`` seconds, or that loses a connection, reads the states of the others. If another
process makes a different call or has left, it closes its connections. The closed connections wake
the other processes, which read the same states, so that all raise with the same reason.
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
PATIENCE = 5.0  # seconds of a call before the watch thread reads the states of the others
_POLL = 1.0  # seconds between two reads of the watch thread
_WAIT = 0.25  # seconds between two checks for Ctrl-C while waiting for a collective
_RESPONSE = 8.0  # seconds for others to notice a lost connection: longer than PATIENCE
_CALLS = 16  # calls kept in the store, which bounds how far apart processes can be compared
_NUMBERS: Counter[str] = Counter()  # number of Peers made, by process group


class RemoteError(RuntimeError):
    """A call failed in another process; the message quotes the error."""


class LostProcess(RuntimeError):
    """A process has exited, stopped responding, or made a different call."""


class Peers:
    """The processes of a group. One thread at a time makes calls.

    ``groups`` are process groups that end with the peers, and are closed when a call fails. The
    first one, on gloo, is for :meth:`agree`.
    """

    def __init__(self, group: Any, what: str, unit: str, timeout: float = math.inf) -> None:
        self._what, self._unit, self._timeout = what, unit, timeout
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._ranks = dist.get_process_group_ranks(group)
        self._backend = dist.get_backend(group)
        name = f"syncpipe/{group.group_name}/{'-'.join(map(str, self._ranks))}"
        _NUMBERS[name] += 1  # equal in all processes, which make their Peers in the same order
        self._prefix = f"{name}/{_NUMBERS[name]}"
        self._keys = [f"{self._prefix}/{rank}" for rank in range(self.size)]
        self._store = default_store()
        #: The state of this process: its last calls by number; the numbers of the latest, of the
        #: last refused and of the last it takes part in; why it ended; if it outlived a failure.
        self._state = SimpleNamespace(
            calls={}, last=0, refused=0, until=math.inf, gone="", responds=False
        )
        self._write = partial(_write_state, self._store, self._keys[self.rank], self._state)
        self._write()
        self._begun, self._stop = math.inf, threading.Event()
        self.groups: list[Any] = []
        self._messages = self.new_group("messages", "gloo")
        own = self.name(self.rank), self._state, self._write
        weakref.finalize(self, _write_exit, self._stop, os.getpid(), *own)
        weakref.finalize(self, _destroy, self.groups, os.getpid()).atexit = False
        given = weakref.ref(self), self._stop
        self._watch = threading.Thread(target=_watch, args=given, daemon=True, name="peers")

    def new_group(
        self, name: str, backend: str | None = None, ranks: Sequence[int] | None = None
    ) -> Any:
        """Makes a process group of all processes, or of ``ranks``, which alone take part in it."""
        world = [self._ranks[rank] for rank in ranks or range(self.size)]
        options: dict[str, Any] = {"use_local_synchronization": True}
        if self._timeout < math.inf:
            options["timeout"] = timedelta(seconds=self._timeout + 5)  # why() reports it before
        with naming(f"{self._prefix}/{name}"):
            self.groups.append(dist.new_group(world, backend=backend or self._backend, **options))
        return self.groups[-1]

    @contextmanager
    def call(self, name: str) -> Iterator[None]:
        """A call that all processes make. An error ends the peers in all processes, unless all
        refuse the call before anything is ``sent``."""
        row, self.sent = self._state, False
        if row.gone:
            raise RuntimeError(
                f"this {self._what} has ended: {row.gone}. Restart the processes from a checkpoint"
            )
        row.last += 1
        row.calls[row.last] = name
        row.calls.pop(row.last - _CALLS, None)
        self._write()
        self._begun = time.monotonic()
        if row.last == 1:
            self._watch.start()
        try:
            yield
        except BaseException as error:
            if isinstance(error, Exception) and not self.sent and self._all_refuse():
                raise
            found = self._end(error)
            raise found from found.__cause__
        finally:
            self._begun = math.inf

    def _all_refuse(self) -> bool:
        self._state.refused = last = self._state.last
        self._write()
        return not self._await_states(PATIENCE, lambda row: row.refused >= last)

    def _await_states(self, seconds: float, fulfils: Callable[[Any], bool]) -> list[str]:
        """Waits until all states fulfil a condition, and returns the processes that do not."""
        until = time.monotonic() + seconds
        while True:
            rows = self._states()
            if not rows:
                return ["the process that hosts the store"]
            missing = [r for r in range(self.size) if r not in rows or not fulfils(rows[r])]
            if not missing or time.monotonic() > until or self.why():
                return list(map(self.name, missing))
            time.sleep(0.05)

    def _end(self, error: BaseException) -> BaseException:
        """Ends the peers. Returns what to raise: this error, or another process's reason."""
        row, by_connection = self._state, _is_of_connection(error)
        own = "" if by_connection else f"{self.name(self.rank)} failed with {_error_text(error)}"
        row.until, row.gone = -1, row.gone or (self.why() if by_connection else own)
        self._write()
        self.close()
        if not row.gone:  # no process gives a reason: find the one that was killed
            lost = self._await_states(_RESPONSE, lambda row: row.until < 0 or row.responds)
            names = ", ".join(lost) or f"a process outside of this {self._what}"
            row.gone = self.why() or (
                f"{names} no longer responds, and was probably killed; {self.name(self.rank)} "
                f"lost its connection: {error}"
            )
            self._write()
        if row.gone == own or not isinstance(error, Exception):
            return error
        kind = RemoteError if " failed with " in row.gone else LostProcess
        return kind(f"{row.gone} (the {self._what} has ended in all processes)")

    def why(self) -> str:
        """Why this call cannot end, by the states of the others; empty without a reason."""
        mine, last, rows = dict(self._state.calls), self._state.last, self._states()
        for rank, row in rows.items():
            for k, theirs in row.calls.items():
                if (ours := mine.get(k, theirs)) != theirs:
                    pair = sorted([(rank, theirs), (self.rank, ours)])
                    calls = " and ".join(f"{call} in {self.name(r)}" for r, call in pair)
                    return f"call {k} is {calls}"
            if row.gone and row.until < last:
                return str(row.gone)
        if time.monotonic() - self._begun < self._timeout:
            return ""
        late = [self.name(rank) for rank, row in rows.items() if row.last < last]
        return (
            f"{', '.join(late)} did not begin call {last} of a {self._what} within "
            f"{self._timeout:g} s: did its data end earlier? If it is only slow, give a larger "
            "timeout"
            if late
            else f"call {last} of a {self._what} took longer than timeout={self._timeout:g} s"
        )

    def close(self) -> None:
        for group in self.groups:
            with suppress(Exception):  # destroyed already
                _close(group)

    # --- collectives -----------------------------------------------------------------------------

    def agree(self, act: Callable[[], tuple[Mapping[str, Any], _T]]) -> list[_T]:
        """Runs ``act`` in all processes at once, and returns the results of all by rank.

        Args:
            act: returns what has to be equal in all processes, by name, and a result. It must not
                wait for other processes.

        Raises:
            ValueError: processes differ in a value.
            RuntimeError: ``act`` raised in another process. Its own error is raised unchanged.
        """
        try:
            alike, found = act()
        except BaseException as error:
            self._exchange((_error_text(error), {}, None))
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
                        "Give equal ones to all"
                    )
        return [found for _, _, found in rows]

    def _exchange(self, message: Any) -> list[Any]:
        self.sent, own = True, pickle.dumps(message)
        sizes = [int(size) for size in self.gather(torch.tensor([len(own)]), self._messages)]
        own = own.ljust(max(sizes))
        rows = self.gather(torch.frombuffer(bytearray(own), dtype=torch.uint8), self._messages)
        return [pickle.loads(bytes(row.tolist())) for row in rows]

    def gather(self, own: Tensor, group: Any) -> list[Tensor]:
        """The tensors of all processes by rank; all have one shape."""
        rows = [torch.empty_like(own) for _ in range(self.size)]
        self.wait(dist.all_gather(rows, own, group, async_op=True), own)
        return rows

    def wait(self, work: Any, tensor: Tensor) -> None:
        """Waits for a collective. On an accelerator the current stream waits, not the host."""
        while tensor.device.type == "cpu" and not work.is_completed():
            with suppress(RuntimeError):  # timed out
                work.wait(timedelta(seconds=_WAIT))
        work.wait()

    # --- the store -------------------------------------------------------------------------------

    def name(self, rank: int) -> str:
        """Its global rank in words, with its rank in the group if the two differ."""
        unit, there = self._unit, self._ranks[rank]
        if self._ranks == list(range(self.size)):
            return f"{unit} {rank}"
        few = self._ranks if self.size < 9 else [*self._ranks[:3], "...", self._ranks[-1]]
        all_of = ", ".join(map(str, few))
        return f"{unit} {there} ({unit} {rank} of the {self._what} of {unit}s {all_of})"

    def _states(self) -> dict[int, Any]:
        """The states of all processes, this one included; empty if the store is gone."""
        with suppress(RuntimeError):  # the store ends with the process that hosts it
            return {r: pickle.loads(self._store.get(key)) for r, key in enumerate(self._keys)}
        return {}


def _write_state(store: Any, key: str, row: Any) -> None:
    with suppress(RuntimeError):
        store.set(key, pickle.dumps(row))


def _write_exit(
    stop: threading.Event, process: int, name: str, row: Any, write: Callable[[], None]
) -> None:
    """Writes that this process has ended, or has freed its peers."""
    stop.set()
    if process != os.getpid():
        return
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    why = "" if error is None else f" with {_error_text(error)}"
    if not row.gone:
        row.until = row.last
        row.gone = f"{name} has ended{why}, after call {row.last}, and the others wait for it"
    write()


def _destroy(groups: list[Any], process: int) -> None:
    for group in groups if process == os.getpid() else []:
        with suppress(Exception):  # the user may have destroyed all groups
            dist.destroy_process_group(group)


def _close(group: Any) -> None:
    backend, size = str(dist.get_backend_config(group)), dist.get_world_size(group)
    for other in range(size) if "cpu:gloo" in backend else ():
        # Gloo closes every connection of a group when one receive times out. This one does at once.
        with suppress(Exception):
            work = dist.irecv(torch.empty(1), None, group, tag=2**20, group_src=other)
            work.wait(timedelta(milliseconds=1))  # type: ignore[union-attr]
    if size > 1 and "nccl" in backend:
        group.abort()


def _watch(found: weakref.ref[Peers], stop: threading.Event) -> None:
    while not stop.wait(_POLL) and (peers := found()) is not None:
        waits = time.monotonic() - peers._begun > PATIENCE and not peers._state.gone
        if waits and (reason := peers.why()):
            peers._state.gone = reason
            peers.close()
        elif (
            waits
            and not peers._state.responds
            and any(row.until < 0 for row in peers._states().values())
        ):
            peers._state.responds = True  # this process is alive, and not the cause
            peers._write()
        del peers


def _is_of_connection(error: BaseException) -> bool:
    """Whether a lost connection is the cause. PyTorch has no exception type for it.

    Such errors are raised in ``torch.distributed`` or in :meth:`Peers.wait`.
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


def _error_text(error: BaseException) -> str:
    parts = [f"{type(error).__name__}: {error}".rstrip(": "), *getattr(error, "__notes__", ())]
    return "; ".join(parts)


def checked_number(argument: str, number: Any) -> float:
    if not (isinstance(number, Real) and 0 < float(number) < math.inf):
        raise ValueError(f"{argument}={number!r} must be a number above 0")
    return float(number)


def given_group(group: Any, argument: str) -> dist.ProcessGroup:
    """The process group of an argument: a group, a mesh of one dimension, or None for all."""
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
