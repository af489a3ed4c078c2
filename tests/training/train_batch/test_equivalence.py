"""P1 and P2 of ``train_batch``: what the plain loop computes and draws, whatever the schedule."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from syncpipe import Pipe, inline
from syncpipe.schedules import one_f_one_b
from tests.pipe.test_equivalence import batch, pipes, specs
from tests.support.models import LAYERS, RANDOM_LAYERS, SENDS, Spec
from tests.support.running import pipe_of
from tests.support.training import (
    any_schedule,
    assert_same_step,
    device_of,
    fitting,
    orders_of,
    pipe_step,
    plain_step,
    schedule_of,
    weigh,
)
from tests.training.train_batch.loop import noisy

STRUCTURE = ["inplace", "fork", "join", *SENDS, "receive", "receive_unused"]


COUNTS = {"norm", "momentum_none", "counter"}  # layers that see the order of forwards


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
    input_grad=st.booleans(),
    leaf=st.booleans(),
    with_target=st.booleans(),
    training=st.booleans(),
    by_hand=st.booleans(),
)
def test_train_batch_equals_the_plain_loop_to_the_last_bit(
    data: st.DataObject,
    spec: Spec,
    chunks: int,
    size: int,
    input_grad: bool,
    leaf: bool,
    with_target: bool,
    training: bool,
    by_hand: bool,
) -> None:
    plain, arguments = spec.build().train(training), data.draw(pipes(spec))
    x = batch(size, input_grad)
    target = {"scale": torch.linspace(1, 2, size), "word": "x", "none": None}
    pipe = Pipe(spec.build().train(training), chunks=chunks, **arguments)
    m = len(x.chunk(chunks))
    for _ in range(2):  # the second call builds on what the first one learned, and on its .grad
        options = data.draw(runs(pipe, m, in_order=bool(COUNTS.intersection(spec.layers))))
        schedule = schedule_of(pipe, m, **options)
        expected = plain_step(
            plain,
            x,
            target if with_target else None,
            loss_fn=weigh,
            chunks=chunks,
            orders=orders_of(schedule),
            balance=pipe.balance,
        )
        if not input_grad and not any(
            expected.parameter_grads[n] is not None for n in expected.parameter_grads
        ):
            return  # nothing to train: refused, see the tests of the loss
        with inline() if by_hand else nullcontext():
            actual = pipe_step(
                pipe, x, target if with_target else None, leaf=leaf, loss_fn=weigh, **options
            )
        assert_same_step(actual, expected, exact=not schedule.splits)
        for p, q in zip(pipe.parameters(), plain.parameters(), strict=True):
            if p.grad is not None and schedule.splits:
                p.grad.copy_(q.grad)  # the next step starts from the same bits


@settings(max_examples=200)
@given(
    data=st.data(),
    spec=specs("linear", "norm", *RANDOM_LAYERS, *RANDOM_LAYERS, *STRUCTURE),
    chunks=st.integers(1, 4),
    size=st.integers(1, 6),
    seed=st.integers(0, 2**40),
    by_hand=st.booleans(),
    loss_fn=st.sampled_from([weigh, noisy]),
)
def test_random_layers_draw_the_same_whatever_the_schedule(
    data: st.DataObject, spec: Spec, chunks: int, size: int, seed: int, by_hand: bool, loss_fn: Any
) -> None:
    x = batch(size, True)
    m = len(x.chunk(chunks))
    one = Pipe(spec.build(), [len(spec.layers)], chunks=chunks, checkpoint="never")
    other = Pipe(spec.build(), chunks=chunks, **data.draw(pipes(spec)))
    options = data.draw(runs(other, m, in_order=True))
    halves = bool(schedule_of(other, m, **options).splits)
    order = orders_of(schedule_of(other, m, **options))[0]
    same = all(row == order for row in orders_of(schedule_of(other, m, **options)))
    reference = {"schedule": "gpipe" if order == list(range(m))[::-1] else "naive"}
    results, after = [], []
    for pipe, how, context in (
        (one, reference, nullcontext()),
        (other, options, inline() if by_hand else nullcontext()),
    ):
        torch.manual_seed(seed)
        with context:
            steps = [pipe_step(pipe, x, loss_fn=loss_fn, **how) for _ in range(2)]
        results.append(steps)
        after.append(torch.get_rng_state())
    exact = same and not halves and order in (list(range(m)), list(range(m))[::-1])
    for expected, actual in zip(*results, strict=True):
        assert_same_step(actual, expected, exact=exact)
    assert torch.equal(*after), "the generator stands elsewhere afterwards"
    torch.manual_seed(seed)
    assert not torch.equal(after[0], torch.get_rng_state()), "the generator was rewound"


def test_train_batch_draws_what_the_forward_draws():
    torch.manual_seed(5)
    layers = nn.Sequential(nn.Linear(6, 6), nn.Dropout(), nn.RReLU(), nn.Dropout())
    pipe, x = pipe_of(layers), torch.randn(8, 6)
    torch.manual_seed(1)
    expected = pipe(x).detach()
    after = torch.get_rng_state()
    for run in ("naive", "gpipe", "1f1b", "zb_h1"):
        torch.manual_seed(1)
        _, output = pipe.train_batch(x, loss_fn=weigh, schedule=run, return_outputs=True)
        assert torch.equal(output, expected)
        assert torch.equal(torch.get_rng_state(), after)
