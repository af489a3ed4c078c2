"""P1 of ``train_batch`` for weights that several stages share."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from syncpipe import Pipe
from tests.support.models import CHECKPOINT_MODES
from tests.support.ties import MAKE, WIDTH, WORDS, TiedSpec, language_model, modes, words
from tests.support.training import (
    FOUR,
    RUNS,
    any_schedule,
    assert_trains_as,
    device_of,
    fitting,
    schedule_of,
)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


specs = st.builds(
    TiedSpec,
    st.lists(st.sampled_from(sorted(MAKE)), min_size=1, max_size=6).map(tuple),
    st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 5), st.booleans()), max_size=3
    ).map(tuple),
    head=st.booleans(),
    frozen=st.booleans(),
)  # fmt: skip


@settings(max_examples=250)
@given(data=st.data(), spec=specs, chunks=st.integers(1, 5), size=st.integers(1, 7))
def test_train_batch_equals_the_plain_loop_to_the_last_bit(
    data: st.DataObject, spec: TiedSpec, chunks: int, size: int
) -> None:
    plain, count = spec.build(), len(spec.kinds) + 2
    assume(any(p.requires_grad for p in plain.parameters()))
    cuts = data.draw(st.sets(st.integers(1, count - 1), max_size=3).map(sorted))
    balance = [b - a for a, b in pairwise([0, *cuts, count])]
    workers = st.lists(st.integers(0, 3), min_size=len(balance), max_size=len(balance))
    pipe = Pipe(
        spec.build(),
        balance,
        devices=[f"cpu:{w}" for w in data.draw(workers)],
        chunks=chunks,
        checkpoint=data.draw(modes(count)),
    )
    x, devices = words(size), device_of(pipe)
    m = len(x.chunk(chunks))
    for k in range(2):
        run: Any = data.draw(st.sampled_from([*fitting(devices), "any"]))
        if run == "any":
            seed = data.draw(st.integers(0, 2**32))
            run = any_schedule(m, devices, seed=seed, halves=True, in_order=False)
        schedule, target = schedule_of(pipe, m, run), words(size, 1 + k)
        assert_trains_as(pipe, plain, x, target, loss_fn=loss_of, schedule=schedule)
        for module in (pipe, plain):
            for p, q in zip(module.parameters(), plain.parameters(), strict=True):
                p.grad = None if q.grad is None else q.grad.clone()  # of halves: the same bits
                with torch.no_grad():
                    p -= 0 if p.grad is None else 0.1 * p.grad


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("run", RUNS)
def test_a_tied_head_learns_as_in_the_plain_loop(run, checkpoint):
    options, devices = RUNS[run]
    pipe = Pipe(language_model(), [1, 2, 1, 1], devices=devices, chunks=4, checkpoint=checkpoint)
    plain, optimizer = language_model(), torch.optim.SGD(pipe.parameters(), 0.5, 0.9)
    x, target = words(8), words(8, 1)
    losses = []
    for _ in range(4):
        plain.load_state_dict(pipe.state_dict())
        plain.zero_grad()
        losses.append(assert_trains_as(pipe, plain, x, target, loss_fn=loss_of, **options).loss)
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0]


class Add(nn.Module):
    def __init__(self, factor: float, weight: nn.Parameter) -> None:
        super().__init__()
        self.factor, self.weight = factor, weight

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight * self.factor


class Idle(nn.Linear):
    """Does not use its weight."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2


class Looked(nn.Embedding):
    """Hands on no gradient, so that its weight gets none but that of others who have it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).detach()


def added() -> nn.Sequential:
    weight = nn.Parameter(torch.tensor([0.7]))
    return nn.Sequential(*[Add(factor, weight) for factor in (0.3, 0.2, 0.1)])


def tied(first: nn.Module, middle: nn.Module) -> nn.Sequential:
    rows, columns = first.weight.shape
    model = nn.Sequential(first, middle, nn.Linear(columns, rows, bias=False))
    model[2].weight = first.weight
    if isinstance(middle, Idle):
        middle.weight = first.weight
    return model


#: Models of three stages, and their input.
THREE: dict[str, tuple[Any, Tensor]] = {
    "0.1 + 0.2 + 0.3 is not 0.1 + (0.2 + 0.3)": (added, torch.zeros(2, 1)),
    "idle": (lambda: tied(nn.Linear(3, 3, bias=False), Idle(3, 3)), torch.randn(4, 3)),
    "sparse": (
        lambda: tied(nn.Embedding(WORDS, WIDTH, sparse=True), nn.Linear(WIDTH, WIDTH)), words(4)
    ),
    "frozen before the last": (
        lambda: tied(Looked(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH).requires_grad_(False)), words(4)
    ),
}  # fmt: skip


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("name", THREE)
def test_three_stages_add_in_the_plain_loops_order_whoever_is_late(name, checkpoint):
    make, x = THREE[name]
    model = make()
    plain = copy.deepcopy(model)
    pipe = Pipe(model, [1, 1, 1], devices=FOUR[:3], chunks=2, checkpoint=checkpoint)
    for _ in range(10):
        assert_trains_as(pipe, plain, x, loss_fn=torch.mean)
        pipe.zero_grad()
        plain.zero_grad()
