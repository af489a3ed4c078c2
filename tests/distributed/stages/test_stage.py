"""``syncpipe.distributed.pipelining.stage`` on four ranks, beside the plain model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import distributed as dist
from torch.distributed import pipelining
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from syncpipe import Pipe
from syncpipe.distributed import stage
from tests.distributed.stages import four
from tests.distributed.stages.forked import results_of
from tests.distributed.stages.models import model, specs

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    pipe = Pipe(model(), [3, 3, 3, 3], devices=["cpu"] * 4)
    torch.save(pipe.state_dict(), folder / "plain.pt")
    dcp.save({"model": pipe.state_dict()}, checkpoint_id=folder / "pipe", no_dist=True)
    pipe = Pipe(four.linears(), [1] * 4, devices=["cpu"] * 4)
    states = get_optimizer_state_dict(pipe, four.optimized(pipe), options=four.BY_NAME)
    dcp.save({"optim": states}, checkpoint_id=folder / "pipe's optimizer", no_dist=True)
    return results_of(four.everything, 4, folder)


def test_without_a_process_group_it_says_how_to_get_one():
    with pytest.raises(RuntimeError, match=r"torchrun.*init_process_group.*there is Pipe"):
        stage([torch.nn.ReLU()], [1])


REFUSALS = {
    "no sample": "ValueError: sample is missing: .*sample=x",
    "balance": r"ValueError: balance=\[6, 6\] has 2 stages for 4 ranks",
    "balance by time": "ValueError: balance='time' would be another one on each rank",
    "placement": "ValueError: placement='w': must be 'loop' or 'v'",
    "v": r"ValueError: .*4 stages, but placement='v' puts two on each of the 4 ranks: give 8",
    "object": r"TypeError: the value\['thing'\] from stage 1 .* on rank 1 is of type object",
    "constructor": "ValueError: seed=-1",
    "name": "ValueError: schedule 'zb_h1': between processes there are 'gpipe', '1f1b'",
    "v schedule": r"ValueError: 'zbv' needs two stages on each rank in a V: stage\(",
    "scale_grads": "TypeError: .*'scale_grads': leave it out: losses count as in",
    "loss": "TypeError: loss_fn=CrossEntropyLoss is a class",
    "forward": r"TypeError: this rank has some stages.*mine.schedule",
    "batch": r"ValueError: the input has 12 samples, and chunks=8 micro-batches of 2 .* are 16",
    "no multiple": r"ValueError: the input has 9 samples, .*drop_last=True",
    "target": r"ValueError: the target has 15 samples, and chunks=8",
    "schedules": "ValueError: schedules differ between processes: rank 0 has 1f1b, rank 2 has gp",
    "chunks": "ValueError: chunks differ between processes: rank 0 has 16, rank 1 has 8",
    "group": "TypeError: data_parallel must be a process group, or a DeviceMesh",
    "shared": "ValueError: 'interleaved_zero_bubble' runs backward in halves, and '4.weight' is",
    "no grad": "RuntimeError: step.. needs gradients, but grad mode is off",
}


@pytest.mark.parametrize("what", REFUSALS)
def test_what_cannot_be_is_refused_on_all_ranks_with_the_reason(ranks, what):
    found = [rank["refused"][what] for rank in ranks]
    assert any(re.search(REFUSALS[what], each) for each in found), found
    for each in found:
        assert re.match(r"RuntimeError: rank \d of the pipeline|\w+Error: ", each), found


def test_after_refusals_the_ranks_go_on(ranks):
    for rank in ranks:
        assert (rank["refused"]["then"], rank["refused"]["then right"]) == ("nothing", "True")


@pytest.mark.parametrize("name", four.RUNS)
def test_two_steps_of_each_schedule_leave_the_gradients_of_the_plain_model(ranks, name):
    kind, _ = {
        "gpipe": (pipelining.ScheduleGPipe, 1), "1f1b": (pipelining.Schedule1F1B, 1),
        "interleaved_1f1b": (pipelining.ScheduleInterleaved1F1B, 2),
        "looped_bfs": (pipelining.ScheduleLoopedBFS, 2),
        "interleaved_zero_bubble": (pipelining.ScheduleInterleavedZeroBubble, 2),
        "zbv": (pipelining.ScheduleZBVZeroBubble, 2),
        "dualpipev": (pipelining.ScheduleDualPipeV, 2),
    }[name]  # fmt: skip
    for rank in ranks:
        difference, theirs, stages = rank["schedules"][name]
        if theirs is type(None):
            pytest.skip("this PyTorch sends from a rank to itself")
        assert difference < 1e-6
        assert theirs is kind
        assert stages == (1 if name in ("gpipe", "1f1b") else 2)


def test_gradients_and_statistics_of_the_demo_are_those_of_the_plain_loop_bit_for_bit(ranks):
    keys: list[str] = []
    for rank in ranks:
        gradients, statistics, names = rank["batch norm"]
        assert gradients
        assert statistics
        keys += names
    assert keys == list(four.resnet(torch.nn.BatchNorm2d).state_dict())


def test_each_rank_builds_its_own_specs_with_the_values_of_one_process(ranks):
    for k, rank in enumerate(ranks):
        names, difference, loss = rank["built"]
        assert names == [str(3 * k), str(3 * k + 1), str(3 * k + 2)]
        assert difference < 1e-6
        assert (loss is None) == (k < 3)
        assert loss is None or abs(float(loss)) < 1e-6


@pytest.mark.parametrize("name", four.RUNS)
def test_evaluation_and_training_alternate(ranks, name):
    for rank in ranks:
        alike, loss, difference = rank["evaluated"][name]
        assert alike
        assert loss
        assert difference < 1e-6


def test_converted_models_take_their_own_arguments_and_return_their_own_outputs(ranks):
    keys: list[str] = []
    for rank in ranks:
        difference, names, _ = rank["trees"]
        assert difference < 1e-6
        keys += names
    assert sorted(keys) == sorted(four._Two().state_dict())
    assert [rank["trees"][2] for rank in ranks] == [None, None, None, torch.Size([8, 4])]


def test_checkpoints_move_between_a_pipe_and_processes_of_any_shape_and_the_plain_model(
    ranks, folder
):
    for rank in ranks:
        assert rank["checkpoints"] == dict.fromkeys(("optimizer", "four", "two", "again"), True)
    pipe = Pipe(four.linears(), [1] * 4, devices=["cpu"] * 4)
    assert four.loaded(pipe, folder / "four's optimizer", no_dist=True)
    for name in ("four", "two"):
        plain = torch.nn.Sequential(*[spec.build() for spec in specs()])
        plain[-1].weight = plain[0].words.weight
        dcp.load({"model": plain.state_dict()}, checkpoint_id=folder / name, no_dist=True)
        wanted = torch.load(folder / "plain.pt")
        assert all(torch.equal(value, wanted[key]) for key, value in plain.state_dict().items())


def test_ranks_that_were_told_different_things_say_so(ranks):
    for k, rank in enumerate(ranks):
        found = rank["disagreed"]
        assert (
            "balances differ between processes: rank 0 has [2, 4, 3, 3], rank 1" in found["balance"]
        )
        assert "layers differ between processes" in found["layers"]
        assert "nonsense" in found["one rank"]
        assert ("rank 3 of the pipeline refused" in found["one rank"]) == (k != 3)
