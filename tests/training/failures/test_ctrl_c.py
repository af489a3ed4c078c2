"""P4: Ctrl-C leaves ``.grad`` as it was or complete, settings as they were, the pipe working."""

from __future__ import annotations

import gc
import operator
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import count, product
from types import CodeType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from syncpipe import Pipe, inline
from syncpipe.runtime import engine, worker
from tests.conftest import our_threads
from tests.support.interrupts import Lines, interrupted, modes_on
from tests.support.running import Do, another_thread, pipe_of
from tests.support.watched import Grads
from tests.training.failures.test_failures import mean
from tests.training.stream.models import sgd

X = torch.randn(6, 5)


def train(pipe: Pipe, **options: Any) -> None:
    given = options if "data_iter" in options else {"input": X, **options}
    pipe.train_batch(loss_fn=lambda y, *_: (mean(y), len(y)), **given)


def pairs() -> Any:
    return ((x, x) for x in X.chunk(3))


def stream(pipe: Pipe, versions: Any) -> None:
    data = [(x, None) for x in X.chunk(6)]
    pipe.train_stream(data, optimizer=sgd, loss_fn=mean, versions=versions)


RUNS: dict[str, Callable[[Pipe], Any]] = {
    "pipe(x)": lambda pipe: mean(pipe(X)).backward(),
    "gpipe": partial(train, schedule="gpipe"),
    "1f1b": train,
    "replicas": train,
    "zb_h1": partial(train, schedule="zb_h1"),
    "data_iter": lambda pipe: train(pipe, data_iter=pairs()),
    "eval_batch": lambda pipe: pipe.eval_batch(X),
    "stashing": partial(stream, versions="stashing"),
    "vertical_sync": partial(stream, versions="vertical_sync"),
}
STREAMS = ["stashing", "vertical_sync"]


class Scene:
    """A call of a pipe, and what it may leave behind when Ctrl-C comes."""

    def __init__(self, run: str) -> None:
        layers = [nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.1)) for _ in range(3)]
        devices = ["cpu:0", "cpu:1", "cpu:2" if run in STREAMS else "cpu:0"]
        options: dict[str, Any] = {"devices": devices, "chunks": 3}
        if run == "replicas":
            options |= {"devices": [f"cpu:{k}" for k in range(5)], "replicas": [2, 1, 2]}
        self.run, self.pipe = run, Pipe(nn.Sequential(*layers), [1] * 3, **options)
        self.memory = [p.data_ptr() for p in self.pipe.parameters()]
        self.modules = [*self.pipe.modules(), *self.pipe.partitions]
        self.grads = Grads(*([] if run in STREAMS else [self.pipe]))
        self.call()
        self.complete = [None if p.grad is None else p.grad.clone() for p in self.grads.parameters]
        self.grads.put_back()

    def call(self) -> None:
        torch.manual_seed(1)
        RUNS[self.run](self.pipe)

    def is_complete(self) -> bool:
        # (The last bit of tiny products may depend on where their memory is.)
        return all(
            p.grad is grad if grad is None or p.grad is None else torch.allclose(p.grad, grad)
            for p, grad in zip(self.grads.parameters, self.complete, strict=True)
        )

    def assert_whole(self, at: Any) -> None:
        """Nothing is half done."""
        assert all(module.training for module in self.modules), at
        assert [p.data_ptr() for p in self.pipe.parameters()] == self.memory, at
        if self.run in STREAMS:
            assert all(p.grad is None for p in self.pipe.parameters()), at
        elif self.run != "pipe(x)":
            assert self.grads.unchanged() or self.is_complete(), at
        self.grads.put_back()

    def assert_works(self) -> None:
        self.call()
        assert self.is_complete()
        self.assert_whole("the end")


def settings() -> list[Any]:
    functions = torch._C._is_torch_function_enabled()
    cached = torch.is_autocast_cache_enabled(), torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    flags = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
    return [modes_on(), functions, cached, flags, sys.getprofile()]


