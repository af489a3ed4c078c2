"""A simulated machine: four accelerators, made of the host's memory, that see races of streams.

    from tests import simulated

    simulated.load()                          # this process has an accelerator now: "sim"
    x = torch.ones(3, device="sim:2")         # on the current stream
    simulated.races()                         # what should have waited, and did not

It cannot be unloaded, and all that asks for accelerators finds these. So a process that loads it
does nothing else; see ``conftest.py``.
"""

from __future__ import annotations

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

    That takes half a minute. Who asks meanwhile waits for the process that builds.
    """
    from torch._appdirs import user_cache_dir
    from torch.utils._filelock import FileLock

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
                sources=[str(_SOURCES / "all.cpp")],
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
    torch.ops.load_library(str(build()))
    torch.utils.rename_privateuse1_backend("sim")
    from tests.simulated import device_module

    torch._register_device_module("sim", device_module)
    torch.utils.generate_methods_for_privateuse1_backend()
    return device_module


def loaded() -> bool:
    """Whether this process has the simulated devices."""
    return load.cache_info().currsize > 0


def devices(count: int = DEVICES) -> list[torch.device]:
    """The first ``count`` of the simulated devices."""
    return [torch.device("sim", k) for k in range(count)]


def live_bytes(device: torch.device) -> int:
    """Bytes of a device that are in use, or wait for a stream that was recorded."""
    return int(torch.accelerator.memory_stats(device)["active_bytes.all.current"])


@contextmanager
def capacity(device: torch.device, size: int) -> Iterator[None]:
    """Inside, a device has ``size`` bytes of memory (4 GiB otherwise)."""
    torch.accelerator.empty_cache()
    torch.ops.sim.set_capacity(device.index, size)
    try:
        yield
    finally:
        torch.ops.sim.set_capacity(device.index, 4 << 30)


def sleep(ms: float) -> None:
    """A kernel that takes ``ms`` milliseconds, on the current stream of the current device."""
    torch.ops.sim.sleep(ms, torch.accelerator.current_device_index())


def races() -> list[str]:
    """What was launched since the last call without a wait (or ``record_stream``) that it needs."""
    reports: list[str] = torch.ops.sim.reports().splitlines()
    return reports


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
