"""Pipes in several processes have the plain model's gradients of all mini-batches at once.

The plain model is given them in double precision. ``data_parallel`` averages those of
``train_batch``, and ``DistributedDataParallel`` those of ``pipe(x)``.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from syncpipe import Pipe
from syncpipe.distributed import data_parallel
from tests.support.running import MODES
from tests.support.skips import Receive, Send

TINY = 1e-12  # of gradients around 0.1, in double precision
DEVICES = {3: ["cpu:0", "cpu:1", "cpu:2"], 4: ["cpu:0", "cpu:1", "cpu:0", "cpu:1"]}


class Sometimes(nn.Module):
    """Has three layers, and uses one of two of them; the third one never."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.used = "a"

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self, self.used)(x)


class Weighted(nn.Module):
    """A loss with a parameter of its own, and one of the last layer's."""

    def __init__(self, last: nn.Linear) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.last = [last]

    def forward(self, y: Tensor, target: Tensor) -> Tensor:
        return self.scale * F.cross_entropy(y, target) + self.last[0].weight.pow(2).mean()


def layers_of(kind: str) -> nn.Sequential:
    torch.manual_seed(distributed.get_rank())  # process 0 decides
    middle: dict[str, list[nn.Module]] = {
        "sometimes": [Sometimes()],
        "skip": [Send(), nn.Linear(6, 6), nn.Tanh(), Receive()],
    }
    layers = [nn.Linear(6, 6), nn.Tanh(), *middle.get(kind, [nn.Linear(6, 6), nn.Tanh()])]
    layers += [nn.Linear(6, 6), nn.Linear(6, 3)]
    if kind == "tied":
        layers[-2].weight = layers[0].weight
    if kind == "frozen":
        layers[2].requires_grad_(False)
    return nn.Sequential(*layers).double()


def pipe_of(kind: str = "layers", *, stages: int = 3, **options: Any) -> tuple[Pipe, nn.Sequential]:
    """A data-parallel pipe, and a copy of its layers that is no part of it."""
    layers = layers_of(kind)
    balance = [2, *[1] * (stages - 2), len(layers) - stages]
    bucket_mb = options.pop("bucket_mb", 25)
    devices = [f"cpu:{w}" for w in range(6)] if "replicas" in options else DEVICES[stages]
    pipe = Pipe(layers, balance, devices=devices, **{"chunks": 4, **options})
    pipe = data_parallel(pipe, bucket_mb=bucket_mb)
    return pipe, copy.deepcopy(pipe[:])


def batches(sizes: list[int], seed: int, *, masked: bool) -> list[tuple[Tensor, Tensor]]:
    """The mini-batches of all processes."""
    torch.manual_seed(seed)
    found = []
    for rank, size in enumerate(sizes):
        target = torch.randint(0, 3, (size,))
        if masked:
            target[: rank * size // 2] = -100
        found.append((torch.randn(size, 6, dtype=torch.float64), target))
    return found


def mine(seed: int = 1) -> tuple[Tensor, Tensor]:
    """The mini-batch of this process, of eight samples."""
    return batches([8] * 3, seed, masked=False)[distributed.get_rank()]


def whole(pairs: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return torch.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs])


def differences(ours: nn.Module, theirs: nn.Module) -> float:
    """The largest difference of gradients, by name; infinite if only one is there."""
    there = dict(theirs.named_parameters(remove_duplicate=False))
    worst = 0.0
    for name, p in ours.named_parameters(remove_duplicate=False):
        a, b = p.grad, there[name].grad
        if a is not None and b is not None:
            worst = max(worst, float((a - b).abs().max()))
        elif a is not b:
            return float("inf")
    return worst


def weigh(y: Tensor, target: Tensor) -> Tensor:
    """A mean over samples that nobody knows."""
    return (y.logsumexp(1) - 0.1 * target * y.sum(1)).mean()


