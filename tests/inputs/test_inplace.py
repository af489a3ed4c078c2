"""Layers that write into their inputs: what others still need stays as it was."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from syncpipe import Pipe
from syncpipe.data import clones, overlap
from tests.support.models import CHECKPOINT_MODES
from tests.support.running import Do
from tests.support.training import weigh

DEVICES = [["cpu:0"] * 4, ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]]


def both_drivers(pipe: Pipe, x: Any, target: Tensor | None = None) -> list[list[Tensor]]:
    """The gradients of the parameters after a step of either driver, three times each."""

    def loss_fn(y: Tensor, goal: Tensor | None = None) -> Tensor:
        return weigh(y) if goal is None else weigh(y * goal)

    seen = []
    for _ in range(3):
        pipe.zero_grad()
        y = pipe(x)
        loss_fn(y, target).backward()
        pipe.zero_grad()
        pipe.train_batch(x, target, loss_fn=loss_fn, loss_reduction="sum")
        seen.append([p.grad.clone() for p in pipe.parameters() if p.grad is not None])
    return seen


@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("hands_on", [nn.Identity, nn.Flatten, lambda: nn.Dropout(0.0)])
def test_what_a_stage_hands_on_may_be_written_into(hands_on, needs_grad, checkpoint, devices):
    torch.manual_seed(0)
    layers = nn.Sequential(hands_on(), nn.ReLU(inplace=True), nn.Linear(3, 3), nn.Tanh())
    plain = copy.deepcopy(layers)
    pipe = Pipe(layers, [1, 1, 1, 1], devices=devices, chunks=3, checkpoint=checkpoint)
    x = torch.randn(6, 3)
    before = x.clone()
    weigh(torch.cat([plain(c.clone()) for c in x.chunk(3)])).backward()
    for _ in range(3):
        given = (x * 1).requires_grad_() * 1 if needs_grad else x
        pipe.zero_grad()
        weigh(pipe(given)).backward()
        assert all(
            torch.equal(p.grad, q.grad)
            for p, q in zip(pipe.parameters(), plain.parameters(), strict=True)
        )
        pipe.train_batch(given.detach(), loss_fn=weigh)
    assert torch.equal(x, before)


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
def test_what_two_stages_hand_on_may_be_written_into(checkpoint):
    class Beside(nn.Linear):
        def forward(self, pair: Any) -> Any:
            return super().forward(pair[0]), pair[1]

    def write(pair: Any) -> Any:
        pair[1].mul_(2)
        return pair[0] * pair[1].clone()

    torch.manual_seed(0)
    layers = nn.Sequential(Beside(3, 3), Beside(3, 3), Do(write))
    plain = copy.deepcopy(layers)
    pipe = Pipe(layers, [1, 1, 1], devices=DEVICES[1], chunks=2, checkpoint=checkpoint)
    x, m = torch.randn(4, 3), torch.randn(4, 3)
    pieces = zip(x.chunk(2), m.chunk(2), strict=True)
    weigh(torch.cat([plain((a, b.clone())) for a, b in pieces])).backward()
    for _ in range(3):
        pipe.zero_grad()
        weigh(pipe((x, m))).backward()
        for p, q in zip(pipe.parameters(), plain.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)


def write_first(pair: Any) -> Tensor:
    a, b = pair
    a.mul_(2)
    return a + b


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("driver", ["pipe", "train_batch"])
def test_views_of_one_memory_are_refused_where_one_of_them_is_written_into(
    driver, checkpoint, chunks
):
    layers = nn.Sequential(Do(write_first), nn.Linear(2, 2))
    pipe = Pipe(layers, [1, 1], devices=DEVICES[1], chunks=chunks, checkpoint=checkpoint)
    drivers = {"pipe": Pipe.forward, "train_batch": partial(Pipe.train_batch, loss_fn=weigh)}
    x = torch.randn(4, 3)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="whose memory others use"):
            drivers[driver](pipe, (x[:, :2], x[:, 1:]))


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
def test_parts_of_one_memory_that_do_not_overlap_may_be_written_into(checkpoint, chunks):
    torch.manual_seed(0)
    layers = nn.Sequential(Do(write_first), nn.Linear(2, 2))
    pipe = Pipe(layers, [1, 1], devices=DEVICES[1], chunks=chunks, checkpoint=checkpoint)
    x = torch.randn(8, 2)
    pair = x[:4], x[4:]
    expected = [both_drivers(pipe, (pair[0].clone(), pair[1].clone()))[0]] * 3
    for ours, theirs in zip(both_drivers(pipe, pair), expected, strict=True):
        assert all(map(torch.equal, ours, theirs))


def test_parts_that_lie_between_each_other_are_taken_for_overlapping():
    pipe = Pipe(nn.Sequential(Do(write_first), nn.Linear(2, 2)), [1, 1], devices=DEVICES[1][:2])
    x = torch.randn(4, 4)
    with pytest.raises(RuntimeError, match="whose memory others use"):
        pipe((x[:, :2], x[:, 2:]))
    pipe((x[:, :2].clone(), x[:, 2:]))


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("source", ["mini-batch", "iterator"])
def test_a_target_in_the_memory_of_an_input_that_is_written_into_is_refused(
    source, checkpoint, chunks
):
    # The plain model would compare with what the layer left of it.
    layers = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 3))
    pipe = Pipe(layers, [1, 1], devices=DEVICES[1], chunks=chunks, checkpoint=checkpoint)
    x = torch.randn(4, 3)
    for _ in range(2):
        given: dict[str, Any] = {"input": x, "target": x}
        if source == "iterator":
            given = {"data_iter": iter([(c, c) for c in x.chunk(chunks)])}
        with pytest.raises(RuntimeError, match="whose memory others use"):
            pipe.train_batch(**given, loss_fn=nn.functional.mse_loss)


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
def test_a_target_in_the_memory_of_an_input_is_fine_where_nobody_writes(checkpoint):
    layers = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 3))
    pipe = Pipe(layers, [1, 2], devices=DEVICES[1], chunks=2, checkpoint=checkpoint)
    x = torch.randn(4, 3)
    first, *others = both_drivers(pipe, x, x)
    for other in others:
        assert all(map(torch.equal, first, other))


# --- the first call is like all others -----------------------------------------------------------


class Twice(nn.Module):
    """Two products with one input, which autocast casts once if it is a leaf."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * self.b(x)


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
def test_the_gradient_of_an_input_under_autocast(checkpoint, chunks):
    torch.manual_seed(0)
    layers, start = nn.Sequential(Twice(), nn.Linear(8, 8)), torch.randn(4, 8)
    pipe = Pipe(
        copy.deepcopy(layers), [1, 1], devices=DEVICES[1], chunks=chunks, checkpoint=checkpoint
    )

    def plain(x: Tensor) -> Tensor:
        return layers(x) if chunks == 1 else torch.cat([layers(c) for c in x.chunk(chunks)])

    grads = []
    for run in (plain, pipe, pipe, pipe):
        x = start.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = run(x)
        weigh(y.float()).backward()
        grads.append(x.grad)
    for grad in grads[1:]:
        assert torch.equal(grad, grads[1])
        # A leaf has one cast, in which its gradients are added up, and that of a cell is none.
        assert torch.allclose(grad, grads[0], rtol=0.05, atol=0.05 if chunks == 1 else 0)


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("driver", ["pipe", "train_batch"])
def test_an_expanded_tensor_at_a_border(driver, checkpoint):
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.Linear(5, 5),
        Do(lambda x: x[:, :, None].expand(-1, -1, 7)),
        nn.BatchNorm1d(5),
        nn.Conv1d(5, 3, 3),
    )
    pipe = Pipe(layers, [2, 2], devices=DEVICES[1], chunks=2, checkpoint=checkpoint)
    x, seen = torch.randn(16, 5), []
    for _ in range(3):
        pipe.zero_grad()
        layers[2].reset_running_stats()
        if driver == "pipe":
            weigh(pipe(x)).backward()
        else:
            pipe.train_batch(x, loss_fn=weigh)
        seen.append([t.clone() for p in pipe.parameters() for t in (p.grad,)])
        seen[-1] += [buffer.clone() for buffer in pipe.buffers()]
    for other in seen[1:]:
        assert all(map(torch.equal, seen[0], other))


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_one_tensor_several_times_in_the_output(schedule, checkpoint):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), Do(lambda y: (y, y, [y])))
    pipe = Pipe(copy.deepcopy(layers), [1, 2], devices=DEVICES[1], chunks=1, checkpoint=checkpoint)

    def loss_fn(output: Any) -> Tensor:
        a, b, (c,) = output
        return weigh(a.tanh() * b.exp() + c.sigmoid() * a + b.sin() * c)

    x = torch.randn(64, 6)
    loss_fn(layers(x)).backward()
    for _ in range(2):
        pipe.zero_grad()
        pipe.train_batch(x, loss_fn=loss_fn, schedule=schedule)
        for p, q in zip(pipe.parameters(), layers.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)


