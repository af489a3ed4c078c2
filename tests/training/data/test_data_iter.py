"""Micro-batches from an iterator."""

from __future__ import annotations

import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from syncpipe import Pipe, inline
from tests.support.interrupts import interrupted
from tests.support.models import CHECKPOINT_MODES, assert_same_tree, linear_model
from tests.support.running import Do, assert_same, on_gradient, pipe_of
from tests.support.training import KINDS, RUNS
from tests.support.watched import alive
from tests.training.loss.whole import assert_trains_like, four, grads_of, whole


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("run", KINDS)
def test_an_iterator_gives_what_the_mini_batch_gives(run, checkpoint):
    def build():
        torch.manual_seed(2)
        layers = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))
        options = {"devices": RUNS[run][1], "chunks": 4, "checkpoint": checkpoint}
        return Pipe(layers, [1, 1, 1, 1], **options)

    ours, theirs = build(), build()
    for _ in range(2):
        x, target = torch.randn(8, 3), torch.randn(8, 3)
        expected = theirs.train_batch(x, target, loss_fn=F.mse_loss, **RUNS[run][0])
        pieces = zip(x.chunk(4), target.chunk(4), strict=True)
        loss = ours.train_batch(data_iter=pieces, loss_fn=F.mse_loss, **RUNS[run][0])
        assert_same([loss, *grads_of(ours)], [expected, *grads_of(theirs)])
        assert_same_tree(dict(ours.named_buffers()), dict(theirs.named_buffers()), "buffers")


@pytest.mark.parametrize("balance", [[4], [2, 2], [1, 3], [1, 1, 1, 1]])
@pytest.mark.parametrize("by_hand", [False, True])
def test_an_iterator_works_with_any_number_of_stages(balance, by_hand):
    pipe = pipe_of(linear_model(), balance, chunks=3)
    x, target = torch.randn(6, 3), torch.randn(6, 3)
    expected = whole(pipe, lambda plain: F.mse_loss(plain(x), target))
    pieces = list(zip(x.chunk(3), target.chunk(3), strict=True))
    if by_hand:
        with inline():
            loss = pipe.train_batch(data_iter=iter(pieces), loss_fn=F.mse_loss)
    else:
        loss = pipe.train_batch(data_iter=iter(pieces), loss_fn=F.mse_loss)
    assert_trains_like(pipe, loss, expected)
    loss = pipe.eval_batch(data_iter=iter(pieces), loss_fn=F.mse_loss)
    torch.testing.assert_close(loss, expected[0])


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_micro_batches_of_an_iterator_may_be_of_any_size(reduction):
    pipe = four()
    sizes = [1, 5, 2, 3]
    pieces = [(torch.randn(n, 3), torch.randn(n, 3)) for n in sizes]
    x, target = (torch.cat(part) for part in zip(*pieces, strict=True))

    def loss_fn(y, t):
        return F.mse_loss(y, t, reduction=reduction)

    expected = whole(pipe, lambda plain: loss_fn(plain(x), target))
    loss, output = pipe.train_batch(
        data_iter=iter(pieces), loss_fn=loss_fn, loss_reduction=reduction, return_outputs=True
    )
    assert_trains_like(pipe, loss, expected)
    assert output.shape == (11, 3)


def test_inputs_and_targets_of_an_iterator_may_need_gradients_and_be_trees():
    pipe = pipe_of(nn.Sequential(Do(lambda d: d["x"] * d["k"]), *linear_model(2)), chunks=2)
    leaf = torch.randn(3, requires_grad=True)
    pieces = [({"x": torch.randn(n, 3) * leaf, "k": n, "none": None}, leaf * n) for n in (2, 3)]
    plain = nn.Sequential(*pipe)

    def loss_fn(y, t):
        return (y - t).pow(2).mean()

    total = sum(loss_fn(plain(d), t) * d["k"] for d, t in pieces) / 5
    expected = torch.autograd.grad(total, [leaf, *pipe.parameters()], retain_graph=True)
    pipe.train_batch(data_iter=iter(pieces), loss_fn=loss_fn)
    torch.testing.assert_close([leaf.grad, *grads_of(pipe)], list(expected))


def test_exactly_chunks_micro_batches_are_taken():
    pipe = four(chunks=3)
    data = iter([(torch.randn(2, 3), k) for k in range(7)])
    seen = []
    for _ in range(2):
        pipe.train_batch(data_iter=data, loss_fn=lambda y, t: seen.append(t) or y.sum())
    assert seen == [0, 1, 2, 3, 4, 5]
    assert [t for _, t in data] == [6]


