"""``verify`` where the layers are on several accelerators, or on one and on the host."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from syncpipe import Pipe, verify
from tests.support import accelerator as acc
from tests.support.skips import Receive
from tests.verification.models import WIDTH, Counter, Send, batch, linear, pipe_of
from tests.verification.test_verify import tied

pytestmark = pytest.mark.gpu


def layers() -> list[nn.Module]:
    return [Send(), linear(), nn.Dropout(), nn.BatchNorm1d(WIDTH), Receive(), linear()]


@pytest.mark.parametrize("there", [0, "cpu"])
def test_a_clean_model(there: int | str) -> None:
    devices = [acc.device(1), acc.device(2), "cpu:0" if there == "cpu" else acc.device(there)]
    pipe = Pipe(
        nn.Sequential(*layers()), [2, 2, 2], devices=devices, chunks=4, deferred_batch_norm=True
    )
    x, y = batch()
    before = [t.detach().clone() for t in [*pipe.parameters(), *pipe.buffers()]]
    state = torch.get_rng_state()
    report = verify(pipe, x.to(devices[0]), y, loss_fn=F.cross_entropy)
    assert report.pipe_ok, report
    assert report["1f1b"].comparisons["buffers"].status in ("equal", "rounding")
    assert "BatchNorm sees micro-batches" in str(report)
    after = [*pipe.parameters(), *pipe.buffers()]
    assert all(map(torch.equal, before, after))
    assert all(p.grad is None for p in pipe.parameters())
    assert torch.equal(state, torch.get_rng_state())


def test_tied_weights() -> None:
    devices = [acc.device(1), acc.device(0), acc.device(2)]
    pipe = pipe_of(*tied(), balance=[2, 2, 2], devices=devices)
    x = torch.randint(9, (12,))
    assert verify(pipe, x.to(devices[0]), x, loss_fn=F.cross_entropy).ok


def test_a_culprit() -> None:
    devices = [acc.device(k) for k in range(2)]
    pipe = Pipe(nn.Sequential(linear(), Counter(), linear()), [1, 2], devices=devices, chunks=4)
    x, y = batch()
    report = verify(pipe, x.to(devices[0]), y, loss_fn=F.cross_entropy)
    assert not report.pipe_ok
    assert any("layer 1 ('1': Counter)" in finding.where for finding in report.findings)
