"""Planned memory beside counted memory; plans for models that are too large for this machine."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import syncpipe
from benchmarks.common import Options, Part
from benchmarks.papers.fake_memory import actual_peaks
from benchmarks.planning.models import MODELS
from syncpipe.balance import balance_cost, estimated, profile
from syncpipe.planner.chain import Chain, Mode

CHUNKS = 8
STAGES = (1, 3)
#: A parameter and its gradient.
_SGD = 2.0
#: How far the planned peak may be from what is counted.
_NEAR = 0.1


def memory(options: Options) -> Part:
    """Compares them."""
    part = Part(
        "Planned and counted memory",
        f"Steps of train_batch, {CHUNKS} micro-batches, equal numbers of layers for each stage, "
        "nothing or everything re-materialized; the largest stage of each. "
        "Counted on fake tensors, every storage that is alive: parameters, buffers, gradients, "
        "mini-batch and all that the step makes; no optimizer.",
        {
            "gradients": "before the step: none, as after zero_grad(), or there, to be added to.",
            "planned MB": "planned: Chain.memory of the stage, of a profile measured on the CPU; "
            "with what the page has as '+ .grad' where there are gradients.",
            "counted MB": "counted: the most bytes alive on its device at any time of the step.",
            "planned / counted": "of the largest stage.",
            "stages": "the same for each stage.",
        },
    )
    ratios: dict[str, list[float]] = {}
    for name, model in list(MODELS.items())[: 1 if options.quick else None]:
        problem = model(options.quick)  # fake tensors of a CPU have its kernels; meta a GPU's
        samples = len(problem.x) // CHUNKS
        found = profile(problem.model, problem.x, sizes=[samples], time=False)
        chain = Chain.of(found, samples, _SGD, CHUNKS * samples)
        trained = [layer.parameter_bytes - layer.frozen_bytes for layer in found.layers]
        for n, schedule, mode, there in itertools.product(
            STAGES, ("gpipe", "1f1b"), ("never", "always"), (False, True)
        ):
            balance = tuple(balance_cost([1] * len(chain), n))
            slots = (
                (CHUNKS,) * n
                if schedule == "gpipe"
                else tuple(min(CHUNKS, 2 * (n - s) - 1) for s in range(n))
            )
            counted = _counted(model, options.quick, balance, samples, schedule, mode, there)
            planned, i = [], 0
            for s, size in enumerate(balance):
                again: Mode = "recompute" if mode == "always" else "store"
                planned.append(chain.memory(i, i + size, slots[s], slots[0], again))
                planned[s] += sum(trained[i : i + size]) * there
                i += size
            ratio = max(planned) / max(counted)
            ratios.setdefault(name, []).append(ratio)
            part.rows.append(
                {
                    "model": name,
                    "balance": "-".join(map(str, balance)),
                    "schedule": schedule,
                    "checkpoint": mode,
                    "gradients": "there" if there else "none",
                    "planned MB": max(planned) / 1e6,
                    "counted MB": max(counted) / 1e6,
                    "planned / counted": ratio,
                    "stages": ", ".join(
                        f"{a / b:.2f}" for a, b in zip(planned, counted, strict=True)
                    ),
                }
            )
    for name, of in ratios.items():
        part.aim(
            f"{name}: the planned peak within {_NEAR:.0%} of what is counted",
            all(abs(ratio - 1) <= _NEAR for ratio in of),
            f"{min(of):.3f} to {max(of):.3f}",
        )
    part.notes.append(
        "Under GPipe gradients that are none before the step are made while activations go: the "
        "peak is planned as if they were there before."
    )
    return part


def _counted(
    model: Callable[[bool], Any],
    quick: bool,
    balance: tuple[int, ...],
    samples: int,
    schedule: str,
    mode: str,
    there: bool,
) -> list[float]:
    """Bytes of each stage; ``there``: with gradients before the step."""
    with torch.device("meta"):
        problem = model(quick)

    def batch(count: int, first: Any, last: Any) -> tuple[Tensor, Tensor]:
        x, target = problem.x, problem.target
        return (
            torch.empty(count, *x.shape[1:], device=first),
            torch.empty(count, *target.shape[1:], device=last),
        )

    layers = list(problem.model)
    own = [
        sum(_bytes(t) * (1 + (there and t.requires_grad)) for t in (*x.parameters(), *x.buffers()))
        for x in layers
    ]
    peaks, _ = actual_peaks(
        problem.model, balance, batch, F.mse_loss,
        samples=samples, m=CHUNKS, schedule=schedule, checkpoint=mode, fake=True,
        gradients=there,
    )  # fmt: skip
    ends = [0, *itertools.accumulate(balance)]
    stages = zip(peaks, itertools.pairwise(ends), strict=True)
    held = [peak + float(sum(own[i:j])) for peak, (i, j) in stages]
    held[0] += CHUNKS * samples * _bytes(problem.x[0])
    held[-1] += CHUNKS * samples * _bytes(problem.target[0])
    return held


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


# -- models too large for this machine ------------------------------------------------------------


class Block(nn.Module):
    """A block as in Llama (Touvron et al. 2023), without the rotation of positions."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        z = self.norms[1](x)
        return x + self.down(F.silu(self.gate(z)) * self.up(z))


