"""``train_stream`` on accelerators, real or simulated."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from syncpipe import Pipe
from syncpipe.runtime.worker import Worker
from syncpipe.schedules.stream import VERSIONS
from tests.support import accelerator as acc
from tests.training.stream.models import (
    BALANCES,
    adam,
    assert_as_in_the_papers,
    mini_batches,
    mlp,
    sgd,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("four_devices")]


def placed(kind: type) -> list:
    return [kind(acc.device(k)) for k in range(4)]


def on_device(data: list) -> list:
    return [(x.to(acc.device()), target.to(acc.device())) for x, target in data]


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("versions", VERSIONS)
@pytest.mark.parametrize("kind", [torch.device, Worker])
def test_as_in_the_papers_whoever_is_late(kind, versions, checkpoint):
    data = mini_batches(7, 8)
    pipe = Pipe(mlp(), BALANCES[4], devices=placed(kind), chunks=4, checkpoint=checkpoint)
    memory = [p.data_ptr() for p in pipe.parameters()]
    for where in (data, on_device(data)):  # from the host, and from a device
        pipe.load_state_dict(mlp().state_dict())
        with acc.late(len(where)):
            assert_as_in_the_papers(
                pipe, on_device(data), where, model=mlp().to(acc.device()), versions=versions,
                chunks=4 if versions == "2bw" else 1, exact=False,
            )  # fmt: skip
    assert [p.data_ptr() for p in pipe.parameters()] == memory


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("replicas", [[2, 1, 1], [1, 2, 1], [1, 3], [2, 2]])
@pytest.mark.parametrize("kind", [torch.device, Worker])
def test_round_robin_over_replicas_whoever_is_late(kind, replicas, checkpoint):
    balance, data = {3: [2, 3, 2], 2: [3, 4]}[len(replicas)], on_device(mini_batches(9))
    pipe = Pipe(mlp(), balance, devices=placed(kind), replicas=replicas, checkpoint=checkpoint)
    for k in range(3):
        pipe.load_state_dict(mlp().state_dict())
        with acc.late(k):
            assert_as_in_the_papers(
                pipe, data, model=mlp().to(acc.device()), optimizer=adam, replicas=replicas,
                exact=False,
            )  # fmt: skip


def test_the_caller_may_read_late_what_optimizers_have_in_mind():
    def momenta(devices):
        pipe = Pipe(mlp(), BALANCES[4], devices=devices)
        done = pipe.train_stream(mini_batches(5), optimizer=sgd, loss_fn=F.cross_entropy)
        with acc.late(1):
            states = [state for each in done.optimizers for state in each.state.values()]
            found = [state["momentum_buffer"] * 1 for state in states]
            for state in states:
                state.clear()
        return [each.cpu() for each in found]

    ours, theirs = momenta(placed(Worker)), momenta(["cpu"] * 4)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)
