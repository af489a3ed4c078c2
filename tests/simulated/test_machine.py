"""The simulated devices themselves: operators, order, memory, copies, random numbers, forks."""

from __future__ import annotations

import copy
import gc
import os
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests import simulated
from tests.support.running import Do

pytestmark = pytest.mark.gpu

A, B = simulated.devices(2)
DOUBLE = torch.float64

# --- operators -----------------------------------------------------------------------------------


def numbers(*shape):
    return torch.randn(shape, dtype=DOUBLE)


def results(module, x):
    """Output, gradients of inputs and parameters, and buffers, on the CPU."""
    x = x.detach().requires_grad_(x.is_floating_point())
    output = module(x)
    weights = torch.linspace(-1, 1, output.numel(), dtype=DOUBLE).reshape(output.shape)
    (output * weights.to(output.device)).sum().backward()
    grads = [leaf.grad for leaf in (x, *module.parameters()) if leaf.grad is not None]
    return [value.detach().cpu() for value in (output, *grads, *module.buffers())]


IMAGE, ROWS = numbers(2, 4, 6, 6), numbers(6, 4)
LAYERS = {
    "Linear": (lambda: nn.Linear(4, 5), ROWS),
    "Conv2d": (lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1), IMAGE),
    "Conv2d, groups": (lambda: nn.Conv2d(4, 8, 3, groups=2, bias=False), IMAGE),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2), IMAGE),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(4), IMAGE),
    "BatchNorm2d, evaluation": (lambda: nn.BatchNorm2d(4).eval(), IMAGE),
    "LayerNorm": (lambda: nn.LayerNorm(4), ROWS),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), IMAGE),
    "Embedding": (lambda: nn.Embedding(10, 4, padding_idx=0), torch.arange(10).reshape(2, 5)),
    "MaxPool2d": (lambda: nn.MaxPool2d(2), IMAGE),
    "transformer": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True, activation="gelu"),
        numbers(2, 5, 8),
    ),
}
FUNCTIONS = {
    "cross entropy": lambda x: F.cross_entropy(x, torch.arange(6, device=x.device) % 4),
    "mse": lambda x: F.mse_loss(x, x.detach() * 2),
    "index by numbers": lambda x: x[:, [0, 2]] * 2,
    "put in": lambda x: x.clone().index_put_((torch.tensor([0, 1]),), x[2:4]),
    "cat": lambda x: torch.cat([x, x.exp()], 1),
    "split": lambda x: torch.cat(x.split(2, 1)[::-1], 1),
    "transposed": lambda x: x.t().contiguous() @ x,
    "sort": lambda x: x.sort(-1)[0],
    "where": lambda x: torch.where(x > 0, x, x * 2),
    "masked fill": lambda x: x.masked_fill(x > 0, 1.0),
    "norms": lambda x: x.norm() + x.std() + x.var(0).sum() + x.logsumexp(1).sum(),
    "gather": lambda x: x.gather(1, x.argsort(1)),
    "scatter": lambda x: torch.zeros_like(x).scatter_add(1, x.argsort(1), x),
    "unfold": lambda x: x.unfold(1, 2, 1) * 1,
    "expand": lambda x: x[None].expand(3, -1, -1) * 1,
    "in place": lambda x: (x * 1).add_(1).mul_(2).relu_(),
    "into a slice": lambda x: torch.zeros_like(x).index_copy_(
        0, torch.tensor([1], device=x.device), x[:1]
    ),
    "attention, causal": lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True),
    "grid": lambda x: x + torch.arange(4, device=x.device) + torch.eye(6, 4, device=x.device),
    "one hot": lambda x: F.one_hot(torch.arange(6, device=x.device) % 4, 4) * x[0],
    "bags": lambda x: F.embedding_bag(torch.zeros(2, 3, dtype=torch.long, device=x.device), x),
    "double backward": lambda x: torch.autograd.grad((x**3).sum(), x, create_graph=True)[0],
    "out": lambda x: (
        x + torch.add(x.detach(), 1, out=torch.empty(0, dtype=DOUBLE, device=x.device))
    ),
}
NEED_DATA = {
    "index by a mask": lambda x: x[x > 0],
    "nonzero": lambda x: x[(x > 0).nonzero(as_tuple=True)],
    "item": lambda x: x * x.sum().item(),
    "equal": lambda x: x * x.equal(x),
}


