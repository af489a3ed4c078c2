"""The one walk over an autograd graph: from where it ends back to its leaves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

__all__ = ["AccumulateGrad", "nodes_of"]

_C: Any = torch._C
#: The node that adds to the ``.grad`` of a leaf, its ``variable``; one for all graphs of that leaf.
AccumulateGrad: type[Any] = _C._functions.AccumulateGrad


def nodes_of(ends: Iterable[Any], begins: Iterable[Any] = ()) -> list[Any]:
    """All nodes of a graph, each once.

    Args:
        ends: the nodes of its results; None stands for a result without a graph.
        begins: nodes where it begins: neither these nor what is behind them.
    """
    seen = {None, *begins}
    nodes = [node for node in dict.fromkeys(ends) if node not in seen]
    seen.update(nodes)
    for node in nodes:  # which grows
        for following, _ in node.next_functions:
            if following not in seen:
                seen.add(following)
                nodes.append(following)
    return nodes
