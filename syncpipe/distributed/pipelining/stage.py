"""``stage``: of a model the part that this process has, for ``torch.distributed.pipelining``.

The same description as for ``Pipe``: layers or specs, balance, skips, ties. Each process reads all
of it, on ``meta``, and builds what is its own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage

from syncpipe.balance.by_name import balance_named
from syncpipe.balance.profiling.sandbox import copy_of_layer
from syncpipe.distributed.pipelining.carried import Boundary
from syncpipe.distributed.pipelining.module import StageModule, passing_skips
from syncpipe.distributed.pipelining.stages import Stages
from syncpipe.distributed.pipelining.tied import SharedWeights
from syncpipe.distributed.pipelining.together import Together, process_group
from syncpipe.layers.building import Initialization, build_specs, materialize, on_meta
from syncpipe.layers.conversion.sequential import batch_input
from syncpipe.layers.listing import Layers, as_sequential, type_name
from syncpipe.layers.placement import check_balance, move_layers, resolve_workers
from syncpipe.layers.ties import check_modes, find_ties
from syncpipe.layers.unpack import unpacks
from syncpipe.microbatch import unwrapped
from syncpipe.skip import verify_skippables
from syncpipe.skip.layout import inspect_layout
from syncpipe.state import sandboxed
from syncpipe.tree import tensors_in

__all__ = ["Stages", "stage"]

PLACEMENTS = ("loop", "v")


def stage(
    layers: Layers,
    balance: Iterable[int] | str,
    *,
    sample: Any = None,
    group: Any = None,
    device: torch.device | str | int | None = None,
    placement: str = "loop",
    init_fn: Callable[[nn.Module], Any] | None = None,
    seed: int | None = None,
    unpack: bool = False,
) -> Stages:
    """Makes the stages of this rank; called on all ranks of the pipeline, with the same arguments.

    ::

        dist.init_process_group()                       # under torchrun --nproc-per-node 4
        mine = stage(layers, [2, 2, 2, 2], sample=x[:16])
        schedule = mine.schedule("1f1b", chunks=8, loss_fn=F.cross_entropy)
        schedule.step(x, target=y)

    Args:
        layers: as for ``Pipe``. Of :class:`LayerSpec` only the own ones are built; modules are
            all there already, and only the own ones are moved and used.
        balance: for each stage the number of its layers, a multiple of the number of ranks; or
            ``"parameters"``, ``"uniform"`` or ``"type:regex"`` for one stage on each rank (two
            with ``placement="v"``).
        sample: an input of the size of a micro-batch, needed on the rank of the first stage. The
            layers run once with it, on copies and without gradients, so that all shapes are known.
            They stay what they are: between processes micro-batches have one size.
        group: the process group of the pipeline, or a mesh of one dimension, ``mesh["pp"]``. None:
            all processes.
        device: of this rank. None: the current accelerator if the group is for one, or the CPU.
        placement: with several stages on each of ``n`` ranks, which are on rank ``r``: ``"loop"``
            for ``r``, ``r + n``, ..., or ``"v"`` for ``r`` and ``2n - 1 - r``.
        init_fn: as for ``Pipe``.
        seed: as for ``Pipe``; with it the first weights are those of one process.
        unpack: as for ``Pipe``.

    Returns:
        The stages of this rank.

    Raises:
        TypeError, ValueError: an argument does not fit.
        RuntimeError: there is no process group, or another rank has failed; with the reason.
    """
    together = Together(process_group(group))
    n = together.size

    def describe() -> tuple[nn.Sequential, nn.Sequential, list[int], Any, Initialization]:
        if placement not in PLACEMENTS:
            raise ValueError(f"placement={placement!r}: must be 'loop' or 'v'")
        module = as_sequential(layers)
        whole = on_meta(module)
        verify_skippables(whole)
        sizes = _balance(balance, module, n, placement)
        worker = resolve_workers([_device(device, together)], 1)[0]
        return module, whole, sizes, worker, Initialization.checked(module, init_fn, seed)

    module, whole, sizes, worker, how = together.agree(describe)
    kinds = [type_name(layer) for layer in whole]
    _check_alike(together.everywhere((sizes, placement, kinds)))
    rank_of = _ranks(len(sizes), n, placement)
    mine = [j for j, rank in enumerate(rank_of) if rank == together.rank]
    firsts = [sum(sizes[:j]) for j in range(len(sizes))]
    spans = [slice(first, first + size) for first, size in zip(firsts, sizes, strict=True)]
    items = list(whole._modules.items())
    found = [nn.Sequential(OrderedDict(items[span])) for span in spans]
    passing = [*passing_skips(inspect_layout(found)), []]
    ties = find_ties(found)
    check_modes(ties)
    made = Stages(whole, sizes, together)
    made.device, made._placement, made.training = worker.device, placement, module.training

    def build() -> list[StageModule]:
        parts = []
        for j in mine:
            last = firsts[j] + sizes[j] - 1
            where = f"stage {j} (layers {firsts[j]} to {last}) on rank {together.rank}"
            own = list(module._modules.items())[spans[j]]
            part = StageModule(own, where, passing[j], passing[j + 1], worker.device)
            part.unpack, part.training = unpack or unpacks(module), module.training
            parts.append(part)
        workers = [worker] * len(parts)
        build_specs(parts, workers, how, [(j, firsts[j]) for j in mine])
        materialize(parts, workers, how, [firsts[j] for j in mine])
        move_layers(parts, workers, [])
        return parts

    parts = dict(zip(mine, together.agree(build), strict=True))
    for part in parts.values():
        made._modules.update(part._modules)
    _connect(made, parts, rank_of, sample)
    made.stages = [_stage(made, j, part) for j, part in parts.items()]
    made.shared = SharedWeights(ties, rank_of, together)
    made.shared.begin_alike(made)
    return made


def _connect(made: Stages, parts: dict[int, StageModule], rank_of: list[int], sample: Any) -> None:
    """Runs the sample through the stages, one after another, so that all know what they send."""
    together, device = made.together, made.device
    inward: Boundary | None = None
    for j, rank in enumerate(rank_of[:-1] or rank_of):

        def run(j: int = j, inward: Boundary | None = inward) -> Any:
            part = parts[j]
            if inward is None:
                if sample is None:
                    raise ValueError(
                        "sample is missing: on the rank of the first stage give an input of the "
                        "size of a micro-batch, stage(..., sample=x[:size])"
                    )
                value, size = unwrapped(batch_input(made, sample))
                made.sample = [(t.dtype, t.shape) for t in tensors_in(value)]
                tree: Any = (value, ())
            else:
                tree, size = inward.empty(device), made.size
            trial = StageModule(
                [(name, copy_of_layer(name, layer, None)) for name, layer in part._modules.items()],
                part.where, part._arriving, part._leaving, device,
            )  # fmt: skip
            trial.unpack = part.unpack

            def forward() -> Any:
                with torch.no_grad():
                    return trial.run(*tree)

            if len(rank_of) == 1:
                return None, size
            return Boundary.of(sandboxed(forward, [device]), part.where), size

        boundary, made.size = together.told(run, rank)
        if j in parts:
            parts[j].outward = boundary
        if j + 1 in parts:
            parts[j + 1].inward = boundary
        inward = boundary


def _stage(made: Stages, j: int, part: StageModule) -> Any:
    """PyTorch's stage, with all shapes given, so that it runs nothing to find them."""
    index = torch.empty(1, dtype=torch.int64, device="meta")
    loss = torch.empty(1, device="meta", requires_grad=True)
    return _PipelineStage(
        part,
        j,
        len(made.balance),
        made.device,
        input_args=(index,) if part.inward is None else part.inward.wire(),
        output_args=(loss,) if part.outward is None else part.outward.wire(),
        group=made.together.group,
    )


