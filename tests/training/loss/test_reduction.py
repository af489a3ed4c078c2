"""Losses, weights and scaling, micro-batches from an iterator, what comes back; ``eval_batch``."""

from __future__ import annotations

import copy
import os
import threading
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from syncpipe import NoChunk, Pipe, RepeatingLoader, inline
from tests.support.models import CHECKPOINT_MODES, assert_same_tree, linear_model
from tests.support.running import Dawdle, Do, assert_same, pipe_of
from tests.support.training import KINDS, RUNS, alive


def four(**options: Any) -> Pipe:
    """A pipe of four stages."""
    torch.manual_seed(1)
    return pipe_of(linear_model(), **options)


def grads_of(module: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in module.parameters()]


def whole(pipe: nn.Module, loss: Any) -> tuple[Tensor, list[Tensor]]:
    """Loss and gradients of the mini-batch in one piece; ``loss`` is called with a plain copy."""
    plain = copy.deepcopy(nn.Sequential(*pipe))
    plain.zero_grad()
    value = loss(plain)
    value.backward()
    return value.detach(), [p.grad for p in plain.parameters()]


def assert_trains_like(pipe: Pipe, actual: Tensor, expected: tuple[Tensor, list[Tensor]]) -> None:
    torch.testing.assert_close(actual, expected[0])
    torch.testing.assert_close(grads_of(pipe), expected[1])


# How the losses of micro-batches become that of the mini-batch


@pytest.mark.parametrize("size", [8, 7, 5, 3, 1])
def test_mean_losses_are_weighted_by_the_size_of_the_micro_batch(size):
    pipe = four(chunks=4)
    x, target = torch.randn(size, 3), torch.randn(size, 3)
    loss = pipe.train_batch(x, target, loss_fn=F.mse_loss)
    assert_trains_like(pipe, loss, whole(pipe, lambda plain: F.mse_loss(plain(x), target)))
    assert not loss.requires_grad
    assert loss.shape == ()


def test_sums_are_added():
    pipe = four()
    x, target = torch.randn(7, 3), torch.randn(7, 3)

    def loss_fn(y, t):
        return F.mse_loss(y, t, reduction="sum")

    loss = pipe.train_batch(x, target, loss_fn=loss_fn, loss_reduction="sum")
    assert_trains_like(pipe, loss, whole(pipe, lambda plain: loss_fn(plain(x), target)))


WEIGHTS = {
    "Python integers": lambda w: w,
    "Python floats": lambda w: w / 2,
    "tensors": lambda w: torch.tensor(float(w)),
    "integer tensors": lambda w: torch.tensor(w),
    "tensors of one element": lambda w: torch.tensor([w]),
    "numpy": lambda w: np.int64(w),
}


@pytest.mark.parametrize("counts", [[3, 1, 4, 2], [2, 2, 2, 2], [0, 3, 1, 0], [0, 0, 0, 5]])
@pytest.mark.parametrize("existing", [False, True], ids=["no grad yet", "on top of a grad"])
@pytest.mark.parametrize("kind", WEIGHTS)
def test_a_loss_may_come_with_its_weight(kind, existing, counts):
    pipe = four()
    x, target = torch.randn(20, 3), torch.randn(20, 3)
    mask = torch.cat([torch.arange(5) < count for count in counts])
    micro = iter(counts)

    def loss_fn(y, pair):
        t, kept = pair
        weight = next(micro)
        assert kept.sum() == weight
        total = ((y - t).pow(2).mean(1) * kept).sum()
        return total / max(weight, 1), WEIGHTS[kind](weight)

    def masked(plain):
        return ((plain(x) - target).pow(2).mean(1) * mask).sum() / mask.sum()

    expected = whole(pipe, masked)
    if existing:
        for p, grad in zip(pipe.parameters(), expected[1], strict=True):
            p.grad = torch.ones_like(p)
            grad += 1
    loss = pipe.train_batch(x, (target, mask), loss_fn=loss_fn)
    assert_trains_like(pipe, loss, expected)


@pytest.mark.parametrize("kind", ["Python integers", "tensors"])
@pytest.mark.parametrize("run", KINDS)
def test_weights_with_every_schedule_and_gradients_beyond_the_parameters(run, kind):
    torch.manual_seed(2)
    pipe = Pipe(linear_model(), [1, 1, 1, 1], devices=RUNS[run][1], chunks=3)
    x0, t0 = torch.randn(7, 3, requires_grad=True), torch.randn(7, 3, requires_grad=True)
    scale = nn.Parameter(torch.tensor(1.5))  # of the loss
    sizes = [3, 3, 1]

    def per_sample(y, t):
        return (y - t * scale).pow(2).sum(1)

    def masked(plain):
        losses = torch.cat([per_sample(plain(x0.exp()), t0.tanh())])
        weights = torch.cat([torch.full((n,), k + 1.0) for k, n in enumerate(sizes)])
        return (losses * weights).sum() / weights.sum()

    seen = iter(range(3))
    expected = whole(pipe, masked)
    others = [t.grad for t in (x0, t0, scale)]
    x0.grad = t0.grad = scale.grad = None

    def loss_fn(y, t):
        return per_sample(y, t).mean(), WEIGHTS[kind](len(y) * (next(seen) + 1))

    options = RUNS[run][0]
    loss = pipe.train_batch(x0.exp(), t0.tanh(), loss_fn=loss_fn, **options)
    assert_trains_like(pipe, loss, expected)
    torch.testing.assert_close([t.grad for t in (x0, t0, scale)], others)


