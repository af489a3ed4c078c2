"""P4 of ``train_batch``: failures and threads, many at once, and the garbage collector."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from typing import Any

import pytest
import torch
from torch import nn

from tests.conftest import our_threads
from tests.support.running import Do, pipe_of
from tests.support.watched import numbered
from tests.training.failures.failing import CHUNKS, assert_works, failing_pipe, mean


def test_failures_leave_no_threads_and_no_call_behind():
    before = set(our_threads())
    pipe = failing_pipe("1f1b")
    pipe.train_batch(numbered(CHUNKS), loss_fn=mean)
    threads = set(our_threads()) - before
    assert len(threads) == 4
    pipe[1].phase, pipe[1].i = "backward", 1
    for _ in range(50):
        pipe[1].error = ValueError("bad")
        with pytest.raises(ValueError, match="bad"):
            pipe.train_batch(numbered(CHUNKS), loss_fn=mean)
    assert set(our_threads()) - before == threads
    assert_works(pipe, "1f1b")


def test_of_several_failures_that_of_the_earliest_action_is_raised():
    both = threading.Barrier(2)

    def fail(message: str, i: int) -> Any:
        def function(x):
            if int(x[0, 0]) == i:
                both.wait()
                raise ValueError(message)

        return Do(function)

    layers = nn.Sequential(fail("late", 2), fail("early", 0))
    pipe = pipe_of(layers, chunks=CHUNKS)
    for _ in range(20):
        with pytest.raises(ValueError, match="early"):
            pipe.train_batch(numbered(CHUNKS).requires_grad_(), loss_fn=mean, schedule="gpipe")


def test_a_failed_call_in_one_thread_does_not_touch_that_of_another():
    def check(x):
        if x.isnan().any():
            raise ValueError("nan")

    pipe = pipe_of(nn.Sequential(nn.Linear(5, 5), Do(check), nn.Linear(5, 5)))
    x = torch.randn(8, 5)
    bad = torch.full_like(x, float("nan"))
    count = 40

    def good():
        for _ in range(count):
            pipe.train_batch(x, loss_fn=torch.sum)

    thread = threading.Thread(target=good)
    thread.start()
    for _ in range(count):
        with pytest.raises(ValueError, match="nan"):
            pipe.train_batch(bad, loss_fn=torch.sum)
    thread.join()
    ours = [p.grad for p in pipe.parameters()]
    pipe.zero_grad()
    good()
    assert all(torch.equal(a, p.grad) for a, p in zip(ours, pipe.parameters(), strict=True))


GARBAGE = """
    import faulthandler, gc, random, time
    faulthandler.dump_traceback_later(240, exit=True)  # comes without the interpreter's lock, too
    import torch
    from torch import nn
    from syncpipe import Pipe

    class Slow:
        def __del__(self):
            time.sleep(0.002)  # lets other threads run

    class Litter(nn.Module):
        # Leaves a cycle, for which the garbage collector comes soon after.
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x):
            cycle = [Slow()]
            cycle.append(cycle)
            gc.set_threshold(gc.get_count()[0] + random.randrange(10), 1000, 1000)
            return x * self.weight

    torch.set_num_threads(1)
    layers = nn.Sequential(*[Litter() for _ in range(12)])
    devices = ["cpu:0", "cpu:1", "cpu:2"]
    pipe = Pipe(layers, [4, 4, 4], devices=devices, chunks=4, checkpoint="always")
    for _ in range(10):
        pipe.train_batch(torch.randn(8, 5), loss_fn=lambda y: y.pow(2).mean(), schedule="gpipe")
    print("done")
"""


def test_the_garbage_collector_may_come_at_any_time():
    # PyTorch makes the result of `Generator.get_state` with the generator's mutex held. Whoever
    # waits for that must not hold the interpreter's lock.
    code = textwrap.dedent(GARBAGE)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=260, check=False
    )
    assert done.stdout == "done\n", done.stderr[-3000:]
