"""What one rank has of a model: its layers, PyTorch's stages over them, and schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from syncpipe.distributed.pipelining.module import StageModule
from syncpipe.distributed.pipelining.schedules import SCHEDULES, make
from syncpipe.distributed.pipelining.tied import SharedWeights
from syncpipe.distributed.pipelining.together import Together
from syncpipe.layers.conversion.layer import in_order, index_keys
from syncpipe.options import checked_chunks
from syncpipe.training.loss.known import known_loss

__all__ = ["Stages"]


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

    def __init__(self, whole: nn.Sequential, balance: list[int], together: Together) -> None:
        super().__init__()
        self.balance = balance
        self.together = together
        self.rank = together.rank
        self.device = torch.device("cpu")
        self.stages: list[Any] = []
        self.shared: SharedWeights | None = None
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
        **unknown: Any,
    ) -> Any:
        """One of PyTorch's schedules over the stages; called on all ranks.

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
        self.together.check()

        def made() -> Any:
            _check_schedule(name, len(self.stages), self._placement)
            loss = None if loss_fn is None else known_loss(loss_fn, loss_reduction, weight)
            return make(self, name, checked_chunks(chunks), loss)

        return self.together.agree(made)

    @property
    def first(self) -> StageModule | None:
        """The module of the model's first stage, if it is here."""
        return next((each.submod for each in self.stages if each.is_first), None)

    @property
    def last(self) -> StageModule | None:
        """The module of the model's last stage, if it is here."""
        return next((each.submod for each in self.stages if each.is_last), None)

    def let_go(self) -> None:
        """Holds on to no process group, which is what wakes other ranks that wait in it."""
        for each in self.stages:
            each.group = None

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


def _check_schedule(name: Any, stages: int, placement: str) -> None:
    if name not in SCHEDULES:
        shown = ", ".join(map(repr, SCHEDULES))
        raise ValueError(f"schedule {name!r}: between processes there are {shown}")
    needed = SCHEDULES[name][1]
    if needed == "one" and stages != 1:
        raise ValueError(
            f"{name!r} is for one stage on each rank, and there are {stages}: give a balance with "
            "as many numbers as ranks, or take 'interleaved_1f1b'"
        )
    if needed != "one" and stages > 1 and needed != placement:
        raise ValueError(
            f"{name!r} needs stage(..., placement={needed!r}), and these stages were placed "
            f"{placement!r}"
        )
    if needed == "v" and placement != "v":
        raise ValueError(
            f"{name!r} needs two stages on each rank in a V: stage(..., placement='v'), with twice "
            "as many numbers in the balance as ranks"
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
