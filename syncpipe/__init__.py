"""Synchronous pipeline parallelism on one machine: ``Pipe`` runs an ``nn.Sequential`` over devices.

Example::

    from syncpipe import Pipe

    model = Pipe(nn.Sequential(a, b, c, d), balance=[2, 2], chunks=8)
    model(input).sum().backward()
"""

from syncpipe.data import NoChunk
from syncpipe.layers.conversion.sequential import sequential
from syncpipe.layers.listing import LayerSpec, TiedLayerSpec
from syncpipe.layers.unpack import PipeSequential
from syncpipe.options import Selective
from syncpipe.pipe import Pipe
from syncpipe.planner import Plan, plan
from syncpipe.runtime.inline import inline
from syncpipe.runtime.rematerialization.checkpoint import is_checkpointing, is_recomputing
from syncpipe.runtime.worker import Worker
from syncpipe.training.loader import RepeatingLoader
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
    "inline",
    "is_checkpointing",
    "is_recomputing",
    "plan",
    "sequential",
    "verify",
]
