"""``verify``: a check to run before the first long training.

It compares runs of the plain model with runs of the pipe under its drivers and schedules.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from syncpipe.compare import Comparison, compare
from syncpipe.data.batch_classes import batch_kind, cut_batch
from syncpipe.data.batches import gather, scatter_pair
from syncpipe.data.trees import by_name, described, flatten, map_tensors, unflatten
from syncpipe.data.uncut import NoChunk
from syncpipe.layers.conversion.origin import Origin
from syncpipe.layers.conversion.sequential import Converted, values_of
from syncpipe.layers.conversion.signature import batch_input, call_arguments, common_outputs
from syncpipe.options import checked_schedule
from syncpipe.pipe import Pipe
from syncpipe.runtime.errors import annotate
from syncpipe.runtime.graph import nodes_of
from syncpipe.runtime.interrupts import with_swaps
from syncpipe.runtime.streams import same_memory
from syncpipe.runtime.thread_state import INLINE
from syncpipe.schedules.named import SCHEDULES, ScheduleLike, build, schedule_label
from syncpipe.schedules.schedule import Schedule
from syncpipe.state import State, restoring_module
from syncpipe.storage import clones
from syncpipe.training.loaders import input_and_target
from syncpipe.training.loss import Objective
from syncpipe.training.loss_check import LossCheck, LossCounts
from syncpipe.training.loss_function import Loss, known_loss
from syncpipe.training.sources import Source
from syncpipe.verification.plain import (
    Observation,
    PlainRun,
    layers_of,
    observe,
    placed,
    without_draws,
)
from syncpipe.verification.report import COLUMNS, Report, Run

__all__ = ["verify"]

_PLAIN = "the plain model, micro-batches beside the mini-batch"
_LOSS = "the plain model, a loss for each micro-batch beside one for all"
_MODEL = "the layers beside the model that they were made of"
_PIPE = "the pipe beside the plain model on micro-batches"
_UNCOMPARED = "gradients of the mini-batch were not compared with those of its micro-batches"
_ADDS = (
    "something adds to gradients, or changes them, in backward (a balance loss of experts, a "
    "hook): once for each micro-batch, whatever its share of the loss. Divide it by the number of "
    "micro-batches, or return the other loss beside the output, for loss_fn to add"
)
_SUMS = 1e-3  #: relative error that sums in another order may have
_T = TypeVar("_T")
Values = dict[str, dict[str, Any]]  # values by name for each column of the report


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
    """Check that a pipe computes what its layers compute without it, and report why if not.

    The plain layers run one after another, on the mini-batch and on its micro-batches. Then the
    pipe runs: ``pipe(x)`` with ``loss.backward()``, and ``train_batch`` under every schedule that
    its devices allow. All runs start from the same weights, buffers, inputs and random state. Their
    outputs, losses, gradients and buffers are compared::

        report = syncpipe.verify(pipe, input, target, loss_fn=F.cross_entropy)
        print(report)
        assert report.ok

    A mini-batch of few samples suffices. The check takes five to seven steps of the plain model,
    without recomputation, and one step of the pipe per schedule. It keeps copies of weights,
    buffers and gradients in CPU memory. Random layers draw the same numbers in the plain model as
    in the pipe, but not the same for micro-batches as for the mini-batch.

    Weights, buffers, gradients, modes, other attributes of the modules, and random states are
    restored, also after an error or Ctrl-C. Post-accumulate-grad hooks (of optimizers that step
    during backward) do not run.

    Args:
        pipe: the pipe, in the mode to check, usually ``train()``.
        input, target, loss_fn, weight, loss_reduction: as for ``train_batch``.
        schedules: names, schedules, or functions that make them, or one of these. None: all named
            schedules, and the pipe's own.

    Returns:
        The report, to be printed. ``ok``: whether all runs are equal, at least up to rounding.

    Raises:
        TypeError, ValueError: an argument does not fit. Errors of the layers on the whole
            mini-batch propagate. Errors of later runs are in the report.
        RuntimeError: it is called in ``torch.inference_mode``.
    """
    if not isinstance(pipe, Pipe):
        raise TypeError(
            f"verify takes a syncpipe.Pipe, not {type(pipe).__name__}: give the pipe itself, "
            "for example the .module of a DistributedDataParallel"
        )
    pipe._check_own_calls("verify")
    if not pipe._is_single_process():
        raise ValueError(
            "the pipe is data-parallel, so its gradients are not those of its layers here: verify "
            "it before data_parallel, or verify a copy (copy.deepcopy), which is not data-parallel"
        )
    if torch.is_inference_mode_enabled():
        raise RuntimeError("verify needs gradients: call it outside of torch.inference_mode")
    if isinstance(input, Iterator | DataLoader):
        raise TypeError(
            f"verify checks one mini-batch, and input is a {type(input).__name__}, which gives "
            "several: input, target = next(iter(loader))"
        )
    loss = known_loss(loss_fn, loss_reduction, weight)
    if isinstance(schedules, str | os.PathLike | Schedule) or callable(schedules):
        schedules = [schedules]
    named = [*SCHEDULES, *(own for own in [pipe.schedule] if own not in [*SCHEDULES])]
    asked = named if schedules is None else list(map(checked_schedule, schedules))
    options = {"loss_fn": loss_fn, "weight": weight, "loss_reduction": loss_reduction}
    with pipe._build().training_lock:  # excludes training in other threads

        def run() -> Report:
            pipe._source(input, target, None)  # raises what train_batch would raise
            pair = input_and_target(input, target)
            return _Check(pipe, *pair, loss, options).report(asked)

        # This call is no training: the checks of the first call of train_batch are still to come.
        return with_swaps(
            [(pipe, "_loss_counts", LossCounts()), (pipe, "_time_checked", True)], run
        )


class _Check:
    """One call of :func:`verify`. Each run restores the state of the modules."""

    def __init__(
        self, pipe: Pipe, input: Any, target: Any, loss: Loss, options: dict[str, Any]
    ) -> None:
        self._pipe, self._pipeline = pipe, pipe._build()
        self._input, self._target = input, target
        self._loss, self._options = loss, options
        self._layers = layers_of(self._pipeline)
        self._m = self._source(pipe.chunks).m
        self._model = nn.Module()  # gives tied tensors their first name
        self._model._modules.update({layer.name: layer.module for layer in self._layers})
        if isinstance(loss.function, nn.Module):
            self._model._modules["loss_fn"] = loss.function
        stages = {f"stage {each.stage.j}": each.stage.partition for each in self._layers}
        modules: dict[str, Any] = {**stages, **self._model._modules}
        self._state = State(modules, leave=[pipe])
        self._other_leaves: list[Tensor] = []  # leaves that belong to no layer
        # The last bit depends on the number of threads, and CPU workers share the threads.
        self._threads_each = self._threads = torch.get_num_threads()
        self._devices = list(dict.fromkeys(each.stage.device for each in self._layers))
        kinds = {device.type for device in self._devices}
        if len(self._pipeline.workers) > 1 and not INLINE.get() and kinds == {"cpu"}:
            self._threads_each = self._pipeline.engine.share()
        self._rounding = 5e-3 if kinds - {"cpu"} else 0.0  # for TF32 and sums in any order
        half = any(p.is_floating_point() and p.itemsize < 4 for p in self._model.parameters())
        if half or any(map(torch.is_autocast_enabled, kinds)):
            self._rounding = 5e-2
        self._observed: list[Observation] = []
        self._known: dict[tuple[int, ...], Values] = {}  # by the order of backward
        self._leaf_rows: list[list[Any]] = []  # the leaves of the outputs of micro-batches
        self._unjoined = ""  # why outputs of micro-batches cannot be concatenated
        self._loss_draws, self._loss_differs = False, ""
        replicas = f"replicas={pipe.replicas}, " if max(pipe.replicas) > 1 else ""
        self._report = Report(
            f"syncpipe.verify: {len(pipe)} layers on {', '.join(map(str, pipe.devices))}; "
            f"balance={pipe.balance}, {replicas}{self._m} micro-batches, "
            f"checkpoint={pipe.checkpoint!r}{'' if pipe.training else ', in eval() mode'}"
        )

    def report(self, schedules: list[ScheduleLike]) -> Report:
        self._check_layers()
        self._check_conversion()
        with self._run("loss of each micro-batch", _LOSS) as run:
            self._expected(tuple(range(self._m)))
            if not self._loss_draws:
                run.comparisons["loss"] = Comparison("different" if self._loss_differs else "equal")
            if self._loss_differs:
                run.what = "losses differ from that of the mini-batch"
                run.reason = self._loss_differs
            elif self._m > 1:
                self._compare_gradients(run)
        self._compare("pipe(x)", tuple(reversed(range(self._m))), self._forward)
        for schedule in schedules:
            name = schedule_label(schedule).strip("'")
            try:
                plan = build(schedule, self._m, self._pipeline.placement)
            except ValueError as error:
                with self._run(name) as run:
                    run.not_applicable = str(error)
                continue
            last = [a for row in plan.actions for a in row if a.j == plan.n - 1]
            order = tuple([a.i for a in last if a.kind in ("backward", "backward_input")])
            self._compare(name, order, partial(self._train, schedule))
        return self._report

    def _check_layers(self) -> None:
        """Compare each layer's outputs for micro-batches with those for the mini-batch."""
        cut = self._source(self._pipe.chunks)
        given = self._source(1).pull(0), [cut.pull(i) for i in range(cut.m)], self._pipe
        run_layers = partial(observe, self._layers, *given, self._observed)
        failed = self._isolated(run_layers, "on the whole mini-batch")
        with self._run("micro-batches", _PLAIN) as run:
            quiet = [each for each in self._observed if not each.uncompared]
            differing = next((each for each in quiet if not each.comparison.same), None)
            if differing is not None:
                run.what = f"outputs differ from the mini-batch's, {_shown(differing.comparison)}"
                run.where, run.reason = str(differing.layer), differing.reason()
            found = [each.comparison for each in ([differing] if differing else quiet)]
            worst = max(found, key=lambda comparison: comparison.distance, default=Comparison())
            run.comparisons["outputs"] = worst
            self._report.uncompared = [str(x.layer) for x in self._observed if x.uncompared]
            if failed is not None:
                raise failed

    def _check_conversion(self) -> None:
        """Compare converted layers with their model, if it still exists."""
        layers: Any = Converted(*(layer.module for layer in self._layers))
        origin = getattr(layers[0], "_origin", Origin())
        if (model := origin.modules.get("")) is None:
            return
        with self._run("the model", _MODEL) as run:
            if not all(same_memory(t.device, self._devices[0]) for t in layers.parameters()):
                run.not_applicable = "its layers are on several devices, where it cannot be"
                return
            origin.share()
            input = self._source(self._pipe.chunks).pull(0)

            def values(module: nn.Module) -> dict[str, Any]:
                call = partial(call_arguments, layers, _copy(input))
                return restoring_module(module, partial(values_of, module, call))

            found = self._isolated(partial(values, layers), "its layers beside the model")
            expected = self._isolated(partial(values, model), "itself")
            run.comparisons["outputs"] = far = compare(found, expected, self._rounding)
            if run.different:
                run.what = f"something else than the model gives, {_shown(far)}"
                run.reason = (
                    "the model was changed after its conversion in something that is no attribute "
                    "of its modules (a global, a function): convert it again"
                )

    def _compare(self, name: str, order: tuple[int, ...], make: Callable[[], Values]) -> None:
        """Compare a run of the pipe with the plain model, and report a difference and its cause."""
        with self._run(name) as run:
            expected = self._expected(order)
            threads = self._threads if name == "pipe(x)" else None
            if threads and self._unjoined:
                why = f"outputs cannot be joined, and are not compared: {self._unjoined}"
                run.not_applicable = why
                return
            made = self._state.restoring(make, self._devices, threads)
            # In pipe(x) the tensors of common outputs get one gradient, the sum of all.
            rounding = max(self._rounding, 1e-5 if threads and self._common else 0.0)
            for column in COLUMNS:
                run.comparisons[column] = compare(made[column], expected[column], rounding)
            if not run.different:
                return
            column = run.different[0]
            run.what = f"{column} differ from the plain model's, {_shown(run.comparisons[column])}"
            run.where, reason = self._culprit()
            run.where = run.where or self._by_gradients(run.comparisons["gradients"])
            run.reason = reason or "not found: each layer gives the same in the pipe as plainly"

    # --- findings --------------------------------------------------------------------------------

    @contextmanager
    def _run(self, name: str, beside: str = _PIPE) -> Iterator[Run]:
        """A run of the report, which catches and reports exceptions."""
        self._report.runs.append(run := Run(name, beside, beside == _PIPE))
        try:
            yield run
        except Exception as error:
            run.error = words = f"{type(error).__name__}: {error}"
            notes = "; ".join(getattr(error, "__notes__", ()))
            run.what = f"raised {words}" + (f" ({notes})" if notes else "")
            changed = "place" in words or "recomput" in words
            run.where, reason = self._culprit() if changed else ("", "")
            if "more than 1 value per channel" in words:
                reason = (
                    "BatchNorm needs two samples at least in each micro-batch, and the last one is "
                    "smaller than the others: drop_last=True for the loader, or a batch size that "
                    "chunks divides"
                )
            run.reason = reason or "see the message"

    def _culprit(self) -> tuple[str, str]:
        """The first layer whose results a pipe can change, and the reason."""
        for each in self._observed:
            if each.writes or (not each.repeats and "buffer" not in each.changed):
                return str(each.layer), each.reason()
        return "", ""

    # --- runs ------------------------------------------------------------------------------------

    def _isolated(self, run: Callable[[], _T], on: str) -> _T:
        try:
            return self._state.restoring(run, self._devices, self._threads_each)
        except BaseException as error:
            annotate(error, f"in verify: the plain model, {on}")
            raise

    def _expected(self, order: tuple[int, ...]) -> Values:
        if order not in self._known:
            self._known[order] = self._isolated(partial(self._plain, order), "on micro-batches")
        return self._known[order]

    def _compare_gradients(self, run: Run) -> None:
        """Compare gradients of micro-batches with the mini-batch's, if the losses are equal.

        Modules found to draw random numbers are in evaluation mode meanwhile.
        """
        if not all(
            (each.uncompared or each.comparison.same) and (each.draws or each.repeats)
            for each in self._observed
        ):
            return
        drawing = [each.layer.module for each in self._observed if each.draws]
        quiet = [swap for module in drawing for swap in without_draws(module)]
        found: list[Values] = []
        for order, chunks in ((range(self._m), self._pipe.chunks), ((0,), 1)):
            plain = partial(with_swaps, quiet, partial(self._plain, order, chunks))
            try:
                found.append(self._isolated(plain, "on the whole mini-batch"))
            except Exception as error:
                self._report.notes.append(f"{_UNCOMPARED}: {type(error).__name__}: {error}")
                return
            if self._drew:
                self._report.notes.append(f"{_UNCOMPARED}: random numbers are drawn")
                return
        rounding = max(_SUMS, self._rounding)
        columns = ["loss"] if self._unjoined else ["loss", "outputs"]
        parts, whole = found
        if all(compare(parts[c], whole[c], rounding).same for c in columns):
            # Some micro-batches may not use the leaves that belong to no layer.
            own = dict(self._model.named_parameters())
            mine = [{n: g for n, g in v["gradients"].items() if n in own} for v in found]
            far = compare(mine[0], mine[1], rounding)
            run.comparisons["gradients"] = far
            if not far.same:
                run.what = f"gradients differ from the mini-batch's, {_shown(far)}"
                run.where, run.reason = self._by_gradients(far), _ADDS

    def _by_gradients(self, comparison: Comparison) -> str:
        """The last layer whose gradients differ: its backward runs first."""
        names = {name.split(".")[0] for name in comparison.names}
        differing = [layer for layer in self._layers if layer.name in names]
        return f"{differing[-1]}, by its gradients" if differing else ""

    def _plain(self, order: Sequence[int], chunks: int | None = None) -> Values:
        """Run the plain model, with the backward of micro-batches in ``order``."""
        inputs, given = self._leaves_of_input()
        source = self._source(self._pipe.chunks if chunks is None else chunks, given)
        run = PlainRun(self._layers)
        # Given weights are per micro-batch, and the mini-batch as a whole needs none.
        loss = self._loss if source.m == self._m else replace(self._loss, weigh=None)
        objective = Objective(loss, source)
        check = LossCheck(objective, source.targets, asked=False) if source.m > 1 else None
        outputs = [run.forward(i, map_tensors(clones, source.pull(i))) for i in range(source.m)]
        kept = list(map(_copy, outputs))
        if source.m == self._m:
            self._leaf_rows = [flatten(each, batches=True)[0] for each in kept]
        if check is not None:
            for i, output in enumerate(kept):
                check.keep(i, output, source.peek_target(i))
        self._loss_run = partial(run.seeded, len(self._layers))  # pipe(x) draws the same
        roots = self._roots(objective, source, outputs)
        self._find_leaves(roots, inputs)
        for i in order:
            if roots[i].requires_grad:
                torch.autograd.backward(roots[i])
            for leaf in self._state.leaves:  # first gradients of two leaves may share memory
                leaf.grad = None if leaf.grad is None else leaf.grad.clone()
        run.statistics.commit()
        self._loss_draws, self._drew = len(self._layers) in run.drew, bool(run.drew)
        found = None if check is None or self._loss_draws else check.compare(self._common)
        if found is not None and found.wrong:
            # The last sentence names an argument of train_batch that verify does not have.
            self._loss_differs = found.text.rsplit(" If ", 1)[0]
        try:
            output = gather(kept, self._common)
        except ValueError as error:
            output, self._unjoined = {}, str(error)
        return self._values(output, objective, inputs)

    def _forward(self) -> Values:
        inputs, given = self._leaves_of_input()
        args, kwargs = call_arguments(self._pipe, given)
        output = self._pipe(*args, **kwargs)
        kept, source = _copy(output), self._source(self._pipe.chunks)
        objective, sizes = Objective(self._loss, source), source.sizes
        leaves, structure = flatten(output, batches=True)

        def cut(k: int, leaf: Any) -> Sequence[Any]:
            if k in self._common or not isinstance(leaf, Tensor) or len(sizes) == 1:
                return cut_batch(leaf, sizes) if batch_kind(leaf) else [leaf] * len(sizes)
            return torch.split(leaf, [len(rows[k]) for rows in self._leaf_rows])

        torch.set_num_threads(self._threads_each)
        columns = [cut(k, leaf) for k, leaf in enumerate(leaves)]
        pieces = [  # cloned as in the plain model: alignment can change the last bit
            map_tensors(lambda ts: [t.clone() for t in ts], unflatten(row, structure))
            for row in zip(*columns, strict=True)
        ]
        roots = self._roots(objective, source, pieces)
        torch.set_num_threads(self._threads)
        torch.autograd.backward([root for root in roots if root.requires_grad])
        return self._values(kept, objective, inputs)

    def _train(self, schedule: Any) -> Values:
        inputs, given = self._leaves_of_input()
        outputs = not self._unjoined
        options = {**self._options, "schedule": schedule, "verify": False}
        target = _copy(self._target)
        found = self._pipe.train_batch(given, target, return_outputs=outputs, **options)
        found = found if isinstance(found, tuple) else (found,)
        return self._values(found[1] if outputs else {}, found[0], inputs)

    @property
    def _common(self) -> Collection[int]:
        return common_outputs(self._layers[-1].stage.partition)

    # --- inputs, losses, gradients ---------------------------------------------------------------

    def _source(self, chunks: int, input: Any = None) -> Source:
        """The mini-batch cut into ``chunks`` micro-batches; a copy of it if ``input`` is None."""
        input = _copy(self._input) if input is None else input
        return Source(*scatter_pair(batch_input(self._pipe, input), _copy(self._target), chunks))

    def _leaves_of_input(self) -> tuple[dict[str, Tensor], Any]:
        """The leaves of a copy of the input by name, and the input, into which layers may write."""
        input = _copy(self._input)
        inputs = {
            name: leaf.requires_grad_()
            for name, leaf in by_name("input", input).items()
            if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())
        }
        return inputs, map_tensors(clones, input)

    def _roots(self, objective: Objective, source: Source, outputs: list[Any]) -> list[Tensor]:
        """The tensors from which the backward of each micro-batch starts."""
        device = self._layers[-1].stage.device
        objective.known_weights = placed(objective.known_weights, device)
        roots = []
        for i, output in enumerate(outputs):
            given = output, placed(source.target(i), device)
            result = self._loss_run(i, objective.call_loss, given)
            roots.append(objective.root(i, result, *given))
        return roots

    def _find_leaves(self, roots: list[Tensor], inputs: dict[str, Tensor]) -> None:
        known = set(map(id, [*self._state.leaves, *inputs.values()]))
        for node in nodes_of([root.grad_fn for root in roots]):
            leaf = getattr(node, "variable", None)
            if leaf is not None and id(leaf) not in known:
                self._state.add_leaf(leaf)
                leaf.grad = None
                self._other_leaves.append(leaf)

    def _values(self, output: Any, loss: Tensor | Objective, inputs: dict[str, Tensor]) -> Values:
        """All values of a run, with the gradients of the mini-batch, in CPU memory."""
        if isinstance(loss, Objective):
            factor, loss = loss.factor(), loss.loss()
            for leaf in [] if factor is None else [*self._state.leaves, *inputs.values()]:
                if leaf.grad is not None:  # the total weight is known only at the end
                    leaf.grad.mul_(placed(factor, leaf.device))
        leaves: dict[str, Tensor] = dict(self._model.named_parameters())
        for k, leaf in enumerate(self._other_leaves):
            leaves[f"tensor {k} of no layer, {described(leaf)}"] = leaf
        found: Values = {
            "outputs": by_name("output", output),
            "loss": {"loss": loss},
            "gradients": {name: x.grad for name, x in leaves.items() if x.grad is not None},
            "input_gradients": {name: x.grad for name, x in inputs.items() if x.grad is not None},
            "buffers": dict(self._model.named_buffers()),
        }
        copied: Values
        copied = map_tensors(lambda ts: [t.detach().to("cpu", copy=True) for t in ts], found)
        return copied


def _copy(tree: Any) -> Any:
    """A detached copy with the same memory layout."""
    leaves, structure = flatten(tree)
    leaves = [NoChunk(_copy(x.tensor)) if isinstance(x, NoChunk) else x for x in leaves]
    return map_tensors(lambda ts: clones([t.detach() for t in ts]), unflatten(leaves, structure))


def _shown(comparison: Comparison) -> str:
    if comparison.words:
        return f"{comparison.at}: {comparison.words}"
    more = f" and {len(comparison.names) - 1} more" if len(comparison.names) > 1 else ""
    return f"{comparison.at}{more} by up to {comparison.distance:.1e} of its largest value"
