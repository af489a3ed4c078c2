"""``train_batch`` under what the caller set: autocast, hooks, anomaly mode, counters."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from syncpipe import Pipe, inline, is_recomputing
from tests.support.models import CHECKPOINT_MODES
from tests.support.running import Do, assert_same, on_gradient, pipe_of
from tests.support.training import FOUR, KINDS, RUNS, WHOLE, weigh
from tests.training.train_batch.loop import assert_same_state, by_hand, model, model_pipe


@pytest.mark.parametrize("by_hand", [False, True], ids=["workers", "inline"])
@pytest.mark.parametrize("run", ["gpipe", "zb_h1"])
def test_autocast_is_off_in_backward_and_as_it_was_afterwards(run, by_hand):
    seen = []

    def looking(x):
        return on_gradient(x, lambda grad: seen.append(torch.is_autocast_enabled("cpu")))

    layers = nn.Sequential(nn.Linear(3, 3), Do(looking), nn.Linear(3, 3))
    pipe = pipe_of(layers)
    with torch.autocast("cpu", dtype=torch.bfloat16), inline() if by_hand else nullcontext():
        x = torch.randn(8, 3)
        pipe.train_batch(x, loss_fn=lambda y: looking(y).float().sum(), schedule=run)
        assert torch.is_autocast_enabled("cpu")
    assert seen == [False] * 8


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("run", ["gpipe", "1f1b", "zb_h1"])
def test_autocast_holds_for_forward_and_loss_and_not_for_backward(run, checkpoint, cache):
    def loss_fn(y, t):
        assert torch.is_autocast_enabled("cpu")
        assert y.dtype == torch.bfloat16
        return F.mse_loss(y.float() @ torch.eye(3), t)

    autocast = {"dtype": torch.bfloat16, "cache_enabled": cache}
    layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3))
    plain = copy.deepcopy(layers)
    pipe = Pipe(layers, [2, 2, 1], devices=FOUR, chunks=4, checkpoint=checkpoint)
    x, target = torch.randn(8, 6), torch.randn(8, 3)
    for _ in range(2):
        losses = []
        for c, t in zip(x.chunk(4), target.chunk(4), strict=True):
            with torch.autocast("cpu", **autocast):
                losses.append(loss_fn(plain(c), t) * 0.25)
        for loss in losses[::-1] if run == "gpipe" else losses:
            loss.backward()
        with torch.autocast("cpu", **autocast):
            ours = pipe.train_batch(x, target, loss_fn=loss_fn, schedule=run)
        assert torch.equal(ours, sum(losses[1:], losses[0]))
        for p, q in zip(pipe.parameters(), plain.parameters(), strict=True):
            assert p.grad.dtype == torch.float32
            if run == "zb_h1":  # products in bfloat16, added in another order
                torch.testing.assert_close(p.grad, q.grad, rtol=2e-2, atol=1e-2)
            else:
                assert torch.equal(p.grad, q.grad)
        for module in (pipe, plain):
            torch.optim.SGD(module.parameters(), lr=0.5).step()
            module.zero_grad()
        plain.load_state_dict(pipe.state_dict())


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("run", KINDS)
def test_tensor_hooks_run_once_a_micro_batch_and_post_accumulate_hooks_once(run, checkpoint):
    pipe, calls = model_pipe(run, checkpoint=checkpoint), []
    for name, parameter in pipe.named_parameters():
        parameter.register_hook(lambda g, name=name: calls.append((name, g.clone())))
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: calls.append((name, 0)))
    pipe.train_batch(torch.randn(10, 6), loss_fn=weigh, **RUNS[run][0])
    names = [name for name, _ in calls]
    assert sorted(names) == sorted((5 + 1) * [name for name, _ in pipe.named_parameters()])
    for name, parameter in pipe.named_parameters():
        parts = [grad for other, grad in calls if other == name and isinstance(grad, Tensor)]
        torch.testing.assert_close(sum(parts), parameter.grad)


def test_a_parameter_hook_changes_the_gradient():
    pipe, plain = model_pipe("zb_h1"), model()
    for module in (pipe, plain):
        module[3].weight.register_hook(lambda g: g * 2)
    x, target = torch.randn(10, 6), torch.randn(10, 3)
    by_hand(plain, x, target, "zb_h1")
    pipe.train_batch(x, target, loss_fn=F.mse_loss, schedule="zb_h1")
    assert_same_state(pipe, plain, exact=False)


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("run", KINDS)
def test_hooks_on_layers_see_what_they_see_in_the_loop(run, checkpoint):
    def listen(module):
        calls, grads = [], {}
        for k in range(6):
            module[k].register_forward_pre_hook(
                lambda *_, k=k: None if is_recomputing() else calls.append((k, "before"))
            )
            module[k].register_forward_hook(
                lambda *_, k=k: None if is_recomputing() else calls.append((k, "after"))
            )
            module[k].register_full_backward_hook(
                lambda _, gi, go, k=k: grads.setdefault(k, []).extend([gi[0], go[0]])
            )
        return calls, grads

    plain, pipe = model(), model_pipe(run, checkpoint=checkpoint)
    ours, theirs = listen(pipe), listen(plain)
    x, target = torch.randn(10, 6, requires_grad=True), torch.randn(10, 3)
    by_hand(plain, x, target, run)
    pipe.train_batch(x, target, loss_fn=F.mse_loss, **RUNS[run][0])
    assert sorted(ours[0]) == sorted(theirs[0])
    for k in range(6):
        assert_same(ours[1][k], theirs[1][k])


def test_hooks_on_a_partition_run():
    pipe, calls = model_pipe("1f1b"), []
    for partition in pipe.partitions:
        partition.register_forward_hook(lambda *_: calls.append(1))
    pipe.train_batch(torch.randn(10, 6), loss_fn=weigh)
    assert len(calls) == 4 * 5 + 4 * 4  # and once more where it is recomputed


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("run", ["gpipe", "1f1b", "zb_h1"])
def test_saved_tensor_hooks_of_the_caller(run, checkpoint):
    plain, pipe, packed = model(), model_pipe(run, checkpoint=checkpoint), []
    x, target = torch.randn(10, 6), torch.randn(10, 3)
    by_hand(plain, x, target, run)
    with saved_tensors_hooks(lambda t: packed.append(t) or len(packed) - 1, packed.__getitem__):
        pipe.train_batch(x, target, loss_fn=F.mse_loss, schedule=run)
    assert packed
    assert_same_state(pipe, plain, exact=run in WHOLE)


@pytest.mark.parametrize("run", ["gpipe", "1f1b", "zb_h1"])
def test_the_flop_counter_counts_what_it_counts_for_the_loop(run):
    x, target, flops = torch.randn(10, 6), torch.randn(10, 3), []
    for checkpoint in ("never", "always", None):
        with FlopCounterMode(display=False) as counter:
            if checkpoint is None:
                by_hand(model(), x, target, run)
            else:
                pipe = model_pipe(run, checkpoint=checkpoint)
                pipe.train_batch(x, target, loss_fn=F.mse_loss, schedule=run)
        flops.append(counter.get_total_flops())
    with FlopCounterMode(display=False) as counter:
        model()(x)
    assert flops[0] == flops[2]
    assert flops[1] == flops[2] + counter.get_total_flops()
