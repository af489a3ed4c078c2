"""Memory: what making a pipe takes on the host and on the devices, and what a step takes.

GPT-2 small and ResNet-50 on two devices: ``build`` (the model made whole on the host, on ``meta``,
or layer by layer as specs), ``gpt2`` and ``resnet50`` (a step of it with nothing re-materialized,
whole cells, layers, all but some operations; with activations on the host). The devices are
accelerators; where there are none, simulated ones, whose memory is counted in the same way (they
need a C++ compiler, and the tests' folder).
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import Group, Options, Part
from benchmarks.memory.models import ENTRIES

__all__ = ["GROUP"]

MB = 1e6


def measured(model: str, what: str, quick: bool) -> dict[str, Any]:
    """What a process of its own measures.

    Raises:
        SystemExit: it failed.
    """
    order = json.dumps({"model": model, "what": what, "quick": quick})
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.memory.child", order],
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
    ways = set()
    for name, make in ENTRIES.items():
        entry, found = make(options.quick), measured(name, "build", options.quick)
        for row in found["rows"]:
            ways.add(row["way"])
            columns = {f"device {k}": peak / MB for k, peak in enumerate(row["device"])}
            part.rows.append(
                {"model": entry.name, "built": row["way"], "host": row["host"] / MB, **columns}
            )
    if ways == {"whole"}:
        part.notes.append("This version builds models whole only.")
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


GROUP = Group(
    "memory",
    "Memory of building a pipe, and of a step",
    __doc__,
    {"build": build, **{name: partial(step, name) for name in ENTRIES}},
)
