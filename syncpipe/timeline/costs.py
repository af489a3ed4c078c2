"""What stages cost, by the spans of training steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import median

from syncpipe.schedules.simulation import Costs
from syncpipe.timeline.span import Span

__all__ = ["costs_of", "rematerialized_in"]


def costs_of(spans: Sequence[Span]) -> Costs:
    """The median over micro-batches and steps of everything that a stage does.

    A backward that was whole stands as its input half, with nothing left for the weight half. A
    stage with halves costs what these take. A way that goes both ways takes as long as the slower
    one.

    Raises:
        ValueError: on a stage that has no forward or no backward.
    """
    times: dict[tuple[str, int], list[float]] = defaultdict(list)
    ways: dict[tuple[int, int, int, int, bool], float] = defaultdict(float)
    for span in spans:
        if span.target is None:
            times[span.kind, span.j].append(span.duration)
        else:  # a stage may send several things to another
            ways[span.step, span.i, span.j, span.target, span.backward] += span.duration
    n = 1 + max((j for _, j in times), default=-1)
    took = {key: median(samples) for key, samples in times.items()}
    if n == 0 or any(("forward", j) not in took for j in range(n)):
        raise ValueError("costs are of steps of train_batch, and no step has been recorded")
    inputs = [took.get(("backward_input", j), took.get(("backward", j))) for j in range(n)]
    for j, time in enumerate(inputs):
        if time is None:
            raise ValueError(f"no backward of stage {j} has been recorded: trace train_batch")
    links: dict[tuple[int, int], dict[bool, list[float]]] = defaultdict(lambda: defaultdict(list))
    for (_, _, j, target, backward), time in ways.items():
        links[min(j, target), max(j, target)][backward].append(time)
    slower = {link: max(map(median, sides.values())) for link, sides in links.items()}
    return Costs(
        forward=tuple(took["forward", j] for j in range(n)),
        backward_input=tuple(time for time in inputs if time is not None),
        backward_weight=tuple(took.get(("backward_weight", j), 0.0) for j in range(n)),
        transfer=tuple(slower.pop((j, j + 1), 0.0) for j in range(n - 1)),
        skips=slower,
        recompute=tuple(took.get(("recompute", j), took["forward", j]) for j in range(n)),
    )


def rematerialized_in(spans: Iterable[Span]) -> tuple[int, ...]:
    """For each stage how many micro-batches of a step were recomputed."""
    cells: dict[int, set[int]] = defaultdict(set)
    for span in spans:
        cells[span.j] |= {span.i} if span.kind == "recompute" else set()
    return tuple(len(cells[j]) for j in range(1 + max(cells, default=-1)))
