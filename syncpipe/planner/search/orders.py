"""``search_orders``: the search for devices that are not alike, which may stand in any order."""

from __future__ import annotations

from typing import Any

from syncpipe.balance.profile import Profile
from syncpipe.planner.costs.machine import Machine
from syncpipe.planner.search.search import Candidate, search

__all__ = ["search_orders"]


def search_orders(
    profile: Profile, machine: Machine, batch_size: int, **choice: Any
) -> tuple[tuple[int, ...], list[Candidate]]:
    """The order of the devices with the fastest plan, and what was found for it.

    Args:
        profile: what the layers cost.
        machine: the devices, of which :meth:`Machine.orders` are tried; one order if all are alike.
        batch_size: samples in a mini-batch.
        choice: as for :func:`.search`.

    Returns:
        The order, and the plans for ``machine.ordered(order)``; the order as given, and none, if
        nothing fits.
    """
    best: tuple[tuple[int, ...], list[Candidate]] = (tuple(range(len(machine))), [])
    for order in machine.orders():
        found = search(profile, machine.ordered(order), batch_size, **choice)
        if found and (not best[1] or found[0].time < best[1][0].time * (1 - 1e-9)):
            best = order, found
    return best
