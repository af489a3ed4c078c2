"""Several processes: one stage of a model in each, by ``torch.distributed.pipelining``."""

from syncpipe.distributed.pipelining.stage import Stages, stage

__all__ = ["Stages", "stage"]
