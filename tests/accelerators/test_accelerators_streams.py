"""What people do with a pipe on streams: whatever is launched has waited for all that it uses.

Simulated devices tell what has not waited, at the end of each test. Callers overwrite what they
gave and use what they got as soon as a call is over, and drop what they need no longer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from syncpipe import Pipe, inline, is_recomputing
from syncpipe.runtime.streams import AcceleratorStreams
from syncpipe.runtime.worker import Worker
from tests import simulated
from tests.accelerators.four import MODES, WIDTH, model, pipe_of
from tests.support import accelerator as acc
from tests.support.running import Do, on_gradient, raising

pytestmark = pytest.mark.gpu

ROWS = 8


class Criterion(nn.Module):
    """A loss with a parameter of its own, alone or with a weight that is a tensor of integers."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64, device=device))
        self.weighted = self.fails = False

    def forward(self, output: Tensor, target: Tensor) -> Any:
        loss = (output * self.scale - target).square().mean()
        if self.fails:
            raise ValueError("as it was told")
        return (loss, (target > -0.5).sum()) if self.weighted else loss


class User:
    """A pipe, and a caller on streams of its own or on those that are current."""

    def __init__(self, layout: str, schedule: str, own_streams: bool, **options: Any) -> None:
        self.pipe, self.schedule = pipe_of(model(), layout, **options), schedule
        self.criterion = Criterion(self.pipe.devices[-1])
        devices = dict.fromkeys(d for d in self.pipe.devices if d.type != "cpu")
        self.streams = [
            torch.Stream(device=device) if own_streams else torch.accelerator.current_stream(device)
            for device in devices
        ]
        acc.synchronize()  # the parameters are there

    @contextmanager
    def on(self, streams: list[torch.Stream]) -> Iterator[None]:
        """Streams that have waited for the parameters; whoever comes next waits for them."""
        with ExitStack() as stack:
            for stream, mine in zip(streams, self.streams, strict=True):
                stream.wait_stream(mine)
                stack.enter_context(AcceleratorStreams(stream.device).use(stream))
            yield

    def joined(self, streams: list[torch.Stream]) -> None:
        for stream, mine in zip(streams, self.streams, strict=True):
            mine.wait_stream(stream)

    def others(self) -> list[torch.Stream]:
        return [torch.Stream(device=stream.device) for stream in self.streams]

    def made(self, j: int, *, grad: bool = False) -> Tensor:
        x = torch.randn(ROWS, WIDTH, dtype=torch.float64, device=self.pipe.devices[j])
        return x.requires_grad_(grad)

    def leaves(self) -> list[nn.Parameter]:
        return [*self.pipe.parameters(), self.criterion.scale]

    @torch.no_grad()
    def optimize(self) -> None:
        for leaf in self.leaves():
            if leaf.grad is not None:
                leaf.sub_(leaf.grad, alpha=0.01)
                leaf.grad = None

    def batch(self, *args: Any, weighted: bool = False, **options: Any) -> Any:
        self.criterion.weighted = weighted
        options = {"loss_fn": self.criterion, "schedule": self.schedule, **options}
        return self.pipe.train_batch(*args, **options)

    def pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Micro-batches, made on the way, of data that are elsewhere half of the time."""
        for k in range(4):
            x, target = (self.made(j)[: 1 + k] * 2 for j in ((0, -1) if k % 2 else (-1, 0)))
            yield x, target


@torch.no_grad()
def overwrite(*tensors: Tensor | None) -> None:
    for tensor in tensors:
        if tensor is not None:
            tensor.zero_()


# --- what they do --------------------------------------------------------------------------------


def forward(user: User) -> None:
    """The input lives in the graph alone, and nodes of the caller's own go back last."""
    for grad in (False, True):
        beside = (torch.ones_like(user.made(-1)).requires_grad_() * 2).exp()
        loss = (user.pipe(user.made(0, grad=grad)) + beside).sum()
        del beside
        loss.backward()
        del loss
        user.optimize()


