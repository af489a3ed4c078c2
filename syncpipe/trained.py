"""What a pipe does with a mini-batch: ``train_batch``, ``eval_batch``, and the trace of it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import chain
from typing import Any

from torch import distributed, nn

from syncpipe.layers.conversion.sequential import batch_input
from syncpipe.layers.placement import own_call
from syncpipe.options.arguments import check_slots, checked_schedule
from syncpipe.partitioned import Partitioned
from syncpipe.runtime.inline import INLINE, driven
from syncpipe.runtime.locks import forkable
from syncpipe.schedules.build import AUTO, ScheduleLike
from syncpipe.stages.pipeline import Pipeline
from syncpipe.timeline.trace import Trace
from syncpipe.training.loss.check import LossCounts
from syncpipe.training.loss.known import check_arguments
from syncpipe.training.loss.objective import Objective
from syncpipe.training.measured import Measured
from syncpipe.training.sources import Source, source_of
from syncpipe.training.train import Averaging, evaluate, train

__all__ = ["Trained"]

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_building = forkable()


class Trained(Partitioned):
    """Layers on their devices that are trained and evaluated, mini-batch by mini-batch."""

    _chunks: int
    _schedule: ScheduleLike
    _measured: Measured
    _trace: Trace | None
    _loss_counts: LossCounts
    _averaging: Any = None  #: the other processes, if ``syncpipe.distributed`` has found any
    _warned = False  #: that other processes are not averaged with
    _whole: type[nn.Module]  #: the class whose ``forward`` a pipe has

    def train_batch(
        self,
        input: Any = None,
        target: Any = None,
        *unexpected: Any,
        loss_fn: Callable[..., Any] | None = None,
        schedule: ScheduleLike | None = None,
        slots: str | Sequence[int] | None = None,
        loss_reduction: str | None = None,
        weight: Callable[[Any], Any] | Sequence[Any] | None = None,
        data_iter: Iterable[Any] | None = None,
        accumulate: float = 1,
        grad_scaler: Any = None,
        return_outputs: bool = False,
        verify: bool | None = None,
        global_loss: bool = False,
    ) -> Any:
        """Forward and backward of one mini-batch, with the loss inside the pipeline.

        A micro-batch can go back as soon as it has gone forward, so other schedules than
        fill-drain are possible. Gradients add up in ``.grad`` as after ``loss.backward()``; the
        optimizer is the caller's::

            optimizer.zero_grad()
            loss = pipe.train_batch(input, target, loss_fn=F.cross_entropy)
            optimizer.step()

        With 1F1B few micro-batches are in flight at a time, so ``checkpoint="never"`` often costs
        no memory that matters; see docs/guide.md.

        Args:
            input: as for ``pipe(input)``: a tensor of shape ``[batch, ...]`` or a tree, on the
                first device.
            target: the same, on any device; it goes to the last one micro-batch by micro-batch.
                None: the loss function takes the output alone. The key of a dict, or a function
                of the input, takes it from there.
            loss_fn: ``loss_fn(output, target)`` (or ``loss_fn(output)``), called once for each
                micro-batch, on the last device. It returns the loss, one number, or
                ``(loss, weight)``; metrics may follow in a dict. PyTorch's cross entropy counts
                by the targets that are not ignored, any other mean by samples, so that the
                result is the mini-batch's. With weights it is ``sum(loss * weight) /
                sum(weight)``.
            schedule: ``"naive"``, ``"gpipe"``, ``"1f1b"``, ``"zb_h1"``, ``"zb_h2"``; with several
                stages on each device, ``devices=[0, 1, 0, 1]``, ``"looped_bfs"``,
                ``"interleaved_1f1b"``, ``"interleaved_zero_bubble"``; with two on each in a V,
                ``devices=[0, 1, 1, 0]``, ``"zbv"``, ``"v_half"``, ``"v_min"``, ``"dualpipev"``; a
                :class:`syncpipe.schedules.Schedule`, the path of a CSV file
                (``syncpipe.schedules.to_csv``), or a function ``(m, device_of)`` that returns a
                ``Schedule``; or ``"auto"``: one made for what the first calls took, see
                :attr:`auto_schedules`. None: that of the pipe, ``"1f1b"`` if it was given none.
            slots: the most micro-batches in flight on each stage under 1F1B: ``"textbook"``,
                ``"overlap"``, or a list with a number for each stage. It is short for
                ``schedule=functools.partial(syncpipe.schedules.one_f_one_b, slots=slots)``.
            loss_reduction: what ``loss_fn`` does over the samples of a micro-batch, ``"mean"`` or
                ``"sum"``. None: what its ``reduction`` says, ``"mean"`` if it has none.
            weight: how much a micro-batch counts, where that is not by its samples: a function of
                its target, or a number for each.
            data_iter: instead of ``input`` an iterator that yields pairs with the target, longer
                tuples that end in it, or dicts in which ``target`` is its key: micro-batches, on
                any device. Exactly ``chunks`` of them are taken, each when the first stage is
                ready for it, on the thread of that stage. A ``DataLoader`` is asked for one
                mini-batch in each call, epoch after epoch.
            accumulate: how many mini-batches make one optimizer step: gradients are divided by it.
            grad_scaler: a ``torch.amp.GradScaler``, which scales the loss before it goes back
                (the loss that is returned is not scaled).
            return_outputs: return the outputs as well.
            verify: compare the loss with that of several micro-batches at once, and warn if it is
                another one. None: in calls 1, 2, 4, 8, ... with a loss function that is not
                PyTorch's, until there was a warning.
            global_loss: return the loss, and metrics that are numbers, of the mini-batches of all
                processes (:func:`syncpipe.distributed.data_parallel`), not of this one alone.

        Returns:
            The loss of the mini-batch, detached, without dimensions, on the last device. With
            ``return_outputs`` a tuple: the loss, and the outputs gathered as by ``pipe(input)``,
            detached. Metrics come last, as a dict: numbers combined as the losses are, anything
            else as a list with a value for each micro-batch.

        Raises:
            TypeError, ValueError: an argument does not fit, or what the iterator or the loss
                function gave; the message says which.
            RuntimeError: gradients are switched off, or the loss needs none.

        Whatever the call raises, ``.grad`` of all leaves is then what it was before the call,
        and the pipe goes on working. That takes a copy of gradients that are there already when
        the call begins (none after ``zero_grad()``). Buffers such as BatchNorm's statistics, and
        random generators, stay as the failed call left them.

        While the total weight is not known yet, micro-batches go back with an estimate of it, and
        gradients are put right at the end of the call, to rounding: with ``(loss, weight)``, and
        with ``data_iter`` if its micro-batches differ in size. Hooks on parameters see gradients
        of micro-batches, before that.
        """
        options = {
            "loss_reduction": loss_reduction,
            "weight": weight,
            "verify": verify,
            "accumulate": accumulate,
            "grad_scaler": grad_scaler,
            "return_outputs": return_outputs,
        }

        def step(averaging: Averaging | None = None) -> Any:
            function = check_arguments(unexpected, loss_fn)
            source = self._source(input, target, data_iter)
            chosen = self._schedule
            if schedule is not None or slots is not None:
                chosen = checked_schedule("1f1b" if schedule is None else schedule, slots)
            check_slots(chosen, self.replicas)
            return self._step(source, chosen, averaging, loss_fn=function, **options)

        if self._alone(global_loss):
            self._warn_of_other_processes()
            return step()
        return self._averaging.train_batch(step, global_loss=global_loss, accumulate=accumulate)

    def _step(
        self, source: Source, schedule: ScheduleLike, averaging: Averaging | None, **options: Any
    ) -> Any:
        """``train_batch`` of this process."""
        pipeline, how = self._ready(), self._running()
        options |= {"counts": self._loss_counts, "averaging": averaging}
        step = partial(driven, train, pipeline, source, **options, **how)
        if schedule != AUTO:
            return step(schedule=schedule)
        key = how["checkpoint"], how["inline"]
        trace = self._trace or self.trace()
        return driven(self._measured.run, source.m, pipeline.worker_of, key, trace, step)

    def _alone(self, global_loss: bool = False) -> bool:
        """Whether there are no other processes."""
        if self._averaging is None and global_loss:
            raise ValueError(
                "global_loss=True, but this pipe knows of no other processes: "
                "syncpipe.distributed.data_parallel(pipe) makes it one of several"
            )
        return self._averaging is None

    def _warn_of_other_processes(self) -> None:
        """Warns once where ``DistributedDataParallel``, say, would not see a ``train_batch``."""
        if self._warned or not (distributed.is_available() and distributed.is_initialized()):
            return
        if (size := distributed.get_world_size()) > 1:
            self._warned = True
            warnings.warn(
                f"this is one of {size} processes, and train_batch of this pipe averages its "
                "gradients with none of them, also inside of DistributedDataParallel: call "
                "syncpipe.distributed.data_parallel(pipe) instead. If it is to train alone, ignore "
                "this warning",
                stacklevel=3,
            )

    def no_sync(self) -> AbstractContextManager[None]:
        """Several calls before gradients are averaged over processes, by the first one after it::

            with pipe.no_sync():
                pipe.train_batch(a, target_a, loss_fn=loss_fn, accumulate=2)
            pipe.train_batch(b, target_b, loss_fn=loss_fn, accumulate=2)
            optimizer.step()

        For ``train_batch``, and for ``pipe(x)`` inside of it, wherever its ``backward()`` is.

        Raises:
            RuntimeError: there are no other processes.
        """
        if self._alone():
            raise RuntimeError(
                "no_sync() is for a pipe in several processes: make it one of them by "
                "syncpipe.distributed.data_parallel(pipe)"
            )
        return self._averaging.no_sync()  # type: ignore[no-any-return]

    def eval_batch(
        self,
        input: Any = None,
        target: Any = None,
        *,
        loss_fn: Callable[..., Any] | None = None,
        loss_reduction: str | None = None,
        weight: Callable[[Any], Any] | Sequence[Any] | None = None,
        data_iter: Iterable[Any] | None = None,
        global_loss: bool = False,
    ) -> Any:
        """Forward of one mini-batch, without gradients and in ``eval()`` mode.

        By ``eval()`` of the pipe; when it returns every module is in the mode in which it was, by
        its own ``train()``.

        Args:
            input: as for :meth:`train_batch`.
            target: as for :meth:`train_batch`.
            loss_fn: as for :meth:`train_batch`; None to get the outputs.
            loss_reduction: as for :meth:`train_batch`.
            weight: as for :meth:`train_batch`.
            data_iter: as for :meth:`train_batch`.
            global_loss: as for :meth:`train_batch`; then all processes have to call it.

        Returns:
            The loss of the mini-batch, without dimensions, and metrics if there are any; or
            without ``loss_fn`` the outputs, gathered as by ``pipe(input)``. On the last device.

        Raises:
            TypeError, ValueError: as :meth:`train_batch`.
        """

        def step(weighed: Callable[[Objective], None] | None = None) -> Any:
            source = self._source(input, target, data_iter)
            if loss_fn is None and (target is not None or weighed is not None):
                what = "a target" if weighed is None else "global_loss=True"
                raise ValueError(
                    f"eval_batch has {what}, but no loss_fn that could use it: give both"
                )
            return driven(
                evaluate,
                self._ready(),
                source,
                module=self,
                modules=[*self.modules(), *self._partitions],
                loss_fn=loss_fn,
                loss_reduction=loss_reduction,
                weight=weight,
                weighed=weighed,
                **self._running(),
            )

        alone = self._alone(global_loss) or not global_loss
        return step() if alone else self._averaging.eval_batch(step)

    def trace(self, title: str = "") -> Trace:
        """Records what this pipe does, and when::

            with pipe.trace() as trace:
                loss = pipe.train_batch(input, target, loss_fn=loss_fn)
            print(trace.table(), trace.bubble, trace.busy)
            trace.save("step.svg")    # or .png; or .json for https://ui.perfetto.dev

        Every action (forward, backward, its halves, recomputation) and every transfer of
        ``pipe(x)``, of the backward that follows, of ``train_batch`` and ``eval_batch`` is there,
        if it happens before the block ends. A pipe that is not traced does no more than look
        whether it is.

        Args:
            title: stands above pictures.

        Raises:
            RuntimeError: on entering, if the pipe is being traced already.
        """
        workers = dict.fromkeys(chain.from_iterable(self._served))
        names = [str(worker.device) for worker in workers]
        rows = [f"{name} ({w})" if names.count(name) > 1 else name for w, name in enumerate(names)]
        return Trace(rows, self._attach_trace, title)

    def _running(self) -> dict[str, Any]:
        """How to run a mini-batch."""
        return {
            "checkpoint": self._modes if self.training else ("never",) * len(self._balance),
            "inline": INLINE.get(),
            "recorder": None if self._trace is None else self._trace.recorder(),
        }

    def _check_own_calls(self, what: str) -> None:
        """Refuses a pipe without layers, and one whose own hooks or forward would not run."""
        if not self._modules:
            raise ValueError("the pipe has no layers: there is nothing to train or to evaluate")
        own = [kind for kind in _HOOKS if getattr(self, kind)]
        if own:
            raise RuntimeError(
                f"hooks of the pipe itself ({', '.join(own)}) run in pipe(x), not in "
                f"{what}: register them on layers, or on pipe.partitions"
            )
        if (method := own_call(self, self._whole)) is not None:
            raise RuntimeError(
                f"{type(self).__name__} has a {method} of its own, which {what} "
                "would not run: call pipe(x), or put it into layers and loss_fn"
            )

    def _source(self, input: Any, target: Any, data_iter: Iterable[Any] | None) -> Source:
        self._check_own_calls("train_batch and eval_batch")
        device, pack = self._workers[0].device, partial(batch_input, self)
        source = source_of(input, target, data_iter, self._chunks, device, pack)
        self._watch(source.entering())
        return source

    def _ready(self) -> Pipeline:
        """The pipeline over the layers as they are now."""
        self._follow_layers()
        with _building:
            # After a fork its threads are gone, and its locks may be held by nobody.
            if self._pipeline is None or self._pipeline.process != os.getpid():
                self._pipeline = Pipeline(self._partitions, list(self._modules), self._served)
            return self._pipeline

    def _attach_trace(self, trace: Trace | None) -> None:
        if trace is not None and self._trace is not None:
            raise RuntimeError("this pipe is being traced already: end that trace first")
        self._trace = trace