# --- copies --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x,
        lambda x: x[3:],
        lambda x: x[:, 1:],
        lambda x: x.t(),
        lambda x: x[:, :1].expand(-1, 4),
        lambda x: x.view(-1).unfold(0, 3, 1),
        lambda x: x[:0],
        lambda x: x[2, 3],
        lambda x: x.to(torch.complex64).conj(),
    ],
)
def test_a_copy_has_strides_and_alignment_of_the_original(view):
    original = view(torch.randn(5, 6, requires_grad=True))
    (copied,) = clones([original])
    assert torch.equal(copied, original)
    assert copied.stride() == original.stride()
    assert original.is_conj() or (copied.data_ptr() - original.data_ptr()) % 64 == 0
    assert not original.numel() or copied.untyped_storage() is not original.untyped_storage()
    (grad,) = torch.autograd.grad(copied, original, ones := torch.ones_like(original))
    assert torch.equal(grad, ones)


def test_overlap_goes_by_storage_and_extent():
    x = torch.zeros(4, 6)
    assert overlap(x, x)
    assert overlap(x[:, :3], x[:, 2:])
    assert overlap(x[:, :3], x[:, 3:])  # not told apart
    assert not overlap(x[:2], x[2:])
    assert overlap(x[1].expand(3, 6), x[:2])
    assert overlap(x.view(torch.int32)[:3], x[2:])
    assert not overlap(x.view(torch.int16)[:2], x[2:])
    assert not overlap(x, torch.zeros(4, 6))
    assert not overlap(x[:0], x)