@torch.no_grad()
def evaluate(user: User) -> None:
    """Nothing goes back, so nothing but the call's end says that all was read."""
    x = user.made(0)
    output = user.pipe(x)
    overwrite(x, output, *user.leaves())
    del output
    user.pipe(user.made(0))
    for j, weighted in product((0, -1), (False, True)):
        x, target, user.criterion.weighted = user.made(0), user.made(j), weighted
        loss = user.pipe.eval_batch(x, target, loss_fn=user.criterion)
        overwrite(x, target, loss)
    overwrite(user.pipe.eval_batch(user.made(0)))


def train(user: User) -> None:
    """Everything that went in is overwritten, and everything that came out is used.

    In the second call gradients are there already; the third one scales them in the end.
    """
    x, target = user.made(0, grad=True), user.made(-1)
    loss, output = user.batch(x, target, return_outputs=True, weighted=True)
    overwrite(x, target, loss, output, x.grad)
    del loss, output
    user.batch(data_iter=user.pairs())
    user.batch(user.made(0), user.made(0), weighted=True)
    user.optimize()


def fail(user: User) -> None:
    """Gradients are put back, used, and so is the memory of what the call had in hands."""

    def call() -> None:
        user.batch(user.made(0), user.made(-1))

    with torch.no_grad():
        for leaf in user.leaves():  # which are overwritten by others
            leaf.normal_()
    call()
    kept = [leaf.grad.clone() for leaf in user.leaves()]
    for place in nn.Module.register_forward_hook, nn.Module.register_full_backward_hook, None:
        user.criterion.fails = place is None
        hook = raising(lambda: ValueError("as it was told"))
        handle = place(user.pipe[4], hook) if place else nullcontext()
        with handle, pytest.raises(ValueError, match="as it was told"):
            call()
        if place:
            with place(user.pipe[4], hook), pytest.raises(ValueError, match="as it was told"):
                user.pipe(user.made(0)).sum().backward()
    user.criterion.fails = False
    assert all(map(torch.equal, kept, [leaf.grad for leaf in user.leaves()]))
    user.optimize()


def take_turns(user: User) -> None:
    """Callers on several streams that do not wait for each other, in training and without."""

    def train(weighted: bool) -> None:
        user.batch(user.made(0, grad=True), user.made(-1), weighted=weighted)
        overwrite(*(leaf.grad for leaf in user.leaves()))
        for leaf in user.leaves():
            leaf.grad = None

    def differentiate() -> None:
        loss = user.pipe(user.made(0)).square().sum()
        overwrite(*torch.autograd.grad(loss, [*user.pipe.parameters()]))

    @torch.no_grad()
    def look() -> None:
        user.pipe(user.made(0)).sum()

    def evaluate(loss_fn: Any) -> None:
        target = None if loss_fn is None else user.made(-1)
        overwrite(user.pipe.eval_batch(user.made(0), target, loss_fn=loss_fn))

    uses: list[tuple[Callable[..., None], list[Any]]] = [
        (train, [False]), (train, [True]), (look, []), (evaluate, [None]),
        (evaluate, [user.criterion]), (differentiate, []),
    ]  # fmt: skip
    for use, options in uses:
        turns = [user.others() for _ in range(3)]
        user.criterion.weighted = False
        for streams in turns:
            with user.on(streams):
                use(*options)
        for streams in turns:
            user.joined(streams)


USES = [forward, evaluate, train, fail, take_turns]
SCHEDULES = ["naive", "gpipe", "1f1b", "zb_h1", "interleaved_1f1b"]


def used(user: User, by_hand: bool, uses: list[Callable[[User], None]] = USES) -> None:
    """Each use, twice: what the first leaves behind the second one meets."""
    with inline() if by_hand else nullcontext(), user.on(user.streams):
        for use in [*uses, *uses]:
            use(user)


PLACES = ["four", "interleaved", "workers", "one", "two workers on one", "in turns"]
PLACES += ["three and one"]


