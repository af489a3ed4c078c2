"""What the layers of a model cost: measured on copies of them, or estimated."""

from __future__ import annotations

import operator
import sys
import time as clock
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from syncpipe.balance.copies import copy_of_tensor
from syncpipe.balance.estimate import AsOnGPU, DeviceSpec, Roofline, device_spec
from syncpipe.balance.profile import Profile
from syncpipe.balance.run import Lane, Profiler, Timing
from syncpipe.data import NoChunk, described, flatten, scatter, unflatten
from syncpipe.layers.building import on_meta
from syncpipe.layers.listing import Layers, as_sequential
from syncpipe.layers.unpack import unpacks
from syncpipe.skip import verify_skippables
from syncpipe.state import sandboxed

__all__ = ["EFFICIENCY", "estimated", "profile", "samples_in"]

#: Micro-batches are measured at so many sizes if nobody names them.
SIZES = 4
#: The part of a device's peak that matrix products are taken to reach.
EFFICIENCY = 0.5


def profile(
    module: Layers,
    sample: Any,
    *,
    sizes: Iterable[int] | None = None,
    timeout: float = 1.0,
    device: torch.device | str | int | None = None,
    threads: int | None = None,
    time: bool = True,
    progress: bool | None = None,
) -> Profile:
    """Measure how long each layer takes, forward and backward, and how much memory it needs.

    Each layer runs in train mode on its real input, what the layers before it made of the sample,
    skips included. It is a copy of the layer that runs, one layer after another: the model, its
    gradients and the random generators are afterwards as they were, come what may. (Hooks of the
    layers run as well. What a function, such as a hook, does to objects elsewhere stays done.)
    Specs are built one after another, likewise, and layers on ``meta`` get memory if ``device``
    is a real one.

    Time is that of the device on accelerators, and that of the clock on the CPU, for the number of
    intra-op threads that the calling thread has or for ``threads``; the least over the rounds, as
    whatever else runs makes times longer. ``spread`` says by how much the median is longer.
    What a layer stores for backward is what autograd saves; see
    :mod:`syncpipe.balance.stored` for what layers share and how stages add up. Under
    autocast the casts of the parameters count.

    On ``meta`` there are sizes only: all times are 0, and no memory is taken, however large the
    model.

    Args:
        module: the model, as for ``Pipe``; its layers may be on several devices.
        sample: a mini-batch, as one would give it to a pipe: a tensor, or any pytree with
            ``NoChunk`` where need be. It goes where the layers are.
        sizes: of the micro-batches to measure, in samples; each is a part of the sample. Default:
            the sample's own, a half, a quarter and an eighth of it, but no less than 2.
        timeout: seconds to measure for, in all. Slow layers are run 3 times nevertheless, or at
            the very least once, after once to warm up and a forward for their Python.
        device: where to measure; the copies of the layers go there one by one, so that the model
            may be larger than the device. ``"meta"`` measures sizes of a real model. Default:
            where each layer is; of a spec, where the sample is.
        threads: how many intra-op threads a CPU worker will have.
        time: False measures sizes only, which takes one forward of each layer.
        progress: show a progress bar (it needs tqdm); None: if tqdm is there, stderr is a terminal,
            and it takes longer than a second.

    Returns:
        The profile. ``device`` says where it was measured, ``"meta"`` for sizes.

    Raises:
        TypeError, ValueError: as ``Pipe`` does for the module; for arguments that make no sense;
            for a layer that cannot be copied.
        RuntimeError: a layer asks for values where there are sizes only.
        ImportError: ``progress=True`` without tqdm.

    An exception in a layer comes as itself, with a note that names the layer.
    """
    if not (isinstance(timeout, (int, float)) and timeout >= 0):
        raise ValueError(f"timeout={timeout!r}: give the seconds to measure for, 0 or more")
    if threads is not None and operator.index(threads) < 1:
        raise ValueError(f"threads={threads}: a layer needs at least one")
    timing = Timing(clock.monotonic() + timeout, timeout) if time else None
    return _profiled(
        module, sample, sizes, timing, device=device, threads=threads, progress=progress
    )