@pytest.mark.parametrize("name", [*LAYERS, *FUNCTIONS, *NEED_DATA])
def test_what_is_computed_is_what_the_cpu_computes(name):
    make, x = LAYERS.get(name, (lambda: Do((FUNCTIONS | NEED_DATA)[name]), ROWS))
    module = make().to(DOUBLE)
    there = copy.deepcopy(module).to(B)
    expected, x = results(module, x), x.to(B)
    simulated.waits()
    for ours, theirs in zip(results(there, x), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    why = [reason for reason in simulated.waits() if not reason.startswith("copy")]
    assert bool(why) == (name in NEED_DATA)  # otherwise the host never has to
    if name in NEED_DATA:
        with simulated.no_waits(), pytest.raises(RuntimeError, match="must not wait for stream 0"):
            there(x)


@pytest.mark.parametrize(
    "mistake",
    [
        lambda x: x + torch.zeros(4, device=B),
        lambda x: x + torch.zeros(3),
        lambda x: x + torch.zeros(3, device="sim:2"),
        lambda x: torch.zeros(1, device="sim:9"),
    ],
    ids=["shapes", "host", "devices", "no such device"],
)
def test_mistakes_are_named(mistake):
    x = torch.zeros(3, device=B)
    with pytest.raises(RuntimeError, match=r"size of tensor|same device|invalid device ordinal"):
        mistake(x)


def test_autocast():
    layer = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 4))
    there = copy.deepcopy(layer).to(B)
    x, goal = torch.randn(5, 3, 8, 8), torch.arange(5) % 4
    with torch.autocast("cpu", torch.bfloat16):
        expected = layer(x)
    with torch.autocast("sim", torch.bfloat16):
        found = there(x.to(B))
        loss = F.cross_entropy(found, goal.to(B))
        assert found.exp().dtype == torch.float32
        assert torch.cat([found, found.float()]).dtype == torch.float32  # the widest
        assert found.sum(0).dtype == torch.float32
    assert (found.dtype, loss.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(found.cpu(), expected)
    loss.backward()
    assert there[0].weight.grad.dtype == torch.float32


# --- order ---------------------------------------------------------------------------------------


@contextmanager
def on(stream):
    device = torch.accelerator.current_device_index()
    torch.accelerator.set_device_index(stream.device.index)
    before = torch.accelerator.current_stream()
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)
        torch.accelerator.set_device_index(device)


def streams(device=A):
    """The current one and another, with all done; and nothing was wrong until now."""
    torch.accelerator.synchronize(device)
    assert not simulated.races()
    return torch.accelerator.current_stream(device), torch.Stream(device=device)


WRITES, READS = (lambda x: x.fill_(1)), (lambda x: x + 1)
USES = {
    "a read after a write": (WRITES, READS),
    "a write after a read": (READS, WRITES),
    "a write after a write": (WRITES, WRITES),
    "a read after a write of another view": (lambda x: x.t()[1:].fill_(1), READS),
    "a copy after a write": (WRITES, lambda x: x.to(B)),
    "a write after a copy": (lambda x: x.to(B, non_blocking=True), WRITES),
    "an output": (READS, lambda x: torch.add(x[:1], 1, out=x[:1])),
}
HARMLESS = {
    "reads": (READS, READS),
    "a write of another part": (lambda x: x[:1].fill_(1), lambda x: x[1:].fill_(1)),
}


@pytest.mark.parametrize("how", ["not", "too early", "event", "host", "over another device"])
@pytest.mark.parametrize("uses", [*USES, *HARMLESS])
def test_what_has_to_wait(uses, how):
    x, far = torch.zeros(4, 4, device=A), torch.Stream(device=B)
    main, side = streams()
    first, second = (USES | HARMLESS)[uses]
    early = main.record_event()
    first(x)
    if how == "too early":
        main.record_event(torch.Event(A))
        side.wait_event(early)
    elif how == "event":
        side.wait_event(main.record_event())
    elif how == "host":
        main.synchronize()
    elif how == "over another device":
        far.wait_stream(main)
        side.wait_stream(far)
    with on(side):
        second(x)
    assert bool(simulated.races()) == (uses in USES and how in ("not", "too early"))


