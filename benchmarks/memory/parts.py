"""Memory: what making a pipe takes on the host and on the devices, and what a step takes.

GPT-2 small and ResNet-50 on two devices: ``build`` (the model made whole on the host, on ``meta``,
or layer by layer as specs), ``gpt2`` and ``resnet50`` (a step of it with nothing re-materialized,
whole cells, layers, all but some operations; with activations on the host). The devices are
accelerators; where there are none, simulated ones, whose memory is counted in the same way (they
need a C++ compiler, and the tests' folder).
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common import Group, Options, Part
from benchmarks.memory.host_bytes import HostBytes
from benchmarks.memory.models import ENTRIES, Entry
from syncpipe import LayerSpec, Pipe
from syncpipe.runtime import offload

__all__ = ["GROUP"]

MB = 1e6


def measured(model: str, what: str, quick: bool) -> dict[str, Any]:
    """What a process of its own measures.

    Raises:
        SystemExit: it failed.
    """
    order = json.dumps({"model": model, "what": what, "quick": quick})
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.memory.parts", order],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{model}, {what}: nothing measured\n{done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def build(options: Options) -> Part:
    """Peaks of making a pipe."""
    part = Part(
        "Building",
        "Two devices; bytes of tensors that are alive at most, in MB; one run.",
        {
            "host": "on the host, while the model and the pipe are made.",
            "device 0": "on the first device, likewise; its parameters and buffers at least.",
        },
    )
    for name, make in ENTRIES.items():
        entry, found = make(options.quick), measured(name, "build", options.quick)
        for row in found["rows"]:
            columns = {f"device {k}": peak / MB for k, peak in enumerate(row["device"])}
            part.rows.append(
                {"model": entry.name, "built": row["way"], "host": row["host"] / MB, **columns}
            )
    part.notes.append(f"Devices: {', '.join(found['devices'])}.")
    return part


def step(name: str, options: Options) -> Part:
    """Peaks of a training step of a model."""
    entry, found = ENTRIES[name](options.quick), measured(name, "step", options.quick)
    part = Part(
        f"A step of {entry.name}",
        f"Two devices ({', '.join(found['devices'])}), {entry.balance[0]} and "
        f"{entry.balance[1]} layers; {entry.sample} in 4 micro-batches, float32. Bytes of "
        "tensors that are alive at most, in MB.",
        {
            "device 0": "on the first device, beyond its parameters and their gradients.",
            "host": "in copies of activations on the host.",
            "of never": "device 0 and device 1 together, over those of never.",
        },
    )
    base: dict[str, float] = {}
    checks: dict[str, float] = {}
    for row in found["rows"]:
        driver, mode = row["driver"], row["mode"]
        beyond = [max(0, a - b) / MB for a, b in zip(row["device"], row["kept"], strict=True)]
        base.setdefault(driver, sum(beyond))
        if row["check"] != checks.setdefault(driver, row["check"]):
            raise SystemExit(f"{entry.name}, {mode}: not the gradients of never")
        part.rows.append(
            {
                "driver": driver,
                "checkpoint": mode,
                **{f"device {k}": peak for k, peak in enumerate(beyond)},
                "host": row["host"] / MB,
                "of never": sum(beyond) / base[driver],
            }
        )
    kept = ", ".join(f"{size / MB:.0f}" for size in found["rows"][0]["kept"])
    part.notes += [
        f"Parameters and gradients, on top of this: {kept} MB.",
        "The sum of all gradients is the same to the last bit in every row of a driver.",
    ]
    return part


# -- in a process of its own -----------------------------------------------------------------------

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


def built(entry: Entry, places: list[torch.device]) -> list[dict[str, Any]]:
    """Host and device peaks of making the pipe, in each way."""

    def on_meta() -> nn.Sequential:
        with torch.device("meta"):
            return entry.build()

    ways: dict[str, Callable[[], Any]] = {
        "whole": entry.build,
        "meta": on_meta,
        "spec": lambda: [LayerSpec(make) for make in entry.layers],
    }
    rows = []
    for name, make in ways.items():
        peaks = Peaks(places)
        with HostBytes() as host:
            pipe = Pipe(make(), entry.balance, devices=places, chunks=CHUNKS)
            most = host.most
        rows.append({"way": name, "host": most, "device": peaks.now()})
        del pipe
    return rows


def stepped(entry: Entry, places: list[torch.device]) -> list[dict[str, Any]]:
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


GROUP = Group(
    "memory",
    "Memory of building a pipe, and of a step",
    __doc__,
    {"build": build, **{name: partial(step, name) for name in ENTRIES}},
)


def _child(argument: str) -> None:
    """Measures what was asked for in a process of its own, and prints it as the last line.

    Simulated devices cannot be unloaded, so nothing else may run in such a process.
    """
    order = json.loads(argument)
    torch.manual_seed(0)
    places = devices()
    entry = ENTRIES[order["model"]](order["quick"])
    rows = {"build": built, "step": stepped}[order["what"]](entry, places)
    print(json.dumps({"devices": [str(place) for place in places], "rows": rows}))


if __name__ == "__main__":
    _child(sys.argv[1])
