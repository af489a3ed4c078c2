"""``verify``: the check that a user can run before the first long training."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Literal

import torch

from syncpipe.compare import Comparison, compare
from syncpipe.options.arguments import checked_schedule
from syncpipe.pipe import Pipe
from syncpipe.runtime.errors import annotate
from syncpipe.schedules.build import AUTO, SCHEDULES, ScheduleLike, build, shown
from syncpipe.schedules.schedule import Schedule
from syncpipe.training.loss.known import Loss, known_loss
from syncpipe.training.sources import input_and_target
from syncpipe.verification.observe import Observation, Prints, observe
from syncpipe.verification.plain import Layer
from syncpipe.verification.reasons import far, reason_of_error, reason_of_layer, reason_of_loss
from syncpipe.verification.report import COLUMNS, Finding, Report, Run
from syncpipe.verification.runs import Result, Runs, orders_of

__all__ = ["verify"]

_PLAIN = "the plain model, micro-batches beside the mini-batch"
_LOSS = "the plain model, a loss for each micro-batch beside one for all"
_PIPE = "the pipe beside the plain model on micro-batches"
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
    """Checks that a pipe computes what its layers compute by themselves, and says why if not.

    The layers are run plainly, one after another, on the whole mini-batch and on its micro-batches;
    then the pipe runs, by ``pipe(x)`` with ``loss.backward()``, and by ``train_batch`` under every
    schedule that its devices allow. All runs start from the same weights, buffers and random
    state; outputs, loss, gradients and buffers are compared::

        report = syncpipe.verify(pipe, input, target, loss_fn=F.cross_entropy)
        print(report)
        assert report.ok

    A mini-batch of few samples will do; it takes about four steps of the plain model, and one of
    the pipe for each schedule. The plain model runs without re-materialization, and copies of
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
    pipe._source(input, target, None)  # refuses what train_batch would refuse
    input, target = input_and_target(input, target)
    options = {"loss_fn": loss_fn, "weight": weight, "loss_reduction": loss_reduction}
    pipeline = pipe._ready()
    with pipeline.training:  # nobody trains it meanwhile
        checked = dict(pipeline.checked)
        try:
            return _Check(Runs(pipe, input, target, loss, options), loss, asked).report()
        finally:  # with these arguments it was checked, not with others
            pipeline.checked = checked


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
    named = isinstance(own, str) and (own in SCHEDULES or own == AUTO)
    return [*SCHEDULES, *([] if named else [own])]