# --- without grad --------------------------------------------------------------------------------


WITHOUT = pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])


@WITHOUT
@pytest.mark.parametrize("chunks", [1, 2, 4])
@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize("driver", [Pipe.forward, Pipe.eval_batch])
def test_overlapping_inputs_are_refused_without_grad_as_well(driver, before, chunks, context):
    layers = nn.Sequential(*(nn.Identity() for _ in range(before)), Do(write_first), nn.Identity())
    pipe = Pipe(layers, [1] * len(layers), devices=DEVICES[1][: len(layers)], chunks=chunks)
    a = torch.arange(16.0).reshape(4, 4)
    for _ in range(2):
        with context(), pytest.raises(RuntimeError, match="whose memory others use"):
            driver(pipe, (a, a.T))
        with context():
            output = driver(pipe, (a.clone(), a.T))
        torch.testing.assert_close(output, 2 * a + a.T)


@WITHOUT
def test_a_target_that_the_input_overlaps_is_refused_without_grad_as_well(context):
    layers = nn.Sequential(nn.ReLU(inplace=True), nn.Identity())
    pipe = Pipe(layers, [1, 1], devices=DEVICES[1], chunks=2)
    x = torch.randn(4, 3)
    with context(), pytest.raises(RuntimeError, match="whose memory others use"):
        pipe.eval_batch(x, x, loss_fn=nn.functional.mse_loss)


@WITHOUT
def test_overlapping_inputs_are_fine_without_grad_where_nobody_writes(context):
    pipe = Pipe(nn.Sequential(Do(sum), nn.Identity()), [1, 1], devices=DEVICES[1], chunks=2)
    a = torch.full((4, 4), torch.nan)
    with context():
        assert pipe((a, a.T)).isnan().all()


@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize("driver", [Pipe.forward, Pipe.eval_batch])
def test_what_the_caller_gave_stays_as_it_was_without_grad(driver, before):
    layers = nn.Sequential(*(nn.Flatten() for _ in range(before)), nn.ReLU(inplace=True))
    pipe = Pipe(layers, [1] * len(layers), devices=DEVICES[1][: len(layers)], chunks=2)
    x = torch.randn(4, 3, requires_grad=True)
    given = x.detach().clone()
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(driver(pipe, x), given.relu())
            assert torch.equal(x, given)


