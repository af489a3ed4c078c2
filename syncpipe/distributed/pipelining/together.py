"""Processes that go on together, or fail together and say why.

What a rank refuses before anything is sent, it refuses for all: they agree, by one small reduction,
and go on working. What fails in between leaves the others waiting for what will not come. So the
rank that fails first writes its reason into the store where the processes met, and raises. When its
process ends, or destroys the group, the others wake, and look there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Together", "process_group"]

_T = TypeVar("_T")
_PATIENCE = timedelta(seconds=10)


class Together:
    """The ranks of one pipeline.

    Args:
        group: their process group.

    Attributes:
        group: the same, until a rank has failed.
        rank: of this process in it.
        size: how many there are.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group: Any = group
        self._ranks = dist.get_process_group_ranks(group)
        self.rank, self.size = dist.get_rank(group), len(self._ranks)
        self.by_host = "cpu:" in str(dist.get_backend_config(group))
        #: Where a flag is, and what objects are made to that are sent.
        self._flags = None if self.by_host else torch.accelerator.current_accelerator()
        self._key = f"syncpipe/{group.group_name}"

    def exchange(
        self, tensor: Tensor, ranks: Sequence[int], senders: Sequence[int]
    ) -> list[Tensor]:
        """Sends a tensor between some of the ranks, which all call this.

        Args:
            tensor: contiguous; of the same shape and dtype on all.
            ranks: those that receive.
            senders: those that send.

        Returns:
            For each sender its tensor; the own one as it is.
        """
        operations, found = [], []
        for rank in senders:
            found.append(tensor if rank == self.rank else torch.empty_like(tensor))
            if rank != self.rank and self.rank in ranks:
                operations.append(self._operation(dist.irecv, found[-1], rank))
        if self.rank in senders:
            others = [rank for rank in ranks if rank != self.rank]
            operations += [self._operation(dist.isend, tensor, rank) for rank in others]
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        return found

    def _operation(self, kind: Any, tensor: Tensor, rank: int) -> dist.P2POp:
        return dist.P2POp(kind, tensor, self._ranks[rank], self.group)

    def agree(self, act: Callable[[], _T]) -> _T:
        """Does something on each rank that waits for none, and fails on all if it does on one.

        Raises:
            BaseException: what ``act`` raised, on its rank.
            RuntimeError: it raised on another rank only; with the reason.
        """
        error: BaseException | None = None
        try:
            result = act()
        except BaseException as found:
            error = found
        try:
            fine = torch.tensor([error is None], dtype=torch.int32, device=self._flags)
            dist.all_reduce(fine, dist.ReduceOp.MIN, group=self.group)
            if fine.item():
                return result
            reasons = self.everywhere(_words(error))
            if error is not None:
                raise error
            rank = next(rank for rank, reason in enumerate(reasons) if reason is not None)
            raise RuntimeError(f"rank {rank} of the pipeline refused, so all do: {reasons[rank]}")
        finally:
            error = None  # else it and this frame would keep each other alive

    def everywhere(self, found: Any) -> list[Any]:
        """What each rank has found."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, found, group=self.group)
        return values

    def told(self, act: Callable[[], _T], rank: int) -> _T:
        """What one rank does, and all of them get to know.

        Raises:
            BaseException: what ``act`` raised, on its rank.
            RuntimeError: it raised; with the reason.
        """
        error: BaseException | None = None
        message: list[Any] = [None, None]
        if rank == self.rank:
            try:
                message = [act(), None]
            except BaseException as found:
                error, message = found, [None, _words(found)]
        try:
            dist.broadcast_object_list(message, src=self._ranks[rank], group=self.group)
            if error is not None:
                raise error
            if message[1] is not None:
                raise RuntimeError(f"rank {rank} of the pipeline failed, so all do: {message[1]}")
            return message[0]  # type: ignore[no-any-return]
        finally:
            error = None

    def failed(self, error: BaseException) -> RuntimeError | None:
        """Ends the pipeline, once this rank has failed.

        Returns:
            What to raise in the place of the error, if another rank failed before.
        """
        reason = None
        try:
            store = dist.distributed_c10d._get_default_store()
            if store.add(f"{self._key}/failures", 1) == 1:
                store.set(f"{self._key}/reason", f"rank {self.rank} failed: {_words(error)}")
            else:
                store.wait([f"{self._key}/reason"], _PATIENCE)
                reason = store.get(f"{self._key}/reason").decode()
        except Exception:  # the store has gone, with the process that kept it
            reason = None
        self.group = None
        if reason is None:
            return None
        return RuntimeError(f"{reason} (the pipeline has ended on all ranks)")

    def check(self) -> None:
        """Refuses to work once it has ended.

        Raises:
            RuntimeError: it has.
        """
        if self.group is None:
            raise RuntimeError(
                "this pipeline has ended, for a rank failed: start the processes anew, from a "
                "checkpoint"
            )


def process_group(group: Any) -> dist.ProcessGroup:
    """The process group that was given: one, a mesh of one dimension, or None for that of all.

    Raises:
        RuntimeError: there is none yet.
        TypeError, ValueError: it is neither, or this process is not in it.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            "stage() is for processes of a process group, and there is none: start the script by "
            "torchrun, and call torch.distributed.init_process_group() first. For one process "
            "there is Pipe"
        )
    if group is None:
        return dist.distributed_c10d._get_default_group()
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"group is a mesh of {group.ndim} dimensions {group.mesh_dim_names}: give that of "
                "the pipeline, group=mesh['pp']"
            )
        return group.get_group()
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("group: this process is not in it, so it has no stage to make")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            "group must be a process group, or a DeviceMesh of one dimension, not "
            f"{type(group).__name__}"
        )
    return group


def _words(error: BaseException | None) -> str | None:
    if error is None:
        return None
    return f"{type(error).__name__}: {error}"
