"""P1 and P2 of ``train_batch``: what the plain loop computes and draws, whatever the schedule."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from syncpipe import Pipe, inline
from syncpipe.schedules import one_f_one_b
from tests.pipe.test_equivalence import batch, pipes, specs
from tests.support.models import LAYERS, SENDS, Spec
from tests.support.running import assert_same, pipe_of
from tests.support.training import (
    any_schedule,
    assert_trains_as,
    device_of,
    fitting,
    weigh,
)

STRUCTURE = ["inplace", "fork", "join", *SENDS, "receive", "receive_unused"]
COUNTS = {"norm", "momentum_none", "counter"}  # layers that see the order of forwards


def noisy(output: Any, target: Any = None) -> Tensor:
    """A loss that draws."""
    return weigh(output, target) * torch.rand(())


@st.composite
def runs(draw: st.DrawFn, pipe: Pipe, m: int, *, in_order: bool = False) -> dict[str, Any]:
    """A schedule for a pipe."""
    devices = device_of(pipe)
    kind = draw(st.sampled_from([*fitting(devices), "slots", "any"]))
    if kind == "slots":
        how = draw(st.sampled_from(["textbook", "overlap", None]))
        if how is None:
            counts = st.lists(st.integers(1, m + 1), min_size=len(devices), max_size=len(devices))
            how = sorted(draw(counts), reverse=True)
        return {"schedule": partial(one_f_one_b, slots=how)}
    if kind == "any":
        seed = draw(st.integers(0, 2**32))
        kind = any_schedule(m, devices, seed=seed, halves=True, in_order=in_order)
    return {"schedule": kind}


@settings(max_examples=350)
@given(
    data=st.data(),
    spec=specs(*LAYERS, *STRUCTURE),
    chunks=st.integers(1, 5),
    size=st.integers(1, 7),
    flags=st.tuples(*[st.booleans()] * 5),
)
def test_train_batch_equals_the_plain_loop_to_the_last_bit(
    data: st.DataObject, spec: Spec, chunks: int, size: int, flags: Sequence[bool]
) -> None:
    input_grad, leaf, with_target, training, by_hand = flags
    plain, arguments = spec.build().train(training), data.draw(pipes(spec))
    x, target = batch(size, input_grad), None
    if with_target:
        target = {"scale": torch.linspace(1, 2, size), "word": "x", "none": None}
    pipe = Pipe(spec.build().train(training), chunks=chunks, **arguments)
    m = len(x.chunk(chunks))
    for _ in range(2):  # the second call builds on what the first one learned, and on its .grad
        options = data.draw(runs(pipe, m, in_order=bool(COUNTS.intersection(spec.layers))))
        try:
            with inline() if by_hand else nullcontext():
                assert_trains_as(pipe, plain, x, target, loss_fn=weigh, leaf=leaf, **options)
        except RuntimeError as error:
            trains = input_grad or any(p.grad is not None for p in plain.parameters())
            if trains or "nothing to train" not in str(error):
                raise
            return
        for p, q in zip(pipe.parameters(), plain.parameters(), strict=True):
            p.grad = None if q.grad is None else q.grad.clone()  # of halves: the same bits


def test_train_batch_draws_what_the_forward_draws_and_its_loss_the_same_under_any_schedule():
    torch.manual_seed(5)
    layers = nn.Sequential(nn.Linear(6, 6), nn.Dropout(), nn.RReLU(), nn.Dropout())
    x, losses = torch.randn(8, 6), []
    torch.manual_seed(1)
    expected = pipe_of(layers)(x).detach()
    after = torch.get_rng_state()
    for balance in ([1, 1, 1, 1], [1, 3]):
        pipe = pipe_of(layers, balance)
        for schedule in fitting(device_of(pipe)):
            torch.manual_seed(1)
            loss, output = pipe.train_batch(
                x, loss_fn=noisy, schedule=schedule, return_outputs=True, verify=False
            )
            losses.append(loss)
            assert torch.equal(output, expected)
            assert torch.equal(torch.get_rng_state(), after)
    assert_same(losses, losses[:1] * len(losses))
    torch.manual_seed(1)
    assert not torch.equal(after, torch.get_rng_state()), "the generator was rewound"
