"""P4 of ``train_batch``: failures of losses, iterators, gradients and recomputations."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.support.running import Do, on_gradient, pipe_of, raising
from tests.support.training import KINDS, RUNS
from tests.support.watched import Fails, Odd, numbered
from tests.training.failures.failing import (
    CHUNKS,
    Grads,
    assert_works,
    failing_pipe,
    mean,
    notes_of,
)


@pytest.mark.parametrize("call", ["train_batch", "eval_batch"])
@pytest.mark.parametrize("run", KINDS)
def test_an_exception_in_the_loss_function(run, call):
    pipe = failing_pipe(run)
    options = RUNS[run][0] if call == "train_batch" else {}
    for k in range(CHUNKS):
        error = Odd(1, 2)

        def fail(y, k=k, error=error):
            if int(y[0, 0]) == k:
                raise error
            return mean(y)

        grads = Grads(pipe)
        with pytest.raises(Odd) as caught:
            getattr(pipe, call)(numbered(CHUNKS), loss_fn=fail, **options)
        assert caught.value is error
        assert grads.unchanged()
        assert f"loss_fn, micro-batch {k}" in notes_of(error)
        assert_works(pipe, run)


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("run", KINDS)
def test_an_exception_in_the_backward_of_the_loss(run, checkpoint):
    head, layer = nn.Linear(5, 1), Fails()
    pipe = failing_pipe(run, checkpoint)
    grads, heads = Grads(pipe), Grads(head)
    layer.error, layer.phase, layer.i = ValueError("bad"), "backward", 1
    with pytest.raises(ValueError, match="bad") as caught:
        pipe.train_batch(numbered(CHUNKS), loss_fn=lambda y: head(layer(y)).mean(), **RUNS[run][0])
    assert "micro-batch 1" in notes_of(caught.value)
    assert grads.unchanged()
    assert heads.unchanged()
    assert layer.weight.grad is None
    assert_works(pipe, run)


@pytest.mark.parametrize("run", KINDS)
def test_an_exception_in_the_iterator(run):
    pipe = failing_pipe(run)
    for k in range(CHUNKS):
        error = Odd(1, 2)

        def data(k=k, error=error):
            for x in numbered(CHUNKS).chunk(CHUNKS)[:k]:
                yield x, None
            raise error

        grads = Grads(pipe)
        with pytest.raises(Odd) as caught:
            pipe.train_batch(data_iter=data(), loss_fn=mean, **RUNS[run][0])
        assert caught.value is error
        assert f"micro-batch {k}" in notes_of(error)
        assert grads.unchanged()
        assert_works(pipe, run)


def test_a_failure_in_what_the_caller_computed_before():
    pipe = failing_pipe("1f1b")
    grads = Grads(pipe)
    x = numbered(CHUNKS).requires_grad_()
    bad = on_gradient(x, raising(lambda: ValueError("bad")))
    with pytest.raises(ValueError, match="bad"):
        pipe.train_batch(bad, loss_fn=mean)
    assert grads.unchanged()
    assert x.grad is None


def test_outputs_that_cannot_be_gathered_change_nothing():
    layers = nn.Sequential(Fails(), Do(lambda x: (x, len(x))))
    pipe = pipe_of(layers, chunks=2)
    grads = Grads(pipe)
    with pytest.raises(ValueError, match="differs between micro-batches"):
        pipe.train_batch(numbered(3, 1), loss_fn=lambda y: y[0].sum(), return_outputs=True)
    assert grads.unchanged()


@pytest.mark.parametrize("schedule", ["naive", "1f1b", "zb_h1"])
def test_parameters_that_only_the_loss_knows_get_their_grad_back_too(schedule):
    outside = [torch.ones(5, requires_grad=True) for _ in range(2)]
    outside[0].grad = grad = torch.ones(5)
    calls = []

    def fail(y):
        calls.append(1)
        if len(calls) == CHUNKS:
            raise ValueError("bad")
        return (y * outside[0] * outside[1]).sum()

    pipe = pipe_of(nn.Sequential(Fails(), Fails()), chunks=CHUNKS)
    with pytest.raises(ValueError, match="bad"):
        pipe.train_batch(numbered(CHUNKS), loss_fn=fail, schedule=schedule)
    assert outside[0].grad is grad
    assert torch.equal(grad, torch.ones(5))
    assert outside[1].grad is None


def test_sparse_gradients_are_put_back():
    pipe = pipe_of(nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 3)), chunks=2)
    ids, calls = torch.tensor([0, 2, 2, 4]), []
    pipe.train_batch(ids, loss_fn=torch.sum)
    grad = pipe[0].weight.grad
    before = grad.to_dense().clone()

    def fail(y):
        calls.append(1)
        return 1 / 0 if len(calls) == 2 else y.sum()

    with pytest.raises(ZeroDivisionError):
        pipe.train_batch(ids, loss_fn=fail, schedule="naive")
    assert pipe[0].weight.grad is grad
    assert torch.equal(grad.to_dense(), before)


def test_a_recomputation_that_gives_something_else_is_an_error():
    from syncpipe import is_recomputing

    class Unsteady(nn.Module):
        def forward(self, x):
            return (x * 2).detach() if is_recomputing() else x * 2

    pipe = pipe_of(nn.Sequential(nn.Linear(5, 5), Unsteady()), checkpoint="always")
    grads = Grads(pipe)
    with pytest.raises(
        RuntimeError, match=r"stage 1 .* stored other tensors .* when it was recomputed"
    ):
        pipe.train_batch(torch.randn(8, 5), loss_fn=mean)
    assert grads.unchanged()


def test_a_parameter_that_changes_before_the_recomputation_is_an_error():
    pipe = pipe_of(nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)), checkpoint="always")

    def step(y):
        with torch.no_grad():
            pipe[1].weight.add_(1)
        return mean(y)

    with pytest.raises(RuntimeError, match="modified in place"):
        pipe.train_batch(torch.randn(8, 5), loss_fn=step)
