"""Planned memory is what is counted while a pipe trains."""

from __future__ import annotations

import copy
import gc
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import syncpipe
from syncpipe import Pipe
from syncpipe.balance import LayerProfile, Profile, profile
from syncpipe.planner.by_layer import ways
from syncpipe.planner.candidates import Problem, ScheduleShape, one_f_one_b_shape
from syncpipe.planner.chain import Chain, Mode, ends_of
from syncpipe.planner.machine import Machine, machine_of
from syncpipe.schedules import build
from tests.support import accelerator as acc

CHUNKS, SAMPLES = 6, 8
MODES: list[Mode] = ["store", "recompute"]


def mlp() -> tuple[nn.Sequential, Tensor]:
    widths = [64, 256, 128, 512, 64, 256, 8]
    layers = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.GELU())]
    return nn.Sequential(*layers), torch.rand(CHUNKS * SAMPLES, 64)


def conv_net() -> tuple[nn.Sequential, Tensor]:
    layers: list[nn.Module] = []
    for a, b in pairwise([3, 16, 16, 32]):
        layers += [nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU()]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 8)]
    return nn.Sequential(*layers), torch.rand(CHUNKS * SAMPLES, 3, 12, 12)


def transformer() -> tuple[nn.Sequential, Tensor]:
    blocks = [
        nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True) for _ in range(4)
    ]
    return nn.Sequential(*blocks, nn.Linear(64, 8)), torch.rand(CHUNKS * SAMPLES, 16, 64)


class UNet(nn.Module):
    """One wide skip around a narrow middle."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.down = nn.Linear(16, 512), nn.Linear(512, 32)
        self.body = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.up, self.head = nn.Linear(32, 512), nn.Linear(512, 8)

    def forward(self, x: Tensor) -> Tensor:
        a = torch.tanh(self.stem(x))
        y = self.down(a)
        for layer in self.body:
            y = torch.tanh(layer(y))
        return self.head(self.up(y) + a)


class Tied(nn.Module):
    """The first weight and the last are one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(256, 64), nn.Linear(64, 256, bias=False)
        self.body = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.body:
            x = torch.tanh(layer(x))
        return self.head(x)


def unet() -> tuple[nn.Sequential, Tensor]:
    x = torch.rand(CHUNKS * SAMPLES, 16)
    return syncpipe.sequential(UNet(), x[:SAMPLES]), x


def tied() -> tuple[nn.Sequential, Tensor]:
    x = torch.randint(0, 256, (CHUNKS * SAMPLES, 16))
    return syncpipe.sequential(Tied(), x[:SAMPLES]), x


