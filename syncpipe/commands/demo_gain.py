"""What the demo measures: how long a step takes, and how much memory it holds on each device."""

import statistics
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

__all__ = ["Stored", "held", "median_times", "synchronize", "threads"]

Step = Callable[[], object]


@contextmanager
def threads(count: int) -> Iterator[None]:
    """So many intra-op threads on the CPU; the workers of a pipe share them out."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def synchronize(devices: Sequence[torch.device]) -> None:
    """Wait until devices have done all their work, so that a clock can be read."""
    for device in dict.fromkeys(devices):
        if device.type != "cpu":
            torch.accelerator.synchronize(device)


def median_times(
    steps: Mapping[str, tuple[int, Step]], devices: Sequence[torch.device], seconds: float
) -> tuple[dict[str, float], int]:
    """Times steps in turns, so that a busy machine slows all alike.

    Args:
        steps: by name the number of intra-op threads, and what to time.
        devices: what they run on.
        seconds: to go on for, and at least three rounds.

    Returns:
        The median of each in seconds, and the number of rounds.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    end = time.perf_counter() + seconds
    rounds = -1  # the first one warms up
    while rounds < 3 or time.perf_counter() < end:
        for name, (count, step) in steps.items():
            with threads(count):
                synchronize(devices)
                start = time.perf_counter()
                step()
                synchronize(devices)
                if rounds >= 0:
                    times[name].append(time.perf_counter() - start)
        rounds += 1
    return {name: statistics.median(taken) for name, taken in times.items()}, rounds


def held(step: Step, parts: Sequence[nn.Module], devices: Sequence[torch.device]) -> int:
    """Runs a step, and returns the bytes on the device that holds most, each with one part.

    On accelerators the peak of the allocator. CPU workers share one memory: there it is what each
    has of parameters, gradients, buffers, and at most of what autograd stores for backward.

    Args:
        step: forward and backward, into gradients of None.
        parts: the layers on each device.
        devices: one for each part.
    """
    own = [sum(_bytes(t) for t in [*part.parameters(), *part.buffers()]) for part in parts]
    if devices[0].type == "cpu":
        with Stored(parts) as stored:
            step()
        grads = [sum(_bytes(p.grad) for p in q.parameters() if p.grad is not None) for q in parts]
        return max(
            map(sum, zip(own, grads, (stored.most[j] for j in range(len(parts))), strict=True))
        )
    synchronize(devices)
    before = [torch.accelerator.memory_allocated(device) for device in devices]
    for device in devices:
        torch.accelerator.reset_peak_memory_stats(device)
    step()
    synchronize(devices)
    peaks = [torch.accelerator.max_memory_allocated(device) for device in devices]
    return max(o + peak - b for o, peak, b in zip(own, peaks, before, strict=True))


class Stored:
    """Counts what autograd stores for backward, in bytes, while it is entered.

    Every storage counts once in each part whose layers store it, until the last of them lets go of
    it. Parameters do not count: they are there anyhow.

    Args:
        parts: lists of layers; a thread is in one of them from its first layer on.

    Attributes:
        most: the most bytes that were stored at a time, by part.
    """

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        self.most: Counter[int] = Counter()
        self._now: Counter[int] = Counter()
        self._users: Counter[tuple[int, int]] = Counter()
        self._own = {p.untyped_storage()._cdata for part in parts for p in part.parameters()}
        self._firsts = [next(iter(part.children())) for part in parts]
        self._lock = threading.RLock()  # a finalizer may run wherever memory is allocated
        self._thread = threading.local()

    def __enter__(self) -> "Stored":
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda held: held.tensor)
        self._handles = [
            first.register_forward_pre_hook(lambda *_, j=j: setattr(self._thread, "part", j))
            for j, first in enumerate(self._firsts)
        ]
        self._hooks.__enter__()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._hooks.__exit__(*exc_info)
        for handle in self._handles:
            handle.remove()

    def _pack(self, tensor: Tensor) -> "_Held":
        found = _Held(tensor.detach())  # else an output would keep its own graph, and itself
        storage = tensor.untyped_storage()
        key, size = (self._thread.part, storage._cdata), storage.nbytes()
        if key[1] not in self._own:
            with self._lock:
                self._users[key] += 1
                if self._users[key] == 1:
                    self._now[key[0]] += size
                    self.most[key[0]] = max(self.most[key[0]], self._now[key[0]])
            weakref.finalize(found, self._drop, key, size)
        return found

    def _drop(self, key: tuple[int, int], size: int) -> None:
        with self._lock:
            self._users[key] -= 1
            if not self._users[key]:
                self._now[key[0]] -= size


class _Held:
    """What autograd holds instead of a tensor."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
