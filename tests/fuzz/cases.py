"""Random models in random pipes, beside the plain model: what they compute has to be the same.

    python -m tests.fuzz --models 5000 --seed 1        # as many as there is time for
    python -m tests.fuzz --seed 1 --first 812 --models 1       # one of them once more

Models without random layers have to equal the plain model, fed micro-batch by micro-batch in the
same order, to the last bit (to rounding where README's Limits say so). Those with random layers
have to equal themselves under ``syncpipe.inline()`` with the same seed.
"""

from __future__ import annotations

import argparse
import faulthandler
import random
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from syncpipe import Pipe, inline
from syncpipe.schedules import build
from syncpipe.schedules.schedule import Schedule
from tests.fuzz.models import Model, drawn_model, leaves
from tests.support.models import CHANNELS, CHECKPOINT_MODES, LENGTH, concatenate, loss_of
from tests.support.training import orders_of, weigh

__all__ = ["Case", "check", "drawn_case"]

DRIVERS = ["forward", "forward", "train", "train", "train", "iterator", "no_grad", "eval"]
SCHEDULES = ["naive", "gpipe", "1f1b", "interleaved_1f1b", "zb_h1"]


@dataclass(frozen=True)
class Call:
    """One call of a pipe.

    Attributes:
        driver: one of ``DRIVERS``.
        schedule: of ``train_batch``.
        loss: ``"mean"``, ``"sum"`` or ``"weighted"``.
        sizes: the samples of each micro-batch, or of the mini-batch alone.
        autocast: run it under autocast.
        zero: forget the gradients of earlier calls.
    """

    driver: str
    schedule: str
    loss: str
    sizes: tuple[int, ...]
    autocast: bool
    zero: bool


@dataclass(frozen=True)
class Case:
    """A pipe in words, and what is done with it."""

    model: Model
    balance: tuple[int, ...]
    devices: tuple[int, ...]
    chunks: int
    checkpoint: str | tuple[str, ...]
    by_hand: bool
    input_grad: bool
    calls: tuple[Call, ...]

    def pipe(self, devices: Sequence[Any] | None = None) -> Pipe:
        """The pipe, by default on CPU workers."""
        return Pipe(
            self.model.build(),
            self.balance,
            devices=devices or [f"cpu:{k}" for k in self.devices],
            chunks=self.chunks,
            checkpoint=self.checkpoint,
        )


def drawn_case(chance: random.Random, *, kinds: Sequence[str] | None = None) -> Case:
    """Draws a model, a pipe for it, and calls."""
    model = drawn_model(chance, most=9, kinds=kinds)
    count = len(model.layers)
    stages = chance.randint(1, min(4, count))
    edges = [0, *sorted(chance.sample(range(1, count), stages - 1)), count]
    workers = chance.randint(1, stages)
    if chance.random() < 0.7:  # in turn, as interleaved schedules have it
        devices = [j % workers for j in range(stages)]
    else:
        devices = [chance.randrange(workers) for _ in range(stages)]
    devices = [list(dict.fromkeys(devices)).index(k) for k in devices]
    modes = [chance.choice(CHECKPOINT_MODES) for _ in range(stages)]
    chunks = chance.randint(1, 5)
    autocast = chance.random() < 0.15
    calls = []
    for _ in range(chance.randint(1, 3)):
        driver = chance.choice(DRIVERS)
        if driver == "forward" and "noisy_hook" in model.layers:
            driver = "train"  # hooks in the backward of `pipe(x)` draw in autograd's order
        schedule = chance.choice(SCHEDULES)
        if schedule == "interleaved_1f1b" and (
            stages % workers or devices != [j % workers for j in range(stages)]
        ):
            schedule = "1f1b"
        sizes = [chunks if chance.random() < 0.3 else chance.randint(1, 9)]
        if driver == "iterator":
            sizes *= chunks
            if chance.random() < 0.3:
                sizes = [chance.randint(1, 3) for _ in range(chunks)]
        loss = chance.choice(["mean", "mean", "mean", "sum", "weighted"])
        calls.append(Call(driver, schedule, loss, tuple(sizes), autocast, chance.random() < 0.6))
    return Case(
        model,
        tuple(b - a for a, b in pairwise(edges)),
        tuple(devices),
        chunks,
        modes[0] if chance.random() < 0.7 else tuple(modes),
        chance.random() < 0.1,
        chance.random() < 0.6,
        tuple(calls),
    )