def test_leaves_that_only_a_layer_knows_are_weighted_as_well():
    weight = torch.ones(3, requires_grad=True)
    pipe = pipe_of(nn.Sequential(Do(lambda x: x * weight), nn.Linear(3, 3)))
    pieces = [torch.randn(n, 3) for n in (1, 5, 3, 3)]
    y = nn.Sequential(*pipe)(torch.cat(pieces))
    expected = torch.autograd.grad(y.pow(2).mean(), weight)
    pipe.train_batch(
        data_iter=iter([(piece, None) for piece in pieces]), loss_fn=lambda y: y.pow(2).mean()
    )
    torch.testing.assert_close(weight.grad, *expected)


def test_leaves_that_a_layer_uses_for_some_micro_batches_only_are_weighted_as_well():
    weight = torch.ones(3, requires_grad=True)
    layers = nn.Sequential(nn.Linear(3, 3), Do(lambda x: x * weight if len(x) == 3 else x))
    pipe = pipe_of(layers)
    pieces = [torch.randn(n, 3) for n in (1, 5, 3, 3)]
    total = sum(layers(piece).pow(2).mean() * len(piece) for piece in pieces) / 12
    expected = torch.autograd.grad(total, weight)
    pipe.train_batch(
        data_iter=iter([(piece, None) for piece in pieces]), loss_fn=lambda y: y.pow(2).mean()
    )
    torch.testing.assert_close(weight.grad, *expected)


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("form", ["module", "closure"])
@pytest.mark.parametrize("run", KINDS)
def test_a_loss_may_have_parameters_of_its_own(run, form, checkpoint):
    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, y, t):
            return F.mse_loss(self.linear(y), t)

    torch.manual_seed(3)
    head = Head()
    pipe = Pipe(linear_model(), [1, 1, 1, 1], devices=RUNS[run][1], chunks=4, checkpoint=checkpoint)
    x, target = torch.randn(8, 3), torch.randn(8, 2)
    plain, other = copy.deepcopy(nn.Sequential(*pipe)), copy.deepcopy(head)
    for _ in range(2):
        losses = [other(plain(c), t) / 4 for c, t in zip(x.chunk(4), target.chunk(4), strict=True)]
        for loss in losses[::-1] if run == "gpipe" else losses:
            loss.backward()
        loss_fn = head if form == "module" else lambda y, t: head(y, t)
        pipe.train_batch(x, target, loss_fn=loss_fn, **RUNS[run][0])
        assert_same(grads_of(head), grads_of(other))
        torch.testing.assert_close(grads_of(pipe), grads_of(plain))


def test_a_loss_that_uses_parameters_of_all_stages_is_the_same_every_time():
    pipe = pipe_of(nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), Dawdle(k)) for k in range(3)]))

    def loss_fn(y):
        return y.pow(2).mean() + sum(p.pow(2).sum() for p in pipe.parameters())

    x, seen = torch.randn(8, 6), []
    expected = whole(
        pipe, lambda plain: plain(x).pow(2).mean() + sum(p.pow(2).sum() for p in plain.parameters())
    )
    for _ in range(30):
        pipe.zero_grad()
        loss = pipe.train_batch(x, loss_fn=loss_fn)
        seen.append(grads_of(pipe))
    assert_trains_like(pipe, loss, expected)
    for grads in seen:
        assert_same(grads, seen[0])


@pytest.mark.parametrize("chunks", [1, 4])
def test_gradients_of_parameters_that_only_the_loss_uses_are_tensors_of_their_own(chunks):
    class Idle(nn.Linear):
        def __init__(self):
            super().__init__(3, 3)
            self.a, self.b, self.c = (nn.Parameter(torch.ones(3)) for _ in range(3))

    layers = nn.Sequential(Idle(), nn.Linear(3, 3))
    idle = layers[0]
    pipe = pipe_of(layers, chunks=chunks)

    def loss_fn(y):
        return y.mean() + (idle.a + idle.b).pow(2).sum() + idle.c.sum()

    for step in (1, 2):
        pipe.train_batch(torch.randn(8, 3), loss_fn=loss_fn)
        torch.testing.assert_close(idle.c.grad, torch.full((3,), float(step)))
    idle.a.grad.mul_(2)  # as gradients are clipped
    torch.testing.assert_close(idle.a.grad, torch.full((3,), 16.0))
    torch.testing.assert_close(idle.b.grad, torch.full((3,), 8.0))


