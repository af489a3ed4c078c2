"""What the driver of a stream does for each action: as in ``train_batch``, with other weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from syncpipe.data import described
from syncpipe.runtime.engine import Run
from syncpipe.runtime.errors import annotate
from syncpipe.runtime.random_numbers import undisturbed
from syncpipe.runtime.thread_state import without_autocast
from syncpipe.schedules.schedule import Kind
from syncpipe.stages.call import Call, sent
from syncpipe.training.leaves import Gradients, Leaves
from syncpipe.training.loss.head import LossHead
from syncpipe.training.stream.source import StreamSource
from syncpipe.training.stream.weights import StageWeights
from syncpipe.training.task import Parcel, TrainingTask

__all__ = ["StreamLeaves", "StreamTask"]

#: What stands for a micro-batch that there is not, and ends the stream.
_END: Any = object()


class StreamLeaves(Leaves):
    """What cells may add gradients to: what they compute with, and nothing else."""

    def __init__(self, call: Call, weights: Sequence[StageWeights]) -> None:
        known: list[list[Tensor]] = []
        for each in weights:
            versions = each.leaves if each.several else [each.parameters]
            known.append([leaf for leaves in versions for leaf in leaves])
        super().__init__(call, Gradients(), known)

    def claim(self, j: int, new: list[Tensor]) -> None:
        super().claim(j, [])
        if new:
            raise RuntimeError(
                f"{described(new[0])}, which requires grad, is used by stage {j} or by loss_fn, "
                "but is none of the parameters that a layer of that stage computes with: no "
                "optimizer of train_stream would update it with the stage. Make it a parameter of "
                "a layer there, that the layer finds by its name (not through a list, a dict or a "
                "closure), or detach() it"
            )

    def of_others(self, j: int, leaves: Iterable[Tensor]) -> list[Tensor]:
        return []  # which `claim` refuses

    def renewed(self, j: int) -> None:
        """Call after an update: gradients begin anew."""
        self.waits[j] = None


class StreamTask(TrainingTask):
    """A stream of mini-batches, as a task for the engine.

    Args:
        call: the call.
        source: where they come from.
        head: takes the outputs.
        leaves: what gets gradients.
        weights: for each stage and replica.
    """

    def __init__(
        self,
        call: Call,
        source: StreamSource,
        head: LossHead,
        leaves: StreamLeaves,
        weights: Sequence[StageWeights],
    ) -> None:
        super().__init__(call, source, head, leaves=leaves)
        self._stream, self._weights = source, weights
        self._several = False  # each mini-batch has a loss of its own

    def bind(self, kind: Kind, j: int) -> Run:
        if kind in ("reduce", "update"):
            act = partial(self._reduce if kind == "reduce" else self._update, j)
            return self.call.bound(without_autocast(self.call.state, act), kind, j)
        run, weights = super().bind(kind, j), self._weights[j]

        def forward(i: int, parcels: list[Parcel]) -> Sequence[Parcel]:
            if not self._there(j, i, parcels):
                ends = len(self._pipeline.outgoing[j]) + (self._first[j] and self.targets_travel)
                return [Parcel(_END)] * ends
            weights.enter(i)
            return run(i, parcels)

        def with_weights(i: int, parcels: list[Parcel]) -> Sequence[Parcel]:
            weights.use(i)
            return run(i, parcels)

        return forward if kind == "forward" else with_weights

    def _there(self, j: int, i: int, parcels: list[Parcel]) -> bool:
        """Whether there is a micro-batch ``i``; the first stage finds out, and tells the others."""
        if not self._first[j]:
            return parcels[0].value is not _END
        return undisturbed(partial(self._comes, i))

    def _comes(self, i: int) -> bool:
        with self.call.as_caller():
            return self._stream.there(i)

    def _reduce(self, j: int, i: int, parcels: list[Parcel]) -> list[Parcel]:
        """Sends the gradients of a replica to the owner; None where it had no mini-batch."""
        grads = self._weights[j].taken() if i < self._stream.extent.backwards else None
        return [self._to(j, self._pipeline.stages[j].j, grads)]

    def _to(self, j: int, other: int, value: Any) -> Parcel:
        return Parcel(*sent(self.call.lane_of[j], self.call.lane_of[other], value))

    def _update(self, j: int, i: int, parcels: list[Parcel]) -> list[Parcel]:
        owner, *others = self._pipeline.numbers[self._pipeline.stages[j].j]
        chunks, weights = self._stream.chunks, self._weights[j]
        following = i + len(others) + 1 if others else (i // chunks + 1) * chunks
        given = [parcel.value for parcel in parcels]
        try:
            if j == owner:
                self.call.release_to_caller(j, weights.gradients(following, given))
                weights.update()
            else:
                self.call.release_to_caller(j, weights.follow(following, *given))
        except BaseException as error:
            annotate(error, f"in the update of stage {j}, after micro-batch {i}")
            raise
        for run in self.call.runs[j].all:
            if run.modules is not None:
                run.modules.note_versions()
        if self.call.state.nested:  # casts of the weights as they were
            torch.clear_autocast_cache()
        self._leaves.renewed(j)
        newest = [parameter.detach() for parameter in weights.parameters]
        return [self._to(j, other, newest) for other in others] if j == owner else []
