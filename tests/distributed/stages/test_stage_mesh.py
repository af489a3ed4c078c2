"""Three kinds of parallelism on eight ranks: pipeline, sharded data, tensors, two of each."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import distributed as dist

from syncpipe import Pipe
from tests.distributed.stages import mesh
from tests.distributed.stages.forked import results_of


@pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")
def test_training_in_three_dimensions_is_that_of_the_plain_model(tmp_path):
    ranks = results_of(mesh.everything, 8, tmp_path)
    names = dict(mesh.model().named_parameters(remove_duplicate=False))
    found = {name: value for rank in ranks for name, value in rank["differences"].items()}
    assert found.keys() == {f"{what} {name}" for what in ("step", "sums") for name in names}
    for rank in ranks:
        assert max(rank["differences"].values()) < 1e-5, rank
        assert rank["norms"] == pytest.approx([1, 1, 1], abs=1e-5)
        assert rank["sharded"][0] == mesh.WIDTH // 2
    last = [rank for rank in ranks if rank["losses"]]
    assert len(last) == 4
    for rank in last:
        assert rank["losses"] == pytest.approx([1, 1, 1], abs=1e-5)
        assert rank["validated"] < 1e-5
    pipe = Pipe(mesh.model(), [1, 1, 2], devices=["cpu:0", "cpu:1", "cpu:2"])
    dcp.load({"model": pipe.state_dict()}, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    wanted = torch.load(tmp_path / "plain.pt")
    for name, value in pipe.state_dict().items():
        assert torch.allclose(value, wanted[name], atol=1e-5)