def test_a_wait_is_for_the_event_as_it_was():
    """Recorded again later, an event does not move the waits that are there already."""
    x = torch.zeros(4, device=A)
    main, side = streams()
    event = main.record_event()
    side.wait_event(event)
    x.fill_(1)
    main.record_event(event)
    with on(side):
        x + 1
    (race,) = simulated.races()
    assert race.startswith("race: aten::add reads on stream")
    assert "which has not waited for aten::fill_ on stream 0" in race


def test_a_copy_between_devices_is_for_both_current_streams():
    x, y = torch.ones(4, device=A), torch.zeros(4, device=B)
    _, side = streams(B)
    y.fill_(2)
    y.copy_(x, non_blocking=True)
    x.fill_(3)
    assert (y + 1).tolist() == [2] * 4
    assert not simulated.races()
    y.copy_(x, non_blocking=True)
    with on(side):
        y + 1
    assert len(simulated.races()) == 1


def test_events_tell_the_time_of_the_device():
    stream = torch.accelerator.current_stream(A)
    assert torch.Event(A).query()  # of nothing
    start, end = (torch.Event(A, enable_timing=True) for _ in range(2))
    stream.record_event(start)
    simulated.sleep(3000, A)
    side = torch.Stream(device=B)
    side.wait_event(stream.record_event(end))
    assert not any(late.query() for late in (end, stream, side))
    side.synchronize()
    assert end.query()
    assert stream.query()
    assert start.elapsed_time(end) == 3000


def test_current_device_and_stream_are_those_of_the_thread():
    other, seen = torch.Stream(device=A), []

    def look():
        seen.append((torch.accelerator.current_device_index(), torch.accelerator.current_stream(A)))

    with on(torch.Stream(device=B)), on(other):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        assert torch.accelerator.current_stream(A) == other
    assert seen == [(0, torch.accelerator.current_stream(A))]


def test_backward_runs_on_the_stream_of_the_forward():
    x, seen = torch.ones(3, device=B, requires_grad=True), []
    _, side = streams(B)
    with on(side):
        y = (x * x).sum()
    y.grad_fn.register_prehook(lambda grads: seen.append(torch.accelerator.current_stream(B)))
    y.backward()
    assert seen == [side]
    assert x.grad.tolist() == [2, 2, 2]


# --- memory, and copies to and from the host -----------------------------------------------------


def test_new_memory_is_nan_and_used_again_on_its_stream():
    x = torch.zeros(100, device=A)
    _, side = streams()
    data = x.data_ptr()
    del x
    with on(side):
        assert torch.empty(100, device=A).data_ptr() != data
    x = torch.empty(100, device=A)
    assert x.data_ptr() == data
    assert x.isnan().all()


@pytest.mark.parametrize("how", ["not", "recorded", "the owner waits", "the host waits"])
def test_memory_that_another_stream_still_uses(how):
    x = torch.ones(1000, device=A)
    main, side = streams()
    before = blocks(), simulated.live_bytes(A), torch.accelerator.memory_allocated(A)
    with on(side):
        x * 2
    if how == "recorded":
        x.record_stream(side)
    elif how == "the owner waits":
        main.wait_stream(side)
    elif how == "the host waits":
        side.synchronize()
    del x
    assert torch.accelerator.memory_allocated(A) == before[2] - 4096  # handed back
    held = 0 if how == "recorded" else 4096  # but not to be had
    assert (blocks(), simulated.live_bytes(A)) == (before[0] - bool(held), before[1] - held)
    torch.empty(1, device=A)
    assert bool(simulated.races()) == (how == "not")
    side.synchronize()
    assert simulated.live_bytes(A) == before[1] - 4096


def blocks():
    return torch.accelerator.memory_stats(A)["active.all.current"]


