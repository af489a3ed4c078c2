"""Synchronous pipeline parallelism on one machine: ``Pipe`` runs a model over several devices::

model = syncpipe.Pipe(nn.Sequential(a, b, c, d), balance=[2, 2], chunks=8)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from syncpipe.balance import balance_by_time
    from syncpipe.data.batch_classes import register_batch
    from syncpipe.data.uncut import NoChunk
    from syncpipe.distributed import data_parallel
    from syncpipe.layers.conversion.sequential import sequential
    from syncpipe.layers.listing import LayerSpec, TiedLayerSpec
    from syncpipe.layers.unpack import PipeSequential
    from syncpipe.options import Selective
    from syncpipe.pipe import Pipe
    from syncpipe.planner import Plan, plan
    from syncpipe.runtime.recomputation import is_checkpointing, is_recomputing
    from syncpipe.runtime.thread_state import inline
    from syncpipe.runtime.worker import Worker
    from syncpipe.skip import pop, skippable, stash
    from syncpipe.training.loaders import RepeatingLoader
    from syncpipe.verification.check import verify

__version__ = "0.1.0"

__all__ = [
    "LayerSpec",
    "NoChunk",
    "Pipe",
    "PipeSequential",
    "Plan",
    "RepeatingLoader",
    "Selective",
    "TiedLayerSpec",
    "Worker",
    "balance_by_time",
    "data_parallel",
    "inline",
    "is_checkpointing",
    "is_recomputing",
    "plan",
    "pop",
    "register_batch",
    "sequential",
    "skippable",
    "stash",
    "verify",
]

#: Public subpackages.
_PACKAGES = ("balance", "checkpoints", "distributed", "planner", "schedules", "skip", "timeline")
#: The modules of public names. They are imported on first access, because importing PyTorch takes
#: seconds.
_HOMES = {
    "balance": ("balance_by_time",),
    "data.batch_classes": ("register_batch",),
    "layers.conversion.sequential": ("sequential",),
    "layers.listing": ("LayerSpec", "TiedLayerSpec"),
    "layers.unpack": ("PipeSequential",),
    "options": ("Selective",),
    "pipe": ("Pipe",),
    "planner": ("Plan", "plan"),
    "runtime.recomputation": ("is_checkpointing", "is_recomputing"),
    "runtime.thread_state": ("inline",),
    "runtime.worker": ("Worker",),
    "skip": ("pop", "skippable", "stash"),
    "training.loaders": ("RepeatingLoader",),
    "data.uncut": ("NoChunk",),
    "verification.check": ("verify",),
    "distributed": ("data_parallel",),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            found = globals()[name] = getattr(import_module(f"syncpipe.{home}"), name)
            return found
    if name in _PACKAGES:
        return import_module(f"syncpipe.{name}")
    raise AttributeError(f"module 'syncpipe' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted((*__all__, *_PACKAGES))
