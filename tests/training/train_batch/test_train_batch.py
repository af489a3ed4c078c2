"""``train_batch``: schedules, inputs, layers of all kinds, what the caller set, recomputation."""

from __future__ import annotations

import copy
import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from syncpipe import NoChunk, Pipe, inline, is_recomputing
from tests.support.models import CHECKPOINT_MODES
from tests.support.running import Do, Using, assert_same, in_threads, on_gradient, pipe_of
from tests.support.training import RUNS, assert_trains_as, weigh
from tests.support.watched import Fails, numbered

every_mode = pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
some_runs = pytest.mark.parametrize("run", ["gpipe", "1f1b", "zb_h1"])


def model() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3)
    )


def model_pipe(run: str, **options: Any) -> Pipe:
    return Pipe(model(), [2, 2, 1, 1], devices=RUNS[run][1], **{"chunks": 5, **options})


@pytest.mark.parametrize(
    ("schedule", "order"), [("pipe(x)", [3, 2, 1, 0]), ("gpipe", [3, 2, 1, 0]), ("1f1b", range(4))]
)
def test_a_tensor_that_every_micro_batch_needs_whole(schedule, order):
    """Its gradients are added up in the order of the schedule."""
    whole, x = torch.randn(30, requires_grad=True), torch.randn(8, 30)
    layers = nn.Sequential(Do(lambda tree: tree["x"] * tree["whole"].tanh()), nn.Linear(30, 3))
    pipe = pipe_of(copy.deepcopy(layers), chunks=4)
    for i in order:
        layers({"whole": whole, "x": x.chunk(4)[i]}).square().sum().backward()
    expected, whole.grad = whole.grad, None
    given = {"whole": NoChunk(whole), "x": x}  # first in the tree
    if schedule == "pipe(x)":
        pipe(given).square().sum().backward()
    else:
        pipe.train_batch(
            given, schedule=schedule, loss_reduction="sum", loss_fn=lambda y: y.square().sum()
        )
    assert_same(whole.grad, expected)
    assert_same([p.grad for p in pipe.parameters()], [p.grad for p in layers.parameters()])


@some_runs
def test_fake_tensors_are_trained(run):
    with FakeTensorMode():
        pipe = model_pipe(run)
        loss = pipe.train_batch(
            torch.randn(10, 6), torch.randn(10, 3), loss_fn=F.mse_loss, schedule=run
        )
        assert loss.shape == ()
        assert all(p.grad.shape == p.shape for p in pipe.parameters())


@every_mode
@some_runs
def test_a_tied_weight_with_a_sparse_gradient(run, checkpoint):
    layers = nn.Sequential(
        nn.Embedding(9, 8, sparse=True), nn.Linear(8, 8), nn.Linear(8, 9, bias=False)
    )
    layers[2].weight = layers[0].weight
    plain, x = copy.deepcopy(layers), torch.randint(9, (7, 5))
    pipe = pipe_of(layers, chunks=3, checkpoint=checkpoint)
    for _ in range(3):  # any stage may be late
        assert_trains_as(pipe, plain, x, loss_fn=weigh, schedule=run)
        plain.zero_grad()
        pipe.zero_grad()


@pytest.mark.parametrize("context", [nullcontext, inline], ids=["workers", "inline"])
@pytest.mark.parametrize("cache", [True, False])
@every_mode
@some_runs
def test_autocast_holds_for_forward_and_loss_and_not_for_backward(run, checkpoint, cache, context):
    seen = []

    def looking(x):
        assert torch.is_autocast_enabled("cpu")
        return on_gradient(x, lambda grad: seen.append(torch.is_autocast_enabled("cpu")))

    def loss_fn(y, t):
        assert y.dtype == torch.bfloat16
        return F.mse_loss(looking(y).float() @ torch.eye(3), t)

    layers = [nn.Linear(6, 8), nn.Sequential(nn.Tanh(), Do(looking)), nn.Linear(8, 8), nn.GELU()]
    layers = nn.Sequential(*layers, nn.Linear(8, 3))
    plain, (x, target) = copy.deepcopy(layers), (torch.randn(8, 6), torch.randn(8, 3))
    pipe = pipe_of(layers, [2, 2, 1], checkpoint=checkpoint)
    for _ in range(2):  # casts of weights that are older than these would show
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache), context():
            options = {"loss_fn": loss_fn, "schedule": run, "verify": False}
            # Zero bubble adds products in bfloat16 in another order.
            tolerance = {"rtol": 2e-2, "atol": 1e-2}
            assert_trains_as(pipe, plain, x, target, tolerance=tolerance, **options)
            assert torch.is_autocast_enabled("cpu")
        assert seen == [True] * 8 + [False] * 8  # in backward of the plain loop, and of the pipe
        seen.clear()
        torch.optim.SGD(pipe.parameters(), lr=0.5).step()
        pipe.zero_grad()
        plain.zero_grad()
        plain.load_state_dict(pipe.state_dict())