def test_hooks_change_gradients_of_a_loss_that_uses_parameters_once():
    pipe = four()
    plain = copy.deepcopy(nn.Sequential(*pipe))
    for module in (pipe, plain):
        for p in module.parameters():
            p.register_hook(lambda grad: grad * 3)

    def loss_fn(y, parameters):
        return y.pow(2).mean() + sum(p.pow(2).sum() for p in parameters)

    x = torch.randn(8, 3)
    for piece in x.chunk(4):
        (loss_fn(plain(piece), plain.parameters()) / 4).backward()
    pipe.train_batch(x, loss_fn=lambda y: loss_fn(y, list(pipe.parameters())))
    torch.testing.assert_close(grads_of(pipe), grads_of(plain))


@pytest.mark.parametrize("data", ["mini-batch", "iterator"])
def test_a_grad_scaler_scales_gradients_and_not_the_loss_that_comes_back(data):
    pipe = four()
    x, target = torch.randn(8, 3), torch.randn(8, 3)
    loss, grads = whole(pipe, lambda plain: F.mse_loss(plain(x), target))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    given = {"input": x, "target": target}
    if data == "iterator":
        given = {"data_iter": zip(x.chunk(4), target.chunk(4), strict=True)}
    ours = pipe.train_batch(**given, loss_fn=F.mse_loss, grad_scaler=scaler)
    assert_trains_like(pipe, ours, (loss, [grad * 1024 for grad in grads]))
    optimizer = torch.optim.SGD(pipe.parameters(), lr=1.0)
    before = [p.detach().clone() for p in pipe.parameters()]
    scaler.step(optimizer)
    scaler.update()
    steps = [old - p.detach() for old, p in zip(before, pipe.parameters(), strict=True)]
    torch.testing.assert_close(steps, grads)


def test_an_overflow_is_found_by_the_scaler():
    pipe = four()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**15)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=1.0)
    before = [p.detach().clone() for p in pipe.parameters()]
    pipe.train_batch(torch.randn(8, 3), loss_fn=lambda y: y.sum() * 1e36, grad_scaler=scaler)
    scaler.step(optimizer)
    scaler.update()
    assert_same([p.detach() for p in pipe.parameters()], before)
    assert scaler.get_scale() == 2.0**14


def test_a_scaler_that_is_off_does_nothing():
    pipe, x = four(), torch.randn(8, 3)
    expected = whole(pipe, lambda plain: plain(x).pow(2).mean())
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    loss = pipe.train_batch(x, loss_fn=lambda y: y.pow(2).mean(), grad_scaler=scaler)
    assert_trains_like(pipe, loss, expected)


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("run", KINDS)
def test_the_loss_function_is_called_once_a_micro_batch_in_order(run, checkpoint):
    seen = []

    def loss_fn(y, t):
        seen.append(int(t[0]))
        return y.sum()

    pipe = Pipe(linear_model(), [1, 1, 1, 1], devices=RUNS[run][1], chunks=4, checkpoint=checkpoint)
    pipe.train_batch(torch.randn(4, 3), torch.arange(4), loss_fn=loss_fn, **RUNS[run][0])
    assert seen == [0, 1, 2, 3]


def test_without_a_target_the_loss_gets_the_output_alone():
    pipe = four()
    seen = []

    def loss_fn(*given):
        seen.append(len(given))
        return given[0].sum()

    pipe.train_batch(torch.randn(4, 3), loss_fn=loss_fn)
    pipe.train_batch(torch.randn(4, 3), torch.randn(4), loss_fn=loss_fn)
    assert seen == [1] * 4 + [2] * 4


def test_targets_are_trees_that_are_cut_like_the_input():
    pipe, seen = four(chunks=2), []
    target = {
        "a": torch.arange(5),
        "b": (torch.arange(5.0), None),
        "whole": NoChunk(torch.arange(3)),
        "word": "x",
    }

    def loss_fn(y, t):
        seen.append(t)
        return y.sum()

    pipe.train_batch(torch.randn(5, 3), target, loss_fn=loss_fn)
    expected = [
        {"a": a, "b": (a.float(), None), "whole": torch.arange(3), "word": "x"}
        for a in torch.arange(5).chunk(2)
    ]
    assert_same_tree(seen, expected, "targets")


@pytest.mark.parametrize("target", [7, "x", NoChunk(torch.arange(2))])
def test_a_target_without_anything_to_cut_goes_to_every_micro_batch(target):
    pipe, seen = four(), []
    pipe.train_batch(torch.randn(4, 3), target, loss_fn=lambda y, t: seen.append(t) or y.sum())
    assert_same_tree(seen, [getattr(target, "tensor", target)] * 4, "targets")


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
def test_a_target_may_need_a_gradient(checkpoint):
    pipe = four(checkpoint=checkpoint)
    x, target = torch.randn(8, 3), torch.randn(8, 3, requires_grad=True)
    loss, _ = whole(pipe, lambda plain: F.mse_loss(plain(x), target))
    expected, target.grad = target.grad, None
    torch.testing.assert_close(pipe.train_batch(x, target, loss_fn=F.mse_loss), loss)
    torch.testing.assert_close(target.grad, expected)


