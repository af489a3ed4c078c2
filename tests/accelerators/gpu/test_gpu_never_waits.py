"""Autograd has a single thread for each accelerator, and whoever holds a lock never waits for it.

Of two threads of the user's one holds locks of the pipe while something of its own goes back. The
other one keeps autograd's thread: it recomputes there, and needs these very locks. Each result is
what it is without the other thread.
"""

from __future__ import annotations

import itertools
import threading

import pytest
import torch
from torch import nn

from syncpipe import Pipe, is_recomputing
from tests.support import accelerator as acc
from tests.support.running import Do, in_threads, on_gradient

# Where they wait for each other, the process ends with the stacks of all threads.
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

WIDTH = 3


class Meeting:
    """Lets one thread go on with its locks only when the other one is about to ask for them.

    Args:
        needed: without it nobody waits.
    """

    def __init__(self, needed: bool) -> None:
        self._holds, self._comes = threading.Event(), threading.Event()
        self._needed = needed

    def hold(self) -> None:
        """For whoever holds locks; only the first time counts."""
        self._holds.set()
        if self._needed:
            self._comes.wait()

    def wait_for_holder(self) -> None:
        self._holds.wait()

    def come(self) -> None:
        """For whoever needs locks next, and does nothing else before it has them."""
        self._comes.set()


def ones(device=None, rows=2, **options):
    return torch.ones(rows, WIDTH, device=device or acc.device(), **options)


def pipe_of(*layers, device=None, **options):
    """One stage."""
    devices = [device or acc.device()]
    return Pipe(nn.Sequential(*layers), [len(layers)], devices=devices, **options)


class Comes(nn.Module):
    """Draws from each generator, and is computed again before it goes back."""

    def forward(self, x):
        return (x * (torch.rand_like(x) + float(torch.rand(())))).square()


def slope(device):
    """Something that goes back on a device, here and now; it stores nothing."""
    x = torch.ones(WIDTH, device=device, requires_grad=True)
    (grad,) = torch.autograd.grad((x * 3).sum(), x)
    return grad


class Holds(nn.Module):
    """Runs a backward in its forward, as layers do that make forces of an energy."""

    def __init__(self, meeting, device=None, when=lambda: True):
        super().__init__()
        self.meeting, self.device, self.when = meeting, device or acc.device(), when

    def forward(self, x):
        if x.device.type == "cpu":
            torch.get_rng_state()  # so that no generator of its own can stand in
        x = x * (torch.rand_like(x) + float(torch.rand(())))
        if self.when():
            self.meeting.hold()
        return x * slope(self.device).to(x.device)


def gone_back(module, *results):
    return [*results, *(parameter.grad for parameter in module.parameters())]


def a_backward_that_draws(meeting):
    """It is seeded: it has the generators to itself."""
    pipe = pipe_of(nn.Linear(WIDTH, WIDTH))
    pipe[0].weight.register_hook(lambda grad: grad + torch.rand_like(grad))

    def held(y):  # the loss goes back on the calling thread first
        return on_gradient(y.cpu(), lambda grad: meeting.hold()).square().sum()

    return gone_back(pipe, pipe.train_batch(ones(), loss_fn=held))


def a_layer(meeting):
    return [pipe_of(Holds(meeting))(ones())]


def a_layer_on_a_worker(meeting):
    """The pipe has threads of its own."""
    layers = nn.Sequential(Holds(meeting), nn.Linear(WIDTH, WIDTH))
    return [Pipe(layers, [1, 1], devices=["cpu", acc.device()])(ones("cpu"))]


def a_loss_function(meeting):
    pipe, criterion = pipe_of(nn.Linear(WIDTH, WIDTH)), Holds(meeting)
    return gone_back(pipe, pipe.train_batch(ones(), loss_fn=lambda y: criterion(y).sum()))


def an_iterator(meeting):
    pipe, source = pipe_of(nn.Linear(WIDTH, WIDTH)), Holds(meeting)
    pairs = ((source(ones()), None) for _ in range(1))
    return gone_back(pipe, pipe.train_batch(data_iter=pairs, loss_fn=lambda y: y.square().sum()))


def a_recomputation(meeting, device="cpu", backward_of=None):
    """The calling thread recomputes, or the thread of another device."""
    layer = Holds(meeting, backward_of, is_recomputing)
    x = ones(device, requires_grad=True)
    pipe_of(layer, nn.Tanh(), device=device, checkpoint="always")(x).sum().backward()
    return [x.grad]


HOLDERS = [
    a_backward_that_draws,
    a_layer,
    a_layer_on_a_worker,
    a_loss_function,
    an_iterator,
    a_recomputation,
]


def beside(holder, y, x, meeting):
    """What ``holder`` gives, and the gradient of ``x``, which goes back from ``y`` meanwhile."""

    def come():
        meeting.wait_for_holder()
        y.register_hook(lambda grad: meeting.come())  # the cells come next
        y.sum().backward()

    found, _ = in_threads(lambda act: act(), holder, come)
    return [t.detach().cpu() for t in (*found, x.grad)]


def alone_and_together(scene):
    """Runs a scene in which nobody waits, and once more with everybody in each other's way."""
    results = []
    for needed in (False, True):
        torch.manual_seed(0)
        meeting = Meeting(needed)
        results.append(beside(*scene(meeting), meeting))
    alone, together = results
    assert len(alone) > 1
    assert all(map(torch.equal, alone, together))


@pytest.mark.parametrize("holder", HOLDERS)
def test_a_recomputation_needs_the_generators_that_another_thread_has(holder):
    def scene(meeting):
        x = ones(requires_grad=True)
        return lambda: holder(meeting), pipe_of(Comes(), checkpoint="always")(x), x

    alone_and_together(scene)


def test_a_recomputation_needs_the_stage_that_another_thread_has():
    def scene(meeting):
        count = itertools.count()

        def stop(x):
            if next(count) == 3:  # micro-batch 1 of the second call: it is known not to draw
                meeting.hold()
            return x * slope(x.device)

        layers = nn.BatchNorm1d(WIDTH), Do(stop), Comes()
        pipe = pipe_of(*layers, chunks=2, checkpoint="always")
        x = ones(rows=4, requires_grad=True)
        y = pipe(x)
        return lambda: [pipe(ones(rows=4))], y, x

    alone_and_together(scene)


def test_two_recomputations_on_two_devices():
    """Each device's thread needs what the other one has: the generator of the CPU, and time."""
    if acc.count() < 2:
        pytest.skip("needs two accelerators")

    def scene(meeting):
        x, devices = ones(acc.device(1), requires_grad=True), (acc.device(0), acc.device(1))
        y = pipe_of(nn.Tanh(), Comes(), device=devices[1], checkpoint="always")(x)
        return lambda: a_recomputation(meeting, *devices), y, x

    alone_and_together(scene)
