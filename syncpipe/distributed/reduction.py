"""One call in all processes: what each tells the others, and how gradients become one.

    workers   | F F B F B B |        | .. B |        put down what is ready, and go on
    thread of   numbers --> bucket 0 --> bucket 1 --> numbers
    the group   (exchange)  (last stage)              (exchange)
    caller    | train_batch ....................... waits | writes the gradients

One thread starts all collectives of a pipe, so they start in one order. A call that fails here says
so to its thread, which takes part in what is left with zeros and tells the others; so they learn of
it at the end of their call, all drop what they have, and the next call is a call like any other.

Process ``r`` goes back from ``sum(w_i l_i) / A_r``, ``A_r`` the weight that it assumed for its
mini-batch (``training.loss.objective``), and contributes that times ``A_r / A``, ``A`` the sum of
them all. If in the end the weights are another sum ``W``, all is multiplied by ``A / W``. What is
in ``.grad`` between calls is always such that its mean over the ``R`` processes is the gradient:
after ``no_sync`` what a call added is multiplied by ``R A_r / W``, and an ``R``-th part of what was
there before goes into the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch import Tensor

from syncpipe.distributed.buckets import Bucket, bucketed, digest
from syncpipe.distributed.processes import LostProcess, Processes, RemoteError, described
from syncpipe.runtime.streams import AcceleratorStreams, Lane

__all__ = ["Lanes", "Reduction"]

_LOOK_SECONDS = 1.0  # whoever waits for the thread gives Ctrl-C a chance that often
_GRACE_SECONDS = 1.0  # for others to learn of a failure, before this process may end with it

Signature = tuple[tuple[str, Any], ...]


class Lanes(dict[torch.device, Lane]):
    """For each accelerator the stream on which its buckets are filled and reduced."""

    def __missing__(self, device: torch.device) -> Lane:
        if device.type == "cpu":
            lane = Lane(device)
        else:
            streams = AcceleratorStreams(device)
            lane = Lane(device, streams, streams.new())
        return self.setdefault(device, lane)  # atomic: workers ask for it

    def wait_for_current(self, devices: Iterable[torch.device]) -> None:
        """Lets buckets wait for what this thread has been doing."""
        for device in devices:
            lane = self[device]
            if lane.streams is not None:
                lane.wait_for(Lane(device, lane.streams, lane.streams.current()))


class Reduction:
    """One call. The thread of the group runs :meth:`serve`; everything else belongs to the caller.

    Args:
        processes: who takes part.
        lanes: of the pipe.

    Attributes:
        signature: what has to be alike in all processes, with names; set before :meth:`begin`.
        buckets: what is reduced; the same.
        share: of the weight of all processes that of this one, after :meth:`finish`.
        lost: why this call was the last one.
        closed: whether the caller is through with it.
    """

    def __init__(self, processes: Processes, lanes: Lanes) -> None:
        self._processes, self._lanes = processes, lanes
        self._events: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._over: SimpleQueue[None] = SimpleQueue()
        self.closed = False
        self.signature: Signature = ()
        self.error: BaseException | None = None
        self.lost = ""
        self.share = 1 / processes.size
        # What is reduced, and how; set before `begin`.
        self.buckets: Sequence[Bucket] = ()
        self.adds_up = False  # losses are sums: so are gradients
        self.before: Callable[[Tensor], Tensor | None] = _nothing  # a gradient before this call
        self.late: Callable[[Tensor], bool] = _never  # whether more is added at the end
        self.found: list[Tensor] = []  # leaves that are in no bucket, at the end
        # What the thread has heard.
        self._failure = ""  # in words
        self._weight: tuple[Any, bool] | None = None
        self._ready: set[int] = set()
        self._done = False
        self._total: float | None = None
        # What it knows of all processes: the weights that were assumed, and those that were.
        self._own, self._assumed = 0.0, 0.0
        self._whole: float | None = None
        self._early = False  # whether a process needs the latter before the first bucket
        self._ended: list[list[float]] | None = None
        self._flats: list[tuple[Bucket, Tensor]] = []
        self._without: frozenset[int] = frozenset()

    # -- told by whoever knows; from any thread

    def begin(self, weight: Any, exact: bool) -> None:
        """Tells what this mini-batch is assumed to weigh, and whether it will stay at that."""
        if isinstance(weight, Tensor):
            self._lanes.wait_for_current([weight.device])
        self._tell(lambda: setattr(self, "_weight", (weight, exact)))

    def ready(self, indices: Sequence[int]) -> None:
        """Tells that this thread was the last to add to the gradients of some buckets."""
        self._lanes.wait_for_current({self.buckets[k].device for k in indices})
        self._tell(lambda: self._ready.update(indices))

    def fail(self, error: BaseException) -> None:
        """Tells that the call has failed here. The others then fail, too."""
        text = described(error)
        self._release()
        self._tell(lambda: setattr(self, "_failure", text))

    def _release(self) -> None:
        """Lets go of what is the caller's."""
        self.closed = True
        self.before, self.late, self.found = _nothing, _never, []
        self._flats = []

    def _tell(self, event: Callable[[], None]) -> None:
        self._events.put(event)

    # -- the caller

    def finish(self, total: float | None = None) -> float:
        """Waits for the others. Gradients are those of all processes then.

        Args:
            total: what the mini-batch weighed; None: what was assumed.

        Returns:
            By what gradients are multiplied that go on from here and are not reduced.

        Raises:
            RemoteError: the call failed in another process.
            LostProcess: another process is gone, or does something else.
        """
        self._lanes.wait_for_current({leaf.device for leaf in self.found})

        def done() -> None:
            self._done, self._total = True, total

        self._tell(done)
        self.wait()
        error, self.error = self.error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # or this frame and the traceback would keep each other alive
        for device in {bucket.device for bucket, _ in self._flats}:
            lane = self._lanes[device]
            if lane.streams is not None:
                caller = Lane(device, lane.streams, lane.streams.current())
                caller.wait_for(lane)
                flats = [flat for bucket, flat in self._flats if bucket.device == device]
                caller.record_on_stream(flats, lane)
        for bucket, flat in self._flats:
            if self._factor != 1:
                flat.mul_(self._factor)
            bucket.write(flat, self._without)
        self._release()
        return self._local()

    def wait(self, seconds: float | None = None) -> None:
        """Waits until the thread is through with this call; Ctrl-C gets through."""
        while True:
            try:
                self._over.get(timeout=_LOOK_SECONDS if seconds is None else seconds)
            except Empty:
                if seconds is None:
                    continue
                return
            self._over.put(None)
            return

    def close(self, error: BaseException) -> None:
        """Call when a call has failed here; without effect if it had come to its end."""
        if not self.closed:
            self.fail(error)
            self.wait(_GRACE_SECONDS)

    # -- the thread of the group

    def serve(self) -> None:
        """All collectives of this call. Never raises."""
        try:
            self._agree()
            # A failure can be told until these are through.
            self._await([self._launched(k, bucket) for k, bucket in enumerate(self.buckets)])
            ended = self._end()
            alike = all(row[1] == ended[0][1] for row in ended)
            if alike and not any(row[0] for row in ended):
                others = bucketed(-1, self.found, float("inf"))
                self._await([self._started(bucket) for bucket in others])
            self._check_failures(ended)
            if not alike:
                raise RuntimeError(_OTHERS)
            self._without = self._nowhere(ended)
        except BaseException as error:
            if not self.closed:
                self.error = self.error or error
            self.lost = str(error) if isinstance(error, LostProcess) else ""
        finally:
            self._processes.ended += 1
            self._over.put(None)

    def _await(self, works: Sequence[tuple[Any, Tensor]]) -> None:
        for work, flat in works:
            with self._lanes[flat.device].active():
                self._processes.wait(work, flat)

    def _hear(self, until: Callable[[], Any]) -> None:
        while not (self._failure or until()):
            self._events.get()()

    def _agree(self) -> None:
        """The numbers before the first bucket.

        Raises:
            ValueError: processes make different calls.
        """
        self._hear(lambda: self._weight is not None)
        exact = True
        if self._weight is not None and not self._failure:
            weight, exact = self._weight
            if isinstance(weight, Tensor):
                with self._lanes[weight.device].active():
                    weight = weight.item()
            self._own = float(weight)
        leaves = [leaf for bucket in self.buckets for leaf in bucket.leaves]
        before = any(self.before(leaf) is not None for leaf in leaves)
        numbers = [bool(self._failure), digest(self.signature), self._own, exact, before]
        rows = self._processes.exchange(numbers)
        self._check_failures(rows)
        if any(row[1] != rows[0][1] for row in rows):
            shapes = [bucket.described for bucket in self.buckets]
            raise _difference(self._processes.objects((*self.signature, ("its buckets", shapes))))
        self._assumed = sum(row[2] for row in rows)
        self._whole = self._assumed if all(row[3] for row in rows) else None
        self._early = any(row[4] for row in rows)  # of all: collectives come in one order

    def _launched(self, k: int, bucket: Bucket) -> tuple[Any, Tensor]:
        """A bucket on its way, as soon as it is ready."""
        self._hear(lambda: self._done or k in self._ready)
        if any(map(self.late, bucket.leaves)):
            self._hear(lambda: self._done)
        if self._whole is None and self._early:
            self._end()
        return self._started(bucket)

    def _started(self, bucket: Bucket) -> tuple[Any, Tensor]:
        with self._lanes[bucket.device].active():
            try:
                flat = bucket.nothing() if self._failure else self._own_part(bucket)
            except BaseException as error:  # out of memory, say; the others must not wait
                if self._ended is not None:  # they have been told that all is well
                    raise self._processes.leave(error) from error
                self._fails(error)
                flat = bucket.nothing()
            whole = torch.view_as_real(flat) if flat.is_complex() else flat
            work = self._processes.all_reduce(whole)
        self._flats.append((bucket, flat))
        return work, flat

    def _fails(self, error: BaseException) -> None:
        if not self._failure:
            self.error, self._failure = error, described(error)

    @torch.no_grad()
    def _own_part(self, bucket: Bucket) -> Tensor:
        """What this process contributes to a bucket."""
        scale = 1.0
        if not self.adds_up:
            scale = self._own / self._assumed if self._assumed else 0.0
        flat = bucket.gathered([_dense(leaf) for leaf in bucket.leaves]).mul_(scale)
        before = [self.before(leaf) for leaf in bucket.leaves]
        if any(grad is not None for grad in before):
            rest = 1 / (self._processes.size * self._factor) - scale
            if abs(rest) > 1e-12:
                flat.add_(bucket.gathered(before), alpha=rest)
        return flat

    @property
    def _factor(self) -> float:
        """By what all gradients are multiplied when they are there."""
        return self._assumed / self._whole if self._whole and not self.adds_up else 1.0

    def _local(self) -> float:
        """By what the gradients of this process alone are multiplied."""
        if self.adds_up:
            return float(self._processes.size)
        return self._processes.size * self._own / self._whole if self._whole else 1.0

    def _end(self) -> list[list[float]]:
        """The numbers after the last backward."""
        if self._ended is None:
            self._hear(lambda: self._done)
            while not self._events.empty():  # Ctrl-C while the caller waited
                self._events.get()()
            missing = 0
            try:
                missing = sum(_dense(leaf) is None for leaf in self._leaves())
            except TypeError as error:
                self._fails(error)
            found = [(list(leaf.shape), str(leaf.dtype)) for leaf in self.found]
            total = self._own if self._total is None else self._total
            numbers = [bool(self._failure), digest(found), total, missing]
            self._ended = self._processes.exchange(numbers)
            self._whole = sum(row[2] for row in self._ended)
            self.share = total / self._whole if self._whole else 0.0
            if self.adds_up:
                self.share = 1.0
        return self._ended

    def _leaves(self) -> list[Tensor]:
        """All that is reduced."""
        return [leaf for bucket in self.buckets for leaf in bucket.leaves] + self.found

    def _nowhere(self, ended: Sequence[Sequence[float]]) -> frozenset[int]:
        """The leaves, by identity, that have no gradient in any process."""
        if not any(row[3] for row in ended):
            return frozenset()
        leaves = self._leaves()
        rows = self._processes.exchange([float(leaf.grad is not None) for leaf in leaves])
        return frozenset(
            id(leaf) for leaf, there in zip(leaves, zip(*rows, strict=True), strict=True)
            if not any(there)
        )  # fmt: skip

    def _check_failures(self, rows: Sequence[Sequence[float]]) -> None:
        """Raises what failed in the first process in which anything did."""
        if not any(row[0] for row in rows):
            return
        for rank, text in enumerate(self._processes.objects(self._failure)):
            if text:
                raise RemoteError(f"the call failed in process {rank}: {text}")


def _dense(leaf: Tensor) -> Tensor | None:
    """The gradient of a leaf.

    Raises:
        TypeError: it is sparse.
    """
    grad = leaf.grad
    if grad is not None and grad.layout is not torch.strided:
        raise TypeError(
            f"a parameter of shape {list(leaf.shape)} has a sparse gradient, which data_parallel "
            "does not average: make its layer with sparse=False"
        )
    return grad


def _difference(signatures: Sequence[Signature]) -> ValueError:
    """Says in what calls differ."""
    first = dict(signatures[0])
    for rank, signature in enumerate(signatures):
        for name, value in signature:
            if first.get(name) != value:
                return ValueError(
                    f"processes {rank} and 0 do not make the same call of a data-parallel pipe: "
                    f"{name} is {value!r} there and {first.get(name)!r} in process 0"
                )
    return ValueError("processes do not make the same call of a data-parallel pipe")


_OTHERS = (
    "loss_fn or a layer uses tensors that require grad and are no parameters of the pipe, and "
    "other ones in another process: their gradients cannot be averaged. Let all processes use the "
    "same, or make them parameters of a layer"
)


def _nothing(leaf: Tensor) -> None:
    return None


def _never(leaf: Tensor) -> bool:
    return False
