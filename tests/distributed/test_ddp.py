"""``DistributedDataParallel(pipe)`` on two gloo processes: the gradients of all ranks, averaged."""

from __future__ import annotations

import pytest

from tests.support.running import MODES

KINDS = ["plain", "no_sync", "find_unused_parameters", "static_graph", "changing chunks"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", MODES)
def test_training_with_ddp_is_training_with_averaged_gradients(two, kind, mode):
    assert max(two.run("ddp:difference", kind, mode)) < 1e-6


def test_train_batch_inside_of_ddp_warns_once(two):
    for [told], nothing in two.run("ddp:warned"):
        assert "tests/distributed/ddp.py: this is one of 2 processes" in told
        assert "syncpipe.distributed.data_parallel(pipe)" in told
        assert not nothing