@pytest.mark.parametrize("k", range(3))
@pytest.mark.parametrize("layout", PLACES)
def test_whatever_is_launched_has_waited_for_what_it_uses(layout, k):
    two_stages = layout in ("interleaved", "two workers on one")
    other = k + PLACES.index(layout)
    schedule = SCHEDULES[other % (5 if two_stages else 4)]
    options = {"checkpoint": [*MODES, "offload"][other % 4], "chunks": 1 + (other + k) % 4}
    used(User(layout, schedule, other % 2 == 1, **options), by_hand=k == 1)


@pytest.mark.parametrize("layout", ["four", "workers", "three and one"])
def test_what_a_stream_gave_may_be_written_into_and_dropped(layout):
    """While somebody else goes on with the weights."""
    user, adam = User(layout, "1f1b", True), partial(torch.optim.Adam, lr=0.01)
    streams = user.streams
    for _ in range(3):
        others = user.others()
        with user.on(streams):
            batches = [(user.made(0), user.made(-1)) for _ in range(6)]
            made = user.pipe.train_stream(batches, optimizer=adam, loss_fn=F.mse_loss)
            for other, mine in zip(others, streams, strict=True):
                other.wait_stream(mine)
            states = [state["exp_avg"] for own in made.optimizers for state in own.state.values()]
            overwrite(made.losses, *states)
            del made, states, batches
        streams = others


@pytest.mark.skipif(acc.count() < 2 or not simulated.loaded(), reason="others do not tell")
@pytest.mark.parametrize("name", ["wait", "keep"])
@pytest.mark.parametrize("layout", ["two workers on one", "four"])
@pytest.mark.parametrize("use", [forward, train])
def test_what_is_left_out_is_told(use, layout, name, monkeypatch):
    """Line by line that is ``python -m tests.mutations``."""
    monkeypatch.setattr(AcceleratorStreams, name, lambda *_: None)
    used(User(layout, "1f1b", True, checkpoint="never"), False, [use])
    word = {"wait": "race: ", "keep": "memory may be reused too early"}[name]
    assert any(race.startswith(word) for race in simulated.races())


DRIVERS: dict[str, Callable[..., Any]] = {
    "train_batch": lambda pipe, **given: pipe.train_batch(**given),
    "eval_batch": lambda pipe, **given: pipe.eval_batch(**given),
    "train_stream": lambda pipe, data_iter, loss_fn: pipe.train_stream(
        data_iter, optimizer=partial(torch.optim.SGD, lr=0.1), loss_fn=loss_fn
    ),
}


@pytest.mark.parametrize("layout", ["four", "workers"])
@pytest.mark.parametrize("driver", DRIVERS)
def test_an_iterator_is_asked_on_the_callers_streams(driver, layout):
    user, seen = User(layout, "1f1b", True), []

    def pairs() -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(4):
            seen.append([torch.accelerator.current_stream(s.device) for s in user.streams])
            assert torch.accelerator.current_device_index() == user.pipe.devices[0].index
            yield user.made(0), user.made(-1)

    with user.on(user.streams):
        DRIVERS[driver](user.pipe, data_iter=pairs(), loss_fn=F.mse_loss)
    acc.synchronize()
    assert seen == [user.streams] * 4


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("by_hand", [False, True])
def test_a_trace_waits_for_nothing_that_it_does_not_need(by_hand, checkpoint):
    user = User("workers", "1f1b", True, checkpoint=checkpoint)
    with user.pipe.trace() as trace:
        used(user, by_hand, [train])
    kinds = {span.kind for span in trace.spans}
    assert kinds >= {"forward", "backward", "transfer"}
    assert ("recompute" in kinds) == (checkpoint == "always")


@pytest.mark.parametrize("graph", [False, True])
def test_layers_run_where_their_own_device_is_the_current_one(graph):
    seen = []
    note = Do(lambda x: seen.append((torch.accelerator.current_device_index(), x.device.index)))
    devices = [acc.device(1), acc.device(0)]
    pipe = Pipe(nn.Sequential(note, note), [1, 1], devices=devices, chunks=2)
    with inline(graph=graph):
        pipe(torch.ones(4, 2, device=devices[0]))
    assert sorted(seen) == sorted([(d.index, d.index) for d in devices] * 2)


