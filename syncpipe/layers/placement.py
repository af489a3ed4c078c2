"""Cuts an ``nn.Sequential`` into partitions and checks that they can be placed on devices."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from syncpipe.data.trees import flatten
from syncpipe.data.uncut import NoChunk
from syncpipe.layers.conversion.sequential import Converted, hooks_of
from syncpipe.layers.unpack import PipeSequential
from syncpipe.runtime.streams import accelerators, checked_device, same_memory
from syncpipe.runtime.worker import Worker

__all__ = [
    "check_balance", "check_devices", "check_input", "check_module", "check_no_hooks",
    "default_devices", "missing_balance", "moves", "own_call", "placed_balance",
    "resolve_workers",
]  # fmt: skip


def own_call(module: nn.Module, kind: type[nn.Module]) -> str | None:
    """The name of a call method (``forward``, ...) that a module overrides over ``kind``."""
    for name in ("forward", "__call__", "_wrapped_call_impl", "_call_impl"):
        of_class = getattr(type(module), name) is not getattr(kind, name)
        if of_class or (name != "__call__" and name in module.__dict__):
            return name
    return None


def check_module(module: Any) -> None:
    """Raise unless ``module`` can be cut into a chain of layers."""
    if hasattr(module, "_orig_mod"):
        raise TypeError(
            "module is compiled as a whole (torch.compile), which a pipe would not run: give it "
            "the module itself, and call pipe.compile()"
        )
    if not isinstance(module, nn.Sequential):
        raise TypeError(
            f"module must be an nn.Sequential, not {type(module).__name__}: make one of any model "
            "by syncpipe.sequential(model, sample), or write it as nn.Sequential(layer, ...), with "
            "skip connections by syncpipe.skip"
        )
    kinds: list[type[nn.Sequential]] = [Converted, PipeSequential, nn.Sequential]
    kind = next(kind for kind in kinds if isinstance(module, kind))
    if (method := own_call(module, kind)) is not None:
        raise TypeError(
            f"module ({type(module).__name__}) is an nn.Sequential with a {method} of its own, "
            "which a pipe would not run: put what it does into layers"
        )
    absent = [name for name, layer in module._modules.items() if layer is None]
    own, hooks = [*module._parameters, *module._buffers], hooks_of(module)
    wrong = {
        f"has no layer under the name {', '.join(map(repr, absent))} (it is None)": absent,
        f"has parameters or buffers of its own ({', '.join(own)}) beside its layers, where no "
        "layer of a pipe can use them: move them into a layer": own,
        f"has hooks on the nn.Sequential itself ({', '.join(hooks)}), which a pipe would not run: "
        "register them on the pipe, or on layers": hooks,
        "was compiled as a whole (module.compile()), which a pipe would not run: compile the "
        "layers": module._compiled_call_impl is not None,
    }
    for what, holds in wrong.items():
        if holds:
            raise ValueError(f"module {what}")


def check_no_hooks(partitions: Sequence[nn.Module]) -> None:
    """Raise if a partition has hooks: another balance makes new partitions without them."""
    for j, partition in enumerate(partitions):
        if hooks := hooks_of(partition):
            raise ValueError(
                f"pipe.partitions[{j}] has hooks ({', '.join(hooks)}), and another balance makes "
                "other partitions, without them: remove the hooks first, or register them on layers"
            )


def check_balance(balance: Iterable[int], layers: int) -> list[int]:
    """The balance as a list of int; raises if it does not fit the number of layers."""
    if isinstance(balance, (str, bytes, Set)) or not isinstance(balance, Iterable):
        number = isinstance(balance, int) and not isinstance(balance, bool)
        hint = f": did you mean chunks={balance!r}?" if number else ""
        if callable(getattr(balance, "options", None)):
            hint = ": write Pipe(module, **plan.options())"
        raise TypeError(f"balance must be a list of numbers of layers, not {balance!r}{hint}")
    given: list[Any] = list(balance)
    if not all(hasattr(size, "__index__") and not isinstance(size, bool) for size in given):
        raise TypeError(f"balance must hold integers: {balance!r}")
    checked = list(map(operator.index, given))
    if any(size <= 0 for size in checked):
        raise ValueError(
            f"balance={checked}: every partition needs at least one layer; leave out the others"
        )
    if sum(checked) != layers:
        raise ValueError(
            f"balance={checked} adds up to {sum(checked)} layers, but module has {layers}: the "
            "numbers must add up to len(module)"
        )
    return checked


def missing_balance(layers: int, devices: int) -> ValueError:
    """The error for a missing balance, with code to paste."""
    n = max(1, min(devices, layers))
    even = [layers // n + (j < layers % n) for j in range(n)]
    return ValueError(
        f"balance is missing: how many of the {layers} layers go to each device? To start from an "
        f"even cut, paste\n\n    pipe = Pipe(module, balance={even})\n\nand move layers between "
        "the numbers until the stages take about the same time; or let it be found: by "
        'balance="parameters", or measured by syncpipe.balance.balance_by_time. (Without balance, '
        "the layers must already be on several devices, consecutive ones on one device forming a "
        "partition.)"
    )


def placed_balance(module: nn.Sequential) -> tuple[list[int], list[torch.device]]:
    """The balance and devices of a module whose layers are already on their devices.

    Consecutive layers on one device form a partition. A layer without tensors of its own (tied ones
    belong to their first layer) joins the layer before it, or at the start the first with tensors.
    """
    seen, homes = set[int](), list[torch.device | None]()
    for name, layer in module._modules.items():
        tensors = [] if layer is None else [*layer.parameters(), *layer.buffers()]
        found = {tensor.device for tensor in tensors if id(tensor) not in seen}
        seen.update(map(id, tensors))
        if len(found) > 1:
            raise ValueError(
                f"layer {name!r} ({type(layer).__name__}) is on several devices "
                f"({', '.join(sorted(map(str, found)))}): a layer must be on one device"
            )
        homes.append(found.pop() if found else homes[-1] if homes else None)
    first = next(filter(None, homes), None)
    runs = [(home, len(list(group))) for home, group in groupby(home or first for home in homes)]
    return [size for home, size in runs if home], [home for home, _ in runs if home]


def default_devices(partitions: int) -> list[torch.device]:
    """All accelerators; without any, one CPU worker per partition."""
    return accelerators() or [torch.device("cpu", j) for j in range(partitions)]


def check_devices(devices: Any) -> list[Any]:
    """The devices as a list; raises with the way out if they are none."""
    if isinstance(devices, int) and not isinstance(devices, bool):
        raise TypeError(
            f"devices={devices!r} is a number, and devices is a list: write devices=[0, 1, ...] "
            "for accelerators, devices=['cpu:0', 'cpu:1', ...] for CPU workers"
        )
    if isinstance(devices, (str, bytes, torch.device, Worker, Set, Mapping)) or not isinstance(
        devices, Iterable
    ):
        way = "write devices=['cpu:0', 'cpu:1'], or leave it out for all accelerators"
        parts: list[Any] = devices.split(",") if isinstance(devices, str) else [devices]
        if isinstance(devices, torch.device | Worker) or all(map(_is_device, parts)):
            way = f"write [{', '.join(repr(p.strip() if type(p) is str else p) for p in parts)}]"
        raise TypeError(f"devices must be a list of devices, in order, not {devices!r}: {way}")
    return list(devices)


def _is_device(name: Any) -> bool:
    try:
        return isinstance(name, str) and bool(torch.device(name.strip()))
    except RuntimeError:
        return False


def resolve_workers(devices: Sequence[Any], partitions: int) -> list[Worker]:
    """One worker per partition; equal devices share a worker."""
    given = list(devices)
    if len(given) < partitions:
        raise IndexError(
            f"balance has {partitions} partitions, but there are only {len(given)} devices "
            f"({', '.join(map(str, given)) or 'none'}): give a device for each partition (the "
            "same one may be named twice), or fewer partitions"
        )
    found = [d if isinstance(d, Worker) else _check_device(d) for d in given[:partitions]]
    workers = {d: Worker.shared(d) for d in dict.fromkeys(found) if not isinstance(d, Worker)}
    return [d if isinstance(d, Worker) else workers[d] for d in found]


def _check_device(device: Any) -> torch.device:
    if isinstance(device, bool) or not isinstance(device, (int, str, torch.device)):
        raise TypeError(f"devices: {device!r} is not a device (a torch.device, a str or an int)")
    present = accelerators()
    kind = (
        present[0].type if present else "cuda"
    )  # of a number; without accelerators it raises below
    try:
        found = checked_device(device, kind)
    except RuntimeError as error:
        raise ValueError(f"devices: {device!r} is not a device: {error}") from error
    if found.type in ("cpu", "meta"):
        return found
    if not present or kind != found.type:
        here = f"this machine has {kind}" if present else "this machine has none"
        raise ValueError(
            f"devices: {device!r} is an accelerator, but {here}: name one of these, or "
            "CPU workers, for example ['cpu:0', 'cpu:1']"
        )
    index = torch.accelerator.current_device_index() if found.index is None else found.index
    if index >= len(present):
        raise ValueError(
            f"devices: {device!r} does not exist here, there are {len(present)} devices"
        )
    return torch.device(found.type, index)


def check_input(input: Any, device: torch.device) -> None:
    """Raise if the input is not on the device of the first partition."""
    for leaf in flatten(input)[0]:
        tensor = leaf.tensor if isinstance(leaf, NoChunk) else leaf
        if isinstance(tensor, Tensor) and not same_memory(tensor.device, device):
            raise ValueError(
                f"the input is on {tensor.device}, but the first partition is on {device}: "
                f"move it there with input.to({str(device)!r})"
            )


def moves(fn: Callable[[Tensor], Tensor], devices: Sequence[torch.device]) -> bool:
    """Whether ``fn``, given to ``nn.Module._apply``, changes devices or discards values.

    Tries ``fn`` on a tensor on each device.
    """
    for device in dict.fromkeys(devices):
        probe = torch.arange(1.0, 65.0, device=device)
        try:
            found = fn(probe)
        except (NotImplementedError, AssertionError, RuntimeError):
            return True  # no such device, or no data to move
        if found.device != probe.device:
            return True
        if found is not probe and device.type != "meta" and not found.to(probe.dtype).equal(probe):
            return True
    return False
