"""Stages with all that may be combined, drawn at random, beside a pipe in one process.

``python -m tests.long meshes`` runs more of them.
"""

from __future__ import annotations

import os
import random
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from syncpipe import Pipe
from syncpipe.distributed import stage
from syncpipe.distributed.schedules import SCHEDULES

WORDS, WIDTH, SIZE = 13, 8, 2
HALVES = ("interleaved_zero_bubble", "zbv", "dualpipev")


class Head(nn.Module):
    """Logits, by a weight that may be the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WORDS, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


def model(case: dict[str, Any]) -> nn.Sequential:
    torch.manual_seed(case["seed"])
    blocks = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(case["dropout"]))
        for _ in range(8)
    ]
    layers = nn.Sequential(nn.Embedding(WORDS, WIDTH), *blocks, Head())
    if case["tied"]:
        layers[-1].weight = layers[0].weight
    return layers


def mean(output: Tensor, target: Tensor) -> Tensor:
    kept = target != -100
    lost = F.cross_entropy(output, target.clamp(min=0), reduction="none")
    return torch.where(kept, lost, 0.0).sum() / kept.sum()


def with_weight(output: Tensor, target: Tensor) -> Any:
    return mean(output, target), (target != -100).sum(), {"largest": float(output.detach().max())}


def kept(target: Tensor) -> Tensor:
    return (target != -100).sum()


LOSSES: dict[str, dict[str, Any]] = {
    "cross_entropy": {"loss_fn": F.cross_entropy},
    "sum": {"loss_fn": nn.CrossEntropyLoss(reduction="sum")},
    "weight": {"loss_fn": mean, "weight": kept},
    "(loss, weight)": {"loss_fn": with_weight},
}


def drawn(k: int) -> dict[str, Any]:
    rng = random.Random(k)
    name, autocast = rng.choice([*SCHEDULES]), rng.choice([False, True])
    case = {
        "seed": k,
        "schedule": name,
        "dp": rng.choice([1, 2]),
        "sharding": rng.choice(["no", "layers", "whole", "stages", "ddp"]),
        "reshard": rng.choice([True, False]),
        "tied": rng.random() < 0.4,
        "autocast": autocast,
        "made_under": rng.choice([False, True]),
        "loss": rng.choice([*LOSSES]),
        "dropout": rng.choice([0.0, 0.3]),
        "clip": rng.random() < 0.5,
        # Whose first step is the sign of a gradient, which may be nothing but rounding.
        "adam": rng.random() < 0.3 and not autocast,
        "tp": rng.choice([1, 1, 2]),
    }
    if case["sharding"] == "ddp":  # which takes no DTensor
        case["tp"] = 1
    return {**case, "dp": case["dp"] if case["tp"] == 1 else 1}


def sharded(mine: Any, case: dict[str, Any], mesh: Any) -> None:
    options = {"mesh": mesh["dp"], "reshard_after_forward": case["reshard"]}
    for each in mine.stages:
        for layer in each.submod.children() if case["tp"] > 1 else ():
            if isinstance(layer, nn.Sequential):
                plan = {"0": ColwiseParallel(output_layouts=Replicate())}
                parallelize_module(layer, mesh["tp"], plan)
        if case["sharding"] in ("layers", "whole"):
            for layer in each.submod.children():
                fully_shard(layer, **options)
        if case["sharding"] in ("whole", "stages"):
            fully_shard(each.submod, **options)
        if case["sharding"] == "ddp":
            each.submod = DistributedDataParallel(
                each.submod, process_group=mesh["dp"].get_group(), find_unused_parameters=False
            )


def full(tensor: Any) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def run_case(case: dict[str, Any]) -> str:
    """What was wrong with a case; "refused" if it was refused; empty if it was right."""
    dp, tp, how = case["dp"], case["tp"], LOSSES[case["loss"]]
    ranks = 4 // dp // tp
    mesh = init_device_mesh("cpu", (dp, ranks, tp), mesh_dim_names=("dp", "pp", "tp"))
    replica = mesh.get_local_rank("dp")
    where = SCHEDULES[case["schedule"]][1]
    n = ranks if where == "one" else 2 * ranks
    m = n if where == "v" else 4  # in a V not fewer
    balance = [10 // n + (j < 10 % n) for j in range(n)]

    def autocast(on: bool) -> Any:
        return torch.autocast("cpu", torch.bfloat16) if on else nullcontext()

    x = torch.randint(WORDS, (dp, m * SIZE), generator=torch.Generator().manual_seed(case["seed"]))
    y = (x + 1) % WORDS
    y[:, ::3], y[0, :5] = -100, -100
    y[:, 1::2] = (x[:, 1::2] + 1) % WORDS  # something counts in each micro-batch
    with autocast(case["made_under"]):
        mine = stage(
            model(case), balance, sample=x[0, :SIZE], group=mesh["pp"],
            placement="v" if where == "v" else "loop",
        )  # fmt: skip
    try:
        sharded(mine, case, mesh)
        options = {"data_parallel": mesh["dp"] if case["sharding"] != "no" else None}
        schedule = mine.schedule(case["schedule"], chunks=m, **how, **options)
    except ValueError as error:
        halves = case["schedule"] in HALVES and "backward in halves" in str(error)
        return "refused" if halves else str(error)
    kind = torch.optim.AdamW if case["adam"] else torch.optim.SGD
    rate = 1e-3 if case["loss"] == "sum" else 0.05
    ours = kind(mine.parameters(), lr=rate)
    pipe = Pipe(model(case), [10], devices=["cpu"], chunks=m, checkpoint="never")
    theirs = kind(pipe.parameters(), lr=rate)
    parts = range(dp) if case["sharding"] != "no" else [replica]
    worst = []
    for step in range(2):
        ours.zero_grad()
        torch.manual_seed(step)
        losses: list[Tensor] = []
        with autocast(case["autocast"]):
            schedule.step(x[replica], target=y[replica], losses=losses)
        after = torch.get_rng_state()
        sums, whole, total = {}, 0.0, 0.0
        for part in parts:
            pipe.zero_grad()
            torch.manual_seed(step)
            with autocast(case["autocast"]):
                loss = pipe.train_batch(x[part], y[part], **how)
            loss = loss[0] if isinstance(loss, tuple) else loss
            if not torch.equal(after, torch.get_rng_state()):
                return "the generator stands elsewhere"
            by = 1.0 if case["loss"] == "sum" else float(kept(y[part]))
            whole, total = whole + by, total + by * float(loss)
            for name, parameter in pipe.named_parameters():
                sums[name] = sums.get(name, 0) + by * parameter.grad
        by = 1.0 if case["loss"] == "sum" else whole
        for name, parameter in pipe.named_parameters():
            parameter.grad = sums[name] / by
        for name, parameter in mine.named_parameters(remove_duplicate=False):
            wanted = dict(pipe.named_parameters(remove_duplicate=False))[name].grad
            if parameter.grad is None:
                return f"no gradient of {name}"
            worst.append(float((full(parameter.grad) - wanted).norm() / (wanted.norm() + 1e-6)))
        if case["clip"]:
            norm = mine.clip_grad_norm_(0.5)
            theirs_norm = nn.utils.clip_grad_norm_(pipe.parameters(), 0.5)
            worst.append(abs(float(norm) - float(theirs_norm)) / float(theirs_norm))
        if losses and len(parts) == 1:
            worst.append(abs(float(sum(losses)) - total / by) / (abs(total / by) + 1e-6))
        ours.step()
        theirs.step()
    mine.eval()
    output = schedule.eval(x[replica])
    with torch.no_grad():
        wanted = pipe.eval()(x[replica])
    if output is not None:
        worst.append(float((output - wanted).norm() / wanted.norm()))
    bound = 0.1 if case["autocast"] else 1e-4  # two steps in bfloat16
    return f"off by {max(worst):.2g}" if not max(worst) < bound else ""


def cases(first: int, last: int) -> dict[int, str]:
    found = {}
    for k in range(first, last):
        try:
            found[k] = run_case(drawn(k))
        except Exception as error:
            raise AssertionError(f"case {k}: {drawn(k)}") from error
    return found


def test_random_meshes_are_right_or_refused(four):
    count = int(os.environ.get("SYNCPIPE_MESHES", "40"))
    found = four.run(cases, 0, count)
    for k in found[0]:
        said = {each[k] for each in found}
        assert said <= {"", "refused"}, (drawn(k), said)
    refused = sum(each == "refused" for each in found[0].values())
    assert refused <= count * 0.4