# A destructor, a generator or the callback of a weak reference cannot pass an exception on.
unraisable = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@unraisable
@pytest.mark.parametrize("run", RUNS)
def test_at_functions_that_begin_whoever_has_made_them(run: str) -> None:
    """There, above all, Python looks for signals; inline, so all of them are on this thread."""
    scene, stopped = Scene(run), 0
    with inline(), another_thread():  # so that layers draw in a mode
        scene.call()
        scene.grads.put_back()
        before, (calls, _) = settings(), interrupted(0, scene.call)
        scene.grads.put_back()
        places = range(1, calls, max(3, calls // 150))  # PyTorch's ways out take some functions
        for at in places:
            stopped += interrupted(at, scene.call)[1]
            assert settings() == before, at
            scene.assert_whole(at)
        scene.assert_works()
    assert stopped > 0.9 * len(places)


def casts(x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return x @ x.T


@unraisable
@pytest.mark.parametrize(
    ("function", "context"),
    [(partial(checkpoint, torch.sin, use_reentrant=False), saved_tensors_hooks),
     (casts, torch.autocast)],
)  # fmt: skip
def test_what_a_layer_enters_does_not_stay(function: Any, context: Any) -> None:
    """The ``with`` of PyTorch's hooks of saved tensors and of its autocast ends in Python."""
    layers = nn.Sequential(nn.Linear(5, 5), Do(function))
    pipe, x = Pipe(layers, [2], devices=["cpu:0"]), X.clone()
    call = partial(pipe.train_batch, x, loss_fn=mean)
    known, before = Lines(partial(operator.eq, context.__exit__.__code__), None), settings()
    known.during(call)
    for at in range(1, len(known.seen) + 1):
        lines = Lines(partial(operator.eq, context.__exit__.__code__), at)
        with pytest.raises(KeyboardInterrupt):
            lines.during(call)
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None, at
        assert settings() == before, at


def is_ours(code: CodeType) -> bool:
    return "/syncpipe/" in code.co_filename


@unraisable
@pytest.mark.parametrize("context", [inline, nullcontext], ids=["inline", "workers"])
def test_at_each_line_of_ours(context: Callable[[], AbstractContextManager[Any]]) -> None:
    """Once: in the first of the runs that come to it.

    At every fifth line, or all of them with SYNCPIPE_LINES=1: ``python -m tests.long failures``.
    """
    tried, skipped = set[Any](), set[Any]()
    apart = int(os.environ.get("SYNCPIPE_LINES", "5"))
    for scene in map(Scene, RUNS):
        with context():
            before, known = settings(), Lines(is_ours, None)
            known.during(scene.call)
            scene.grads.put_back()
            for k, place in enumerate(dict.fromkeys(known.seen)):
                if k % apart and place not in tried:
                    skipped.add(place)
                if place in tried or place in skipped:
                    continue
                lines = Lines(is_ours, place)
                try:
                    lines.during(scene.call)
                except KeyboardInterrupt:
                    tried.add(place)
                else:
                    assert not lines.came, place
                assert settings() == before, place
                scene.assert_whole(place)
            scene.assert_works()
    assert len(tried) > 500 / apart


def at_any_time() -> None:
    """Signals at random times."""
    chance, came, k = random.Random(3), 0, 0
    gc.disable()  # a finalizer loses what is raised in it
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    for run, by_hand in product(RUNS, [False, True]):
        # On this thread zero bubble runs under a function mode, where PyTorch is not safe, either.
        if run == "pipe(x)" or (run == "zb_h1" and by_hand):
            continue
        with inline() if by_hand else nullcontext():
            scene = Scene(run)
            gc.collect()  # the pipe of the scene before
            start = time.perf_counter()
            scene.call()
            took = time.perf_counter() - start
            scene.grads.put_back()
            for k in range(20):
                try:
                    signal.setitimer(signal.ITIMER_REAL, took * chance.random() * 1.2 + 1e-5)
                    scene.call()
                    signal.setitimer(signal.ITIMER_REAL, 0)
                except KeyboardInterrupt:
                    came += 1
                    torch.set_grad_enabled(True)  # PyTorch's own no_grad() is not safe
                scene.assert_whole((scene.run, k))
            scene.assert_works()
    print("done", came > 40)


needs_alarms = pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no such signals here")


@needs_alarms
def test_at_any_time() -> None:
    # In a process of its own: an interrupt may hit anything, also what the tests after it use.
    code = f"import torch; from {__name__} import *; torch.set_num_threads(1)"
    code += "; torch.manual_seed(0); at_any_time()"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=260, check=False
    )
    assert done.stdout == "done True\n", done.stderr[-3000:]
    assert done.returncode == 0
    assert "Traceback" not in done.stderr, done.stderr[-3000:]


@needs_alarms
def test_workers_stop_at_their_next_action() -> None:
    seen: list[None] = []
    left, ended = threading.Event(), threading.Event()

    def layer(x: Tensor) -> None:
        seen.append(None)
        if len(seen) == 5:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)
            left.wait(0.3)  # in vain: the call does not end before this does
            ended.set()

    signal.signal(signal.SIGALRM, signal.default_int_handler)
    pipe = pipe_of(nn.Sequential(Do(layer), nn.Linear(3, 3)), chunks=5000)
    with pytest.raises(KeyboardInterrupt):
        pipe.train_batch(torch.randn(5000, 3), loss_fn=torch.mean, schedule="gpipe")
    assert ended.is_set()
    assert len(seen) < 5000
    left.set()


def test_no_worker_is_left_behind_wherever_it_comes() -> None:
    inside, entered, files = [], [], (engine.__file__, worker.__file__, threading.__file__)

    def layer(x: Tensor) -> None:
        inside.append(None)
        time.sleep(0.002)  # is there when Ctrl-C comes
        entered.append(None)
        inside.pop()

    layers = nn.Sequential(Do(layer), nn.Linear(3, 3), Do(layer))
    options: Any = {"balance": [1, 2], "chunks": 2, "checkpoint": "never"}
    pipe = pipe_of(layers, **options)
    x = torch.randn(4, 3)

    def call() -> None:
        pipe.train_batch(x, loss_fn=torch.mean)

    def run(at: int) -> int:
        begun: list[bool] = []

        def wanted(code: CodeType) -> bool:
            if code is engine.Engine.run.__code__:
                begun.append(True)
            # Python's own threads and locks stay half made.
            made = code.co_name in ("__init__", "start")
            return bool(begun) and code.co_filename in files and not made

        lines = Lines(wanted, at)
        gc.disable()  # a finalizer loses what is raised in it
        try:
            lines.during(call)
        except (KeyboardInterrupt, RuntimeError):  # Python's `Condition` may not hold its lock
            pass
        finally:
            gc.enable()
        return len(lines.seen)

    for new in (False, True):  # threads are there, or started in this call
        for at in count(1, 3 if new else 1):
            if new:
                pipe = pipe_of(layers, **options)
            seen = run(at)
            assert not inside, at
            before = len(entered)
            call()
            assert len(entered) - before == 4, at
            if seen < at:
                break
        assert at > 20
        gc.collect()
        assert len(our_threads()) == 2
