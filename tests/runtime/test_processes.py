"""Threads, forks and exits: a pipe outlives none of them wrongly, and none outlives a pipe."""

from __future__ import annotations

import copy
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import traceback
import weakref
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import syncpipe.pipe.pipe
from syncpipe.runtime.worker import FREE_THREADED
from tests.conftest import our_threads
from tests.support.models import in_turn
from tests.support.running import Do, assert_same, in_threads, pipe_of, trained, weigh

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
forks = pytest.mark.skipif("SYNCPIPE_FORKS" not in os.environ, reason="in a process of their own")


def model():
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.1), nn.Linear(4, 2))


def in_child(function):
    """Runs a function in a forked child, with a limit of time; returns the exit status."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            signal.alarm(20)
            function()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_first_calls_at_once_start_a_thread_for_each_worker():
    interval = sys.getswitchinterval()
    try:
        sys.setswitchinterval(1e-6)
        for _ in range(60):
            pipe = pipe_of(nn.Sequential(nn.Tanh(), nn.Tanh(), nn.Tanh()))
            in_threads(lambda x, pipe=pipe: pipe(x), *[torch.ones(8, 4)] * 4)
            assert len(our_threads()) == 3
            del pipe
    finally:
        sys.setswitchinterval(interval)


def test_deleting_a_pipe_ends_its_threads_at_once():
    layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    reference = copy.deepcopy(layers)
    pipe, x = pipe_of(layers, checkpoint="always"), torch.randn(8, 4)
    gone = weakref.ref(pipe)
    assert our_threads() == []
    output = pipe(x)
    assert len(our_threads()) == 3
    gc.disable()
    try:
        del pipe
        assert gone() is None
        weigh(output).backward()  # the graph needs the threads, and not the pipe
        del output
        assert our_threads() == []
    finally:
        gc.enable()
    weigh(in_turn(reference, 4)(x)).backward()
    assert_same([p.grad for p in layers.parameters()], [p.grad for p in reference.parameters()])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_threads_end_if_ctrl_c_comes_while_a_pipe_is_deleted():
    pipe = pipe_of(nn.Sequential(nn.Tanh(), nn.Tanh()))
    pipe(torch.ones(4, 1))
    threads, seen = our_threads(), []

    def interrupt(frame, event, arg):
        if event == "call" and not seen:
            seen.append(frame.f_code.co_filename)
            raise KeyboardInterrupt

    sys.setprofile(interrupt)
    try:
        del pipe
    except KeyboardInterrupt:
        pass
    finally:
        sys.setprofile(None)
    for thread in threads:
        thread.join(timeout=60)
    assert seen
    assert our_threads() == []


def test_a_pipe_may_be_deleted_by_one_of_its_own_layers():
    holder = []
    holder.append(pipe_of(nn.Sequential(nn.Tanh(), Do(lambda x: holder.clear()), nn.Tanh())))
    x = torch.randn(8, 2)
    assert torch.equal(holder[0](x), x.tanh().tanh())
    gc.collect()
    assert our_threads() == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_in_a_process_that_has_no_threads_of_autograd():
    """Deep graphs start these, and PyTorch refuses to go back in a child of a process with them."""
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-k", "fork", __file__]
    environment = {**os.environ, "SYNCPIPE_FORKS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout


@forks
def test_a_pipe_works_in_a_forked_child_and_goes_on_in_the_parent():
    pipe = pipe_of(model(), checkpoint="always")
    x = torch.randn(8, 4)
    state = copy.deepcopy(pipe.state_dict())
    torch.manual_seed(3)
    expected = trained(pipe, pipe, x)
    pipe.load_state_dict(state)

    def check():
        torch.manual_seed(3)
        assert_same(trained(pipe, pipe, x), expected)

    assert in_child(check) == 0
    assert in_child(lambda: in_child(check) and 1 / 0) == 0  # and in its child
    check()


@contextmanager
def stopped(call, *arguments, inside, go_on):
    """A thread of the parent's that stands inside of a call while the parent forks."""
    thread = threading.Thread(target=call, args=arguments)
    thread.start()
    inside.wait()
    try:
        yield
    finally:
        go_on.set()
        thread.join()


