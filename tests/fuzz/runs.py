"""A case is run beside the plain model: what they compute has to be the same.

Models without random layers have to equal the plain model, fed micro-batch by micro-batch in the
same order, to the last bit (to rounding where README's Limits say so). Those with random layers
have to equal a pipe of one stage with the same seed; where a backward draws, which depends on the
balance, themselves under ``syncpipe.inline()``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from traceback import walk_tb
from typing import Any

import torch
from torch import Tensor, nn

from syncpipe import Pipe, inline
from syncpipe.schedules import build
from syncpipe.schedules.schedule import Action, Schedule
from syncpipe.storage import clones
from tests.fuzz.cases import WEIGHTS, Call, Case
from tests.fuzz.models import leaves
from tests.support.compare import assert_same
from tests.support.models import CHANNELS, LENGTH, Result, concatenate, seen, wanted_in, weigh
from tests.support.running import another_thread
from tests.support.training import go_back, orders_of, own_leaves


def batch(size: int, k: int, requires_grad: bool, dtype: torch.dtype = torch.float32) -> Tensor:
    """A mini-batch, the same for the same numbers."""
    generator = torch.Generator().manual_seed(100 * size + k)
    x = torch.randn(size, CHANNELS, LENGTH, generator=generator, dtype=torch.float64)
    return x.to(dtype).requires_grad_(requires_grad)


def target_of(x: Tensor) -> dict[str, Any]:
    """A target for a mini-batch or micro-batch."""
    scale = 0.5 + x.detach()[:, 0, 0].abs().to("cpu", copy=True)
    return {"scale": scale, "word": "x", "none": None}


def loss_function(kind: str, pipe: Pipe) -> Any:
    """A loss, with its weight if it has one."""
    if kind == "nested":
        return lambda output, target: weigh(output, target) + inside(pipe)
    if kind == "noisy":
        return lambda output, target: weigh(output, target) * torch.rand(())
    if kind == "anew":  # as one that closes over the number of the step
        scale = torch.ones(())
        return lambda output, target: weigh(output, target) * scale
    if kind not in WEIGHTS:
        return weigh

    def weighted(output: Any, target: Any) -> Any:
        scale = target["scale"]
        return weigh(output, target), WEIGHTS[kind](len(scale), scale)

    return weighted


@torch.no_grad()
def inside(pipe: Pipe) -> Tensor:
    """A forward in the middle of a call, of unlike values: of alike ones rrelu draws nothing."""
    return weigh(pipe(batch(2, 0, False))).tanh()


def drawing(
    pairs: list[tuple[Tensor, Any]], nested: Callable[[], Any]
) -> Iterator[tuple[Tensor, Any]]:
    """An iterator that draws, as augmentations do, before and after others had their turn."""
    for x, target in pairs:
        scale = torch.rand(()) + 0.5 + nested()
        os.sched_yield()
        yield x * scale + torch.rand(()), target


def autocast(call: Call) -> AbstractContextManager[Any]:
    if not call.autocast:
        return nullcontext()
    return torch.autocast("cpu", torch.bfloat16, cache_enabled=call.autocast == "cached")


#: Calls that give outputs without a graph; "outputs" is ``eval_batch`` without a loss.
_WITHOUT_GRAD: Any = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "outputs": nullcontext,
}


# --- the pipe, and the plain model ---------------------------------------------------------------


class Place:
    """Where what a pipe is given comes from: here from the CPU."""

    dtype = torch.float32

    def input(self, x: Tensor, call: Call) -> Tensor:
        return x

    def target(self, scale: Tensor, call: Call) -> Tensor:
        return scale

    def backward(self, loss: Tensor, xs: list[Tensor]) -> None:
        loss.backward()

    def close(self, given: list[Tensor], made: Any) -> Any:
        """At the end of a call, before anything is read; gives what it has made."""
        return made


def run_pipe(pipe: Pipe, case: Case, call: Call, k: int, place: Place) -> Result:
    """A call of a pipe."""
    made = [batch(size, k + i, False, place.dtype) for i, size in enumerate(call.sizes)]
    targets = [target_of(x) for x in made]
    for target in targets:
        target["scale"] = place.target(target["scale"], call)
    xs = [place.input(x, call).detach().requires_grad_(case.input_grad) for x in made]
    # PyTorch refuses to write into leaves, and so into views of them.
    given = [x.clone() for x in xs] if case.model.begins_in_place or call.computed else xs
    options: dict[str, Any] = {"loss_fn": loss_function(call.loss, pipe)}
    options["loss_reduction"] = "sum" if call.loss == "sum" else "mean"
    loss = output = None
    if call.training is not None:
        pipe.train(call.training)
    with autocast(call):
        if call.driver == "forward":
            output = pipe(given[0])
            loss = weigh(output) if wanted_in(output) else None
        elif call.driver in _WITHOUT_GRAD:
            with _WITHOUT_GRAD[call.driver]():
                output = (pipe.eval_batch if call.driver == "outputs" else pipe)(given[0])
        elif call.driver == "eval":
            loss = pipe.eval_batch(given[0], targets[0], **options)
        else:
            pairs = list(zip(given, targets, strict=True))
            nested = partial(inside, pipe) if call.loss == "nested" else int
            data = drawing(pairs, nested) if case.model.draws else iter(pairs)
            source = {"data_iter": data} if call.driver == "iterator" else {}
            loss, output = pipe.train_batch(
                *(() if source else pairs[0]),
                **source,
                schedule=call.schedule,
                return_outputs=True,
                **options,
            )
    if call.driver == "forward" and loss is not None:
        place.backward(loss, xs)
    left = [x.detach().clone() for x in given]  # without a wait, which would hide others
    output, loss = place.close([*xs, *given], (output, loss))
    assert_same([x.to("cpu") for x in left], made, "the caller's input ")
    assert call.training is None or all(m.training is call.training for m in pipe.modules())
    return seen(pipe, xs, output, loss, leaves(pipe))


def run_plain(
    case: Case,
    model: nn.Sequential,
    call: Call,
    k: int,
    schedule: Schedule | None,
    dtype: torch.dtype = torch.float32,
) -> Result:
    """The same call of the plain model, micro-batch by micro-batch."""
    xs = [batch(size, k + i, case.input_grad, dtype) for i, size in enumerate(call.sizes)]
    whole = [piece for x in xs for piece in x.chunk(case.chunks if len(xs) == 1 else 1)]
    if call.driver == "train":
        # Each micro-batch has a graph of its own, which begins at the same memory.
        whole = [piece.data.requires_grad_(case.input_grad) for piece in whole]
    # In memory that is aligned as that of the originals, which can decide the last bit.
    pieces = [clones([p])[0] if case.model.begins_in_place else p for p in whole]
    trains = call.driver in ("forward", "train", "iterator")
    if call.training is not None:
        model.train(call.training and call.driver not in ("eval", "outputs"))
    outputs, losses = [], []
    with autocast(call), torch.set_grad_enabled(trains):
        for piece in pieces:
            outputs.append(model(piece))
        if call.driver == "forward":
            ends = list(map(own_leaves, outputs))
            output = joined(ends)
        elif call.driver not in _WITHOUT_GRAD:
            for y, piece in zip(outputs, whole, strict=True):
                losses.append(weigh(y, target_of(piece)))
    found = partial(seen, model, xs, leaves=leaves(model))
    if call.driver in _WITHOUT_GRAD:
        with torch.no_grad():
            return found(joined(outputs))
    orders = [range(len(whole))[::-1]] * len(case.balance)
    if call.driver == "forward":
        loss = weigh(output) if wanted_in(output) else None
        if loss is not None:
            given = iter(torch.autograd.grad(loss, wanted_in(ends)))
            roots: Any = [(t, [next(given) for _ in t]) for t in map(wanted_in, outputs)]
            go_back(roots, leaves(model), orders, case.balance, case.replicas, at_once=True)
        return found(output, loss)
    shares = shared(call, losses, [len(piece) for piece in whole])
    if call.driver == "eval":
        return found(None, sum(shares[1:], shares[0]))
    assert schedule is not None
    if not any(share.requires_grad for share in shares):
        raise RuntimeError("there is nothing to train")
    roots = [([share], None) for share in shares]
    go_back(roots, leaves(model), orders_of(schedule), case.balance, case.replicas)
    if call.driver == "train" and case.input_grad and any(p.grad is not None for p in whole):
        xs[0].grad = torch.cat([torch.zeros_like(p) if p.grad is None else p.grad for p in whole])
    loss = sum([share.detach() for share in shares[1:]], shares[0].detach())
    return found(joined(outputs), loss)


def joined(outputs: list[Any]) -> Any:
    """The output of the mini-batch; of one micro-batch it keeps its strides."""
    return concatenate(outputs) if len(outputs) > 1 else outputs[0]


def shared(call: Call, losses: list[Tensor], sizes: list[int]) -> list[Tensor]:
    """What each micro-batch contributes to the loss."""
    if call.loss == "sum":
        return losses
    weights = [size + 0.5 if call.loss in WEIGHTS else size for size in sizes]
    return [loss * (weight / sum(weights)) for loss, weight in zip(losses, weights, strict=True)]


def check(case: Case) -> None:
    """Runs a case; what the plain model cannot do either, for want of a kernel, is none.

    Raises:
        AssertionError: something is not as it has to be.
    """
    pipe, count = case.pipe(), len(case.model.layers)
    schedules = [schedule_of(pipe, call) for call in case.calls]
    rounded = list(map(partial(to_rounding, case), case.calls, schedules))

    def through(pipe: Pipe, case: Case) -> list[Result]:
        def run(k: int, call: Call) -> Result:
            torch.manual_seed(k)
            found = run_pipe(pipe, case, call, k, Place())
            if case.model.draws:
                found.output = found.output, torch.get_rng_state()
            return found

        act = None if case.model.draws else partial(torch.rand, ())
        beside = another_thread(act) if case.beside else nullcontext()
        with beside, inline() if case.by_hand else nullcontext():
            return list(results(case.calls, pipe, run, rounded))

    try:
        found = through(pipe, case)
    except RuntimeError as error:
        if is_raised_by_torch(error, lambda: expected(case, schedules)):
            return
        raise
    if not case.model.draws:
        wanted = expected(case, schedules, rounded=rounded)
    elif case.model.draws_in_backward:
        wanted = through(case.pipe(), replace(case, by_hand=True))
    else:
        calls = tuple(
            call if made is None else replace(call, schedule=partial(in_one_stage, made))
            for call, made in zip(case.calls, schedules, strict=True)
        )
        alone = replace(case, balance=(count,), devices=(0,), replicas=(1,), by_hand=False)
        alone = replace(alone, beside=False)
        alone = replace(alone, checkpoint="never", calls=calls)
        wanted = through(alone.pipe(), alone)
    for k, pair in enumerate(zip(found, wanted, strict=True)):
        coarse = case.calls[k].autocast or "autocast" in case.model.layers
        # Half precision rounds otherwise where gradients are scaled in the end.
        tolerance = (0.3 if case.calls[k].loss in WEIGHTS else 0.1) if coarse else 1e-4
        assert_same(*pair, f"call {k} ", rounded=rounded[k], rtol=tolerance, atol=tolerance)


def is_raised_by_torch(error: RuntimeError, run_plain: Callable[[], Any]) -> bool:
    """Whether the plain model raises the same error, in PyTorch or a layer and not in a pipe."""
    try:
        run_plain()
    except RuntimeError as same:
        *_, (innermost, _) = walk_tb(same.__traceback__)
        package = innermost.f_globals["__name__"].partition(".")[0]
        return package != "syncpipe" and same.args[0] == error.args[0]
    return False


def results(
    calls: Sequence[Call],
    module: nn.Module,
    run: Callable[[int, Call], Any],
    rounded: Sequence[set[str]] | None = None,
) -> Iterator[Any]:
    """What ``run`` gives for each call, up to one with nothing to train; steps are in between.

    Of what is equal to rounding only there is none, and gradients are forgotten.
    """
    coarse: Sequence[Any] = [()] * len(calls) if rounded is None else rounded
    for k, call in enumerate(calls):
        if call.zero or (k and coarse[k - 1]):
            for leaf in leaves(module).values():
                leaf.grad = None
        try:
            yield run(k, call)
        except RuntimeError as error:
            if "there is nothing to train" not in str(error):
                raise
            return
        own_gradients(module)
        if not coarse[k]:
            step(module)


def expected(
    case: Case,
    schedules: Sequence[Schedule | None],
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> list[Result]:
    """What the plain model gives."""
    model = case.model.build(dtype)

    def run(k: int, call: Call) -> Result:
        return run_plain(case, model, call, k, schedules[k], dtype)

    return list(results(case.calls, model, run, **options))


def schedule_of(pipe: Pipe, call: Call) -> Schedule | None:
    """What a call runs, if it trains."""
    if call.driver not in ("train", "iterator"):
        return None
    m = len(call.sizes)
    if call.driver == "train":
        m = len(torch.empty(call.sizes[0]).chunk(pipe.chunks))
    asked = pipe.schedule if call.schedule is None else call.schedule
    return build(asked, m, pipe._build().placement)


def in_one_stage(made: Schedule, m: int, devices: Any) -> Schedule:
    """All forward, and back in the order of the first stage of another schedule."""
    order = orders_of(made)[0]
    there = [Action("forward", i, 0) for i in range(m)]
    return Schedule(m, (0,), ((*there, *[Action("backward", i, 0) for i in order]),), "alone")


def to_rounding(case: Case, call: Call, schedule: Schedule | None) -> set[str]:
    """What is equal to rounding only, as docs/limits.md says."""
    rounded = set()
    inner = {"pipe", "pipe_dropout"} & {*case.model.layers}  # with micro-batches of its own
    if call.autocast and (inner or "Selective" in str(case.checkpoint)):  # each use has a cast
        rounded |= {"parameter_grads"}
    if case.copied and case.model.draws:  # beside a pipe without replicas
        rounded |= {"parameter_grads"}
    if case.model.ties and (
        call.autocast
        or "reentrant" in case.model.layers
        or (schedule is None and case.model.uses_twice)
    ):
        rounded |= {"parameter_grads"}
    if schedule is None and "reentrant" in case.model.layers:
        rounded |= {"parameter_grads"}
    if case.model.begins_in_place_on_a_view(case.balance):
        rounded |= {"parameter_grads", "input_grads"}
    if schedule is None:
        return rounded
    if call.loss in WEIGHTS or (len(set(call.sizes)) > 1 and call.loss == "mean"):
        rounded |= {"parameter_grads", "input_grads", "loss"}
    if schedule.splits:
        rounded |= {"parameter_grads"}
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
