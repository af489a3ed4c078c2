"""P4 of ``train_batch``: Ctrl-C leaves ``.grad`` as it was or complete, and the pipe working."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from itertools import product

import pytest
import torch
import torch.nn.functional as F

from syncpipe import Pipe
from tests.support.interrupts import interrupted
from tests.training.stream.models import mini_batches, mlp, sgd

COMMON = """
    import ast, faulthandler, functools, signal, sys
    faulthandler.dump_traceback_later(240, exit=True)
    import torch
    from torch import nn
    from torch.overrides import _get_current_function_mode_stack as stack
    from syncpipe import Pipe, inline
    from tests.training.failures.failing import Grads, mean

    torch.set_num_threads(1)
    torch.manual_seed(0)

    class Pause(nn.Module):
        def forward(self, x):
            for _ in range(200):
                pass
            return x

    layers = nn.Sequential(
        *[nn.Sequential(nn.Linear(5, 5), Pause(), nn.Dropout(0.1)) for _ in range(3)]
    )
    pipe = Pipe(layers, [1] * 3, devices=["cpu:0", "cpu:1", "cpu:0"], chunks=3)
    x = torch.randn(6, 5)
    before = Grads(pipe)

    modules = [*pipe.modules(), *pipe.partitions]

    def train(run):
        torch.manual_seed(1)
        if run == "eval_batch":
            return pipe.eval_batch(x)
        return pipe.train_batch(x, loss_fn=lambda y: (mean(y), len(y)), schedule=run)

    def put_back():
        for p, grad, value in zip(before.parameters, before.tensors, before.values):
            p.grad = grad
            if grad is not None:
                grad.copy_(value)

    def after(run):
        train(run)
        grads = [None if p.grad is None else p.grad.clone() for p in before.parameters]
        put_back()
        return grads

    def complete(grads):
        return all(
            # (The last bit of tiny products may depend on where their memory is.)
            p.grad is grad if grad is None or p.grad is None else torch.allclose(p.grad, grad)
            for p, grad in zip(before.parameters, grads)
        )
"""

BETWEEN_LINES = """
    @functools.cache
    def heads(filename):
        # Lines of `with` (after the body they come again) and of `try`: a signal is never seen
        # there, and CPython does not look for handlers as it does elsewhere.
        found = set()
        for node in ast.walk(ast.parse(open(filename).read())):
            if isinstance(node, ast.With):
                found.update(range(node.lineno, node.body[0].lineno))
            elif isinstance(node, ast.Try):
                found.add(node.lineno)
        return found

    class Lines:
        # Notes the lines of our package that the main thread runs; raises at one, as a signal may.
        def __init__(self, where=None):
            self.where = where
            self.seen = {}

        def trace(self, frame, event, arg):
            filename = frame.f_code.co_filename
            if "/syncpipe/" not in filename or self.where and filename != self.where[0]:
                return None
            here = filename, frame.f_lineno
            if event == "line" and here[1] not in heads(filename):
                self.seen[here] = True
                if here == self.where:
                    self.where = None
                    sys.settrace(None)
                    raise KeyboardInterrupt
            return self.trace

    def traced(run, lines):
        sys.settrace(lines.trace)
        try:
            train(run)
        finally:
            sys.settrace(None)

    tried = {}
    for run in ["zb_h1", "1f1b", "eval_batch"]:
        expected = after(run)
        known = Lines()
        traced(run, known)
        put_back()
        # Whole backwards share nearly all lines with halves: of these, what comes on top.
        wheres = [w for w in known.seen if run != "1f1b" or w not in tried]
        tried.update(known.seen)
        for where in wheres:
            lines = Lines(where)
            try:
                traced(run, lines)
            except KeyboardInterrupt:
                if not (before.unchanged() or complete(expected)):
                    print("half", run, where, flush=True)
            else:
                assert lines.where is not None, where  # not the interrupt, but its absence
            left = len(stack()) or not torch._C._is_torch_function_enabled()
            if left or not all(module.training for module in modules):
                print("left behind", run, where, flush=True)
                break
            put_back()
        train(run)
        assert complete(expected), run
        put_back()
    print("done", len(known.seen) > 100)