@pytest.mark.parametrize("rows", [3, 5, 1])
@pytest.mark.parametrize("call", ["train_batch", "eval_batch"])
def test_targets_of_another_number_of_samples_are_refused(call, rows):
    pipe = four(chunks=2)
    with pytest.raises(ValueError, match="target") as caught:
        getattr(pipe, call)(torch.randn(4, 3), torch.randn(rows, 3), loss_fn=F.mse_loss)
    assert f"float32[{rows}, 3]" in str(caught.value)
    assert "float32[4, 3]" in str(caught.value)


# What comes back


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("run", KINDS)
def test_outputs_come_back_gathered_and_detached(run, checkpoint):
    class Two(nn.Module):
        def forward(self, x):
            return {"y": x * 2, "rest": [x.detach() > 0, None, "word"]}

    layers = nn.Sequential(*linear_model(3), Two())
    pipe = Pipe(layers, [1, 1, 1, 1], devices=RUNS[run][1], chunks=3, checkpoint=checkpoint)
    x = torch.randn(7, 3)
    expected = [layers(piece) for piece in x.chunk(3)]
    loss, output = pipe.train_batch(
        x, loss_fn=lambda y: y["y"].sum(), return_outputs=True, **RUNS[run][0]
    )
    assert loss.shape == ()
    assert not output["y"].requires_grad
    assert torch.equal(output["y"], torch.cat([y["y"] for y in expected]))
    assert torch.equal(output["rest"][0], torch.cat([y["rest"][0] for y in expected]))
    assert output["rest"][1:] == [None, "word"]


def test_the_outputs_are_those_of_the_layers_whatever_the_loss_does_to_them():
    pipe, x = four(), torch.randn(8, 3)
    expected = torch.cat([nn.Sequential(*pipe)(piece) for piece in x.chunk(4)])
    _, output = pipe.train_batch(
        x, loss_fn=lambda y: torch.relu(y).mul(2).sum(), return_outputs=True
    )
    assert torch.equal(output, expected)


# What is refused, without a trace in .grad


def twice(first: Any, then: Any) -> Any:
    given = iter([first, then, then, then])
    return lambda y: next(given)(y)


REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "no scalar": (lambda y: y, ValueError, r"float32\[1, 3\].*reduction='sum'|one floating"),
    "integer": (lambda y: y.sum().long(), ValueError, "int64"),
    "no tensor": (lambda y: 3.5, TypeError, "float"),
    "nothing": (lambda y: None, TypeError, "NoneType"),
    "three": (lambda y: (y.sum(), 1, 2), ValueError, "tuple of 3"),
    "weight and no loss": (lambda y: (1, y.sum()), TypeError, "int"),
    "weight later": (
        twice(lambda y: y.sum(), lambda y: (y.sum(), 1)), ValueError, "some micro-batches only"
    ),
    "weight only first": (
        twice(lambda y: (y.sum(), 1), lambda y: y.sum()), ValueError, "some micro-batches only"
    ),
    "weight with a graph": (lambda y: (y.sum(), y.mean()), ValueError, "weight.*requires grad"),
    "weight of many": (lambda y: (y.sum(), torch.ones(2)), ValueError, r"weight float32\[2\]"),
    "weight a word": (lambda y: (y.sum(), "1"), TypeError, "weight of type str"),
    "no grad": (lambda y: y.detach().sum(), RuntimeError, "does not require grad"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_loss_is_refused(name):
    loss_fn, kind, message = REFUSED[name]
    pipe = four()
    with pytest.raises(kind, match=message):
        pipe.train_batch(torch.randn(4, 3), loss_fn=loss_fn)
    assert grads_of(pipe) == [None] * 8


def test_weights_and_sums_do_not_go_together():
    pipe = four()
    with pytest.raises(ValueError, match="loss_reduction='sum'"):
        pipe.train_batch(torch.randn(4, 3), loss_fn=lambda y: (y.sum(), 1), loss_reduction="sum")
    assert grads_of(pipe) == [None] * 8


@pytest.mark.parametrize("call", ["train_batch", "eval_batch"])
def test_arguments_that_make_no_sense_are_named(call):
    pipe, x = four(), torch.randn(4, 3)
    run = getattr(pipe, call)
    with pytest.raises(TypeError, match=r"loss_fn must be callable.*str"):
        run(x, loss_fn="mse")
    with pytest.raises(ValueError, match=r"loss_reduction='average'.*'mean', 'sum'"):
        run(x, loss_fn=torch.sum, loss_reduction="average")
    with pytest.raises(ValueError, match="data_iter"):
        run(x, loss_fn=torch.sum, data_iter=iter([]))
    with pytest.raises(ValueError, match="data_iter"):
        run(None, x, loss_fn=torch.sum, data_iter=iter([]))
    with pytest.raises(TypeError, match=r"data_iter must be an iterator, not list.*iter\("):
        run(loss_fn=torch.sum, data_iter=[(x, None)] * 4)
    with pytest.raises((TypeError, ValueError), match="data_iter"):
        run(loss_fn=torch.sum)


@pytest.mark.parametrize("call", ["train_batch", "eval_batch"])
def test_hooks_of_the_pipe_itself_are_refused_as_they_would_not_run(call):
    for register in ("register_forward_hook", "register_forward_pre_hook"):
        pipe = four()
        getattr(pipe, register)(lambda *_: None)
        with pytest.raises(RuntimeError, match=r"pipe\.partitions"):
            getattr(pipe, call)(torch.randn(4, 3), loss_fn=torch.sum)


@pytest.mark.parametrize("call", ["train_batch", "eval_batch"])
def test_a_pipe_without_layers_is_refused(call):
    with pytest.raises(ValueError, match="no layers"):
        getattr(Pipe(nn.Sequential(), []), call)(torch.randn(4, 3), loss_fn=torch.sum)


def test_a_scaler_that_is_none_is_named():
    with pytest.raises(TypeError, match="grad_scaler"):
        four().train_batch(torch.randn(4, 3), loss_fn=torch.sum, grad_scaler=3)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_training_without_grad_mode_is_refused(context):
    pipe = four()
    with context(), pytest.raises(RuntimeError, match="eval_batch"):
        pipe.train_batch(torch.randn(4, 3), loss_fn=torch.sum)


def test_a_pipe_of_frozen_layers_has_nothing_to_train():
    pipe = four().requires_grad_(False)
    with pytest.raises(RuntimeError, match="does not require grad"):
        pipe.train_batch(torch.randn(4, 3), loss_fn=torch.sum)
    x = torch.randn(4, 3, requires_grad=True)
    pipe.train_batch(x, loss_fn=torch.sum)  # but for its input
    assert x.grad is not None


def test_losses_may_need_no_gradient_in_some_micro_batches():
    pipe, x = four(), torch.randn(4, 3)
    x[1] = 0

    def loss_fn(y, t):
        return y.sum() if t.any() else y.detach().sum()

    pipe.train_batch(x, x.clone(), loss_fn=loss_fn)
    expected = whole(pipe, lambda plain: plain(x[[0, 2, 3]]).sum() / 4)
    torch.testing.assert_close(grads_of(pipe), expected[1])


# Micro-batches from an iterator


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("run", KINDS)
def test_an_iterator_gives_what_the_mini_batch_gives(run, checkpoint):
    def build():
        torch.manual_seed(2)
        layers = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))
        options = {"devices": RUNS[run][1], "chunks": 4, "checkpoint": checkpoint}
        return Pipe(layers, [1, 1, 1, 1], **options)

    ours, theirs = build(), build()
    for _ in range(2):
        x, target = torch.randn(8, 3), torch.randn(8, 3)
        expected = theirs.train_batch(x, target, loss_fn=F.mse_loss, **RUNS[run][0])
        pieces = zip(x.chunk(4), target.chunk(4), strict=True)
        loss = ours.train_batch(data_iter=pieces, loss_fn=F.mse_loss, **RUNS[run][0])
        assert_same([loss, *grads_of(ours)], [expected, *grads_of(theirs)])
        assert_same_tree(dict(ours.named_buffers()), dict(theirs.named_buffers()), "buffers")


@pytest.mark.parametrize("balance", [[4], [2, 2], [1, 3], [1, 1, 1, 1]])
@pytest.mark.parametrize("by_hand", [False, True])
def test_an_iterator_works_with_any_number_of_stages(balance, by_hand):
    pipe = pipe_of(linear_model(), balance, chunks=3)
    x, target = torch.randn(6, 3), torch.randn(6, 3)
    expected = whole(pipe, lambda plain: F.mse_loss(plain(x), target))
    pieces = list(zip(x.chunk(3), target.chunk(3), strict=True))
    if by_hand:
        with inline():
            loss = pipe.train_batch(data_iter=iter(pieces), loss_fn=F.mse_loss)
    else:
        loss = pipe.train_batch(data_iter=iter(pieces), loss_fn=F.mse_loss)
    assert_trains_like(pipe, loss, expected)
    loss = pipe.eval_batch(data_iter=iter(pieces), loss_fn=F.mse_loss)
    torch.testing.assert_close(loss, expected[0])


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_micro_batches_of_an_iterator_may_be_of_any_size(reduction):
    pipe = four()
    sizes = [1, 5, 2, 3]
    pieces = [(torch.randn(n, 3), torch.randn(n, 3)) for n in sizes]
    x, target = (torch.cat(part) for part in zip(*pieces, strict=True))

    def loss_fn(y, t):
        return F.mse_loss(y, t, reduction=reduction)

    expected = whole(pipe, lambda plain: loss_fn(plain(x), target))
    loss, output = pipe.train_batch(
        data_iter=iter(pieces), loss_fn=loss_fn, loss_reduction=reduction, return_outputs=True
    )
    assert_trains_like(pipe, loss, expected)
    assert output.shape == (11, 3)


