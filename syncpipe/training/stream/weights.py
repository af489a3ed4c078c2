"""The versions of the weights of one stage, while a stream is on its way.

The parameters themselves are always the newest version; the optimizer knows nothing else. A cell
computes with leaves of its version, which are put in the parameters' places while it runs. They are
made of the very memory of the parameters, as long as these stay as they are::

    weight (version 2) ---- memory ---- leaf of version 2         cells 4, 5 are in flight

    weight (version 3) ---- a copy of it, then updated in place
                            memory ---- leaf of version 2         until cells 4, 5 have gone back

So a version costs memory only if cells need it after the next one is there. A stage that never
needs an old one, as the last, computes with the parameters themselves.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.optim import Optimizer

from syncpipe.data import storage_of
from syncpipe.runtime.graph import go_back
from syncpipe.runtime.interrupts import Swap
from syncpipe.runtime.recomputation import version_of
from syncpipe.stages.run import StageRun
from syncpipe.stages.sharing import swaps_of
from syncpipe.stages.stage import Stage

__all__ = ["StageWeights"]


class StageWeights:
    """The weights of one stage. Used by its worker, and before and after that by the caller.

    Args:
        stage: the stage.
        optimizer: updates its parameters; None if none is to be trained.
        most: so many versions are held at most.
        rule: for each micro-batch the version that it uses; None: the newest when it comes.
        every: so many replicas the stage has; micro-batches come to each in turn.

    Attributes:
        parameters: those that are trained.
        leaves: all that cells may use in their places, for each of as many versions as are held.
        used: for each micro-batch that came the version that it used.
        updates: the number of updates so far, which is the newest version.
        kept: the largest number of versions that were held at a time.
        current: the leaves of the version that is in use.
    """

    def __init__(
        self,
        stage: Stage,
        optimizer: Optimizer | None,
        most: int,
        rule: Callable[[int], int] | None,
        *,
        every: int = 1,
    ) -> None:
        self.parameters = trained(stage.partition)
        self._every = every
        self.optimizer = optimizer
        self.used = array("q")
        self.updates = 0
        self.kept = 1
        self._rule = rule
        self.current: list[Tensor] = []
        self._marks: list[Any] = []
        self._swaps: list[tuple[StageRun, dict[int, list[Swap]]]] = []
        self._memory = [parameter.data for parameter in self.parameters]
        self._free: list[list[Tensor]] = []  # memory of versions that are over
        several = most > 1 and bool(self.parameters)
        self.leaves = [list(map(_leaf, self.parameters)) for _ in range(most if several else 0)]
        self._unused = list(self.leaves)
        #: Versions that are held, oldest first: the number, the leaves, and their marks.
        self._held: deque[tuple[int, list[Tensor], list[Any]]] = deque()
        if several:
            self._hold()
        for parameter in self.parameters:
            parameter.grad = None

    @property
    def state(self) -> list[Any]:
        """What the optimizer has in mind."""
        states = [] if self.optimizer is None else self.optimizer.state.values()
        return [dict(each) if isinstance(each, dict) else each for each in states]

    @property
    def several(self) -> bool:
        """Whether cells compute with leaves of their version."""
        return bool(self.leaves)

    def enter(self, i: int) -> None:
        """Micro-batch ``i``, the next one, goes forward: call before that."""
        self.used.append(self.updates if self._rule is None else self._rule(i))
        self.use(i)

    def use(self, i: int) -> None:
        """Call before anything else is done for micro-batch ``i``."""
        if self.several:
            _, self.current, self._marks = self._held[
                self.used[i // self._every] - self._held[0][0]
            ]
            for run, swaps in self._swaps:
                run.swaps = swaps[id(self.current)]

    def stand_in(self, run: StageRun) -> None:
        """Lets the cells of the stage compute with the version that is in use."""
        for each in run.all:
            swaps: dict[int, list[Swap]] = {}
            for leaves in self.leaves:
                others = dict(zip(map(id, self.parameters), leaves, strict=True))
                swaps[id(leaves)] = swaps_of(each.partition, others)
            self._swaps.append((each, swaps))

    def gradients(
        self, i: int, others: Sequence[Sequence[Tensor | None] | None] = ()
    ) -> list[Tensor]:
        """Gives parameters their gradients; ``i`` would be the first of the next mini-batch.

        Args:
            i: that micro-batch, or, of several replicas, the one that would come here next.
            others: the gradients of other replicas, or None of one that had no mini-batch.

        Returns:
            New memory, if the parameters were moved there.
        """
        if not (self.several or others):
            return []
        there = [self.taken(), *[grads for grads in others if grads is not None]]
        means = [_mean(grads, len(there)) for grads in zip(*there, strict=True)]
        made = self._make_room(i)
        _give(self.parameters, means)
        return made

    def taken(self) -> list[Tensor | None]:
        """The gradients of the version that is in use, which then has none."""
        if self.several and self._marks != list(map(_mark, self.current)):
            raise RuntimeError(
                "a layer changed a parameter in its forward, in place (as an embedding with "
                "max_norm does) or by its data, and train_stream has several versions of it, of "
                "which only one would have changed: give the layer a stage that has one version "
                "(the last one, with versions='stashing'), or use train_batch"
            )
        leaves = self.current if self.several else self.parameters
        grads = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        return grads

    def _make_room(self, i: int) -> list[Tensor]:
        """Moves the parameters, if others still need the newest version as it is; to where."""
        if not self.several:
            return []
        self._let_go(i)
        return self._move() if self._held else []

    @torch.no_grad()
    def follow(self, i: int, newest: Sequence[Tensor]) -> list[Tensor]:
        """Makes the next version what the owner's is; otherwise as :meth:`gradients`."""
        made = self._make_room(i)
        for parameter, value in zip(self.parameters, newest, strict=True):
            parameter.copy_(value)
        self.update()
        return made

    def update(self) -> None:
        """Makes the next version."""
        if self.optimizer is not None:
            self.optimizer.step()
        for parameter in self.parameters:
            parameter.grad = None
        self.updates += 1
        if self.several:
            self._hold()

    def _hold(self) -> None:
        """Holds the newest version."""
        leaves = self._unused.pop()
        for parameter, leaf in zip(self.parameters, leaves, strict=True):
            leaf.data = parameter.data
        self._held.append((self.updates, leaves, list(map(_mark, leaves))))
        self.kept = max(self.kept, len(self._held))

    def _let_go(self, i: int) -> None:
        """Lets go of versions that nobody needs from micro-batch ``i`` on, after an update."""
        if i // self._every < len(self.used):
            oldest = self.used[i // self._every]
        else:
            oldest = self.updates + 1 if self._rule is None else self._rule(i)
        while self._held and self._held[0][0] < oldest:
            version, leaves, _ = self._held.popleft()
            self._unused.append(leaves)
            if version < self.updates:  # else the parameters are there
                self._free.append([leaf.data for leaf in leaves])

    @torch.no_grad()
    def _move(self) -> list[Tensor]:
        """Moves the parameters to other memory; which, if it is new."""
        made: list[Tensor] = []
        if self._free:
            there = self._free.pop()
            for memory, parameter in zip(there, self.parameters, strict=True):
                memory.copy_(parameter)
        else:
            there = made = [parameter.detach().clone() for parameter in self.parameters]
        for memory, parameter in zip(there, self.parameters, strict=True):
            parameter.data = memory
        return made

    def undo(self) -> Iterator[Any]:
        """What puts the newest weights where they were when it began; for ``undone``."""
        moved = self.parameters if self.several else []
        return chain(
            map(Tensor.copy_, self._memory, moved),
            map(setattr, moved, repeat("data"), self._memory),
            map(setattr, self.parameters, repeat("grad"), repeat(None)),
        )


def trained(partition: nn.Module) -> list[nn.Parameter]:
    """The parameters of a stage that need gradients."""
    return [parameter for parameter in partition.parameters() if parameter.requires_grad]


def _leaf(parameter: nn.Parameter) -> Tensor:
    """Of the same memory; not by ``detach()``, which would have the same version counter."""
    leaf = parameter.data.as_subclass(type(parameter)).requires_grad_()
    leaf.__dict__.update(parameter.__dict__)
    return leaf


def _mark(leaf: Tensor) -> tuple[int, int]:
    """Changes when a layer writes into it, or assigns to its ``data``."""
    return version_of(leaf), storage_of(leaf)


def _mean(grads: Sequence[Tensor | None], count: int) -> Tensor | None:
    """Of the gradients of some replicas, which one that does not use a parameter has none of."""
    there = [grad for grad in grads if grad is not None]
    return sum(there[1:], there[0]) / count if there and count > 1 else next(iter(there), None)


def _give(parameters: Sequence[nn.Parameter], grads: Sequence[Tensor | None]) -> None:
    """Gives parameters their gradients, by way of hooks if they have any."""
    hooked: list[tuple[nn.Parameter, Tensor]] = []
    for parameter, grad in zip(parameters, grads, strict=True):
        if grad is None or not parameter.requires_grad:  # a hook of the user's froze it
            continue
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            hooked.append((parameter, grad))
        else:
            parameter.grad = grad
    if hooked:  # in one backward, for hooks of several
        go_back([get_gradient_edge(p) for p, _ in hooked], [grad for _, grad in hooked])
