"""What belongs to the calling thread is in force inside the layers, wherever they run."""

from __future__ import annotations

import contextvars
import re
import threading
from collections import Counter
from itertools import product

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, _ExperimentalConfig, profile
from torch.utils.flop_counter import FlopCounterMode

from syncpipe import is_recomputing
from tests.support.running import MODES, Do, assert_same, pipe_of, plain, trained, weigh

BF16 = torch.bfloat16


def model():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3))


def listening(observe):
    """A pipe of two workers whose layers note what they observe, and the notes."""
    seen = []
    layers = nn.Sequential(*(Do(lambda x: seen.append(observe())) for _ in range(2)))
    return pipe_of(layers, checkpoint="never"), seen


def autocast_state():
    return (
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
    )


def intra_op_threads():
    """The calling thread's own number; ``torch.get_num_threads`` says what was set last."""
    return int(re.search(r"omp_get_max_threads\(\) : (\d+)", torch.__config__.parallel_info())[1])


flag = contextvars.ContextVar("flag", default="nothing")


class flagged:
    def __enter__(self):
        self.token = flag.set("something")

    def __exit__(self, *exc_info):
        flag.reset(self.token)


class hooked(saved_tensors_hooks):
    def __init__(self):
        super().__init__(lambda t: t + 1, lambda t: t)


def stored_by_autograd():
    """What autograd stores for a tensor of zeros: shows which saved-tensor hooks are in force."""
    with torch.enable_grad():
        y = torch.zeros(1, requires_grad=True).exp()
    return y.grad_fn._saved_result.sum().item()


STATES = {
    "no_grad": (torch.no_grad, torch.is_grad_enabled),
    "inference_mode": (torch.inference_mode, torch.is_inference_mode_enabled),
    "autocast": (lambda: torch.autocast("cpu", dtype=BF16), autocast_state),
    "autocast to float16": (lambda: torch.autocast("cpu", dtype=torch.float16), autocast_state),
    "autocast, no cache": (
        lambda: torch.autocast("cpu", dtype=BF16, cache_enabled=False),
        autocast_state,
    ),
    "another device's autocast": (
        lambda: torch.autocast("xpu", dtype=BF16),
        lambda: torch.is_autocast_enabled("xpu"),
    ),
    "default device": (lambda: torch.device("meta"), lambda: torch.empty(0).device),
    "context variable": (flagged, flag.get),
    "saved-tensor hooks": (hooked, stored_by_autograd),
    "anomaly mode": (
        lambda: torch.autograd.set_detect_anomaly(True),
        torch.is_anomaly_enabled,
    ),
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


def test_layers_run_on_threads_of_their_own():
    pipe, seen = listening(threading.current_thread)
    pipe(torch.ones(4, 1))
    assert len(set(seen)) == 2
    assert threading.current_thread() not in seen


def test_the_state_does_not_stay_in_a_worker_whose_layer_fails():
    pipe, seen = listening(lambda: (torch.is_grad_enabled(), autocast_state()))
    fail = Do(lambda x: 1 / 0)
    pipe.add_module("1", fail)
    outside = (torch.is_grad_enabled(), autocast_state())
    with torch.no_grad(), torch.autocast("cpu", dtype=BF16), pytest.raises(ZeroDivisionError):
        pipe(torch.ones(4, 1))
    fail.function = pipe[0].function
    seen.clear()
    pipe(torch.ones(4, 1))
    assert seen == [outside] * 8


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["autocast", "default device", "context variable"])
def test_a_recomputation_sees_the_state_of_the_forward(name, mode):
    context, observe = STATES[name]
    if name == "autocast":
        observe = lambda: autocast_state()[:2]  # noqa: E731 - whether casts are cached is ours
    seen = []
    layers = nn.Sequential(
        Do(lambda x: seen.append((is_recomputing(), observe()))), nn.Tanh(), nn.Tanh()
    )
    pipe = pipe_of(layers, [2, 1], checkpoint=mode)
    with context():
        inside = observe()
        y = pipe(torch.ones(4, 1, device="cpu", requires_grad=True))
    y.sum().backward()
    assert {what for _, what in seen} == {inside}
    assert sum(again for again, _ in seen) == {"never": 0, "except_last": 3, "always": 4}[mode]


def test_the_thread_that_called_backward_gets_its_own_state_back():
    pipe = pipe_of(model(), [3, 2], checkpoint="always")
    with torch.autocast("cpu", dtype=BF16), torch.device("cpu"):
        y = pipe(torch.randn(8, 6))
    before = autocast_state(), torch.is_grad_enabled(), torch.get_num_threads()
    y.float().sum().backward()
    assert (autocast_state(), torch.is_grad_enabled(), torch.get_num_threads()) == before


# Modes


class CountCalls(TorchFunctionMode):
    def __init__(self):
        self.calls = Counter()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.calls[getattr(func, "__name__", "")] += 1
        return func(*args, **(kwargs or {}))


def test_a_function_mode_sees_every_call_in_the_layers():
    layers, x = model(), torch.randn(8, 6)
    pipe = pipe_of(layers, [2, 3])
    with CountCalls() as ours:
        pipe(x)
    with CountCalls() as theirs:
        plain(layers, x)
    for name in ("linear", "tanh", "gelu"):
        assert ours.calls[name] == theirs.calls[name] > 0


