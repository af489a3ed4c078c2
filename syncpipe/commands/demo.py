"""Teaches a small ResNet to read handwritten digits through a pipe, on the devices at hand.

The data are real and come with scikit-learn. How to run it is planned, the first step is compared
with the plain model's, and in the end a step is timed beside it, and drawn.
"""

import argparse
import copy
import os
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from textwrap import fill, indent
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import syncpipe
from syncpipe import Pipe, Plan
from syncpipe.balance.profile import in_bytes
from syncpipe.commands.demo_check import compare, plain_step
from syncpipe.commands.demo_data import BATCH_SIZE, Digits, load_digits
from syncpipe.commands.demo_gain import held, median_times, threads
from syncpipe.commands.demo_model import BLOCKS, MOST_STAGES, crossing_skips, resnet
from syncpipe.commands.demo_options import default_devices
from syncpipe.commands.demo_training import train
from syncpipe.planner.alternatives import duration
from syncpipe.runtime.streams import accelerators
from syncpipe.timeline import save_comparison

__all__ = ["run"]

#: Images in the step that is planned and timed: with those of the training's mini-batches a CPU
#: worker has little to do for each hand-off, and an accelerator nothing.
CPU_BATCH, ACCELERATOR_BATCH = 256, 16_384
PLAN_SECONDS = 2.0
TIMED_SECONDS = 3.0
TRACED_STEPS = 5
MISSING = 'demo: {}; it needs scikit-learn and tqdm: pip install "syncpipe[demo]"'
NEXT = "Next: docs/guide.md wraps and trains your own model, docs/schedules.md reads the picture."
WIDTH = 96
NAMES = {"gpipe": "GPipe", "1f1b": "1F1B"}


@dataclass(frozen=True)
class Demo:
    """What the parts of the demo share.

    Attributes:
        digits: the data.
        devices: one for each stage.
        plan: how to run the model on them.
        pipe: the model, run so.
        plain: a copy of the model on the first device.
        all_threads: as many intra-op threads as PyTorch takes where nobody says how many.
    """

    digits: Digits
    devices: list[torch.device]
    plan: Plan
    pipe: Pipe
    plain: nn.Sequential
    all_threads: int

    @property
    def on_cpu(self) -> bool:
        return self.devices[0].type == "cpu"


def run(args: argparse.Namespace) -> int:
    """Run the demo.

    Returns:
        0, or 1 where an extra is missing or the first step is not the plain model's.
    """
    try:
        import tqdm  # noqa: F401  # asked for now, needed later

        digits = load_digits()
    except ImportError as error:
        print(MISSING.format(error), file=sys.stderr)
        return 1
    torch.manual_seed(args.seed)
    given = args.devices or default_devices()
    devices, all_threads = given[:MOST_STAGES], torch.get_num_threads()
    # A pipe's CPU workers share out the threads of its caller: that makes one for each.
    with threads(len(devices) if devices[0].type == "cpu" else all_threads):
        demo = _plan(args, digits, devices, len(given), all_threads)
        equal = _check(demo)
        _say(f"\n3. The training, by train_batch, in mini-batches of {BATCH_SIZE} images")
        train(demo.pipe, digits, args.epochs)
        speed_up = _gain(demo)
        _draw(demo, args.picture)
    _close(demo, speed_up)
    return 0 if equal else 1


def _plan(
    args: argparse.Namespace,
    digits: Digits,
    devices: list[torch.device],
    given: int,
    all_threads: int,
) -> Demo:
    n, on_cpu = len(devices), devices[0].type == "cpu"
    _say(f"syncpipe {syncpipe.__version__}: a small ResNet learns to read handwritten digits")
    _say("\n1. The plan, by syncpipe.plan, from what each layer takes here")
    model = resnet()
    plain = copy.deepcopy(model).to(devices[0])
    size = CPU_BATCH if on_cpu else ACCELERATOR_BATCH
    plan = syncpipe.plan(
        model,
        digits.many(size)[0],
        devices=devices,
        batch_size=size,
        stages=n,
        # With fewer 1F1B holds as much as GPipe; with more BatchNorm sees too few images in each.
        chunks=args.chunks or ([8] if n <= 2 else [8, 16]),
        timeout=PLAN_SECONDS,
        progress=False,
    )
    pipe = Pipe(model, **plan.options(), devices=devices)

    count = sum(parameter.numel() for parameter in model.parameters())
    crossing = crossing_skips(plan.balance)
    names = ", ".join(map(str, devices))
    if given > n:
        names += f" (the first {n} of {given}: the model is small)"
    elif on_cpu and args.devices is None:
        found = accelerators()
        names += f" ({found[0]} is alone" if found else " (no accelerator here"
        names += ": CPU workers of one thread each)"
    alone = [a.time for a in plan.alternatives if a.name == "one device" and a.time]
    _say(
        f"   model      {len(plain)} layers, {count:,} parameters, {len(BLOCKS)} skip connections: "
        f"{crossing} from stage to stage"
    )
    _say(f"   devices    {names}")
    _say(f"   balance    {plan.balance} layers")
    _say(
        f"   schedule   {NAMES[plan.schedule]}, {plan.chunks} micro-batches of "
        f"{size // plan.chunks} images"
    )
    _say(
        f"   predicted  {duration(plan.step_time)} a step, {plan.bubble:.1%} of it bubble"
        + "".join(f"; {duration(time)} on one device" for time in alone)
    )
    return Demo(digits, devices, plan, pipe, plain, all_threads)


