"""All that a machine with accelerators is for, in parts of some minutes each.

``tests1`` to ``tests4`` (tests marked ``gpu`` or ``cuda``, under PyTorch's sanitizer for streams),
``overhead`` (what a cell costs), ``workers`` (one and two workers on a device, and several
devices), ``memory`` (peaks of the schedules beside the planned ones), ``plan`` (the planner's step
beside the measured one), and the peers. To see that everything runs, ``SYNCPIPE_SIMULATED=1`` in
the environment gives them the devices of the tests.
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Group, Options, Part, Spread, timed
from benchmarks.memory import MB, Peaks, accelerators, on_accelerators
from benchmarks.peers import GPU_PARTS, measured
from benchmarks.planning import PREDICTED, beside_measured
from benchmarks.tasks import Peer, Task, check, linears, mlp, ours, plain
from syncpipe import Worker
from syncpipe.balance import profile
from syncpipe.planner.chain import Chain, Mode, ends_of
from syncpipe.schedules import build

ROOT = Path(__file__).parents[1]
SLICES = 4

# -- tests ----------------------------------------------------------------------------------------


def tests(number: int) -> Callable[[Options], Part]:
    """A part of the tests for accelerators, each file in a process of its own."""

    def run(options: Options) -> Part:
        files = sorted(
            str(path.relative_to(ROOT))
            for path in (ROOT / "tests").rglob("test_*.py")
            if any(f"pytest.mark.{mark}" in path.read_text("utf-8") for mark in ("gpu", "cuda"))
            and path.stem not in ("test_simulated", "test_suite")
        )
        environment = dict(os.environ)
        if torch.cuda.is_available():
            environment["TORCH_CUDA_SANITIZER"] = "1"
        part = Part(
            f"Tests for accelerators, {number} of {SLICES}",
            "Under PyTorch's sanitizer for streams, where CUDA is.",
        )
        command = [sys.executable, "-m", "pytest", "-n0", "-q", "--tb=line", "-m", "gpu or cuda"]
        command += ["-p", "no:cacheprovider", *["--collect-only"] * options.quick]
        for file in files[number - 1 :: SLICES][: 1 if options.quick else None]:
            done = subprocess.run(
                [*command, file], cwd=ROOT, capture_output=True, text=True, check=False,
                env=environment,
            )  # fmt: skip
            lines = done.stdout.strip().splitlines() or [done.stderr[-300:]]
            part.rows.append({"file": file, "result": lines[-1].strip("= ")})
            part.notes += [line for line in lines if line.startswith(("FAILED", "ERROR"))]
            told = f"pytest ended with {done.returncode}"
            part.aim(f"{file} passes", done.returncode in (0, 5), told)
        return part

    run.__name__ = f"tests{number}"
    return run


# -- time -----------------------------------------------------------------------------------------


def overhead(options: Options) -> Part:
    """Layers that compute next to nothing."""
    task = linears(4, 8, 64, 4 if options.quick else 16)
    return _timed("Overhead", task, options, 1 if options.quick else 20)


def workers(options: Options) -> Part:
    """Layers of real size."""
    task = mlp(4, 64, 32, 4) if options.quick else mlp(8, 4096, 4096, 8)
    return _timed("One worker and several", task, options, 1)


def _timed(title: str, task: Task, options: Options, times: int) -> Part:
    devices = accelerators()
    first = devices[0]
    task = task.to(first)
    places: dict[str, list[Any]] = {
        "1 worker": [first] * 2,
        "2 workers on one device": [Worker(first), Worker(first)],
    }
    if len(devices) > 1:
        places["2 devices"] = devices[:2]
    loop = plain(task)[0]
    expected = task.outcome(loop)
    found = [replace(loop, time=_waiting(task, loop, times))]
    for place, where in places.items():
        last = devices[1] if place == "2 devices" else first
        each = replace(task, model=copy.deepcopy(task.model), target=task.target.to(last))
        for peer in ours(each, {place: where}, ("never",)):
            check(peer.label, each.outcome(peer), expected)
            found.append(replace(peer, time=_waiting(each, peer, times)))
    cell = "over micro-batches and two stages; of the plain loop as well, which has one."
    part = Part(title, f"{task.name}, {task.chunks} micro-batches, {first}", {"us/cell": cell})
    for row in measured(part, task, found, options.rounds(9), title):
        per_cell = [1e3 * took / (2 * task.chunks) for took in row["ms"].samples]
        row["us/cell"] = Spread.of(per_cell)
    return part


def _waiting(task: Task, peer: Peer, times: int) -> Callable[[], float]:
    """Measures steps, each until the devices are through."""
    return timed(lambda: (task.step(peer), synchronize()), times)


def synchronize() -> None:
    """Waits for all of them."""
    for device in accelerators():
        torch.accelerator.synchronize(device)


# -- memory ---------------------------------------------------------------------------------------


def memory(options: Options) -> Part:
    """Peaks of a step, measured and planned."""
    devices = accelerators()[:2]
    width, samples, m = (64, 64, 4) if options.quick else (2048, 4096, 8)
    n, task = len(devices), mlp(8, width, m * samples, m, len(devices))
    part = Part(
        "Memory of the schedules",
        f"{task.name}, {m} micro-batches, {n} devices; MB of all tensors, no optimizer.",
        {"planned": "Chain.memory; an allocator rounds, and a GPU has workspaces of its kernels."},
    )
    empty = Peaks(devices).now()
    found = profile(task.model, task.x, sizes=[samples], time=False, device="meta")
    chain = Chain.of(found, samples, 2.0, m * samples)
    for schedule, checkpoint in product(("gpipe", "1f1b", "zb_h1"), ("never", "always")):
        pipe = replace(task, model=copy.deepcopy(task.model)).pipe(devices, checkpoint)
        x, target = task.x.to(devices[0]), task.target.to(devices[-1])
        for _ in range(2):
            pipe.zero_grad()
            peaks = Peaks(devices)
            pipe.train_batch(x, target, loss_fn=task.loss, schedule=schedule)
            measured = peaks.now()
        slots = build(schedule, m, range(n)).in_flight
        again: Mode = "recompute" if checkpoint == "always" else "store"
        for s, ends in enumerate(ends_of(task.balance)):
            planned = chain.memory(*ends, slots[s], slots[0], again)
            planned += target.nbytes * (s == n - 1)
            most = measured[s] - empty[s]
            row: dict[str, Any] = {
                "schedule": schedule,
                "checkpoint": checkpoint,
                "device": str(devices[s]),
            }
            row |= {"measured": most / MB, "planned": planned / MB, "over planned": most / planned}
            part.rows.append(row)
        del pipe, x, target
    return part


# -- planning -------------------------------------------------------------------------------------


def planned(options: Options) -> Part:
    """The planner's step, and the measured one."""
    devices = accelerators()
    task = mlp(4, 64, 32, 4) if options.quick else mlp(12, 4096, 4096, 8)
    part = Part("Planned and measured", f"{task.name}, {len(devices)} devices", PREDICTED)
    more = {"memory": "1GB", "bandwidth": "10GB/s"} if options.quick else {}
    beside_measured(part, "MLP", task.to(devices[0]), devices, options, synchronize, **more)
    return part


GROUP = Group(
    "gpu",
    "On a machine with accelerators",
    {
        **{f"tests{k}": on_accelerators(tests(k)) for k in range(1, SLICES + 1)},
        "overhead": on_accelerators(overhead),
        "workers": on_accelerators(workers),
        "memory": on_accelerators(memory),
        "plan": on_accelerators(planned),
        **{name.replace("gpu", "peers"): run for name, run in GPU_PARTS.items()},
    },
    one_thread=False,
)
