"""Several processes: the same pipe in each, or one stage of a model in each.

Example::

    from syncpipe.distributed import data_parallel

    pipe = data_parallel(Pipe(model, [2, 2], chunks=8))
"""

from syncpipe.distributed.data_parallel import broadcast_buffers, data_parallel
from syncpipe.distributed.peers import LostProcess, RemoteError
from syncpipe.distributed.pipelining.stage import Stages, stage

__all__ = [
    "LostProcess",
    "RemoteError",
    "Stages",
    "broadcast_buffers",
    "data_parallel",
    "stage",
]
