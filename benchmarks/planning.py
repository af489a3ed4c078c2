"""Planning: how good plans are, how long they take, and whether predictions come true.

Four parts: ``brute`` (plans beside the best of all, in small cases), ``stored`` (plans of chains of
24 to 1000 layers beside those of commit 507340f, and how long they take), ``monotone`` (plans for
memory that grows) and ``predicted`` (planned beside measured steps on two CPU workers). What stood
here besides is no longer kept: other ways to run a model, layers that sleep, a model of 7 billion
parameters and time by size until commit 680da9d, cuts and plans beside torchgpipe's until c42da67,
planned beside counted memory (which a test compares now) until df8e3ad. What they found is in
``benchmarks/results``.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, combinations, combinations_with_replacement, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import syncpipe
from benchmarks.common import Group, Options, Part, Spread, rounds, timed
from benchmarks.peers import linear_task, resnext_task, transformer_task
from benchmarks.tasks import LOOP, Peer, Task, check, plain, trained
from syncpipe import Pipe
from syncpipe.balance.profile import LayerProfile, Profile, SkipProfile
from syncpipe.planner.candidates import Problem, one_f_one_b_shape
from syncpipe.planner.chain import Chain, chunk_counts, doubles, within
from syncpipe.planner.cuts import least_largest
from syncpipe.planner.machine import Machine
from syncpipe.planner.search import search

#: Of a parameter: itself, its gradient and Adam's state.
PARAM_SCALE = 4.0
#: The sizes of micro-batches that random profiles know; between them all is linear.
SIZES = (1, 512)
#: Seconds that a layer takes for no sample at all: launching kernels, Python.
LAUNCH = 20e-6
KINDS = ("no limit", "tight", "tight, slow links", "tight, unlike devices", "prime mini-batches")
TASKS = {"MLP": linear_task, "ResNeXt": resnext_task, "transformer": transformer_task}


def random_profile(layers: int, seed: str, *, skips: int = 0) -> Profile:
    """A profile with lognormal times and sizes, of the order of a CNN's on a large GPU.

    Of each layer one sample takes 0.05 ms forward (median; sigma 1) besides what the layer takes
    for none, and 1 to 2.5 times as long backward; its output has 0.4 MB, it stores 1 to 2 times
    as much, and it has 2 MB of parameters.

    Args:
        layers: how many.
        seed: the same one gives the same profile.
        skips: how many there are, each from any layer to any later one.
    """
    draw = random.Random(f"{seed}/{layers}")

    def linear(each: float, fixed: float = 0.0) -> dict[int, float]:
        return {size: fixed + each * size for size in SIZES}

    drawn, outputs = [], []
    for index in range(layers):
        forward, output = draw.lognormvariate(math.log(50e-6), 1), draw.lognormvariate(12.9, 1)
        back = draw.uniform(1, 2.5)
        outputs.append(linear(output))
        drawn.append(
            LayerProfile(
                name=str(index),
                forward=linear(forward, LAUNCH),
                backward=linear(back * forward, back * LAUNCH),
                output_bytes=outputs[-1],
                stored_bytes=linear(draw.uniform(1, 2) * output),
                parameter_bytes=int(draw.lognormvariate(math.log(2e6), 1)),
            )
        )
    crossing = []
    for index in range(skips):
        stash, pop = sorted(draw.sample(range(layers), 2))
        crossing.append(SkipProfile(f"skip {index}", stash, pop, outputs[stash]))
    return Profile(tuple(drawn), tuple(crossing), input_bytes=linear(6e5))


# -- beside the best of all ------------------------------------------------------------------------


def case(kind: str, seed: int) -> tuple[Profile, Machine, int]:
    """A random one: 2 to 6 layers, 2 to 4 devices, a mini-batch of up to 12 samples."""
    draw = random.Random(f"brute {kind} {seed}")
    several = draw.random() < 0.5  # sizes of micro-batches that were measured

    def linear(each: float, fixed: float) -> dict[int, float]:
        return {1: fixed + each, 16: fixed + 16 * each} if several else {4: 4 * each}

    layers = []
    for index in range(draw.randint(2, 6)):
        forward, size = draw.lognormvariate(0, 0.7), draw.lognormvariate(0, 0.7)
        back = draw.uniform(1, 2.5)
        layers.append(
            LayerProfile(
                name=str(index),
                forward=linear(forward, draw.uniform(0, 0.5)),
                backward=linear(back * forward, draw.uniform(0, 0.5)),
                output_bytes=linear(size, 0),
                stored_bytes=linear(draw.uniform(1, 4) * size, 0),
                parameter_bytes=draw.randint(0, 2),
            )
        )
    batch = draw.choice((5, 7, 11)) if kind == "prime mini-batches" else draw.choice((4, 6, 8, 12))
    profile, n = Profile(tuple(layers)), draw.randint(2, 4)
    whole = sum(layer.stored_bytes[profile.sizes[-1]] for layer in layers) / profile.sizes[-1]
    fixed = sum(layer.memory(PARAM_SCALE) for layer in layers)
    limit = math.inf
    if kind != "no limit":
        limit = (whole * batch * draw.uniform(0.1, 0.8) + fixed * draw.uniform(1, 2)) / n
    rate = draw.uniform(0.3, 3) if kind == "tight, slow links" else draw.uniform(2, 20)
    machine = Machine.even(n, limit, rate)
    if kind == "tight, unlike devices":
        memory = [limit * draw.choice((0.7, 1, 2)) for _ in range(n)]
        speed = tuple(draw.choice((0.5, 1.0, 2.0)) for _ in range(n))
        machine = Machine(tuple(memory), machine.bandwidth, speed=speed)
    return profile, machine, batch


def everything(profile: Profile, machine: Machine, batch: int) -> Iterator[float]:
    """The step times of all plans that fit: any cut, number of micro-batches and slots."""
    problem = Problem(profile, machine, batch, PARAM_SCALE)
    count = len(profile.layers)
    for m in chunk_counts(batch):
        for n in range(1, min(count, len(machine)) + 1):
            for borders in combinations(range(1, count), n - 1):
                balance = tuple(b - a for a, b in pairwise((0, *borders, count)))
                some = combinations_with_replacement(range(m, 0, -1), n)
                for slots in some if n > 1 else [(1,)]:
                    candidate = problem.evaluate(one_f_one_b_shape(m, slots), balance)
                    if candidate is not None and candidate.excess <= 1:
                        yield candidate.time


def compared(profile: Profile, machine: Machine, batch: int) -> float | None:
    """The time of the plan over the best; None if nothing fits."""
    best = min(everything(profile, machine, batch), default=math.inf)
    found = search(Problem(profile, machine, batch, PARAM_SCALE))
    assert bool(found) == (best < math.inf)
    return found[0].time / best if found else None


def brute(options: Options) -> Part:
    """Counts how often it is the best."""
    from tqdm import tqdm

    count = 3 if options.quick else 100
    part = Part(
        "Plans beside the best of all",
        f"{count} random profiles of each kind: 2 to 6 layers, 2 to 4 devices, mini-batches of 4 "
        "to 12 samples, half of them measured with one size and half with two. All are tried: "
        "every cut, number of stages and of micro-batches, 1F1B with any slots, no stage with more "
        "than the one before it. Everything is predicted, nothing measured.",
        {
            "plans": "counted: the cases where something fits.",
            "optimal": "counted: the plan is as fast as the best of all, but for rounding.",
            "mean, worst": "predicted: step time of the plan over that of the best of all.",
        },
        over="Over all cases where something fits.",
    )
    every: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for kind, seed in tqdm([*itertools.product(KINDS, range(count))], "brute force", disable=None):
        ratio = compared(*case(kind, seed))
        if ratio is not None:
            every[kind].append(ratio)
    every["all"] = [ratio for ratios in every.values() for ratio in ratios]
    for kind, ratios in every.items():
        optimal = sum(ratio <= 1 + 1e-9 for ratio in ratios) / len(ratios)
        row = {"cases": kind, "plans": len(ratios), "optimal": f"{optimal:.2%}"}
        part.rows.append(row | {"mean": math.fsum(ratios) / len(ratios), "worst": max(ratios)})
    part.aim("99 % of them optimal", optimal >= 0.99, f"{optimal:.2%}")
    part.aim("the worst 1.02", max(every["all"]) <= 1.02, f"{max(every['all']):.4f}")
    return part


# -- PipeDream's formula ---------------------------------------------------------------------------


def pipedream(
    profile: Profile, machines: int, bandwidth: float, *, samples: int
) -> tuple[tuple[int, int, int], ...]:
    """The stages and replicas that minimize PipeDream's formula exactly, as results/papers.md has.

    With ``A(i, m)`` the time for the layers from ``i`` on, on ``m`` machines::

        T(i..j, m) = 1/m max( sum T_l, 4 (m-1) sum |w_l| / (m bandwidth) )
        A(i, m) = min( T(i..L, m), min max( T(i..j, m'), 2 a_i / (bandwidth m'), A(j, m-m') ) )
                                   j, m'

    ``T_l`` is the time of forward and backward of layer ``l``, ``a_i`` the bytes of activations
    that cross the cut (gradients of the same size come back), and ``|w_l|`` the bytes of trained
    parameters. Each replica is a server for an m-th of the parameters: it sends all other
    gradients, receives its own, and does the same with the new parameters, 4 (m-1)/m of the bytes
    in total. Ties are decided by fewer stages, then by fewer bytes between stages.

    Sources: Harlap et al. 2018, PipeDream: Fast and Efficient Pipeline Parallel DNN Training, and
    Narayanan et al. 2019, PipeDream: Generalized Pipeline Parallelism for DNN Training, section
    3.1.

    Args:
        profile: the costs of the layers. A skip counts at every cut that it crosses.
        machines: the number of machines; all are used.
        bandwidth: bytes per second of a machine's network; ``math.inf`` for no transfer time.
        samples: the samples in the mini-batch of one machine.

    Returns:
        For each stage its first layer, the layer after its last, and its number of machines.
    """
    profile = profile.of(samples)
    chain, number = Chain.of(profile, samples, 1.0), len(profile.layers)
    trained = (float(x.parameter_bytes - x.frozen_bytes) for x in profile.layers)
    work, weights = doubles(chain.sums["time"]), doubles(accumulate(trained, initial=0.0))
    crossing, ends = doubles([0.0, *chain.inputs[1:number]]), within(number, number)
    for stash, pop, size in chain.skips:
        crossing[stash + 1 : pop + 1] += size

    def cost(m: int) -> Tensor:
        """The time of stages on ``m`` machines: the longest of computing, exchange, transfer."""
        exchanged = 4 * (m - 1) * (weights[ends] - weights[:-1, None]) / (m * bandwidth) / m
        sent = 2 * crossing[:, None] / (bandwidth * m)
        return torch.maximum(torch.maximum((work[ends] - work[:-1, None]) / m, exchanged), sent)

    costs = [cost(m) for m in range(1, machines + 1)]
    least, _ = least_largest(ends, machines, machines, lambda _, m: costs[m - 1])(machines)
    # Among costs that are equal up to rounding: the fewest stages, and then the fewest bytes.
    limit = least * (1 + 1e-12)
    each = 1 + crossing[:, None] / (2 * float(crossing.sum()) or 1.0)
    counted = [each.masked_fill(cost > limit, math.inf) for cost in costs]
    return least_largest(
        ends, machines, machines, lambda _, m: counted[m - 1], lambda own, after, _: own + after
    )(machines)[1]


# -- beside other plans ----------------------------------------------------------------------------


#: Adam's, but for rounding: from 4 on the optimizer's step is counted.
_NO_STEP = math.nextafter(PARAM_SCALE, 0)


def planned(profile: Profile, n: int, memory: float, **more: Any) -> tuple[float, float, float]:
    """Step time, the most memory of a stage, seconds of the processor; infinite if none fits."""
    begin = time.process_time()
    try:
        found = syncpipe.plan(profile, devices=Machine.even(n, memory, 12e9), **more)
    except ValueError:
        return math.inf, math.inf, time.process_time() - begin
    most = max(stage.memory for stage in found.stages)
    return found.step_time, most, time.process_time() - begin


def stored(options: Options) -> Part:
    """Plans of chains beside those that are stored."""
    old = json.loads((Path(__file__).parent / "results/plans_507340f.json").read_text())
    part = Part(
        "Plans beside those of commit 507340f",
        "Random profiles, mini-batches of 512, 12 GB/s; limits on memory are parts of what the "
        "largest stage took without a limit at that commit. Memory is counted as then: without the "
        "mini-batch's input and the optimizer's step, but with the gradients of skips where they "
        "wait, which were not counted.",
        {
            "limits": "none, 0.7, 0.5, 0.35.",
            "over stored": "step time over the stored plan's, for each limit.",
            "cpu s": "seconds of the processor that planning took, for each limit.",
        },
        over="One run.",
    )
    every: list[float] = []
    sizes = (
        ((24, 1),) if options.quick else ((24, 3), (50, 3), (100, 3), (200, 3), (400, 1), (1000, 1))
    )
    for layers, seeds in sizes:
        for seed, skips in itertools.product(range(seeds), (0,) if options.quick else (0, 20)):
            draw = random.Random(f"{layers} {seed}")
            n, chunks = draw.choice((4, 8, 16)), draw.choice((None, 16))
            profile = random_profile(layers, f"x{seed}", skips=skips)
            profile = replace(profile, input_bytes=dict.fromkeys(profile.input_bytes, 0))
            name = f"{layers} layers, {skips} skips, x{seed}"
            ratios, seconds = [], []
            for limit in (math.inf, 0.7, 0.5, 0.35)[: 2 if options.quick else 4]:
                memory = math.inf if limit == math.inf else limit * old[f"{name}, inf"]["memory"]
                step, _, took = planned(
                    profile, n, memory, batch_size=512, chunks=chunks, param_scale=_NO_STEP
                )
                then = old[f"{name}, {limit}"]["step"]
                ratios.append(1.0 if step == then else step / then)
                seconds.append(took)
            every += ratios
            row = {"chain": name, "devices": n, "micro-batches": chunks or "free"}
            row["over stored"] = ", ".join(f"{ratio:.4f}" for ratio in ratios)
            part.rows.append(row | {"cpu s": ", ".join(f"{took:.2f}" for took in seconds)})
    slower = sum(ratio > 1.01 for ratio in every)
    told = f"{slower} of {len(every)}, {min(every):.4f} at best"
    part.aim("at most 2 % of them slower by more than 1 %", slower <= 0.02 * len(every), told)
    part.aim("none by more than 3 %", max(every) <= 1.03, f"{max(every):.4f}")
    return part


def monotone(options: Options) -> Part:
    """Counts plans that are slower though they have more memory."""
    part = Part(
        "Plans for memory that grows",
        "Chains of 12 to 40 layers, a third with skips; from 0.15 of what a stage takes without a "
        "limit, in steps of 6 %.",
        over="One run.",
    )
    worse = compared = 0
    for seed in range(1 if options.quick else 25):
        draw = random.Random(f"memory {seed}")
        layers, skips = draw.randint(12, 40), 5 * (seed % 3 == 0)
        profile = random_profile(layers, f"memory {seed}", skips=skips)
        n, chunks = draw.choice((3, 4, 6)), draw.choice((None, 8, 16))
        free = planned(profile, n, math.inf, batch_size=128, chunks=chunks)[1]
        limits = [free * 0.15 * 1.06**k for k in range(4 if options.quick else 37)]
        times = [planned(profile, n, m, batch_size=128, chunks=chunks)[0] for m in limits]
        ratios = [b / a for a, b in pairwise(times) if a < math.inf]
        compared, worse = compared + len(ratios), worse + sum(r > 1.005 for r in ratios)
        row = {"layers": layers, "skips": skips, "devices": n, "comparisons": len(ratios)}
        part.rows.append(row | {"worst": max(ratios, default=1.0)})
    part.aim("none slower by more than 0.5 %", worse == 0, f"{worse} of {compared}")
    return part


# -- beside measured steps -------------------------------------------------------------------------


def beside_measured(
    part: Part, name: str, task: Task, devices: Sequence[Any], options: Options,
    wait: Callable[[], Any] = lambda: None, **more: Any,
) -> None:  # fmt: skip
    """Plans a task, and measures the plan and the plain loop: a row for each."""
    repeats, quick = options.rounds(9), options.quick
    plan = syncpipe.plan(
        task.model, task.x, devices=devices, batch_size=len(task.x), progress=False,
        timeout=0.02 if quick else 5.0, **more,
    )  # fmt: skip
    one = Chain.of(plan.profile, plan.batch_size / plan.chunks, PARAM_SCALE)
    alone = one.sums["time"][-1] * plan.chunks
    task = replace(task, chunks=plan.chunks)
    pipe = Pipe(copy.deepcopy(task.model), **plan.options(), devices=plan.devices)
    target = task.target.to(pipe.devices[-1])
    step = trained(pipe, task.loss)
    peer = Peer("", "the plan", "", "", lambda x, _: step(x.to(pipe.devices[0]), target))

    def job(run: Callable[[], Any]) -> Callable[[], float]:
        take = timed(lambda: (run(), wait()))

        def second() -> float:  # the caches are those of a training, not of another job
            run()
            wait()
            return take()

        return second

    loop, planned = plain(task)[0], replace(task, model=pipe)
    check(peer.how, planned.outcome(peer), task.outcome(loop))
    jobs = {LOOP: job(partial(task.step, loop)), peer.how: job(partial(planned.step, peer))}
    samples = rounds(jobs, repeats, name)
    for label, predicted in ((LOOP, alone), ("the plan", plan.step_time)):
        row = {"model": name, "what": label, "micro-batches": plan.chunks}
        if label != LOOP:
            row |= {"run": plan.schedule, "balance": "-".join(map(str, plan.balance))}
        row["predicted ms"] = 1e3 * predicted
        row["measured ms"] = Spread.of([1e3 * took for took in samples[label]])
        times = samples[label]
        row["measured / predicted"] = Spread.ratio(times, [predicted] * len(times))
        part.rows.append(row)


PREDICTED = {
    "predicted ms": "the simulated step; of the plain loop the sum of the profile. Loss and "
    "optimizer are not in it.",
    "measured ms": "train_batch into gradients of None, with the loss, without an optimizer.",
}


def predicted(options: Options) -> Part:
    """Planned beside measured steps."""
    part = Part(
        "Predicted and measured: pipes on two CPU workers",
        "syncpipe.plan(model, sample), which profiles with one intra-op thread; then the plan, run "
        f"by Pipe(**plan.options()) with one intra-op thread each; {options.rounds(9)} rounds.",
        PREDICTED,
        notes=["Two processors that both compute slow each other down; the planner knows none."],
    )
    for name, make in TASKS.items():
        task = make(options.quick)
        beside_measured(part, name, task, ["cpu:0", "cpu:1"], options, chunks=(4, 8))
    return part


GROUP = Group(
    "planning",
    "What planning takes, and what plans are worth",
    {"brute": brute, "stored": stored, "monotone": monotone, "predicted": predicted},
)
