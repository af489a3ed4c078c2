"""Small models and data for tests of ``train_stream``; and PipeDream by the book.

The reference is one process, one thread, all versions of all weights kept for good.
"""

import copy
import math
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from syncpipe import Pipe
from syncpipe.schedules.stream import Versions
from syncpipe.training.stream import Streamed
from tests.support.compare import assert_same

WORKERS = ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]


def mlp(normed: bool = False) -> nn.Sequential:
    """Seven layers, 8 numbers to 4; with running statistics if ``normed``."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(8, 16),
        nn.BatchNorm1d(16) if normed else nn.Tanh(),
        nn.Linear(16, 16),
        nn.Tanh(),
        nn.Linear(16, 6),
        nn.Tanh(),
        nn.Linear(6, 4),
    )


def mini_batches(steps: int, size: int = 6) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(2)
    return [(torch.randn(size, 8), torch.randint(0, 4, (size,))) for _ in range(steps)]


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


Data = Sequence[tuple[Tensor, Any]]
#: For pipes of ``mlp()``, by their number of stages.
BALANCES = {1: [7], 2: [3, 4], 3: [2, 1, 4], 4: [2, 2, 1, 2]}


def trained(stage: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in stage.named_parameters() if p.requires_grad}


def by_the_paper(i: int, j: int, replicas: Sequence[int], versions: Versions) -> int:
    """The updates of the weights that mini-batch ``i`` meets on stage ``j``, counted from 0.

    With stages counted from 1 and w(t) the weights after t mini-batches, update t + 1 is, in the
    paper, the gradient at w_1(t-n+1), w_2(t-n+2), ..., w_n(t); with vertical sync at w_1(t-n+1),
    w_2(t-n+1), ..., w_n(t-n+1); and in PipeDream-2BW at w(t-1). Before there are so many: at w(0).

    With round robin each replica has every ``r``-th mini-batch, and so many in flight that all
    workers from this stage on are busy. What it meets has had the updates of all rounds that are
    through on it.
    """
    n, r = len(replicas), replicas[j]
    if max(replicas) > 1:
        in_flight = math.ceil(sum(replicas[j:]) / r)
        return max(0, i // r - (in_flight - 1))
    t = i
    stage = j + 1
    back = {"stashing": n - stage, "vertical_sync": n - 1, "2bw": 1}[versions]
    return max(0, t - back)


def reference(
    model: nn.Sequential,
    balance: Sequence[int],
    data: Data,
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    loss_fn: Callable[[Any, Any], Tensor],
    *,
    versions: Versions = "stashing",
    chunks: int = 1,
    replicas: Sequence[int] | None = None,
) -> list[Tensor]:
    """Trains the model in place; the losses of the mini-batches. ``chunks`` are for 2BW."""
    replicas = [1] * len(balance) if replicas is None else replicas
    stages = [model[a:b] for a, b in pairwise(accumulate(balance, initial=0))]
    n = len(stages)
    optimizers = [optimizer(list(trained(s).values())) if trained(s) else None for s in stages]
    history = [[copy.deepcopy(dict(trained(stage)))] for stage in stages]
    losses: list[Tensor] = []
    rounds: list[list[list[Tensor]]] = [[] for _ in stages]
    for b, (x, target) in enumerate(data):
        met = [history[j][by_the_paper(b, j, replicas, versions)] for j in range(n)]
        weights = [{name: p.detach().requires_grad_() for name, p in each.items()} for each in met]
        parts = list(zip(x.chunk(chunks), target.chunk(chunks), strict=True))
        loss = None
        for part, wanted in parts:
            for stage, each in zip(stages, weights, strict=True):
                part = torch.func.functional_call(stage, each, (part,))
            one = loss_fn(part, wanted)
            share = len(wanted) / len(target)
            one = one if share == 1 else one * share
            one.backward()
            loss = one.detach() if loss is None else loss + one.detach()
        losses.append(loss)
        for j, stage in enumerate(stages):
            rounds[j].append([p.grad for p in weights[j].values()])
            if len(rounds[j]) < replicas[j] and b < len(data) - 1:
                continue  # the other replicas have not got theirs yet
            for parameter, *grads in zip(trained(stage).values(), *rounds[j], strict=True):
                parameter.grad = sum(grads[1:], grads[0])
                if len(grads) > 1:
                    parameter.grad /= len(grads)
            if optimizers[j] is not None:
                optimizers[j].step()
            for parameter in trained(stage).values():
                parameter.grad = None
            history[j].append(copy.deepcopy(dict(trained(stage))))
            rounds[j].clear()
    return losses


def assert_as_in_the_papers(
    pipe: Pipe, data: Data, given: Any = None, *, model: nn.Sequential | None = None,
    optimizer: Any = sgd, loss_fn: Any = F.cross_entropy, versions: Versions = "stashing",
    chunks: int = 1, replicas: Sequence[int] | None = None, exact: bool = True, **options: Any,
) -> Streamed:  # fmt: skip
    """A stream through a pipe is, to the last bit, what the reference trains; returns it.

    Args:
        pipe: made of what ``model``, if nothing is given ``mlp()``, is a copy of.
        data: of the reference, and of the pipe if nothing else is ``given``.
    """
    model, n = mlp() if model is None else model, len(pipe.balance)
    replicas = [1] * n if replicas is None else replicas
    found = pipe.train_stream(
        data if given is None else given,
        optimizer=optimizer, loss_fn=loss_fn, versions=versions, **options,
    )  # fmt: skip
    losses = reference(
        model, pipe.balance, data, optimizer, loss_fn,
        versions=versions, chunks=chunks, replicas=replicas,
    )  # fmt: skip
    for ours, theirs in (
        (found.losses, torch.stack(losses)), (pipe.state_dict(), model.state_dict())
    ):  # fmt: skip
        if exact:
            assert_same(ours, theirs)
        else:
            torch.testing.assert_close(ours, theirs, check_device=False)
    assert found.versions == [
        tuple([by_the_paper(b, j, replicas, versions) for j in range(n)])
        for b, (x, _) in enumerate(data)
        for _ in x.chunk(chunks)
    ]
    ahead = [math.ceil(sum(replicas[j:]) / replicas[j]) for j in range(n)]
    kept = {"stashing": ahead, "vertical_sync": [ahead[0]] * n, "2bw": [2] * n}[versions]
    assert all(map(int.__le__, found.kept, kept))
    assert list(found.kept) == kept or len(data) <= 2 * sum(replicas)
    return found
