"""Private interfaces of ``torch.distributed``, used in this file only.

``tests/private_names.md`` lists them with the PyTorch versions that have them.
``check_pipelining`` refuses a PyTorch whose signatures differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from inspect import isfunction, signature
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage

__all__ = [
    "PyTorchStage",
    "Warmup",
    "check_pipelining",
    "default_group",
    "default_store",
    "in_buckets",
    "naming",
    "timeout_of",
]


def default_store() -> Any:
    return dist.distributed_c10d._get_default_store()


def default_group() -> dist.ProcessGroup:
    """The process group of all; raises ValueError without a call of ``init_process_group``."""
    return dist.distributed_c10d._get_default_group()


def timeout_of(group: dist.ProcessGroup) -> float:
    types = {device.type: device for device in group._device_types}
    backend: Any = group._get_backend(types.get("cpu") or group._device_types[0])
    return float(backend.options._timeout.total_seconds())


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Gives the process group that is made inside ``with`` this name.

    PyTorch's own names are counters, which differ between processes that made different groups.
    """
    c10d: Any = dist.distributed_c10d
    before: Callable[..., str] = c10d._process_group_name
    c10d._process_group_name = lambda *_, **__: name
    try:
        yield
    finally:
        c10d._process_group_name = before


def in_buckets(tensors: Sequence[Tensor], nbytes: int) -> list[list[int]]:
    """Indices of tensors in buckets of about ``nbytes``, as in ``DistributedDataParallel``."""
    assign: Any = dist._compute_bucket_assignment_by_size  # type: ignore[attr-defined]
    return assign(tensors, [nbytes])[0] if tensors else []


# --- torch.distributed.pipelining ----------------------------------------------------------------


class PyTorchStage(PipelineStage):
    """PyTorch's stage, with ``around(micro-batch, module, tensors)`` called in place of its module.

    In evaluation, schedules ask for gradients between two stages of one rank. There are none.
    """

    def __init__(self, around: Callable[[int, Callable[..., Any], Any], Any], *of: Any, **how: Any):
        super().__init__(*of, **how)
        self._around, self._micro_batch = around, 0

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any, kwargs: Any = None, save_forward_output: bool = True
    ) -> Any:
        self._micro_batch = fwd_chunk_id
        return super().forward_one_chunk(fwd_chunk_id, args, kwargs, save_forward_output)

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        return self._around(self._micro_batch, super().forward_maybe_with_nosync, args)

    def get_local_bwd_output(self, mb_index: int) -> Any:
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()  # type: ignore

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)


class Warmup:
    """A mixin for schedules over stages whose shapes are known."""

    def _warmup_p2p(self, stages: Any, has_backward: bool, p2p_done: bool) -> None:
        """Skips PyTorch's vote on whether shapes are known, if the group is on gloo.

        Gloo aborts a process that receives a vote where it expects a message.
        """
        from torch.distributed.pipelining._utils import InferenceMode  # older versions have none

        if not p2p_done and "cpu:" not in str(dist.get_backend_config(stages[0].group)):
            super()._warmup_p2p(stages, has_backward, p2p_done)  # type: ignore[misc]
        for each in stages:
            each._inference_mode = InferenceMode.STATIC


def check_pipelining() -> None:
    """Refuses a PyTorch whose methods have other parameters than the overrides here."""
    here = f"this is PyTorch {torch.__version__}"
    if not hasattr(PipelineStage, "_get_grad_send_meta"):
        raise RuntimeError(f"stage needs PyTorch 2.13 or later: {here}")
    theirs = PipelineStage, getattr(pipelining.schedules, "_PipelineSchedule", None)
    for kind, ours in zip(theirs, (PyTorchStage, Warmup), strict=True):
        for method, function in filter(lambda pair: isfunction(pair[1]), vars(ours).items()):
            if method == "__init__":
                continue
            known, found = [*signature(function).parameters], getattr(kind, method, None)
            shape = f"takes {[*signature(found).parameters]}" if found else "is gone"
            if shape != f"takes {known}":
                raise RuntimeError(
                    f"stage supports torch.distributed.pipelining of PyTorch 2.13 and 2.14, where "
                    f"{method} takes {known}; {here}, where it {shape}: install 2.13 or 2.14"
                )
