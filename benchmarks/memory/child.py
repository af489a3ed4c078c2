"""Measures in a process of its own, on accelerators: real ones, or else simulated ones.

    python -m benchmarks.memory.child '{"model": "gpt2", "quick": true, "what": "build"}'

The last line that it prints is what it measured, as JSON. Simulated devices cannot be unloaded, so
nothing else may run in such a process.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import syncpipe
from benchmarks.memory.host_bytes import HostBytes
from benchmarks.memory.models import ENTRIES, Entry
from syncpipe import Pipe
from syncpipe.runtime import offload

CHUNKS = 4
DRIVERS = ("pipe(x)", "1f1b")


def devices() -> list[torch.device]:
    """Two accelerators, simulated where there are none."""
    if not torch.accelerator.is_available():
        from tests import simulated

        simulated.load()
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    count = torch.accelerator.device_count()
    return [torch.device(kind.type, k % count) for k in range(2)]


class Peaks:
    """The bytes that are alive at most on each device, from when it is made."""

    def __init__(self, places: list[torch.device]) -> None:
        self._places = list(dict.fromkeys(places))
        self.settle()
        for device in self._places:
            torch.accelerator.reset_peak_memory_stats(device.index)

    def settle(self) -> None:
        """Waits for the devices, and lets go of what nobody needs."""
        gc.collect()
        for device in self._places:
            torch.accelerator.synchronize(device.index)
        torch.accelerator.empty_cache()

    def now(self) -> list[int]:
        """The peak of each."""
        self.settle()
        stats = [torch.accelerator.memory_stats(device.index) for device in self._places]
        return [int(found["active_bytes.all.peak"]) for found in stats]


def build(entry: Entry, places: list[torch.device]) -> list[dict[str, Any]]:
    """Host and device peaks of making the pipe, for each way there is in this version."""

    def on_meta() -> nn.Sequential:
        with torch.device("meta"):
            return entry.build()

    spec: Any = getattr(syncpipe, "LayerSpec", None)
    ways: dict[str, Callable[[], Any]] = {"whole": entry.build}
    if spec is not None:
        ways["meta"] = on_meta
        ways["spec"] = lambda: [spec(make) for make in entry.layers]
    rows = []
    for name, make in ways.items():
        peaks = Peaks(places)
        with HostBytes() as host:
            pipe = Pipe(make(), entry.balance, devices=places, chunks=CHUNKS)
            most = host.most
        rows.append({"way": name, "host": most, "device": peaks.now()})
        del pipe
    return rows


def step(entry: Entry, places: list[torch.device]) -> list[dict[str, Any]]:
    """Host and device peaks of the second training step, for each driver and mode."""
    host = HostBytes()
    on_host = offload._on_host

    def counted(size: int) -> Tensor:
        copy = on_host(size)
        host.count(copy)
        return copy

    offload._on_host = counted  # what a step has on the host is the copies
    rows = []
    for driver in DRIVERS:
        for name, mode in entry.modes().items():
            torch.manual_seed(0)
            pipe = Pipe(entry.build(), entry.balance, devices=places, chunks=CHUNKS,
                        checkpoint=mode)  # fmt: skip
            x, target = entry.batch()
            x, target = x.to(places[0]), target.to(places[-1])
            for _ in range(2):
                pipe.zero_grad()
                host.most = host.alive
                peaks = Peaks(places)
                if driver == "pipe(x)":
                    entry.loss(pipe(x), target).backward()
                else:
                    pipe.train_batch(x, target, loss_fn=entry.loss, schedule=driver)
                found = peaks.now()
            kept = [sum(2 * p.nbytes for p in part.parameters()) for part in pipe.partitions]
            if len(found) == 1:
                kept = [sum(kept)]
            gradients = sum(float(p.grad.double().sum().cpu()) for p in pipe.parameters())
            rows.append(
                {"driver": driver, "mode": name, "host": host.most, "device": found,
                 "kept": kept, "check": gradients}
            )  # fmt: skip
            del pipe, x, target
    return rows


def main(argument: str) -> None:
    """Measures what was asked for, and prints it."""
    order = json.loads(argument)
    torch.manual_seed(0)
    places = devices()
    entry = ENTRIES[order["model"]](order["quick"])
    rows = {"build": build, "step": step}[order["what"]](entry, places)
    print(json.dumps({"devices": [str(place) for place in places], "rows": rows}))


if __name__ == "__main__":
    main(sys.argv[1])