def estimated(
    module: Layers,
    sample: Any,
    *,
    on: str | DeviceSpec,
    efficiency: float = EFFICIENCY,
    sizes: Iterable[int] | None = None,
    progress: bool | None = None,
) -> Profile:
    """Estimate what :func:`profile` would measure on a device that is not here.

    Nothing is computed and no memory is taken, however large the model: its layers go through on
    ``meta``, specs likewise. What they store is counted, as a GPU stores it. How long each operator
    takes is a guess from the data sheet of the device, the larger of its arithmetic and its memory
    traffic (:mod:`syncpipe.balance.estimate`)::

        with torch.device("meta"):
            model = nn.Sequential(...)
        profile = estimated(model, torch.empty(16, 2048, device="meta", dtype=int), on="A100-80GB")
        plan = syncpipe.plan(profile, devices="8 x 80GB, 300GB/s", batch_size=256)

    Matrix products count by the type of their tensors: for training in ``bfloat16`` give a model
    in ``bfloat16``. The way back of a custom ``autograd.Function`` must work without values.

    Args:
        module: the model, as for ``Pipe``.
        sample: as for :func:`profile`, best on ``meta``.
        on: the device: a name in ``syncpipe.balance.DEVICES``, or a
            :class:`~syncpipe.balance.DeviceSpec`.
        efficiency: the part of the peak that matrix products reach. The default, 0.5, is what
            large models reach in training by published reports (Narayanan et al. 2021: 44 to 52 %
            on A100; Chowdhery et al. 2022: 46 %). Memory traffic is taken at its peak.
        sizes: as for :func:`profile`.
        progress: as for :func:`profile`.

    Returns:
        The profile; ``source`` is ``"estimated"``.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`profile` on ``meta``; ``on`` is not known,
            or ``efficiency`` no part of 1.
    """
    spec = device_spec(on)
    real = isinstance(efficiency, (int, float)) and not isinstance(efficiency, bool)
    if not (real and 0 < efficiency <= 1):
        raise ValueError(f"efficiency={efficiency!r}: a part of the peak, above 0 and at most 1")
    roofline = Roofline(spec, efficiency)
    watch = roofline.now, lambda start, end: float(end - start)
    found = _profiled(
        module, sample, sizes, Timing(watch=watch), device="meta", mode=roofline, progress=progress
    )
    part = f"{100 * efficiency:.3g} % of its peak"
    return replace(found, device=f"{spec.name}, {part}", source="estimated")


def _profiled(
    module: Layers,
    sample: Any,
    sizes: Iterable[int] | None,
    timing: Timing | None,
    *,
    device: torch.device | str | int | None,
    mode: AbstractContextManager[Any] | None = None,
    threads: int | None = None,
    progress: bool | None,
) -> Profile:
    """Takes the parts of a sample through copies of the layers."""
    module = as_sequential(module)
    known = on_meta(module)
    verify_skippables(known)
    if not len(module):
        raise ValueError("module has no layers to measure")
    samples = samples_in(sample)
    chosen = _sizes(samples, sizes)
    where, used = _place(module, sample, device)
    on_nothing = where is not None and where.type == "meta"
    if on_nothing and mode is None:
        timing = None
    bar = _bar(progress, len(module))

    def run() -> Profile:
        with AsOnGPU() if on_nothing else nullcontext(), mode or nullcontext():
            unpack = unpacks(module)
            lanes = [
                Lane(size, _cut(sample, samples, size, where), len(module), unpack=unpack)
                for size in chosen
            ]
            return Profiler(module, known, lanes, where, timing, bar).run()

    try:
        found = sandboxed(run, [device for device in used if device.type != "meta"], threads)
    finally:
        if bar is not None:
            bar.close()
    return replace(found, device=", ".join(map(_words, used)) or "cpu")


