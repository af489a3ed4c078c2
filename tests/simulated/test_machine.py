"""The simulated devices themselves: operators, order, memory, copies, random numbers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from syncpipe.runtime.streams import AcceleratorStreams
from tests import simulated

pytestmark = pytest.mark.gpu

A, B = simulated.devices(2)
DOUBLE = torch.float64

# --- operators -----------------------------------------------------------------------------------


def results(function, x):
    """Output and gradient, on the CPU."""
    x = x.detach().requires_grad_()
    output = function(x)
    weights = torch.linspace(-1, 1, output.numel(), dtype=DOUBLE).reshape(output.shape)
    (output * weights.to(output.device)).sum().backward()
    return output.detach().cpu(), x.grad.cpu()


ROWS = torch.randn(6, 4, dtype=DOUBLE)
FUNCTIONS = {
    "several": lambda x: torch.cat(x.split(2, 1)[::-1], 1) + x.sort(-1)[0],
    "in place": lambda x: (x * 1).add_(1).mul_(2).relu_(),
    "grid": lambda x: x + torch.arange(4, device=x.device) + torch.eye(6, 4, device=x.device),
    "out": lambda x: (
        x + torch.add(x.detach(), 1, out=torch.empty(0, dtype=DOUBLE, device=x.device))
    ),
}
NEED_DATA = {
    "index by a mask": lambda x: x[x > 0],
    "nonzero": lambda x: x * len((x > 0).nonzero()),
    "item": lambda x: x * x.sum().item(),
    "equal": lambda x: x * x.equal(x),
}


@pytest.mark.parametrize("name", [*FUNCTIONS, *NEED_DATA])
def test_what_is_computed_is_what_the_cpu_computes(name):
    function, x = (FUNCTIONS | NEED_DATA)[name], ROWS.to(B)
    for ours, theirs in zip(results(function, x), results(function, ROWS), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    if name in NEED_DATA:
        with simulated.no_waits(), pytest.raises(RuntimeError, match="must not wait for stream 0"):
            function(x)


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


# --- order ---------------------------------------------------------------------------------------


def on(stream):
    return AcceleratorStreams(stream.device).use(stream)


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


# --- memory, and copies to and from the host -----------------------------------------------------


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
    assert torch.empty(1, device=A).isnan()
    assert bool(simulated.races()) == (how == "not")
    side.synchronize()
    assert simulated.live_bytes(A) == before[1] - 4096


def blocks():
    return torch.accelerator.memory_stats(A)["active.all.current"]


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


def draws(device):
    return [
        torch.rand(4, device=device).cpu(),
        torch.randint(9, (4,), device=device).cpu(),
        torch.randperm(9, device=device).cpu(),
        torch.ones(9, device=device).bernoulli_(0.5).cpu(),
        F.dropout(torch.ones(9, device=device)).cpu(),
    ]


def test_each_device_has_a_generator_that_decides_what_is_drawn():
    before, generators = torch.get_rng_state(), torch.sim.default_generators
    states = [generator.get_state() for generator in generators]
    first = draws(B)
    now = [generator.get_state() for generator in generators]
    assert list(map(torch.equal, states, now)) == [True, False, True, True]
    assert not all(map(torch.equal, first, draws(B)))
    generators[1].set_state(states[1])
    assert all(map(torch.equal, first, draws(B)))
    assert torch.equal(before, torch.get_rng_state())