class _Check:
    """One call of :func:`verify`."""

    def __init__(self, runs: Runs, loss: Loss, schedules: list[ScheduleLike]) -> None:
        self._runs, self._loss, self._schedules = runs, loss, schedules
        self._apart: dict[tuple[int, ...], Result] = {}
        self._seen: list[Observation] | None = None
        self._findings: dict[tuple[str, ...], Finding] = {}
        self._rounding = _rounding(runs)
        pipe = runs.pipe
        devices = ", ".join(map(str, pipe.devices))
        self._report = Report(
            f"syncpipe.verify: {len(pipe)} layers on {devices}; balance={pipe.balance}, "
            f"{pipe._shown_replicas()}"
            f"{runs.m} micro-batches, checkpoint={pipe.checkpoint!r}"
        )

    def report(self) -> Report:
        runs, report = self._runs, self._report
        try:
            whole = runs.together(1)
        except BaseException as error:
            annotate(error, "in verify: the plain model, on the whole mini-batch")
            raise
        run = self._run("micro-batches", "plain", _PLAIN)
        together = self._tried(run, partial(runs.together, runs.pipe.chunks))
        if together is not None:
            self._beside_whole(run, together, whole)
            self._losses(together)
            run = self._run("pipe(x)", "pipe", _PIPE)
            if (found := self._tried(run, runs.forward)) is not None:
                self._compared(run, found, together)
                self._explained(run, runs.forward, [runs.m - 1])
        del whole, together
        for schedule in self._schedules:
            self._under(schedule)
        if not runs.pipe.training:
            report.notes.append(
                "the pipe is in eval() mode, and was checked in that: call train() first to check "
                "what training does"
            )
        return report

    # --- runs ------------------------------------------------------------------------------------

    def _run(self, name: str, kind: Literal["plain", "pipe"], beside: str) -> Run:
        self._report.runs.append(Run(name, kind, beside))
        return self._report.runs[-1]

    def _beside_whole(self, run: Run, together: Result, whole: Result) -> None:
        if not together.drew or self._runs.m == 1:
            self._compared(run, together, whole)
        else:
            run.outputs = _worst([o for o in self._observed() if not o.draws])
            who = [o.layer for o in self._observed() if o.draws]
            self._report.notes.append(
                "the mini-batch as a whole cannot be compared with its micro-batches, for random "
                f"numbers are drawn by {', '.join(map(str, who))}: instead each other layer was, "
                "by itself, on the same inputs"
            )
        if not run.different:
            return
        off = [o for o in self._observed() if not o.draws and o.comparison.status == "different"]
        culprit = next(iter(off), None)
        column = run.different[0]
        what = f"{column} differ from the mini-batch's, {far(getattr(run, column))}"
        if culprit is None:
            reason = "not found: each layer by itself gives the same for both"
            self._find(run, what, self._last(run), reason)
        else:
            self._find(run, what, str(culprit.layer), reason_of_layer(culprit, by="cut"))

    def _losses(self, together: Result) -> None:
        """Whether the losses of micro-batches make that of the mini-batch."""
        run = self._run("loss of each micro-batch", "plain", _LOSS)
        order = tuple(range(self._runs.m))
        apart = self._tried(run, lambda: self._in_order(order))
        if apart is None:
            return
        self._compared(run, apart, together)
        if len(self._runs.layers) in apart.drew:
            run.loss = run.gradients = run.input_gradients = Comparison("none")
            self._report.notes.append(
                "the loss of the mini-batch cannot be compared with those of its micro-batches, "
                "for loss_fn draws random numbers"
            )
        if run.outputs.status == "different":
            what = "outputs differ from those of another plain run"
            self._find(run, what, "", "a layer does not give the same twice, see above")
        elif run.different:
            parts, all_at_once = (float(r.loss["loss"]) for r in (apart, together))
            self._find(
                run,
                f"put together they make {parts:.6g}, all outputs at once {all_at_once:.6g}; "
                "gradients are off likewise",
                "",
                reason_of_loss(
                    parts, all_at_once, self._runs.m, self._loss.reduction, self._loss.exact
                ),
            )

    def _under(self, schedule: ScheduleLike) -> None:
        run = self._run(shown(schedule).strip("'"), "pipe", _PIPE)
        pipeline = self._runs.pipeline
        try:
            plan = build(schedule, self._runs.m, pipeline.placement)
        except ValueError as error:
            run.not_applicable = str(error)
            return
        orders = orders_of(plan)
        expected = self._tried(run, partial(self._expected, orders))
        if expected is None:
            return
        train = partial(self._runs.train, schedule)
        if (found := self._tried(run, train)) is not None:
            self._compared(run, found, expected)
            self._explained(run, train, orders[-1])

    def _in_order(self, order: tuple[int, ...]) -> Result:
        if order not in self._apart:
            self._apart[order] = self._runs.apart(order)
        return self._apart[order]

    def _expected(self, orders: list[tuple[int, ...]]) -> Result:
        """The plain model, whose gradients add up on each stage in the order of that stage."""
        results = [self._in_order(order) for order in orders]
        stage_of = {layer.name: layer.stage.j for layer in self._runs.layers}
        last = results[-1]
        gradients = {
            name: results[stage_of.get(name.split(".")[0], -1)].gradients[name]
            for name in last.gradients
        }
        return Result(last.outputs, last.loss, gradients, results[0].input_gradients, last.buffers)

    def _tried(self, run: Run, make: Callable[[], Result]) -> Result | None:
        """The result; None if it failed."""
        try:
            return make()
        except Exception as error:
            notes = "; ".join(getattr(error, "__notes__", ()))
            words = f"{type(error).__name__}: {error}"
            run.error = words + (f" ({notes})" if notes else "")
        reason = reason_of_error(run.error, self._observed())
        self._find(run, f"raised {run.error}", "", reason, words)
        return None

    # --- what differs ----------------------------------------------------------------------------

    def _compared(self, run: Run, found: Result, expected: Result) -> None:
        for column in COLUMNS:
            comparison = compare(getattr(found, column), getattr(expected, column), self._rounding)
            setattr(run, column, comparison)

    def _explained(self, run: Run, make: Callable[[Any], Result], order: Sequence[int]) -> None:
        """Says what differs in a run of the pipe, and why."""
        if not run.different:
            return
        where, culprit, again = self._last(run), None, False
        if (other := self._first_other(make, order)) is not None:
            layer, again = other
            where = f"{layer}" + (", when it is recomputed" if again else "")
            culprit = next((o for o in self._observed() if o.layer == layer), None)
        if culprit is None:
            reason = "not found: each layer gives the same in the pipe as plainly"
        else:
            reason = reason_of_layer(culprit, by="recomputation" if again else "pipe")
        column = run.different[0]
        what = f"{column} differ from the plain model's, {far(getattr(run, column))}"
        self._find(run, what, where, reason)

    def _first_other(
        self, make: Callable[[Any], Result], order: Sequence[int]
    ) -> tuple[Layer, bool] | None:
        """The first layer that gives something else in the pipe; once more, and watched."""
        plain, ours = Prints(), Prints()
        try:
            self._runs.apart(order, plain.watch)
            make(ours.watch)
        except Exception:  # in the loss of a micro-batch, say, of which another run tells
            return None
        return ours.first_other(plain, self._runs.layers)

    def _find(self, run: Run, what: str, where: str, reason: str, error: str = "") -> None:
        """One finding for all runs of the pipe in which it is the same."""
        who = "" if run.kind == "pipe" else run.name
        new = Finding([], what, where, reason)
        finding = self._findings.setdefault((who, where, reason, error), new)
        finding.runs.append(run.name)
        if finding is new:
            self._report.findings.append(new)

    def _last(self, run: Run) -> str:
        """The last layer whose gradients differ: it is the first one that goes back."""
        layers = {layer.name: layer for layer in self._runs.layers}
        names = {name.split(".")[0] for name in run.gradients.names}
        off = [layer for name, layer in layers.items() if name in names]
        return f"{off[-1]}, by its gradients" if off else ""

    def _observed(self) -> list[Observation]:
        if self._seen is None:
            try:
                self._seen = observe(self._runs)
            except Exception:  # micro-batches that the layers do not take
                self._seen = []
        return self._seen


def _worst(seen: list[Observation]) -> Comparison:
    order = ["none", "equal", "rounding", "different"]
    return max(
        (o.comparison for o in seen),
        key=lambda c: (order.index(c.status), c.distance),
        default=Comparison("none"),
    )


def _rounding(runs: Runs) -> float:
    """What passes for rounding, because of where and in what it is computed."""
    devices = {layer.device.type for layer in runs.layers}
    found = 0.0
    if devices - {"cpu"}:
        found = _ON_ACCELERATORS
    tensors = [p for layer in runs.layers for p in layer.module.parameters()]
    coarse = any(p.is_floating_point() and p.dtype.itemsize < 4 for p in tensors)
    if coarse or any(torch.is_autocast_enabled(kind) for kind in devices):
        found = 5e-2
    return found
