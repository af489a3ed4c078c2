"""``train_stream`` computes what the papers say, bit for bit."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from syncpipe import Pipe, inline
from syncpipe.schedules.stream import VERSIONS
from tests.training.stream.models import WORKERS, adam, mini_batches, mlp, sgd
from tests.training.stream.reference import by_the_paper, reference

BALANCES = {1: [7], 2: [3, 4], 3: [2, 1, 4], 4: [2, 2, 1, 2]}


def assert_same(pipe, model):
    for (name, a), (_, b) in zip(
        pipe.state_dict().items(), model.state_dict().items(), strict=True
    ):
        assert torch.equal(a, b), name


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 4),
    steps=st.integers(1, 9),
    versions=st.sampled_from(VERSIONS),
    checkpoint=st.sampled_from(["never", "always", "except_last"]),
    optimizer=st.sampled_from([sgd, adam]),
    normed=st.booleans(),
    threads=st.booleans(),
    size=st.sampled_from([8, 11]),
)
def test_as_in_the_papers(n, steps, versions, checkpoint, optimizer, normed, threads, size):
    data, balance, chunks = mini_batches(steps, size), BALANCES[n], 4
    devices = WORKERS[:n] if threads else ["cpu"] * n
    pipe = Pipe(mlp(normed), balance, devices=devices, chunks=chunks, checkpoint=checkpoint)
    if normed and versions == "2bw" and size == 11:
        size = 8  # micro-batches of two samples at least, for BatchNorm
        data = mini_batches(steps, size)
    found = pipe.train_stream(data, optimizer=optimizer, loss_fn=F.cross_entropy, versions=versions)
    model = mlp(normed)
    chunks = chunks if versions == "2bw" else 1
    losses = reference(
        model, balance, data, optimizer, F.cross_entropy, versions=versions, chunks=chunks
    )
    assert torch.equal(found.losses, torch.stack(losses))
    assert_same(pipe, model)


@settings(max_examples=60, deadline=None)
@given(
    replicas=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    steps=st.integers(1, 13),
    known=st.booleans(),
    checkpoint=st.sampled_from(["never", "always", "except_last"]),
    optimizer=st.sampled_from([sgd, adam]),
    threads=st.booleans(),
)
def test_round_robin_over_replicas(replicas, steps, known, checkpoint, optimizer, threads):
    data, balance = mini_batches(steps), BALANCES[len(replicas)]
    devices = [f"cpu:{w}" for w in range(sum(replicas))]
    pipe = Pipe(mlp(), balance, devices=devices, replicas=replicas, checkpoint=checkpoint)
    with nullcontext() if threads else inline():
        found = pipe.train_stream(
            iter(data), optimizer=optimizer, loss_fn=F.cross_entropy, steps=steps if known else None
        )
    model = mlp()
    losses = reference(model, balance, data, optimizer, F.cross_entropy, replicas=replicas)
    assert torch.equal(found.losses, torch.stack(losses))
    assert_same(pipe, model)
    for i, used in enumerate(found.versions):
        paper = [by_the_paper(i, j, replicas, "stashing") for j in range(len(replicas))]
        assert used == tuple(paper)
    again = pipe.train_batch(*data[0], loss_fn=F.cross_entropy)  # replicas have the last weights
    torch.testing.assert_close(again, F.cross_entropy(model(data[0][0]), data[0][1]).detach())


@pytest.mark.parametrize("versions", ["stashing", "vertical_sync"])
@pytest.mark.parametrize("devices", [["cpu"], ["cpu:0"]])
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_a_single_stage_is_the_plain_loop(versions, devices, checkpoint):
    data, model = mini_batches(8), mlp(normed=True)
    pipe = Pipe(mlp(normed=True), [7], devices=devices, checkpoint=checkpoint)
    found = pipe.train_stream(data, optimizer=adam, loss_fn=F.cross_entropy, versions=versions)
    optimizer, losses = adam(list(model.parameters())), []
    for x, target in data:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    assert torch.equal(found.losses, torch.stack(losses))
    assert_same(pipe, model)
