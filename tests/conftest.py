"""What holds for every test: CPU workers, one thread each, a fixed seed, no thread left behind."""

from __future__ import annotations

import atexit
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from syncpipe.runtime.worker import FREE_THREADED
from tests import simulated
from tests.support import accelerator
from tests.support.interrupts import modes_on

settings.register_profile(
    "ci",
    deadline=None,  # no test asserts on a time
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("ci")


def pytest_report_header() -> str:
    """Which PyTorch is tested."""
    return f"torch {torch.__version__}"


if os.environ.get("SYNCPIPE_SIMULATED") == "1":  # before any module of tests asks for devices
    simulated.load()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests skip where there are no devices for them."""
    reasons = {}
    if not torch.accelerator.is_available():
        reasons["gpu"] = "needs an accelerator"
    if simulated.loaded() or not torch.cuda.is_available():
        reasons["cuda"] = "needs a CUDA device, and no simulated one"
    for item in items:
        for marker, reason in reasons.items():
            if item.get_closest_marker(marker) is not None:
                item.add_marker(pytest.mark.skip(reason=reason))


@atexit.register
def filter_nanobind() -> None:
    """Drops what Triton's bindings say on exit about their own leaks: dozens of lines."""
    if "triton" not in sys.modules:
        return
    patterns = ["^nanobind: ", "^ - leaked ", "^ - ... skipped remainder", "nanobind.readthedocs"]
    command = ["grep", "--line-buffered", "-v", *(f"-e{pattern}" for pattern in patterns)]
    try:
        grep = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=2)
    except OSError:  # there is no grep: then they stay
        return
    assert grep.stdin is not None
    os.dup2(grep.stdin.fileno(), 2)
    grep.returncode = 0  # it ends when this process has ended, which so cannot wait for it


def pytest_collection_finish(session: pytest.Session) -> None:
    """Builds the simulated devices if a test needs them.

    Here no test's time limit runs. Of several processes one builds and the others wait.
    """
    needed = any(item.get_closest_marker("simulated") for item in session.items)
    if needed and simulated.unavailable() is None and not simulated.loaded():
        capture = session.config.pluginmanager.getplugin("capturemanager")
        with capture.global_and_fixture_disabled():
            simulated.build()


@pytest.fixture(scope="module", autouse=True)
def old_objects_are_not_looked_through() -> None:
    """No test pays for what was imported before.

    PyTorch's and pytest's own objects are some hundred thousand, and each module imports more. To
    go through them takes up to half a second, which every test would pay that collects garbage,
    itself or in the check for threads.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def four_devices() -> list[torch.device]:
    """Four accelerators, real or simulated."""
    if accelerator.count() < 4:
        pytest.skip("needs four accelerators")
    return [accelerator.device(k) for k in range(4)]


@pytest.fixture(scope="session", autouse=True)
def one_intra_op_thread() -> None:
    """Equality on the CPU is bitwise for a fixed number of intra-op threads."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """The same parameters and inputs in every run."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def cpu_workers(request: pytest.FixtureRequest) -> Iterator[None]:
    """No test meets accelerators, here or in a process that it starts, unless it says so itself.

    Tests that do are marked ``gpu``, ``cuda`` or ``accelerators``. All others get CPU workers where
    they do not name devices, on every machine.
    """
    if any(request.node.get_closest_marker(name) for name in ("gpu", "cuda", "accelerators")):
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.accelerator, "is_available", lambda: False)
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        yield


@pytest.fixture(autouse=True)
def streams_wait() -> Iterator[None]:
    """On simulated devices whatever is launched comes after all that it uses."""
    yield
    if simulated.loaded():
        races = simulated.races()
        accelerator.synchronize()  # what this test leaves is not the next one's
        assert races == []


@pytest.fixture(autouse=True)
def modes_end_with_the_test() -> Iterator[None]:
    """A mode that a test left on would fail others, far away."""
    yield
    functions, dispatch = left = modes_on()
    for _ in range(functions):
        torch._C._pop_torch_function_stack()
    for _ in range(dispatch):
        torch._C._pop_torch_dispatch_stack()
    torch.set_grad_enabled(True)
    assert left == (0, 0)


def our_threads() -> list[threading.Thread]:
    """The threads of all pipes that are alive.

    Without those that Ctrl-C kept from starting: in Python 3.13 ``enumerate`` goes on naming them.
    """
    found = [thread for thread in threading.enumerate() if thread.ident is not None]
    return [thread for thread in found if thread.name.startswith("syncpipe")]


_failed = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Any:
    """Remembers failures: their tracebacks keep pipes, and so threads, alive."""
    report = yield
    if report.failed:
        item.stash[_failed] = True
    return report


@pytest.fixture(autouse=True)
def no_thread_outlives_its_pipe(seeded: None, request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test whose pipes are gone while a worker thread still runs."""
    before = set(our_threads())
    yield
    if request.node.stash.get(_failed, False):
        return
    # A pipe may be part of a cycle. In free-threaded builds what a thread made dies when it looks,
    # and only then what that held.
    looks = 20 if FREE_THREADED else 1
    while set(our_threads()) - before and looks:
        gc.collect()
        looks -= 1
    left = sorted(thread.name for thread in set(our_threads()) - before)
    assert not left, f"threads of syncpipe that outlive this test's pipes: {left}"