def counted(y: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """A loss that comes with its weight."""
    return F.cross_entropy(y, target), (target != -100).sum()


SUM = partial(F.cross_entropy, reduction="sum")
#: Of the pipe and of the plain model.
LOSSES = {
    "cross_entropy": (F.cross_entropy, F.cross_entropy),
    "weigh": (weigh, weigh),
    "counted": (counted, F.cross_entropy),
    "sum": (SUM, SUM),
}


def train(options: dict[str, Any]) -> None:
    _train(**options)


def _train(
    kind: str = "layers",
    loss: str = "cross_entropy",
    sizes: tuple[int, ...] = (12, 12, 12),
    chunks: tuple[int, ...] = (4, 4, 4),
    masked: bool = True,
    iterator: bool = False,
    no_sync: int = 0,
    ddp: dict[str, bool] | None = None,
    **options: Any,
) -> None:
    """Gradients, and the losses of all processes, are the plain model's.

    Args:
        kind: of the model.
        loss: its name.
        sizes, chunks: of the mini-batch of each process.
        masked: mask another number of targets in each process.
        iterator: give micro-batches of different sizes by ``data_iter``.
        no_sync: so many calls before each step; then gradients are forgotten between steps.
        ddp: train by ``pipe(x)`` in ``DistributedDataParallel`` with these options, and another
            number of chunks in each step.
        options: of the pipe; ``schedule`` of train_batch.
    """
    rank, size = distributed.get_rank(), distributed.get_world_size()
    pipe, plain = pipe_of(kind, **{**options, "chunks": chunks[rank]})
    ours, theirs = LOSSES[loss]
    if ddp is not None:  # of a copy, which knows no other processes
        parallel = DistributedDataParallel(pipe := copy.deepcopy(pipe), **ddp)

    def use(model: Any, other: int) -> None:
        if kind == "sometimes":
            model[2].used = "b" if step and (ddp is not None or other == size - 1) else "a"

    for step in range(3):
        use(pipe, rank)
        if no_sync or step == 1:
            pipe.zero_grad()
            plain.zero_grad()
        for k in range(no_sync + 1):
            pairs = batches(list(sizes[:size]), 10 * step + k, masked=masked)
            x, target = pairs[rank]
            given: dict[str, Any] = {"input": x, "target": target}
            if iterator:
                cuts = [1, 3, *[(len(x) - 4) // (pipe.chunks - 2)] * (pipe.chunks - 2)]
                given = {"data_iter": zip(x.split(cuts), target.split(cuts), strict=True)}
            with (pipe if ddp is None else parallel).no_sync() if k < no_sync else nullcontext():
                if ddp is None:
                    got = pipe.train_batch(
                        **given, loss_fn=ours, accumulate=no_sync + 1, global_loss=True
                    )
                else:
                    pipe.chunks = 2 + step
                    (ours(parallel(x), target) / (no_sync + 1)).backward()
            outputs = []
            for other, (x, _) in enumerate(pairs):
                use(plain, other)
                outputs.append(plain(x))
            expected = theirs(torch.cat(outputs), whole(pairs)[1])
            (expected / (no_sync + 1)).backward()
            assert ddp is not None or abs(float(got) - float(expected.detach())) < TINY
        assert differences(pipe, plain) < TINY


CASES: dict[str, dict[str, Any]] = {
    "1f1b": {},
    "gpipe": {"schedule": "gpipe"},
    "zb_h1": {"schedule": "zb_h1"},
    "interleaved": {"schedule": "interleaved_1f1b", "stages": 4},
    "many buckets": {"bucket_mb": 1e-4, "checkpoint": "always"},
    "uneven": {"sizes": [12, 5, 9], "chunks": [4, 2, 3]},
    "tied": {"kind": "tied"},
    "skip": {"kind": "skip", "schedule": "zb_h1"},
    "replicas": {"kind": "skip", "replicas": [2, 1, 3]},
    "replicas, weights with the loss": {"replicas": 2, "loss": "counted", "schedule": "zb_h1"},
    "frozen": {"kind": "frozen"},
    "unused": {"kind": "sometimes"},
    "unknown loss": {"loss": "weigh", "masked": False, "sizes": [12, 7, 4]},
    "weights with the loss": {"loss": "counted", "sizes": [12, 7, 9]},
    "sums": {"loss": "sum", "sizes": [12, 7, 9]},
    "iterator": {"iterator": True, "sizes": [12, 8, 10], "schedule": "zb_h1"},
    "accumulated": {"no_sync": 2, "sizes": [12, 7, 4]},
    "accumulated, weights with the loss": {"no_sync": 1, "loss": "counted", "sizes": [12, 7, 9]},
    "accumulated sums": {"no_sync": 1, "loss": "sum"},
    "accumulated, unused": {"no_sync": 1, "kind": "sometimes"},
}
#: What of ``DistributedDataParallel`` a pipe is trained by.
DDP: dict[str, dict[str, Any]] = {
    **{mode: {"ddp": {}, "checkpoint": mode} for mode in MODES},
    "no_sync": {"ddp": {}, "checkpoint": "always", "no_sync": 1},
    "static_graph": {"ddp": {"static_graph": True}, "checkpoint": "always"},
    "unused": {"ddp": {"find_unused_parameters": True}, "kind": "sometimes"},
    "tied": {"ddp": {}, "kind": "tied"},
}


@pytest.mark.parametrize("case", CASES)
def test_train_batch(two, case):
    two.run(train, CASES[case])


@pytest.mark.parametrize("case", DDP)
def test_pipe_x_in_distributed_data_parallel(two, case):
    two.run(train, {**DDP[case], "masked": False})


@pytest.mark.parametrize("case", ["1f1b", "uneven", "unused", "accumulated, weights with the loss"])
def test_train_batch_in_three_processes(three, case):
    three.run(train, CASES[case])


def loss_with_parameters() -> None:
    """A loss has parameters of its own, and one of the last stage."""
    rank, size = distributed.get_rank(), distributed.get_world_size()
    pipe, plain = pipe_of()
    ours, theirs = Weighted(pipe[-1]), Weighted(plain[-1])
    for seed in range(2):
        pairs = batches([8, 8, 8][:size], seed, masked=False)
        pipe.train_batch(*pairs[rank], loss_fn=ours)
        x, target = whole(pairs)
        theirs(plain(x), target).backward()
    assert max(differences(pipe, plain), differences(ours, theirs)) < TINY


def before_the_pipe() -> None:
    """What goes on into the caller's graph is such that its mean is the gradient."""
    rank, size = distributed.get_rank(), distributed.get_world_size()
    pipe, plain = pipe_of()
    torch.manual_seed(0)
    encoder = nn.Linear(6, 6).double()
    reference = copy.deepcopy(encoder)
    pairs = batches([12, 6, 9][:size], 3, masked=True)
    x, target = pairs[rank]
    pipe.train_batch(encoder(x), target, loss_fn=F.cross_entropy)
    for p in encoder.parameters():
        distributed.all_reduce(p.grad)
        p.grad /= size
    x, target = whole(pairs)
    F.cross_entropy(plain(reference(x)), target).backward()
    assert differences(encoder, reference) < TINY


def grad_scaler() -> None:
    """Scaled losses of float32 layers, under autocast; beside one process that has all."""
    rank = distributed.get_rank()
    torch.manual_seed(1)
    layers = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    alone = Pipe(copy.deepcopy(layers), [2, 1], devices=["cpu:0", "cpu:1"], chunks=12)
    pipe = data_parallel(Pipe(layers, [2, 1], devices=["cpu:0", "cpu:1"], chunks=4))
    pairs = [(x.float(), y) for x, y in batches([8, 8, 8], 3, masked=False)]
    for model, (x, target) in (pipe, pairs[rank]), (alone, whole(pairs)):
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        with torch.autocast("cpu", torch.bfloat16):
            model.train_batch(x, target, loss_fn=F.cross_entropy, grad_scaler=scaler)
        scaler.step(optimizer)
        scaler.update()
    for p, q in zip(pipe.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-3)


def half_precision() -> None:
    """A gradient in float16, whose sum by weights would be infinite."""
    layers = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Identity()).half()
    pipe = data_parallel(Pipe(layers, [1, 1], devices=["cpu:0", "cpu:1"]))
    for _ in range(2):
        pipe.zero_grad()
        pipe.train_batch(torch.full((8, 1), 3e4).half(), loss_fn=torch.mean)
    assert float(pipe[0].weight.grad) == pytest.approx(3e4, rel=1e-2)


@pytest.mark.parametrize(
    "act", [loss_with_parameters, before_the_pipe, grad_scaler, half_precision]
)
def test_other_gradients(three, act):
    three.run(act)
