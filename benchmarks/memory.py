"""Memory: what making a pipe takes on the host and on the devices, and what a step takes.

GPT-2 small on two accelerators: ``build`` (the model made whole on the host, on ``meta``, or layer
by layer as specs) and ``step`` (nothing recomputed, whole cells, layers, all but some operations;
with activations on the host). With ``SYNCPIPE_SIMULATED=1`` in the environment they are simulated
ones, whose memory is counted in the same way (they need a C++ compiler, and the tests' folder).
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import nn

from benchmarks.common import Group, Options, Part
from benchmarks.counted import HostBytes
from benchmarks.models import Attention, FeedForward, gpt2_layers
from benchmarks.peers import next_token, sentences
from syncpipe import LayerSpec, Pipe, Selective
from syncpipe.stages import offload

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


def accelerators() -> list[torch.device]:
    """All there are."""
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    return [torch.device(kind.type, k) for k in range(torch.accelerator.device_count())]


def on_accelerators(run: Callable[[Options], Part]) -> Callable[[Options], Part]:
    """The part; where there are no accelerators, a note that says so."""

    def part(options: Options) -> Part:
        if torch.accelerator.is_available():
            return run(options)
        words = f"On accelerators: {run.__name__}", ""
        return Part(*words, notes=["Skipped: PyTorch finds no accelerator here."])

    return part


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


def places() -> list[torch.device]:
    """Two devices, or one twice."""
    return (accelerators() * 2)[:2]


def build(options: Options) -> Part:
    """Peaks of making a pipe, in each way."""
    part = Part(
        "Building GPT-2 small",
        f"Devices: {', '.join(map(str, places()))}; bytes of tensors that are alive at most, in "
        "MB; one run.",
        {
            "host": "on the host, while the model and the pipe are made.",
            "device 0": "on the first device, likewise; its parameters and buffers at least.",
        },
    )
    size, balance, _ = sizes(options.quick)
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
    for name, make in ways.items():
        peaks = Peaks(places())
        with HostBytes() as host:
            pipe = Pipe(make(), balance, devices=places(), chunks=CHUNKS)
            most = host.most
        columns = {f"device {k}": peak / MB for k, peak in enumerate(peaks.now())}
        part.rows.append({"built": name, "host": most / MB, **columns})
        del pipe
    return part


def step(options: Options) -> Part:
    """Peaks of the second training step, for each driver and mode."""
    size, balance, text = sizes(options.quick)
    first, last = places()
    part = Part(
        "A step of GPT-2 small",
        f"Two devices ({first}, {last}), {balance[0]} and {balance[1]} layers; {text[2]} sequences "
        f"of {text[1]} tokens in {CHUNKS} micro-batches, float32. Bytes of tensors that are alive "
        "at most, in MB.",
        {
            "device 0": "on the first device, beyond its parameters and their gradients.",
            "host": "in copies of activations on the host.",
            "of never": "device 0 and device 1 together, over those of never.",
        },
    )
    host, on_host = HostBytes(), offload._on_host

    def counted(size: int) -> torch.Tensor:
        copy = on_host(size)
        host.watch([copy])
        return copy

    for driver in DRIVERS:
        base = check = None
        for name, mode in MODES.items():
            torch.manual_seed(0)
            model = nn.Sequential(*[make() for make in gpt2_layers(**size)])
            pipe = Pipe(model, balance, devices=places(), chunks=CHUNKS, checkpoint=mode)
            x, target = sentences(*text)
            x, target = x.to(first), target.to(last)
            with mock.patch.object(offload, "_on_host", counted):  # the host has the copies alone
                for _ in range(2):
                    pipe.zero_grad()
                    host.most = host.alive
                    peaks = Peaks([first, last])
                    if driver == "pipe(x)":
                        next_token(pipe(x), target).backward()
                    else:
                        pipe.train_batch(x, target, loss_fn=next_token, schedule=driver)
                    found = peaks.now()
            kept = [sum(2 * p.nbytes for p in part.parameters()) for part in pipe.partitions]
            kept = kept if len(found) > 1 else [sum(kept)]
            gradients = sum(float(p.grad.double().sum().cpu()) for p in pipe.parameters())
            if check is not None and gradients != check:
                raise SystemExit(f"{name}: not the gradients of never")
            beyond = [max(0, a - b) / MB for a, b in zip(found, kept, strict=True)]
            base, check = sum(beyond) if base is None else base, gradients
            row = {"driver": driver, "checkpoint": name, "host": host.most / MB}
            row |= {f"device {k}": peak for k, peak in enumerate(beyond)}
            part.rows.append(row | {"of never": sum(beyond) / base})
            del pipe, model, x, target
    part.notes += [
        f"Parameters and gradients, on top of this: {', '.join(f'{k / MB:.0f}' for k in kept)} MB.",
        "The sum of all gradients is the same to the last bit in every row of a driver.",
    ]
    return part


GROUP = Group(
    "memory",
    "Memory of building a pipe, and of a step",
    {"build": on_accelerators(build), "step": on_accelerators(step)},
)
