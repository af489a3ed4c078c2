"""What can be seen of replicas: traces, ``verify``."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

import syncpipe
from tests.pipe.replicas.dealing import dealt
from tests.support.models import linear_model


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_a_trace_has_a_row_for_each_device(checkpoint):
    pipe = dealt(linear_model(3), [1] * 3, [2, 1, 3], chunks=6, checkpoint=checkpoint)
    x = torch.randn(6, 3)
    with pipe.trace() as trace:
        pipe.train_batch(x, loss_fn=torch.mean)
        pipe(x).sum().backward()
    assert trace.rows == tuple(map(str, pipe.devices))
    counts = Counter((span.kind, span.j, span.row) for span in trace.spans)
    places = [(0, 0), (0, 1), (1, 2), (2, 3), (2, 4), (2, 5)]
    kinds = ["forward", "backward"] + ["recompute"] * (checkpoint == "always")
    for j, row in places:
        cells = 6 // [2, 1, 3][j]
        for kind in kinds:
            assert counts[kind, j, row] == 2 * cells
        assert counts["reduce", j, row] == 2 * (j != 1)
    for span in trace.spans:
        if span.kind != "transfer":
            assert (span.j, span.row) in places
            assert span.row == [[0, 1], [2], [3, 4, 5]][span.j][span.i % [2, 1, 3][span.j]]
    assert "reduce" in str(trace.table())


def test_verify_compares_them_with_the_plain_model():
    layers = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.2), nn.Linear(8, 3))
    pipe = dealt(layers, [2, 1], [2, 3], chunks=6)
    x, target = torch.randn(12, 3), torch.randint(3, (12,))
    before = [p.detach().clone() for p in pipe.parameters()]
    report = syncpipe.verify(pipe, x, target, loss_fn=nn.functional.cross_entropy)
    assert report.ok, str(report)
    assert "replicas=[2, 3]" in str(report)
    assert all(map(torch.equal, before, pipe.parameters()))


def test_verify_finds_what_a_replica_does_otherwise():
    class Odd(nn.Linear):
        calls: list[int]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * (1 if isinstance(self.weight, nn.Parameter) else 1.1)

    pipe = dealt(nn.Sequential(Odd(3, 3), nn.Linear(3, 3)), [1, 1], [2, 1], chunks=4)
    report = syncpipe.verify(pipe, torch.randn(8, 3), loss_fn=torch.mean)
    assert not report.ok
