"""Memory: what making a pipe takes on the host and on the devices, and what a step takes.

GPT-2 small on two devices: ``build`` (the model made whole on the host, on ``meta``, or layer by
layer as specs) and ``step`` (nothing recomputed, whole cells, layers, all but some operations; with
activations on the host). The devices are accelerators; where there are none, simulated ones, whose
memory is counted in the same way (they need a C++ compiler, and the tests' folder).
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.common import Group, Options, Part
from benchmarks.counted import HostBytes
from benchmarks.models import Attention, FeedForward, gpt2_layers
from benchmarks.peers import next_token, sentences
from syncpipe import LayerSpec, Pipe, Selective
from syncpipe.runtime import offload

MB = 1e6
CHUNKS = 4
DRIVERS = ("pipe(x)", "1f1b")
OPS = torch.ops.aten
#: What ``checkpoint`` may be, by a name for the report.
MODES: dict[str, Any] = {
    "never": "never",
    "always": "always",
    "by layer": lambda layer: isinstance(layer, (Attention, FeedForward)),
    "selective": Selective([OPS.mm.default, OPS.addmm.default, OPS.bmm.default]),
    "offload": "offload",
}


def sizes(quick: bool) -> tuple[dict[str, int], tuple[int, int], tuple[int, int, int]]:
    """Of GPT-2 small, its cut, and words, length and number of sequences."""
    if quick:
        return {"layers": 2, "width": 64, "heads": 2, "vocabulary": 512}, (3, 4), (512, 64, 4)
    return {}, (17, 10), (50_257, 128, 4)


def measured(what: str, quick: bool) -> dict[str, Any]:
    """What a process of its own measures: simulated devices cannot be unloaded.

    Raises:
        SystemExit: it failed.
    """
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.memory", what, *["quick"] * quick],
        cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{what}: nothing measured\n{done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def build(options: Options) -> Part:
    """Peaks of making a pipe."""
    part = Part(
        "Building GPT-2 small",
        "Two devices; bytes of tensors that are alive at most, in MB; one run.",
        {
            "host": "on the host, while the model and the pipe are made.",
            "device 0": "on the first device, likewise; its parameters and buffers at least.",
        },
    )
    found = measured("build", options.quick)
    for row in found["rows"]:
        columns = {f"device {k}": peak / MB for k, peak in enumerate(row["device"])}
        part.rows.append({"built": row["way"], "host": row["host"] / MB, **columns})
    part.notes.append(f"Devices: {', '.join(found['devices'])}.")
    return part


def step(options: Options) -> Part:
    """Peaks of a training step of it."""
    found = measured("step", options.quick)
    _, balance, (_, length, rows) = sizes(options.quick)
    part = Part(
        "A step of GPT-2 small",
        f"Two devices ({', '.join(found['devices'])}), {balance[0]} and "
        f"{balance[1]} layers; {rows} sequences of {length} tokens in 4 micro-batches, float32. "
        "Bytes of tensors that are alive at most, in MB.",
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
            raise SystemExit(f"{mode}: not the gradients of never")
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


def built(quick: bool, places: list[torch.device]) -> list[dict[str, Any]]:
    """Host and device peaks of making the pipe, in each way."""
    size, balance, _ = sizes(quick)
    makers = gpt2_layers(**size)

    def whole() -> nn.Sequential:
        return nn.Sequential(*[make() for make in makers])

    def on_meta() -> nn.Sequential:
        with torch.device("meta"):
            return whole()

    ways: dict[str, Callable[[], Any]] = {
        "whole": whole,
        "meta": on_meta,
        "spec": lambda: [LayerSpec(make) for make in makers],
    }
    rows = []
    for name, make in ways.items():
        peaks = Peaks(places)
        with HostBytes() as host:
            pipe = Pipe(make(), balance, devices=places, chunks=CHUNKS)
            most = host.most
        rows.append({"way": name, "host": most, "device": peaks.now()})
        del pipe
    return rows


def stepped(quick: bool, places: list[torch.device]) -> list[dict[str, Any]]:
    """Host and device peaks of the second training step, for each driver and mode."""
    size, balance, text = sizes(quick)
    host, on_host = HostBytes(), offload._on_host

    def counted(size: int) -> torch.Tensor:
        copy = on_host(size)
        host.watch([copy])
        return copy

    offload._on_host = counted  # what a step has on the host is the copies
    rows = []
    for driver in DRIVERS:
        for name, mode in MODES.items():
            torch.manual_seed(0)
            model = nn.Sequential(*[make() for make in gpt2_layers(**size)])
            pipe = Pipe(model, balance, devices=places, chunks=CHUNKS, checkpoint=mode)
            x, target = sentences(*text)
            x, target = x.to(places[0]), target.to(places[-1])
            for _ in range(2):
                pipe.zero_grad()
                host.most = host.alive
                peaks = Peaks(places)
                if driver == "pipe(x)":
                    next_token(pipe(x), target).backward()
                else:
                    pipe.train_batch(x, target, loss_fn=next_token, schedule=driver)
                found = peaks.now()
            kept = [sum(2 * p.nbytes for p in part.parameters()) for part in pipe.partitions]
            if len(found) == 1:
                kept = [sum(kept)]
            gradients = sum(float(p.grad.double().sum().cpu()) for p in pipe.parameters())
            row = {"driver": driver, "mode": name, "host": host.most, "device": found}
            rows.append(row | {"kept": kept, "check": gradients})
            del pipe, x, target
    return rows


GROUP = Group("memory", "Memory of building a pipe, and of a step", {"build": build, "step": step})

if __name__ == "__main__":
    torch.manual_seed(0)
    places = devices()
    rows = {"build": built, "step": stepped}[sys.argv[1]]("quick" in sys.argv, places)
    print(json.dumps({"devices": [str(place) for place in places], "rows": rows}))
