"""P4 of ``train_batch``: a failure anywhere arrives as itself and leaves ``.grad`` as it was."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import textwrap
import threading
import traceback
from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from syncpipe import Pipe, inline
from tests.conftest import our_threads
from tests.support.models import CHECKPOINT_MODES
from tests.support.running import Do, pipe_of
from tests.support.training import (
    FOUR,
    KINDS,
    RUNS,
    Fails,
    any_schedule,
    assert_same_step,
    device_of,
    numbered,
    orders_of,
    pipe_step,
    plain_step,
    schedule_of,
)

CHUNKS = 3


class Odd(BaseException):
    """Not even an Exception, and not to be built again from its arguments."""

    def __init__(self, a, b):
        super().__init__("odd")
        self.pair = (a, b)


def failing_pipe(run: str, checkpoint: str = "always") -> Pipe:
    layers = nn.Sequential(*(Fails() for _ in range(4)))
    return Pipe(layers, [1] * 4, devices=RUNS[run][1], chunks=CHUNKS, checkpoint=checkpoint)


class Grads:
    """What ``.grad`` was; half of the parameters have one."""

    def __init__(self, module: nn.Module) -> None:
        self.parameters = list(module.parameters())
        for parameter in self.parameters[::2]:
            parameter.grad = torch.randn_like(parameter)
        self.tensors = [p.grad for p in self.parameters]
        self.values = [None if p.grad is None else p.grad.clone() for p in self.parameters]

    def unchanged(self) -> bool:
        """The same tensors, with the same values; None where there was none."""
        pairs = zip(self.parameters, self.tensors, self.values, strict=True)
        return all(
            p.grad is tensor and (value is None or torch.equal(p.grad, value))
            for p, tensor, value in pairs
        )


def assert_works(pipe: Pipe, run: str) -> None:
    """The next call is as if nothing had been."""
    pipe.zero_grad()
    plain = nn.Sequential(*(Fails() for _ in pipe))
    plain.load_state_dict(pipe.state_dict())
    x = numbered(CHUNKS).requires_grad_()
    options = RUNS[run][0]
    expected = plain_step(
        plain,
        x,
        loss_fn=mean,
        chunks=CHUNKS,
        orders=orders_of(schedule_of(pipe, CHUNKS, **options)),
        balance=[1] * 4,
    )
    actual = pipe_step(pipe, x, loss_fn=mean, **options)
    assert_same_step(actual, expected, exact=run != "zb_h1")


def mean(y: Tensor) -> Tensor:
    return y.pow(2).mean()


def notes_of(error: BaseException) -> str:
    return "\n".join(getattr(error, "__notes__", []))


# In a layer


@pytest.mark.parametrize("phase", ["forward", "recompute", "backward", "hook"])
@pytest.mark.parametrize("run", KINDS)
def test_an_exception_in_any_cell_arrives_as_itself_and_changes_nothing(run, phase):
    pipe = failing_pipe(run)
    grads = Grads(pipe)
    for j, i in product(range(4), range(CHUNKS)):
        error = Odd(i, j) if (i + j) % 2 else ValueError("bad")
        layer = pipe[j]
        layer.error, layer.phase, layer.i = error, phase, i
        x = numbered(CHUNKS).requires_grad_()
        with pytest.raises(type(error)) as caught:
            pipe.train_batch(x, loss_fn=mean, **RUNS[run][0])
        assert caught.value is error
        assert error.__cause__ is None
        assert "the line of the layer" in "".join(traceback.format_exception(error))
        assert grads.unchanged(), (i, j)
        assert x.grad is None
        notes = notes_of(error)
        assert re.search(rf"stage {j} \(layer {j}\), micro-batch {i}", notes), notes
        assert ("while recomputing" in notes) == (phase == "recompute")
        assert ("in backward of" in notes) == (phase in ("backward", "hook"))
        if (j, i) == (1, 1):
            assert_works(pipe, run)
            grads = Grads(pipe)
    assert_works(pipe, run)


@pytest.mark.parametrize("checkpoint", ["never", "except_last"])
@pytest.mark.parametrize("phase", ["forward", "backward", "hook"])
@pytest.mark.parametrize("by_hand", [False, True], ids=["workers", "inline"])
def test_the_same_without_re_materialization_and_inline(by_hand, phase, checkpoint):
    pipe = failing_pipe("1f1b", checkpoint)
    grads = Grads(pipe)
    for j in range(4):
        error = ValueError("bad")
        pipe[j].error, pipe[j].phase, pipe[j].i = error, phase, CHUNKS - 1
        context = inline() if by_hand else nullcontext()
        with context, pytest.raises(ValueError, match="bad") as caught:
            pipe.train_batch(numbered(CHUNKS), loss_fn=mean)
        assert caught.value is error
        assert re.search(rf"stage {j} \(layer {j}\), micro-batch {CHUNKS - 1}", notes_of(error))
        assert grads.unchanged()
        pipe[j].error = None
    assert_works(pipe, "1f1b")


@pytest.mark.parametrize("balance", [[4], [2, 2]])
def test_an_exception_on_few_workers(balance):
    layers = nn.Sequential(*(Fails() for _ in range(4)))
    pipe = Pipe(layers, balance, devices=FOUR, chunks=CHUNKS)
    grads = Grads(pipe)
    for phase in ("forward", "recompute", "backward"):
        pipe[1].error, pipe[1].phase, pipe[1].i = ValueError("bad"), phase, 1
        with pytest.raises(ValueError, match="bad"):
            pipe.train_batch(numbered(CHUNKS), loss_fn=mean)
        assert grads.unchanged()


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, StopIteration, GeneratorExit])
@pytest.mark.parametrize("phase", ["forward", "recompute", "backward"])
def test_exceptions_of_any_type_arrive_as_themselves(phase, kind):
    pipe, error = failing_pipe("1f1b"), kind(3)
    grads = Grads(pipe)
    pipe[2].error, pipe[2].phase, pipe[2].i = error, phase, 1
    with pytest.raises(kind) as caught:
        pipe.train_batch(numbered(CHUNKS), loss_fn=mean)
    assert caught.value is error
    assert grads.unchanged()
    assert_works(pipe, "1f1b")


@pytest.mark.parametrize("seed", range(20))
def test_a_failure_in_any_place_of_any_schedule(seed):
    chance = random.Random(seed)
    devices = [chance.choice(FOUR) for _ in range(4)]
    checkpoint = chance.choice(CHECKPOINT_MODES)
    layers = nn.Sequential(*(Fails() for _ in range(4)))
    pipe = Pipe(layers, [1] * 4, devices=devices, chunks=CHUNKS, checkpoint=checkpoint)
    schedule = any_schedule(CHUNKS, device_of(pipe), seed=seed, halves=True, in_order=True)
    grads = Grads(pipe)
    for phase in ("forward", "recompute", "backward", "hook"):
        layer, error = pipe[chance.randrange(4)], ValueError("bad")
        layer.error, layer.phase, layer.i = error, phase, 0
        if phase == "recompute" and checkpoint == "never":
            layer.phase = "forward"
        with pytest.raises(ValueError, match="bad") as caught:
            pipe.train_batch(numbered(CHUNKS).requires_grad_(), loss_fn=mean, schedule=schedule)
        assert caught.value is error
        assert grads.unchanged()
    assert_works(pipe, "1f1b")


# Elsewhere


@pytest.mark.parametrize("call", ["train_batch", "eval_batch"])
@pytest.mark.parametrize("run", KINDS)
def test_an_exception_in_the_loss_function(run, call):
    pipe = failing_pipe(run)
    options = RUNS[run][0] if call == "train_batch" else {}
    for k in range(CHUNKS):
        error = Odd(1, 2)

        def fail(y, k=k, error=error):
            if int(y[0, 0]) == k:
                raise error
            return mean(y)

        grads = Grads(pipe)
        with pytest.raises(Odd) as caught:
            getattr(pipe, call)(numbered(CHUNKS), loss_fn=fail, **options)
        assert caught.value is error
        assert grads.unchanged()
        assert f"loss_fn, micro-batch {k}" in notes_of(error)
        assert_works(pipe, run)


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("run", KINDS)
def test_an_exception_in_the_backward_of_the_loss(run, checkpoint):
    head, layer = nn.Linear(5, 1), Fails()
    pipe = failing_pipe(run, checkpoint)
    grads, heads = Grads(pipe), Grads(head)
    layer.error, layer.phase, layer.i = ValueError("bad"), "backward", 1
    with pytest.raises(ValueError, match="bad") as caught:
        pipe.train_batch(numbered(CHUNKS), loss_fn=lambda y: head(layer(y)).mean(), **RUNS[run][0])
    assert "micro-batch 1" in notes_of(caught.value)
    assert grads.unchanged()
    assert heads.unchanged()
    assert layer.weight.grad is None
    assert_works(pipe, run)


@pytest.mark.parametrize("run", KINDS)
def test_an_exception_in_the_iterator(run):
    pipe = failing_pipe(run)
    for k in range(CHUNKS):
        error = Odd(1, 2)

        def data(k=k, error=error):
            for x in numbered(CHUNKS).chunk(CHUNKS)[:k]:
                yield x, None
            raise error

        grads = Grads(pipe)
        with pytest.raises(Odd) as caught:
            pipe.train_batch(data_iter=data(), loss_fn=mean, **RUNS[run][0])
        assert caught.value is error
        assert f"micro-batch {k}" in notes_of(error)
        assert grads.unchanged()
        assert_works(pipe, run)


def test_a_failure_in_what_the_caller_computed_before():
    class Bad(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ValueError("bad")

    pipe = failing_pipe("1f1b")
    grads = Grads(pipe)
    x = numbered(CHUNKS).requires_grad_()
    with pytest.raises(ValueError, match="bad"):
        pipe.train_batch(Bad.apply(x), loss_fn=mean)
    assert grads.unchanged()
    assert x.grad is None


def test_outputs_that_cannot_be_gathered_change_nothing():
    layers = nn.Sequential(Fails(), Do(lambda x: (x, len(x))))
    pipe = pipe_of(layers, chunks=2)
    grads = Grads(pipe)
    with pytest.raises(ValueError, match="differs between micro-batches"):
        pipe.train_batch(numbered(3, 1), loss_fn=lambda y: y[0].sum(), return_outputs=True)
    assert grads.unchanged()


@pytest.mark.parametrize("schedule", ["naive", "1f1b", "zb_h1"])
def test_parameters_that_only_the_loss_knows_get_their_grad_back_too(schedule):
    outside = [torch.ones(5, requires_grad=True) for _ in range(2)]
    outside[0].grad = grad = torch.ones(5)
    calls = []

    def fail(y):
        calls.append(1)
        if len(calls) == CHUNKS:
            raise ValueError("bad")
        return (y * outside[0] * outside[1]).sum()

    pipe = pipe_of(nn.Sequential(Fails(), Fails()), chunks=CHUNKS)
    with pytest.raises(ValueError, match="bad"):
        pipe.train_batch(numbered(CHUNKS), loss_fn=fail, schedule=schedule)
    assert outside[0].grad is grad
    assert torch.equal(grad, torch.ones(5))
    assert outside[1].grad is None


def test_sparse_gradients_are_put_back():
    pipe = pipe_of(nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 3)), chunks=2)
    ids, calls = torch.tensor([0, 2, 2, 4]), []
    pipe.train_batch(ids, loss_fn=torch.sum)
    grad = pipe[0].weight.grad
    before = grad.to_dense().clone()

    def fail(y):
        calls.append(1)
        return 1 / 0 if len(calls) == 2 else y.sum()

    with pytest.raises(ZeroDivisionError):
        pipe.train_batch(ids, loss_fn=fail, schedule="naive")
    assert pipe[0].weight.grad is grad
    assert torch.equal(grad.to_dense(), before)


def test_a_recomputation_that_gives_something_else_is_an_error():
    from syncpipe import is_recomputing

    class Unsteady(nn.Module):
        def forward(self, x):
            return (x * 2).detach() if is_recomputing() else x * 2

    pipe = pipe_of(nn.Sequential(nn.Linear(5, 5), Unsteady()), checkpoint="always")
    grads = Grads(pipe)
    with pytest.raises(RuntimeError, match=r"stage 1 .* gave other outputs when it was recomputed"):
        pipe.train_batch(torch.randn(8, 5), loss_fn=mean)
    assert grads.unchanged()


def test_a_parameter_that_changes_before_the_recomputation_is_an_error():
    pipe = pipe_of(nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)), checkpoint="always")

    def step(y):
        with torch.no_grad():
            pipe[1].weight.add_(1)
        return mean(y)

    with pytest.raises(RuntimeError, match="modified in place"):
        pipe.train_batch(torch.randn(8, 5), loss_fn=step)


# Threads


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
    faulthandler.dump_traceback_later(60, exit=True)  # comes without the interpreter's lock, too
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
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout == "done\n", done.stderr[-3000:]


# Ctrl-C

COMMON = """
    import ast, faulthandler, functools, signal, sys
    faulthandler.dump_traceback_later(100, exit=True)
    import torch
    from torch import nn
    from torch.overrides import _get_current_function_mode_stack as stack
    from syncpipe import Pipe, inline
    from tests.training.failures.test_ctrl_c import Grads, numbered, mean

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
            p.grad is grad if grad is None or p.grad is None else torch.equal(p.grad, grad)
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
            if "/syncpipe/" not in filename:
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

    for run in ["zb_h1", "1f1b", "eval_batch"]:
        expected = after(run)
        known = Lines()
        traced(run, known)
        put_back()
        for where in known.seen:
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


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no such signals here")
@pytest.mark.parametrize("by_hand", [False, True], ids=["workers", "inline"])
@pytest.mark.parametrize("script", ["BETWEEN_LINES", "AT_ANY_TIME"])
def test_ctrl_c_leaves_grad_as_it_was_or_complete_and_the_pipe_working(script, by_hand):
    # In a process of its own: an interrupt may hit anything, also what the tests after it use.
    code = textwrap.dedent(COMMON)
    code += f"INLINE = {by_hand}\n"
    if by_hand:
        code += "inline().__enter__()\n"
    code += textwrap.dedent(globals()[script])
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout == "done True\n", done.stderr[-3000:]
    assert done.returncode == 0
    assert "Traceback" not in done.stderr, done.stderr[-3000:]
