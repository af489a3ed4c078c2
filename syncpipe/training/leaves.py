"""The leaves that get gradients in a call.

Parameters are known before the call. Other leaves (in a plain list, in a closure) are found in the
graph of a cell before its backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from syncpipe.data.trees import described
from syncpipe.runtime.graph import AccumulateGrad, go_back, nodes_of
from syncpipe.runtime.recomputation import version_of
from syncpipe.runtime.streams import moved
from syncpipe.stages.call import Call
from syncpipe.storage import modules_of, storage_users
from syncpipe.training.cell import ANCHOR, CUT_NODE, FOREIGN, Cell

_node_of = attrgetter("node")


class Leaves:
    """The leaves that get gradients in one call; ``known`` has the expected ones of each stage.

    One micro-batch may use a leaf that no other uses, so the graph of each cell is searched for
    unknown leaves, which takes about 0.2 us a node.
    """

    def __init__(self, call: Call, known: Iterable[Iterable[Tensor]]) -> None:
        self._call = call
        self._known = [{id(ANCHOR), *map(id, leaves)} for leaves in known]
        #: The nodes of known leaves, which later searches skip.
        self._known_nodes: list[set[Any]] = [set() for _ in self._known]
        self.nested_backward = [False for _ in self._known]  # by layers, inside their backward
        self._plain = set[type]()  # kinds of nodes that need no look

    def around_forward(self, r: int, inner: Any) -> Any:
        """Wraps what runs the layers of cells, to look at their graphs."""
        return inner

    def unknown_leaves(self, r: int, nodes: Iterable[Any], *cuts: Any) -> list[Tensor]:
        """The unknown leaves of the graph of ``nodes``; RuntimeError if it has other ``cuts``."""
        known, nodes_known, plain = self._known[r], self._known_nodes[r], self._plain
        new = []
        for node in nodes_of(nodes, nodes_known):
            kind = type(node)
            if kind in plain:
                continue
            if kind is AccumulateGrad:
                if id(node.variable) in known:
                    nodes_known.add(node)
                else:
                    new.append(node.variable)
            elif kind is CUT_NODE:
                if node.apply.__self__ not in cuts:
                    raise RuntimeError(FOREIGN)
            elif kind.__name__ == "CheckpointFunctionBackward":  # use_reentrant=True
                self.nested_backward[r] = True
            else:
                plain.add(kind)
        return new


class Accumulated(Leaves):
    """Leaves of ``train_batch``: each worker accumulates into ``.grad`` of its own leaves.

    Earlier gradients are copied, because adding and then subtracting is not exact.
    ``known`` are the parameters of the layers by default.

    Attributes:
        parameters: for each stage those that it owns.
        awaiting_grad: for each stage the leaves that have no gradient yet.
    """

    def __init__(self, call: Call, known: Any = None) -> None:
        stages, self._worker_of = call.pipeline.stages, call.pipeline.worker_of
        own: list[list[Tensor]] = known or [_parameters_of(s.partition) for s in stages]
        for r, elsewhere in enumerate(call.owned_elsewhere):
            if elsewhere:
                own[r] = [p for p in own[r] if id(p) not in elsewhere]
        super().__init__(call, map(chain, own, call.extra_leaves))
        self.parameters = own
        #: By identity a leaf, its gradient before the call, the version of that, and a copy.
        self._grads_before: dict[int, tuple[Tensor, Tensor | None, int, Tensor | None]] = {}
        #: By identity a leaf and its first stage.
        self._owner = {id(p): (p, r) for r in reversed(range(len(own))) for p in own[r]}
        self.awaiting_grad = list(map(_without_grad, own))
        self.register(chain(*own))

    def expect_first_grads(self, r: int) -> None:
        self.awaiting_grad[r] = _without_grad(self.parameters[r])

    def register(self, leaves: Iterable[Tensor]) -> None:
        """Saves the gradients of leaves; call before the first backward that reaches them."""
        for leaf in leaves:
            if leaf.requires_grad and id(leaf) not in self._grads_before:
                grad = leaf.grad
                copied = None if grad is None else grad.detach().clone()
                self._grads_before[id(leaf)] = leaf, grad, version_of(grad), copied

    def grad_before(self, leaf: Tensor) -> Tensor | None:
        """A copy of the gradient that a leaf had before the call."""
        return self._grads_before.get(id(leaf), (None,))[-1]

    def added_to(self, leaf: Tensor) -> bool:
        """Whether the call has added to the gradient of a leaf."""
        now = leaf, leaf.grad, version_of(leaf.grad), None
        _, grad, version, _ = self._grads_before.get(id(leaf), now)
        return leaf.grad is not grad or version_of(grad) != version

    @torch.no_grad()
    def restore(self) -> None:
        """Puts back the gradients from before the call."""
        for leaf, grad, _, before in self._grads_before.values():
            if grad is not None and before is not None:
                grad.copy_(before)
            leaf.grad = grad

    @torch.no_grad()
    def scale(self, factor: float | Tensor) -> None:
        """Multiplies what this call added by a number, or by a tensor on any device."""
        for leaf, *_, before in self._grads_before.values():
            if (grad := leaf.grad) is not None and self.added_to(leaf):
                here = moved(factor, grad.device) if isinstance(factor, Tensor) else factor
                if before is None:
                    grad.mul_(here)
                else:
                    grad.sub_(before).mul_(here).add_(before)

    def adopt(self, r: int, new: list[Tensor]) -> None:
        """Makes ``new`` leaves of stage ``r`` known; call it before the backward of their graph.

        Raises RuntimeError if another worker adds to their gradients.
        """
        for leaf in new:
            # Nothing would read the gradient of a leaf that stands for another: refused, too.
            original = self._call.original_of.get(id(leaf), leaf)
            _, owner = self._owner.setdefault(id(original), (original, r))  # atomic
            if original is not leaf or self._worker_of[owner] != self._worker_of[r]:
                raise RuntimeError(self._shared_message(original, owner, r))
        self.register(new)
        self._call.release_to_caller(r, list(map(self.grad_before, new)))
        self.awaiting_grad[r] += _without_grad(new)
        self._known[r].update(map(id, new))

    def own_first_grads(self, r: int) -> None:
        """Copies first gradients that share memory with other tensors; call after a backward.

        In ``x + p.view(...)`` both gradients do, and the next micro-batch would add in place to the
        gradient of ``x``, which is on its way to another stage, or waits for its weight half.
        """
        fresh = self.awaiting_grad[r]
        for leaf in fresh:
            if type(leaf.grad) is Tensor and storage_users(leaf.grad) > 1:
                leaf.grad = leaf.grad.clone()
        rest = [leaf for leaf in fresh if leaf.grad is None]
        if len(rest) < len(fresh):
            self._call.release_to_caller(r, [leaf.grad for leaf in fresh])
            self.awaiting_grad[r] = rest

    def go_back(
        self, r: int, roots: Sequence[Any], grads: Sequence[Tensor], cell: Cell, *cuts: Any
    ) -> None:
        """Backward through a graph of a cell of stage ``r``, from ``roots`` to ``cuts``."""
        new = self.unknown_leaves(r, map(_node_of, roots), *(cuts or (cell.cut,)))
        if new:
            self.adopt(r, new)
        cell.run_backward(roots, grads)

    def pop_grads(self, r: int, leaves: Sequence[Tensor]) -> list[Tensor | None]:
        """Takes the gradients from leaves that are copies of others."""
        grads = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        return grads

    def add(self, r: int, leaves: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
        pairs = [(leaf, grad) for leaf, grad in zip(leaves, grads, strict=True) if grad is not None]
        if pairs:
            go_back([get_gradient_edge(leaf) for leaf, _ in pairs], [grad for _, grad in pairs])
            pairs.clear()
            self.own_first_grads(r)

    def others(self) -> list[Tensor]:
        """The leaves that are no parameters, stage by stage, in the order of their discovery."""
        known = {id(parameter) for parameters in self.parameters for parameter in parameters}
        owned = [each for each in self._owner.values() if id(each[0]) not in known]
        return [leaf for leaf, _ in sorted(owned, key=lambda each: each[1])]

    def _shared_message(self, leaf: Tensor, *users: int) -> str:
        pipeline, named = self._call.pipeline, []
        for r in sorted(users):
            stage = pipeline.stages[r]
            loss = " or loss_fn" if stage.j == pipeline.n - 1 else ""
            device = pipeline.workers[self._worker_of[r]].device
            named.append(f"stage {stage.j} ({stage.layer_range}{loss}, on {device})")
        return (
            f"{described(leaf)}, a tensor that requires grad, is used by {' and by '.join(named)}. "
            "Two workers would add to its gradient at the same time: choose a balance that puts "
            "both layers on one device, use loss_fn(pipe(x), target), or give each stage a tensor "
            "of its own"
        )


def _without_grad(leaves: Iterable[Tensor]) -> list[Tensor]:
    return [leaf for leaf in leaves if leaf.requires_grad and leaf.grad is None]


def _parameters_of(partition: nn.Module) -> list[Tensor]:
    every = chain(*[module._parameters.values() for module in modules_of(partition)])
    return list({id(p): p for p in every if p is not None}.values())