"""

AT_ANY_TIME = """
    import random, time
    chance = random.Random(3)
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    interrupted = 0
    # On this thread zero bubble runs under a function mode, where PyTorch is not safe, either.
    RUNS = ["1f1b", "gpipe", "naive" if INLINE else "zb_h1", "eval_batch"]
    for k in range(120):
        run = RUNS[k % 4]
        if k < 4:
            globals()[run] = after(run)
            start = time.perf_counter()
            after(run)
            took = time.perf_counter() - start
        try:
            signal.setitimer(signal.ITIMER_REAL, took * chance.random() * 1.2 + 1e-5)
            train(run)
            signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            interrupted += 1
            torch.set_grad_enabled(True)  # PyTorch's own no_grad() is not safe from interrupts
            if not (before.unchanged() or complete(globals()[run])):
                print("half", run, k, flush=True)
            if not all(module.training for module in modules):
                print("left in eval mode", run, k, flush=True)
                pipe.train()
        put_back()
        if k % 20 == 0:
            train(run)
            assert complete(globals()[run]), run
            put_back()
    print("done", interrupted > 20)
"""


STREAM = """
    import torch.nn.functional as F
    from tests.training.stream.models import WORKERS, mini_batches, mlp, sgd

    signal.signal(signal.SIGALRM, signal.default_int_handler)
    pipe = Pipe(mlp(), [2, 2, 2, 1], devices=WORKERS)
    data, memory = mini_batches(30), [p.data_ptr() for p in pipe.parameters()]

    def train():
        return pipe.train_stream(data, optimizer=sgd, loss_fn=F.cross_entropy)

    train()
    came = 0
    for k in range(40):
        signal.setitimer(signal.ITIMER_REAL, 0.0005 * (k + 1))
        try:
            train()
        except KeyboardInterrupt:
            came += 1
        signal.setitimer(signal.ITIMER_REAL, 0)
        assert [p.data_ptr() for p in pipe.parameters()] == memory
        assert all(p.grad is None for p in pipe.parameters())
    assert len(train().losses) == 30
    print("done", came > 0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no such signals here")
@pytest.mark.parametrize(
    ("script", "by_hand"),
    [*product(["BETWEEN_LINES", "AT_ANY_TIME"], [False, True]), ("STREAM", False)],
)
def test_ctrl_c_leaves_grad_as_it_was_or_complete_and_the_pipe_working(script, by_hand):
    # In a process of its own: an interrupt may hit anything, also what the tests after it use.
    code = textwrap.dedent(COMMON)
    code += f"INLINE = {by_hand}\n"
    if by_hand:
        code += "inline().__enter__()\n"
    code += textwrap.dedent(globals()[script])
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=260, check=False
    )
    assert done.stdout == "done True\n", done.stderr[-3000:]
    assert done.returncode == 0
    assert "Traceback" not in done.stderr, done.stderr[-3000:]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in a generator
@pytest.mark.parametrize("versions", ["stashing", "vertical_sync"])
def test_ctrl_c_at_any_place_of_a_stream_leaves_the_weights_where_they_were(versions):
    """Inline, where every function of a call begins on this thread."""
    pipe = Pipe(mlp(), [3, 4], devices=["cpu"] * 2)

    def train():
        return pipe.train_stream(
            mini_batches(3), optimizer=sgd, loss_fn=F.cross_entropy, versions=versions
        )

    train()
    memory = [p.data_ptr() for p in pipe.parameters()]
    calls, _ = interrupted(-1, train)
    for at in range(5, calls, max(1, calls // 60)):
        interrupted(at, train)
        assert [p.data_ptr() for p in pipe.parameters()] == memory, at
        assert torch.is_autocast_cache_enabled()
    assert len(train().losses) == 3
