"""One rank fails in the middle of a step: all end, with the reason, and let go of the group."""

from __future__ import annotations

import pytest
from torch import distributed as dist

from tests.distributed.stages import failures
from tests.distributed.stages.forked import results_of

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")


def test_the_rank_raises_what_its_layer_raised_and_the_others_say_so(tmp_path):
    ranks = results_of(failures.everything, 3, tmp_path)
    for where, error in {
        "forward": "KeyError: 'the third micro-batch'",
        "backward": "ZeroDivisionError: in backward",
    }.items():
        found = [rank[where] for rank in ranks]
        assert found[1][0].startswith(error)
        for rank in (0, 2):
            assert found[rank][0].startswith(f"RuntimeError: rank 1 failed: {error} (the pipeline")
        for _, second in found:
            assert second.startswith("RuntimeError: this pipeline has ended")
    assert "in stage 1 (layers 1 to 1) on rank 1" in ranks[1]["forward"][0]
