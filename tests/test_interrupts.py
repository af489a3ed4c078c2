"""Ctrl-C at any instant: nothing stays locked, exchanged or switched on behind it."""

from __future__ import annotations

import copy
import random
import signal
import threading

import pytest
import torch
from torch import nn

from syncpipe import Pipe

needs_timer = pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs setitimer")


def interrupted(call: object) -> None:
    """Runs ``call`` and interrupts it somewhere, or just after."""
    assert callable(call)
    try:
        signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-5, 6e-3))
        call()
    except KeyboardInterrupt:
        pass
    finally:
        try:
            signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            signal.setitimer(signal.ITIMER_REAL, 0)


@needs_timer
@pytest.mark.parametrize("devices", [["cpu"] * 3, ["cpu:0", "cpu:1", "cpu:2"]])
def test_interrupts_at_any_instant_leave_nothing_behind(devices: list[str]) -> None:
    layers = nn.Sequential(
        nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 8), nn.Tanh()
    )
    pipe = Pipe(layers, [2, 2, 1], devices=devices, chunks=4, checkpoint="always")
    x = torch.randn(8, 8)
    buffers = dict(pipe.named_buffers())

    def raise_interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, raise_interrupt)
    try:
        for _ in range(600):
            interrupted(lambda: pipe(x).sum().backward())
    finally:
        signal.signal(signal.SIGALRM, before)

    after = dict(pipe.named_buffers())
    assert all(after[name] is buffer for name, buffer in buffers.items())
    outputs = []

    def call(module: Pipe) -> None:
        torch.manual_seed(1)
        outputs.append(module(x).detach())

    for module in (pipe, copy.deepcopy(pipe)):  # another thread would wait for a lock left held
        thread = threading.Thread(target=call, args=(module,))
        thread.start()
        thread.join(60)
    assert len(outputs) == 2
    assert torch.equal(*outputs)