def test_inputs_and_targets_of_an_iterator_may_need_gradients_and_be_trees():
    pipe = pipe_of(nn.Sequential(Do(lambda d: d["x"] * d["k"]), *linear_model(2)), chunks=2)
    leaf = torch.randn(3, requires_grad=True)
    pieces = [({"x": torch.randn(n, 3) * leaf, "k": n, "none": None}, leaf * n) for n in (2, 3)]
    plain = nn.Sequential(*pipe)

    def loss_fn(y, t):
        return (y - t).pow(2).mean()

    total = sum(loss_fn(plain(d), t) * d["k"] for d, t in pieces) / 5
    expected = torch.autograd.grad(total, [leaf, *pipe.parameters()], retain_graph=True)
    pipe.train_batch(data_iter=iter(pieces), loss_fn=loss_fn)
    torch.testing.assert_close([leaf.grad, *grads_of(pipe)], list(expected))


def test_exactly_chunks_micro_batches_are_taken():
    pipe = four(chunks=3)
    data = iter([(torch.randn(2, 3), k) for k in range(7)])
    seen = []
    for _ in range(2):
        pipe.train_batch(data_iter=data, loss_fn=lambda y, t: seen.append(t) or y.sum())
    assert seen == [0, 1, 2, 3, 4, 5]
    assert [t for _, t in data] == [6]


@pytest.mark.parametrize(
    ("run", "ahead"),
    [
        ({"schedule": "naive"}, 1),
        ({"schedule": "gpipe"}, 8),
        ({"slots": "textbook"}, 4),
        ({"slots": "overlap"}, 7),
        ({"slots": [2, 2, 1, 1]}, 2),
        ({"schedule": "zb_h1"}, 4),
    ],
    ids=str,
)
def test_micro_batches_are_taken_when_the_schedule_needs_them(run, ahead):
    most, taken, gone = [], [], []

    class Back(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            gone.append(1)
            return grad

    def data():
        while True:
            taken.append(1)
            most.append(len(taken) - len(gone))
            yield torch.randn(2, 3, requires_grad=True), None

    layers = nn.Sequential(Do(Back.apply), *linear_model(3))
    pipe = pipe_of(layers, chunks=8, checkpoint="never")
    pipe.train_batch(data_iter=data(), loss_fn=torch.sum, **run)
    assert len(taken) == 8
    assert max(most) == ahead


@pytest.mark.parametrize("run", KINDS)
@pytest.mark.parametrize("given", [0, 1, 3])
def test_an_iterator_that_ends_early_leaves_grad_as_it_was(given, run):
    pipe = Pipe(linear_model(), [1, 1, 1, 1], devices=RUNS[run][1], chunks=4)
    first = pipe[0].weight
    first.grad = torch.ones(3, 3)
    grad = first.grad
    data = iter([(torch.randn(2, 3), None)] * given)
    with pytest.raises(ValueError, match=rf"data_iter ended.*micro-batch {given} of 4") as caught:
        pipe.train_batch(data_iter=data, loss_fn=torch.sum, **RUNS[run][0])
    assert "RepeatingLoader" in str(caught.value)
    assert first.grad is grad
    assert torch.equal(grad, torch.ones(3, 3))
    assert [p.grad for p in pipe.parameters() if p is not first] == [None] * 7


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (torch.ones(2, 3), "data_iter gave Tensor for micro-batch 1"),
        ((torch.ones(2, 3),), "data_iter gave tuple of 1"),
        ((torch.ones(2, 3), 1, 2), "data_iter gave tuple of 3"),
        (None, "data_iter gave NoneType"),
        ({"x": torch.ones(2, 3)}, "data_iter gave dict"),
    ],
    ids=["tensor", "one", "three", "none", "dict"],
)
@pytest.mark.parametrize("call", ["train_batch", "eval_batch"])
def test_an_iterator_gives_pairs(call, item, message):
    pipe = four()
    data = iter([(torch.ones(2, 3), None), item, item, item])
    with pytest.raises(TypeError, match=message):
        getattr(pipe, call)(data_iter=data, loss_fn=torch.sum)
    assert grads_of(pipe) == [None] * 8


def test_pairs_may_be_lists():
    pipe = four()
    pipe.train_batch(data_iter=iter([[torch.ones(2, 3), None]] * 4), loss_fn=torch.sum)


@pytest.mark.parametrize("run", ["naive", "1f1b"])
def test_an_error_in_the_iterator_reaches_the_caller(run):
    error = OSError("disk")

    def data():
        yield torch.randn(2, 3), None
        yield torch.randn(2, 3), None
        raise error

    pipe = four()
    with pytest.raises(OSError, match="disk") as caught:
        pipe.train_batch(data_iter=data(), loss_fn=torch.sum, schedule=run)
    assert caught.value is error
    assert any("micro-batch 2" in note for note in error.__notes__)
    assert grads_of(pipe) == [None] * 8


class Random(TensorDataset):
    """Adds noise to its samples, as augmentations do."""

    def __getitem__(self, k):
        x, t = super().__getitem__(k)
        return x + torch.rand(()), t


