"""Processes that work together: what each does, who failed, and why.

Nobody waits to tell. Each process writes into the store where they met, under its own key, the last
calls that it began and how they ended. A process that waits for long, or that loses a connection,
reads there what the others do. If that is something else, or a process has failed, refused its
arguments or ended, it closes its connections. That wakes the others, which read the same, so all
raise with the reason.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import sys
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

__all__ = ["LostProcess", "Peers", "RemoteError", "process_group"]

_T = TypeVar("_T")
PATIENCE = 5.0  # seconds of a call, after which the thread looks what the others do
_LOOK = 1.0  # seconds between two of its looks
_WAIT = 0.25  # so often a process that waits in Python looks, and hears of Ctrl-C
_ANSWER = 3.0  # seconds for others to notice that a connection is lost
_KEPT = 16  # calls that stay in the store; so far processes can be apart


class RemoteError(RuntimeError):
    """A call failed in another process, with the error that is named here."""


class LostProcess(RuntimeError):
    """A process is gone, or does something else: from here on the others cannot go on with it."""


class Peers:
    """The processes of a group. One thread at a time makes calls.

    Args:
        group: their process group.
        what: what they have in common, for messages: "pipeline", say.
        unit: what each of them is called there.
        timeout: seconds of a call after which a process does not wait for others any more.

    Attributes:
        rank: of this process in the group.
        ranks: of all of them, in the group of all processes.
        by_host: the group sends from the CPU's memory.
    """

    def __init__(
        self, group: Any, what: str, unit: str = "rank", timeout: float = math.inf
    ) -> None:
        self.group, self._what, self._unit, self._timeout = group, what, unit, timeout
        self.ranks = dist.get_process_group_ranks(group)
        self.rank, self.size = dist.get_rank(group), len(self.ranks)
        self.by_host = "cpu:" in str(dist.get_backend_config(group))
        self._ended = ""  # why no further call can be made
        self._calls = 0
        name = f"syncpipe/{group.group_name}/{'-'.join(map(str, self.ranks))}"
        _NUMBERS[name] += 1  # alike everywhere: all make the same, in turn
        self._key = f"{name}/{_NUMBERS[name]}"
        self._store = dist.distributed_c10d._get_default_store()
        self._row: dict[str, Any] = {"calls": deque(maxlen=_KEPT), "gone": "", "lost": False}
        self._begun = math.inf
        self._stop = threading.Event()
        self._watched = False
        key, name = self._path(self.rank), self._name(self.rank)
        weakref.finalize(self, _leave, self._stop, self._store, key, name, os.getpid(), self._row)

    # --- calls -----------------------------------------------------------------------------------

    def begin(self, call: str, *, watched: bool = False) -> None:
        """Announces a call, which is the same in all processes.

        Args:
            call: what it is.
            watched: whether a thread looks what the others do, where this one waits in PyTorch.

        Raises:
            RuntimeError: these processes have ended working together.
        """
        refused = self._row["calls"] and self._row["calls"][-1][1].startswith("refused")
        if refused and not _polled(PATIENCE, self._all_refused):
            self._ended = self._row["gone"] = self.difference()
            self._write()
        if self._ended:
            raise RuntimeError(
                f"this {self._what} has ended: {self._ended}. Start the processes anew, from a "
                "checkpoint"
            )
        self._calls += 1
        self._row["calls"].append([self._calls, call])
        self._write()
        self._begun = time.monotonic()
        if watched and not self._watched:
            self._watched = True
            watch = threading.Thread(
                target=_watch, args=(weakref.ref(self), self._stop), daemon=True, name="peers"
            )
            watch.start()

    def refused(self, error: BaseException) -> None:
        """Announces that the arguments of the call were refused, before anything was sent."""
        self._begun = math.inf
        self._row["calls"][-1][1] = f"refused with {_described(error)}"
        self._write()

    def finish(self) -> None:
        """The call has come to a good end here."""
        self._begun = math.inf

    def fail(self, error: BaseException, groups: Iterable[Any] = ()) -> BaseException:
        """Ends working together, after the call has failed here.

        Args:
            error: with which.
            groups: more process groups to close.

        Returns:
            What to raise: the error, or the reason that another process gave before.
        """
        self._begun, reason = math.inf, self._ended
        if not reason and isinstance(error, LostProcess):
            reason = str(error)
        elif not reason and isinstance(error, Exception) and _is_of_connection(error):
            reason = self.difference() or self._who_is_gone(error)
        self._ended = reason or f"{self._name(self.rank)} failed with {_described(error)}"
        if not reason:
            self._row["calls"][-1][1] = f"failed with {_described(error)}"
        self._row |= {"gone": self._row["gone"] or self._ended, "lost": bool(reason)}
        self._write()
        for group in self.group, *groups:
            self._close(group)
        if not reason or not isinstance(error, Exception):
            return error
        kind = RemoteError if " failed with " in reason or " refused " in reason else LostProcess
        return kind(f"{reason} (the {self._what} has ended in all processes)")

    def wait(self, work: Any, tensor: Tensor) -> None:
        """Waits for a collective; on an accelerator the current stream does, not the host.

        Raises:
            LostProcess: another process does something else, or takes too long.
        """
        while tensor.device.type == "cpu" and not work.is_completed():
            with suppress(RuntimeError):  # the time is over
                work.wait(timedelta(seconds=_WAIT))
            if work.is_completed():
                break
            if reason := self.difference():
                raise LostProcess(reason)
            if time.monotonic() - self._begun > self._timeout:
                raise LostProcess(self._missing())
        work.wait()

    def difference(self) -> str:
        """Why this call cannot come to its end, as others say; empty if nobody knows."""
        mine = dict(self._row["calls"])
        for rank, row in self._others():
            for k, theirs in row["calls"]:
                ours = mine.get(k, theirs)
                if ours == theirs or ours.startswith("failed"):
                    continue
                if theirs.startswith(("failed", "refused")):
                    return f"{self._name(rank)} {theirs}"
                if ours.startswith("refused"):
                    return f"{self._name(self.rank)} {ours}, and {self._name(rank)} did not"
                pair = sorted([(rank, theirs), (self.rank, ours)])
                return f"call {k} is " + " and ".join(f"{c} in {self._name(r)}" for r, c in pair)
            if row["gone"] and (row["lost"] or _last(row) < self._calls):
                return str(row["gone"])
        return ""

    # --- what all do together --------------------------------------------------------------------

    def exchange(self, found: Any) -> list[Any]:
        """What each process has found."""
        own = pickle.dumps(found)
        sizes = [int(size) for size in self._gathered(torch.tensor([len(own)]))]
        own = own.ljust(max(sizes))
        rows = self._gathered(torch.frombuffer(bytearray(own), dtype=torch.uint8))
        return [pickle.loads(bytes(row.tolist())) for row in rows]

    def together(self, act: Callable[[], _T]) -> list[_T]:
        """Does something in each process that waits for none, and fails in all if it does in one.

        Returns:
            The results of all.

        Raises:
            BaseException: what ``act`` raised, in its process.
            RuntimeError: it raised in another process only; with the reason.
        """
        error: BaseException | None = None
        found: tuple[str, Any]
        try:
            found = "", act()
        except BaseException as raised:
            error, found = raised, (_described(raised), None)
        try:
            everywhere = self.exchange(found)
            if error is not None:
                raise error
            for rank, (reason, _) in enumerate(everywhere):
                if reason:
                    name = self._name(rank)
                    raise RuntimeError(f"{name} of the {self._what} refused, so all do: {reason}")
            return [result for _, result in everywhere]
        finally:
            error = None  # else it and this frame would keep each other alive

    def agree(self, act: Callable[[], _T], alike: Callable[[_T], dict[str, Any]]) -> _T:
        """The same, for what has to be alike in all processes.

        Args:
            act: what is done; its result is returned.
            alike: what has to be the same of it, by name.

        Raises:
            ValueError: it is not the same.
        """
        results: list[_T] = []

        def described() -> dict[str, Any]:
            results.append(act())
            return alike(results[0])

        first, *others = self.together(described)
        for rank, found in enumerate(others, 1):
            for name in {**first, **found}:
                if first.get(name) != found.get(name):
                    a, b = (each.get(name, "no such thing") for each in (first, found))
                    raise ValueError(
                        f"processes differ in {name}: {self._name(0)} has {a}, {self._name(rank)} "
                        f"has {b}. Give all the same"
                    )
        return results.pop()

    def _gathered(self, own: Tensor) -> list[Tensor]:
        if not self.by_host:
            own = own.to(torch.accelerator.current_device_index())
        rows = [torch.empty_like(own) for _ in self.ranks]
        self.wait(dist.all_gather(rows, own, self.group, async_op=True), own)
        return rows

    # --- who does not come -----------------------------------------------------------------------

    def _missing(self) -> str:
        """What to say when the others did not come in time."""
        there = dict(self._others())
        late = [
            self._name(rank)
            for rank in range(self.size)
            if rank != self.rank and (rank not in there or _last(there[rank]) < self._calls)
        ]
        return (
            f"{', '.join(late) or 'another ' + self._unit} did not come to call {self._calls} of a "
            f"{self._what} within {self._timeout:g} s, in which {self._name(self.rank)} waited for "
            "it. All make the same calls: did its data end earlier? If it only takes longer, give "
            "a larger timeout"
        )

    def _who_is_gone(self, error: Exception) -> str:
        """Which process it is to which the connection is lost: the one that does not say so."""
        self._row["lost"] = True
        self._write()
        self._close(self.group)

        def silent() -> list[int]:
            said = [rank for rank, row in self._others() if row["lost"]]
            return [rank for rank in range(self.size) if rank not in (self.rank, *said)]

        _polled(_ANSWER, lambda: self.difference() or not silent())
        who = ", ".join(map(self._name, silent())) or "a process"
        return self.difference() or (
            f"{who} does not answer any more, and has probably been killed; {self._name(self.rank)}"
            f" lost its connection: {error}"
        )

    def _all_refused(self) -> bool:
        """Whether the others have refused the last call as well, so that all can go on."""
        rows = [row for _, row in self._others() if _last(row) >= self._calls]
        return len(rows) == self.size - 1 and not self.difference()

    def _close(self, group: Any) -> None:
        """Closes the connections of a group, so that nobody waits in it any more."""
        others = [rank for rank in self.ranks if rank != self.ranks[self.rank]]
        with suppress(Exception):
            if others and "cpu:gloo" in str(dist.get_backend_config(group)):
                # It closes all when one receive takes too long.
                work = dist.irecv(torch.empty(1), others[0], group, tag=2**20)
                work.wait(timedelta(milliseconds=1))  # type: ignore[union-attr]
            if others and "nccl" in str(dist.get_backend_config(group)):
                group.abort()

    # --- the store -------------------------------------------------------------------------------

    def _name(self, rank: int) -> str:
        return f"{self._unit} {rank}"

    def _path(self, rank: int) -> str:
        return f"{self._key}/{rank}"

    def _write(self) -> None:
        _written(self._store, self._path(self.rank), self._row)

    def _others(self) -> Sequence[tuple[int, dict[str, Any]]]:
        """What each of the others has written, if it has written anything."""
        found = []
        with suppress(RuntimeError):  # the store is gone with the process that kept it
            for rank in range(self.size):
                if rank != self.rank and self._store.check([self._path(rank)]):
                    found.append((rank, json.loads(self._store.get(self._path(rank)).decode())))
        return found


_NUMBERS: Counter[str] = Counter()  # how many have been made over a process group


def _last(row: dict[str, Any]) -> int:
    """The number of the last call that a process began."""
    return int(row["calls"][-1][0]) if row["calls"] else 0


def _polled(seconds: float, done: Callable[[], Any]) -> Any:
    """What a function returns, as soon as that is true; or false, when the time is over."""
    until = time.monotonic() + seconds
    while not (found := done()) and time.monotonic() < until:
        time.sleep(0.05)
    return found


def _written(store: Any, key: str, row: dict[str, Any]) -> None:
    with suppress(RuntimeError):
        store.set(key, json.dumps({**row, "calls": list(row["calls"])}))


def _leave(
    stop: threading.Event, store: Any, key: str, name: str, process: int, row: dict[str, Any]
) -> None:
    """The process ends, or lets go of what it had in common with the others."""
    stop.set()
    if process != os.getpid():
        return
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    with_error = "" if error is None else f" with {_described(error)}"
    row["gone"] = row["gone"] or (
        f"{name} has ended{with_error}, after call {_last(row)}, and the others wait for it"
    )
    _written(store, key, row)


def _watch(found: weakref.ref[Peers], stop: threading.Event) -> None:
    """Looks after calls that take long, as long as there are any peers."""
    while not stop.wait(_LOOK):
        peers = found()
        if peers is None:
            return
        late = time.monotonic() - peers._begun > PATIENCE
        if late and not peers._ended and (reason := peers.difference()):
            peers._ended = reason
            peers._close(peers.group)
        del peers


def _is_of_connection(error: Exception) -> bool:
    """Whether another process is the reason; PyTorch has no type of its own for it."""
    words = ("connection", "closed", "timed out", "timeout", "peer", "abort", "nccl")
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(word in text for word in words)


def _described(error: BaseException) -> str:
    """An exception in one line, with its notes."""
    parts = [f"{type(error).__name__}: {error}".rstrip(": "), *getattr(error, "__notes__", ())]
    return "; ".join(parts)


def process_group(group: Any, argument: str, who: str) -> dist.ProcessGroup:
    """The process group that was given: one, a mesh of one dimension, or None for that of all.

    Raises:
        RuntimeError: there is none yet.
        TypeError, ValueError: it is neither, or this process is not in it.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            f"{who} is for processes of a process group, and there is none: start the script by "
            "torchrun, and call torch.distributed.init_process_group() first. For one process "
            "there is Pipe"
        )
    if group is None:
        return dist.distributed_c10d._get_default_group()
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"{argument} is a mesh of {group.ndim} dimensions {group.mesh_dim_names}: give one "
                f"of them, such as {argument}=mesh['pp']"
            )
        return group.get_group()
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"{argument}: this process is not in it")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"{argument} must be a process group, or a DeviceMesh of one dimension, not "
            f"{type(group).__name__}"
        )
    return group
