"""``Pipe``: the module that people hold. It wires the parts, it does not compute."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from torch import nn

from syncpipe.checkpoint import checked_modes, modes_of_stages
from syncpipe.forward import forward
from syncpipe.layers.listing import Layers
from syncpipe.layers.placement import check_input, own_call
from syncpipe.options import (
    check_slots,
    checked_chunks,
    checked_schedule,
    shown_schedule,
)
from syncpipe.partitioned import Partitioned
from syncpipe.runtime.inline import INLINE, untraced
from syncpipe.runtime.locks import forkable
from syncpipe.runtime.worker import Worker
from syncpipe.schedules.build import AUTO, ScheduleLike
from syncpipe.schedules.search.report import AutoSchedule
from syncpipe.stages.pipeline import Pipeline
from syncpipe.timeline.trace import Trace
from syncpipe.training.losses import check_arguments
from syncpipe.training.measured import Measured
from syncpipe.training.sources import Source, source_of
from syncpipe.training.train import evaluate, train

__all__ = ["Pipe"]

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_building = forkable()


class Pipe(Partitioned):
    """Runs an ``nn.Sequential`` as a pipeline over several devices.

    The layers are cut into partitions, one after another on a device each. A mini-batch is cut
    into micro-batches, which follow each other through the partitions, so that all devices work at
    the same time (GPipe, Huang et al. 2019). Outputs and gradients are those of the plain module
    that is fed the micro-batches one by one::

        model = nn.Sequential(a, b, c, d)
        model = Pipe(model, balance=[2, 2], chunks=8)      # a, b on device 0; c, d on device 1
        loss = loss_fn(model(input), target.to(model.devices[-1]))
        loss.backward()

    Args:
        module: an ``nn.Sequential`` or a list of layers: modules, which are moved to their devices
            in place, callables, :class:`LayerSpec`. What is on ``meta`` is given values there.
        balance: for each partition the number of its layers; or how to find it, one partition for
            each device: ``"parameters"`` (as many parameters in each as can be), ``"uniform"`` (as
            many layers), ``"type:regex"`` (as many layers whose class has a name that matches).
            Without it, the layers must already be on several devices: consecutive ones on one
            device form a partition.
        devices: for each partition a device, as ``torch.device`` takes it, an index of an
            accelerator, or a :class:`Worker`; the same one may be named more than once.
            ``"cpu:0"``, ``"cpu:1"``, ... are CPU workers of their own. By default all
            accelerators; where there is none, one CPU worker for each partition.
        chunks: the number of micro-batches, at most (a small mini-batch gives fewer).
        checkpoint: what stores nothing for backward and is computed again there: of the
            micro-batches ``"always"`` all, ``"except_last"`` all but the last, ``"never"`` none;
            the layers that a function picks, or a list; what a :class:`Selective` does not save.
            ``"offload"`` sends activations to the host instead. Or one of these for each stage;
            see :attr:`checkpoint`. It makes no difference in ``eval()`` mode and without grad.
        schedule: what :meth:`train_batch` uses if it is not told otherwise.
        slots: likewise, short for a schedule with slots.
        deferred_batch_norm: let BatchNorm update its running statistics once a mini-batch, as if
            it had gone through whole. These layers get a class of their own that differs from
            BatchNorm within such a pipe only.
        init_fn: called with each module, children first, of layers that are built here (specs) or
            given values (``meta``), after their constructor or ``reset_parameters()``.
        seed: the first weights of layer ``l``, if they are made here, depend on ``(seed, l)``
            alone, on devices of one kind; global generators stay as they are.
        unpack: spread tuples over the arguments of the next layer, and dicts over its keyword
            arguments, the input's as well (:class:`PipeSequential` does so without a pipe).

    Raises:
        TypeError: ``module`` or another argument is of the wrong type, or skips do not fit
            (``verify_skippables``).
        ValueError: ``balance`` does not fit the module, ``chunks`` or ``checkpoint`` is not
            possible, or layers or parameters are shared where they cannot be.
        IndexError: fewer devices than partitions.
    """

    def __init__(
        self,
        module: Layers,
        balance: Iterable[int] | str | None = None,
        *,
        devices: Iterable[Any] | None = None,
        chunks: int = 1,
        checkpoint: Any = "except_last",
        schedule: ScheduleLike = "1f1b",
        slots: str | Sequence[int] | None = None,
        deferred_batch_norm: bool = False,
        init_fn: Callable[[nn.Module], Any] | None = None,
        seed: int | None = None,
        unpack: bool = False,
    ) -> None:
        super().__init__()
        self._trace: Trace | None = None
        self.chunks = chunks
        self._checkpoint = checked_modes(checkpoint)
        self._schedule = checked_schedule(schedule, slots)
        self._cut(module, balance, devices, deferred_batch_norm, init_fn, seed, unpack)

    @property
    def chunks(self) -> int:
        """The number of micro-batches, at most."""
        return self._chunks

    @chunks.setter
    def chunks(self, chunks: int) -> None:
        self._chunks = checked_chunks(chunks)

    @property
    def checkpoint(self) -> Any:
        """What is computed again in backward, or sent to the host: for all stages, or for each.

        By name; by layer, a function ``(layer) -> bool`` or a list of indices in the model (a
        tuple or range in it is computed again together) or bools; or a :class:`Selective`.
        """
        return self._checkpoint

    @checkpoint.setter
    def checkpoint(self, checkpoint: Any) -> None:
        asked = checked_modes(checkpoint)
        self._modes = modes_of_stages(asked, list(self), self._balance)
        self._checkpoint = asked

    @property
    def schedule(self) -> ScheduleLike:
        """What :meth:`train_batch` uses if it is not told otherwise. Setting it forgets slots."""
        return self._schedule

    @schedule.setter
    def schedule(self, schedule: ScheduleLike) -> None:
        schedule = checked_schedule(schedule)
        check_slots(schedule, len(self._balance))
        self._schedule = schedule

    @property
    def auto_schedules(self) -> dict[int, AutoSchedule]:
        """What ``schedule="auto"`` has made so far, for each number of micro-batches.

        The first four calls run under 1F1B, two of them with backwards in halves, and one of each
        is measured. The fifth makes schedules (:func:`syncpipe.schedules.auto`), one that holds no
        more micro-batches on any device than ``"1f1b"``, and one with halves that holds no more
        than that or ``"zb_h1"``; the shorter one is used from then on. ``report`` says what it is
        worth. A balance that is set forgets them.
        """
        return self._measured.schedules

    def _place(self, balance: list[int], workers: list[Worker], *how: Any) -> None:
        check_slots(self._schedule, len(balance))
        super()._place(balance, workers, *how)
        self._measured = Measured()

    def forward(self, input: Any) -> Any:
        """Runs a mini-batch through the pipeline.

        Args:
            input: a tensor of shape ``[batch, ...]``, or any pytree of tensors and other values,
                on the first device. Tensors are cut along dimension 0 into at most ``chunks``
                micro-batches; other values, and tensors in :class:`NoChunk`, go whole to each.

        Returns:
            What the plain module returns, on the last device: the micro-batches' outputs,
            concatenated along dimension 0.

        Raises:
            ValueError: the input cannot be cut or is on another device, or the outputs cannot be
                concatenated.
        """
        if not self._modules:
            return input
        pipeline = self._ready()
        check_input(input, self._workers[0].device)
        return untraced(forward)(pipeline, input, chunks=self._chunks, **self._running())

    forward._torchdynamo_disable = True  # type: ignore[attr-defined]

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
                another one. None: in the first call with a loss function that is not PyTorch's.

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
        loss_fn = check_arguments(unexpected, loss_fn)
        source = self._source(input, target, data_iter)
        if schedule is None and slots is None:
            schedule = self._schedule
        else:
            schedule = checked_schedule("1f1b" if schedule is None else schedule, slots)
        pipeline, how = self._ready(), self._running()
        step = partial(
            untraced(train),
            pipeline,
            source,
            loss_fn=loss_fn,
            loss_reduction=loss_reduction,
            weight=weight,
            verify=verify,
            accumulate=accumulate,
            grad_scaler=grad_scaler,
            return_outputs=return_outputs,
            **how,
        )
        if schedule != AUTO:
            return step(schedule=schedule)
        key = how["checkpoint"], how["inline"]
        trace = self._trace or self.trace()
        return untraced(self._measured.run)(source.m, pipeline.worker_of, key, trace, step)

    def eval_batch(
        self,
        input: Any = None,
        target: Any = None,
        *,
        loss_fn: Callable[..., Any] | None = None,
        loss_reduction: str | None = None,
        weight: Callable[[Any], Any] | Sequence[Any] | None = None,
        data_iter: Iterable[Any] | None = None,
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

        Returns:
            The loss of the mini-batch, without dimensions, and metrics if there are any; or
            without ``loss_fn`` the outputs, gathered as by ``pipe(input)``. On the last device.

        Raises:
            TypeError, ValueError: as :meth:`train_batch`.
        """
        source = self._source(input, target, data_iter)
        if loss_fn is None and target is not None:
            raise ValueError("eval_batch has a target, but no loss_fn that could use it: give both")
        return untraced(evaluate)(
            self._ready(),
            source,
            module=self,
            modules=[*self.modules(), *self._partitions],
            loss_fn=loss_fn,
            loss_reduction=loss_reduction,
            weight=weight,
            **self._running(),
        )

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
        names = [str(worker.device) for worker in dict.fromkeys(self._workers)]
        rows = [f"{name} ({w})" if names.count(name) > 1 else name for w, name in enumerate(names)]
        return Trace(rows, self._attach_trace, title)

    def _running(self) -> dict[str, Any]:
        """How to run a mini-batch."""
        return {
            "checkpoint": self._modes if self.training else ("never",) * len(self._balance),
            "inline": INLINE.get(),
            "recorder": None if self._trace is None else self._trace.recorder(),
        }

    def _source(self, input: Any, target: Any, data_iter: Iterable[Any] | None) -> Source:
        if not self._modules:
            raise ValueError("the pipe has no layers: there is nothing to train or to evaluate")
        own = [kind for kind in _HOOKS if getattr(self, kind)]
        if own:
            raise RuntimeError(
                f"hooks of the pipe itself ({', '.join(own)}) run in pipe(x), not in train_batch "
                "and eval_batch: register them on layers, or on pipe.partitions"
            )
        if (method := own_call(self, Pipe)) is not None:
            raise RuntimeError(
                f"{type(self).__name__} has a {method} of its own, which train_batch and "
                "eval_batch would not run: call pipe(x), or put it into layers and loss_fn"
            )
        return source_of(input, target, data_iter, self._chunks, self._workers[0].device)

    def _ready(self) -> Pipeline:
        """The pipeline over the layers as they are now."""
        self._follow_layers()
        with _building:
            # After a fork its threads are gone, and its locks may be held by nobody.
            if self._pipeline is None or self._pipeline.process != os.getpid():
                self._pipeline = Pipeline(self._partitions, list(self._modules), self._workers)
            return self._pipeline

    def _attach_trace(self, trace: Trace | None) -> None:
        if trace is not None and self._trace is not None:
            raise RuntimeError("this pipe is being traced already: end that trace first")
        self._trace = trace

    def __getstate__(self) -> dict[str, Any]:
        # Threads, streams and locks are made anew where the pipe is used.
        return {**self.__dict__, "_pipeline": None, "_trace": None, "_measured": Measured()}

    def __repr__(self) -> str:
        shown = (
            f"{type(self).__name__}(balance={self.balance}, chunks={self.chunks}, "
            f"checkpoint={self.checkpoint!r}{shown_schedule(self._schedule)}"
        )
        return "\n".join([shown, *self._shown_stages(), ")"])