def draw_slowly(x: Tensor) -> Tensor:
    """Draws, lets others have their turn, and draws again."""
    y = x * torch.rand(())
    for _ in range(50):
        os.sched_yield()
    return y + torch.rand(())


def random_pipe() -> Pipe:
    torch.manual_seed(1)
    layers = [nn.Sequential(nn.Linear(3, 3), Do(draw_slowly)) for _ in range(3)]
    return pipe_of(nn.Sequential(*layers), chunks=3)


def test_data_that_is_drawn_is_the_same_every_time_and_disturbs_no_layer():
    dataset = Random(torch.randn(8, 3), torch.arange(8))
    runs = []
    for k in range(6):
        pipe, seen = random_pipe(), []
        data = iter(RepeatingLoader(DataLoader(dataset, batch_size=2, shuffle=True)))
        watched = ((seen.append((x, t)) or x, t) for x, t in data)
        torch.manual_seed(4)
        for _ in range(5):
            if k:
                loss = pipe.train_batch(data_iter=watched, loss_fn=lambda y, t: y.pow(2).mean())
            else:
                with inline():
                    loss = pipe.train_batch(data_iter=watched, loss_fn=lambda y, t: y.pow(2).mean())
        runs.append(([loss, *grads_of(pipe), torch.get_rng_state()], seen))
    for result, seen in runs[1:]:
        assert_same_tree(seen, runs[0][1], "data")
        assert_same(result, runs[0][0])


@pytest.mark.parametrize("run", ["naive", "1f1b"])
def test_targets_of_an_iterator_are_dropped_with_their_micro_batch(run):
    references, most = [], []

    def data():
        while True:
            target = torch.randn(2, 3)
            references.append(weakref.ref(target))
            most.append(alive(references))
            yield torch.randn(2, 3), target

    pipe = pipe_of(linear_model(2), chunks=12, checkpoint="never")
    pipe.train_batch(data_iter=data(), loss_fn=F.mse_loss, schedule=run, slots=None)
    # The one in the making, those that are underway, and the one that the generator still holds.
    assert max(most) <= {"naive": 2, "1f1b": 5}[run]


# RepeatingLoader


def test_a_repeating_loader_begins_again():
    data = RepeatingLoader([1, 2, 3])
    assert [next(data) for _ in range(7)] == [1, 2, 3, 1, 2, 3, 1]
    assert iter(data) is data


def test_a_repeating_loader_shuffles_anew_at_each_pass():
    loader = DataLoader(TensorDataset(torch.arange(50)), batch_size=1, shuffle=True)
    data = iter(RepeatingLoader(loader))
    passes = [[int(next(data)[0]) for _ in range(50)] for _ in range(2)]
    assert sorted(passes[0]) == sorted(passes[1]) == list(range(50))
    assert passes[0] != passes[1]


def test_a_repeating_loader_feeds_step_after_step():
    dataset = TensorDataset(torch.randn(10, 3), torch.randn(10, 3))
    data = iter(RepeatingLoader(DataLoader(dataset, batch_size=4)))  # 4, 4, 2
    pipe = four(chunks=2)
    losses = [pipe.train_batch(data_iter=data, loss_fn=F.mse_loss) for _ in range(6)]
    assert_same(losses[:3], losses[3:])


def test_a_repeating_loader_refuses_what_it_cannot_repeat():
    with pytest.raises(TypeError, match="cannot restart generator"):
        RepeatingLoader(x for x in [1])
    with pytest.raises(TypeError, match="iterable, not int"):
        RepeatingLoader(3)
    for empty in ([], {}, DataLoader(TensorDataset(torch.ones(0, 3)), batch_size=2)):
        with pytest.raises(ValueError, match="nothing in"):
            next(RepeatingLoader(empty))


def test_a_repeating_loader_notices_that_a_later_pass_is_empty():
    items = [1]
    data = RepeatingLoader(items)
    assert next(data) == 1
    items.clear()
    with pytest.raises(ValueError, match="nothing in"):
        next(data)
    items.append(2)
    assert next(data) == 2


def test_a_pass_that_fails_does_not_end_the_loader():
    class Flaky:
        fails = True

        def __iter__(self):
            yield 1
            if self.fails:
                raise OSError("disk")
            yield 2

    flaky = Flaky()
    data = RepeatingLoader(flaky)
    assert next(data) == 1
    with pytest.raises(OSError, match="disk"):
        next(data)
    flaky.fails = False
    assert [next(data) for _ in range(3)] == [1, 2, 1]


# eval_batch


def noisy_model() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Dropout(), nn.Sequential(nn.Dropout(), nn.RReLU())
    )


def test_eval_batch_gives_the_outputs_of_the_model_in_eval_mode():
    pipe = pipe_of(noisy_model(), chunks=3, checkpoint="always")
    pipe(torch.randn(9, 3))  # some statistics
    plain = copy.deepcopy(nn.Sequential(*pipe)).eval()
    x = torch.randn(7, 3, requires_grad=True)
    before = {key: value.clone() for key, value in pipe.state_dict().items()}
    output = pipe.eval_batch(x)
    assert torch.equal(output, torch.cat([plain(piece) for piece in x.chunk(3)]))
    assert not output.requires_grad
    assert output.grad_fn is None
    assert_same_tree(dict(pipe.state_dict()), before, "state")
    assert pipe.training


