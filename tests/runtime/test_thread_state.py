"""What belongs to the calling thread is in force inside the layers, wherever they run."""

from __future__ import annotations

import contextvars
import copy
import cProfile
import re
import sys
import threading
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, _ExperimentalConfig, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from syncpipe import is_recomputing
from tests.support.models import in_turn
from tests.support.running import (
    MODES,
    Do,
    Noise,
    Using,
    assert_same,
    in_threads,
    pipe_of,
    trained,
    weigh,
)  # fmt: skip

BF16 = torch.bfloat16


def model():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3))


def listening(observe, **options):
    """A pipe of two workers whose layers note what they observe, and the notes."""
    seen = []
    layers = nn.Sequential(*(Do(lambda x: seen.append(observe())) for _ in range(2)))
    return pipe_of(layers, **{"checkpoint": "never", **options}), seen


def autocast_state():
    return (
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
    )


def intra_op_threads():
    """The calling thread's own number; ``torch.get_num_threads`` says what was set last."""
    return int(re.search(r"omp_get_max_threads\(\) : (\d+)", torch.__config__.parallel_info())[1])


@pytest.mark.parametrize("devices", [["cpu"], ["cpu:0", "cpu:1"]])
def test_under_a_profiler_of_python_the_results_are_the_same(devices):
    x, found = torch.randn(8, 6), []
    layers = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6))
    for profiler in (nullcontext(), cProfile.Profile()):
        pipe = pipe_of(copy.deepcopy(layers), [3] if len(devices) == 1 else [1, 2], devices=devices)
        torch.manual_seed(0)
        with profiler:
            before = sys.getprofile()
            pipe(x).sum().backward()
            pipe.train_batch(x, loss_fn=torch.mean)
            assert sys.getprofile() is before
        found.append([p.grad for p in pipe.parameters()])
    assert all(map(torch.equal, *found))


flag = contextvars.ContextVar("flag", default="nothing")


class flagged:
    def __enter__(self):
        self.token = flag.set("something")

    def __exit__(self, *exc_info):
        flag.reset(self.token)


def stored_by_autograd():
    """What autograd stores for a tensor of zeros: shows which saved-tensor hooks are in force."""
    with torch.enable_grad():
        y = torch.zeros(1, requires_grad=True).exp()
    return y.grad_fn._saved_result.sum().item()


def autocast(dtype=BF16, **options):
    return lambda: torch.autocast("cpu", dtype=dtype, **options)


STATES = {
    "no_grad": (torch.no_grad, torch.is_grad_enabled),
    "inference_mode": (torch.inference_mode, torch.is_inference_mode_enabled),
    "autocast": (autocast(), autocast_state),
    "autocast to float16": (autocast(torch.float16), autocast_state),
    "autocast, no cache": (autocast(cache_enabled=False), autocast_state),
    "another device's autocast": (
        lambda: torch.autocast("xpu", dtype=BF16),
        lambda: torch.is_autocast_enabled("xpu"),
    ),
    "default device": (lambda: torch.device("meta"), lambda: torch.empty(0).device),
    "context variable": (flagged, flag.get),
    "saved-tensor hooks": (
        lambda: saved_tensors_hooks(lambda t: t + 1, lambda t: t),
        stored_by_autograd,
    ),
    "anomaly mode": (lambda: torch.autograd.set_detect_anomaly(True), torch.is_anomaly_enabled),
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection", "ignore:User provided device_type")
@pytest.mark.parametrize("name", STATES)
def test_a_layer_sees_the_callers_state_while_it_lasts_and_not_longer(name):
    context, observe = STATES[name]
    pipe, seen = listening(observe)
    x = torch.ones(4, 1)
    outside = observe()
    with context():
        inside = observe()
        pipe(x)
    assert inside != outside or name == "another device's autocast"
    assert seen == [inside] * 8
    seen.clear()
    pipe(x)
    assert seen == [outside] * 8
    assert observe() == outside


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["autocast", "default device", "context variable"])
def test_a_recomputation_sees_the_state_of_the_forward(name, mode):
    context, observe = STATES[name]
    if name == "autocast":
        observe = lambda: autocast_state()[:2]  # noqa: E731 - whether casts are cached is ours
    pipe, seen = listening(lambda: (is_recomputing(), observe()), checkpoint=mode)
    with context():
        inside = observe()
        y = pipe(torch.ones(4, 1, device="cpu", requires_grad=True))
    before = autocast_state(), torch.is_grad_enabled()
    y.sum().backward()
    assert (autocast_state(), torch.is_grad_enabled()) == before
    assert {what for _, what in seen} == {inside}
    assert sum(again for again, _ in seen) == {"never": 0, "except_last": 6, "always": 8}[mode]


# Autocast