def _place(
    module: nn.Module, sample: Any, device: torch.device | str | int | None
) -> tuple[torch.device | None, list[torch.device]]:
    """Where layers are profiled: a device for all, None for each where it is; and all of them."""
    own = list(chain(module.parameters(), module.buffers()))
    leaves = [leaf.tensor if isinstance(leaf, NoChunk) else leaf for leaf in flatten(sample)[0]]
    given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if any(isinstance(tensor, FakeTensor) for tensor in own + given):
        raise ValueError(
            "model or sample are made of fake tensors (FakeTensorMode), which are not measured: "
            "make them on meta, with torch.device('meta'):, to count sizes without memory"
        )
    target = None
    if device is not None:
        try:
            target = torch.empty(0, device=device).device
        except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
            raise ValueError(f"device={device!r} cannot be used here: {error}") from error
    elif any(tensor.is_meta for tensor in own + given):
        target = torch.device("meta")
    if any(tensor.is_meta for tensor in given) and target != torch.device("meta"):
        raise ValueError(
            f"device={device!r}, but the sample is on meta and has no values to put there: leave "
            "device out to measure sizes, or make the sample elsewhere to measure time"
        )
    if target is not None:
        return target, [target]
    return None, list(dict.fromkeys(tensor.device for tensor in own + given))


def _words(device: torch.device) -> str:
    name = f" ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else ""
    return f"{device}{name}"


def samples_in(sample: Any) -> int:
    """The length of the first tensor that is cut into micro-batches; 1 if there is none.

    Raises:
        ValueError: a tensor that cannot be cut, or one of length 0.
    """
    scatter(sample, 1)  # refuses what a pipe refuses
    cut = [leaf for leaf in flatten(sample)[0] if isinstance(leaf, Tensor)]
    samples = len(cut[0]) if cut else 1
    if samples == 0:
        raise ValueError("the sample has no samples in it: dimension 0 has length 0")
    return samples


def _sizes(samples: int, sizes: Iterable[int] | None) -> list[int]:
    """The sizes of micro-batches to measure, ascending."""
    if sizes is None:
        halves = [samples >> k for k in range(SIZES)]
        return sorted({size for size in halves if size >= 2} | {samples})
    if isinstance(sizes, int):
        raise TypeError(f"sizes={sizes}: give a list of sizes, [{sizes}]")
    chosen = sorted({operator.index(size) for size in sizes})
    if not chosen or not all(1 <= size <= samples for size in chosen):
        raise ValueError(
            f"sizes={chosen}: a micro-batch has at least 1 sample, and no more than the sample, "
            f"which has {samples}; give a larger sample for larger micro-batches"
        )
    return chosen


def _cut(sample: Any, samples: int, size: int, device: torch.device | None) -> Any:
    """The first part of the sample, in memory of its own: what is cut off does not count."""
    leaves, spec = flatten(sample)
    made: dict[int, Tensor] = {}
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            length, rest = divmod(len(leaf) * size, samples)
            if rest:
                raise ValueError(
                    f"{size} of {samples} samples are no whole number of rows of {described(leaf)} "
                    "in the sample: give all its tensors one length in dimension 0, or name other "
                    "sizes"
                )
            part = leaf if device is None else leaf.to(device)
            made[id(leaf)] = part[:length].detach().clone().requires_grad_(leaf.requires_grad)
        elif isinstance(leaf, NoChunk):
            made[id(leaf)] = copy_of_tensor(leaf.tensor, device)
    return unflatten([made.get(id(leaf), leaf) for leaf in leaves], spec)


def _bar(progress: bool | None, layers: int) -> Any:
    """A progress bar, or None where there is none to show."""
    if progress is False or (progress is None and not sys.stderr.isatty()):
        return None
    try:
        from tqdm import tqdm
    except ImportError as error:
        if progress is None:
            return None
        raise ImportError(
            "progress=True shows a progress bar, which needs tqdm: pip install tqdm"
        ) from error
    delay = 1.0 if progress is None else 0.0
    return tqdm(total=layers, desc="profile", unit="layer", delay=delay, leave=False)
