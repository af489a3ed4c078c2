"""``Pipe``, the public module: checks arguments and calls the drivers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from types import MethodType
from typing import Any, Literal, TypedDict, Unpack, overload
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from syncpipe.data.trees import tensors_in
from syncpipe.hints import refuse_backward, target_hint, with_hints
from syncpipe.layers.batchnorm import defer_batch_norm
from syncpipe.layers.conversion.sequential import HOOKS
from syncpipe.layers.conversion.signature import batch_input, call_input, model_signature, refresh
from syncpipe.layers.listing import Initialization, Layers, as_sequential
from syncpipe.layers.placement import check_input, own_call
from syncpipe.layers.time_first import watch_time_first
from syncpipe.layers.unpack import unpacks
from syncpipe.options import (
    check_flags,
    check_slots,
    check_stream,
    checked_modes,
    checked_replicas,
    checked_schedule,
)
from syncpipe.pipe.container import Container, building
from syncpipe.pipe.layout import first_layout
from syncpipe.runtime.thread_state import INLINE, restoring_thread, uncompiled
from syncpipe.schedules.named import ScheduleLike
from syncpipe.schedules.stream import Versions
from syncpipe.stages.locks import CallLocks
from syncpipe.stages.pipeline import Pipeline
from syncpipe.training.evaluate import evaluate
from syncpipe.training.forward import forward
from syncpipe.training.loaders import refuse_dataset, source_of
from syncpipe.training.loss import Objective
from syncpipe.training.loss_check import LossCounts
from syncpipe.training.sources import Source
from syncpipe.training.stream import OptimizerFactory, Streamed, stream
from syncpipe.training.train import train

__all__ = ["Pipe"]

#: Types of loss functions: one that returns a loss (and its weight), one with metrics as well.
_LossFn = nn.Module | Callable[..., Tensor | tuple[Tensor, float | Tensor]]
_Metric = Callable[
    ..., tuple[Tensor, dict[str, Any]] | tuple[Tensor, float | Tensor, dict[str, Any]]
]
_Weight = Callable[[Any], Any] | Sequence[Any] | None


class _Eval(TypedDict, total=False):
    loss_reduction: str | None
    weight: _Weight
    data_iter: Iterable[Any] | None
    verify: bool | None
    global_loss: bool


class _Train(_Eval, total=False):
    schedule: ScheduleLike | None
    slots: str | Sequence[int] | None
    accumulate: float
    grad_scaler: Any


class _SignedForward:
    """A ``forward`` that shows trainers the signature of the model it was converted from."""

    def __init__(self, function: Callable[..., Any]) -> None:
        function._torchdynamo_disable = True  # type: ignore[attr-defined]
        self._function = function

    def __get__(self, pipe: Any, kind: type) -> Callable[..., Any]:
        if pipe is None:
            return self._function
        bound: Any = MethodType(self._function, pipe)
        if (signature := model_signature(pipe)) is not None:
            bound = partial(bound)
            bound.__signature__ = signature
        return bound  # type: ignore[no-any-return]


class Pipe(Container):
    """Runs an ``nn.Sequential`` as a pipeline over several devices.

    The layers are split into partitions, one on each device. A mini-batch is split into
    micro-batches, which follow each other through the partitions, so all devices work at the same
    time (GPipe, Huang et al. 2019). The plain module, run on the micro-batches one after another,
    gives the same outputs and gradients::

        model = nn.Sequential(a, b, c, d)
        model = Pipe(model, balance=[2, 2], chunks=8)      # a, b on device 0; c, d on device 1
        loss = loss_fn(model(input), target.to(model.devices[-1]))
        loss.backward()

    Args:
        module: an ``nn.Sequential`` or a list of layers: modules, which are moved to their devices
            in place, callables, :class:`LayerSpec`. Layers on ``meta`` are initialized there.
        balance: the number of layers in each partition; or a method that balances one partition for
            each device: ``"parameters"`` or ``"uniform"`` (equal numbers of parameters or layers),
            ``"type:regex"`` (equal numbers of layers whose class name matches), ``"time"``
            (measured with ``sample``). None: the layers must already be on several devices.
        devices: for each partition a device (as ``torch.device`` takes it, or an index) or a
            :class:`Worker`; a device may occur more than once. ``"cpu:0"``, ``"cpu:1"``, ... are
            separate CPU workers. Default: all accelerators, or a CPU worker for each partition.
        replicas: the number of devices that serve each partition, or one number for all.
            Micro-batches go to them in turn. ``devices`` then lists all of them, stage by stage.
        chunks: the maximum number of micro-batches (a small mini-batch gives fewer).
        checkpoint: what to recompute in backward: ``"always"`` all micro-batches,
            ``"except_last"`` all but the last, ``"never"`` none; layers chosen by a function
            ``(layer) -> bool``, or by a list of bools or of indices in the model (a tuple or range
            in it is recomputed together); all but what a :class:`Selective` saves. ``"offload"``
            sends activations to the host instead. Or one of these for each stage.
        schedule: the default schedule of :meth:`train_batch`.
        slots: of the schedule ``"1f1b"``, see :meth:`train_batch`.
        deferred_batch_norm: let BatchNorm update its running statistics once a mini-batch.
        init_fn: called with each module, children first, of layers that are built here (specs) or
            initialized here (``meta``), after their constructor or ``reset_parameters()``.
        seed: makes the first weights of layer ``l``, if they are made here, depend on ``(seed, l)``
            alone, on devices of one kind; global generators do not change.
        unpack: pass tuples as the arguments of the next layer, and dicts as its keyword arguments;
            also the input (:class:`PipeSequential` does so without a pipe).
        sample: for ``balance="time"``, an input of the size of a micro-batch.
    """

    _syncpipe_skips_are_internal = True

    @with_hints
    def __init__(
        self,
        module: Layers,
        balance: Iterable[int] | str | None = None,
        *,
        devices: Iterable[Any] | None = None,
        replicas: int | Iterable[int] = 1,
        chunks: int = 1,
        checkpoint: Any = "except_last",
        schedule: ScheduleLike = "1f1b",
        slots: str | Sequence[int] | None = None,
        deferred_batch_norm: bool = False,
        init_fn: Callable[[nn.Module], Any] | None = None,
        seed: int | None = None,
        unpack: bool = False,
        sample: Any = None,
    ) -> None:
        super().__init__()
        check_flags(deferred_batch_norm=deferred_batch_norm, unpack=unpack)
        self.chunks = chunks
        modes, schedule = checked_modes(checkpoint), checked_schedule(schedule, slots)
        layers = as_sequential(module)
        self._source_layers: Any = WeakKeyDictionary({layers: list(layers._modules.items())})
        self.training = layers.training
        self._loss_counts, self._eval_counts = LossCounts(), LossCounts()
        self._locks: CallLocks | None = None
        self._loader_passes: WeakIdKeyDictionary | None = None  # DataLoader -> its iterator
        made = Initialization.checked(layers, init_fn, seed)
        self._set_layout(
            first_layout(
                layers, balance, devices, made, sample, replicas=checked_replicas(replicas),
                checkpoint=modes, schedule=schedule, defers_batch_norm=deferred_batch_norm,
                unpack=unpack or unpacks(layers),
            )
        )  # fmt: skip

    # --- a mini-batch ----------------------------------------------------------------------------

    @_SignedForward
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run a mini-batch through the pipeline.

        Args:
            args, kwargs: one input, a tensor ``[batch, ...]`` or a tree, on the first device; or
                the model's arguments, for layers made by :func:`syncpipe.sequential`; or, with
                ``unpack``, those of the first layer. Tensors are split along dimension 0 into at
                most ``chunks``, except in :class:`NoChunk`.

        Returns:
            The outputs of the plain module, on the last device, concatenated along dimension 0.
        """
        input = call_input(self, args, kwargs, unpack=self._layout.unpack)
        if not self._modules:
            return input
        check_input(input, self._layout.workers[0].device)
        if not self._time_checked and torch._C._get_tracing_state() is None:
            cut = [tensor.chunk(self._chunks) for tensor in tensors_in(input) if tensor.dim()]
            self._check_time_first([len(piece) for piece in chain(*cut)])
        output = self._run(forward, input, chunks=self._chunks)
        if self._averaging is not None:
            self._averaging.forward(output)
        return output

    @overload
    def train_batch(
        self, input: Any = None, target: Any = None, *, loss_fn: _LossFn,
        return_outputs: Literal[False] = False, **more: Unpack[_Train],
    ) -> Tensor: ...  # fmt: skip

    @overload
    def train_batch(
        self, input: Any = None, target: Any = None, *, loss_fn: _LossFn,
        return_outputs: Literal[True], **more: Unpack[_Train],
    ) -> tuple[Tensor, Any]: ...  # fmt: skip

    @overload
    def train_batch(
        self, input: Any = None, target: Any = None, *, loss_fn: _Metric,
        return_outputs: Literal[False] = False, **more: Unpack[_Train],
    ) -> tuple[Tensor, dict[str, Any]]: ...  # fmt: skip

    @overload
    def train_batch(
        self, input: Any = None, target: Any = None, *, loss_fn: _Metric,
        return_outputs: Literal[True], **more: Unpack[_Train],
    ) -> tuple[Tensor, Any, dict[str, Any]]: ...  # fmt: skip

    @overload
    def train_batch(
        self, input: Any = None, target: Any = None, *, loss_fn: Any,
        return_outputs: bool, **more: Unpack[_Train],
    ) -> Any: ...  # fmt: skip

    @with_hints
    def train_batch(
        self,
        input: Any = None,
        target: Any = None,
        *,
        loss_fn: Callable[..., Any] | None = None,
        schedule: ScheduleLike | None = None,
        slots: str | Sequence[int] | None = None,
        loss_reduction: str | None = None,
        weight: _Weight = None,
        data_iter: Iterable[Any] | None = None,
        accumulate: float = 1,
        grad_scaler: Any = None,
        return_outputs: bool = False,
        verify: bool | None = None,
        global_loss: bool = False,
    ) -> Any:
        """Run forward and backward of one mini-batch, with the loss inside of the pipeline.

        Accumulates gradients in ``.grad``, as ``loss.backward()`` does::

            optimizer.zero_grad()
            loss = pipe.train_batch(input, target, loss_fn=F.cross_entropy)
            optimizer.step()

        Args:
            input: as for ``pipe(input)``.
            target: the same, on any device; or its key in ``input``, or a function of ``input``
                that returns it. None: ``loss_fn`` takes the output alone.
            loss_fn: ``loss_fn(output, target)``, called once for each micro-batch, on the last
                device. Returns the loss, one number, or ``(loss, weight)``; a dict of metrics may
                follow. Sums add up; means give ``sum(loss * weight) / sum(weight)``, by default
                weighted by targets that are not ignored (PyTorch's cross entropy), or by samples.
            schedule: a name (docs/schedules.md), a :class:`syncpipe.schedules.Schedule`, the path
                of a CSV file, or a function ``(m, device_of)`` that returns a ``Schedule``. None:
                the schedule of the pipe.
            slots: the most micro-batches in flight on each stage under 1F1B: ``"textbook"``,
                ``"overlap"``, or a number for each (:func:`syncpipe.schedules.one_f_one_b`).
            loss_reduction: how ``loss_fn`` reduces the samples of a micro-batch, ``"mean"`` or
                ``"sum"``. None: its ``reduction``, or ``"mean"`` if it has none.
            weight: the weight of a micro-batch, if not its number of samples: a function of its
                target, or a sequence of numbers.
            data_iter: instead of ``input``, an iterator of micro-batches on any device: pairs with
                the target, longer tuples that end in it, or dicts in which ``target`` is its key.
                Takes exactly ``chunks``, each when the first stage is ready for it, on its thread.
                A ``DataLoader`` gives one mini-batch in each call, epoch after epoch.
            accumulate: the number of mini-batches of one optimizer step; divides the gradients.
            grad_scaler: a ``torch.amp.GradScaler``, which scales the loss for backward only.
            return_outputs: return the outputs as well.
            verify: warn if the combined loss differs from the loss of several micro-batches at
                once. None: in calls 1, 2, 4, 8, ... of a loss function that is not PyTorch's.
            global_loss: return loss and metrics over the mini-batches of all processes
                (:func:`syncpipe.distributed.data_parallel`).

        Returns:
            The loss of the mini-batch, detached, without dimensions, on the last device; or a tuple
            of the loss, the outputs if asked for, and the dict of metrics if there are any. Metrics
            that are numbers are averaged as the losses are (return a rate, not a count), others are
            lists with a value for each micro-batch.

        If the call raises an error, ``.grad`` of all leaves is what it was before, and the pipe
        still works. If the total weight is unknown (``(loss, weight)``, micro-batches of
        ``data_iter`` of different sizes), backward uses an estimate, and gradients are scaled at
        the end: exact up to rounding, but hooks on parameters see them unscaled.
        """
        if loss_fn is None:
            given = "input, target" if data_iter is None else "data_iter=..."
            raise TypeError(f"loss_fn is missing: write train_batch({given}, loss_fn=...)")
        check_flags(
            return_outputs=return_outputs,
            global_loss=global_loss,
            verify=verify is not None and verify,
        )

        def step(averaging: Any = None) -> Any:
            source = self._source(input, target, data_iter)
            chosen = self.schedule
            if schedule is not None or slots is not None:
                chosen = checked_schedule("1f1b" if schedule is None else schedule, slots)
            check_slots(chosen, self.replicas)
            with target_hint("train_batch", input, target):
                return self._run(
                    train, source, loss_fn=loss_fn, schedule=chosen, averaging=averaging,
                    loss_reduction=loss_reduction, weight=weight, verify=verify,
                    accumulate=accumulate, grad_scaler=grad_scaler, return_outputs=return_outputs,
                    counts=self._loss_counts,
                )  # fmt: skip

        if self._is_single_process(global_loss):
            self._warn_of_other_processes()
            return refuse_backward(step())
        return refuse_backward(
            self._averaging.train_batch(step, global_loss=global_loss, accumulate=accumulate)
        )

    @overload
    def eval_batch(
        self, input: Any = None, target: Any = None, *, loss_fn: _LossFn, **more: Unpack[_Eval]
    ) -> Tensor: ...

    @overload
    def eval_batch(
        self, input: Any = None, target: Any = None, *, loss_fn: _Metric, **more: Unpack[_Eval]
    ) -> tuple[Tensor, dict[str, Any]]: ...

    @overload
    def eval_batch(
        self, input: Any = None, *, loss_fn: None = None, data_iter: Iterable[Any] | None = None
    ) -> Any: ...

    @with_hints
    def eval_batch(
        self,
        input: Any = None,
        target: Any = None,
        *,
        loss_fn: Callable[..., Any] | None = None,
        loss_reduction: str | None = None,
        weight: _Weight = None,
        data_iter: Iterable[Any] | None = None,
        verify: bool | None = None,
        global_loss: bool = False,
    ) -> Any:
        """Run one mini-batch forward, without gradients and in ``eval()`` mode.

        Afterwards every module is back in its own mode.

        Args:
            input, target, loss_reduction, weight, data_iter, verify: as for :meth:`train_batch`.
            loss_fn: as for :meth:`train_batch`; None to return the outputs.
            global_loss: as for :meth:`train_batch`; all processes must call it then.

        Returns:
            The loss of the mini-batch, without dimensions, and metrics if there are any; without
            ``loss_fn`` the outputs, as of ``pipe(input)``. On the last device.
        """
        check_flags(global_loss=global_loss)

        def step(weighed: Callable[[Objective], None] | None = None) -> Any:
            source = self._source(input, target, data_iter, training=False)
            if loss_fn is None and (target is not None or weighed is not None):
                what = "a target" if weighed is None else "global_loss=True"
                raise ValueError(
                    f"eval_batch has {what}, but no loss_fn that could use it: give both"
                )
            with target_hint("eval_batch", input, target):
                return self._run(
                    evaluate, source, module=self, loss_fn=loss_fn, loss_reduction=loss_reduction,
                    weight=weight, weighed=weighed, verify=verify, counts=self._eval_counts,
                    modules=[*self.modules(), *self._layout.partitions],
                )  # fmt: skip

        alone = self._is_single_process(global_loss) or not global_loss
        return step() if alone else self._averaging.eval_batch(step)

    @with_hints
    def train_stream(
        self,
        data_iter: Iterable[Any],
        *,
        optimizer: OptimizerFactory | Sequence[Optimizer | None],
        loss_fn: Callable[..., Any],
        steps: int | None = None,
        target: Any = None,
        versions: Versions = "stashing",
        loss_reduction: str | None = None,
        weight: _Weight = None,
    ) -> Streamed:
        """Train on many mini-batches without draining the pipeline between them (PipeDream).

        This is **not** ``train_batch`` in a loop: gradients are computed with weights up to
        ``n - 1`` updates old, ``n`` the number of stages, so the trained model differs. Each stage
        updates its weights as soon as a mini-batch has run backward on it, while others are in
        flight: there is no bubble, at the cost of memory for versions and of staleness; see
        docs/pipedream.md. With one stage it equals the plain loop, bit for bit if no layer draws
        random numbers.

        Sources: Narayanan et al. 2019, PipeDream: Generalized Pipeline Parallelism for DNN
        Training; Narayanan et al. 2021, Memory-Efficient Pipeline-Parallel DNN Training (2BW).

        Args:
            data_iter: gives mini-batches as ``train_batch(data_iter=)`` does micro-batches: one
                epoch of a ``DataLoader``; all items of an iterator, or ``steps`` of them.
            optimizer: makes the optimizer of a stage from the list of its parameters:
                ``lambda parameters: torch.optim.SGD(parameters, lr=0.1)``. Or a list with the
                optimizer of each stage from an earlier call (None for a frozen stage).
            loss_fn: as for ``train_batch``.
            steps: the maximum number of mini-batches; None: until ``data_iter`` ends.
            target: the place of the target in an item, as for ``train_batch``.
            versions: the weights of mini-batch ``i`` on stage ``j``, as a number of updates:
                ``"stashing"``, ``max(0, i - (n-j) + 1)``, the newest at its forward;
                ``"vertical_sync"``, ``max(0, i - n + 1)``, the same on all stages; ``"2bw"``,
                ``max(0, i - 1)`` on all, each mini-batch split into at least ``n`` micro-batches
                (``chunks``). Stages hold ``n - j``, ``n`` and 2 versions. With ``"stashing"``
                stages may have replicas; a stage with ``r`` replicas updates once for every ``r``
                mini-batches, with the mean of their gradients.
            loss_reduction, weight: as for ``train_batch``; they matter for ``"2bw"``.

        Returns:
            A ``Streamed``: losses ``[steps]``, metrics, the optimizers, and the version of the
            weights for each micro-batch and stage.

        The pipe cannot have ties across stages or ``deferred_batch_norm``, and must not be used for
        anything else meanwhile. ``.grad`` of trained parameters is None at the beginning and at the
        end. After an exception each stage keeps the updates that it has made, and a note of the
        exception has their numbers.
        """
        if loss_fn is None:
            raise TypeError(
                "loss_fn is missing: write train_stream(data_iter, optimizer=..., loss_fn=...)"
            )
        refuse_dataset(data_iter, "data_iter")
        steps = check_stream(data_iter, steps, versions)
        if self._averaging is not None:
            raise RuntimeError(
                "this pipe is data-parallel over several processes, which average gradients in "
                "each step, and train_stream has no such steps: use train_batch"
            )
        self._check_own_calls("train_stream")
        done: Streamed = self._run(
            stream, iter(data_iter), pack=partial(batch_input, self), chunks=self._chunks,
            optimizer=optimizer, loss_fn=loss_fn, steps=steps, target=target, versions=versions,
            loss_reduction=loss_reduction, weight=weight,
        )  # fmt: skip
        return done

    def _run(self, function: Callable[..., Any], given: Any, **how: Any) -> Any:
        """Runs a mini-batch over the layers as they are now."""
        pipeline, modes = self._build(), self._layout.modes

        def run() -> Any:
            how["checkpoint"] = modes if self.training else ("never",) * len(modes)
            how["recorder"] = None if self._trace is None else self._trace.recorder()
            call = partial(function, pipeline, given, inline=INLINE.get(), **how)
            return uncompiled(restoring_thread)(call)

        return pipeline.with_modes(run) if function is forward else run()

    def _build(self) -> Pipeline:
        """The pipeline over the layers as they are now: the same one for calls in all threads."""
        with building:
            return self._built()

    def _built(self) -> Pipeline:
        layout = self._sync_layout()
        for j, partition in enumerate(layout.partitions):
            if own := [
                *partition._parameters,
                *partition._buffers,
                *{"forward"} & vars(partition).keys(),
            ]:
                raise ValueError(
                    f"pipe.partitions[{j}] has {', '.join(own)} of its own, which the pipe would "
                    "not use: move it into a layer, and del it there"
                )
        refresh(self)
        if layout.defers_batch_norm and defer_batch_norm(layout.sequential()):
            self._pipeline = None  # a layer has a new one
        if self._locks is None or self._locks.process != os.getpid():
            self._locks, self._pipeline = CallLocks(), None  # a fork has no threads of its parent
        if self._pipeline is None:
            self._pipeline = Pipeline(
                layout.partitions, list(layout.layers), layout.workers_of, self._locks
            )
        return self._pipeline

    def _source(
        self, input: Any, target: Any, data_iter: Iterable[Any] | None, training: bool | None = None
    ) -> Source:
        self._check_own_calls("train_batch and eval_batch")
        device = self._layout.workers[0].device
        pack = partial(batch_input, self, training=training)
        if self._loader_passes is None:
            self._loader_passes = WeakIdKeyDictionary()
        passes = self._loader_passes
        source = source_of(input, target, data_iter, self._chunks, device, pack, passes)
        self._check_time_first(source.sizes)
        return source

    def _check_time_first(self, sizes: list[int]) -> None:
        """In the first call, warns of modules whose dimension 0 is time."""
        if not self._time_checked:
            watch_time_first(self.named_modules(), sizes)
            self._time_checked = True

    def _check_own_calls(self, what: str) -> None:
        """Raises an error for a pipe without layers, or with a hook or forward that is ignored."""
        if not self._modules:
            raise ValueError("the pipe has no layers: there is nothing to train or to evaluate")
        own = [kind for kind in HOOKS[:4] if getattr(self, kind)]
        if own:
            raise RuntimeError(
                f"hooks of the pipe itself ({', '.join(own)}) run in pipe(x), not in "
                f"{what}: register them on layers, or on pipe.partitions"
            )
        if (method := own_call(self, Pipe)) is not None:
            raise RuntimeError(
                f"{type(self).__name__} has a {method} of its own, which {what} would not run: "
                "call pipe(x), or move its code into layers and loss_fn"
            )

    def _is_single_process(self, global_loss: bool = False) -> bool:
        """Whether the pipe is not data-parallel; raises ValueError for ``global_loss`` then."""
        if self._averaging is None and global_loss:
            raise ValueError(
                "global_loss=True, but this pipe knows of no other processes: call "
                "syncpipe.distributed.data_parallel(pipe) first"
            )
        return self._averaging is None

    def __getstate__(self) -> dict[str, Any]:
        # A copy makes its own threads, streams and locks, and belongs to no process group.
        gone = dict.fromkeys(("_pipeline", "_trace", "_averaging", "_locks", "_loader_passes"))
        counts = {"_loss_counts": LossCounts(), "_eval_counts": LossCounts()}
        return {**self.__dict__, **gone, "_source_layers": {}, **counts}
