"""Where stages are on devices, for tests of schedules that want them somewhere."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

__all__ = ["LAYOUTS", "LOOPED", "V_SHAPED", "in_a_v", "rounds"]


def rounds(devices: int, each: int) -> tuple[int, ...]:
    """Stages that go round the devices."""
    return tuple(range(devices)) * each


def in_a_v(devices: int) -> tuple[int, ...]:
    """Stages that go there and back."""
    return *range(devices), *reversed(range(devices))


LOOPED = ["looped_bfs", "interleaved_1f1b", "interleaved_zero_bubble"]
V_SHAPED = ["zbv", "v_half", "v_min", "dualpipev"]

#: For some number of devices the stages as each of these schedules wants them.
LAYOUTS: dict[str, Callable[[int], tuple[int, ...]]] = {
    **dict.fromkeys(LOOPED, partial(rounds, each=2)),
    **dict.fromkeys(V_SHAPED, in_a_v),
}