class Repair(nn.Module):
    """Writes into its input only where that is needed."""

    def forward(self, x: Tensor) -> Tensor:
        return x.clamp_(-1, 1) if x.abs().max() > 1 else x


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize("driver", ["pipe", "train_batch", "eval_batch", "no_grad"])
def test_a_layer_that_writes_in_a_later_call_only(driver, before, checkpoint):
    layers = nn.Sequential(*(nn.Identity() for _ in range(before)), Repair(), nn.Linear(3, 3))
    pipe = Pipe(layers, [1] * len(layers), devices=DEVICES[1][: len(layers)], chunks=2)
    pipe.checkpoint = checkpoint
    x = torch.linspace(-3, 3, 12).reshape(4, 3)

    def run(given: Tensor) -> Tensor:
        if driver == "eval_batch":
            return pipe.eval_batch(given)
        if driver == "train_batch":
            return pipe.train_batch(given, loss_fn=torch.mean, return_outputs=True)[1]
        with torch.set_grad_enabled(driver == "pipe"):
            return pipe(given)

    for scale in (0.1, 1.0, 1.0, 0.1, 1.0):
        given = x * scale
        expected = layers[before + 1](given.clamp(-1, 1))
        torch.testing.assert_close(run(given), expected)
        assert torch.equal(given, x * scale)


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("driver", ["pipe", "train_batch"])
def test_what_is_recomputed_in_a_later_call_only_from_what_was_written_into(driver, checkpoint):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(3, 3), Repair(), nn.Linear(3, 3))
    plain = copy.deepcopy(layers)
    pipe = Pipe(layers, [1, 1, 1], devices=DEVICES[1][:3], chunks=2, checkpoint=checkpoint)
    x = torch.randn(4, 3)

    def loss_fn(y: Tensor) -> Tensor:
        return y.pow(2).sum()

    for scale in (0.1, 9.0, 0.1, 9.0):
        plain.zero_grad()
        pipe.zero_grad()
        sum(loss_fn(plain(c)) for c in (x * scale).chunk(2)).backward()
        if driver == "pipe":
            loss_fn(pipe(x * scale)).backward()
        else:
            pipe.train_batch(x * scale, loss_fn=loss_fn, loss_reduction="sum", schedule="gpipe")
        for p, q in zip(pipe.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)


@pytest.mark.parametrize("inside", [False, True])
def test_a_forward_of_its_own_makes_a_layer_of_pytorch_one_that_may_write(inside):
    layer: nn.Module = nn.Sequential(nn.Linear(3, 3)) if inside else nn.Linear(3, 3)
    layer.forward = lambda x: x.mul_(2)  # type: ignore[method-assign]
    pipe = Pipe(nn.Sequential(layer, nn.ReLU()), [1, 1], devices=DEVICES[1][:2])
    x = torch.randn(4, 3)
    given = x.clone()
    pipe(given)
    assert torch.equal(given, x)


@pytest.mark.parametrize("hook", ["register_forward_pre_hook", "register_forward_hook"])
@pytest.mark.parametrize("on", ["layer", "partition", "all modules"])
def test_a_hook_that_writes_into_the_input(on, hook):
    pipe = Pipe(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), [1, 1], devices=DEVICES[1][:2])
    first = pipe.partitions[0]
    pipe(torch.randn(4, 3))
    target = {"layer": first[0], "partition": first, "all modules": nn.modules.module}[on]
    hook = hook if on != "all modules" else hook.replace("_forward", "_module_forward")

    def write(module: nn.Module, args: Any, *_: Any) -> None:
        if module is first or module is first[0]:
            args[0].mul_(2)

    handle = getattr(target, hook)(write)
    x = torch.randn(4, 3)
    given = x.clone()
    try:
        pipe(given)
    finally:
        handle.remove()
    assert torch.equal(given, x)


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
def test_a_layer_that_writes_in_some_modes_only(checkpoint):
    class Sometimes(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if self.training and torch.is_grad_enabled():
                x.mul_(2)
            return super().forward(x)

    layers = nn.Sequential(Sometimes(3, 3), nn.Linear(3, 3))
    pipe = Pipe(layers, [1, 1], devices=DEVICES[1], chunks=2, checkpoint=checkpoint)
    x = torch.randn(4, 3)
    given = x.clone()
    for _ in range(2):
        pipe.eval_batch(x)
        pipe.eval()(x)
        with torch.no_grad():
            pipe.train()(x)
        torch.testing.assert_close(pipe(x), layers(given.clone()))
        assert torch.equal(x, given)