class _PipelineStage(PipelineStage):
    """PyTorch's, whose greeting of neighbours in 2.9 gloo does not understand.

    It is of another dtype than what they wait for, and goes to a neighbour on the same rank, too.
    """

    def _get_init_p2p_neighbors_ops(self) -> Any:
        found = [
            operation
            for operation in super()._get_init_p2p_neighbors_ops()
            if operation.group_peer != self.group_rank
        ]
        for operation in found:
            operation.tensor = operation.tensor.to(torch.float32)
        return found


def _ranks(stages: int, n: int, placement: str) -> list[int]:
    """For each stage its rank."""
    if placement == "v":
        return [min(j, 2 * n - 1 - j) for j in range(stages)]
    return [j % n for j in range(stages)]


def _balance(balance: Any, module: nn.Sequential, n: int, placement: str) -> list[int]:
    if isinstance(balance, str):
        if balance == "time":
            raise ValueError(
                "balance='time' would be another one on each rank: measure once, by "
                "syncpipe.balance.balance_by_time, and give the numbers to all"
            )
        balance = balance_named(balance, module, 2 * n if placement == "v" else n)
    sizes = check_balance(balance, len(module))
    if placement == "v" and len(sizes) != 2 * n:
        raise ValueError(
            f"balance={sizes} has {len(sizes)} stages, but placement='v' puts two on each of the "
            f"{n} ranks: give {2 * n} numbers"
        )
    if len(sizes) % n or not sizes:
        raise ValueError(
            f"balance={sizes} has {len(sizes)} stages for {n} ranks: give as many, or a multiple "
            "of it, or start as many processes (torchrun --nproc-per-node)"
        )
    return sizes


def _device(device: Any, together: Together) -> Any:
    if device is not None:
        return device
    here = torch.accelerator.is_available() and dist.get_backend(together.group) != "gloo"
    return torch.accelerator.current_device_index() if here else "cpu"


def _check_alike(found: list[tuple[list[int], str, list[str]]]) -> None:
    for rank, other in enumerate(found):
        for mine, theirs, what in zip(
            found[0], other, ("balance", "placement", "layers"), strict=True
        ):
            if mine != theirs:
                raise ValueError(
                    f"{what} differ between ranks: rank 0 has {mine}, rank {rank} has {theirs}. "
                    "stage() takes the same description on all ranks"
                )