class OwnAutocast(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        with torch.autocast("cpu", dtype=BF16):
            return self.linear(x).float()


def test_a_cache_that_another_thread_clears_does_not_make_a_recomputation_another_one():
    runs = []

    class Twice(OwnAutocast):
        def forward(self, x):
            with torch.autocast("cpu", dtype=BF16):
                x = self.linear(x)
                if not runs:
                    torch.clear_autocast_cache()  # as a thread does that leaves its autocast
                runs.append(x)
                return self.linear(x).float()

    ours = nn.Sequential(Twice(), nn.Tanh())
    theirs = copy.deepcopy(ours)
    x = torch.randn(8, 6)
    expected = trained(in_turn(theirs, 4), theirs, x)
    runs.clear()
    actual = trained(pipe_of(ours, checkpoint="always"), ours, x)
    assert_same(actual, expected, rounded=True, rtol=2e-2, atol=2e-2)


def test_a_pipe_leaves_the_callers_autocast_cache_alone():
    linear = nn.Linear(4, 4)
    pipe = pipe_of(nn.Sequential(OwnAutocast(), OwnAutocast()))
    x = torch.randn(4, 4)
    with torch.autocast("cpu", dtype=BF16):
        first = linear(x)
        pipe(torch.randn(8, 6))
        second = linear(x)
    casts = [y.grad_fn.next_functions[2][0].next_functions[0][0] for y in (first, second)]
    assert casts[0] is casts[1]  # one cast of the weight, found again in the cache


# Modes


class CountCalls(TorchFunctionMode):
    def __init__(self):
        self.calls = Counter()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.calls[getattr(func, "__name__", "")] += 1
        return func(*args, **(kwargs or {}))


class CountOperators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[func.__name__.removesuffix(".default")] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [CountCalls, CountOperators])
def test_a_mode_sees_all_of_the_layers_and_nothing_of_how_random_numbers_are_kept(mode):
    pipe = pipe_of(nn.Sequential(nn.GELU(), nn.Dropout()), checkpoint="always")
    with mode() as seen:
        pipe.train_batch(torch.randn(8, 6, requires_grad=True), loss_fn=weigh)
    assert seen.calls["gelu"] == 4 + 4  # recomputed
    assert not seen.calls.keys() & {"equal", "random_", "view.dtype", "long", "tolist"}


# Debugging and measuring


