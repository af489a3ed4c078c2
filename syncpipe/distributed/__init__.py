"""A pipe in each of several processes.

Example::

    from syncpipe.distributed import data_parallel

    pipe = data_parallel(Pipe(model, [2, 2], chunks=8))
"""

from syncpipe.distributed.data_parallel import broadcast_buffers, data_parallel
from syncpipe.distributed.processes import LostProcess, RemoteError

__all__ = ["LostProcess", "RemoteError", "broadcast_buffers", "data_parallel"]
