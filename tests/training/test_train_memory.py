"""P6 of ``train_batch``: what is alive is what the schedule needs, and afterwards nothing."""

from __future__ import annotations

import gc
import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from syncpipe import Pipe, inline
from syncpipe.runtime.worker import FREE_THREADED
from tests.conftest import our_threads
from tests.support import skips
from tests.support.models import CHECKPOINT_MODES
from tests.support.running import Do, on_gradient, pipe_of
from tests.support.training import (
    ANY_RUNS,
    FOUR,
    KINDS,
    RUNS,
    schedule_of,
)
from tests.support.watched import Memory, Watched, alive, gone

CHUNKS = 10
STEPS = int(os.environ.get("SYNCPIPE_STEPS", "75"))


class Receive(skips.Receive):
    __module__ = Watched.__module__


class Storages:
    """Counts how many of some storages are alive."""

    def __init__(self) -> None:
        self._made: list[Memory] = []
        self.most = 0

    def add(self, tensor: Tensor) -> Tensor:
        self._made.append(Memory(tensor))
        self.most = max(self.most, alive(self._made))
        return tensor


def watched_pipe(devices: list[str], *, skip: bool = False, **options: Any) -> Pipe:
    """Four stages with a watched layer each; a skip goes from the first to the third."""
    layers: list[nn.Module] = [Watched() for _ in range(4)]
    balance = [1, 1, 1, 1]
    if skip:
        layers[3:3] = [Receive()]
        layers[1:1] = [skips.Send()]
        balance = [2, 1, 2, 1]
    options.setdefault("chunks", CHUNKS)
    return Pipe(nn.Sequential(*layers), balance, devices=devices, **options)


def watched(pipe: Pipe) -> list[Watched]:
    return [layer for layer in pipe if isinstance(layer, Watched)]


def train(pipe: Pipe, run: dict[str, Any]) -> int:
    """One mini-batch. Each micro-batch is a tensor of its own, which its iterator lets go of.

    It is the second call: in the first one, a pipe works on copies of inputs, to see whether a
    layer writes into them. Returns how many targets were alive at most.
    """

    def data() -> Iterator[Any]:
        for _ in range(pipe.chunks):
            pair = torch.randn(2, 3), torch.randn(2, 3)
            targets.add(pair[1])
            yield pair
            del pair

    for _ in range(2):
        for layer in watched(pipe):
            layer.forget()
        targets = Storages()
        pipe.train_batch(data_iter=data(), loss_fn=F.mse_loss, **run)
    return targets.most


@pytest.mark.parametrize("context", [nullcontext, inline], ids=["workers", "inline"])
@pytest.mark.parametrize("skip", [False, True], ids=["", "skips"])
@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("run", ANY_RUNS)
def test_each_stage_keeps_what_the_schedule_says(run, checkpoint, skip, context):
    """Activations, of recomputed cells the inputs, and gradients until they went on."""
    options, devices = ANY_RUNS[run]
    pipe = watched_pipe(devices, skip=skip, checkpoint=checkpoint)
    with context():
        targets = train(pipe, options)
    schedule, layers = schedule_of(pipe, CHUNKS, **options), watched(pipe)
    assert targets <= schedule.in_flight[0]
    for j, (layer, bound) in enumerate(zip(layers, schedule.in_flight, strict=True)):
        assert gone([*layer.made, *layer.sent])
        before = schedule.in_flight[max(0, j - 1)]
        if j > 0 and not skip:  # what goes back over a skip, too, is alive for longer
            # One not used yet by the stage to the left belongs to a cell in flight there.
            assert len(layer.grads) == CHUNKS
            assert max(layer.grads) <= before, f"stage {j}"
        if checkpoint == "never":
            assert max(layer.counts) == bound, f"stage {j}"
            continue
        assert len(layer.counts) == 2 * CHUNKS
        # In free-threaded builds the output of the stage before dies on that one's thread, at its
        # next action: so while that cell is in flight there, at the latest.
        most = max(before, bound) if FREE_THREADED else bound
        if schedule.splits:  # between the halves there are activations again, and no inputs
            assert max(layer.counts) <= bound, f"stage {j}"
            assert max(layer.inputs) <= most, f"stage {j}"
            continue
        assert max(layer.counts) == 1, f"stage {j}"
        if j > 0:  # the first one gets copies of the caller's
            assert bound <= max(layer.inputs) <= most, f"stage {j}"
        assert gone(layer.given)


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("call", ["train_batch", "data_iter", "eval_batch", "failing", *KINDS])
def test_nothing_is_left_after_a_call_not_even_a_cycle(call, checkpoint):
    run = call if call in KINDS else "1f1b"
    options, devices = RUNS[run]
    pipe = watched_pipe(devices, skip=True, checkpoint=checkpoint)
    alive_then: list[Memory] = []

    def tensor(requires_grad: bool = False) -> Tensor:
        made = torch.randn(2 * CHUNKS, 3, requires_grad=requires_grad)
        alive_then.append(Memory(made))
        return made

    def loss_fn(y: Tensor, t: Tensor) -> Tensor:
        alive_then.append(Memory(y))
        if call == "failing" and len(alive_then) > 6:
            raise ValueError("bad")
        loss = (y - t).pow(2).mean()
        alive_then.append(Memory(loss))
        return loss

    def run_once(pipe: Pipe) -> None:
        if call == "eval_batch":
            pipe.eval_batch(tensor(), tensor(), loss_fn=loss_fn)
            pipe.eval_batch(tensor(), loss_fn=None)
        elif call == "data_iter":
            data = iter([(tensor(True), tensor()) for _ in range(CHUNKS)])
            pipe.train_batch(data_iter=data, loss_fn=loss_fn)
        else:
            with suppress(ValueError) if call == "failing" else nullcontext():
                pipe.train_batch(
                    tensor(True), tensor(True), loss_fn=loss_fn, return_outputs=True, **options
                )
                assert call != "failing"

    gc.collect()
    gc.disable()
    try:
        run_once(pipe)
        assert gone(alive_then)
        for layer in watched(pipe):
            assert gone([*layer.made, *layer.given])
        threads = len(our_threads())
        assert threads > 1
        del pipe, layer
        assert our_threads() == []
    finally:
        gc.enable()


