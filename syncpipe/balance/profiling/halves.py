"""What part of a backward is for parameters: the weight half of zero-bubble schedules.

The input half is a backward to the inputs alone, in which autograd leaves out the products for
parameters; both are measured in turn, and the quickest of each counts. A pipe puts off the products
of linear maps and convolutions only, so what other parameters take stays in its input half.
"""

from __future__ import annotations

from collections.abc import Callable

from syncpipe.balance.profiling.rounds import Between, Mark, Visit

__all__ = ["weight_share"]


def weight_share(
    visit: Visit, mark: Mark, between: Between, more: Callable[[int], bool]
) -> float | None:
    """Measures a layer.

    Args:
        visit: the layer and its inputs.
        mark: of a stopwatch.
        between: the same.
        more: whether there is time for another round, after so many.

    Returns:
        From 0 to 1; None if there was no time, or nothing to measure.
    """
    if not any(parameter.requires_grad for parameter in visit.layer.parameters()):
        return 0.0
    whole, inputs = float("inf"), float("inf")
    done = 0
    while more(done):
        whole = min(whole, _backward(visit, mark, between, weights=True))
        inputs = min(inputs, _backward(visit, mark, between, weights=False))
        done += 1
    return min(1.0, max(0.0, 1 - inputs / whole)) if done and whole > 0 else None


def _backward(visit: Visit, mark: Mark, between: Between, *, weights: bool) -> float:
    visit.forth(mark)
    visit.back(mark, weights=weights)
    visit.read(between)
    visit.forward.pop()
    return visit.backward.pop()
