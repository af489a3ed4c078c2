"""What replicas, balance and devices have to be."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from syncpipe import Pipe
from syncpipe.schedules import gpipe
from tests.pipe.replicas.dealing import dealt
from tests.support.models import linear_model

SIX = [f"cpu:{k}" for k in range(6)]


@pytest.mark.parametrize(
    ("replicas", "devices", "error", "message"),
    [
        ([2, 1], SIX[:4], ValueError, r"replicas=\[2, 1\] need 3 devices.*4 are given"),
        ([2, 1], SIX[:2], ValueError, r"need 3 devices.*2 are given: cpu:0, cpu:1"),
        ([2, 1, 1], SIX[:4], ValueError, r"has 3 numbers, but balance has 2 partitions"),
        ([2, 0], SIX[:2], ValueError, r"replicas=\[2, 0\]: each stage is served by at least 1"),
        (0, SIX[:2], ValueError, r"replicas=0: each stage is served by at least 1"),
        (True, SIX[:2], ValueError, r"replicas=True"),
        (2.0, SIX[:4], TypeError, r"replicas=2.0: must be a number of devices for each stage"),
        ("2", SIX[:4], TypeError, r"replicas='2': must be"),
        (3, SIX[:4], ValueError, r"replicas=\[3, 3\] need 6 devices.*4 are given"),
        (2, ["cpu:0", "cpu:0", "cpu:1", "cpu:2"], ValueError, r"replicas of stage 0 would be on"),
    ],
)
def test_what_does_not_fit_is_refused(replicas, devices, error, message):
    with pytest.raises(error, match=message):
        Pipe(linear_model(), [2, 2], replicas=replicas, devices=devices)


def test_a_balance_by_name_has_a_partition_for_each_group_of_devices():
    pipe = Pipe(linear_model(), "parameters", replicas=2, devices=SIX)
    assert len(pipe.balance) == 3
    assert pipe.replicas == [2, 2, 2]
    with pytest.raises(ValueError, match="5 devices cannot be divided by 2"):
        Pipe(linear_model(), "parameters", replicas=2, devices=SIX[:5])
    with pytest.raises(ValueError, match="makes stages that are alike, but replicas"):
        Pipe(linear_model(), "parameters", replicas=[2, 1], devices=SIX[:3])


def test_layers_that_are_placed_already_need_a_balance_for_replicas():
    with pytest.raises(ValueError, match=r"replicas=2 needs balance=\[...\] and devices"):
        Pipe(linear_model(), replicas=2)


def test_devices_are_listed_stage_by_stage():
    pipe = Pipe(linear_model(), [3, 1], replicas=[2, 1], devices=SIX[:3])
    assert list(map(str, pipe.devices)) == SIX[:3]
    assert "replicas=[2, 1]" in repr(pipe)
    assert "stage 0 on cpu:0, cpu:1:" in repr(pipe)
    assert "replicas" not in repr(Pipe(linear_model(), [3, 1]))


def test_by_default_each_replica_has_a_cpu_worker():
    if torch.accelerator.is_available():
        pytest.skip("the default is then another one")
    pipe = Pipe(linear_model(), [2, 2], replicas=[2, 1])
    assert list(map(str, pipe.devices)) == SIX[:3]


def test_they_can_be_set():
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
    pipe[-1] = nn.Linear(3, 3)
    assert pipe.replicas == [1, 2, 1]


def test_slots_are_those_of_each_device():
    with pytest.raises(ValueError, match=r"give it at most 2 \(the replicas are \[2, 1\]\)"):
        dealt(linear_model(), [2, 2], [2, 1], slots=[1, 3])
    pipe = dealt(linear_model(), [2, 2], [2, 1], slots=[1, 2], chunks=4)
    pipe.train_batch(torch.randn(4, 3), loss_fn=torch.mean)


def test_a_schedule_for_other_stages_is_refused():
    pipe = dealt(linear_model(), [2, 2], [2, 1], chunks=4)
    with pytest.raises(ValueError, match=r"made for device_of=\(0, 1, 2\), but here .*\(0, 1\)"):
        pipe.train_batch(torch.randn(4, 3), loss_fn=torch.mean, schedule=gpipe(4, 3))


def test_it_is_copied_and_pickled_as_one_model():
    pipe, x = dealt(linear_model(), [2, 2], [2, 2], chunks=4), torch.randn(4, 3)
    expected = pipe(x)
    for other in (copy.deepcopy(pipe), pickle.loads(pickle.dumps(pipe))):
        assert other.replicas == [2, 2]
        assert torch.equal(other(x), expected)
    file = io.BytesIO()
    torch.save(pipe.state_dict(), file)
    assert list(pipe.state_dict()) == list(linear_model().state_dict())
    assert len(list(pipe.parameters())) == len(list(linear_model().parameters()))
