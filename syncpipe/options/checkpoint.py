"""What ``checkpoint`` of a pipe may be: which activations are computed again, kept or sent away.

A *mode* says it for a stage: by name, by layer or by operation. What people write is for all
stages or for each; :func:`checked_modes` checks it, and :func:`modes_of_stages` works out what it
means for a balance.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

from torch import nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts

__all__ = ["ByLayer", "Selective", "StageMode", "checked_modes", "modes_of_stages"]

NAMES = ("always", "except_last", "never", "offload")

_ContextFn = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


class Selective:
    """A ``checkpoint`` mode: everything is computed again but for the operations to save.

    What ``torch.utils.checkpoint.create_selective_checkpoint_contexts`` makes of a policy, for all
    micro-batches of a stage::

        ops = torch.ops.aten
        save = [ops.mm.default, ops.addmm.default, ops.bmm.default]
        pipe = Pipe(model, balance, checkpoint=Selective(save))

    Args:
        policy: the operations whose results are saved, or a function ``(context, op, *args,
            **kwargs)`` that returns a ``torch.utils.checkpoint.CheckpointPolicy``. It is called
            for each operation, so it has to be quick.

    Raises:
        TypeError: neither.
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
        self.contexts()  # it looks at the list

    @classmethod
    def of(cls, context_fn: _ContextFn) -> Selective:
        """From what ``torch.utils.checkpoint`` takes as ``context_fn``."""
        made = cls.__new__(cls)
        made.contexts = context_fn
        return made

    def __repr__(self) -> str:
        args = getattr(self.contexts, "args", (self.contexts,))
        return f"Selective({', '.join(map(repr, args))})"


class ByLayer(NamedTuple):
    """The layers of a stage that are computed again.

    Attributes:
        spans: the first layer and the one after the last of each run, counted in the stage. What
            is in one run is computed again together, and only its input is kept.
    """

    spans: tuple[tuple[int, int], ...]


#: What a stage does.
StageMode = str | Selective | ByLayer

_WAYS = (
    f"one of {', '.join(map(repr, NAMES))}, a function (layer) -> bool, a list of layers, a "
    "syncpipe.Selective, or one of these for each stage"
)


def checked_modes(checkpoint: Any) -> Any:
    """What ``checkpoint`` is, in a form that nobody can change.

    Raises:
        ValueError: none of the possible ways.
    """
    if _by_stage(checkpoint):
        for mode in checkpoint:
            if _by_stage(mode):
                raise ValueError(f"checkpoint={checkpoint!r}: {mode!r} is not one mode")
        return tuple(_checked(mode, checkpoint) for mode in checkpoint)
    return _checked(checkpoint, checkpoint)


def _checked(mode: Any, checkpoint: Any) -> Any:
    if isinstance(mode, str) and mode not in NAMES:
        raise ValueError(f"checkpoint={checkpoint!r}: {mode!r} is not {_WAYS}")
    if isinstance(mode, (str, Selective)):
        return mode
    if isinstance(mode, partial) and mode.func is create_selective_checkpoint_contexts:
        return Selective.of(mode)
    if callable(mode) and not isinstance(mode, type):
        return mode
    try:
        return tuple(item if isinstance(item, bool) else _indices(item) for item in _listed(mode))
    except TypeError:
        raise ValueError(f"checkpoint={checkpoint!r}: must be {_WAYS}") from None


def _listed(mode: Any) -> Sequence[Any]:
    if not isinstance(mode, Sequence) or isinstance(mode, bytes) or not len(mode):
        raise TypeError
    return mode


def _indices(item: Any) -> int | tuple[int, ...]:
    """A layer, or several that are computed again together."""
    if isinstance(item, (tuple, list, range)) and len(item):
        return tuple(map(operator.index, item))
    return operator.index(item)


def _by_stage(checkpoint: Any) -> bool:
    return isinstance(checkpoint, (tuple, list)) and (
        not checkpoint
        or any(isinstance(mode, (str, Selective)) or callable(mode) for mode in checkpoint)
    )


def modes_of_stages(
    checkpoint: Any, layers: Sequence[nn.Module], balance: Sequence[int]
) -> tuple[StageMode, ...]:
    """What each stage does.

    Args:
        checkpoint: what :func:`checked_modes` returned.
        layers: all layers.
        balance: for each stage the number of its layers.

    Raises:
        ValueError: modes for another number of stages, layers that do not exist, or a predicate
            that no layer fulfils.
    """
    each = _by_stage(checkpoint)
    if each and len(checkpoint) != len(balance):
        raise ValueError(
            f"checkpoint={checkpoint} has {len(checkpoint)} modes, but there are {len(balance)} "
            "stages: give one for each stage, or one mode for all"
        )
    modes = []
    first = 0
    for j, size in enumerate(balance):
        here = range(first, first + size)
        mode = checkpoint[j] if each else checkpoint
        if not isinstance(mode, (str, Selective)):
            if each or j == 0:
                among = here if each else range(len(layers))
                runs = _runs(mode, layers, among, f"stage {j}" if each else "the model")
            mode = ByLayer(tuple(_within(runs, here)))
        modes.append(mode)
        first += size
    return tuple(modes)


def _runs(
    mode: Any, layers: Sequence[nn.Module], among: range, where: str
) -> list[tuple[int, ...]]:
    """The runs of layers that are computed again, in order."""
    if callable(mode):
        runs: list[tuple[int, ...]] = [(k,) for k in among if mode(layers[k])]
        if not runs:
            raise ValueError(
                f"checkpoint={mode!r}: no layer of {where} fulfils it; their types are "
                f"{', '.join(sorted({type(layers[k]).__name__ for k in among}))}. For none at all "
                "write 'never'"
            )
        return runs
    if isinstance(mode[0], bool):
        if len(mode) != len(layers) or not all(isinstance(flag, bool) for flag in mode):
            raise ValueError(
                f"checkpoint={list(mode)}: give one bool for each of the {len(layers)} layers of "
                "the model, or the indices of layers"
            )
        return [(k,) for k in among if mode[k]]
    runs = sorted(
        tuple(_index(k, layers, mode) for k in (run if isinstance(run, tuple) else (run,)))
        for run in mode
    )
    flat = [k for run in runs for k in run]
    if len(set(flat)) < len(flat):
        raise ValueError(f"checkpoint={list(mode)}: a layer is in it twice")
    for run in runs:
        if run != tuple(range(run[0], run[0] + len(run))):
            raise ValueError(f"checkpoint={list(mode)}: {run} are no layers one after another")
        if not all(k in among for k in run):
            raise ValueError(
                f"checkpoint={list(mode)}: {where} has the layers {among[0]} to {among[-1]} "
                "(layers are counted in the model, not in the stage)"
            )
    return runs


def _index(k: Any, layers: Sequence[nn.Module], mode: Any) -> int:
    n = len(layers)
    if isinstance(k, bool) or not -n <= k < n:
        raise ValueError(f"checkpoint={list(mode)}: {k!r} is no layer; there are {n}, from 0")
    return int(k) % n


def _within(runs: list[tuple[int, ...]], stage: range) -> Iterator[tuple[int, int]]:
    """The parts of runs that are in a stage, counted in it: its border cuts a run."""
    for run in runs:
        there = [k - stage.start for k in run if k in stage]
        if there:
            yield there[0], there[-1] + 1
