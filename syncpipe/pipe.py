"""``Pipe``: the module that people hold. It wires the parts, it does not compute."""

from __future__ import annotations

import operator
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import chain, islice
from textwrap import indent
from types import MethodType
from typing import Any, Literal, NoReturn, Self, TypedDict, Unpack, overload
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, distributed, nn
from torch.optim import Optimizer

from syncpipe.data import tensors_in
from syncpipe.hints import (
    FixedList,
    caller_stacklevel,
    check_setting,
    refuse_backward,
    target_hint,
    unknown_attribute,
    with_hints,
)
from syncpipe.layers.batchnorm import defer_batch_norm
from syncpipe.layers.conversion.layer import ModelNames
from syncpipe.layers.conversion.sequential import HOOKS
from syncpipe.layers.conversion.signature import batch_input, call_input, model_signature, refresh
from syncpipe.layers.listing import (
    Initialization,
    Layer,
    Layers,
    LayerSpec,
    as_layer,
    as_sequential,
)
from syncpipe.layers.placement import check_devices, check_input, moves, own_call
from syncpipe.layers.state_dict_keys import translate_keys
from syncpipe.layers.time_first import watch_time_first
from syncpipe.layers.unpack import unpacks
from syncpipe.layout import Layout, first_layout, same_layers
from syncpipe.options import (
    check_flags,
    check_slots,
    check_stream,
    checked_chunks,
    checked_modes,
    checked_replicas,
    checked_schedule,
    slots_of,
)
from syncpipe.planner.auto import auto
from syncpipe.runtime.interrupts import forkable_lock
from syncpipe.runtime.thread_state import INLINE, restoring_thread, uncompiled
from syncpipe.schedules.named import ScheduleLike, schedule_label
from syncpipe.schedules.stream import Versions
from syncpipe.stages.pipeline import Pipeline
from syncpipe.timeline.trace import Trace
from syncpipe.training.forward import forward
from syncpipe.training.loss import Objective
from syncpipe.training.loss_check import LossCounts
from syncpipe.training.sources import Source, refuse_dataset, source_of
from syncpipe.training.stream import OptimizerFactory, Streamed, stream
from syncpipe.training.train import evaluate, train

__all__ = ["Pipe"]

#: What a loss function is that returns a loss, perhaps with its weight; and one with metrics.
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


class _LossOnly(_Train, total=False):
    return_outputs: Literal[False]


class _Outputs(_Train):
    return_outputs: Literal[True]


class _Either(_Train):
    return_outputs: bool


_building = forkable_lock()


class _SignedForward:
    """A ``forward`` with the signature of the model where that was converted, for trainers."""

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


