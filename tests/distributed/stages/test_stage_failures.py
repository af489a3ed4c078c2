"""Ranks that fail, or do different things: all end in bounded time, with the reason."""

from __future__ import annotations

import gc
import os
import re
import signal

import pytest
import torch
import torch.nn.functional as F
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from syncpipe.distributed import peers, stage
from tests.distributed.processes import ranks, told
from tests.support.watched import Fails, numbered

#: In which phase of the third micro-batch of the second stage.
ERRORS = {
    "forward": KeyError("the third micro-batch"), "backward": RuntimeError("a closed file"),
}  # fmt: skip


def fails(how: str) -> list[str] | None:
    """What a call says that fails in one rank, or is another one there; and what the next says."""
    peers.PATIENCE, peers._POLL = 0.3, 0.1
    rank = dist.get_rank()
    layers = nn.Sequential(nn.Identity(), culprit := Fails(), nn.Linear(5, 4))
    x, y = numbered(6), torch.randn(12, 4)
    if how in ERRORS:
        culprit.phase, culprit.i, culprit.error = how, 2, ERRORS[how]
        culprit.error.__cause__ = OSError("the disk is full")
    mine = stage(layers, [1, 1, 1], sample=x[:2], timeout=2 if how == "late" else None)
    schedule = mine.schedule("1f1b", chunks=6, loss_fn=F.mse_loss)
    calls = {
        "step": lambda: schedule.step(x, target=y),
        "eval": lambda: schedule.eval(x),
        "clip": lambda: mine.clip_grad_norm_(1.0),
        "refused": lambda: schedule.step(x[:7], target=y),
    }
    if how not in ERRORS:
        calls["step"]()
    if how == "leaves" and rank == 1:
        del mine, schedule, calls
        gc.collect()  # it says so when it lets go of its stages
        return None
    if how == "killed" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "late" and rank == 1:  # until the others have given up
        return [told(lambda: _wait_for(mine.peers)), told(calls["step"])]
    odd = how in calls and rank == (2 if how == "eval" else 0)
    return [told(calls[how if odd else "step"]), told(calls["step"])]


def _wait_for(here: peers.Peers) -> None:
    while not here.why() and not any(row.gone for row in here._states().values()):
        pass
    raise RuntimeError("this pipeline has ended: ")


ENDED = r" \(the pipeline has ended in all processes\)"
STEP, EVAL = (rf"{what}\(\) of '1f1b' with 6 micro-batches" for what in ("step", "eval"))
THIRD = f"RemoteError: rank 1 failed with KeyError: 'the third micro-batch'.*{ENDED}"
BACK = "RemoteError: rank 1 failed with RuntimeError: a closed file"
SHORT = "RemoteError: rank 0 failed with ValueError: the input has 7 samples"
#: What each of the three says.
SAYS = {
    "forward": [THIRD, "KeyError: .*in stage 1 .layers 1 to 1. on rank 1 from OSError", THIRD],
    "backward": [BACK, "RuntimeError: a closed file from OSError", BACK],
    "eval": [f"LostProcess: call 2 is {STEP} in rank [01] and {EVAL} in rank 2{ENDED}"] * 3,
    "refused": ["ValueError: the input has 7 samples, and chunks=6", SHORT, SHORT],
    "clip": [f"LostProcess: call 2 is clip_grad_norm_ in rank 0 and {STEP} in rank [12]"] * 3,
    "late": [
        LATE := "LostProcess: rank 1 did not begin call 2 of a pipeline within 2 s",
        "",
        LATE,
    ],
    "leaves": ["LostProcess: rank 1 has ended, after call 1, and the others wait for it", "", ""],
    "killed": ["LostProcess: rank 1 no longer responds, and was probably killed"] * 3,
}


@pytest.mark.parametrize("how", SAYS)
def test_all_ranks_say_why(three, tmp_path, how):
    if how == "killed":
        with ranks(3, tmp_path) as processes:
            found = processes.run(fails, how, gone=[1])
    else:
        found = three.run(fails, how)
    for says, answer in zip(SAYS[how], found, strict=True):
        if answer is None or not says:
            continue
        first, second = answer
        assert re.match(says, first), first
        assert second.startswith("RuntimeError: this pipeline has ended: ")
        assert "from a checkpoint" in second


def outside() -> str:
    """What a step says of two pipelines, whose stages are sharded over both; rank 2 fails."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    x, y = numbered(6), torch.randn(12, 4)
    layers = nn.Sequential(culprit := Fails(), nn.Linear(5, 4))
    mine = stage(layers, [1, 1], sample=x[:2], group=mesh["pp"])
    for each in mine.stages:
        fully_shard(each.submod, mesh=mesh["dp"])
    schedule = mine.schedule("1f1b", chunks=6, loss_fn=F.mse_loss)
    if dist.get_rank() == 2:
        culprit.phase, culprit.i, culprit.error = "forward", 2, ERRORS["forward"]
    said = told(lambda: schedule.step(x, target=y))
    if dist.get_rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    peers._close(mesh["dp"].get_group())  # as the end of this process would
    return said


def test_ranks_are_named_by_their_numbers_among_all_and_healthy_ones_are_not_blamed(tmp_path):
    with ranks(4, tmp_path) as processes:
        *healthy, _, last = processes.run(outside, gone=[2])
    name = "rank 2 (rank 0 of the pipeline of ranks 2, 3)"
    assert last.startswith(f"RemoteError: {name} failed with KeyError: 'the third micro-batch'")
    for said in healthy:
        assert said.startswith("LostProcess: a process outside of this pipeline no longer responds")
        assert re.search("; rank [01] lost its connection", said), said
