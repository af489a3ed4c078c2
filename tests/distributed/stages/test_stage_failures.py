"""Ranks that fail, or do different things: all end in bounded time, with the reason."""

from __future__ import annotations

import re
from typing import Any

import pytest
from torch import distributed as dist

from tests.distributed.stages import failures
from tests.distributed.stages.forked import results_of

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")

ENDED = r" \(the pipeline has ended in all processes\)"
STEP, EVAL = (
    "step\\(\\) of '1f1b' with 6 micro-batches",
    "eval\\(\\) of '1f1b' with 6 micro-batches",
)
#: What each of the three says.
SAYS = {
    "forward": [
        f"RemoteError: rank 1 failed with KeyError: 'the third micro-batch'.*{ENDED}",
        "KeyError: 'the third micro-batch'.*in stage 1 .layers 1 to 1. on rank 1",
        f"RemoteError: rank 1 failed with KeyError: 'the third micro-batch'.*{ENDED}",
    ],
    "backward": [
        "RemoteError: rank 1 failed with ZeroDivisionError: in backward",
        "ZeroDivisionError: in backward",
        "RemoteError: rank 1 failed with ZeroDivisionError: in backward",
    ],
    "eval": [f"LostProcess: call 2 is {STEP} in rank [01] and {EVAL} in rank 2{ENDED}"] * 3,
    "refused": [
        "ValueError: the input has 7 samples, and chunks=6",
        "RemoteError: rank 0 refused with ValueError: the input has 7 samples",
        "RemoteError: rank 0 refused with ValueError: the input has 7 samples",
    ],
    "clip": [f"LostProcess: call 2 is clip_grad_norm_ in rank 0 and {STEP} in rank [12]"] * 3,
    "leaves": ["LostProcess: rank 1 has ended, after call 1, and the others wait for it", "", ""],
    "killed": ["LostProcess: rank 1 does not answer any more, and has probably been killed"] * 3,
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    return results_of(failures.everything, 3, folder, killed=True)


@pytest.mark.parametrize("how", failures.WAYS)
def test_all_ranks_say_why(ranks, how):
    for rank, says in enumerate(SAYS[how]):
        if (how == "killed" and rank == 1) or not says:
            continue
        first, second = ranks[rank][how]
        assert re.match(says, first), first
        assert second.startswith("RuntimeError: this pipeline has ended: ")
        assert "from a checkpoint" in second
