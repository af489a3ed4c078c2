"""``verify``: the check that a user can run before the first long training."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from functools import partial
from operator import setitem
from typing import Any

import torch
from torch import Tensor

from syncpipe.compare import Comparison, compare
from syncpipe.options import checked_schedule
from syncpipe.pipe import Pipe
from syncpipe.runtime.errors import annotate
from syncpipe.runtime.interrupts import undone
from syncpipe.schedules.build import SCHEDULES, ScheduleLike, build, shown
from syncpipe.schedules.schedule import Schedule
from syncpipe.training.loss.known import known_loss
from syncpipe.training.sources import input_and_target
from syncpipe.verification.layers import Observation, observe
from syncpipe.verification.report import COLUMNS, Finding, Report, Run
from syncpipe.verification.runs import Result, Runs

__all__ = ["verify"]

_PLAIN = "the plain model, micro-batches beside the mini-batch"
_LOSS = "the plain model, a loss for each micro-batch beside one for all"
_PIPE = "the pipe beside the plain model on micro-batches"
_BACK = ("backward", "backward_input")
_ON_ACCELERATORS = 5e-3  # TF32, and sums in any order


def verify(
    pipe: Pipe,
    input: Any,
    target: Any = None,
    *,
    loss_fn: Callable[..., Any],
    schedules: Iterable[ScheduleLike] | ScheduleLike | None = None,
    weight: Callable[[Any], Any] | Sequence[Any] | None = None,
    loss_reduction: str | None = None,
) -> Report:
    """Check that a pipe computes what its layers compute by themselves, and says why if not.

    The layers are run plainly, one after another, on the whole mini-batch and on its micro-batches;
    then the pipe runs, by ``pipe(x)`` with ``loss.backward()``, and by ``train_batch`` under every
    schedule that its devices allow. All runs start from the same weights, buffers and random
    state; outputs, loss, gradients and buffers are compared::

        report = syncpipe.verify(pipe, input, target, loss_fn=F.cross_entropy)
        print(report)
        assert report.ok

    A mini-batch of few samples will do; it takes about four steps of the plain model, and one of
    the pipe for each schedule. The plain model runs without recomputation, and copies of
    weights, buffers and gradients are kept in the CPU's memory.

    Layers that draw random numbers are given the numbers that they get in the pipe, so these are
    compared to the bit as well; but not micro-batches with the mini-batch, where they cannot be
    the same.

    Afterwards all is as it was, also after an error or Ctrl-C: weights, buffers, gradients, modes
    and what else is in the modules, random states. Hooks by which an optimizer steps as soon as a
    gradient is there do not run.

    Args:
        pipe: the pipe, in the mode in which it is to be checked, mostly ``train()``.
        input: as for ``train_batch``.
        target: the same.
        loss_fn: the same.
        schedules: names, schedules, or functions that make them, or one of these; None for all
            that have a name, and the pipe's own.
        weight: as for ``train_batch``.
        loss_reduction: the same.

    Returns:
        The report: ``print`` it; ``ok`` says whether all is equal, to rounding at least.

    Raises:
        TypeError, ValueError: an argument does not fit. Whatever the layers or the loss function
            raise on the whole mini-batch is raised as it is; what a later run raises is in the
            report.
    """
    if not isinstance(pipe, Pipe):
        raise TypeError(
            f"verify takes a syncpipe.Pipe, not {type(pipe).__name__}: give the pipe itself, "
            "which is .module of what wraps it (DistributedDataParallel, say)"
        )
    if not len(pipe):
        raise ValueError("the pipe has no layers: there is nothing to verify")
    if not pipe._alone():
        raise ValueError(
            "the pipe is data-parallel, so its gradients are not those of its layers here: verify "
            "it before data_parallel, or a copy of it (copy.deepcopy), which knows of no others"
        )
    loss = known_loss(loss_fn, loss_reduction, weight)
    asked = _schedules(pipe, schedules)
    options = {"loss_fn": loss_fn, "weight": weight, "loss_reduction": loss_reduction}
    pipeline = pipe._ready()
    with pipeline.training:  # nobody trains it meanwhile
        before = {"_loss_counts": pipe._loss_counts, "_watched": pipe._watched}

        def run() -> Report:
            pipe._loss_counts, pipe._watched = copy(pipe._loss_counts), True
            pipe._source(input, target, None)  # refuses what train_batch would refuse
            pair = input_and_target(input, target)
            return _Check(Runs(pipe, *pair, loss, options), asked).report()

        # The loss was checked with these arguments, not with others, and the first call of all is
        # still to come.
        return undone(run, map(setitem, [pipe.__dict__] * 2, before.keys(), before.values()))


def _schedules(pipe: Pipe, asked: Any) -> list[ScheduleLike]:
    """What ``train_batch`` runs under.

    Raises:
        TypeError, ValueError: there is no such schedule.
    """
    if isinstance(asked, str | os.PathLike | Schedule) or callable(asked):
        asked = [asked]
    if asked is not None:
        return [checked_schedule(schedule) for schedule in asked]
    own = pipe.schedule
    named = isinstance(own, str) and own in SCHEDULES
    return [*SCHEDULES, *([] if named else [own])]


class _Check:
    """One call of :func:`verify`."""

    def __init__(self, runs: Runs, schedules: list[ScheduleLike]) -> None:
        self._runs, self._schedules = runs, schedules
        self._plain: dict[tuple[int, ...], Result] = {}
        self._seen: list[Observation] = []
        self._findings: dict[tuple[str, ...], Finding] = {}
        self._rounding = _rounding(runs)
        pipe = runs.pipe
        replicas = f"replicas={pipe.replicas}, " if max(pipe.replicas) > 1 else ""
        self._report = Report(
            f"syncpipe.verify: {len(pipe)} layers on {', '.join(map(str, pipe.devices))}; "
            f"balance={pipe.balance}, {replicas}{runs.m} micro-batches, "
            f"checkpoint={pipe.checkpoint!r}"
        )

    def report(self) -> Report:
        runs, notes = self._runs, self._report.notes
        self._micro_batches()
        last_first = tuple(reversed(range(runs.m)))
        run = self._run("pipe(x)", "pipe", _PIPE)
        expected = self._tried(run, partial(self._expected, last_first))
        if expected is not None and expected.apart:
            run.not_applicable = f"its outputs cannot be put together: {expected.apart}"
            notes.append("outputs are not compared, but losses, gradients and buffers are")
        elif expected is not None and len(runs.layers) in expected.drew:
            run.not_applicable = "loss_fn draws random numbers, which it does outside of the pipe"
        elif expected is not None:
            self._compared(run, runs.forward, last_first)
        for schedule in self._schedules:
            run = self._run(shown(schedule).strip("'"), "pipe", _PIPE)
            try:
                plan = build(schedule, runs.m, runs.pipeline.placement)
            except ValueError as error:
                run.not_applicable = str(error)
                continue
            order = [
                a.i for row in plan.actions for a in row if a.j == plan.n - 1 and a.kind in _BACK
            ]
            if (expected := self._tried(run, partial(self._expected, tuple(order)))) is not None:
                train = partial(runs.train, schedule, not expected.apart)
                self._compared(run, train, tuple(order))
        if not runs.pipe.training:
            notes.append(
                "the pipe is in eval() mode, and was checked in that: call train() first to check "
                "what training does"
            )
        return self._report

    # --- the plain model -------------------------------------------------------------------------

    def _micro_batches(self) -> None:
        """Whether micro-batches give what the mini-batch gives, and their losses its loss."""
        run = self._run("micro-batches", "plain", _PLAIN)
        try:
            whole, failed = self._runs.alone(self._observed)
        except BaseException as error:
            annotate(error, "in verify: the plain model, on the whole mini-batch")
            raise
        if failed is not None:
            self._fail(run, failed)
        seen, notes = self._seen, self._report.notes
        run.outputs = _worst([o.comparison for o in seen if not o.draws])
        if drawing := [str(o.layer) for o in seen if o.draws]:
            notes.append(
                "the mini-batch as a whole cannot be compared with its micro-batches, for random "
                f"numbers are drawn by {', '.join(drawing)}: instead each other layer was, by "
                "itself, on the same inputs"
            )
        off = next((o for o in seen if not o.draws and not o.comparison.same), None)
        if off is not None:
            what = f"outputs differ from the mini-batch's, {_far(off.comparison)}"
            self._find(run, what, str(off.layer), off.reason(cut=True))
        run = self._run("loss of each micro-batch", "plain", _LOSS)
        apart = self._tried(run, partial(self._expected, tuple(range(self._runs.m))))
        if apart is None:
            return
        if len(self._runs.layers) in apart.drew:
            notes.append(
                "the loss of the mini-batch cannot be compared with those of its micro-batches, "
                "for loss_fn draws random numbers"
            )
            return
        if not apart.apart:
            whole = self._runs.alone(partial(self._runs.loss_of, apart.output))
        run.loss = compare(apart["loss"], {"loss": whole}, self._rounding)
        if not run.loss.same:
            parts, all_at_once = float(apart["loss"]["loss"]), float(whole)
            self._find(
                run,
                f"put together they make {parts:.6g}, all outputs at once {all_at_once:.6g}; "
                "gradients are off likewise",
                "",
                _reason_of_loss(self._runs, parts, all_at_once),
            )

    def _observed(self) -> tuple[Tensor, Exception | None]:
        output, failed = observe(self._runs, self._seen)
        return self._runs.loss_of(output), failed

    def _expected(self, order: tuple[int, ...]) -> Result:
        if order not in self._plain:
            self._plain[order] = self._runs.plain(order)
        return self._plain[order]

    # --- runs beside it --------------------------------------------------------------------------

    def _run(self, name: str, kind: str, beside: str) -> Run:
        self._report.runs.append(Run(name, beside, kind))
        return self._report.runs[-1]

    def _tried(self, run: Run, make: Callable[[], Result]) -> Result | None:
        """The result; None if it failed."""
        try:
            return make()
        except Exception as error:
            self._fail(run, error)
            return None

    def _fail(self, run: Run, error: Exception) -> None:
        notes = "; ".join(getattr(error, "__notes__", ()))
        words = f"{type(error).__name__}: {error}"
        run.error = words + (f" ({notes})" if notes else "")
        reason = _reason_of_error(run.error, self._seen)
        self._find(run, f"raised {run.error}", "", reason, words)

    def _compared(self, run: Run, make: Callable[..., Result], order: tuple[int, ...]) -> None:
        """Runs the pipe beside the plain model; says what differs, where first, and why."""
        if (found := self._tried(run, make)) is None:
            return
        expected = self._expected(order)
        for column in COLUMNS:
            setattr(run, column, compare(found[column], expected[column], self._rounding))
        if not run.different:
            return
        where, culprit = "", next((o for o in self._seen if o.suspicious), None)
        names = {name.split(".")[0] for name in run.gradients.names}
        if culprit is not None:
            where = f"{culprit.layer}"
        elif off := [layer for layer in self._runs.layers if layer.name in names]:
            where = f"{off[-1]}, by its gradients"  # the last one goes back first
        reason = "not found: each layer gives the same in the pipe as plainly"
        column = run.different[0]
        what = f"{column} differ from the plain model's, {_far(getattr(run, column))}"
        self._find(run, what, where, reason if culprit is None else culprit.reason(cut=False))

    def _find(self, run: Run, what: str, where: str, reason: str, error: str = "") -> None:
        """One finding for all runs of the pipe in which it is the same."""
        who = "" if run.kind == "pipe" else run.name
        new = Finding([], what, where, reason)
        finding = self._findings.setdefault((who, where, reason, error), new)
        finding.runs.append(run.name)
        if finding is new:
            self._report.findings.append(new)


def _reason_of_loss(runs: Runs, parts: float, whole: float) -> str:
    """Why the losses of micro-batches, put together, are not the loss of the mini-batch."""
    close, m, reduction = 1e-3 * abs(whole), runs.m, runs.loss.reduction
    if reduction == "mean" and abs(parts * m - whole) <= close:
        return "the loss is a sum over samples, and was taken for a mean: loss_reduction='sum'"
    if reduction == "sum" and abs(parts - whole * m) <= close * m:
        return "the loss is a mean over samples, and was taken for a sum: loss_reduction='mean'"
    if runs.loss.exact:
        return "the outputs of micro-batches are not parts of those of the mini-batch"
    return (
        "the loss is no mean over samples. A mean over what is not masked needs weight=, such as "
        "weight=lambda target: (target != -100).sum(), or (loss, weight) from loss_fn; PyTorch's "
        "own cross entropy needs nothing, if it is given itself and not in a lambda; a loss that "
        "compares samples with each other needs them all: loss_fn(pipe(input), target)"
    )


def _reason_of_error(error: str, seen: Sequence[Observation]) -> str:
    """Why a run failed, as far as the layers tell by what they do in plain runs."""
    if "more than 1 value per channel" in error:
        return (
            "BatchNorm needs two samples at least in each micro-batch, and the last one is smaller "
            "than the others: drop_last=True for the loader, or a batch size that chunks divides"
        )
    writers = ", ".join(str(o.layer) for o in seen if o.writes)
    if "place" in error and writers:
        return f"a layer works in place: {writers}; let it work on a copy (inplace=False)"
    changed = {
        kind: ", ".join(
            f"{o.layer}: {', '.join(o.changed[kind])}" for o in seen if kind in o.changed
        )
        for kind in ("buffer", "attribute", "generator")
    }
    if "inplace operation" in error and changed["buffer"]:
        return (
            "a layer modifies in place what the backward of an earlier micro-batch needs "
            f"({changed['buffer']}): let it use a copy (self.buffer.clone()) for what it computes"
        )
    state = changed["attribute"] or changed["generator"]
    return "the message says it" + (
        f"; there are layers that keep state ({state})" if state else ""
    )


def _far(comparison: Comparison) -> str:
    """How different, and what."""
    if comparison.words:
        return f"{comparison.at}: {comparison.words}"
    more = f" and {len(comparison.names) - 1} more" if len(comparison.names) > 1 else ""
    return f"{comparison.at}{more} by up to {comparison.distance:.1e} of its largest value"


def _worst(found: Sequence[Comparison]) -> Comparison:
    order = ["none", "equal", "rounding", "different"]
    worst = max(found, key=lambda c: (order.index(c.status), c.distance), default=Comparison())
    return worst


def _rounding(runs: Runs) -> float:
    """What passes for rounding, because of where and in what it is computed."""
    devices = {layer.device.type for layer in runs.layers}
    tensors = [p for layer in runs.layers for p in layer.module.parameters()]
    coarse = any(p.is_floating_point() and p.dtype.itemsize < 4 for p in tensors)
    if coarse or any(torch.is_autocast_enabled(kind) for kind in devices):
        return 5e-2
    return _ON_ACCELERATORS if devices - {"cpu"} else 0.0