# --- what a call is given, and what it leaves behind ---------------------------------------------


def batch(size: int, k: int, requires_grad: bool, dtype: torch.dtype = torch.float32) -> Tensor:
    """A mini-batch, the same for the same numbers."""
    generator = torch.Generator().manual_seed(100 * size + k)
    x = torch.randn(size, CHANNELS, LENGTH, generator=generator, dtype=torch.float64)
    return x.to(dtype).requires_grad_(requires_grad)


def target_of(x: Tensor) -> dict[str, Tensor]:
    """A target for a mini-batch or micro-batch."""
    return {"scale": 0.5 + x.detach()[:, 0, 0].abs().to("cpu", copy=True)}


@dataclass
class Seen:
    """All that one can see of a call."""

    loss: Any
    output: Any
    input_grads: list[Tensor | None]
    grads: dict[str, Tensor | None]
    buffers: dict[str, Tensor]


def seen(loss: Any, output: Any, inputs: list[Tensor], module: nn.Module) -> Seen:
    """What a call left behind, as it is now."""

    def copied(tensor: Any) -> Any:
        return tensor.detach().to("cpu", copy=True) if isinstance(tensor, Tensor) else tensor

    return Seen(
        copied(loss),
        pytree.tree_map(copied, output),
        [copied(x.grad) for x in inputs],
        {name: copied(leaf.grad) for name, leaf in leaves(module).items()},
        {name: copied(buffer) for name, buffer in module.named_buffers()},
    )


def loss_function(kind: str) -> Any:
    """A loss, with its weight if it has one."""
    if kind != "weighted":
        return weigh
    return lambda output, target: (weigh(output, target), len(target["scale"]) + 0.5)


def autocast(call: Call) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16) if call.autocast else nullcontext()


# --- the pipe, and the plain model ---------------------------------------------------------------


def run_pipe(pipe: Pipe, call: Call, k: int, input_grad: bool, copied: bool) -> Seen:
    """A call of a pipe."""
    xs = [batch(size, k + i, input_grad) for i, size in enumerate(call.sizes)]
    # PyTorch refuses to write into leaves, and so into views of them.
    given = [x.clone() if copied else x for x in xs]
    options = {"loss_fn": loss_function(call.loss), "schedule": call.schedule}
    reduction = "sum" if call.loss == "sum" else "mean"
    loss = output = None
    with autocast(call):
        if call.driver == "forward":
            output = pipe(given[0])
            loss = loss_of(output)
        elif call.driver == "no_grad":
            with torch.no_grad():
                output = pipe(given[0])
        elif call.driver == "eval":
            del options["schedule"]
            loss = pipe.eval_batch(given[0], target_of(xs[0]), loss_reduction=reduction, **options)
        else:
            pairs = [(x, target_of(x)) for x in given]
            source = {"data_iter": iter(pairs)} if call.driver == "iterator" else {}
            loss, output = pipe.train_batch(
                *(() if source else pairs[0]),
                **source,
                loss_reduction=reduction,
                return_outputs=True,
                **options,
            )
    if call.driver == "forward" and loss is not None:
        loss.backward()
    return seen(loss, output, xs, pipe)