def test_peaks_are_counted_for_each_device():
    gc.collect()
    for device in (A, B):
        torch.accelerator.reset_peak_memory_stats(device)
    before = torch.accelerator.memory_allocated(B)
    x = torch.ones(1024, 256, device=B)
    y = x + x
    del x, y
    assert torch.accelerator.max_memory_allocated(B) - before == 2 * 1024 * 1024
    assert torch.accelerator.memory_allocated(B) == before
    assert torch.accelerator.max_memory_allocated(A) == torch.accelerator.memory_allocated(A)


def test_a_device_can_be_full():
    with simulated.capacity(B, 1 << 20), pytest.raises(torch.OutOfMemoryError, match="sim:1 out"):
        torch.empty(1 << 21, device=B)
    torch.empty(1 << 21, device=B)


def test_to_the_host_non_blocking_is_garbage_until_somebody_waits():
    x = torch.ones(4, device=A)
    stream, side = streams()
    with simulated.no_waits():
        y = x.to("cpu", non_blocking=True)
        assert y.is_pinned()
        assert y.isnan().all()
        side.wait_stream(stream)
        with on(side):
            back = y.to(A, non_blocking=True)
    side.synchronize()
    assert y.tolist() == [1, 1, 1, 1]
    assert back.tolist() == [1, 1, 1, 1]


def test_a_copy_back_from_the_host_waits_for_the_one_to_it():
    x = torch.ones(4, device=A)
    _, side = streams()
    y = x.to("cpu", non_blocking=True)
    with on(side):
        y.to(A, non_blocking=True)
    (race,) = simulated.races()
    assert "bytes of the host" in race


# --- random numbers ------------------------------------------------------------------------------


def draws(device, **options):
    return [
        torch.rand(4, device=device, **options).cpu(),
        torch.randn(4, device=device, **options).cpu(),
        torch.randint(9, (4,), device=device, **options).cpu(),
        torch.randperm(9, device=device, **options).cpu(),
        torch.ones(9, device=device).bernoulli_(0.5, **options).cpu(),
        torch.multinomial(torch.ones(9, device=device), 4, **options).cpu(),
        *([] if options else [F.dropout(torch.ones(9, device=device)).cpu()]),
    ]


def test_each_device_has_a_generator():
    before = torch.get_rng_state()
    states = [torch.sim.get_rng_state(device) for device in simulated.devices()]
    draws(B)
    now = [torch.sim.get_rng_state(device) for device in simulated.devices()]
    assert list(map(torch.equal, states, now)) == [True, False, True, True]
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("start", ["seed", "state", "own"])
def test_the_same_seed_or_state_draws_the_same(start):
    own = torch.Generator(B)
    state = torch.sim.get_rng_state(B)
    again = {
        "seed": lambda: torch.manual_seed(3),
        "state": lambda: torch.sim.set_rng_state(state, B),
        "own": lambda: own.manual_seed(3),
    }[start]
    options = {"generator": own} if start == "own" else {}
    again()
    first = draws(B, **options)
    assert not all(map(torch.equal, first, draws(B, **options)))
    again()
    assert all(map(torch.equal, first, draws(B, **options)))


def test_a_generator_of_the_cpu_is_refused():
    with pytest.raises(RuntimeError, match="generator"):
        torch.rand(4, device=B, generator=torch.Generator())


# --- processes -----------------------------------------------------------------------------------

FORKS = """
import os
import torch
from tests import simulated
simulated.load()
x = torch.ones(3, device="sim:1")
child = os.fork()
if child == 0:
    del x
    assert not torch.sim.is_available()
    try:
        torch.ones(3, device="sim:1")
    except RuntimeError as error:
        print("forked" in str(error), flush=True)
    os._exit(0)
print(os.waitpid(child, 0)[1], x.sum().item())
"""


def test_a_forked_child_is_refused_and_ends():
    root = Path(simulated.__file__).parents[2]
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        [sys.executable, "-c", FORKS], env={**os.environ, "PYTHONPATH": path},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (run.returncode, run.stdout) == (0, "True\n0 3.0\n"), run.stderr