class Pipe(ModelNames):
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
            each device: ``"parameters"`` or ``"uniform"`` (as many of them, or layers, in each),
            ``"type:regex"`` (as many layers whose class has such a name), ``"time"`` (measured with
            ``sample``). Without it the layers must already be on several devices.
        devices: for each partition a device (as ``torch.device`` takes it, or an index) or a
            :class:`Worker`; one may be named more than once. ``"cpu:0"``, ``"cpu:1"``, ... are CPU
            workers of their own. By default all accelerators, or a CPU worker for each partition.
        replicas: for each partition how many devices serve it, or one number for all. Micro-batches
            go to them in turn. ``devices`` then has all of them, stage by stage.
        chunks: the number of micro-batches, at most (a small mini-batch gives fewer).
        checkpoint: what is recomputed in backward: of the micro-batches ``"always"`` all,
            ``"except_last"`` all but the last, ``"never"`` none; the layers that a function
            ``(layer) -> bool`` picks, or a list of indices in the model (a tuple or range in it is
            recomputed together) or bools; what a :class:`Selective` does not save. ``"offload"``
            sends activations to the host instead. Or one of these for each stage.
        schedule: what :meth:`train_batch` uses if it is not told otherwise.
        slots: likewise, short for a schedule with slots.
        deferred_batch_norm: let BatchNorm update its running statistics once a mini-batch.
        init_fn: called with each module, children first, of layers that are built here (specs) or
            given values (``meta``), after their constructor or ``reset_parameters()``.
        seed: the first weights of layer ``l``, if they are made here, depend on ``(seed, l)``
            alone, on devices of one kind; global generators stay as they are.
        unpack: spread tuples over the arguments of the next layer, and dicts over its keyword
            arguments, the input's as well (:class:`PipeSequential` does so without a pipe).
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
        self._averaging: Any = None  # the other processes, see `syncpipe.distributed`
        self._warned = False  # that there are other processes
        self._trace: Trace | None = None
        self._loss_counts, self._eval_counts = LossCounts(), LossCounts()
        made = Initialization.checked(layers, init_fn, seed)
        self._set_layout(
            first_layout(
                layers, balance, devices, made, sample, replicas=checked_replicas(replicas),
                checkpoint=modes, schedule=schedule, defers=deferred_batch_norm,
                unpack=unpack or unpacks(layers),
            )
        )  # fmt: skip

    @classmethod
    def auto(
        cls,
        model: nn.Module,
        *sample: Any,
        batch_size: int,
        devices: Iterable[Any] | int | None = None,
        memory: Any = None,
        optimizer: Callable[..., Any] = torch.optim.AdamW,
        loss_fn: Callable[..., Any] | None = None,
        target: Any = None,
        weights: Any = None,
        init_fn: Callable[[nn.Module], Any] | None = None,
        timeout: float = 5.0,
        verbose: bool = True,
        **sample_kwargs: Any,
    ) -> Self:
        """Make a pipe that fits and trains of any model, in one call::

            pipe = Pipe.auto(model, input_ids, attention_mask=mask, batch_size=64)

        The model is converted (:func:`syncpipe.sequential`) unless it is an ``nn.Sequential`` with
        a layer for each device. Its layers are measured, a plan is made for what is free on the
        devices (:func:`syncpipe.plan`), and one step is run to see that it fits; where it does not,
        plans for less memory are. Nothing is changed by that but the place of the layers.

        Args:
            model: any module. On ``meta`` it is filled stage by stage, with ``weights`` say.
            sample, sample_kwargs: the arguments of one call, a few samples; they are repeated.
            batch_size: samples in a mini-batch.
            devices: as for ``Pipe``, or how many; those with the most memory come first.
            memory: bytes that may be used on each (a number, ``"16GB"``, or one for each); by
                default what is free.
            optimizer: makes an optimizer from a list of parameters; its state needs memory, too.
            loss_fn, target: as for :meth:`train_batch`; by default the mean of the outputs.
            weights: a folder or a file of safetensors, see :func:`syncpipe.checkpoints.reader`.
            init_fn: as for ``Pipe``.
            timeout: seconds to measure for.
            verbose: print three lines: memory that is left, the planned speed, what limits it.

        Raises:
            ValueError: the sample has no batch in dimension 0, the model cannot be cut, or nothing
                fits (``NoPlan``). The layers are then where they were.
        """
        made: Self = auto(
            cls, model, sample, sample_kwargs, batch_size=batch_size, devices=devices,
            memory=memory, optimizer=optimizer, loss_fn=loss_fn, target=target, weights=weights,
            init_fn=init_fn, timeout=timeout, verbose=verbose,
        )  # fmt: skip
        return made

    # --- what it holds ---------------------------------------------------------------------------

    def _set_layout(self, layout: Layout) -> None:
        """Goes on with another layout. Layers may be named as attributes are."""
        self._layout = layout
        if not same_layers(self._modules, layout.layers):
            self._modules = dict[str, Any](layout.layers)
        self._pipeline: Pipeline | None = None
        self._time_checked = False

    def _change(self, **asked: Any) -> None:
        """Another layout, of the layers that are there now."""
        asked = {"layers": dict(self._modules), **asked}
        if new := asked["layers"].keys() - self._layout.layers.keys():
            raise ValueError(
                f"the pipe was given another module, {', '.join(sorted(new))}, and its modules are "
                "its layers: del it, and keep it elsewhere, or make another Pipe"
            )
        for k, (name, layer) in enumerate(self._modules.items()):
            if isinstance(layer, LayerSpec) and asked["layers"].get(name) is layer:
                raise ValueError(
                    f"pipe.{name} is a {layer!r}, which is not built, so an optimizer would miss "
                    f"its parameters: put it in by pipe[{k}] = {layer!r}"
                )
        self._set_layout(self._layout.changed(self.training, **asked))

    def _sync_layout(self) -> Layout:
        """The layout, with layers that were replaced by name (``pipe.fc = ...``, LoRA)."""
        for source, layers in self._source_layers.items():
            if list(source._modules.items()) != layers:
                self._source_layers = {}  # once
                warnings.warn(
                    "the nn.Sequential that this pipe was made of has other layers now "
                    f"({len(source)}, was {len(layers)}), and the pipe keeps those that it was "
                    "given: make another Pipe, or change pipe[k]",
                    stacklevel=caller_stacklevel(),
                )
        if not same_layers(self._modules, self._layout.layers):
            self._change()
        return self._layout

    @property
    def balance(self) -> list[int]:
        """For each partition the number of its layers. Setting it cuts the layers anew."""
        return FixedList("balance", self._layout.balance)

    @balance.setter
    def balance(self, balance: Iterable[int] | str) -> None:
        self._change(balance=balance)

    @property
    def devices(self) -> list[torch.device]:
        """For each partition its device, or those of its replicas. Setting it moves the layers."""
        served = chain.from_iterable(self._layout.workers_of)
        return FixedList("devices", [worker.device for worker in served])

    @devices.setter
    def devices(self, devices: Iterable[Any]) -> None:
        self._change(devices=check_devices(devices))

    @property
    def replicas(self) -> list[int]:
        """For each partition how many devices serve it. Setting it assigns the devices anew."""
        return FixedList("replicas", map(len, self._layout.workers_of))

    @replicas.setter
    def replicas(self, replicas: int | Iterable[int]) -> None:
        self._change(replicas=checked_replicas(replicas))

    @property
    def chunks(self) -> int:
        """The number of micro-batches, at most."""
        return self._chunks

    @chunks.setter
    def chunks(self, chunks: int) -> None:
        self._chunks = checked_chunks(chunks)

    @property
    def checkpoint(self) -> Any:
        """What is recomputed in backward, or sent to the host: for all stages, or for each."""
        return self._layout.checkpoint

    @checkpoint.setter
    def checkpoint(self, checkpoint: Any) -> None:
        self._layout = self._sync_layout().with_checkpoint(checked_modes(checkpoint))

    @property
    def schedule(self) -> ScheduleLike:
        """What :meth:`train_batch` uses if it is not told otherwise. Setting it forgets slots."""
        return self._layout.schedule

    @schedule.setter
    def schedule(self, schedule: ScheduleLike) -> None:
        self._layout = self._layout.with_schedule(checked_schedule(schedule))

    @property
    def slots(self) -> Any:
        """Those of the schedule ``"1f1b"``; None by default. Setting them chooses it."""
        return slots_of(self.schedule)

    @slots.setter
    def slots(self, slots: str | Sequence[int] | None) -> None:
        plain = "1f1b" if slots_of(self.schedule) is not None else self.schedule
        self.schedule = checked_schedule(plain, slots)

    @property
    def partitions(self) -> list[nn.Sequential]:
        """For each stage its layers, as an ``nn.Sequential`` that shares them with the pipe."""
        return FixedList("partitions", self._sync_layout().partitions)

    # --- a list of layers ------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(list[Any](self._modules.values()))

    @overload
    def __getitem__(self, index: int) -> nn.Module: ...

    @overload
    def __getitem__(self, index: slice) -> nn.Sequential: ...

    def __getitem__(self, index: int | slice) -> nn.Module:
        if isinstance(index, slice):
            return self._sync_layout().sequential()[index]
        return list(self)[self._index(index)]

    def __setitem__(self, index: int, layer: Layer) -> None:
        """Puts another layer in the place of one, in its stage and under its name.

        It goes to, or is built on, the device of its stage. Parameters of the others stay: tell
        the optimizer of new ones by ``add_param_group``. What is refused changes nothing.
        """
        index = self._index(index)
        name = list(self._modules)[index]
        self._change(layers={**self._modules, name: as_layer(layer, f"the new layer {index}")})

    def _index(self, index: Any) -> int:
        if not -len(self) <= operator.index(index) < len(self):
            raise IndexError(f"layer {index} does not exist: the pipe has {len(self)}")
        return int(index) % len(self)

    # --- a mini-batch ----------------------------------------------------------------------------

    @_SignedForward
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run a mini-batch through the pipeline.

        Args:
            args, kwargs: one input, a tensor ``[batch, ...]`` or a tree, on the first device (all
                that the model takes, for layers made by :func:`syncpipe.sequential`). Tensors are
                cut along dimension 0 into at most ``chunks``; those in :class:`NoChunk` are not.

        Returns:
            What the plain module returns, on the last device, concatenated along dimension 0.
        """
        input = call_input(self, args, kwargs)
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
        self, input: Any = None, target: Any = None, *, loss_fn: _LossFn, **more: Unpack[_LossOnly]
    ) -> Tensor: ...

    @overload
    def train_batch(
        self, input: Any = None, target: Any = None, *, loss_fn: _LossFn, **more: Unpack[_Outputs]
    ) -> tuple[Tensor, Any]: ...

    @overload
    def train_batch(
        self, input: Any = None, target: Any = None, *, loss_fn: _Metric, **more: Unpack[_LossOnly]
    ) -> tuple[Tensor, dict[str, Any]]: ...

    @overload
    def train_batch(
        self, input: Any = None, target: Any = None, *, loss_fn: _Metric, **more: Unpack[_Outputs]
    ) -> tuple[Tensor, Any, dict[str, Any]]: ...

    @overload
    def train_batch(
        self, input: Any = None, target: Any = None, *, loss_fn: Any, **more: Unpack[_Either]
    ) -> Any: ...

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

        Gradients add up in ``.grad`` as after ``loss.backward()``; the optimizer is the caller's::

            optimizer.zero_grad()
            loss = pipe.train_batch(input, target, loss_fn=F.cross_entropy)
            optimizer.step()

        Args:
            input: as for ``pipe(input)``.
            target: the same, on any device. None: the loss function takes the output alone. The key
                of a dict, or a function of the input, takes it from there.
            loss_fn: ``loss_fn(output, target)``, called once for each micro-batch, on the last
                device. It returns the loss, one number, or ``(loss, weight)``; metrics may follow
                in a dict. PyTorch's cross entropy counts by the targets that are not ignored, any
                other mean by samples; with weights it is ``sum(loss * weight) / sum(weight)``.
            schedule: a name (docs/schedules.md), a :class:`syncpipe.schedules.Schedule`, the path
                of a CSV file, or a function ``(m, device_of)`` that returns a ``Schedule``. None:
                that of the pipe.
            slots: the most micro-batches in flight on each stage under 1F1B: ``"textbook"``,
                ``"overlap"``, or a number for each (:func:`syncpipe.schedules.one_f_one_b`).
            loss_reduction: what ``loss_fn`` does over the samples of a micro-batch, ``"mean"`` or
                ``"sum"``. None: what its ``reduction`` says, ``"mean"`` if it has none.
            weight: how much a micro-batch counts, where that is not by its samples: a function of
                its target, or a number for each.
            data_iter: instead of ``input`` an iterator of micro-batches on any device: pairs with
                the target, longer tuples that end in it, or dicts in which ``target`` is its key.
                Exactly ``chunks`` are taken, each when the first stage is ready for it, on its
                thread. A ``DataLoader`` gives one mini-batch in each call, epoch after epoch.
            accumulate: how many mini-batches make one optimizer step: gradients are divided by it.
            grad_scaler: a ``torch.amp.GradScaler``, which scales the loss for backward alone.
            return_outputs: return the outputs as well.
            verify: warn if the loss is not that of several micro-batches at once. None: look in
                calls 1, 2, 4, 8, ... with a loss function that is not PyTorch's.
            global_loss: return loss and metrics of the mini-batches of all processes
                (:func:`syncpipe.distributed.data_parallel`), not of this one alone.

        Returns:
            The loss of the mini-batch, detached, without dimensions, on the last device; or a tuple
            of it, the outputs if they were asked for, and a dict of metrics if there are any:
            numbers averaged as the losses are (return a rate, not a count), all else as a list.

        Whatever the call raises, ``.grad`` of all leaves is then what it was before it, and the
        pipe goes on working. While the total weight is not known (``(loss, weight)``, micro-batches
        of ``data_iter`` of different sizes), backward uses an estimate of it, and gradients are
        multiplied by the ratio at the end, to rounding; hooks on parameters see them before that.
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

        By ``eval()`` of the pipe; when it returns every module is in the mode in which it was.

        Args:
            input, target, loss_reduction, weight, data_iter, verify: as for :meth:`train_batch`.
            loss_fn: as for :meth:`train_batch`; None to get the outputs.
            global_loss: as for :meth:`train_batch`; then all processes have to call it.

        Returns:
            The loss of the mini-batch, without dimensions, and metrics if there are any; or
            without ``loss_fn`` the outputs, gathered as by ``pipe(input)``. On the last device.
        """

        check_flags(global_loss=global_loss)

        def step(weighed: Callable[[Objective], None] | None = None) -> Any:
            source = self._source(input, target, data_iter)
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
        """Train on one mini-batch after another without ever draining the pipeline (PipeDream).

        This is **not** ``train_batch`` in a loop: gradients are those of weights that are up to
        ``n - 1`` updates old, ``n`` the number of stages, so another model comes out. Each stage
        updates its own weights as soon as a mini-batch has run backward on it, while others are
        under way: no bubble, but memory for versions, and staleness; see docs/pipedream.md. On a
        single stage it is the plain loop, bit for bit where nothing draws random numbers.

        Sources: Narayanan et al. 2019, PipeDream: Generalized Pipeline Parallelism for DNN
        Training; Narayanan et al. 2021, Memory-Efficient Pipeline-Parallel DNN Training (2BW).

        Args:
            data_iter: gives mini-batches as ``train_batch(data_iter=)`` does micro-batches. A
                ``DataLoader`` is one epoch; of an iterator all are taken, or ``steps`` of them.
            optimizer: makes the optimizer of a stage from the list of its parameters:
                ``lambda parameters: torch.optim.SGD(parameters, lr=0.1)``. Or one optimizer for
                each stage (None where nothing is trained), to go on with those of an earlier call.
            loss_fn: as for ``train_batch``.
            steps: at most so many mini-batches; None: until ``data_iter`` ends.
            target: where the target is, as for ``train_batch``.
            versions: which weights mini-batch ``i`` meets on stage ``j``, by the number of their
                updates: ``"stashing"``, ``max(0, i - (n-j) + 1)``, the newest at its forward;
                ``"vertical_sync"``, ``max(0, i - n + 1)`` on all stages, so that it meets one
                model; ``"2bw"``, ``max(0, i - 1)`` on all, each mini-batch cut into at least ``n``
                micro-batches (``chunks``). Stages hold ``n - j``, ``n`` and 2 versions. With
                ``"stashing"`` stages may have replicas; one with ``r`` updates once for every
                ``r`` mini-batches, with the mean of their gradients.
            loss_reduction, weight: as for ``train_batch``; of use for ``"2bw"``.

        Returns:
            A ``Streamed``: losses ``[steps]``, metrics, the optimizers, and for each micro-batch
            and stage the version of the weights that was used.

        The pipe cannot have ties across stages or ``deferred_batch_norm``, nor be called by anyone
        else meanwhile.
        ``.grad`` of all parameters that are trained is None when it begins and ends. An exception
        leaves each stage with the updates that it had made by then, which its note tells.
        """
        if loss_fn is None:
            raise TypeError(
                "loss_fn is missing: write train_stream(data_iter, optimizer=..., loss_fn=...)"
            )
        refuse_dataset(data_iter, "data_iter")
        steps = check_stream(data_iter, steps, versions)
        if self._averaging is not None:
            raise RuntimeError(
                "this pipe is one of several processes (data_parallel), whose gradients are "
                "averaged in each step, and train_stream has none: use train_batch"
            )
        self._check_own_calls("train_stream")
        done: Streamed = self._run(
            stream, iter(data_iter), pack=partial(batch_input, self), chunks=self._chunks,
            optimizer=optimizer, loss_fn=loss_fn, steps=steps, target=target, versions=versions,
            loss_reduction=loss_reduction, weight=weight,
        )  # fmt: skip
        return done

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile each layer in place, as ``nn.Module.compile`` does a module.

        Layers that come later, ``pipe[k] = layer``, are not. A stage with replicas then refuses to
        run: its layers run as shallow copies, which a compiled one does not know.
        """
        for partition in self.partitions:
            partition.compile(*args, **kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        """Let the first call after this block average gradients over processes, for all in it::

            with pipe.no_sync():
                pipe.train_batch(a, target_a, loss_fn=loss_fn, accumulate=2)
            pipe.train_batch(b, target_b, loss_fn=loss_fn, accumulate=2)
            optimizer.step()

        For ``train_batch``, and for ``pipe(x)`` inside of it, wherever its ``backward()`` is.
        """
        if self._is_single_process():
            raise RuntimeError(
                "no_sync() is for a pipe in several processes: make it one of them by "
                "syncpipe.distributed.data_parallel(pipe)"
            )
        return self._averaging.no_sync()  # type: ignore[no-any-return]

    def trace(self, title: str = "") -> Trace:
        """Record what this pipe does, and when::

            with pipe.trace() as trace:
                loss = pipe.train_batch(input, target, loss_fn=loss_fn)
            print(trace.table(), trace.bubble, trace.busy)
            trace.save("step.svg")    # or .png; or .json for https://ui.perfetto.dev

        ``title`` stands above pictures. A pipe has one trace at a time.
        """
        names = [str(worker.device) for worker in dict.fromkeys(chain(*self._layout.workers_of))]
        rows = [f"{name} ({w})" if names.count(name) > 1 else name for w, name in enumerate(names)]
        return Trace(rows, self._attach_trace, title)

    def _attach_trace(self, trace: Trace | None) -> None:
        if trace is not None and self._trace is not None:
            raise RuntimeError("this pipe is being traced already: end that trace first")
        self._trace = trace

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
        """The pipeline over the layers as they are now."""
        layout = self._sync_layout()
        for j, partition in enumerate(layout.partitions):
            if own := [
                *partition._parameters,
                *partition._buffers,
                *{"forward"} & vars(partition).keys(),
            ]:
                raise ValueError(
                    f"pipe.partitions[{j}] was given {', '.join(own)} of its own, which the pipe "
                    "would not use: put it into a layer, and del it there"
                )
        refresh(self)
        if layout.defers and defer_batch_norm(layout.sequential()):  # put into a layer since
            self._pipeline = None
        with _building:
            # After a fork its threads are gone, and its locks may be held by nobody.
            if self._pipeline is None or self._pipeline.process != os.getpid():
                self._pipeline = Pipeline(layout.partitions, list(layout.layers), layout.workers_of)
            return self._pipeline

    def _source(self, input: Any, target: Any, data_iter: Iterable[Any] | None) -> Source:
        self._check_own_calls("train_batch and eval_batch")
        device, pack = self._layout.workers[0].device, partial(batch_input, self)
        source = source_of(input, target, data_iter, self._chunks, device, pack)
        self._check_time_first(source.sizes)
        return source

    def _check_time_first(self, sizes: list[int]) -> None:
        """In the first call, looks for modules to which dimension 0 is time."""
        if not self._time_checked:
            watch_time_first(self.named_modules(), sizes)
            self._time_checked = True

    def _check_own_calls(self, what: str) -> None:
        """Refuses a pipe without layers, and one whose own hooks or forward would not run."""
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
                f"{type(self).__name__} has a {method} of its own, which {what} "
                "would not run: call pipe(x), or put it into layers and loss_fn"
            )

    def _is_single_process(self, global_loss: bool = False) -> bool:
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
                f"this is one of {size} processes, and train_batch averages its gradients with "
                "none of them, also in DistributedDataParallel, unless you call "
                "syncpipe.distributed.data_parallel(pipe). Ignore this if it is to train alone",
                stacklevel=caller_stacklevel(),
            )

    # --- a module --------------------------------------------------------------------------------

    def train(self, mode: bool = True) -> Self:
        """As ``nn.Module.train``."""
        super().train(mode)
        for partition in self._layout.partitions:
            partition.training = mode
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # All that moves or casts a module comes here, that of a module around it as well.
        if moves(fn, self.devices):
            raise TypeError(
                "this would move a Pipe (or a module that contains it), or forget its values, but "
                "its partitions are on devices of their own: set pipe.devices = [...], or make the "
                "Pipe with devices=[...]"
            )
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, *args: Any
    ) -> None:
        translate_keys(state_dict, prefix, self)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)
        if local_metadata.get("assign_to_params_buffers", False):
            for partition, worker in zip(self.partitions, self._layout.workers, strict=True):
                own = tuple(f"{prefix}{name}." for name in partition._modules)
                for key, value in state_dict.items():
                    if key.startswith(own) and isinstance(value, Tensor):
                        state_dict[key] = value.to(worker.device)

    def __prepare_scriptable__(self) -> NoReturn:
        raise TypeError(
            "a Pipe cannot become TorchScript: torch.jit.script(pipe[:]) makes it of its layers, "
            "and layers that are TorchScript may be in a Pipe"
        )

    def __getstate__(self) -> dict[str, Any]:
        # Threads, streams and locks are made anew where the pipe is used. A copy is alone there.
        gone = dict.fromkeys(("_pipeline", "_trace", "_averaging"))
        counts = {"_loss_counts": LossCounts(), "_eval_counts": LossCounts()}
        return {**self.__dict__, **gone, "_source_layers": {}, **counts}

    def __setattr__(self, name: str, value: Any) -> None:
        layers = list(self.__dict__.get("_modules", ()))
        if isinstance(value, LayerSpec) and name in layers:
            self[layers.index(name)] = value  # built now, for optimizers
            return
        if name not in layers:
            check_setting(name, value)
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            raise unknown_attribute(name, dir(type(self)), error) from None

    def __repr__(self) -> str:
        replicas = f"replicas={self.replicas}, " if max(self.replicas, default=1) > 1 else ""
        schedule = "" if self.schedule == "1f1b" else f", schedule={schedule_label(self.schedule)}"
        lines = [
            f"{type(self).__name__}(balance={self.balance}, {replicas}chunks={self.chunks}, "
            f"checkpoint={self.checkpoint!r}{schedule}"
        ]
        layers = iter(self._modules.items())
        for j, those in enumerate(self._layout.workers_of):
            lines.append(f"  stage {j} on {', '.join(str(worker.device) for worker in those)}:")
            for name, layer in islice(layers, self._layout.balance[j]):
                lines.append(indent(f"({name}): {layer!r}", "    "))
        return "\n".join([*lines, ")"])
