"""P1 with replicas: what the plain model computes, gradients added up replica by replica."""

from __future__ import annotations

import copy
import threading
from contextlib import nullcontext

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from syncpipe import Pipe, inline
from syncpipe.schedules import one_f_one_b
from tests.fuzz.layers import Dawdle
from tests.pipe.replicas.dealing import KINDS, copied, dealt, plain_forward, plain_train, shapes
from tests.pipe.test_equivalence import batch
from tests.support.models import (
    CHECKPOINT_MODES,
    LENGTH,
    Inner,
    Spec,
    assert_same,
    assert_same_tree,
    linear_model,
    step,
)
from tests.support.running import in_threads
from tests.support.training import any_schedule, assert_same_step, pipe_step, weigh

specs = st.lists(st.sampled_from(KINDS), min_size=1, max_size=6).map(tuple).map(Spec)
HALVES = ("zb_h1", "zb_h2", "any")
COMMON = {
    "data": st.data(),
    "chunks": st.integers(1, 6),
    "size": st.integers(1, 7),
    "checkpoint": st.sampled_from([*CHECKPOINT_MODES, [0]]),
    "input_grad": st.booleans(),
    "by_hand": st.booleans(),
}


@settings(max_examples=100)
@given(
    spec=specs,
    schedule=st.sampled_from(["naive", "gpipe", "1f1b", "zb_h1", "zb_h2", "any"]),
    **COMMON,
)
def test_train_batch_equals_the_plain_loop(
    data, spec, chunks, size, schedule, checkpoint, input_grad, by_hand
):
    balance, replicas = data.draw(shapes(len(spec.layers)))
    pipe = dealt(spec.build(), balance, replicas, chunks=chunks, checkpoint=checkpoint)
    plain, x = spec.build(), batch(size, input_grad)
    exact = schedule not in HALVES
    if schedule == "any":
        m = len(x.chunk(chunks))
        seed = data.draw(st.integers(0, 2**32))
        schedule = any_schedule(m, range(len(pipe.balance)), seed=seed, halves=True, in_order=False)
    target = {"scale": torch.rand(size)}
    options = {"loss_fn": weigh, "schedule": schedule}
    for _ in range(2):  # gradients are added to those that there are
        expected = plain_train(pipe, plain, x, target, **options)
        grads = [*expected.parameter_grads.values(), *expected.input_grads]
        assume(any(grad is not None for grad in grads))  # or train_batch refuses
        with inline() if by_hand else nullcontext():
            actual = pipe_step(pipe, x, target, verify=False, **options)
        assert_same_step(actual, expected, exact=exact)


@settings(max_examples=100)
@given(
    spec=specs.filter(lambda spec: isinstance(spec.build()(batch(1, False)), torch.Tensor)),
    **COMMON,
)
def test_pipe_of_x_equals_the_plain_model(
    data, spec, chunks, size, checkpoint, input_grad, by_hand
):
    balance, replicas = data.draw(shapes(len(spec.layers)))
    pipe = dealt(spec.build(), balance, replicas, chunks=chunks, checkpoint=checkpoint)
    plain, x = spec.build(), batch(size, input_grad)
    for _ in range(2):
        expected = plain_forward(pipe, plain, x)
        with inline() if by_hand else nullcontext():
            assert_same(step(pipe, pipe, x), expected)


ROUND = [[0, 1], [2, 3], [0, 1], [2, 3]]
V = [[0, 1], [2, 3], [2, 3], [0, 1]]


