"""An ``nn.Sequential`` that is cut into partitions, each on a device of its own.

What ``Pipe`` is before it runs anything: the layers under their own names, the balance, the
devices; and what must not change behind its back.
"""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, NoReturn, Self, cast, overload

import torch
from torch import Tensor, nn

from syncpipe.balance.by_name import balance_named
from syncpipe.layers.batchnorm_convert import defer_batch_norm
from syncpipe.layers.conversion.names import in_order
from syncpipe.layers.placement import (
    check_balance,
    check_devices,
    check_module,
    check_no_hooks,
    check_shared,
    default_devices,
    missing_balance,
    move_layers,
    moves,
    placed_balance,
    resolve_workers,
)
from syncpipe.layers.state_dict_keys import translate_keys
from syncpipe.runtime.worker import Worker
from syncpipe.skip import verify_skippables
from syncpipe.stages.pipeline import Pipeline
from syncpipe.stages.run import Partition

__all__ = ["Partitioned"]


class Partitioned(nn.Module):
    """The layers of an ``nn.Sequential`` on several devices; arguments are those of ``Pipe``."""

    _syncpipe_skips_are_internal = True

    def _cut(
        self,
        module: nn.Sequential,
        balance: Iterable[int] | str | None,
        devices: Iterable[Any] | None,
        deferred_batch_norm: bool,
    ) -> None:
        """The last thing to do in ``__init__``: a layer may be named as an attribute is."""
        check_module(module)
        verify_skippables(module)
        if balance is None:
            balance, devices = _placed(module, devices)
        self._asked_devices = None if devices is None else check_devices(devices)
        sizes = self._sizes(balance, module)
        # Straight into the dict: the names are the module's own, whatever attributes we have.
        self._modules.update(module._modules)
        self.training, self._defers = module.training, deferred_batch_norm
        self._place(sizes, self._resolve(len(sizes)))

    def _sizes(self, balance: Iterable[int] | str, module: nn.Sequential) -> list[int]:
        """The balance as numbers; by name there is a partition for each device."""
        if isinstance(balance, str):
            devices = default_devices(0) if self._asked_devices is None else self._asked_devices
            if not devices:
                balance_named(balance, module, 1)  # whether it is a name at all
                raise ValueError(
                    f"balance={balance!r} makes a partition for each device, but there are no "
                    "devices: give devices=['cpu:0', 'cpu:1'], for example"
                )
            balance = balance_named(balance, module, min(len(devices), max(1, len(module))))
        return check_balance(balance, len(module))

    def _resolve(self, partitions: int) -> list[Worker]:
        devices = self._asked_devices
        return resolve_workers(
            default_devices(partitions) if devices is None else devices, partitions
        )

    def _place(self, balance: list[int], workers: list[Worker]) -> None:
        """Cuts the layers and moves them; leaves everything as it was when that is refused."""
        layers = iter(cast("dict[str, nn.Module]", self._modules).items())
        partitions = []
        old: list[Partition] = self.__dict__.get("_partitions", [])
        same = self.__dict__.get("_balance") == balance
        for j, size in enumerate(balance):
            partition = Partition()
            if same:  # hooks, which are on the partitions that people have seen
                partition.__dict__.update({**old[j].__dict__, "_modules": {}})
            partition._modules.update(islice(layers, size))
            partition.training, partition.defers = self.training, self._defers
            partitions.append(partition)
        if not same:
            check_no_hooks(old)
        check_shared(partitions, workers)
        if self._defers:
            defer_batch_norm(self)
        move_layers(partitions, workers)
        self._balance, self._workers, self._partitions = balance, workers, partitions
        self._layers = tuple(self._modules.values())
        self._pipeline: Pipeline | None = None

    @property
    def balance(self) -> list[int]:
        """For each partition the number of its layers. Setting it cuts the layers anew."""
        return list(self._balance)

    @balance.setter
    def balance(self, balance: Iterable[int] | str) -> None:
        sizes = self._sizes(balance, self[:])
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

    def _follow_layers(self) -> None:
        """Notices layers that were replaced by name (``pipe.fc = ...``, quantization, LoRA)."""
        if tuple(self._modules.values()) == self._layers:
            return
        module = nn.Sequential()
        module._modules.update(cast("dict[str, nn.Module]", self._modules))
        check_module(module)
        verify_skippables(module)
        self._place(check_balance(self._balance, len(self)), self._workers)

    def train(self, mode: bool = True) -> Self:
        """As ``nn.Module.train``."""
        super().train(mode)
        for partition in self._partitions:
            partition.training = mode
        return self

    def to(self, *args: Any, **kwargs: Any) -> Self:
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

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
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

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """As of the wrapped module."""
        return in_order(self, prefix, recurse, remove_duplicate)

    def _layer_devices(self) -> list[torch.device]:
        return [
            worker.device
            for worker, size in zip(self._workers, self._balance, strict=True)
            for _ in range(size)
        ]


def _placed(module: nn.Sequential, devices: Iterable[Any] | None) -> tuple[list[int], list[Any]]:
    """Balance and devices of layers that are on several devices already."""
    balance, found = placed_balance(module)
    if not len(module):
        return [], []
    if devices is not None or len(set(found)) < 2:
        asked = found if devices is None else check_devices(devices)
        raise missing_balance(len(module), max(2, len(asked)))
    return balance, list(found)


def _refuse_placement(what: str) -> NoReturn:
    raise TypeError(
        f"{what} would change the devices of a Pipe, whose partitions are on devices of their own: "
        "set pipe.devices = [...], or make the Pipe with devices=[...]"
    )