def test_what_replicas_on_streams_of_their_own_gave_may_be_used_at_once():
    pipe = pipe_of(model(), "by hand", checkpoint="never")
    acc.synchronize()
    for _ in range(2):
        x = torch.randn(ROWS, WIDTH, dtype=torch.float64, device=pipe.devices[0])
        target = torch.randn(ROWS, WIDTH, dtype=torch.float64, device=pipe.devices[-1])
        loss, output = pipe.train_batch(x, target, loss_fn=F.mse_loss, return_outputs=True)
        overwrite(loss, output, pipe.eval_batch(x, target, loss_fn=F.mse_loss), pipe.eval_batch(x))
        x.requires_grad_()
        output = pipe(x)
        output.sum().backward()
        overwrite(x.grad, output.detach(), x.detach(), target)
        with torch.no_grad():
            for parameter in pipe.parameters():
                parameter.sub_(parameter.grad)
                parameter.grad = None


class Twice(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, self.weight), self.weight, self.bias)


def test_what_a_cell_adds_up_for_a_weight_may_be_used_by_its_worker():
    """Autograd adds up on the stream on which the weight came into a graph first."""
    workers = [Worker(acc.device(0)), Worker(acc.device(0))]
    options = {"devices": workers, "chunks": 3, "checkpoint": "always"}
    pipe = Pipe(nn.Sequential(Twice(4, 4), Twice(4, 4)), [1, 1], **options)
    acc.synchronize()
    for _ in range(3):
        loss = pipe(torch.randn(6, 4, device=acc.device(0))).square().sum()
        overwrite(*torch.autograd.grad(loss, [*pipe.parameters()]))


@pytest.mark.parametrize("context", [nullcontext, inline], ids=["workers", "inline"])
@pytest.mark.parametrize("checkpoint", ["always", "never", [0, 1, 2]])
@pytest.mark.parametrize("there", [[0], [0, 1], ["cpu", 0]], ids=str)
def test_what_goes_back_inside_of_a_call_does_so_on_that_very_thread(there, checkpoint, context):
    """Autograd has one thread for a device, and that recomputes, too: it waits for locks.

    Those who have them run the user's code, which may go back: then nobody would go on.
    """
    seen: dict[str, set[bool]] = {}

    @torch.enable_grad()
    def look(place: str) -> None:
        threads = [threading.get_ident()]
        x = torch.ones(2, device=acc.device(), requires_grad=True)
        y = on_gradient(x * 1, lambda _: threads.append(threading.get_ident()))
        torch.autograd.grad(y.sum(), x)
        seen.setdefault(place, set()).add(threads[0] == threads[1])

    def layer(x: Tensor) -> Tensor:
        look("recomputation" if is_recomputing() else "forward")
        return on_gradient((x + torch.rand_like(x)).exp(), lambda _: look("backward"))

    def loss_fn(y: Tensor, *_: Any) -> Tensor:
        look("loss")
        return on_gradient(y, lambda _: look("backward of the loss")).mean()

    def pairs() -> Iterator[Any]:
        for _ in range(2):
            look("iterator")
            x = torch.ones(2, 2, device=devices[0], requires_grad=True)
            yield on_gradient(x, lambda _: look("the caller's graph")), None

    devices = [torch.device(k) if k == "cpu" else acc.device(k) for k in there]
    layers = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), *(Do(layer) for _ in devices))
    balance = [2, 2] if len(devices) > 1 else [3]
    options = {"devices": devices, "chunks": 2, "checkpoint": checkpoint}
    pipe = Pipe(layers, balance, **options)
    pipe[0].weight.register_hook(lambda grad: look("hook") or grad + torch.rand_like(grad))
    with context():
        pipe.train_batch(data_iter=pairs(), loss_fn=loss_fn, verify=False)
        places = ["iterator", "forward", "loss", "backward of the loss", "backward", "hook"]
        places += ["the caller's graph", *["recomputation"] * (checkpoint != "never")]
        assert seen == {place: {True} for place in places}
        loss_fn(pipe(torch.ones(4, 2, device=devices[0]))).backward()
    for place in {*places} & {"forward", "recomputation", "backward"}:  # all else is outside
        assert seen[place] == {True}, place
