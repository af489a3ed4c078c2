"""A simulated machine: four asynchronous accelerators, made of threads and the host's memory.

    from tests import simulated

    simulated.load()                          # this process has an accelerator now: "sim"
    x = torch.ones(3, device="sim:2")         # asynchronous, on the current stream

It cannot be unloaded, and all that asks for accelerators finds these. So a process that loads it
does nothing else; see ``conftest.py``.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

DEVICES = 4
_SOURCES = Path(__file__).parent / "csrc"
_FLAGS = ["-O1", "-g0", "-w"]


@functools.cache
def unavailable() -> str | None:
    """Why this machine cannot be simulated here; None if it can."""
    if sys.platform != "linux":
        return "the simulated devices are built on Linux only"
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        return f"no C++ compiler ({compiler}) to build the simulated devices with"
    try:
        _find_ninja()
    except RuntimeError as error:
        return str(error)
    return None


def _find_ninja() -> None:
    """Puts ninja on the path: that of the system, or the one of the package of this name."""
    if shutil.which("ninja") is not None:
        return
    try:
        import ninja
    except ImportError:
        raise RuntimeError("no ninja to build the simulated devices with") from None
    os.environ["PATH"] = ninja.BIN_DIR + os.pathsep + os.environ.get("PATH", "")


def build() -> Path:
    """The library, built unless it has been already with this torch and these sources.

    That takes a minute on two idle cores. Who asks meanwhile waits for the process that builds.
    """
    from torch._appdirs import user_cache_dir
    from torch.utils._filelock import FileLock

    sources = sorted(_SOURCES.glob("*.cpp"))
    digest = hashlib.sha256(torch.__version__.encode() + repr((_FLAGS, sys.version)).encode())
    for path in sorted(_SOURCES.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    name = f"syncpipe_sim_{digest.hexdigest()[:16]}"
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or user_cache_dir(appname="torch_extensions")
    directory = Path(root) / name
    directory.mkdir(parents=True, exist_ok=True)
    library = directory / f"{name}.so"
    with FileLock(str(directory / "build.lock")):
        if not (directory / "done").exists():
            from torch.utils import cpp_extension  # which may warn that there is no CUDA

            print("building the simulated devices in", directory, file=sys.stderr, flush=True)
            begun = time.monotonic()
            (directory / "lock").unlink(missing_ok=True)  # of a build that was killed
            cpp_extension.load(
                name=name,
                sources=[str(path) for path in sources],
                extra_cflags=_FLAGS,
                build_directory=str(directory),
                with_cuda=False,
                is_python_module=False,
            )
            seconds = time.monotonic() - begun
            print(f"simulated devices built in {seconds:.0f} s", file=sys.stderr, flush=True)
            (directory / "done").touch()
    return library


@functools.cache
def load() -> ModuleType:
    """Makes this process one with four accelerators, ``sim:0`` to ``sim:3``.

    Returns:
        Their device module, ``torch.sim``.

    Raises:
        RuntimeError: with the reason, where it cannot be built.
    """
    reason = unavailable()
    if reason is not None:
        raise RuntimeError(reason)
    torch.set_num_threads(1)  # the streams are threads already
    torch.ops.load_library(str(build()))
    torch.utils.rename_privateuse1_backend("sim")
    from tests.simulated import device_module

    torch._register_device_module("sim", device_module)
    torch.utils.generate_methods_for_privateuse1_backend()
    atexit.register(torch.ops.sim.shut_down)
    return device_module


def loaded() -> bool:
    """Whether this process has the simulated devices."""
    return load.cache_info().currsize > 0


def devices(count: int = DEVICES) -> list[torch.device]:
    """The first ``count`` of the simulated devices."""
    return [torch.device("sim", k) for k in range(count)]


def _index(device: torch.device | str | int | None) -> int:
    if device is None:
        return torch.accelerator.current_device_index()
    return device if isinstance(device, int) else torch.device(device).index


def live_bytes(device: torch.device | str | int) -> int:
    """Bytes of a device that are in use, or wait for a stream that was recorded."""
    stats: dict[str, Any] = torch.accelerator.memory_stats(_index(device))
    return int(stats["active_bytes.all.current"])


@contextmanager
def capacity(device: torch.device | str | int, size: int) -> Iterator[None]:
    """Inside, a device has ``size`` bytes of memory (4 GiB otherwise)."""
    torch.accelerator.empty_cache()
    torch.ops.sim.set_capacity(_index(device), size)
    try:
        yield
    finally:
        torch.ops.sim.set_capacity(_index(device), 4 << 30)


def sleep(ms: float, device: torch.device | None = None) -> None:
    """A kernel that takes ``ms`` milliseconds, on the current stream of (the current) device."""
    torch.ops.sim.sleep(ms, -1 if device is None else device.index)


@contextmanager
def delays(
    ms: float,
    probability: float = 1.0,
    *,
    seed: int = 0,
    device: torch.device | str | int | None = None,
    stream: torch.Stream | None = None,
) -> Iterator[None]:
    """Inside, kernels (and copies) start late, so that what does not wait for them is wrong.

    Args:
        ms: how many milliseconds late.
        probability: below 1, only that part of the kernels is late, by 0 to ``2 * ms``.
        seed: of these draws.
        device: only on this device.
        stream: only on this stream.
    """
    which = -1 if device is None else _index(device)
    number = -1
    if stream is not None:
        which, number = stream.device.index, stream.stream_id
    torch.ops.sim.set_delay(which, number, ms, probability, seed)
    try:
        yield
    finally:
        torch.ops.sim.set_delay(which, number, 0.0, 1.0, 0)


@contextmanager
def held(stream: torch.Stream) -> Iterator[None]:
    """Inside, ``stream`` stands still: what it is given runs afterwards, and not a moment before.

    The host must not wait for it in there.
    """
    which = torch.ops.sim.hold_stream(stream.device.index, stream.stream_id)
    try:
        yield
    finally:
        torch.ops.sim.release(which)


@contextmanager
def no_waits() -> Iterator[None]:
    """Inside, it is an error if an operator makes the host wait for a device.

    Waits that somebody asks for (``synchronize``) are not meant.
    """
    torch.ops.sim.forbid_waits(True)
    try:
        yield
    finally:
        torch.ops.sim.forbid_waits(False)


def waits(*, forget: bool = False) -> dict[str, int]:
    """Why the host had to wait for a device so far, and how often."""
    counts = {}
    for line in torch.ops.sim.waits().splitlines():
        reason, count = line.rsplit("\t", 1)
        counts[reason] = int(count)
    if forget:
        torch.ops.sim.forget_waits()
    return counts