def _check(demo: Demo) -> bool:
    """Whether the first step has the loss and the gradients of the plain model's."""
    _say("\n2. The check: a step of train_batch, and of the plain model on the same micro-batches")
    pipe, plain, device = demo.pipe, demo.plain, demo.devices[0]
    images, labels = (tensor.to(device) for tensor in demo.digits.many(BATCH_SIZE))
    loss = pipe.train_batch(images, labels, loss_fn=F.cross_entropy)
    last = demo.plan.simulation.schedule.actions[-1]
    order = [action.i for action in last if action.kind == "backward"]
    with threads(1):  # how many share a sum decides its last bit
        expected = plain_step(plain, images, labels, pipe.chunks, order)
    equal, verdict = compare(pipe, loss, plain, expected)
    _say(f"   {verdict}")
    return equal


def _gain(demo: Demo) -> float:
    """Measures what the pipe gains; returns how many times as fast as one device it is."""
    pipe, plain, n, m = demo.pipe, demo.plain, len(demo.devices), demo.pipe.chunks
    images, labels = (t.to(demo.devices[0]) for t in demo.digits.many(demo.plan.batch_size))
    slots = demo.plan.slots
    one = partial(_plain_step, plain, images, labels)
    ways = {
        "gpipe": partial(_pipe_step, pipe, images, labels, schedule="gpipe"),
        "1f1b": partial(_pipe_step, pipe, images, labels, schedule="1f1b", slots=slots),
    }
    count = n if demo.on_cpu else demo.all_threads
    steps: dict[str, Any] = {"plain": (1 if demo.on_cpu else count, one)}
    steps.update({name: (count, way) for name, way in ways.items()})
    if demo.on_cpu:
        steps["all threads"] = (demo.all_threads, one)
    times, rounds = median_times(steps, demo.devices, TIMED_SECONDS)
    memory = {"plain": held(one, [plain], demo.devices[:1])}
    memory |= {name: held(way, pipe.partitions, demo.devices) for name, way in ways.items()}

    what = "stored activations" if demo.on_cpu else "activations"
    _say(f"\n4. The gain: forward and backward of {len(labels)} images, median of {rounds} rounds")
    _say("   memory: parameters, gradients and " + what + ", on the device that holds most")
    _say(f"   {'':24}{'time':>10}{'speed-up':>12}{'memory':>12}")
    for name, title in {
        "plain": "plain model, 1 device",
        "gpipe": f"GPipe, {_devices(n)}",
        "1f1b": f"1F1B, {_devices(n)}",
    }.items():
        speed_up = times["plain"] / times[name]
        _say(
            f"   {title:24}{duration(times[name]):>10}{speed_up:>12.2f}{in_bytes(memory[name]):>12}"
        )
    _say(
        f"   {'ideal, n m / (m + n - 1)':24}{'':>10}{n * m / (m + n - 1):>12.2f}"
        f"   for n = {n} stages, m = {m} micro-batches"
    )
    if demo.on_cpu:
        _say(
            f"   With all {demo.all_threads} threads of this CPU the plain model takes "
            f"{duration(times['all threads'])}. No pipe of CPU workers needs to\n"
            "   beat that: a model can have all cores of a CPU to itself, but not several GPUs."
        )
    return times["plain"] / min(times["gpipe"], times["1f1b"])


def _plain_step(model: nn.Sequential, images: Tensor, labels: Tensor) -> None:
    model.zero_grad()
    F.cross_entropy(model(images), labels).backward()  # type: ignore[no-untyped-call]


def _pipe_step(pipe: Pipe, images: Tensor, labels: Tensor, **options: Any) -> None:
    pipe.zero_grad()
    pipe.train_batch(images, labels, loss_fn=F.cross_entropy, **options)


def _draw(demo: Demo, path: Path) -> None:
    """Draws a measured step above the planned one."""
    images, labels = (t.to(demo.devices[0]) for t in demo.digits.many(demo.plan.batch_size))
    traces = []
    for _ in range(TRACED_STEPS):
        with demo.pipe.trace() as trace:
            _pipe_step(demo.pipe, images, labels)
        traces.append(trace)
    measured = sorted(traces, key=lambda trace: trace.makespan)[len(traces) // 2]
    planned = demo.plan.timeline()
    both = {"measured, just now": measured, "simulated, as planned": planned}
    title = "\n5. The timeline of a step, measured above simulated"
    try:
        save_comparison(path, both)
    except (ImportError, OSError) as error:
        _say(f"{title} (no picture: {error})")
        _say(indent(measured.table(), "   "))
        _say(f"   simulated: {duration(planned.makespan)}, bubble {planned.bubble:.1%}")
        return
    _say(f"{title}: {path}")
    _say(
        f"   measured {duration(measured.makespan)}, bubble {measured.bubble:.1%}; "
        f"simulated {duration(planned.makespan)}, bubble {planned.bubble:.1%}"
    )


def _close(demo: Demo, speed_up: float) -> None:
    """Says what to read next, and before it why the pipe lost, if it did."""
    why = f"Here the pipe does not win: {_why_not(demo)}. " if speed_up <= 1 else ""
    _say("\n" + fill(f"{why}{NEXT}", WIDTH))


def _why_not(demo: Demo) -> str:
    n, cores = len(demo.devices), demo.all_threads
    if n == 1:
        return "with one device there is nothing to share"
    if demo.on_cpu and cores < n:
        return f"{n} workers have {cores} core{'s' * (cores > 1)} between them"
    load = os.getloadavg()[0]
    if demo.on_cpu and load > cores + 1:
        return f"other programs want this CPU as well (load {load:.1f} on {cores} cores)"
    cell = max(stage.forward for stage in demo.plan.stages)
    return (
        f"a stage has only {duration(cell)} to compute for a micro-batch, and handing it over "
        "takes time, too"
    )


def _devices(number: int) -> str:
    return f"{number} device{'s' * (number > 1)}"


def _say(text: str) -> None:
    print(text, flush=True)
