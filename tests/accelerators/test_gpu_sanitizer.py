"""PyTorch's own search for races between streams, which knows CUDA only."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

from tests.accelerators.four import MODES

pytestmark = pytest.mark.cuda

SANITIZED = """
    import sys
    import torch
    from torch import nn
    from torch.cuda import _sanitizer
    from syncpipe import Pipe
    from syncpipe.runtime.worker import Worker

    assert _sanitizer.cuda_sanitizer.enabled
    layers = [layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.Tanh())]
    pipe = Pipe(
        nn.Sequential(*layers), [4, 4], devices=[Worker("cuda:0"), Worker("cuda:0")], chunks=4,
        checkpoint=sys.argv[1],
    )
    if sys.argv[2] == "broken":
        from syncpipe.runtime.streams import DeviceStreams
        DeviceStreams.receive = lambda self, event, tensors: None
    for _ in range(3):
        x = torch.randn(16, 32, device="cuda:0", requires_grad=True)
        pipe(x).sum().backward()
    print("finished")
"""


@pytest.mark.parametrize(
    ("checkpoint", "how"), [*((mode, "whole") for mode in MODES), ("never", "broken")]
)
def test_sanitizer(checkpoint, how):
    """It finds nothing in steps of a pipe, and a wait that is missing."""
    # Its mode is active here, so that the pipe runs inline.
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SANITIZED), checkpoint, how],
        env={**os.environ, "TORCH_CUDA_SANITIZER": "1"},
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    whole = how == "whole"
    assert (done.returncode == 0) == whole, done.stderr
    assert "finished" in done.stdout or not whole
    races = "data race" in done.stderr or "CUDASanitizerErrors" in done.stderr
    assert races != whole, done.stderr
