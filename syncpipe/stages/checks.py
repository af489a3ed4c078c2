"""What a call refuses."""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from syncpipe.data.trees import objects_in
from syncpipe.data.uncut import hidden_tensor
from syncpipe.stages.pipeline import Pipeline
from syncpipe.stages.stage import Stage
from syncpipe.storage import modules_of


def check_collectives(call: Any) -> None:
    """Refuses layers that start collectives once per micro-batch, or on several workers."""
    pipeline, grad, inline = call.pipeline, call.state.grad, call.inline
    sharded: Any = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
    several = not inline and len(pipeline.workers) > 1
    parallel: dict[int, int] = {}  # workers of the stages with sharded parameters
    for stage in pipeline.stages:
        for module in modules_of(stage.partition):
            kind: Any = type(module)
            if (grad or several) and (wrapper := _wrapper(kind)):
                raise RuntimeError(
                    f"a layer is wrapped in {wrapper}, which starts collectives: each process's "
                    "workers would start them in any order, once per micro-batch. Unwrap the "
                    "layers, and make the whole pipe parallel: "
                    "syncpipe.distributed.data_parallel(pipe) for train_batch, fully_shard(pipe) "
                    "or DistributedDataParallel(pipe) for pipe(input)"
                )
            if sharded and any(isinstance(p, sharded) for p in module._parameters.values()):
                parallel[stage.index] = pipeline.worker_of[stage.index]
    if several and len({*parallel.values()}) > 1:
        shown = sorted({pipeline.stages[k].j for k in parallel})
        raise RuntimeError(
            f"stages {shown} have DTensor parameters (tensor parallelism, or fully_shard around "
            "the pipe), and workers would start their collectives in any order: choose a balance "
            "that puts these layers into one stage without replicas, or run one process per stage "
            "(syncpipe.distributed.stage)"
        )


@lru_cache(maxsize=1024)
def _wrapper(kind: Any) -> str:
    """The PyTorch class that makes modules of a kind start collectives; empty if there is none."""
    starts = (
        "torch.nn.parallel.distributed",
        "torch.distributed.fsdp",
        "torch.distributed._composable",
    )
    return next((base.__name__ for base in kind.__mro__ if base.__module__.startswith(starts)), "")


def check_objects(stage: Stage, target: int, i: int, value: Any) -> None:
    """Refuses objects that hide a tensor on an accelerator or with a graph: it must be sent.

    Args:
        stage: the stage that returned ``value``, a tree, for micro-batch ``i``.
        target: the number of the stage that gets it.
    """

    def has_to_be_sent(tensor: Tensor) -> bool:
        on_device = tensor.device.type not in ("cpu", "meta")
        return (on_device and not isinstance(tensor, nn.Parameter)) or (
            tensor.requires_grad and not tensor.is_leaf
        )

    for thing in objects_in(value):
        at = hidden_tensor(thing, has_to_be_sent)
        if at is not None:
            raise TypeError(
                f"{stage.describe(i)} returned an object of type {type(thing).__name__} for stage "
                f"{target}, with a hidden tensor at {at}: neither it nor its gradient can be sent. "
                "Return the tensors in a tuple, a dict or a dataclass, or register the class by "
                "torch.utils._pytree.register_pytree_node"
            )


def check_can_train(pipeline: Pipeline, what: str) -> None:
    """Raises RuntimeError inside a call of the same pipe, or if grad mode is off."""
    check_not_running(pipeline, what)
    if not torch.is_grad_enabled():
        raise RuntimeError(
            f"{what} needs gradients, but grad mode is off (torch.no_grad or "
            "torch.inference_mode): call it outside of these, or use eval_batch"
        )


def check_not_running(pipeline: Pipeline, what: str) -> None:
    """Raises RuntimeError inside a call of the same pipe, whose gradients or modes would change."""
    if pipeline.engine.is_running():
        raise RuntimeError(
            f"{what} was called inside of a call of the same pipe (by its loss_fn, its data_iter "
            "or a layer), and would change its gradients and modes: call pipe(input) there instead"
        )