@forks
@pytest.mark.parametrize("where", ["forward", "backward", "building"])
def test_a_fork_while_another_thread_is_in_the_middle_of_a_call(where, monkeypatch):
    inside, go_on, waits = threading.Event(), threading.Event(), []

    def wait(x):
        if waits == [os.getpid()]:
            inside.set()
            go_on.wait()

    def build(*args):
        wait(None)
        return built(*args)

    built = syncpipe.pipe.pipe.Pipeline
    monkeypatch.setattr(syncpipe.pipe.pipe, "Pipeline", build)
    waiting = nn.Sequential(nn.BatchNorm1d(4), Do(wait), nn.Dropout())
    pipe, x = (
        pipe_of(nn.Sequential(waiting, nn.Linear(4, 4)), checkpoint="always"),
        torch.ones(8, 4),
    )
    other = pipe_of(model())
    loss = weigh(pipe(x)) if where != "building" else None
    waits.append(os.getpid())
    runs = {
        "forward": lambda: weigh(pipe(x)).backward(),
        "backward": lambda: loss.backward(),
        "building": lambda: (pipe(x), other(x)),
    }
    with stopped(other if where == "building" else pipe, x, inside=inside, go_on=go_on):
        waits *= 2  # nobody waits any more
        assert in_child(runs[where]) == 0


@pytest.mark.parametrize("name", ["is_available", "device_count", "current_accelerator"])
def test_a_pipe_on_cpu_workers_does_not_ask_for_accelerators(name, monkeypatch):
    """Whoever counts GPUs cannot fork a child that uses them."""
    pipe = pipe_of(model(), checkpoint="always")
    syncpipe.stages.call._accelerators.cache_clear()
    monkeypatch.setattr(torch.accelerator, name, lambda: pytest.fail("asked"))
    trained(pipe, pipe, torch.randn(8, 4))
    pipe.train_batch(torch.randn(8, 4), loss_fn=torch.mean)


EXITS = {
    "at the end": "",
    "from an exception": "raise ValueError('the end')",
    "by sys.exit": "sys.exit(4)",
    "while a layer runs": textwrap.dedent("""
        busy, never = threading.Event(), threading.Event()
        layers[1].function = lambda x: (busy.set(), never.wait())
        threading.Thread(target=pipe, args=(x,), daemon=True).start()
        busy.wait()
    """),
    "with the pipe in a cycle": "loop = [pipe]; loop.append(loop); del pipe",
    "with a graph alive": "keep = pipe(x.requires_grad_())",
}


def run_python(*code):
    """What a process of its own does."""
    lines = "".join(map(textwrap.dedent, code))
    return subprocess.run(
        [sys.executable, "-c", lines], capture_output=True, text=True, timeout=260, check=False
    )


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_the_interpreter_exits_with_pipes_alive(tmp_path):
    """In children of one process, which imports for all of them and has no pipes."""
    done = run_python(f"""
        import os, sys, threading
        import torch
        from tests.support.running import Do, pipe_of
        for how, code in {EXITS}.items():
            if not os.fork():
                os.chdir({str(tmp_path)!r})
                os.dup2(os.open(how + ".out", os.O_WRONLY | os.O_CREAT), 1)
                os.dup2(os.open(how + ".err", os.O_WRONLY | os.O_CREAT), 2)
                break
            print(how, os.waitstatus_to_exitcode(os.wait()[1]), sep=": ", flush=True)
        else:
            os._exit(0)
        layers = torch.nn.Sequential(torch.nn.Linear(2, 2), Do(lambda x: None), torch.nn.Tanh())
        pipe = pipe_of(layers, checkpoint="always")
        x = torch.randn(4, 2)
        pipe(x).sum().backward()
        print("ran", flush=True)
        exec(code)
    """)
    codes = dict(line.split(": ") for line in done.stdout.splitlines())
    assert [*codes] == [*EXITS], done.stderr
    for how, code in codes.items():
        errors = (tmp_path / f"{how}.err").read_text()
        assert int(code) == {"from an exception": 1, "by sys.exit": 4}.get(how, 0), (how, errors)
        assert (tmp_path / f"{how}.out").read_text() == "ran\n"
        assert ("the end" in errors) == (how == "from an exception")
        assert how == "from an exception" or "Traceback" not in errors, (how, errors)


@pytest.mark.skipif(FREE_THREADED, reason="modules are empty there before their objects die")
def test_a_pipe_that_is_called_while_the_interpreter_ends():
    done = run_python("""
        import torch
        from tests.support.running import pipe_of

        class Last:
            def __init__(self):
                self.pipe = pipe_of(torch.nn.Sequential(torch.nn.Tanh(), torch.nn.Tanh()))
                self.x = torch.zeros(4, 2)
                self.pipe(self.x)

            def __del__(self, print=print):
                print(float(self.pipe(self.x).sum()), flush=True)

        last = Last()
    """)
    # Where torch's own modules are gone first, no module of its can be called any more.
    gone = "torch/nn/modules/module.py" in done.stderr and "'NoneType' object" in done.stderr
    assert done.stdout == "0.0\n" or gone, done.stderr
