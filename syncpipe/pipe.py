"""``Pipe``: the module that people hold. It wires the parts, it does not compute."""

from __future__ import annotations

import operator
import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from itertools import islice
from textwrap import indent
from typing import Any, NoReturn, cast, overload

import torch
from torch import Tensor, nn

from syncpipe.batchnorm_convert import defer_batch_norm
from syncpipe.checkpoints import translate_keys
from syncpipe.forward import Pipeline
from syncpipe.partition import (
    check_balance,
    check_devices,
    check_input,
    check_module,
    check_shared,
    default_devices,
    missing_balance,
    move_layers,
    moves,
    placed_balance,
    resolve_workers,
)
from syncpipe.runtime.worker import Worker
from syncpipe.skip import verify_skippables
from syncpipe.stage import Partition

__all__ = ["Pipe", "inline"]

_CHECKPOINT_MODES = ("always", "except_last", "never")

_building = threading.RLock()
_inline: ContextVar[bool] = ContextVar("syncpipe_inline", default=False)


class inline(AbstractContextManager[None]):
    """A context in which every pipe runs on the calling thread, without any hand-off.

    For a debugger, and for whatever looks at one thread only. The results are the same::

        with syncpipe.inline():
            y = pipe(x)
    """

    def __enter__(self) -> None:
        self._token = _inline.set(True)

    def __exit__(self, *exc_info: object) -> None:
        _inline.reset(self._token)


