"""``DistributedDataParallel(pipe)`` on two gloo processes: the gradients of all ranks, averaged."""

from __future__ import annotations

import pytest

from tests.support.running import MODES

KINDS = ["plain", "no_sync", "find_unused_parameters", "static_graph", "changing chunks"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", MODES)
def test_training_with_ddp_is_training_with_averaged_gradients(two, kind, mode):
    assert max(two.run("ddp:difference", kind, mode)) < 1e-6
