"""What schedules reach: wall time beside the ideal and beside the simulation.

Two parts: ``ideal`` (gpipe, 1f1b and zb_h1 on two workers, beside the plain loop and the ideal) and
``emulated`` (layers that sleep, wall time beside the simulated makespan). Everything is measured in
every round, in an order that changes from round to round, after it was seen to give the plain
loop's gradients. What a cell costs beside its layers is ``overhead``.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.common import Group, Options, Part, Spread, number, rounds, timed
from benchmarks.tasks import LOOP, Peer, Task, called, checked, mlp
from syncpipe.runtime.weight_gradients import PRODUCTS, add_to_grad
from syncpipe.schedules import build, one_f_one_b
from syncpipe.schedules.player import Costs, simulate

DEVICES = ("cpu:0", "cpu:1")
#: By label: schedule and slots.
SUBJECTS: dict[str, tuple[str, Any]] = {
    "gpipe": ("gpipe", None),
    "1f1b, textbook slots": ("1f1b", "textbook"),
    "1f1b, overlap slots": ("1f1b", "overlap"),
    "zb_h1": ("zb_h1", None),
}


# -- beside the ideal ------------------------------------------------------------------------------


class Halves:
    """The plain loops over the two halves of a model, which know nothing of each other.

    Together they do what the loop over the model does. Run at once, each on a thread of its own,
    they are what two cores give to two stages that never wait.
    """

    def __init__(self, task: Task) -> None:
        model, half = copy.deepcopy(task.model), task.balance[0]
        self._first, self._second = model[:half], model[half:]
        self._inputs, self._targets = task.x.chunk(task.chunks), task.target.chunk(task.chunks)
        hidden = [self._first(c).detach() for c in self._inputs]
        self._hidden = [h.requires_grad_() for h in hidden]
        self._back()
        self._grads = [h.grad.clone() for h in hidden if h.grad is not None]
        self._threads = ThreadPoolExecutor(2, "half", torch.set_num_threads, (1,))

    def jobs(self) -> dict[str, Callable[[], float]]:
        """To measure: each half alone, and both at once."""
        return {
            "first half alone": timed(lambda: self._run(self._forth)),
            "second half alone": timed(lambda: self._run(self._back)),
            "both halves at once": timed(lambda: self._run(self._forth, self._back)),
        }

    def _run(self, *loops: Callable[[], None]) -> None:
        for running in [self._threads.submit(loop) for loop in loops]:
            running.result()

    def _forth(self) -> None:
        self._first.zero_grad()
        for c, gy in zip(self._inputs, self._grads, strict=True):
            torch.autograd.backward(self._first(c), gy)

    def _back(self) -> None:
        self._second.zero_grad()
        for h, t in zip(self._hidden, self._targets, strict=True):
            h.grad = None
            (F.mse_loss(self._second(h), t) / len(self._hidden)).backward()  # type: ignore[no-untyped-call]


def ideal(options: Options) -> Part:
    """How near two CPU workers come to the ideal of their schedule."""
    sizes = (4, 64, 64) if options.quick else (8, 1024, 512)
    repeats, n, most = options.rounds(21), len(DEVICES), 1.08
    part = Part(
        "Two workers beside the ideal",
        f"{mlp(*sizes, 1).name}, two CPU workers with one intra-op thread each, "
        f"checkpoint='never'; {repeats} rounds.",
        {
            "ms": "one training step, from gradients of None; of the plain ones on one thread.",
            "over the loop": "time over that of the plain loop over the same micro-batches, on one "
            "thread, in the same round.",
            "over ideal": "time over (m+n-1)/(m n) of the plain loop's, n = 2: the ideal of 1F1B, "
            "which zb_h1 may go below.",
            "over measured ideal": "time over (m+n-1)/m of 'both halves at once', the ideal of two "
            "cores as they are.",
            "machine": "'both halves at once' over the longer of the two alone: 1 if the second "
            "core (and the memory they share) gives all it has, 2 if nothing.",
            "both halves at once": "the plain loops over the two halves of the model, with inputs "
            "and gradients that are there already, at the same time in two threads.",
        },
        notes=[
            "The first stage computes no gradient of its input, so the stages are about 11 to 12, "
            "not even. That is part of 'over ideal', and of 'both halves at once'."
        ],
    )
    for m in (4,) if options.quick else (8, 16):
        task = mlp(*sizes, m)
        peers = [
            task.trained(label, DEVICES, schedule=schedule, slots=slots)
            for label, (schedule, slots) in SUBJECTS.items()
        ]
        whole = Peer("", "plain full batch", "", "", called(task.model, task.loss))
        steps = {name: timed(step) for name, step in checked(task, [whole, *peers]).items()}
        samples = rounds({**steps, **Halves(task).jobs()}, repeats, f"ideal, m={m}")
        alone = list(map(max, samples["first half alone"], samples["second half alone"]))
        halves, ideals = samples["both halves at once"], (m + n - 1) / m
        for label, times in samples.items():
            row = {
                "m": m,
                "what": label,
                "ms": Spread.of([1e3 * took for took in times]),
                "over the loop": Spread.ratio(times, samples[LOOP]),
            }
            part.rows.append(row)
            if label == "both halves at once":
                row["machine"] = Spread.ratio(times, alone)
            if label in SUBJECTS:
                found = row["over ideal"] = Spread.ratio(times, samples[LOOP], ideals / n)
                real = row["over measured ideal"] = Spread.ratio(times, halves, ideals)
                told = f"{number(found.median)} times; {number(real.median)} the measured ideal"
                aim = f"{label}, {m} micro-batches: at most {most} times the ideal"
                part.aim(aim, found.median <= most, told)
    return part


# -- layers that sleep -----------------------------------------------------------------------------

Kinds = tuple[str, ...]
FORWARD, INPUT, WEIGHT = ("forward",), ("backward_input",), ("backward_weight",)
WHOLE = INPUT + WEIGHT


class Naps:
    """Layers sleep so many seconds for each sample and kind of work; which naps they took."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.taken: list[Kinds] = []

    def take(self, kinds: Kinds, samples: int) -> None:
        """One nap, for one kind of work or for several."""
        self.taken.append(kinds)
        time.sleep(self.seconds * len(kinds) * samples)