class Pipe(nn.Module):
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
        module: the layers. They are moved to their devices in place.
        balance: for each partition the number of its layers. Without it, the layers must already
            be on several devices: consecutive ones on one device form a partition.
        devices: for each partition a device, as ``torch.device`` takes it, an index of an
            accelerator, or a :class:`Worker`; the same one may be named more than once.
            ``"cpu:0"``, ``"cpu:1"``, ... are CPU workers of their own. By default all
            accelerators; where there is none, one CPU worker for each partition.
        chunks: the number of micro-batches, at most (a small mini-batch gives fewer).
        checkpoint: which micro-batches are re-materialized, storing nothing for backward and
            being computed again there: ``"always"`` all of them, ``"except_last"`` all but the
            last, ``"never"`` none. It makes no difference in ``eval()`` mode and without grad.
        deferred_batch_norm: let BatchNorm update its running statistics once a mini-batch, as if
            it had gone through whole. The modules in ``module`` itself are not changed.

    Raises:
        TypeError: ``module`` is not an ``nn.Sequential``, or skips do not fit
            (``verify_skippables``), or another argument is of the wrong type.
        ValueError: ``balance`` does not fit the module, ``chunks`` or ``checkpoint`` is not
            possible, or layers or parameters are shared where they cannot be.
        IndexError: fewer devices than partitions.
    """

    _syncpipe_skips_are_internal = True

    def __init__(
        self,
        module: nn.Sequential,
        balance: Iterable[int] | None = None,
        *,
        devices: Iterable[Any] | None = None,
        chunks: int = 1,
        checkpoint: str = "except_last",
        deferred_batch_norm: bool = False,
    ) -> None:
        super().__init__()
        check_module(module)
        verify_skippables(module)
        self.chunks = chunks
        self.checkpoint = checkpoint
        if balance is None:
            balance, devices = _placed(module, devices)
        sizes = check_balance(balance, len(module))
        self._asked_devices = None if devices is None else check_devices(devices)
        # Straight into the dict: the names are the module's own, whatever attributes we have.
        self._modules.update(module._modules)
        self.training = module.training
        self._place(sizes, self._resolve(len(sizes)))
        if deferred_batch_norm:  # where the buffers are by now, which both modules share
            self._modules.update(defer_batch_norm(module)._modules)
            self._place(sizes, self._workers)

    def _resolve(self, partitions: int) -> list[Worker]:
        devices = self._asked_devices
        return resolve_workers(
            default_devices(partitions) if devices is None else devices, partitions
        )

    def _place(self, balance: list[int], workers: list[Worker]) -> None:
        """Cuts the layers and moves them; leaves everything as it was when that is refused."""
        layers = iter(cast("dict[str, nn.Module]", self._modules).items())
        partitions = []
        for size in balance:
            partition = Partition()
            partition._modules.update(islice(layers, size))
            partition.training = self.training
            partitions.append(partition)
        check_shared(partitions, workers)
        move_layers(partitions, workers)
        self._balance, self._workers, self._partitions = balance, workers, partitions
        self._layers = tuple(self._modules.values())
        self._pipeline: Pipeline | None = None

    @property
    def balance(self) -> list[int]:
        """For each partition the number of its layers. Setting it cuts the layers anew."""
        return list(self._balance)

    @balance.setter
    def balance(self, balance: Iterable[int]) -> None:
        sizes = check_balance(balance, len(self))
        self._place(sizes, self._resolve(len(sizes)))

    @property
    def devices(self) -> list[torch.device]:
        """For each partition its device. Setting it moves the layers."""
        return [worker.device for worker in self._workers]

    @devices.setter
    def devices(self, devices: Iterable[Any]) -> None:
        asked = check_devices(devices)
        workers = resolve_workers(asked, len(self._balance))
        self._place(self._balance, workers)
        self._asked_devices = asked

    @property
    def chunks(self) -> int:
        """The number of micro-batches, at most."""
        return self._chunks

    @chunks.setter
    def chunks(self, chunks: int) -> None:
        try:
            count = operator.index(chunks)
        except TypeError as error:
            raise TypeError(f"chunks must be an integer, not {chunks!r}") from error
        if isinstance(chunks, bool):
            raise ValueError(f"chunks={chunks!r}: must be a number, at least 1, not a bool")
        if count <= 0:
            raise ValueError(f"chunks={chunks!r}: the number of micro-batches must be at least 1")
        self._chunks = count

    @property
    def checkpoint(self) -> str:
        """Which micro-batches are re-materialized: always, except_last or never."""
        return self._checkpoint

    @checkpoint.setter
    def checkpoint(self, checkpoint: str) -> None:
        if checkpoint not in _CHECKPOINT_MODES:
            modes = ", ".join(map(repr, _CHECKPOINT_MODES))
            raise ValueError(f"checkpoint={checkpoint!r}: must be one of {modes}")
        self._checkpoint = checkpoint

    @property
    def partitions(self) -> list[nn.Sequential]:
        """For each stage its layers, as an ``nn.Sequential`` that shares them with the pipe."""
        self._follow_layers()
        return list(self._partitions)

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(cast("list[nn.Module]", list(self._modules.values())))

    @overload
    def __getitem__(self, index: int) -> nn.Module: ...

    @overload
    def __getitem__(self, index: slice) -> nn.Sequential: ...

    def __getitem__(self, index: int | slice) -> nn.Module:
        items = cast("list[tuple[str, nn.Module]]", list(self._modules.items()))
        if isinstance(index, slice):
            return nn.Sequential(OrderedDict(items[index]))
        try:
            return items[operator.index(index)][1]
        except IndexError:
            raise IndexError(f"layer {index} does not exist: the pipe has {len(self)}") from None

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
        self._follow_layers()
        check_input(input, self._workers[0].device)
        with _building:
            # After a fork its threads are gone, and its locks may be held by nobody.
            if self._pipeline is None or self._pipeline.process != os.getpid():
                self._pipeline = Pipeline(self._partitions, list(self._modules), self._workers)
            pipeline = self._pipeline
        run = pipeline.__call__ if "torch._dynamo" not in sys.modules else _untraced(pipeline)
        return run(
            input,
            chunks=self._chunks,
            checkpoint=self._checkpoint if self.training else "never",
            inline=_inline.get(),
        )

    forward._torchdynamo_disable = True  # type: ignore[attr-defined]

    def _follow_layers(self) -> None:
        """Notices layers that were replaced by name (``pipe.fc = ...``, quantization, LoRA)."""
        if tuple(self._modules.values()) == self._layers:
            return
        module = nn.Sequential()
        module._modules.update(cast("dict[str, nn.Module]", self._modules))
        check_module(module)
        verify_skippables(module)
        self._place(check_balance(self._balance, len(self)), self._workers)

    def train(self, mode: bool = True) -> Pipe:
        """As ``nn.Module.train``."""
        super().train(mode)
        for partition in self._partitions:
            partition.training = mode
        return self

    def to(self, *args: Any, **kwargs: Any) -> Pipe:
        """As ``nn.Module.to``, for a dtype or a memory format.

        Raises:
            TypeError: a device is given.
        """
        device = torch._C._nn._parse_to(*args, **kwargs)[0]
        if device is not None:
            _refuse_placement(f"to({str(device)!r})")
        super().to(*args, **kwargs)
        return self

    def cpu(self) -> NoReturn:
        """Refused: the devices of a pipe are given when it is made."""
        _refuse_placement("cpu()")

    def cuda(self, device: Any = None) -> NoReturn:
        """Refused: the devices of a pipe are given when it is made."""
        _refuse_placement("cuda()")

    def xpu(self, device: Any = None) -> NoReturn:
        """Refused: the devices of a pipe are given when it is made."""
        _refuse_placement("xpu()")

    def to_empty(self, *, device: Any, recurse: bool = True) -> NoReturn:
        """Refused: the devices of a pipe are given when it is made."""
        _refuse_placement("to_empty()")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Pipe:
        # A parent that is moved calls this on its children.
        if moves(fn, self.devices):
            _refuse_placement("a move of the module that contains it")
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, *args: Any
    ) -> None:
        translate_keys(state_dict, prefix, self)
        if local_metadata.get("assign_to_params_buffers", False):
            homes = dict(zip(self._modules, self._layer_devices(), strict=True))
            for key, value in state_dict.items():
                name = key[len(prefix) :].split(".", 1)[0]
                if key.startswith(prefix) and name in homes and isinstance(value, Tensor):
                    state_dict[key] = value.to(homes[name])
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)

    def _layer_devices(self) -> list[torch.device]:
        return [
            worker.device
            for worker, size in zip(self._workers, self._balance, strict=True)
            for _ in range(size)
        ]

    def __getstate__(self) -> dict[str, Any]:
        # Threads, streams and locks are made anew where the pipe is used.
        return {**self.__dict__, "_pipeline": None}

    def __repr__(self) -> str:
        lines = [
            f"{type(self).__name__}(balance={self.balance}, chunks={self.chunks}, "
            f"checkpoint={self.checkpoint!r}"
        ]
        layers = iter(self._modules.items())
        for j, (size, device) in enumerate(zip(self._balance, self.devices, strict=True)):
            lines.append(f"  stage {j} on {device}:")
            for name, layer in islice(layers, size):
                lines.append(indent(f"({name}): {layer!r}", "    "))
        return "\n".join([*lines, ")"])


def _placed(module: nn.Sequential, devices: Iterable[Any] | None) -> tuple[list[int], list[Any]]:
    """Balance and devices of layers that are on several devices already."""
    balance, found = placed_balance(module)
    if not len(module):
        return [], []
    if devices is not None or len(set(found)) < 2:
        asked = found if devices is None else check_devices(devices)
        raise missing_balance(len(module), max(2, len(asked)))
    return balance, list(found)


def _untraced(pipeline: Pipeline) -> Callable[..., Any]:
    """The pipeline, out of sight of torch.compile: that is for layers, not for what is between."""
    disable: Any = torch.compiler.disable
    return cast("Callable[..., Any]", disable(pipeline.__call__))


def _refuse_placement(what: str) -> NoReturn:
    raise TypeError(
        f"{what} would change the devices of a Pipe, whose partitions are on devices of their own: "
        "set pipe.devices = [...], or make the Pipe with devices=[...]"
    )