@pytest.mark.parametrize("balance", [[4], [2, 2], [1, 1, 1, 1]])
def test_eval_batch_gives_the_loss_of_the_mini_batch(balance):
    pipe = pipe_of(linear_model(), balance, chunks=3)
    x, target = torch.randn(7, 3), torch.randn(7, 3)
    expected, _ = whole(pipe, lambda plain: F.mse_loss(plain(x), target))
    loss = pipe.eval_batch(x, target, loss_fn=F.mse_loss)
    torch.testing.assert_close(loss, expected)
    assert not loss.requires_grad
    total = pipe.eval_batch(
        x, target, loss_fn=lambda y, t: F.mse_loss(y, t, reduction="sum"), loss_reduction="sum"
    )
    torch.testing.assert_close(total, expected * 21)
    weighted = pipe.eval_batch(x, target, loss_fn=lambda y, t: (F.mse_loss(y, t), len(y)))
    torch.testing.assert_close(weighted, expected)
    data = zip(x.chunk(3), target.chunk(3), strict=True)
    torch.testing.assert_close(pipe.eval_batch(data_iter=data, loss_fn=F.mse_loss), expected)
    assert grads_of(pipe) == [None] * 8


def test_eval_batch_takes_inputs_from_an_iterator():
    pipe, x = four(chunks=3), torch.randn(7, 3)
    data = iter([(piece, None) for piece in [*x.chunk(3), x]])
    assert torch.equal(pipe.eval_batch(data_iter=data), pipe.eval_batch(x))
    assert len(list(data)) == 1


def modes_of(pipe: Pipe) -> list[bool]:
    return [module.training for module in [*pipe.modules(), *pipe.partitions]]


@pytest.mark.parametrize("failing", [False, True])
@pytest.mark.parametrize("call", ["input", "loss", "data_iter"])
def test_eval_batch_leaves_every_training_flag_as_it_was(call, failing):
    seen = []

    def look(x):
        seen.append(pipe[1].training)
        if failing:
            raise ValueError("bad")

    pipe = pipe_of(nn.Sequential(nn.Linear(3, 3), noisy_model(), Do(look)), chunks=2)
    pipe[1][1].eval()  # as people freeze a BatchNorm
    pipe[1][3].train(False)
    pipe[1][3][0].train(True)
    before = modes_of(pipe)
    x = torch.randn(4, 3)
    given = {
        "input": {"input": x},
        "loss": {"input": x, "loss_fn": torch.sum},
        "data_iter": {"data_iter": iter([(x, None)] * 2)},
    }[call]
    if failing:
        with pytest.raises(ValueError, match="bad"):
            pipe.eval_batch(**given)
    else:
        pipe.eval_batch(**given)
    assert modes_of(pipe) == before
    assert set(seen) == {False}


def test_eval_batch_in_several_threads_leaves_the_flags_and_is_right():
    layers = nn.Sequential(nn.Dropout(), nn.Sequential(nn.Linear(3, 3), Dawdle(1)), nn.Dropout())
    pipe, x = pipe_of(layers, chunks=2), torch.ones(4, 3)
    expected, wrong = pipe.eval_batch(x), []

    def evaluate():
        wrong.extend(k for k in range(60) if not torch.equal(pipe.eval_batch(x), expected))

    threads = [threading.Thread(target=evaluate) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert all(modes_of(pipe))


def test_eval_batch_never_re_materializes_and_stores_nothing():
    references: list[Any] = []
    counts = []

    def look(x):
        y = x * 2
        counts.append(alive(references))
        references.append(weakref.ref(y.untyped_storage()))
        assert not torch.is_grad_enabled()
        return y.sin()

    pipe = pipe_of(nn.Sequential(nn.Linear(3, 3), Do(look)), chunks=4, checkpoint="always")
    pipe.eval_batch(torch.randn(8, 3), loss_fn=torch.sum)
    assert counts == [0] * 4
    assert alive(references) == 0


def test_eval_batch_moves_the_generator_as_a_forward_does():
    pipe, x = pipe_of(noisy_model()), torch.randn(8, 3)
    torch.manual_seed(3)
    pipe.eval_batch(x)
    after = torch.get_rng_state()
    torch.manual_seed(3)
    pipe.eval()(x)
    assert torch.equal(after, torch.get_rng_state())


def test_eval_batch_works_under_no_grad_and_inference_mode():
    pipe, x = four(), torch.randn(8, 3)
    expected = pipe.eval_batch(x)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert torch.equal(pipe.eval_batch(x), expected)


def test_eval_batch_refuses_a_target_that_nobody_would_use():
    with pytest.raises(ValueError, match="loss_fn"):
        four().eval_batch(torch.randn(4, 3), torch.randn(4, 3))
