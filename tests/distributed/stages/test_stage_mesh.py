"""Three kinds of parallelism on eight ranks: pipeline, sharded data, tensors, two of each."""

from __future__ import annotations

import pytest
from torch import distributed as dist

from tests.distributed.stages import mesh
from tests.distributed.stages.forked import results_of


@pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")
def test_fully_shard_and_parallelize_module_in_stages_leave_the_plain_gradients(tmp_path):
    ranks = results_of(mesh.everything, 8, tmp_path)
    found = {name: value for rank in ranks for name, value in rank["differences"].items()}
    wanted = dict(mesh.model().named_parameters(remove_duplicate=False))
    assert found.keys() == wanted.keys()
    for rank in ranks:
        assert max(rank["differences"].values()) < 1e-6, rank
        assert rank["sharded"][0] == mesh.WIDTH // 2
