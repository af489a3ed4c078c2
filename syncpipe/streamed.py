"""``Pipe.train_stream``: training that never drains the pipeline. Its semantics are its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from numbers import Integral
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from syncpipe.layers.conversion.sequential import batch_input
from syncpipe.runtime.inline import driven
from syncpipe.schedules.stream import VERSIONS, Versions
from syncpipe.trained import Trained
from syncpipe.training.stream.run import OptimizerFactory, Streamed, stream

__all__ = ["Streams"]


class Streams(Trained):
    """Layers on their devices that can be trained without a flush."""

    def train_stream(
        self,
        data_iter: Iterable[Any],
        *,
        optimizer: OptimizerFactory | Sequence[Optimizer | None],
        loss_fn: Callable[..., Any],
        steps: int | None = None,
        target: Any = None,
        versions: Versions = "stashing",
        loss_reduction: str | None = None,
        weight: Callable[[Any], Any] | Sequence[Any] | None = None,
    ) -> Streamed:
        """Trains on one mini-batch after another without ever draining the pipeline (PipeDream).

        This is **not** ``train_batch`` in a loop: gradients are those of weights that are up to
        ``n - 1`` updates old, ``n`` the number of stages, so another model comes out. On a single
        stage it is the plain loop, bit for bit where nothing draws random numbers (but for
        ``"2bw"``)::

            for input, target in data_iter:
                optimizer.zero_grad()
                loss_fn(model(input), target).backward()
                optimizer.step()

        With more stages each of them updates its own weights as soon as a mini-batch has gone back
        over it, while others are under way. Forward and backward of a mini-batch use one version of
        the weights on each stage; which, ``versions`` says. There is no bubble but at the begin and
        the end of the call; what it costs is memory for versions, and staleness. See
        docs/pipedream.md for when that is worth it.

        Sources: Narayanan et al. 2019, PipeDream: Generalized Pipeline Parallelism for DNN
        Training; Narayanan et al. 2021, Memory-Efficient Pipeline-Parallel DNN Training (2BW).

        Args:
            data_iter: gives mini-batches as ``train_batch(data_iter=)`` does micro-batches: pairs
                (input, target), longer tuples, or dicts. A ``DataLoader`` is one epoch; of an
                iterator as many are taken as there are, or ``steps`` of them.
            optimizer: makes the optimizer of a stage from the list of its parameters:
                ``lambda parameters: torch.optim.SGD(parameters, lr=0.1)``. Or one optimizer for
                each stage (None where nothing is trained), to go on with those of an earlier call.
            loss_fn: as for ``train_batch``.
            steps: at most so many mini-batches; None: until ``data_iter`` ends.
            target: where the target is, as for ``train_batch(data_iter=)``.
            versions: which weights mini-batch ``i`` meets on stage ``j``, as the number of updates
                that they have had. A mini-batch is then one piece, whatever ``chunks`` is.

                - ``"stashing"``: ``max(0, i - (n-j) + 1)``, the newest at its forward. Stage ``j``
                  holds ``n - j`` versions.
                - ``"vertical_sync"``: ``max(0, i - n + 1)`` on all stages, so that it meets one
                  model. Every stage holds ``n`` versions.
                - ``"2bw"``: PipeDream-2BW. Mini-batches are cut into ``chunks`` micro-batches, at
                  least as many as there are stages, whose gradients are added up; ``max(0, i-1)``
                  on all stages, one too. Every stage holds two versions.
            loss_reduction: as for ``train_batch``; of use for ``"2bw"``.
            weight: as for ``train_batch``; of use for ``"2bw"``.

        Returns:
            A ``Streamed``: losses ``[steps]``, metrics, the optimizers, and for each micro-batch
            and stage the version of the weights that was used.

        Raises:
            TypeError, ValueError: an argument does not fit, or what the iterator or the loss
                function gave; the message says which. The pipe cannot have tied weights across
                stages, replicas, or ``deferred_batch_norm``.
            RuntimeError: gradients are switched off; a loss needs none, or depends on what no stage
                updates; or the pipe is called once more while it runs.

        ``.grad`` of all parameters that are trained is None when it begins and ends. An exception
        leaves each stage with the updates that it had made by then, which its note tells, and which
        may be more on one stage than on another; the pipe goes on working.
        """
        what = type(data_iter).__name__
        if not isinstance(data_iter, Iterable) or isinstance(data_iter, Tensor | dict | str):
            raise TypeError(
                f"data_iter={what}: it must give mini-batches one after another, as a DataLoader, "
                "a list of pairs or an iterator does"
            )
        whole = isinstance(steps, Integral) and not isinstance(steps, bool)
        if steps is not None and (not whole or steps < 1):
            raise ValueError(f"steps={steps!r}: a number of mini-batches, at least 1, or None")
        if versions not in VERSIONS:
            raise ValueError(
                f"versions={versions!r}: must be one of {', '.join(map(repr, VERSIONS))}"
            )
        if self._averaging is not None:
            raise RuntimeError(
                "this pipe is one of several processes (data_parallel), whose gradients are "
                "averaged in each step, and train_stream has none: use train_batch"
            )
        self._check_own_calls("train_stream")
        done: Streamed = driven(
            stream,
            self._ready(),
            iter(data_iter),
            pack=partial(batch_input, self),
            chunks=self._chunks,
            optimizer=optimizer,
            loss_fn=loss_fn,
            steps=None if steps is None else int(steps),
            target=target,
            versions=versions,
            loss_reduction=loss_reduction,
            weight=weight,
            **self._running(),
        )
        return done
