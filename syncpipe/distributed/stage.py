"""``stage``: the stages of one process in a pipeline of ``torch.distributed.pipelining``.

The model is described as for ``Pipe``: layers or specs, balance, skips, ties. Each process reads
the whole description, on ``meta``, and builds its own layers.

PyTorch's stages send tensors, and receive a gradient for each tensor that can have one. Layers
return trees that contain None, masks and indices, and skips pass by. Both sides know the tree
``(value, skips)`` beforehand, as a ``Boundary``, and only the values of its tensors are sent::

    layers -> (value, skips) -> Boundary.to_wire -> tensors -> ... -> Boundary.from_wire -> layers
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, chain, pairwise
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from syncpipe.balance.balances import balance_named
from syncpipe.data.batches import unwrapped
from syncpipe.data.trees import by_name, described, flatten, map_tensors, tensors_in
from syncpipe.distributed.peers import Peers, checked_number, given_group
from syncpipe.distributed.private import PyTorchStage, check_pipelining, timeout_of
from syncpipe.distributed.schedules import schedule_over
from syncpipe.hints import caller_stacklevel
from syncpipe.layers.conversion.layer import ModelNames
from syncpipe.layers.conversion.signature import batch_input
from syncpipe.layers.listing import (
    Initialization,
    Layers,
    as_sequential,
    build_layers,
    has_specs,
    on_meta,
    or_as_before,
    type_name,
    waiting,
)
from syncpipe.layers.placement import check_balance, resolve_workers
from syncpipe.layers.ties import check_modes, find_ties, move_layers
from syncpipe.layers.unpack import unpacks
from syncpipe.options import checked_chunks
from syncpipe.runtime.errors import annotate
from syncpipe.runtime.random_numbers import draw_seed
from syncpipe.runtime.recomputation import version_of
from syncpipe.skip import verify_skippables
from syncpipe.skip.layout import inspect_layout
from syncpipe.skip.store import use_store
from syncpipe.stages.run import StageRun
from syncpipe.stages.stage import Partition, Stage
from syncpipe.stages.wrappers import draws
from syncpipe.state import restoring_module
from syncpipe.storage import clones
from syncpipe.training.loss_check import LossCounts
from syncpipe.training.loss_function import known_loss

__all__ = ["Stages", "stage"]

_CLIP = inspect.unwrap(nn.utils.clip_grad_norm_).__code__
_CONSTANTS = (type(None), bool, int, float, str, torch.dtype)


class Boundary:
    """The structure, shapes and dtypes of the tree that one stage sends to the next one."""

    def __init__(self, tree: Any, where: str) -> None:
        for name, leaf in by_name("", tree).items():
            if not isinstance(leaf, (Tensor, *_CONSTANTS)):
                name = f"skip {name[3:]}" if name.startswith("[1]") else f"the value{name[3:]}"
                raise TypeError(
                    f"{name} from {where} is of type {type(leaf).__name__}: only trees of tensors, "
                    "None, numbers and strings can be sent to another process. Choose a balance "
                    "that does not cut here"
                )

        def empty(tensors: list[Tensor]) -> list[Tensor]:
            return [torch.zeros_like(_dense(tensor, where), device="meta") for tensor in tensors]

        self.tree, self._where, self._expected = map_tensors(empty, tree), where, _signature(tree)
        #: The dtypes that are sent. ``fully_shard`` may change those of the layers.
        self.dtypes = [_as_real(tensor).dtype for tensor in tensors_in(self.tree)]

    def __reduce__(self) -> Any:
        return Boundary, (self.tree, self._where), {"dtypes": self.dtypes}

    def example(self, device: Any = "meta") -> tuple[Tensor, ...]:
        pairs = zip(tensors_in(self.tree), self.dtypes, strict=True)
        sent = [torch.zeros_like(_as_real(t), dtype=dtype, device=device) for t, dtype in pairs]
        return tuple([tensor.requires_grad_(tensor.is_floating_point()) for tensor in sent])

    def to_wire(self, tree: Any) -> tuple[Tensor, ...]:
        kind = _signature(tree)
        if kind != self._expected:
            raise ValueError(
                f"{self._where} returns {kind[0]}, but {self._expected[0]} for the sample: between "
                "processes, micro-batches may differ in the values of tensors only. After "
                "a change of the layers (fully_shard, dtypes) make a new schedule: "
                "mine.schedule(...)"
            )
        sent = [_as_real(_dense(tensor, self._where)) for tensor in tensors_in(tree)]
        # Copies, because the next micro-batch may change a buffer and PyTorch detaches in place.
        return tuple([tensor.clone(memory_format=torch.contiguous_format) for tensor in sent])

    def from_wire(self, wire: Sequence[Tensor]) -> Any:
        # Views, because layers may change their input in place, which autograd forbids for leaves.
        found = [tensor.unsafe_chunk(1)[0] if tensor.dim() else tensor.clone() for tensor in wire]

        def known(like: list[Tensor]) -> list[Tensor]:
            pairs = zip(found, like, strict=True)
            return [torch.view_as_complex(t) if known.is_complex() else t for t, known in pairs]

        return map_tensors(known, self.tree)


def _signature(tree: Any) -> tuple[str, Any]:
    """The structure and leaves of a tree, without the values of its tensors."""
    leaves, structure = flatten(tree)
    shown = [described(leaf) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves]
    return ", ".join(shown), structure


def _dense(tensor: Tensor, where: str) -> Tensor:
    """A tensor that can be sent. The copy of an asynchronous tensor waits for its values."""
    found = tensor if type(tensor) in (Tensor, nn.Parameter) else tensor.clone()
    if type(found) not in (Tensor, nn.Parameter) or found.layout is not torch.strided:
        raise TypeError(
            f"{where} returns a tensor of type {type(found).__name__} ({found.layout}): only a "
            "dense torch.Tensor can be sent to another process. Convert a DTensor by to_local(), "
            "or by output layouts with use_local_output=True"
        )
    return found


def _as_real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


class StageModule(Partition):
    """The layers of one stage, under their names in the model.

    ``fully_shard`` and ``parallelize_module`` take it as any other module.

    All stages but the first have an ``inward`` boundary. All but the last have an ``outward`` one,
    which ``forward`` sets while it is None. In a step the first stage has the ``inputs`` of all
    micro-batches, and the last one a ``head``, which computes the loss of an output.
    """

    inward: Boundary | None = None
    outward: Boundary | None = None
    head: Callable[[int, Any], Tensor] | None = None
    run: StageRun
    _stage: Stage | None

    def __init__(
        self, layers: Any, where: str, place: tuple[int, int, bool], skips: Sequence[Any]
    ) -> None:
        super().__init__()
        self._modules.update(layers)
        self._where, (self._j, self._first, self._last) = where, place
        self._arriving, self._leaving = skips
        self.inputs: list[Any] = []
        self._micro_batch, self._stage = 0, None

    def begin(self, m: int, seed: int, device: torch.device) -> None:
        names, keys = list(self._modules), (self._arriving, self._leaving)
        if self._stage is None or self._stage.names != names:
            self._stage = Stage(self._j, self, names, self._first, device, *keys)
        self.run = StageRun(self._stage, m, seed, "never", grad=torch.is_grad_enabled())

    def around(self, i: int, module: Callable[..., Any], wire: Any) -> Any:
        """Runs ``module``, this one or a wrapper of it, on micro-batch ``i``.

        ``wire`` has the tensors received, or in the first stage the index of the micro-batch.
        Returns the tensors to send, or in the last stage the loss.
        """
        self._micro_batch = i
        found = module(self.inputs[i]) if self.inward is None else module(*wire)
        self.run.forwards_done[0] += 1
        return found if self.head is None else self.head(i, found)

    def forward(self, *given: Any) -> Any:
        """From tensors received, or the model's input, to tensors to send, or its output."""
        tree = (given[0], ()) if self.inward is None else self.inward.from_wire(given)
        value, skips = self._run_layers(*tree)
        if self._last:
            return value
        if self.outward is None:
            self.outward = Boundary((value, skips), self._where)
        return self.outward.to_wire((value, skips))

    def _run_layers(self, value: Any, skips: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        """Runs the layers. Skips that pass by stay in the store."""
        store, run = dict(zip(self._arriving, skips, strict=True)), self.run
        try:
            with use_store(store):
                layers = draws(run, run.layers)
                value = layers(self._micro_batch, (value, ()), None, False)[0]
        except Exception as error:
            annotate(error, f"in {self._where}")
            raise
        return value, tuple([store[key] for key in self._leaving])


class Stages(ModelNames):
    """The stages of a model on one rank; made by :func:`stage`.

    Parameters and entries of ``state_dict`` have the names of the original model.

    Attributes:
        stages: PyTorch's ``PipelineStage`` objects of this rank. Their modules ``.submod`` are for
            ``fully_shard`` and ``parallelize_module``.
        balance: that of the whole model.
        device: the device of this rank.
        rank: the rank of this process in the pipeline.
        first: the module of the model's first stage on its rank, None elsewhere.
        last: the module of the model's last stage on its rank, None elsewhere.
    """

    first: StageModule | None
    last: StageModule | None
    _warned = False

    def __init__(self, group: dist.ProcessGroup, timeout: float, *given: Any, **how: Any) -> None:
        super().__init__()
        self.peers = Peers(group, "pipeline", "rank", timeout)
        self.rank, self._group = self.peers.rank, self.peers.new_group("stages")
        self.parts: dict[int, StageModule] = {}
        self.stages: list[Any] = []
        self._ties: list[_Tied] = []
        #: By autocast state, the boundary after each stage but the last.
        self._boundaries: dict[Any, list[Any]] = {}
        self.counts = LossCounts()
        self.size = self.peers.agree(partial(self._build, *given, **how))[0]
        self.connect()
        self.stages = self.pytorch_stages()
        self._tie()

    def _build(
        self, layers: Layers, balance: Any, sample: Any, placement: str, device: Any, unpack: bool,
        **how: Any,
    ) -> tuple[dict[str, Any], int]:  # fmt: skip
        """Builds the modules, for ``Peers.agree``; the first stage's rank returns the samples of a
        micro-batch, other ranks 0."""
        n = self.peers.size
        if placement not in ("loop", "v"):
            raise ValueError(f"placement={placement!r}: must be 'loop' or 'v'")
        module = as_sequential(layers)
        initialization = Initialization.checked(module, **how)
        if initialization.seed is None and (has_specs(module) or waiting(module)):
            # Each rank draws one number, so that the generators of all ranks stay alike.
            initialization = Initialization(initialization.init_fn, draw_seed())
        self.balance, self.placement = _checked_balance(balance, module, n, placement), placement
        stages = range(len(self.balance))
        self._rank_of = [min(j, 2 * n - 1 - j) if placement == "v" else j % n for j in stages]
        if device is None:
            here = torch.accelerator.is_available() and dist.get_backend(self._group) != "gloo"
            device = torch.accelerator.current_device_index() if here else "cpu"
        self.device = resolve_workers([device], 1)[0].device
        whole = on_meta(module)
        verify_skippables(whole)
        self._elsewhere = frozenset(whole.state_dict())
        spans = [slice(*ends) for ends in pairwise(accumulate(self.balance, initial=0))]
        metas, items = list(whole._modules.items()), list(module._modules.items())
        cut = [nn.Sequential(OrderedDict(metas[span])) for span in spans]
        self._tied = find_ties(cut)
        check_modes(self._tied)
        outgoing = list(enumerate(inspect_layout(cut).outgoing))
        passing = [  # skips that arrive with the input of a stage, and are popped there or later
            [key for k, skips in outgoing for key, to in skips.items() if k < j <= to]
            for j in range(len(cut) + 1)
        ]
        for j, span in enumerate(spans):
            if self._rank_of[j] == self.rank:
                on = self.peers.name(self.rank)
                where = f"stage {j} (layers {span.start} to {span.stop - 1}) on {on}"
                place = j, span.start, j + 1 == len(cut)
                part = StageModule(items[span], where, place, passing[j : j + 2])
                part.unpack = unpack or unpacks(module)
                self.parts[j] = part
        ends = {"first": self.parts.get(0), "last": self.parts.get(len(cut) - 1)}
        self.__dict__.update(ends)  # not registered as submodules
        parts, devices = list(self.parts.values()), [self.device] * len(self.parts)
        firsts = [spans[j].start for j in self.parts]
        or_as_before(parts, lambda: build_layers(parts, devices, initialization, firsts))
        move_layers(parts, devices)
        for part in parts:
            self._modules.update(part._modules)
            part.training = self.training = module.training
        size = 0
        if self.first is not None:
            if sample is None:
                raise ValueError(
                    "sample is missing: on the rank of the first stage give an input of the size "
                    "of a micro-batch, stage(..., sample=x[:size])"
                )
            value, size = unwrapped(batch_input(self, sample))
            self.sample = value
        kinds = list(map(type_name, whole))
        return {"layers": kinds, "placements": placement, "balances": self.balance}, size

    def autocast(self) -> tuple[Any, ...]:
        types = dict.fromkeys(("cpu", self.device.type))
        on = filter(torch.is_autocast_enabled, types)
        return tuple([(kind, torch.get_autocast_dtype(kind)) for kind in on])

    def connect(self) -> None:
        """Sets the boundaries of ``parts`` for the current autocast state.

        For a new state the sample runs through the stages, one after another.
        """
        key, n = self.autocast(), len(self.balance)
        if key not in self._boundaries:
            found: list[Any] = []
            for j, rank in enumerate(self._rank_of[:-1]):
                before = found[-1] if found else None
                run = partial(self._boundary, j, before) if j in self.parts else lambda: None
                found.append(self.peers.agree(lambda: ({}, run()))[rank])  # noqa: B023
            self._boundaries[key] = found
        boundaries = [None, *self._boundaries[key], None]
        for j, part in self.parts.items():
            part.inward, part.outward = boundaries[j : j + 2] if n > 1 else (None, None)

    def _boundary(self, j: int, inward: Boundary | None) -> Boundary:
        """What stage ``j`` sends, found by a run on zeros, or in the first stage on the sample."""
        part = self.parts[j]
        module = next((each.submod for each in self.stages if each.stage_index == j), part)

        def run() -> Boundary:
            part.inward, part.outward = inward, None
            part.begin(1, 0, self.device)
            try:
                wire = () if inward is None else inward.example(self.device)
                sent = part.around(0, module, wire)
            finally:
                for each in filter(lambda m: isinstance(m, FSDPModule), module.modules()):
                    each.reshard()  # the state before and after a step
            assert part.outward is not None
            part.outward.dtypes = [tensor.dtype for tensor in sent]
            return part.outward

        part.inputs = [map_tensors(clones, self.sample)] if inward is None else []
        return restoring_module(part, torch.no_grad()(run))

    def pytorch_stages(self) -> list[Any]:
        """PyTorch's objects for the stages of this rank, as they are connected now."""
        index = torch.empty(1, dtype=torch.int64, device="meta")
        loss = torch.empty(1, device="meta", requires_grad=True)
        modules = {each.stage_index: each.submod for each in self.stages}
        made = []
        for j, part in self.parts.items():  # given all shapes, PyTorch runs nothing to infer them
            given = (index,) if part.inward is None else part.inward.example()
            sent = (loss,) if part.outward is None else part.outward.example()
            shapes: Any = {"input_args": given, "output_args": sent, "group": self._group}
            place = j, len(self.balance), self.device
            made.append(PyTorchStage(part.around, modules.get(j, part), *place, **shapes))
        return made

    def _tie(self) -> None:
        """Gives tied tensors on several ranks the values of the first of these ranks."""
        for k, tie in enumerate(self._tied):
            ranks = list(dict.fromkeys(self._rank_of[j] for j in tie.stages))
            mine = [place for place in tie.places if place.stage in self.parts]
            if not mine:
                continue
            group = None
            if len(ranks) > 1:
                group = self.peers.new_group(f"tie {k}", ranks=ranks)
                tensor = attrgetter(mine[0].full_name)(self).detach()
                dense = tensor.contiguous()
                dist.broadcast(dense, dist.get_global_rank(self._group, ranks[0]), group)
                tensor.copy_(dense)
            if isinstance(mine[0].tensor, nn.Parameter):
                names = [place.full_name for place in mine]
                self._ties.append(_Tied(names, group, ranks[0] == self.rank))

    def _apply(self, *args: Any, **how: Any) -> Any:
        self._boundaries.clear()  # dtypes may have changed
        return super()._apply(*args, **how)  # type: ignore[no-untyped-call]

    def __getstate__(self) -> dict[str, Any]:
        """The layers and their state only: a copy takes part in no pipeline."""
        gone = "peers", "_group", "parts", "stages", "_ties", "_tied", "_boundaries", "counts"
        kept = {key: value for key, value in self.__dict__.items() if key not in gone}
        return {**kept, "first": None, "last": None, "sample": None, "stages": []}

    def _require_peers(self, what: str) -> Peers:
        if "peers" not in self.__dict__:
            raise RuntimeError(
                f"{what}() of a copy of stages, which has their layers and state only: call it on "
                "the result of stage(), after load_state_dict(copy.state_dict())"
            )
        return self.peers

    def schedule(
        self,
        name: str = "1f1b",
        *,
        chunks: int,
        loss_fn: Callable[..., Any] | None = None,
        loss_reduction: str | None = None,
        weight: Callable[[Any], Any] | Sequence[Any] | None = None,
        verify: bool | None = None,
        data_parallel: Any = None,
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
            loss_fn: as for ``Pipe.train_batch``; called on the rank of the last stage, where
                ``schedule.metrics`` has the metrics of the last call. None: for ``eval`` only.
            loss_reduction, weight, verify: as for ``Pipe.train_batch``.
            data_parallel: the process group, or mesh of one dimension, over which the gradients of
                the stages are averaged. Needed for sums, and where the weights of mini-batches
                differ (masked targets, ``weight=``).

        Returns:
            An instance of a class of ``torch.distributed.pipelining``, whose ``step`` and ``eval``
            check their arguments. Gradients are those of the mini-batch's loss; do not scale them.

        Raises:
            TypeError, ValueError: an argument, or the placement of the stages, does not fit.
        """
        made: Any = []

        def make() -> tuple[dict[str, Any], bool]:
            loss = None if loss_fn is None else known_loss(loss_fn, loss_reduction, weight)
            group = data_parallel
            if group is not None:
                group = given_group(group, "data_parallel")
            made.append(schedule_over(self, name, checked_chunks(chunks), loss, group, verify))
            alike = {"schedules": name, "chunks": chunks, "loss_fn (or None)": loss is not None}
            # Such a loss may return a weight, by which the step divides gradients.
            weighs = loss and loss.weigh is None and not loss.exact and loss.reduction == "mean"
            return alike, bool(weighs)

        rows = self._require_peers("schedule").agree(make)
        made[0].weighs = rows[self._rank_of[-1]]
        self._boundaries.clear()  # layers may have been sharded
        self.connect()
        return made[0]

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """As ``nn.Module.parameters``; warns if ``torch.nn.utils.clip_grad_norm_`` reads them."""
        apart = "peers" in self.__dict__ and self.peers.size > 1
        # The caller's frame of a generator is the function that iterates over it.
        if apart and not self._warned and sys._getframe(1).f_code is _CLIP:
            self._warned = True
            warnings.warn(
                "torch.nn.utils.clip_grad_norm_(mine.parameters(), max_norm) clips the gradients "
                "of each rank by its own norm, not by that of the whole model: "
                "mine.clip_grad_norm_(max_norm), called on all ranks, does that",
                stacklevel=caller_stacklevel(),
            )
        yield from super().parameters(recurse)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Clip gradients by the norm of all gradients of the model; called on all ranks.

        As ``torch.nn.utils.clip_grad_norm_``, over all stages and all shards of ``fully_shard``
        and ``parallelize_module``. Tied weights count once.

        Returns:
            The norm before clipping, float64, the same on all ranks.

        Raises:
            ValueError: ``norm_type`` is not positive.
        """
        if norm_type <= 0:
            raise ValueError(f"norm_type={norm_type}: give a positive one, or math.inf")
        with self._require_peers("clip_grad_norm_").call("clip_grad_norm_"):
            total = self._grad_norm(norm_type)
        if error_if_nonfinite and not torch.isfinite(total):
            raise RuntimeError(f"the norm of order {norm_type} of all gradients is {total.item()}")
        for parameter in self.parameters():  # one by one, because each may be on another mesh
            nn.utils.clip_grads_with_norm_(parameter, max_norm, total)
        return total

    def _grad_norm(self, norm_type: float) -> Tensor:
        elsewhere = {id(weight) for tie in self._ties for weight in tie.weights(self)[tie.first :]}
        by_mesh: dict[Any, list[Any]] = defaultdict(list)
        for parameter in self.parameters():
            if parameter.grad is not None and id(parameter) not in elsewhere:
                by_mesh[getattr(parameter.grad, "device_mesh", None)].append(parameter.grad)
        # In one dtype: the stages may have different ones.
        norms = [torch.zeros((), device=self.device, dtype=torch.float64)]
        for grads in by_mesh.values():
            norm: Any = nn.utils.get_total_norm(grads, norm_type)
            norms.append((norm.full_tensor() if isinstance(norm, DTensor) else norm).double())
        own = torch.linalg.vector_norm(torch.stack(norms), norm_type)
        everywhere = torch.stack(self.peers.gather(own, self._group))
        return torch.linalg.vector_norm(everywhere, norm_type)  # type: ignore[no-any-return]

    def broadcast(self, tensor: Tensor) -> None:
        """Gives all ranks of the pipeline the values of the last stage's rank, in place."""
        rank = dist.get_global_rank(self._group, self._rank_of[-1])
        self.peers.wait(dist.broadcast(tensor, rank, self._group, async_op=True), tensor)

    @contextmanager
    def combining_gradients(self, factor: Callable[[], Tensor] | None) -> Iterator[None]:
        """Adds up the gradients of tied weights over all stages and ranks at the end of a step.

        Gradients of earlier steps were added up before, and are kept apart. Then the gradients of
        this step are multiplied by ``factor()``, and the user's hooks run once.
        """
        tied = [(tie, tie.weights(self)) for tie in self._ties]
        apart = list(self.parameters()) if factor else list(chain(*[each for _, each in tied]))
        apart = list({id(weight): weight for weight in apart if weight.requires_grad}.values())
        before = [weight.grad for weight in apart]
        hooked = [p for p in self.parameters() if p._post_accumulate_grad_hooks]
        versions = [(leaf.grad, version_of(leaf.grad)) for leaf in hooked]
        places: list[Any] = [leaf._post_accumulate_grad_hooks for leaf in hooked]
        hooks = list(map(OrderedDict, places))
        for weight in apart:
            weight.grad = None
        list(map(OrderedDict.clear, places))
        try:
            yield
            for tie, weights in tied:
                if weights[0].requires_grad:
                    tie.add_up(weights)
            if factor is not None:
                by = factor()
                for weight in apart:
                    if weight.grad is not None:
                        _local(weight.grad).mul_(by)
            for weight, grad in zip(apart, before, strict=True):
                if grad is not None:
                    weight.grad = grad if weight.grad is None else grad.add_(weight.grad)
        except BaseException:
            for weight, grad in zip(apart, before, strict=True):
                weight.grad = grad
            raise
        finally:
            list(map(OrderedDict.update, places, hooks))
        for leaf, own, (grad, version) in zip(hooked, hooks, versions, strict=True):
            added = leaf.grad is not grad or version_of(grad) != version
            for hook in own.values() if added else ():
                hook(leaf)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # Accepts the state of the whole model: entries of other ranks are ignored.
        for key in self._elsewhere - set(self.state_dict()):
            state_dict.pop(prefix + key, None)
        super()._load_from_state_dict(state_dict, prefix, *args)


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
    timeout: float | None = None,
) -> Stages:
    """Make the stages of this rank. Call it on all ranks of the pipeline, with equal arguments.

    ::

        dist.init_process_group()                       # under torchrun --nproc-per-node 4
        mine = stage(layers, [2, 2, 2, 2], sample=x[:16])
        schedule = mine.schedule("1f1b", chunks=8, loss_fn=F.cross_entropy)
        schedule.step(x, target=y)

    Args:
        layers: as for ``Pipe``. A rank builds only its own :class:`LayerSpec` layers, and moves
            and uses only its own modules.
        balance: the number of layers of each stage, for a multiple of the number of ranks; or
            ``"parameters"``, ``"uniform"`` or ``"type:regex"`` for one stage on each rank (two
            with ``placement="v"``).
        sample: an input with the shape and dtype of every micro-batch, needed on the rank of the
            first stage. The layers run on it once, to find the shapes of all boundaries.
        group: the process group of the pipeline, or a mesh of one dimension, ``mesh["pp"]``. None:
            all processes.
        device: of this rank. None: the current accelerator, or the CPU if there is none or the
            group is on gloo.
        placement: with several stages on each of ``n`` ranks, those of rank ``r``: ``"loop"`` for
            ``r``, ``r + n``, ..., or ``"v"`` for ``r`` and ``2n - 1 - r``.
        init_fn, unpack: as for ``Pipe``.
        seed: as for ``Pipe``. Initial weights then equal those of a single process.
        timeout: seconds that a rank waits for another one before it raises. None: the timeout of
            the process group.

    Raises:
        TypeError, ValueError: an argument does not fit, or there is no process group.
        RuntimeError: another rank failed, with its reason; or the PyTorch version is not supported.
    """
    check_pipelining()
    of = given_group(group, "group")
    timeout = timeout_of(of) if timeout is None else checked_number("timeout", timeout)
    given = layers, balance, sample, placement, device, unpack
    return Stages(of, timeout, *given, init_fn=init_fn, seed=seed)


def _checked_balance(balance: Any, module: nn.Sequential, n: int, placement: str) -> list[int]:
    v = placement == "v"
    if isinstance(balance, str):
        balance = balance_named(balance, module, 2 * n if v else n)
    sizes = check_balance(balance, len(module))
    if not sizes or (len(sizes) != 2 * n if v else len(sizes) % n):
        needed = f"{2 * n}, two on each for placement='v'" if v else f"a multiple of {n}"
        raise ValueError(
            f"balance={sizes} has {len(sizes)} stages for {n} ranks: give {needed}, or start "
            "another number of processes (torchrun --nproc-per-node)"
        )
    return sizes


class _Tied(NamedTuple):
    """A weight in several stages: its names on this rank, and the group of all its ranks.

    ``first``: whether this is the rank of the first of the stages.
    """

    names: list[str]
    group: Any
    first: bool

    def weights(self, owner: nn.Module) -> list[nn.Parameter]:
        """The current parameters of the names; ``fully_shard`` makes one for each stage."""
        return list({id(p): p for p in map(owner.get_parameter, self.names)}.values())

    def add_up(self, weights: Sequence[nn.Parameter]) -> None:
        for weight in weights:
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
        grads: list[Any] = [weight.grad for weight in weights]
        own = [_local(grad) for grad in grads]
        if len({(grad.shape, getattr(grad, "placements", None)) for grad in grads}) > 1:
            raise ValueError(
                f"{' and '.join(map(repr, self.names))} are one weight, which is sharded "
                "differently in two stages: shard these stages alike, or untie them"
            )
        dense = sum(own[1:], own[0]).contiguous()
        if self.group is not None:
            dist.all_reduce(dense, group=self.group)
        for grad in own:
            grad.copy_(dense)


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
