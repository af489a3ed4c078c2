"""``Pipe``: the module that people hold. It wires the parts, it does not compute."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn

from syncpipe.forward import forward
from syncpipe.layers.conversion.sequential import call_input
from syncpipe.layers.listing import Layers
from syncpipe.layers.placement import check_input
from syncpipe.options.arguments import (
    check_slots,
    checked_chunks,
    checked_schedule,
    shown_schedule,
)
from syncpipe.options.checkpoint import checked_modes, modes_of_stages
from syncpipe.options.elsewhere import arguments_answered, attribute_answered
from syncpipe.runtime.inline import driven
from syncpipe.runtime.worker import Worker
from syncpipe.schedules.auto import AutoSchedule
from syncpipe.schedules.build import ScheduleLike
from syncpipe.streamed import Streams
from syncpipe.timeline.trace import Trace
from syncpipe.training.loss.check import LossCounts
from syncpipe.training.measured import Measured

__all__ = ["Pipe"]


class Pipe(Streams):
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
            many layers), ``"type:regex"`` (as many layers whose class has a name that matches),
            ``"time"`` (the slowest takes as little time as can be, measured with ``sample``).
            Without it, the layers must already be on several devices: consecutive ones on one
            device form a partition.
        devices: for each partition a device, as ``torch.device`` takes it, an index of an
            accelerator, or a :class:`Worker`; the same one may be named more than once.
            ``"cpu:0"``, ``"cpu:1"``, ... are CPU workers of their own. By default all
            accelerators; where there is none, one CPU worker for each partition.
        replicas: for each partition how many devices serve it, or one number for all. Micro-batches
            are dealt to them in turn. ``devices`` then has all of them, stage by stage; the first
            one of a stage holds its layers, and the others copies; see docs/replicas.md.
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

        sample: for ``balance="time"``, an input of the size of a micro-batch.

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
        **unknown: Any,
    ) -> None:
        super().__init__()
        if unknown:
            raise arguments_answered(unknown)
        self._trace: Trace | None = None
        self._loss_counts = LossCounts()
        self.chunks = chunks
        self._checkpoint = checked_modes(checkpoint)
        self._schedule = checked_schedule(schedule, slots)
        self._cut(
            module, balance, devices, deferred_batch_norm, init_fn, seed, unpack, sample, replicas
        )

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
        check_slots(schedule, self.replicas)
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

    def _place(self, balance: list[int], served: list[tuple[Worker, ...]], *how: Any) -> None:
        check_slots(self._schedule, list(map(len, served)))
        super()._place(balance, served, *how)
        self._measured = Measured()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a mini-batch through the pipeline.

        Args:
            args, kwargs: one input, a tensor ``[batch, ...]`` or a tree, on the first device (all
                that the model takes, for layers made by :func:`syncpipe.sequential`). Tensors are
                cut along dimension 0 into at most ``chunks``; those in :class:`NoChunk` are not.

        Returns:
            What the plain module returns, on the last device, concatenated along dimension 0.

        Raises:
            ValueError: the input does not fit, or the outputs cannot be concatenated.
        """
        input = call_input(self, args, kwargs)
        if not self._modules:
            return input
        pipeline = self._ready()
        check_input(input, self._workers[0].device)
        self._watch(input, self._chunks)
        output = driven(forward, pipeline, input, chunks=self._chunks, **self._running())
        if not self._alone():
            self._averaging.forward(self._partitions, output)
        return output

    forward._torchdynamo_disable = True  # type: ignore[attr-defined]

    def __getstate__(self) -> dict[str, Any]:
        # Threads, streams and locks are made anew where the pipe is used. A copy is alone there.
        gone = {"_pipeline": None, "_trace": None, "_averaging": None}
        return {**self.__dict__, **gone, "_measured": Measured(), "_loss_counts": LossCounts()}

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            raise attribute_answered(name, error) from None

    def __repr__(self) -> str:
        shown = (
            f"{type(self).__name__}(balance={self.balance}, {self._shown_replicas()}"
            f"chunks={self.chunks}, "
            f"checkpoint={self.checkpoint!r}{shown_schedule(self._schedule)}"
        )
        return "\n".join([shown, *self._shown_stages(), ")"])


Pipe._whole = Pipe
