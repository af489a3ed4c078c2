"""Processes that work together: what each does, who failed, and why.

Nobody waits to tell. Each process writes into the store where they met, under its own key, the last
calls that it began and how they ended. A process whose call takes more than a few seconds, or that
loses a connection, reads there what the others do. If that is something else, or a process has
failed, refused its arguments or ended, it closes its connections. That wakes the others, which read
the same, so all raise with the reason.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import distributed as dist

__all__ = ["LostProcess", "Peers", "RemoteError", "described"]

_T = TypeVar("_T")
PATIENCE = 5.0  # seconds of a call, after which it looks what the others do
_LOOK = 1.0  # seconds between two looks
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

    Attributes:
        group: the same.
        rank: of this process in it.
        size: how many there are.
        ranks: in the group of all processes.
        ended: why no further call can be made; empty if it can.
    """

    def __init__(self, group: dist.ProcessGroup, what: str, unit: str = "rank") -> None:
        self.group, self._what, self._unit = group, what, unit
        self.ranks = dist.get_process_group_ranks(group)
        self.rank, self.size = dist.get_rank(group), len(self.ranks)
        self.by_host = "cpu:" in str(dist.get_backend_config(group))
        self.ended = ""
        self.calls = 0
        name = f"syncpipe/{group.group_name}/{'-'.join(map(str, self.ranks))}"
        _NUMBERS[name] += 1  # alike everywhere: all make the same, in turn
        self._key = f"{name}/{_NUMBERS[name]}"
        self._store = dist.distributed_c10d._get_default_store()
        self._row: dict[str, Any] = {"calls": deque(maxlen=_KEPT), "gone": "", "lost": False}
        self._begun: float | None = None
        self._stop = threading.Event()
        self._watcher: threading.Thread | None = None
        key, name = self._path(self.rank), self._name(self.rank)
        weakref.finalize(self, _leave, self._stop, self._store, key, name, os.getpid(), self._row)

    # --- calls -----------------------------------------------------------------------------------

    def begin(self, call: str, *, watched: bool = True) -> None:
        """Announces a call.

        Args:
            call: what it is, which has to be the same in all processes.
            watched: whether a thread looks what the others do, while this one waits for messages.

        Raises:
            RuntimeError: these processes have ended working together.
        """
        if self._row["calls"] and self._row["calls"][-1][1].startswith("refused"):
            self._wait_for_refusals()
        if self.ended:
            raise RuntimeError(
                f"this {self._what} has ended: {self.ended}. Start the processes anew, from a "
                "checkpoint"
            )
        self.calls += 1
        self._row["calls"].append([self.calls, call])
        self._write()
        self._begun = time.monotonic()
        if watched and self._watcher is None:
            self._watcher = threading.Thread(
                target=_watch, args=(weakref.ref(self), self._stop), daemon=True, name="peers"
            )
            self._watcher.start()

    def refused(self, error: BaseException) -> None:
        """Announces that the arguments of the call were refused, before anything was sent."""
        self._begun = None
        self._row["calls"][-1][1] = f"refused with {described(error)}"
        self._write()

    def finish(self) -> None:
        """The call has come to a good end here."""
        self._begun = None

    def fail(self, error: BaseException) -> BaseException:
        """Ends working together, after the call has failed here.

        Returns:
            What to raise: the error, or the reason that another process gave before.
        """
        self._begun = None
        reason = self.ended
        if not reason and isinstance(error, LostProcess):
            reason = str(error)
        elif not reason and isinstance(error, Exception) and _is_of_connection(error):
            reason = self.difference() or self._who_is_gone(error)
        self.ended = reason or f"{self._name(self.rank)} failed with {described(error)}"
        if not reason:
            self._row["calls"][-1][1] = f"failed with {described(error)}"
        self._row["gone"] = self._row["gone"] or self.ended
        self._write()
        self.close()
        if not reason or not isinstance(error, Exception):
            return error
        kind = RemoteError if " failed with " in reason or " refused " in reason else LostProcess
        return kind(f"{reason} (the {self._what} has ended in all processes)")

    def waited(self) -> float:
        """Seconds since the call began."""
        return 0.0 if self._begun is None else time.monotonic() - self._begun

    def difference(self) -> str:
        """Why this call cannot come to its end, as others say; empty if nobody knows."""
        mine = dict(self._row["calls"])
        for rank in range(self.size):
            row = None if rank == self.rank else self._read(rank)
            if row is None:
                continue
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
            if row["gone"] and (not row["calls"] or row["calls"][-1][0] < self.calls):
                return str(row["gone"])
        return ""

    def missing(self, seconds: float) -> str:
        """What to say when the others did not come in time."""
        rows = [(rank, self._read(rank)) for rank in range(self.size) if rank != self.rank]
        late = [
            self._name(rank)
            for rank, row in rows
            if not row or not row["calls"] or row["calls"][-1][0] < self.calls
        ]
        return (
            f"{', '.join(late) or 'another ' + self._unit} did not come to call {self.calls} of a "
            f"{self._what} within {seconds:g} s, in which {self._name(self.rank)} waited for it. "
            "All make the same calls: did its data end earlier? If it only takes longer, give a "
            "larger timeout"
        )

    def close(self, group: dist.ProcessGroup | None = None) -> None:
        """Closes the connections of a group, so that nobody waits in it any more."""
        group = self.group if group is None else group
        others = [rank for rank in self.ranks if rank != self.ranks[self.rank]]
        with suppress(Exception):
            if others and "cpu:gloo" in str(dist.get_backend_config(group)):
                # It closes all when one receive takes too long.
                work = dist.irecv(torch.empty(1), others[0], group, tag=2**20)
                work.wait(timedelta(milliseconds=1))  # type: ignore[union-attr]
            if others and "nccl" in str(dist.get_backend_config(group)):
                group.abort()

    # --- what all do together --------------------------------------------------------------------

    def everywhere(self, found: Any) -> list[Any]:
        """What each process has found."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, found, group=self.group)
        return values

    def agree(self, act: Callable[[], _T], alike: Callable[[_T], Any] | None = None) -> _T:
        """Does something in each process that waits for none, and fails in all if it does in one.

        Args:
            act: what is done.
            alike: what has to be the same of its result in all processes: by name, a dict.

        Raises:
            BaseException: what ``act`` raised, in its process.
            RuntimeError: it raised in another process only; with the reason.
            ValueError: results differ.
        """
        error: BaseException | None = None
        found: tuple[str | None, Any]
        try:
            result = act()
            found = None, {} if alike is None else alike(result)
        except BaseException as raised:
            error, found = raised, (described(raised), {})
        try:
            everywhere = self.everywhere(found)
            if error is not None:
                raise error
            for rank, (reason, _) in enumerate(everywhere):
                if reason is not None:
                    name = self._name(rank)
                    raise RuntimeError(f"{name} of the {self._what} refused, so all do: {reason}")
            for rank, (_, others) in enumerate(everywhere):
                for name, first in everywhere[0][1].items():
                    if others.get(name) != first:
                        raise ValueError(
                            f"{name} differ between processes: {self._name(0)} has {first}, "
                            f"{self._name(rank)} has {others.get(name)}. Give all the same"
                        )
            return result
        finally:
            error = None  # else it and this frame would keep each other alive

    def told(self, act: Callable[[], _T], rank: int) -> _T:
        """What one process does, and all of them get to know.

        Raises:
            BaseException: what ``act`` raised, in its process.
            RuntimeError: it raised; with the reason.
        """
        message: list[Any] = [None, None]
        error: BaseException | None = None
        if rank == self.rank:
            try:
                message = [act(), None]
            except BaseException as raised:
                error, message = raised, [None, described(raised)]
        try:
            dist.broadcast_object_list(message, src=self.ranks[rank], group=self.group)
            if error is not None:
                raise error
            if message[1] is not None:
                name = self._name(rank)
                raise RuntimeError(f"{name} of the {self._what} failed, so all do: {message[1]}")
            return message[0]  # type: ignore[no-any-return]
        finally:
            error = None

    # --- the store -------------------------------------------------------------------------------

    def _who_is_gone(self, error: Exception) -> str:
        """Which process it is to which the connection is lost: the one that does not say so."""
        self._row["lost"] = True
        self._write()
        self.close()
        until = time.monotonic() + _ANSWER
        while True:
            if reason := self.difference():
                return reason
            rows = {rank: self._read(rank) for rank in range(self.size) if rank != self.rank}
            silent = [rank for rank, row in rows.items() if not (row or {}).get("lost")]
            if not silent or time.monotonic() > until:
                break
            time.sleep(0.05)
        who = ", ".join(map(self._name, silent)) or "a process"
        return (
            f"{who} does not answer any more, and has probably been killed; {self._name(self.rank)}"
            f" lost its connection: {error}"
        )

    def _wait_for_refusals(self) -> None:
        """Looks whether the others have refused the last call as well; or else this is the end."""
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            rows = [self._read(rank) for rank in range(self.size) if rank != self.rank]
            there = all(row and row["calls"] and row["calls"][-1][0] >= self.calls for row in rows)
            if there and not self.difference():
                return
            time.sleep(0.05)
        self.ended = self.difference()
        self._row["gone"] = self.ended
        self._write()

    def _name(self, rank: int) -> str:
        return f"{self._unit} {rank}"

    def _path(self, rank: int) -> str:
        return f"{self._key}/{rank}"

    def _write(self) -> None:
        _written(self._store, self._path(self.rank), self._row)

    def _read(self, rank: int) -> dict[str, Any] | None:
        with suppress(RuntimeError):  # the store is gone with the process that kept it
            if self._store.check([self._path(rank)]):
                return dict(json.loads(self._store.get(self._path(rank)).decode()))
        return None


_NUMBERS: Counter[str] = Counter()  # how many have been made over a process group


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
    with_error = "" if error is None else f" with {described(error)}"
    row["gone"] = row["gone"] or (
        f"{name} has ended{with_error}, after call "
        f"{row['calls'][-1][0] if row['calls'] else 0}, and the others wait for it"
    )
    _written(store, key, row)


def _watch(found: weakref.ref[Peers], stop: threading.Event) -> None:
    """Looks after calls that take long, as long as there are any peers."""
    while not stop.wait(_LOOK):
        peers = found()
        if peers is None:
            return
        if peers.waited() > PATIENCE and not peers.ended and (reason := peers.difference()):
            peers.ended = reason
            peers.close()
        del peers


def _is_of_connection(error: Exception) -> bool:
    """Whether another process is the reason; PyTorch has no type of its own for it."""
    words = ("connection", "closed", "timed out", "timeout", "peer", "abort", "nccl")
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(word in text for word in words)


def described(error: BaseException) -> str:
    """An exception in one line, with its notes."""
    parts = [f"{type(error).__name__}: {error}".rstrip(": "), *getattr(error, "__notes__", ())]
    return "; ".join(parts)