DRIVERS = {
    "forward": lambda pipe, x: weigh(pipe(x)).backward(),
    "train_batch": lambda pipe, x: pipe.train_batch(x, loss_fn=weigh),
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("driver", DRIVERS)
def test_anomaly_mode_shows_the_line_of_the_layer_that_gave_nan(driver, mode):
    if (driver, mode) == ("forward", "always"):
        pytest.skip("the node of the call has no line of a layer")
    bad = Do(lambda x: torch.sqrt(x - 100))  # the line to find
    pipe = pipe_of(nn.Sequential(nn.Linear(2, 2), bad), checkpoint=mode)
    with (
        pytest.warns(UserWarning, match="the line to find"),
        pytest.raises(RuntimeError, match="returned nan"),
        torch.autograd.detect_anomaly(),
    ):
        DRIVERS[driver](pipe, torch.randn(8, 2))


@pytest.mark.parametrize("all_threads", [False, True])
@pytest.mark.parametrize("driver", DRIVERS)
def test_profiler_ranges_name_stage_and_micro_batch(driver, all_threads):
    pipe = pipe_of(model(), [2, 3], chunks=2, checkpoint="except_last")
    try:
        config = _ExperimentalConfig(profile_all_threads=True) if all_threads else None
    except TypeError:
        pytest.skip("this version of PyTorch profiles its own threads only")
    with profile(activities=[ProfilerActivity.CPU], experimental_config=config) as prof:
        DRIVERS[driver](pipe, torch.randn(8, 6))
    names = Counter(event.name for event in prof.events())
    for j in range(2):
        for i in range(2):
            assert names[f"syncpipe forward stage {j} micro-batch {i}"] == 1
            assert names[f"syncpipe backward stage {j} micro-batch {i}"] == 1
        assert names[f"syncpipe recompute stage {j} micro-batch 0"] == 1
    assert names["aten::gelu"] >= 2  # what the layers do is there as well


def test_what_layers_set_for_a_while_in_the_whole_process_is_put_back():
    first, second, left = (threading.Event() for _ in range(3))
    calls = []

    @contextmanager
    def elsewise():
        dtype = torch.get_default_dtype()
        with warnings.catch_warnings(record=True), sdpa_kernel(SDPBackend.MATH):
            torch.set_default_dtype(torch.float64)
            yield
            torch.set_default_dtype(dtype)

    def ends_first(x):
        calls.append(x)
        if len(calls) == 2:
            with elsewise():
                first.set()
                second.wait(10)
            left.set()

    def ends_last(x):
        first.wait(10)
        with elsewise():
            second.set()
            left.wait(10)

    def settings():
        kernels = torch.nn.attention._cur_sdpa_kernel_backends()
        return warnings.filters, warnings.showwarning, kernels, torch.get_default_dtype()

    before = settings()
    pipe_of(nn.Sequential(Do(ends_first), Do(ends_last)), chunks=2)(torch.ones(2, 1))
    assert settings() == before


@pytest.mark.parametrize("devices", [["cpu", "cpu"], ["cpu:0", "cpu:1"]])
@pytest.mark.filterwarnings("ignore:loss_fn gives")
@pytest.mark.parametrize("driver", DRIVERS)
def test_a_default_device_can_be_unset_where_layers_are_checkpointed_by_pytorch(driver, devices):
    blocks = [Using(lambda x, f: checkpoint(f, x, use_reentrant=False), nn.Linear(6, 6))] * 2
    pipe = pipe_of(nn.Sequential(*map(copy.deepcopy, blocks)), devices=devices)
    x = torch.randn(8, 6)
    torch.set_default_device("meta")
    DRIVERS[driver](pipe, x)
    torch.set_default_device(None)
    assert torch._C._len_torch_function_stack() == 0


@pytest.fixture
def four_intra_op_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("four_intra_op_threads")
def test_cpu_workers_share_the_intra_op_threads_and_nobody_else_notices():
    pipe, seen = listening(lambda: (is_recomputing(), intra_op_threads()), checkpoint="always")
    later = []

    def call():
        seen.clear()
        pipe(torch.ones(4, 1, requires_grad=True)).sum().backward()
        thread = threading.Thread(target=lambda: later.append(intra_op_threads()))
        thread.start()
        thread.join()
        return set(seen)

    assert (call(), intra_op_threads(), later) == ({(False, 2), (True, 2)}, 4, [4])
    torch.set_num_threads(2)
    assert (call(), intra_op_threads(), later) == ({(False, 1), (True, 1)}, 2, [4, 2])


# --- modes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_calls_go_by_their_own_modes_while_another_thread_evaluates(checkpoint):
    seen = []

    def note(layer, given):
        seen.append((layer.training, bool(given[0].detach()[0, 0] > 0)))

    layers = nn.Sequential(nn.Identity(), nn.Dropout(0.5), nn.Identity())
    layers[0].register_forward_pre_hook(note)
    pipe, stop = pipe_of(layers, [2, 1], checkpoint=checkpoint), threading.Event()
    x = torch.ones(8, 3)

    def evaluate():
        while not stop.is_set():
            assert torch.equal(pipe.eval_batch(-x), -x)

    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(evaluate)
        try:
            for _ in range(30):
                y = pipe(x.clone().requires_grad_())
                assert not torch.equal(y, x)
                y.sum().backward()
        finally:
            stop.set()
        other.result()
    assert {(True, True), (False, False)} >= set(seen) >= {(True, True)}


@pytest.mark.parametrize("change", ["balance", "layer"])
def test_what_changes_during_an_evaluation_does_not_let_calls_run_in_its_modes(change):
    entered, end, x = threading.Event(), threading.Event(), torch.ones(8, 3)
    x[4:] = 2

    def act(given):
        if given[0, 0] == -2:  # the first micro-batch holds the generator
            entered.set()
            end.wait()
        return given

    pipe = pipe_of(nn.Sequential(Do(act), nn.Dropout(0.5), nn.Identity()), [2, 1])
    with ThreadPoolExecutor(2) as threads:
        evaluation = threads.submit(pipe.eval_batch, -x)
        entered.wait()
        if change == "balance":
            pipe.balance = [1, 2]
        else:
            pipe[2] = nn.Identity()
        call = threads.submit(pipe, x)
        wait([call], 0.3)  # in vain: it begins when the evaluation has ended
        end.set()
        assert torch.equal(evaluation.result(), -x)
        assert not torch.equal(call.result(), x)


def test_an_evaluation_in_a_layer_of_another_pipe_waits_for_no_generator():
    """One thread draws and evaluates a pipe inside, while another one runs that pipe, and draws."""
    inner = pipe_of(nn.Sequential(nn.Linear(3, 3), Noise()), chunks=2)

    def evaluates(x):
        noise = torch.rand_like(x)
        return x + inner.eval_batch(x) * noise

    outer, x = pipe_of(nn.Sequential(Do(evaluates)), chunks=2), torch.ones(4, 3)

    def run(pipe):
        return [pipe(x).shape for _ in range(20)]

    assert in_threads(run, outer, inner, inner) == [[x.shape] * 20] * 3