@pytest.mark.parametrize(
    ("run", "ahead"),
    [
        ({"schedule": "naive"}, 1),
        ({"schedule": "gpipe"}, 8),
        ({"slots": "textbook"}, 4),
        ({"slots": "overlap"}, 7),
        ({"slots": [2, 2, 1, 1]}, 2),
        ({"schedule": "zb_h1"}, 4),
    ],
    ids=str,
)
def test_micro_batches_are_taken_when_the_schedule_needs_them(run, ahead):
    most, taken, gone = [], [], []

    def data():
        while True:
            taken.append(1)
            most.append(len(taken) - len(gone))
            yield torch.randn(2, 3, requires_grad=True), None

    first = Do(lambda x: on_gradient(x, gone.append))
    layers = nn.Sequential(first, *linear_model(3))
    pipe = pipe_of(layers, chunks=8, checkpoint="never")
    pipe.train_batch(data_iter=data(), loss_fn=torch.sum, **run)
    assert len(taken) == 8
    assert max(most) == ahead


@pytest.mark.parametrize("run", KINDS)
@pytest.mark.parametrize("given", [0, 1, 3])
def test_an_iterator_that_ends_early_leaves_grad_as_it_was(given, run):
    pipe = Pipe(linear_model(), [1, 1, 1, 1], devices=RUNS[run][1], chunks=4)
    first = pipe[0].weight
    first.grad = torch.ones(3, 3)
    grad = first.grad
    data = iter([(torch.randn(2, 3), None)] * given)
    with pytest.raises(ValueError, match=rf"data_iter ended.*micro-batch {given} of 4") as caught:
        pipe.train_batch(data_iter=data, loss_fn=torch.sum, **RUNS[run][0])
    assert "RepeatingLoader" in str(caught.value)
    assert first.grad is grad
    assert torch.equal(grad, torch.ones(3, 3))
    assert [p.grad for p in pipe.parameters() if p is not first] == [None] * 7


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (torch.ones(2, 3), "data_iter gave Tensor for micro-batch 1"),
        ((torch.ones(2, 3),), "data_iter gave tuple of 1"),
        (None, "data_iter gave NoneType"),
    ],
    ids=["tensor", "one", "none"],
)
@pytest.mark.parametrize("call", ["train_batch", "eval_batch"])
def test_an_iterator_gives_pairs(call, item, message):
    pipe = four()
    data = iter([(torch.ones(2, 3), None), item, item, item])
    with pytest.raises(TypeError, match=message):
        getattr(pipe, call)(data_iter=data, loss_fn=torch.sum)
    assert grads_of(pipe) == [None] * 8


def test_pairs_may_be_lists():
    pipe = four()
    pipe.train_batch(data_iter=iter([[torch.ones(2, 3), None]] * 4), loss_fn=torch.sum)


@pytest.mark.parametrize("run", ["naive", "1f1b"])
def test_an_error_in_the_iterator_reaches_the_caller(run):
    error = OSError("disk")

    def data():
        yield torch.randn(2, 3), None
        yield torch.randn(2, 3), None
        raise error

    pipe = four()
    with pytest.raises(OSError, match="disk") as caught:
        pipe.train_batch(data_iter=data(), loss_fn=torch.sum, schedule=run)
    assert caught.value is error
    assert any("micro-batch 2" in note for note in error.__notes__)
    assert grads_of(pipe) == [None] * 8


@pytest.mark.parametrize("run", ["naive", "1f1b"])
def test_targets_of_an_iterator_are_dropped_with_their_micro_batch(run):
    references, most = [], []

    def data():
        while True:
            target = torch.randn(2, 3)
            references.append(weakref.ref(target))
            most.append(alive(references))
            yield torch.randn(2, 3), target

    pipe = pipe_of(linear_model(2), chunks=12, checkpoint="never")
    pipe.train_batch(data_iter=data(), loss_fn=F.mse_loss, schedule=run)
    # The one in the making, those that are underway, and the one that the generator still holds.
    assert max(most) <= {"naive": 2, "1f1b": 5}[run]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in a generator
def test_ctrl_c_at_any_place_leaves_the_generators_to_others():
    """A micro-batch is taken while the calling thread has the CPU's generator to itself."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    pipe = Pipe(model, [1, 1], devices=["cpu"] * 2, chunks=2)

    def train():
        data = iter([(torch.randn(2, 2), torch.randn(2, 2)) for _ in range(2)])
        return pipe.train_batch(data_iter=data, loss_fn=F.mse_loss)

    train()
    calls, _ = interrupted(-1, train)
    for at in range(1, calls, 2):
        with torch.enable_grad():
            interrupted(at, train)
    train()
