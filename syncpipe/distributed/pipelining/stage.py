"""``stage``: of a model the part that this process has, for ``torch.distributed.pipelining``.

The same description as for ``Pipe``: layers or specs, balance, skips, ties. Each process reads all
of it, on ``meta``, and builds what is its own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.pipelining import PipelineStage

from syncpipe.balance.balances import balance_named
from syncpipe.balance.copies import copy_of_layer
from syncpipe.data import tensors_in, unwrapped
from syncpipe.distributed.peers import Peers, process_group
from syncpipe.distributed.pipelining.carried import Boundary
from syncpipe.distributed.pipelining.gradients import SharedWeights, grad_norm, local
from syncpipe.distributed.pipelining.module import StageModule, passing_skips
from syncpipe.distributed.pipelining.schedules import SCHEDULES, make
from syncpipe.layers.building import Initialization, build_specs, materialize, on_meta
from syncpipe.layers.conversion.layer import in_order, index_keys
from syncpipe.layers.conversion.sequential import batch_input
from syncpipe.layers.listing import Layers, as_sequential, type_name
from syncpipe.layers.placement import check_balance, move_layers, resolve_workers
from syncpipe.layers.ties import check_modes, find_ties
from syncpipe.layers.unpack import unpacks
from syncpipe.options import checked_chunks
from syncpipe.skip import verify_skippables
from syncpipe.skip.layout import inspect_layout
from syncpipe.state import sandboxed
from syncpipe.training.loss import known_loss

__all__ = ["Stages", "stage"]

PLACEMENTS = ("loop", "v")


class Stages(nn.Module):
    """What one rank has of a model; made by :func:`stage`.

    Its parameters and ``state_dict`` have the names that they have in the plain model.

    Attributes:
        stages: PyTorch's ``PipelineStage`` objects of this rank; ``.submod`` is the module of one,
            for ``fully_shard`` and ``parallelize_module``.
        balance: of the whole model.
        device: of this rank.
        rank: of this process in the pipeline.
    """

    shared: SharedWeights

    def __init__(self, whole: nn.Sequential, balance: list[int], peers: Peers) -> None:
        super().__init__()
        self.balance = balance
        self.peers = peers
        self.rank = peers.rank
        self.device = torch.device("cpu")
        self.stages: list[Any] = []
        self.size = 0  # of a micro-batch
        self.sample: list[Any] = []  # its tensors' dtypes and shapes, on the first rank
        self._placement = "loop"
        self._elsewhere = frozenset(whole.state_dict())

    def schedule(
        self,
        name: str = "1f1b",
        *,
        chunks: int,
        loss_fn: Callable[..., Any] | None = None,
        loss_reduction: str | None = None,
        weight: Callable[[Any], Any] | Sequence[Any] | None = None,
        data_parallel: Any = None,
        **unknown: Any,
    ) -> Any:
        """Make one of PyTorch's schedules over the stages; called on all ranks.

        ::

            schedule = mine.schedule("1f1b", chunks=8, loss_fn=F.cross_entropy)
            schedule.step(input, target=target, losses=losses)
            mine.eval()
            output = schedule.eval(input)

        Args:
            name: ``"gpipe"``, ``"1f1b"``; with several stages on each rank, one after another,
                ``"looped_bfs"``, ``"interleaved_1f1b"``, ``"interleaved_zero_bubble"``; with
                two on each in a V, ``stage(..., placement="v")``, ``"zbv"``, ``"dualpipev"``.
            chunks: the number of micro-batches.
            loss_fn: as for ``Pipe.train_batch``, but it returns the loss alone; called on the
                rank of the last stage. None: there is ``eval`` only.
            loss_reduction: as for ``Pipe.train_batch``.
            weight: as for ``Pipe.train_batch``.
            data_parallel: the process group, or the mesh of one dimension, ``mesh["dp"]``, over
                which gradients of the stages are averaged (``fully_shard``,
                ``DistributedDataParallel``). Targets that count, and sums, are then those of all
                its mini-batches. Needed where these differ: masked targets, ``weight=``, sums.

        Returns:
            An instance of a class of ``torch.distributed.pipelining``, whose ``step`` and
            ``eval`` check their arguments. Gradients are those of the mini-batch's loss; there is
            nothing to be scaled.

        Raises:
            TypeError, ValueError: an argument does not fit, or the schedule does not fit the
                placement of the stages.
        """
        if unknown:
            raise _unknown(next(iter(unknown)))

        def made() -> Any:
            _check_schedule(name, self.stages, self._placement)
            loss = None if loss_fn is None else known_loss(loss_fn, loss_reduction, weight)
            group = data_parallel
            if group is not None:
                group = process_group(group, "data_parallel", "schedule()")
            return make(self, name, checked_chunks(chunks), loss, group)

        alike = {"schedules": name, "chunks": chunks, "loss_fn (or None)": loss_fn is not None}
        return self.peers.agree(made, lambda _: alike)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Clip gradients by the norm of those of the whole model; called on all ranks.

        As ``torch.nn.utils.clip_grad_norm_``, over all stages, and over all parts of what is
        sharded by ``fully_shard`` or ``parallelize_module``. Tied weights count once.

        Args:
            max_norm: the largest norm.
            norm_type: the exponent; may be infinity.
            error_if_nonfinite: raise where the norm is no finite number.

        Returns:
            The norm before, the same on all ranks.
        """
        peers = self.peers
        peers.begin("clip_grad_norm_", watched=True)
        try:
            parameters = [p for p in self.parameters() if p.grad is not None]
            total = grad_norm(parameters, norm_type, peers, self.shared, self.device)
        except BaseException as error:
            raise peers.fail(error) from None
        peers.finish()
        if error_if_nonfinite and not torch.isfinite(total):
            raise RuntimeError(
                f"the norm of order {norm_type} of all gradients is {total.item()}, so they cannot "
                "be clipped: error_if_nonfinite=False clips all the same"
            )
        factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
        for parameter in parameters:
            own = local(parameter.grad)
            own.mul_(factor.to(own.dtype))
        return total

    @property
    def first(self) -> StageModule | None:
        """The module of the model's first stage, if it is here."""
        return next((each.submod for each in self.stages if each.is_first), None)

    @property
    def last(self) -> StageModule | None:
        """The module of the model's last stage, if it is here."""
        return next((each.submod for each in self.stages if each.is_last), None)

    def _named_members(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        return in_order(self, *args, **kwargs)

    def train(self, mode: bool = True) -> Stages:
        """As ``nn.Module.train``."""
        super().train(mode)
        for each in self.stages:
            each.submod.training = mode
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # That of the whole model is welcome: what is on other ranks is passed over.
        for key in self._elsewhere - set(self.state_dict()):
            state_dict.pop(prefix + key, None)
        index_keys(state_dict, prefix, self)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def forward(self, *_: Any, **__: Any) -> Any:
        """Refused: a rank has a part of the model only.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            "this rank has some stages of the model, which run together with those of other ranks: "
            "make a schedule by mine.schedule(...), and call its step() or eval()"
        )


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
    """Make the stages of this rank; called on all ranks of the pipeline, with the same arguments.

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
    peers = Peers(process_group(group, "group", "stage()"), "pipeline")
    n = peers.size

    def describe() -> tuple[nn.Sequential, nn.Sequential, list[int], Any, Initialization]:
        if placement not in PLACEMENTS:
            raise ValueError(f"placement={placement!r}: must be 'loop' or 'v'")
        module = as_sequential(layers)
        whole = on_meta(module)
        verify_skippables(whole)
        sizes = _balance(balance, module, n, placement)
        worker = resolve_workers([_device(device, peers)], 1)[0]
        return module, whole, sizes, worker, Initialization.checked(module, init_fn, seed)

    module, whole, sizes, worker, how = peers.agree(
        describe,
        lambda found: {
            "layers": [type_name(layer) for layer in found[1]],
            "placements": placement, "balances": found[2],
        },
    )  # fmt: skip
    rank_of = _ranks(len(sizes), n, placement)
    mine = [j for j, rank in enumerate(rank_of) if rank == peers.rank]
    firsts = [sum(sizes[:j]) for j in range(len(sizes))]
    spans = [slice(first, first + size) for first, size in zip(firsts, sizes, strict=True)]
    items = list(whole._modules.items())
    found = [nn.Sequential(OrderedDict(items[span])) for span in spans]
    passing = [*passing_skips(inspect_layout(found)), []]
    ties = find_ties(found)
    check_modes(ties)
    made = Stages(whole, sizes, peers)
    made.device, made._placement, made.training = worker.device, placement, module.training

    def build() -> list[StageModule]:
        parts = []
        for j in mine:
            last = firsts[j] + sizes[j] - 1
            where = f"stage {j} (layers {firsts[j]} to {last}) on rank {peers.rank}"
            own = list(module._modules.items())[spans[j]]
            part = StageModule(own, where, passing[j], passing[j + 1], worker.device)
            part.unpack, part.training = unpack or unpacks(module), module.training
            parts.append(part)
        workers = [worker] * len(parts)
        build_specs(parts, workers, how, [(j, firsts[j]) for j in mine])
        materialize(parts, workers, how, [firsts[j] for j in mine])
        move_layers(parts, workers, [])
        return parts

    parts: dict[int, StageModule] = {}
    peers.together(lambda: parts.update(zip(mine, build(), strict=True)))
    for part in parts.values():
        made._modules.update(part._modules)
    _connect(made, parts, rank_of, sample)
    made.stages = [_stage(made, j, part) for j, part in parts.items()]
    made.shared = SharedWeights(made, ties, rank_of, peers)
    return made


def _connect(made: Stages, parts: dict[int, StageModule], rank_of: list[int], sample: Any) -> None:
    """Runs the sample through the stages, one after another, so that all know what they send."""
    peers, device = made.peers, made.device
    inward: Boundary | None = None
    for j, rank in enumerate(rank_of[:-1] or rank_of):

        def run(j: int = j, inward: Boundary | None = inward) -> Any:
            if j not in parts:
                return None
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

        boundary, made.size = peers.together(run)[rank]
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
        group=made.peers.group,
    )


