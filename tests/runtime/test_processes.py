"""Threads, forks and exits: a pipe outlives none of them wrongly, and none outlives a pipe."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import syncpipe.pipe
from tests.support.running import Do, assert_same, pipe_of, plain, trained, weigh

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")


def our_threads():
    return [t for t in threading.enumerate() if t.name.startswith("syncpipe")]


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
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_workers_are_started_once_and_not_at_every_call():
    seen = set()
    layers = nn.Sequential(*(Do(lambda x: seen.add(threading.current_thread())) for _ in range(3)))
    pipe = pipe_of(layers)
    assert our_threads() == []
    for _ in range(10):
        pipe(torch.ones(4, 1))
    assert len(seen) == 3
    assert set(our_threads()) == seen


def test_deleting_a_pipe_ends_its_threads_at_once():
    pipe = pipe_of(model())
    output = pipe(torch.randn(8, 4))
    assert len(our_threads()) == 4
    gc.disable()
    try:
        del pipe
        weigh(output).backward()  # the graph needs the threads, and not the pipe
        del output
        assert our_threads() == []
    finally:
        gc.enable()


def test_a_pipe_may_be_deleted_by_one_of_its_own_layers():
    holder = []

    def let_go(x):
        holder.clear()

    holder.append(pipe_of(nn.Sequential(nn.Tanh(), Do(let_go), nn.Tanh())))
    x = torch.randn(8, 2)
    assert torch.equal(holder[0](x), x.tanh().tanh())
    gc.collect()
    assert our_threads() == []


def test_a_pipe_may_be_deleted_between_forward_and_backward():
    layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    reference = copy.deepcopy(layers)
    pipe = pipe_of(layers, checkpoint="always")
    gone = weakref.ref(pipe)
    x = torch.randn(8, 4)
    y = pipe(x)
    del pipe
    gc.collect()
    assert gone() is None
    weigh(y).backward()
    weigh(plain(reference, x)).backward()
    assert_same([p.grad for p in layers.parameters()], [p.grad for p in reference.parameters()])


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))])
def test_a_copy_of_a_pipe_that_has_run_has_threads_of_its_own(copied):
    ours = pipe_of(model(), checkpoint="always")
    x = torch.randn(8, 4)
    ours(x)
    other = copied(ours)
    for pipe in (ours, other):
        torch.manual_seed(3)
        pipe.result = trained(pipe, pipe, x)
    assert_same(ours.result, other.result)
    assert len(our_threads()) == 8
    del other, pipe
    gc.collect()
    assert len(our_threads()) == 4


def test_a_failed_call_in_one_thread_does_not_touch_that_of_another():
    x = torch.randn(6, 5)
    bad = torch.full_like(x, float("nan"))

    def check(x):
        if x.isnan().any():
            raise ValueError("nan")

    layers = nn.Sequential(nn.Linear(5, 5), Do(check), nn.Linear(5, 5))
    pipe = pipe_of(layers)
    expected = plain(layers, x)
    wrong = []

    def good():
        wrong.extend(k for k in range(50) if not torch.equal(pipe(x), expected))

    thread = threading.Thread(target=good)
    thread.start()
    for _ in range(50):
        with pytest.raises(ValueError, match="nan"):
            pipe(bad)
    thread.join()
    assert wrong == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_pipe_works_in_a_forked_child_and_goes_on_in_the_parent():
    pipe = pipe_of(model(), checkpoint="always")
    x = torch.randn(8, 4)
    trained(pipe, pipe, x)
    torch.manual_seed(3)
    state = copy.deepcopy(pipe.state_dict())
    expected = trained(pipe, pipe, x)
    expected = [t.clone() for t in expected]
    pipe.load_state_dict(state)

    def check():
        torch.manual_seed(3)
        assert_same(trained(pipe, pipe, x), expected)

    assert in_child(check) == 0
    assert in_child(lambda: in_child(check) and 1 / 0) == 0  # and in its child
    check()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_while_another_thread_is_inside_a_layer():
    inside, go_on = threading.Event(), threading.Event()
    parent = os.getpid()

    def wait(x):
        if os.getpid() == parent:
            inside.set()
            go_on.wait()

    layers = nn.Sequential(
        nn.Sequential(nn.BatchNorm1d(4), Do(wait), nn.Dropout()), nn.Linear(4, 4)
    )
    pipe = pipe_of(layers, checkpoint="always")
    x = torch.randn(8, 4)
    thread = threading.Thread(target=pipe, args=(x,))
    thread.start()
    inside.wait()
    try:
        status = in_child(lambda: weigh(pipe(x)).backward())
    finally:
        go_on.set()
        thread.join()
    assert status == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_while_another_thread_builds_a_pipe():
    ours, theirs = pipe_of(model()), pipe_of(model())
    building, go_on = threading.Event(), threading.Event()
    built = syncpipe.pipe.Pipeline

    def build(*args):
        building.set()
        go_on.wait()
        return built(*args)

    x = torch.randn(8, 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(syncpipe.pipe, "Pipeline", build)
        thread = threading.Thread(target=theirs, args=(x,))
        thread.start()
        building.wait()
    try:
        status = in_child(lambda: (ours(x), theirs(x)))
    finally:
        go_on.set()
        thread.join()
    assert status == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_graph_goes_back_in_a_child_that_was_forked_while_a_layer_ran():
    inside, go_on = threading.Event(), threading.Event()
    waits = []

    def wait(x):
        if waits and os.getpid() == waits[0]:
            inside.set()
            go_on.wait()

    layers = nn.Sequential(nn.Sequential(nn.BatchNorm1d(4), Do(wait)), nn.Linear(4, 4))
    pipe = pipe_of(layers, checkpoint="always")
    x = torch.randn(8, 4)
    loss = weigh(pipe(x))
    waits.append(os.getpid())
    thread = threading.Thread(target=pipe, args=(x,))
    thread.start()
    inside.wait()
    try:
        status = in_child(loss.backward)
    finally:
        go_on.set()
        thread.join()
    assert status == 0


@pytest.mark.parametrize("name", ["is_available", "device_count", "current_accelerator"])
def test_a_pipe_on_cpu_workers_does_not_ask_for_accelerators(name, monkeypatch):
    """Whoever counts GPUs cannot fork a child that uses them."""
    pipe = pipe_of(model(), checkpoint="always")
    syncpipe.stages.call._accelerators.cache_clear()
    monkeypatch.setattr(torch.accelerator, name, lambda: pytest.fail("asked"))
    trained(pipe, pipe, torch.randn(8, 4))
    pipe.train_batch(torch.randn(8, 4), loss_fn=torch.mean)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_data_loader_forks_its_workers_after_the_pipe_ran():
    layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    pipe = pipe_of(layers, checkpoint="always")
    pipe(torch.randn(8, 4))
    data = TensorDataset(torch.randn(32, 4))
    loader = DataLoader(data, batch_size=8, num_workers=2, multiprocessing_context="fork")
    for _ in range(2):
        outputs = [pipe(x) for (x,) in loader]
        torch.cat(outputs).sum().backward()
    assert torch.equal(torch.cat(outputs), torch.cat([plain(layers, x) for (x,) in loader]))


EXITS = {
    "at the end": "",
    "from an exception": "raise ValueError('the end')",
    "by sys.exit": "sys.exit(4)",
    "while a layer runs": """
        busy, never = threading.Event(), threading.Event()
        layers[1].function = lambda x: (busy.set(), never.wait())
        threading.Thread(target=pipe, args=(x,), daemon=True).start()
        busy.wait()
    """,
    "with the pipe in a cycle": "loop = [pipe]; loop.append(loop); del pipe",
    "with a graph alive": "keep = pipe(x.requires_grad_())",
}


@pytest.mark.parametrize("how", EXITS)
def test_the_interpreter_exits_with_pipes_alive(how):
    code = textwrap.dedent("""
        import sys, threading
        import torch
        from tests.support.running import Do, pipe_of
        layers = torch.nn.Sequential(torch.nn.Linear(2, 2), Do(lambda x: None), torch.nn.Tanh())
        pipe = pipe_of(layers, checkpoint="always")
        x = torch.randn(4, 2)
        pipe(x).sum().backward()
        print("ran", flush=True)
    """) + textwrap.dedent(EXITS[how])
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=260, check=False
    )
    assert done.stdout == "ran\n"
    assert done.returncode == {"from an exception": 1, "by sys.exit": 4}.get(how, 0), done.stderr
    assert ("the end" in done.stderr) == (how == "from an exception")
    assert how == "from an exception" or "Traceback" not in done.stderr
