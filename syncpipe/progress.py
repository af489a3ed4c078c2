"""Progress bars for what takes long: to convert, to measure, to plan, to fill layers."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import Any

__all__ = ["NO_BAR", "progress_bar"]


class _NoBar:
    def update(self) -> None:
        """Shows nothing."""


NO_BAR = _NoBar()


def progress_bar(
    what: str, unit: str, total: int | None = None, *, delay: float = 2.0, shown: bool | None = None
) -> AbstractContextManager[Any]:
    """A tqdm bar that ``update()`` moves on by one ``unit``.

    Args:
        what: the name of the work.
        total: the number of units, if it is known.
        delay: seconds before a bar appears.
        shown: whether there is a bar, at once; None for one in a terminal, if tqdm is installed.

    Raises:
        ImportError: ``shown`` is True, and tqdm is missing.
    """
    if not (find_spec("tqdm") if shown is None else shown):
        return nullcontext(NO_BAR)
    from tqdm import tqdm

    options = {} if shown else {"disable": None, "delay": delay}
    bar: AbstractContextManager[Any] = tqdm(
        desc=what, unit=unit, total=total, leave=False, **options
    )
    return bar