class NappingLinear(nn.Module):
    """A linear map that sleeps, so that eight stages fit on two cores.

    Forward takes one nap, a whole backward one that is twice as long. Where a zero-bubble schedule
    splits the backward, each half takes its own: :func:`splitting_naps` tells syncpipe how, as it
    splits linear maps and convolutions. So the runtime itself decides what runs in which half.
    """

    def __init__(self, width: int, naps: Naps, *, splits: bool = False) -> None:
        super().__init__()
        self.linear, self.naps = nn.Linear(width, width), naps
        self._function = _Napping if splits else _NappingWhole

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.linear.weight, self.linear.bias
        y: Tensor = self._function.apply(x, weight, bias, self.naps)  # type: ignore[no-untyped-call]
        return y


class _NappingWhole(torch.autograd.Function):
    """Forward and backward; in an input half nobody asks for the gradient of the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, naps: Naps) -> Tensor:
        ctx.x, ctx.naps = x.detach(), naps
        ctx.save_for_backward(weight)
        naps.take(FORWARD, len(x))
        return torch.addmm(bias, x, weight.t())

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        whole = torch._C._will_engine_execute_node(ctx.next_functions[1][0])
        ctx.naps.take(WHOLE if whole else INPUT, len(gy))
        return gy.mm(weight), gy.t().mm(ctx.x) if whole else None, gy.sum(0), None


class _Napping(_NappingWhole):
    """The same, which syncpipe may split."""


class _Product:
    """How (``syncpipe.runtime.weight_gradients.PRODUCTS``)."""

    factor, weight, bias = "x", 1, None

    def settings(self, node: Any) -> Naps:
        naps: Naps = node.naps
        return naps

    def accumulate(
        self, settings: Naps, gy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> None:
        settings.take(WEIGHT, len(gy))
        add_to_grad(weight, gy.t().mm(x))


@contextmanager
def splitting_naps() -> Iterator[None]:
    """In here syncpipe can split the backward of layers that nap."""
    PRODUCTS["_NappingBackward"] = _Product()
    try:
        yield
    finally:
        del PRODUCTS["_NappingBackward"]


# -- beside the simulation -------------------------------------------------------------------------

#: By label: schedule, slots, stages of a device, whether the backward of the layers can be split.
EMULATED: dict[str, tuple[str, str | None, int, bool]] = {
    "naive": ("naive", None, 1, True),
    "gpipe": ("gpipe", None, 1, True),
    "1f1b, textbook slots": ("1f1b", "textbook", 1, True),
    "1f1b, overlap slots": ("1f1b", "overlap", 1, True),
    "interleaved_1f1b, 2 stages each": ("interleaved_1f1b", None, 2, True),
    "zb_h1": ("zb_h1", None, 1, True),
    "zb_h1, layers that cannot be split": ("zb_h1", None, 1, False),
}


def napping(
    label: str, n: int, m: int, seconds: float
) -> tuple[Callable[[], float], float]:  # fmt: skip
    """A job of one schedule on its pipe, one sample in each micro-batch; its simulated makespan.

    Raises:
        SystemExit: gradients are wrong, or the naps are not those of the simulation.
    """
    name, slots, each, splits = EMULATED[label]
    device_of = [j % (n // each) for j in range(n)]
    kind: Any = name if slots is None else lambda m, n: one_f_one_b(m, n, slots=slots)
    schedule = build(kind, m, device_of)
    halves = m * n if schedule.splits and splits else 0
    naps = Naps(0.0)
    torch.manual_seed(0)
    model = nn.Sequential(*(NappingLinear(4, naps, splits=splits) for _ in range(n)))
    task = Task(model, *torch.randn(2, m, 4), F.mse_loss, m, [1] * n)
    devices = [f"cpu:{d}" for d in device_of]
    peer = task.trained(label, devices, schedule=name, slots=slots)
    step = checked(task, [peer])[label]
    naps.taken.clear()
    step()
    wanted = {FORWARD: m * n, WHOLE: m * n - halves, INPUT: halves, WEIGHT: halves}
    taken = {kinds: naps.taken.count(kinds) for kinds in wanted}
    if taken != wanted:
        raise SystemExit(f"{label}: took naps {taken}, not {wanted}; nothing measured")
    naps.seconds = seconds
    # A layer that cannot be split does all of its backward in the input half.
    costs = Costs.even(n, seconds, *((seconds, seconds) if halves else (2 * seconds, 0.0)))
    return timed(step), simulate(schedule, costs).makespan


def emulated(options: Options) -> Part:
    """Does a schedule take as long as its simulation says?"""
    n, m, seconds = (4, 4, 0.001) if options.quick else (8, 32, 0.004)
    repeats, most = options.rounds(7), 1.05
    ms = number(1e3 * seconds)
    part = Part(
        "Emulated devices",
        f"{n} stages of one layer that sleeps {ms} ms forward and {number(2e3 * seconds)} ms "
        f"backward (halves: {ms} and {ms} ms), {n} CPU workers, interleaved_1f1b {n // 2}; {m} "
        f"micro-batches; {repeats} rounds.",
        {
            "simulated ms": "makespan by syncpipe.schedules with exactly these times; transfers "
            "and sums of gradients take none.",
            "ms": "one training step by train_batch.",
            "over simulated": "time over the simulated makespan.",
            "zb_h1": "the layer comes with a rule by which syncpipe splits its backward; "
            "'layers that cannot be split' do all of it in the input half, and the simulation has "
            "the same.",
        },
    )
    with splitting_naps():
        found = {label: napping(label, n, m, seconds) for label in EMULATED}
        samples = rounds({label: job for label, (job, _) in found.items()}, repeats, "emulated")
    for label, times in samples.items():
        makespan = found[label][1]
        ratio = Spread.ratio(times, [makespan] * len(times))
        row = {"what": label, "simulated ms": 1e3 * makespan}
        row |= {"ms": Spread.of([1e3 * took for took in times]), "over simulated": ratio}
        part.rows.append(row)
        aim = f"{label}: at most {most} times the simulated makespan"
        part.aim(aim, ratio.median <= most, f"{number(ratio.median)} times")
    return part


GROUP = Group("schedules", "What schedules reach", {"ideal": ideal, "emulated": emulated})