class _PipelineStage(PipelineStage):
    """PyTorch's; its greeting of neighbours is for NCCL, and gloo fails if one comes late.

    In 2.9 it is of another dtype than what they wait for, and goes to the same rank, too.
    """

    def _get_init_p2p_neighbors_ops(self) -> Any:
        if "cpu:" in str(dist.get_backend_config(self.group)):
            return []
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


def _device(device: Any, peers: Peers) -> Any:
    if device is not None:
        return device
    here = torch.accelerator.is_available() and dist.get_backend(peers.group) != "gloo"
    return torch.accelerator.current_device_index() if here else "cpu"


def _check_schedule(name: Any, stages: list[Any], placement: str) -> None:
    if name not in SCHEDULES:
        shown = ", ".join(map(repr, SCHEDULES))
        raise ValueError(f"schedule {name!r}: between processes there are {shown}")
    needed, n = SCHEDULES[name][1], len(stages)
    if needed == "one" and n != 1:
        raise ValueError(
            f"{name!r} is for one stage on each rank, and there are {n}: give a balance with "
            "as many numbers as ranks, or take 'interleaved_1f1b'"
        )
    if needed != "one" and n > 1 and needed != placement:
        raise ValueError(
            f"{name!r} needs stage(..., placement={needed!r}), and these stages were placed "
            f"{placement!r}"
        )
    if needed == "v" and placement != "v":
        raise ValueError(
            f"{name!r} needs two stages on each rank in a V: stage(..., placement='v'), with twice "
            "as many numbers in the balance as ranks"
        )
    for stage in stages if name in ("interleaved_zero_bubble", "zbv", "dualpipev") else []:
        seen: dict[int, str] = {}
        for own, parameter in stage.submod.named_parameters(remove_duplicate=False):
            if (first := seen.setdefault(id(parameter), own)) != own:
                raise ValueError(
                    f"{name!r} runs backward in halves, and {own!r} is the weight {first!r} of the "
                    f"same stage {stage.stage_index}, which PyTorch's halves get wrong: take "
                    "'interleaved_1f1b', or a balance that puts them on different stages"
                )


def _unknown(name: str) -> TypeError:
    answers = {
        "scale_grads": "leave it out: losses count as in Pipe.train_batch, so that gradients are "
        "those of the mini-batch, and nothing is scaled afterwards",
        "n_microbatches": "the number of micro-batches is chunks=",
        "schedule": "the name of the schedule comes first",
    }
    text = f"schedule() got an unexpected keyword argument {name!r}"
    return TypeError(f"{text}: {answers[name]}" if name in answers else text)