@pytest.mark.parametrize("checkpoint", ["except_last", "always"])
@pytest.mark.parametrize("run", [*KINDS, "pipe(x)"])
def test_many_steps_leave_as_much_as_a_few(run, checkpoint):
    layers = nn.Sequential(
        nn.Linear(3, 3), nn.Dropout(), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 3)
    )
    options, devices = RUNS.get(run, ({}, FOUR))
    pipe = Pipe(layers, [1, 2, 1, 1], devices=devices, chunks=2, checkpoint=checkpoint)
    x = torch.randn(4, 3, requires_grad=True)

    def steps(count: int) -> tuple[Counter[str], int]:
        for _ in range(count):
            x.grad = None
            pipe.zero_grad()
            if run == "pipe(x)":
                pipe(x).sum().backward()
                continue
            pipe.train_batch(x, loss_fn=lambda y: (y.pow(2).mean(), len(y)), **options)
            pipe.eval_batch(x)
        gc.collect()  # flattening a tree in PyTorch's way makes small cycles
        found = Counter(type(thing).__name__ for thing in gc.get_objects())
        return found, threading.active_count()

    (before, threads), (after, threads_now) = steps(10), steps(STEPS)
    grown = {name: n - before[name] for name, n in after.items() if n - before[name] > STEPS // 3}
    assert grown == {}
    assert threads_now == threads


def test_gradients_stay_where_they_are():
    pipe = pipe_of(nn.Sequential(nn.Linear(3, 3), nn.Tanh()))
    pipe.train_batch(torch.randn(8, 3), loss_fn=torch.sum)
    grad = pipe[0].weight.grad
    address = grad.data_ptr()
    pipe.train_batch(torch.randn(8, 3), loss_fn=torch.sum)
    pipe.train_batch(torch.randn(7, 3), loss_fn=lambda y: (y.sum(), len(y)))
    assert pipe[0].weight.grad is grad
    assert grad.data_ptr() == address


FEW = 6


@pytest.mark.parametrize(
    "run", [run for run in RUNS if run not in ("naive", "gpipe", "looped_bfs")]
)
@pytest.mark.parametrize(
    ("loss", "part"), [(F.mse_loss, "loss"), (F.mse_loss, "weight"), (F.smooth_l1_loss, "loss")]
)
def test_the_storage_of_an_unreduced_loss_goes_with_its_micro_batch(run, loss, part):
    storages, (options, devices) = Storages(), RUNS[run]
    layers = nn.Sequential(nn.Linear(4, 4), *(nn.Identity() for _ in range(3)))
    pipe = Pipe(layers, [1] * 4, devices=devices, chunks=FEW, checkpoint="never")

    def loss_fn(output: Tensor, target: Tensor):
        if part == "loss":
            return storages.add(loss(output, target))
        return output.sum(), storages.add(loss(output.detach(), target))

    x, target = torch.randn(64 * FEW, 4), torch.randn(64 * FEW, 4)
    pipe.train_batch(x, target, loss_fn=loss_fn, **options)
    gc.collect()
    assert storages.most <= 4


def test_gradients_of_inputs_that_are_parts_of_larger_tensors_do_not_keep_them():
    storages = Storages()

    def wide(grad):
        return storages.add(torch.cat([grad, torch.zeros(len(grad), 50)], 1))[:, :4]

    x = torch.randn(FEW, 4, requires_grad=True)
    layers = nn.Sequential(Do(lambda x: on_gradient(x, wide)), nn.Linear(4, 4))
    pipe = pipe_of(layers, chunks=FEW, checkpoint="never")
    pipe.train_batch(x, loss_fn=torch.sum, loss_reduction="sum")
    assert storages.most <= 2
    assert x.grad is not None


@pytest.mark.parametrize("call", ["eval_batch", "return_outputs", "pipe(x)"])
def test_outputs_that_are_parts_of_larger_tensors_do_not_keep_them(call):
    storages = Storages()

    def cut(x):
        return storages.add(torch.cat([x, torch.zeros(len(x), 50)], 1))[:, :4]

    pipe, x = pipe_of(nn.Sequential(nn.Linear(4, 4), Do(cut)), chunks=FEW), torch.randn(FEW, 4)
    if call == "pipe(x)":
        with torch.no_grad():
            pipe(x)
    elif call == "eval_batch":
        pipe.eval_batch(x)
    else:
        pipe.train_batch(x, loss_fn=torch.sum, loss_reduction="sum", return_outputs=True)
    assert storages.most <= 2


def frozen_pipe(**options) -> tuple[Pipe, list[Watched]]:
    """Four stages, the first two of them frozen."""
    layers = [Watched() for _ in range(4)]
    for layer in layers[:2]:
        layer.requires_grad_(False)
    options.setdefault("devices", FOUR)
    return Pipe(nn.Sequential(*layers), [1] * 4, chunks=FEW, **options), layers


@pytest.mark.parametrize("driver", ["train_batch", "pipe(x)"])
@pytest.mark.parametrize("checkpoint", [*CHECKPOINT_MODES, "offload"])
def test_frozen_stages_hold_nothing_for_backward(checkpoint, driver):
    pipe, layers = frozen_pipe(checkpoint=checkpoint)
    held: list[int] = []
    kept: list[bool] = []
    for layer in layers[:2]:
        layer.register_forward_hook(lambda layer, args, y: kept.append(y.requires_grad))

    def loss_fn(y):
        held.append(sum(alive([*layer.made, *layer.given]) for layer in layers[:2]))
        return y.pow(2).mean()

    with inline():
        for _ in range(2):  # in its first call a pipe works on copies of inputs
            for layer in layers:
                layer.forget()
            held.clear()
            data = ((torch.randn(2, 3), None) for _ in range(FEW))
            if driver == "train_batch":
                pipe.train_batch(data_iter=data, loss_fn=loss_fn, schedule="gpipe")
            else:
                loss = loss_fn(pipe(torch.cat([x for x, _ in data])))
                # (Its input is one tensor, which is the caller's.)
                held[-1] -= alive(layers[0].given)
                loss.backward()
    assert held[-1] == 0  # by then all have gone forward, and none has gone back
    assert not any(kept)


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("run", KINDS)
def test_frozen_stages_go_forward_once_and_never_back(run, checkpoint):
    pipe, layers = frozen_pipe(devices=RUNS[run][1], checkpoint=checkpoint)
    pipe.train_batch(torch.randn(2 * FEW, 3), loss_fn=lambda y: y.pow(2).mean(), **RUNS[run][0])
    assert [len(layer.made) for layer in layers[:2]] == [FEW] * 2
    assert [len(layer.sent) for layer in layers[:2]] == [0, 0]
    again = {"always": FEW, "except_last": FEW - 1, "never": 0}[checkpoint]
    assert [len(layer.made) for layer in layers[2:]] == [FEW + again] * 2
    assert gone([memory for layer in layers for memory in layer.made])