class Aligned(torch.autograd.Function):
    """A copy whose memory is aligned as the original's is, which can decide the last bit."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        memory = torch.empty(x.numel() * x.itemsize + 64, dtype=torch.uint8)
        begin = (x.data_ptr() - memory.data_ptr()) % 64
        there = x.new_empty(0).set_(
            memory.untyped_storage(), begin // x.itemsize, x.shape, x.stride()
        )
        return there.copy_(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class NothingToTrain(Exception):
    """No loss of the plain model has a graph."""


def run_plain(
    case: Case,
    model: nn.Sequential,
    call: Call,
    k: int,
    schedule: Schedule | None,
    dtype: torch.dtype = torch.float32,
) -> Seen:
    """The same call of the plain model, micro-batch by micro-batch."""
    xs = [batch(size, k + i, case.input_grad, dtype) for i, size in enumerate(call.sizes)]
    whole = [piece for x in xs for piece in x.chunk(case.chunks if len(xs) == 1 else 1)]
    if call.driver == "train":
        # Each micro-batch has a graph of its own, which begins at the same memory.
        whole = [piece.data.requires_grad_(case.input_grad) for piece in whole]
    pieces = [Aligned.apply(p) if case.model.begins_in_place else p for p in whole]
    trains = call.driver in ("forward", "train", "iterator")
    model.train(call.driver != "eval")
    outputs, losses = [], []
    with autocast(call), torch.set_grad_enabled(trains):
        for piece in pieces:
            outputs.append(model(piece))
        if call.driver == "forward":
            output = joined(outputs)
            loss = loss_of(output)
        elif call.driver != "no_grad":
            for y, piece in zip(outputs, whole, strict=True):
                losses.append(weigh(y, target_of(piece)))
    if call.driver == "no_grad":
        with torch.no_grad():
            return seen(None, joined(outputs), xs, model)
    if call.driver == "forward":
        if loss is not None:
            loss.backward()
        return seen(loss, output, xs, model)
    shares = shared(call, losses, [len(piece) for piece in whole])
    if call.driver == "eval":
        model.train()
        return seen(sum(shares[1:], shares[0]), None, xs, model)
    assert schedule is not None
    if not any(share.requires_grad for share in shares):
        raise NothingToTrain
    for i in orders_of(schedule)[0]:
        shares[i].backward()
        own_gradients(model)
    if call.driver == "train" and case.input_grad and any(p.grad is not None for p in whole):
        xs[0].grad = torch.cat([torch.zeros_like(p) if p.grad is None else p.grad for p in whole])
    loss = sum([share.detach() for share in shares[1:]], shares[0].detach())
    return seen(loss, joined(outputs), xs, model)


def joined(outputs: list[Any]) -> Any:
    """The output of the mini-batch; of one micro-batch it keeps its strides."""
    return concatenate(outputs) if len(outputs) > 1 else outputs[0]


def shared(call: Call, losses: list[Tensor], sizes: list[int]) -> list[Tensor]:
    """What each micro-batch contributes to the loss."""
    if call.loss == "sum":
        return losses
    weights = [size + 0.5 if call.loss == "weighted" else size for size in sizes]
    return [loss * (weight / sum(weights)) for loss, weight in zip(losses, weights, strict=True)]


def check(case: Case) -> None:
    """Runs a case.

    Raises:
        AssertionError: something is not as it has to be.
    """
    pipe = case.pipe()
    other = case.pipe() if case.model.draws else case.model.build()
    entering = case.input_grad, case.model.begins_in_place
    exact = True
    for k, call in enumerate(case.calls):
        if call.zero or not exact:
            exact = True
            for module in (pipe, other):
                for leaf in leaves(module).values():
                    leaf.grad = None
        schedule = schedule_of(pipe, call)
        try:
            torch.manual_seed(k)
            with inline() if case.by_hand and not case.model.draws else nullcontext():
                actual = run_pipe(pipe, call, k, *entering)
        except RuntimeError as error:
            if "there is nothing to train" not in str(error):
                raise
            with pytest.raises(NothingToTrain):
                run_plain(case, case.model.build(), call, k, schedule)
            return
        torch.manual_seed(k)
        if case.model.draws:
            with inline():
                expected = run_pipe(other, call, k, *entering)
            rounded: set[str] = set()
        else:
            expected = run_plain(case, other, call, k, schedule)
            rounded = to_rounding(call, schedule)
        compare(actual, expected, rounded, f"call {k}", 0.1 if call.autocast else 1e-4)
        exact = not rounded
        for module in (pipe, other):
            own_gradients(module)
            if exact:
                step(module)


def schedule_of(pipe: Pipe, call: Call) -> Schedule | None:
    """What a call runs, if it trains."""
    if call.driver not in ("train", "iterator"):
        return None
    m = len(call.sizes)
    if call.driver == "train":
        m = len(torch.empty(call.sizes[0]).chunk(pipe.chunks))
    workers = list(dict.fromkeys(pipe._workers))
    return build(call.schedule, m, [workers.index(worker) for worker in pipe._workers])


def to_rounding(call: Call, schedule: Schedule | None) -> set[str]:
    """What is equal to rounding only, as README's Limits say."""
    if schedule is None:
        return set()
    rounded = set()
    if call.loss == "weighted" or (len(set(call.sizes)) > 1 and call.loss == "mean"):
        rounded |= {"grads", "input_grads", "loss"}
    if schedule.splits:
        rounded |= {"grads"}
    return rounded


