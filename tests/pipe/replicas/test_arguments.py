"""What replicas, balance and devices have to be; what traces and ``verify`` show of replicas."""

from __future__ import annotations

import copy
import pickle
from collections import Counter

import pytest
import torch
from torch import nn

import syncpipe
from syncpipe import Pipe
from syncpipe.schedules import gpipe
from tests.pipe.replicas.dealing import dealt
from tests.support.models import linear_model

SIX = [f"cpu:{k}" for k in range(6)]


@pytest.mark.parametrize(
    ("balance", "replicas", "devices", "error", "message"),
    [
        ([2, 2], [2, 1], 4, ValueError, r"replicas=\[2, 1\] need 3 devices.*4 are given"),
        ([2, 2], [2, 1], 2, ValueError, r"need 3 devices.*2 are given: cpu:0, cpu:1"),
        ([2, 2], [2, 1, 1], 4, ValueError, r"has 3 numbers, but balance has 2 partitions"),
        ([2, 2], [2, 0], 2, ValueError, r"replicas=\[2, 0\].*at least 1"),
        ([2, 2], 0, 2, ValueError, r"replicas=0.*at least 1"),
        ([2, 2], True, 2, ValueError, r"replicas=True"),
        ([2, 2], 2.0, 4, TypeError, r"replicas=2.0.*integer"),
        ([2, 2], "2", 4, TypeError, r"replicas='2'.*integer"),
        ([2, 2], 3, 4, ValueError, r"replicas=\[3, 3\] need 6 devices.*4 are given"),
        ([2, 2], 2, ["cpu:0", "cpu:0", "cpu:1", "cpu:2"], ValueError, r"replicas of stage 0 would"),
        ("parameters", 2, 5, ValueError, "5 devices cannot be divided by 2"),
        ("parameters", [2, 1], 3, ValueError, "makes stages that are alike, but replicas"),
        (None, 2, None, ValueError, r"replicas=2 needs balance=\[...\] and devices"),
    ],
)
def test_what_does_not_fit_is_refused(balance, replicas, devices, error, message):
    devices = SIX[:devices] if isinstance(devices, int) else devices
    with pytest.raises(error, match=message):
        Pipe(linear_model(), balance, replicas=replicas, devices=devices)


def test_devices_are_listed_stage_by_stage_and_there_are_workers_by_default():
    for devices in SIX[:3], None:
        pipe = Pipe(linear_model(), [3, 1], replicas=[2, 1], devices=devices)
        assert list(map(str, pipe.devices)) == SIX[:3]
    assert "replicas=[2, 1]" in repr(pipe)
    assert "stage 0 on cpu:0, cpu:1:" in repr(pipe)
    assert "replicas" not in repr(Pipe(linear_model(), [3, 1]))
    pipe = Pipe(linear_model(), "parameters", replicas=2, devices=SIX)
    assert (len(pipe.balance), pipe.replicas) == (3, [2, 2, 2])


def test_they_can_be_set_copied_and_saved():
    model, x = linear_model(), torch.randn(4, 3)
    expected = model(x)
    pipe = dealt(model, [2, 2], [2, 1], chunks=4)
    pipe.balance = [1, 3]
    assert pipe.replicas == [2, 1]
    with pytest.raises(ValueError, match=r"2 numbers, but balance has 3.*pipe.replicas = 1"):
        pipe.balance = [1, 1, 2]
    assert (pipe.balance, pipe.replicas) == ([1, 3], [2, 1])
    torch.testing.assert_close(pipe(x), expected)
    pipe.replicas = 1
    pipe.balance = [1, 1, 2]
    assert pipe.replicas == [1, 1, 1]
    pipe.devices = SIX[:4]
    pipe.replicas = [1, 2, 1]
    assert list(map(str, pipe.devices)) == SIX[:4]
    torch.testing.assert_close(pipe(x), expected)
    with pytest.raises(ValueError, match="need 4 devices"):
        pipe.devices = SIX[:3]
    assert list(pipe.state_dict()) == list(model.state_dict())
    for other in (copy.deepcopy(pipe), pickle.loads(pickle.dumps(pipe))):
        assert other.replicas == [1, 2, 1]
        assert torch.equal(other(x), pipe(x))
    pipe[-1] = nn.Linear(3, 3)
    assert pipe.replicas == [1, 2, 1]


def test_slots_and_schedules_are_for_each_device():
    with pytest.raises(ValueError, match=r"give it at most 2 \(the replicas are \[2, 1\]\)"):
        dealt(linear_model(), [2, 2], [2, 1], slots=[1, 3])
    pipe = dealt(linear_model(), [2, 2], [2, 1], slots=[1, 2], chunks=4)
    pipe.train_batch(torch.randn(4, 3), loss_fn=torch.mean)
    with pytest.raises(ValueError, match=r"made for device_of=\(0, 1, 2\), but here .*\(0, 1\)"):
        pipe.train_batch(torch.randn(4, 3), loss_fn=torch.mean, schedule=gpipe(4, 3))


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_a_trace_has_a_row_for_each_device(checkpoint):
    replicas, rows = [2, 1, 3], [[0, 1], [2], [3, 4, 5]]
    pipe = dealt(linear_model(3), [1] * 3, replicas, chunks=6, checkpoint=checkpoint)
    x = torch.randn(6, 3)
    with pipe.trace() as trace:
        pipe.train_batch(x, loss_fn=torch.mean)
        pipe(x).sum().backward()
    assert trace.rows == tuple(map(str, pipe.devices))
    counts = Counter((span.kind, span.j, span.row) for span in trace.spans)
    kinds = ["forward", "backward"] + ["recompute"] * (checkpoint == "always")
    for j, r in enumerate(replicas):
        for row in rows[j]:
            assert {counts[kind, j, row] for kind in kinds} == {2 * 6 // r}
            assert counts["reduce", j, row] == 2 * (j != 1)
    for span in trace.spans:
        if span.kind != "transfer":
            assert span.row == rows[span.j][span.i % replicas[span.j]]
    assert "reduce" in str(trace.table())


class Odd(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 if isinstance(self.weight, nn.Parameter) else 1.1)


@pytest.mark.parametrize(("first", "ok"), [(nn.Linear, True), (Odd, False)])
def test_verify_compares_them_with_the_plain_model(first, ok):
    layers = nn.Sequential(first(3, 8), nn.Dropout(0.2), nn.Linear(8, 3))
    pipe = dealt(layers, [2, 1], [2, 3], chunks=6)
    x, target = torch.randn(12, 3), torch.randint(3, (12,))
    before = [p.detach().clone() for p in pipe.parameters()]
    report = syncpipe.verify(pipe, x, target, loss_fn=nn.functional.cross_entropy)
    assert report.ok is ok, str(report)
    assert "replicas=[2, 3]" in str(report)
    assert all(map(torch.equal, before, pipe.parameters()))
