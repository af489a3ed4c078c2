"""The autograd graph: the only code that walks it, and the only calls that run it backward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

_C: Any = torch._C
#: The node that adds to the ``.grad`` of a leaf, its ``variable``; all graphs of a leaf share it.
AccumulateGrad: type[Any] = _C._functions.AccumulateGrad


def nodes_of(ends: Iterable[Any], begins: Iterable[Any] = ()) -> list[Any]:
    """All nodes of a graph, each once, from its ``ends`` back to ``begins``, without these."""
    seen = {None, *begins}  # None: a result without a graph
    nodes: list[Any] = []
    for node in ends:
        if node not in seen:
            seen.add(node)
            nodes.append(node)
    for node in nodes:  # the list grows during the loop
        for following, _ in node.next_functions:
            if following not in seen:
                seen.add(following)
                nodes.append(following)
    return nodes


# ``torch.autograd.backward`` checks its arguments for a third of the time of a small cell.
# Arguments: roots, gradients, keep_graph, create_graph, leaves, allow_unreachable, accumulate_grad.
_run_backward = torch.autograd.Variable._execution_engine.run_backward


def go_back(
    roots: Sequence[Any], grads: Sequence[Any], inputs: Sequence[Any] = (), *, keep: bool = False
) -> None:
    """Runs a graph backward from tensors or ``GradientEdge``s and accumulates the gradients of its
    leaves: of ``inputs``, or of all; ``keep`` retains the graph."""
    _run_backward(tuple(roots), tuple(grads), keep, False, tuple(inputs), True, True)


def captured_grads(
    roots: Sequence[Any], grads: Sequence[Any], leaves: Sequence[Tensor], *, keep: bool
) -> Sequence[Tensor | None]:
    """As :func:`go_back`, but returns the gradients of leaves instead of accumulating them."""
    found: Sequence[Tensor | None] = _run_backward(
        tuple(roots), tuple(grads), keep, False, tuple(leaves), True, False
    )
    return found
