"""The module that a :class:`Pipe` is: a list of layers, settings that place them, names, state."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import chain, islice
from textwrap import indent
from typing import Any, NoReturn, Self, overload

import torch
from torch import Tensor, distributed, nn

from syncpipe.hints import FixedList, caller_stacklevel, check_setting, unknown_attribute
from syncpipe.layers.conversion.layer import Holder, ModelNames
from syncpipe.layers.listing import Layer, LayerSpec, as_layer
from syncpipe.layers.placement import check_devices, moves
from syncpipe.layers.state_dict_keys import translate_keys
from syncpipe.options import (
    checked_chunks,
    checked_modes,
    checked_replicas,
    checked_schedule,
    slots_of,
)
from syncpipe.pipe.layout import Layout, same_layers
from syncpipe.planner.auto import auto
from syncpipe.runtime.interrupts import forkable_lock
from syncpipe.schedules.named import ScheduleLike, schedule_label
from syncpipe.stages.pipeline import Pipeline
from syncpipe.timeline.trace import Trace

#: Held while a pipeline is made of the layers; not while the user's code runs, which may wait for
#: other threads.
building = forkable_lock()


class Container(ModelNames):
    """The layers of a pipe. What changes them, or a setting, makes a new layout."""

    _layout: Layout
    _pipeline: Pipeline | None = None
    _source_layers: Any
    _chunks: int
    _time_checked = False
    _averaging: Any = None  #: over processes, see ``syncpipe.distributed``
    _trace: Trace | None = None
    _warned = False  #: of other processes

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
        eval_sample: Any = None,
        **sample_kwargs: Any,
    ) -> Self:
        """Make a pipe of any model that fits the devices and can train, in one call::

            pipe = Pipe.auto(model, input_ids, attention_mask=mask, batch_size=64)

        Converts the model (:func:`syncpipe.sequential`) unless it is an ``nn.Sequential`` with a
        layer for each device, measures its layers, plans for the free memory of the devices
        (:func:`syncpipe.plan`), and runs one step to check that it fits. If it does not, plans for
        less memory are tried. Only the devices of the layers change.

        Args:
            model: any module. On ``meta`` it is initialized, or loaded from ``weights``, by stage.
            sample, sample_kwargs: the arguments of one call with a few samples, which are repeated.
            batch_size: samples in a mini-batch.
            devices: as for ``Pipe``, or their number, those with the most memory first.
            memory: bytes to use on each device (a number, ``"16GB"``, or one for each). Default:
                the free memory.
            optimizer: makes an optimizer from a list of parameters; its state counts as memory.
            loss_fn, target: as for :meth:`train_batch`; by default the mean of the outputs.
            weights: a folder or a file of safetensors, see :func:`syncpipe.checkpoints.reader`.
            init_fn: as for ``Pipe``.
            timeout: seconds for measurements.
            verbose: print three lines: free memory, planned speed, what limits it.
            eval_sample: as for :func:`syncpipe.sequential`.

        Raises:
            ValueError: the sample has no batch in dimension 0, the model cannot be split, or no
                plan fits (``NoPlan``). The layers are then on their old devices.
        """
        made: Self = auto(
            cls, model, sample, sample_kwargs, batch_size=batch_size, devices=devices,
            memory=memory, optimizer=optimizer, loss_fn=loss_fn, target=target, weights=weights,
            init_fn=init_fn, timeout=timeout, verbose=verbose, eval_sample=eval_sample,
        )  # fmt: skip
        return made

    # --- layout ----------------------------------------------------------------------------------

    def _set_layout(self, layout: Layout) -> None:
        """Replaces the layout, and the registered modules by its layers."""
        self._layout = layout
        if not same_layers(self._modules, layout.layers):
            self._modules = dict[str, Any](layout.layers)
        self._pipeline, self._time_checked = None, False

    def _change(self, **asked: Any) -> None:
        """Changes settings of the layout, and its layers to those that are registered now."""
        asked = {"layers": dict(self._modules), **asked}
        if new := asked["layers"].keys() - self._layout.layers.keys():
            raise ValueError(
                f"{', '.join(sorted(new))}: a module that is no layer was assigned to the pipe, "
                "whose modules are its layers: del it, and keep it elsewhere, or make another Pipe"
            )
        for k, (name, layer) in enumerate(self._modules.items()):
            if isinstance(layer, LayerSpec) and asked["layers"].get(name) is layer:
                raise ValueError(
                    f"pipe.{name} is a {layer!r}, which is not built, so an optimizer would miss "
                    f"its parameters: assign it by pipe[{k}] = {layer!r}"
                )
        self._set_layout(self._layout.changed(self.training, **asked))

    def _sync_layout(self) -> Layout:
        """Updates the layout for layers that were replaced by name (``pipe.fc = ...``, LoRA)."""
        for source, layers in self._source_layers.items():
            if list(source._modules.items()) != layers:
                self._source_layers = {}  # warns once
                warnings.warn(
                    "the nn.Sequential that this pipe was made from has other layers now "
                    f"({len(source)}, was {len(layers)}), and the pipe keeps the old ones: make "
                    "another Pipe, or change pipe[k]",
                    stacklevel=caller_stacklevel(),
                )
        with building:
            if not same_layers(self._modules, self._layout.layers):
                self._change()
            return self._layout

    @property
    def balance(self) -> list[int]:
        """The number of layers in each partition. Setting it splits the layers anew."""
        return FixedList("balance", self._layout.balance)

    @balance.setter
    def balance(self, balance: Iterable[int] | str) -> None:
        self._change(balance=balance)

    @property
    def devices(self) -> list[torch.device]:
        """The device of each partition, or of its replicas. Setting it moves the layers."""
        served = chain.from_iterable(self._layout.workers_of)
        return FixedList("devices", [worker.device for worker in served])

    @devices.setter
    def devices(self, devices: Iterable[Any]) -> None:
        self._change(devices=check_devices(devices))

    @property
    def replicas(self) -> list[int]:
        """The number of devices that serve each partition. Setting it assigns the devices anew."""
        return FixedList("replicas", map(len, self._layout.workers_of))

    @replicas.setter
    def replicas(self, replicas: int | Iterable[int]) -> None:
        self._change(replicas=checked_replicas(replicas))

    @property
    def chunks(self) -> int:
        """The maximum number of micro-batches."""
        return self._chunks

    @chunks.setter
    def chunks(self, chunks: int) -> None:
        self._chunks = checked_chunks(chunks)

    @property
    def checkpoint(self) -> Any:
        """What to recompute in backward, or send to the host: for all stages, or for each."""
        return self._layout.checkpoint

    @checkpoint.setter
    def checkpoint(self, checkpoint: Any) -> None:
        self._layout = self._sync_layout().with_checkpoint(checked_modes(checkpoint))

    @property
    def schedule(self) -> ScheduleLike:
        """The default schedule of :meth:`train_batch`. Setting it resets slots."""
        return self._layout.schedule

    @schedule.setter
    def schedule(self, schedule: ScheduleLike) -> None:
        self._layout = self._layout.with_schedule(checked_schedule(schedule))

    @property
    def slots(self) -> Any:
        """The slots of the schedule ``"1f1b"``; None by default. Setting them chooses it."""
        return slots_of(self.schedule)

    @slots.setter
    def slots(self, slots: str | Sequence[int] | None) -> None:
        plain = "1f1b" if slots_of(self.schedule) is not None else self.schedule
        self.schedule = checked_schedule(plain, slots)

    @property
    def partitions(self) -> list[nn.Sequential]:
        """The layers of each stage, as an ``nn.Sequential`` that shares them with the pipe."""
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
        """Replaces a layer, in its stage and under its name.

        The new layer is moved to, or built on, the device of its stage. Pass its parameters to the
        optimizer by ``add_param_group``. An error leaves the pipe unchanged.
        """
        index = self._index(index)
        name = list(self._modules)[index]
        self._change(layers={**self._modules, name: as_layer(layer, f"the new layer {index}")})

    def _index(self, index: Any) -> int:
        if not -len(self) <= operator.index(index) < len(self):
            raise IndexError(f"layer {index} does not exist: the pipe has {len(self)}")
        return int(index) % len(self)

    # --- a module --------------------------------------------------------------------------------

    def train(self, mode: bool = True) -> Self:
        """As ``nn.Module.train``."""
        super().train(mode)
        for partition in self._layout.partitions:
            partition.training = mode
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # Every move or cast of this module, or of one that contains it, calls _apply.
        if moves(fn, self.devices):
            raise TypeError(
                "this would move a Pipe (or a module that contains it), or discard its values, but "
                "its partitions have their own devices: set pipe.devices, or make it with devices="
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
            "a Pipe cannot become TorchScript: torch.jit.script(pipe[:]) scripts its layers, and a "
            "Pipe may contain scripted layers"
        )

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile each layer in place, by ``nn.Module.compile``.

        Layers assigned later, ``pipe[k] = layer``, are not compiled. A stage with replicas then
        raises an error, because replicas are shallow copies of its layers.

        Raises:
            RuntimeError: a layer was made by ``sequential``, and PyTorch is older than 2.12.
        """
        if torch.__version__ < "2.12" and any(isinstance(layer, Holder) for layer in self):
            raise RuntimeError(
                f"compile() of converted layers needs PyTorch 2.12 or later, and this is "
                f"{torch.__version__}, whose compiler does not end on them: compile modules of the "
                "model before it is converted (model.block.compile()), or install 2.12"
            )
        for partition in self.partitions:
            partition.compile(*args, **kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        """Average gradients over processes once, in the first call after this block::

            with pipe.no_sync():
                pipe.train_batch(a, target_a, loss_fn=loss_fn, accumulate=2)
            pipe.train_batch(b, target_b, loss_fn=loss_fn, accumulate=2)
            optimizer.step()

        For ``train_batch``, and for ``pipe(x)`` in the block even if ``backward()`` is outside it.
        """
        if self._is_single_process():
            raise RuntimeError(
                "no_sync() is for a pipe in several processes: call "
                "syncpipe.distributed.data_parallel(pipe) first"
            )
        return self._averaging.no_sync()  # type: ignore[no-any-return]

    def trace(self, title: str = "") -> Trace:
        """Record the actions of this pipe and their times::

            with pipe.trace() as trace:
                loss = pipe.train_batch(input, target, loss_fn=loss_fn)
            print(trace.table(), trace.bubble, trace.busy)
            trace.save("step.svg")    # or .png; or .json for https://ui.perfetto.dev

        ``title`` is the title of pictures. A pipe has one trace at a time.
        """
        names = [str(worker.device) for worker in dict.fromkeys(chain(*self._layout.workers_of))]
        rows = [f"{name} ({w})" if names.count(name) > 1 else name for w, name in enumerate(names)]
        return Trace(rows, self._attach_trace, title)

    def _attach_trace(self, trace: Trace | None) -> None:
        if trace is not None and self._trace is not None:
            raise RuntimeError("this pipe is being traced already: end that trace first")
        self._trace = trace

    def _warn_of_other_processes(self) -> None:
        """Warns once that train_batch does not average gradients over processes, as DDP would."""
        if self._warned or not (distributed.is_available() and distributed.is_initialized()):
            return
        if (size := distributed.get_world_size()) > 1:
            self._warned = True
            warnings.warn(
                f"this is one of {size} processes, and train_batch does not average gradients over "
                "them, not even in DistributedDataParallel, unless you call "
                "syncpipe.distributed.data_parallel(pipe). Ignore this if that is intended",
                stacklevel=caller_stacklevel(),
            )

    def __setattr__(self, name: str, value: Any) -> None:
        layers = list(self.__dict__.get("_modules", ()))
        if isinstance(value, LayerSpec) and name in layers:
            self[layers.index(name)] = value  # builds it now, for optimizers
            return
        if name not in layers:
            check_setting(name, value)
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            raise unknown_attribute(name, type(self), error) from None

    def __repr__(self) -> str:
        replicas = f"replicas={self.replicas}, " if max(self.replicas, default=1) > 1 else ""
        schedule = "" if self.schedule == "1f1b" else f", schedule={schedule_label(self.schedule)}"
        lines = [
            f"{type(self).__name__}(balance={self.balance}, {replicas}chunks={self.chunks}, "
            f"checkpoint={self.checkpoint!r}{schedule}"
        ]
        layers = iter(self._modules.items())
        for j, workers in enumerate(self._layout.workers_of):
            lines.append(f"  stage {j} on {', '.join(str(worker.device) for worker in workers)}:")
            for name, layer in islice(layers, self._layout.balance[j]):
                lines.append(indent(f"({name}): {layer!r}", "    "))
        return "\n".join([*lines, ")"])