@some_runs
def test_the_flop_counter_counts_what_it_counts_for_the_loop(run):
    x, target = torch.randn(10, 6), torch.randn(10, 3)

    def flops(step):
        with FlopCounterMode(display=False) as counter:
            step()
        return counter.get_total_flops()

    def train(checkpoint):
        pipe = model_pipe(run, checkpoint=checkpoint)
        return flops(lambda: pipe.train_batch(x, target, loss_fn=F.mse_loss, schedule=run))

    whole = flops(lambda: F.mse_loss(model()(x), target).backward())
    assert train("never") == whole
    assert train("always") == whole + flops(lambda: model()(x))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
@pytest.mark.parametrize("devices", [["cpu:0", "cpu:1"], ["cpu:0", "cpu:0"]])
def test_an_optimizer_in_backward_makes_one_step(schedule, devices):
    layers = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
    pipe = Pipe(layers, [2, 1], devices=devices, chunks=4)
    x, seen = torch.randn(8, 3), []
    pipe.train_batch(x, loss_fn=torch.mean, schedule=schedule)
    expected = [p.grad.clone() for p in pipe.parameters()]

    def step(parameter):
        seen.append(parameter.grad.clone())
        parameter.grad = None

    for parameter in pipe.parameters():
        parameter.grad = None
        parameter.register_post_accumulate_grad_hook(step)
    for _ in range(2):
        pipe.train_batch(x, loss_fn=torch.mean, schedule=schedule)
        assert len(seen) == len(expected)
        for grad in expected:
            assert any(torch.equal(grad, other) for other in seen)
        assert all(p.grad is None for p in pipe.parameters())
        seen.clear()
    with pytest.raises(ZeroDivisionError):
        pipe.train_batch(x, loss_fn=lambda y: 1 / 0, schedule=schedule)
    assert not seen
    pipe(x).sum().backward()  # hooks are still there
    assert len(seen) == len(expected)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
def test_hooks_after_a_gradient_run_for_what_the_call_added_to(schedule):
    either = Using(lambda x, used, unused: used(x), nn.Linear(3, 3), nn.Linear(3, 3))
    pipe, seen = pipe_of(nn.Sequential(either, nn.Linear(3, 1)), chunks=4), []
    for name, parameter in pipe.named_parameters():
        parameter.grad = torch.zeros_like(parameter)
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(name))
    pipe.train_batch(torch.randn(8, 3), loss_fn=torch.mean, schedule=schedule)
    assert sorted(seen) == ["0.layers.0.bias", "0.layers.0.weight", "1.bias", "1.weight"]


@pytest.mark.parametrize("run", ["naive", "gpipe", "1f1b", "zb_h1"])
def test_a_recomputation_starts_before_the_gradient_arrives(run):
    started = [threading.Event() for _ in range(4)]
    in_time = []

    def wait(x):
        begun = started[int(x.detach()[0, 0])]
        return on_gradient(x, lambda grad: in_time.append(begun.wait(timeout=30)))

    def note(x):
        if is_recomputing():
            started[int(x.detach()[0, 0])].set()

    layers = [nn.Sequential(Do(note), Fails()), nn.Sequential(Fails(), Do(wait))]
    pipe = pipe_of(nn.Sequential(*layers), checkpoint="always")
    pipe.train_batch(numbered(4), loss_fn=weigh, schedule=run)
    assert in_time == [True] * 4


def test_two_threads_train_one_pipe():
    pipe, other = model_pipe("1f1b").eval(), model_pipe("1f1b").eval()  # only .grad changes
    x, target = torch.randn(10, 6), torch.randn(10, 3)

    def train(pipe, steps):
        return [pipe.train_batch(x, target, loss_fn=F.mse_loss) for _ in range(steps)]

    first, second = in_threads(partial(train, pipe), 25, 25)
    assert_same([*first, *second], train(other, 50))
    assert_same([p.grad for p in pipe.parameters()], [p.grad for p in other.parameters()])


def test_a_call_that_fails_does_not_take_away_what_another_thread_adds_meanwhile():
    pipe, other = [pipe_of(nn.Sequential(nn.Linear(3, 3), nn.Tanh())) for _ in range(2)]
    other.load_state_dict(pipe.state_dict())
    train = partial(Pipe.train_batch, input=torch.ones(4, 3), loss_fn=torch.mean)
    calls: list[Future[Any]] = []

    def act(_: torch.Tensor) -> None:
        if not calls:
            calls.append(threads.submit(train, pipe))
            wait(calls, 0.3)  # in vain: it begins when this call has ended
            raise ValueError("as it was told")

    hook = pipe[0].weight.register_post_accumulate_grad_hook(act)
    with ThreadPoolExecutor(1) as threads:
        with pytest.raises(ValueError, match="as it was told"):
            train(pipe)
        calls[0].result()
    hook.remove()
    train(other)
    assert_same([p.grad for p in pipe.parameters()], [p.grad for p in other.parameters()])