def transformer_7b(blocks: int = 32) -> nn.Sequential:
    """On ``meta``, in ``bfloat16``."""
    width, words = 4096, 32_000
    with torch.device("meta"):
        layers = [Block(width, 32, 11_008) for _ in range(blocks)]
        head = nn.Linear(width, words, bias=False)
        model = nn.Sequential(nn.Embedding(words, width), *layers, nn.RMSNorm(width), head)
    return model.bfloat16()


def large(options: Options) -> Part:
    """Plans for them."""
    part = Part(
        "A model too large for this machine",
        "A transformer of 6.7 billion parameters (32 blocks of width 4096 as in Llama) on meta, "
        "bfloat16, 2048 tokens, mini-batches of 64, Adam with a master copy in float32 (16 bytes "
        "for each parameter): estimated from a data sheet, at half of its peak, and planned.",
        {
            "devices": "described; between them 50 GB/s.",
            "on": "the data sheet.",
            "estimate s": "measured: syncpipe.balance.estimated.",
            "plan s": "measured: syncpipe.plan of that profile.",
            "step s": "estimated: the simulated step.",
            "memory GB": "counted and planned: the largest stage.",
        },
    )
    tokens = torch.empty(16, 2048, dtype=torch.long, device="meta")
    model = transformer_7b(2 if options.quick else 32)
    took = []
    for on, memory in (("A100-80GB", "80GB"), ("RTX4090", "24GB")):
        start = time.perf_counter()
        found = estimated(model, tokens, on=on, progress=False)
        middle = time.perf_counter()
        row: dict[str, Any] = {"devices": f"8 x {memory}", "on": on}
        try:
            plan = syncpipe.plan(
                found, devices=f"8 x {memory}, 50GB/s", batch_size=64, param_scale=8.0
            )
            row |= {
                "plan": f"{plan.schedule}, {len(plan.balance)} stages, {plan.chunks} micro-batches",
                "balance": "-".join(map(str, plan.balance)),
                "re-materialize": sum(mode != "never" for mode in plan.checkpoint),
                "step s": plan.step_time,
                "memory GB": max(stage.memory for stage in plan.stages) / 1e9,
            }
        except ValueError as error:
            part.notes.append(f"8 x {memory}: {error}")
        end = time.perf_counter()
        row |= {"estimate s": middle - start, "plan s": end - middle}
        part.rows.append(row)
        took.append(end - start)
    part.aim(
        "planned on a laptop in under a minute", max(took) < 60, f"{max(took):.1f} s at most, CPU"
    )
    return part