@pytest.mark.parametrize(
    ("schedule", "stages"),
    [
        *[(name, ROUND) for name in ("looped_bfs", "interleaved_1f1b", "interleaved_zero_bubble")],
        *[(name, V) for name in ("zbv", "v_half", "v_min", "dualpipev")],
        (one_f_one_b, [[0, 1], [0, 2], [3, 4], [0, 4]]),
        ("1f1b", [[0, 1, 2, 3], [4, 5, 6, 7], [8], [9]]),  # more of them than micro-batches
    ],
)
def test_several_stages_on_each_device(schedule, stages):
    devices = [f"cpu:{k}" for those in stages for k in those]
    replicas, chunks = list(map(len, stages)), 2 if len(stages[0]) > 2 else 8
    pipe = Pipe(linear_model(), [1] * 4, replicas=replicas, devices=devices, chunks=chunks)
    x = torch.randn(16, 3)
    expected = plain_train(pipe, copied(pipe), x, None, loss_fn=weigh, schedule=schedule)
    actual = pipe_step(pipe, x, loss_fn=weigh, schedule=schedule, verify=False)
    assert_same_step(actual, expected, exact=False)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("replicas", [[3, 1, 2], [2, 2, 2]])
def test_gradients_are_the_same_whoever_is_late(schedule, replicas):
    model = nn.Sequential(*[nn.Sequential(Inner(nn.Linear(LENGTH, 3)), Dawdle()) for _ in range(3)])
    pipe = dealt(model, [1] * 3, replicas, chunks=6)
    x, found = batch(12, True), []
    for _ in range(8):
        pipe.zero_grad()
        trained = pipe_step(pipe, x, loss_fn=weigh, schedule=schedule, verify=False)
        pipe.zero_grad()
        found.append((trained, step(pipe, pipe, x)))
    for trained, result in found[1:]:
        assert_same_step(trained, found[0][0])
        assert_same(result, found[0][1])


@pytest.mark.parametrize("replicas", [[3, 1], [1, 3], [2, 2]])
def test_what_random_layers_draw_depends_on_no_replica(replicas):
    def outputs(pipe: Pipe) -> list[torch.Tensor]:
        torch.manual_seed(3)
        trained = pipe_step(pipe, x, loss_fn=weigh, verify=False)
        pipe.zero_grad()
        return [pipe(x), trained.loss, trained.output]

    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.4), nn.RReLU(), nn.Linear(8, 3))
    x = torch.randn(10, 3)
    expected = outputs(dealt(model, [2, 2], [1, 1], chunks=5, checkpoint="always"))
    for checkpoint in CHECKPOINT_MODES:
        pipe = dealt(model, [2, 2], replicas, chunks=5, checkpoint=checkpoint)
        assert_same_tree(outputs(pipe), expected, checkpoint)


def test_micro_batches_of_an_iterator_come_in_order():
    pipe, asked = dealt(linear_model(), [2, 2], [3, 2], chunks=6), []
    pairs = [(torch.randn(2, 3), torch.randn(2, 3)) for _ in range(6)]
    items = (asked.append(i) or pair for i, pair in enumerate(pairs))
    loss_fn = nn.functional.mse_loss
    loss, output = pipe.train_batch(data_iter=items, loss_fn=loss_fn, return_outputs=True)
    assert asked == list(range(6))
    x, y = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    found = [p.grad.clone() for p in pipe.parameters()]
    pipe.zero_grad()
    expected = pipe.train_batch(x, y, loss_fn=loss_fn)
    assert torch.equal(loss, expected)
    assert torch.equal(output, pipe(x))
    assert_same_tree(found, [p.grad for p in pipe.parameters()], "gradients")


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_threads_may_call_one_pipe_at_once(checkpoint):
    """Each gets the gradients of its own input."""
    plain = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    pipe = dealt(copy.deepcopy(plain), [1, 2], [2, 2], chunks=4, checkpoint=checkpoint)
    together = threading.Barrier(3, timeout=60)

    def work(x: Tensor) -> None:
        leaf = x.clone().requires_grad_()
        expected = leaf.detach().clone().requires_grad_()
        plain(expected).square().sum().backward(inputs=[expected])
        try:
            for _ in range(40):
                together.wait()
                (found,) = torch.autograd.grad(pipe(leaf).square().sum(), leaf)
                torch.testing.assert_close(found, expected.grad)
        except BaseException:
            together.abort()
            raise

    in_threads(work, *(torch.randn(8, 4, dtype=torch.float64) for _ in range(3)))