def peaks(
    layers: nn.Sequential, x: Tensor, cut: list[int], gradients: bool = False, **options: Any
) -> list[int]:
    """The most that each device holds in the second step, with parameters and mini-batch."""
    stages = [acc.device(d) for d in options.pop("device_of", range(len(cut)))]
    target, places = torch.zeros_like(layers(x).detach()).to(stages[-1]), [*dict.fromkeys(stages)]
    gc.collect()
    before = [acc.allocated(place) for place in places]
    pipe = Pipe(layers, cut, devices=stages, chunks=CHUNKS, checkpoint=options.pop("checkpoint"))
    x = x.to(places[0])
    with syncpipe.inline():
        pipe.train_batch(x, target, loss_fn=F.mse_loss, **options)  # learns about the layers
        if not gradients:
            pipe.zero_grad()
        acc.synchronize()
        for place in places:
            torch.accelerator.reset_peak_memory_stats(place)
        pipe.train_batch(x, target, loss_fn=F.mse_loss, **options)
    acc.synchronize()
    found = (torch.accelerator.max_memory_allocated(place) for place in places)
    return [most - earlier for most, earlier in zip(found, before, strict=True)]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("schedule", "checkpoint"),
    [
        ("1f1b", "never"),
        ("1f1b", "always"),
        ("1f1b", "by layer"),
        ("gpipe", "never"),
        ("zb_h1", "never"),
    ],
)
@pytest.mark.parametrize("model", [mlp, conv_net, transformer, unet, tied])
@pytest.mark.usefixtures("four_devices")
def test_the_planned_peak_is_near_what_devices_count(model, schedule, checkpoint):
    if model is tied and schedule == "gpipe":
        pytest.skip("all gradients of the copy are on their way at once, as one thread runs this")
    layers, x = model()
    third = len(layers) // 3
    cut = [third, third, len(layers) - 2 * third]
    found = profile(layers, x, sizes=[SAMPLES], timeout=0.0, device=acc.device())
    modes: list[Mode] = ["recompute" if checkpoint == "always" else "store"] * 3
    if checkpoint == "by layer":  # all but the second layer of each stage
        modes = [((i, i + 1), (i + 2, j))[: j - i - 1] for i, j in ends_of(cut)]
        checkpoint = [(*range(*run),) for mode in modes for run in mode]
    made = build(schedule, CHUNKS, range(3))
    shape = one_f_one_b_shape(CHUNKS, made.in_flight) if schedule == "1f1b" else ScheduleShape(made)
    candidate = Problem(found, Machine.even(3), len(x), 2.0).evaluate(shape, cut, modes)
    assert candidate is not None
    counted = peaks(layers, x, cut, schedule=schedule, checkpoint=checkpoint)
    near = {"rel": 0.1 if model is tied or schedule == "gpipe" else 0.05}  # tied: depends on timing
    assert max(candidate.on_device) == pytest.approx(max(counted), **near)
    assert candidate.on_device[0] == pytest.approx(counted[0], **near)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("schedule", "device_of"),
    [
        *((name, (0, 1, 2, 2, 1, 0)) for name in ("zbv", "v_half", "dualpipev")),
        ("interleaved_zero_bubble", (0, 1, 2, 0, 1, 2)),
    ],
)
@pytest.mark.parametrize("model", [mlp, conv_net, tied])
@pytest.mark.usefixtures("four_devices")
def test_a_device_with_two_stages_holds_what_is_planned(model, schedule, device_of):
    layers, x = model()
    cut = [len(layers) // 6] * 6
    found = profile(layers, x, sizes=[SAMPLES], timeout=0.0, device=acc.device())
    shape = ScheduleShape(build(schedule, CHUNKS, device_of))
    problem = Problem(found, Machine.even(3), len(x), 2.0)
    candidate = problem.evaluate(shape, cut, ["store"] * 6)
    assert candidate is not None
    options: Any = {"schedule": schedule, "checkpoint": "never", "device_of": device_of}
    counted = peaks(layers, x, cut, **options)
    assert max(candidate.on_device) == pytest.approx(
        max(counted), rel=0.15 if model is tied else 0.05
    )


@pytest.mark.gpu
@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("model", [mlp, transformer])
def test_few_micro_batches_have_no_gradients_before_the_first_goes_back(model, chunks, monkeypatch):
    monkeypatch.setattr("tests.planner.test_planner_memory.CHUNKS", chunks)
    layers, x = model()
    found = profile(layers, x, sizes=[SAMPLES], time=False, device=acc.device())
    planned = Chain.of(found, SAMPLES, 2.0, len(x)).memory(0, len(layers), chunks, chunks, "store")
    counted = peaks(layers, x, [len(layers)], schedule="gpipe", checkpoint="never")
    assert planned == pytest.approx(counted[0], rel=0.1)


@pytest.mark.gpu
def test_the_step_of_the_optimizer_is_in_the_plan() -> None:
    layers, x = mlp()
    sample, place = x[:SAMPLES], acc.device()
    options: dict[str, Any] = {"devices": [place], "memory": 1e9, "batch_size": len(x)}
    planned = {
        make: syncpipe.plan(layers, sample, optimizer=make, timeout=0.0, **options)
        for make in (torch.optim.AdamW, torch.optim.SGD)
    }
    gc.collect()
    before = acc.allocated(place)
    pipe = Pipe(layers, **planned[torch.optim.AdamW].options(), devices=[place])
    optimizer = torch.optim.AdamW(pipe.parameters())
    for _ in range(2):
        pipe.zero_grad()
        torch.accelerator.reset_peak_memory_stats(place)
        pipe.train_batch(x.to(place), loss_fn=torch.mean)
        optimizer.step()
        acc.synchronize()
    counted = torch.accelerator.max_memory_allocated(place) - before
    adam, sgd = (max(plan.chosen.on_device) for plan in planned.values())
    assert adam == pytest.approx(counted, rel=0.05)
    assert sgd < 0.7 * adam


@pytest.mark.gpu
def test_what_a_model_takes_on_its_device_is_free() -> None:
    layers, _ = mlp()
    place, limits = acc.device(), []
    for where in ("cpu", place):
        layers.to(where)
        acc.synchronize()
        limits.append(machine_of([place], bandwidth=1.0, host_bandwidth=1.0, model=layers).memory)
    assert limits[0] == pytest.approx(limits[1], rel=0.01)


@pytest.mark.gpu
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_gradients_that_a_step_finds_are_copied_for_it(checkpoint):
    layers, x = mlp()
    sample = profile(layers, x[:SAMPLES], timeout=0)
    (stage,) = syncpipe.plan(sample, devices="1 x 1GB, 1GB/s", batch_size=SAMPLES).stages
    size = sum(parameter.nbytes for parameter in layers.parameters())
    assert stage.gradients == size
    plain, there = (
        peaks(copy.deepcopy(layers), x, [len(layers)], gradients, checkpoint=checkpoint)[0]
        for gradients in (False, True)
    )
    # Without them, they are made; with them, copies are, which stay.
    assert there - size == pytest.approx(plain, rel=0.02)


def test_a_stage_that_is_never_recomputed_is_not_planned_as_recomputed() -> None:
    layers = [nn.Embedding(50, 64, max_norm=1.0), *(nn.Tanh() for _ in range(7))]
    found = profile(layers, torch.randint(0, 50, (SAMPLES, 4)), sizes=[SAMPLES], timeout=0.0)
    problem = Problem(found, Machine.even(2), CHUNKS * SAMPLES, 2.0)
    shape = one_f_one_b_shape(CHUNKS, (2, 1))
    store, recompute = (problem.evaluate(shape, (6, 2), [mode, "store"]) for mode in MODES)
    assert store == recompute
    chain = problem.chain(CHUNKS)
    assert chain.memory(0, 6, 2, 2, "recompute") == chain.memory(0, 6, 2, 2, "store")
    assert chain.memory(1, 6, 2, 2, "recompute") < chain.memory(1, 6, 2, 2, "store")
    spans = {span for way in ways(chain, 0, 8) for span in way.spans}
    assert spans
    assert all(start > 0 for start, _ in spans)


def numbers(**layers: Any) -> Profile:
    made = []
    for name, (output, stored, peak) in layers.items():
        peaks: Any = {} if peak is None else {1: peak}
        made.append(LayerProfile(
            name, {1: 1}, {1: 2}, {1: output}, {1: stored},
            forward_peak_bytes=peaks, backward_peak_bytes=peaks, input_peak_bytes=peaks,
        ))  # fmt: skip
    return Profile(tuple(made), input_bytes={1: 7})


#: Layer b stores layer a's output as well; a skip waits from where a sends it to c.
SKIP = Chain(
    (1.0,) * 3, (2.0,) * 3, (12.0, 20.0, 8.0), (30.0, 25.0, 6.0), (0.0, 20.0, 0.0),
    (0.0, 400.0, 31.0), ((0, 2, 7.0),),
)  # fmt: skip
HOST = Chain((1.0,), (2.0,), (3.0,), (40.0,), (0.0,), (5.0,))
#: Running forward a has 100, or on top of the 20 of a, b has 45; or a, b, and c has 8. The loss
#: function stores 10, as much as the output.
PEAKS = Chain.of(numbers(a=(10, 20, 100), b=(10, 30, 45), c=(10, 5, 8)), 1, 4.0)
#: Of 8 samples, 7 bytes each.
BATCH = Chain.of(numbers(a=(10, 20, 20), b=(10, 30, 30)), 1, 4.0, 8)
UNKNOWN = Chain.of(numbers(a=(10, 20, None), b=(10, 30, 45)), 1, 4.0, 8)


@pytest.mark.parametrize(
    ("chain", "stage", "expected"),
    [
        # What is shared counts once; and of the skip a gradient waits.
        (SKIP, (0, 2, 3, 3, "store"), 400 + 3 * (30 + 25 - 20) + 7),
        (SKIP, (1, 2, 1, 1, "store"), 400 + 25),  # and is its own where a is elsewhere
        (SKIP, (0, 2, 3, 3, "recompute"), 400 + 3 * 12 + 35 + 7),
        (SKIP, (2, 3, 1, 3, "store"), 31 + 6 + 3 * 7),
        (SKIP, (0, 3, 1, 1, "store"), 431 + 41),
        # Inputs, the running one and the one that leaves; and of the others what the link left.
        (HOST, (0, 1, 4, 4, "offload", 40.0), 5 + 4 * 3 + 40 + 40),
        (HOST, (0, 1, 4, 4, "offload", 30.0), 5 + 4 * 3 + 40 + 40 + 2 * 10),
        (HOST, (0, 1, 1, 4, "offload"), 5 + 3 + 40),
        (PEAKS, (0, 3, 1, 1, "store"), 100),
        (PEAKS, (1, 3, 1, 1, "store"), 45 + 10),  # b has the gradient that came
        (PEAKS, (1, 3, 4, 6, "store"), 4 * 45 + 10 + 2 * 10),  # two inputs came early
        (PEAKS, (1, 3, 4, 6, "recompute"), 3 * (10 + 10) + 45 + 10 + 2 * 10),
        (BATCH, (0, 1, 3, 3, "store"), 3 * 20 + (7 * 8 - 7 * 3)),  # on the first device
        (BATCH, (0, 1, 8, 8, "store"), 8 * 20),
        (UNKNOWN, (0, 2, 3, 3, "store"), 3 * 50),
        (UNKNOWN, (0, 2, 3, 3, "recompute"), 3 * 7 + 50),
    ],
)
def test_what_a_stage_holds(chain: Chain, stage: Any, expected: float) -> None:
    assert chain.memory(*stage) == expected