def own_gradients(module: nn.Module) -> None:
    """Gives each leaf memory of its own for its gradient.

    By themselves two leaves can have one memory there, and the next micro-batch is added twice: a
    bug of PyTorch's, which the pipe does not have.
    """
    for leaf in leaves(module).values():
        leaf.grad = None if leaf.grad is None else leaf.grad.clone()


@torch.no_grad()
def step(module: nn.Module) -> None:
    """A step of an optimizer."""
    for leaf in leaves(module).values():
        if leaf.grad is not None:
            leaf.sub_(leaf.grad.clamp(-1, 1), alpha=0.05)


def compare(actual: Seen, expected: Seen, rounded: set[str], where: str, atol: float) -> None:
    """Equality to the last bit; of what is in ``rounded``, to rounding."""
    for what in ("loss", "output", "buffers", "input_grads", "grads"):
        ours, spec = pytree.tree_flatten(getattr(actual, what))
        theirs, other_spec = pytree.tree_flatten(getattr(expected, what))
        assert spec == other_spec, f"{where}, {what}: {spec} instead of {other_spec}"
        names = pytree.tree_leaves_with_path(getattr(expected, what), is_leaf=lambda v: v is None)
        for (path, _), a, b in zip(names, ours, theirs, strict=True):
            name = f"{where}, {what}{pytree.keystr(path)}"
            if not isinstance(b, Tensor) or not isinstance(a, Tensor):
                assert a is b or a == b, f"{name}: {a} instead of {b}"
            elif what in rounded:
                assert torch.allclose(a, b, rtol=atol, atol=atol), f"{name}: {a}\ninstead of\n{b}"
            else:
                same = a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
                assert same or (a.isnan() | (a == b)).all(), f"{name}: {a}\ninstead of\n{b}"


def by_hand(
    name: str,
    draw: Callable[[random.Random], Any],
    check: Callable[[Any], None],
    arguments: Sequence[str] | None = None,
) -> int:
    """Runs cases from the command line ``python -m name``; the number of those that failed."""
    parser = argparse.ArgumentParser(prog=f"python -m {name}", description=__doc__)
    parser.add_argument("--models", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first model")
    parser.add_argument("--stop", action="store_true", help="stop at the first that fails")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    failed, begun = 0, time.monotonic()
    for k in range(options.first, options.first + options.models):
        case = draw(random.Random(f"{options.seed}/{k}"))
        faulthandler.dump_traceback_later(180, exit=True)
        try:
            check(case)
        except Exception as error:
            failed += 1
            print(f"--seed {options.seed} --first {k} --models 1\n  {case}", flush=True)
            if options.models == 1:
                traceback.print_exc()
            else:
                print(f"  {type(error).__name__}: {str(error)[:300]}", flush=True)
            if options.stop:
                break
        done = k - options.first + 1
        if done % 50 == 0:
            seconds = time.monotonic() - begun
            print(f"{done} models, {failed} failed, {seconds:.0f} s", flush=True)
    faulthandler.cancel_dump_traceback_later()
    return failed
