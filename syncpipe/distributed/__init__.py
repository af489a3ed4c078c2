"""Several processes: the same pipe in each, or one stage of a model in each."""

from syncpipe.distributed.data_parallel import broadcast_buffers, data_parallel
from syncpipe.distributed.peers import LostProcess, RemoteError
from syncpipe.distributed.stage import Stages, stage

__all__ = ["LostProcess", "RemoteError", "Stages", "broadcast_buffers", "data_parallel", "stage"]