def test_the_flop_counter_counts_what_it_counts_for_the_plain_loop():
    layers, x = model(), torch.randn(8, 6)

    def flops(run, *, backward):
        with FlopCounterMode(display=False) as counter:
            y = run(x)
            if backward:
                y.sum().backward()
        return counter.get_total_flops()

    pipe = pipe_of(layers, [2, 3], checkpoint="never")
    forward = flops(lambda x: plain(layers, x), backward=False)
    assert flops(pipe, backward=False) == forward > 0
    whole = flops(lambda x: plain(layers, x), backward=True)
    assert flops(pipe, backward=True) == whole
    pipe.checkpoint = "always"  # only the forward up to the last stored tensor comes on top
    assert whole < flops(pipe, backward=True) <= whole + forward


@pytest.mark.parametrize("mode", MODES)
def test_fake_tensors_go_forward_and_back(mode):
    with FakeTensorMode():
        layers = model()
        pipe = pipe_of(layers, [2, 3], checkpoint=mode)
        y = pipe(torch.randn(8, 6))
        y.sum().backward()
    assert isinstance(y, FakeTensor)
    assert y.shape == (8, 3)
    assert all(isinstance(p.grad, FakeTensor) for p in layers.parameters())


@pytest.mark.parametrize("mode", MODES)
def test_saved_tensor_hooks_of_the_caller_leave_the_gradients_right(mode):
    layers, x = model(), torch.randn(8, 6)
    pipe = pipe_of(layers, [2, 3], checkpoint=mode)
    packed = []

    def forward(x):
        with saved_tensors_hooks(lambda t: packed.append(t) or len(packed) - 1, packed.__getitem__):
            return pipe(x)

    assert_same(trained(forward, layers, x), trained(lambda x: plain(layers, x), layers, x))
    assert packed or mode == "always"


# Debugging and measuring


class BadBackward(nn.Module):
    def forward(self, x):
        return torch.sqrt(x - 100)  # the line to find


DRIVERS = {
    "forward": lambda pipe, x: weigh(pipe(x)).backward(),
    "train_batch": lambda pipe, x: pipe.train_batch(x, loss_fn=weigh),
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize(
    ("driver", "mode"),
    [*product(["forward"], ["never", "except_last"]), *product(["train_batch"], MODES)],
)
def test_anomaly_mode_shows_the_line_of_the_layer_that_gave_nan(driver, mode):
    pipe = pipe_of(nn.Sequential(nn.Linear(2, 2), BadBackward()), checkpoint=mode)
    x = torch.randn(8, 2)
    with (
        pytest.warns(UserWarning, match="the line to find"),
        pytest.raises(RuntimeError, match="returned nan"),
        torch.autograd.detect_anomaly(),
    ):
        DRIVERS[driver](pipe, x)


@pytest.mark.parametrize("all_threads", [False, True])
def test_profiler_ranges_name_stage_and_micro_batch(all_threads):
    pipe = pipe_of(model(), [2, 3], chunks=2, checkpoint="except_last")
    try:
        config = _ExperimentalConfig(profile_all_threads=True) if all_threads else None
    except TypeError:
        pytest.skip("this version of PyTorch profiles its own threads only")
    with profile(activities=[ProfilerActivity.CPU], experimental_config=config) as prof:
        pipe(torch.randn(8, 6)).sum().backward()
    names = Counter(event.name for event in prof.events())
    for j in range(2):
        for i in range(2):
            assert names[f"syncpipe forward stage {j} micro-batch {i}"] == 1
        assert names[f"syncpipe recompute stage {j} micro-batch 0"] == 1
    assert names["aten::gelu"] >= 2  # what the layers do is there as well


def test_profiler_ranges_of_a_training_step():
    pipe = pipe_of(model(), [2, 3], chunks=2, checkpoint="always")
    x, target = torch.randn(8, 6), torch.randn(8, 3)
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        pipe.train_batch(x, target, loss_fn=nn.functional.mse_loss)
    names = Counter(event.name for event in prof.events())
    for kind in ("forward", "recompute", "backward"):
        for j in range(2):
            for i in range(2):
                assert names[f"syncpipe {kind} stage {j} micro-batch {i}"] == 1


@pytest.fixture
def four_intra_op_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("four_intra_op_threads")
def test_cpu_workers_share_the_intra_op_threads_and_nobody_else_notices():
    pipe, seen = listening(intra_op_threads)
    later = []

    def call():
        seen.clear()
        pipe(torch.ones(4, 1))
        thread = threading.Thread(target=lambda: later.append(intra_op_threads()))
        thread.start()
        thread.join()

    call()
    assert (set(seen), intra_op_threads(), later) == ({2}, 4, [4])
    torch.set_num_threads(2)
    call()
    assert (set(seen), intra_op_threads(), later) == ({1}, 2, [4, 2])


@pytest.mark.usefixtures("four_intra_op_threads")
def test_a_recomputation_runs_with_the_intra_op_threads_of_its_forward():
    seen = []
    layers = nn.Sequential(
        Do(lambda x: seen.append((is_recomputing(), intra_op_threads()))), nn.Tanh()
    )
    pipe = pipe_of(nn.Sequential(nn.Sequential(*layers), nn.Tanh()), checkpoint="always")
    pipe(torch.ones(4, 1, requires_grad=True)).sum().backward()
    assert set(seen) == {(False, 2), (True, 2)}
    assert intra_op_threads() == 4
