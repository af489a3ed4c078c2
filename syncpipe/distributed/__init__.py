"""Several processes: one stage of a model in each, by ``torch.distributed.pipelining``."""

from syncpipe.distributed.pipelining.stage import stage
from syncpipe.distributed.pipelining.stages import Stages

__all__ = ["Stages", "stage"]
