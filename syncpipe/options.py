"""Checks of the arguments ``chunks``, ``checkpoint``, ``schedule`` and ``replicas`` of a pipe."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterable, Sequence, Set
from contextlib import AbstractContextManager
from functools import lru_cache, partial
from itertools import islice
from typing import Any, NamedTuple, cast

from torch import Tensor, nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from syncpipe.schedules import one_f_one_b
from syncpipe.schedules.named import ScheduleLike, maker_of, schedule_label
from syncpipe.schedules.schedule import Devices, Schedule
from syncpipe.schedules.stream import VERSIONS


def counted(value: Any, given: str, what: str) -> int:
    try:
        count = operator.index(value)
    except TypeError as error:
        raise TypeError(f"{given}: {what} must be an integer") from error
    if isinstance(value, bool):
        raise TypeError(f"{given}: {what} must be an integer")
    if count < 1:
        raise ValueError(f"{given}: {what} must be at least 1")
    return count


def checked_chunks(chunks: Any) -> int:
    return counted(chunks, f"chunks={chunks!r}", "the number of micro-batches")


def check_flags(**flags: Any) -> None:
    """Refuses values that are not True, False, 1 or 0, such as ``"no"``, which would be True."""
    for name, value in flags.items():
        if not (isinstance(value, int) and value in (0, 1)) and type(value).__name__ != "bool":
            raise TypeError(f"{name}={value!r}: must be True or False")


def check_stream(data_iter: Any, steps: Any, versions: Any) -> int | None:
    """Checks arguments of ``train_stream``, and returns the number of steps."""
    if not isinstance(data_iter, Iterable) or isinstance(data_iter, Tensor | dict | str):
        raise TypeError(
            f"data_iter={type(data_iter).__name__}: it must give mini-batches one after another, "
            "as a DataLoader, a list of pairs or an iterator does"
        )
    if versions not in VERSIONS:
        raise ValueError(f"versions={versions!r}: must be one of {', '.join(map(repr, VERSIONS))}")
    return None if steps is None else counted(steps, f"steps={steps!r}", "mini-batches")


# --- schedule ------------------------------------------------------------------------------------


def checked_schedule(schedule: Any, slots: Any = None) -> ScheduleLike:
    """A schedule, checked as far as possible without a mini-batch, with the ``slots`` of 1F1B."""
    if not isinstance(schedule, str | os.PathLike | Schedule) and not callable(schedule):
        raise TypeError(
            f"schedule={schedule!r}: must be a name, a Schedule, the path of a CSV file or a "
            "function (m, device_of) -> Schedule"
        )
    if isinstance(schedule, str) and not schedule.endswith(".csv"):
        maker_of(schedule)
    if slots is None:
        return cast("ScheduleLike", schedule)
    if schedule != "1f1b":
        raise ValueError(
            f"slots={slots!r}: only schedule='1f1b' has slots, not {schedule_label(schedule)}"
        )
    slots = tuple(slots) if isinstance(slots, list) else slots
    try:
        return _with_slots(slots)
    except TypeError:  # not hashable: the schedule reports other faults
        return partial(one_f_one_b, slots=slots)


@lru_cache(maxsize=128)
def _with_slots(slots: Any) -> partial[Schedule]:
    """The same object for equal slots, so that its schedules are cached."""
    return partial(one_f_one_b, slots=slots)


def slots_of(schedule: ScheduleLike) -> Any:
    if isinstance(schedule, partial) and schedule.func is one_f_one_b:
        return schedule.keywords.get("slots")
    return None


def check_slots(schedule: ScheduleLike, replicas: Sequence[int]) -> None:
    if isinstance(schedule, partial) and schedule.func is one_f_one_b:
        schedule(1, consecutive(replicas))


# --- replicas ------------------------------------------------------------------------------------

#: For all stages, or for each.
ReplicasLike = int | tuple[int, ...]


def checked_replicas(replicas: Any) -> ReplicasLike:
    given, what = f"replicas={replicas!r}", "the number of devices of a stage, or of each, [2, 1],"
    if isinstance(replicas, Iterable) and not isinstance(replicas, str | bytes | Set):
        return tuple(counted(count, given, what) for count in replicas)
    return counted(replicas, given, what)


def counts_of(replicas: ReplicasLike, partitions: int) -> list[int]:
    if isinstance(replicas, int):
        return [replicas] * partitions
    if len(replicas) != partitions:
        raise ValueError(
            f"replicas={list(replicas)} has {len(replicas)} numbers, but balance has {partitions} "
            "partitions: give one for each. (To set another balance, set pipe.replicas = 1 before)"
        )
    return list(replicas)


def consecutive(counts: Sequence[int]) -> Devices:
    """The stages on consecutive devices, as the argument ``device_of`` of schedules."""
    following = iter(range(sum(counts)))
    found = [tuple(islice(following, count)) for count in counts]
    return tuple([devices if len(devices) > 1 else devices[0] for devices in found])


# --- checkpoint: a mode for each stage, by name, by layer or by operation ------------------------

_NAMES = ("always", "except_last", "never", "offload")
_ContextFn = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


class Selective:
    """A ``checkpoint`` mode: recompute everything except the results of some operations.

    Applies ``torch.utils.checkpoint.create_selective_checkpoint_contexts`` to all micro-batches of
    a stage::

        ops = torch.ops.aten
        save = [ops.mm.default, ops.addmm.default, ops.bmm.default]
        pipe = Pipe(model, balance, checkpoint=Selective(save))

    Args:
        policy: the operations whose results are saved, or a function ``(context, op, *args,
            **kwargs)`` that returns a ``torch.utils.checkpoint.CheckpointPolicy``. It is called
            for each operation, so its time matters.

    Raises:
        TypeError: ``policy`` is neither a sequence nor callable.
    """

    def __init__(self, policy: Callable[..., Any] | Sequence[Any]) -> None:
        if not callable(policy) and not isinstance(policy, Sequence):
            raise TypeError(
                f"Selective({policy!r}): must be a list of operations (torch.ops.aten.mm.default) "
                "or a function (context, op, *args, **kwargs) -> CheckpointPolicy"
            )
        if not callable(policy):
            policy = list(policy)
        self.contexts: _ContextFn = partial(create_selective_checkpoint_contexts, policy)
        self.contexts()  # checks the list

    @classmethod
    def of(cls, context_fn: _ContextFn) -> Selective:
        """Make one from a ``context_fn`` of ``torch.utils.checkpoint.checkpoint``."""
        made = cls.__new__(cls)
        made.contexts = context_fn
        return made

    def __repr__(self) -> str:
        args = getattr(self.contexts, "args", (self.contexts,))
        return f"Selective({', '.join(map(repr, args))})"


class ByLayer(NamedTuple):
    """The runs of layers of a stage that are recomputed, each from its input."""

    spans: tuple[tuple[int, int], ...]  #: ``(start, stop)`` of each run, in layers of the stage


StageMode = str | Selective | ByLayer


def _by_stage(checkpoint: Any) -> bool:
    return isinstance(checkpoint, (tuple, list)) and (
        not checkpoint
        or any(isinstance(mode, (str, Selective)) or callable(mode) for mode in checkpoint)
    )


def checked_modes(checkpoint: Any) -> Any:
    """``checkpoint``, checked as far as possible without layers, and made immutable."""
    if _by_stage(checkpoint):
        return tuple(_checked_mode(mode, checkpoint) for mode in checkpoint)
    return _checked_mode(checkpoint, checkpoint)


def _checked_mode(mode: Any, checkpoint: Any) -> Any:
    if isinstance(mode, partial) and mode.func is create_selective_checkpoint_contexts:
        return Selective.of(mode)
    if isinstance(mode, Selective) or (isinstance(mode, str) and mode in _NAMES):
        return mode
    if callable(mode) and not isinstance(mode, type):
        return mode
    try:
        if not isinstance(mode, Sequence) or isinstance(mode, bytes) or not len(mode):
            raise TypeError
        return tuple(item if isinstance(item, bool) else _indices(item) for item in mode)
    except TypeError:
        raise ValueError(
            f"checkpoint={checkpoint!r}: {mode!r} is not one of {', '.join(map(repr, _NAMES))}, a "
            "function (layer) -> bool, a list of layers, a syncpipe.Selective, or one of these for "
            "each stage"
        ) from None


def _indices(item: Any) -> int | tuple[int, ...]:
    if isinstance(item, (tuple, list, range)) and len(item):
        return tuple(map(operator.index, item))
    return operator.index(item)


def recomputed_micro_batches(mode: StageMode, m: int) -> int:
    """How many of ``m`` micro-batches a stage recomputes whole, from the first on."""
    counts: dict[Any, int] = {"always": m, "except_last": m - 1}
    return m if isinstance(mode, Selective) else counts.get(mode, 0)


def modes_of_stages(
    checkpoint: Any, layers: Sequence[nn.Module], balance: Sequence[int]
) -> tuple[StageMode, ...]:
    """The mode of each stage, from the result of :func:`checked_modes`."""
    each = _by_stage(checkpoint)
    if each and len(checkpoint) != len(balance):
        raise ValueError(
            f"checkpoint={checkpoint} has {len(checkpoint)} modes, but there are {len(balance)} "
            "stages: give one for each stage, or one mode for all"
        )
    found: list[StageMode] = []
    runs: list[tuple[int, ...]] = []
    end = 0
    for j, size in enumerate(balance):
        stage, end = range(end, end + size), end + size
        mode = checkpoint[j] if each else checkpoint
        if not isinstance(mode, (str, Selective)):
            if each:
                runs = _runs(mode, layers, stage, f"stage {j}")
            elif j == 0:
                runs = _runs(mode, layers, range(len(layers)), "the model")
            inside = [[k - stage.start for k in run if k in stage] for run in runs]
            mode = ByLayer(tuple((run[0], run[-1] + 1) for run in inside if run))
        found.append(mode)
    return tuple(found)


def _runs(
    mode: Any, layers: Sequence[nn.Module], among: range, where: str
) -> list[tuple[int, ...]]:
    """The runs of layers that are recomputed, as indices in the model, in order."""
    if callable(mode):
        picked: list[tuple[int, ...]] = [(k,) for k in among if mode(layers[k])]
        if not picked:
            raise ValueError(
                f"checkpoint={mode!r}: no layer of {where} fulfils it; their types are "
                f"{', '.join(sorted({type(layers[k]).__name__ for k in among}))}. To recompute "
                "none, write 'never'"
            )
        return picked
    n, text = len(layers), f"checkpoint={list(mode)}"
    bools = [isinstance(k, bool) for k in mode]
    if all(bools) and len(mode) == n:
        return [(k,) for k in among if mode[k]]
    if any(bools):
        raise ValueError(f"{text}: give one bool for each of the {n} layers, or indices of layers")
    given = [run if isinstance(run, tuple) else (run,) for run in mode]
    for k in [k for run in given for k in run]:
        if not -n <= k < n:
            raise ValueError(f"{text}: {k} is no layer; there are {n}, from 0")
    runs = sorted(tuple(k % n for k in run) for run in given)
    if len({k for run in runs for k in run}) < sum(map(len, runs)):
        raise ValueError(f"{text}: a layer is in it twice")
    for run in runs:
        if run != tuple(range(run[0], run[0] + len(run))):
            raise ValueError(f"{text}: {run} are no layers one after another")
        if not all(k in among for k in run):
            raise ValueError(
                f"{text}: {where} has the layers {among[0]} to {among[-1]} "
                "(layers are counted in the model, not in the stage)"
            )
    return runs
