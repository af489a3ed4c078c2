"""The way to ``torch.distributed.pipelining``: each process has one stage of a model, or some."""
