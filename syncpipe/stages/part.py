"""What takes part in a call beside its stages."""

from __future__ import annotations

from syncpipe.runtime.engine import Run
from syncpipe.schedules.schedule import Kind
from syncpipe.schedules.steps import Steps


class Part:
    """Takes part in one call; every method does nothing here."""

    def begin(self, steps: Steps) -> None:
        """Before a program runs, the forward half or the backward half of a call."""

    def around(self, kind: Kind, r: int, run: Run) -> Run:
        """Wraps the function that runs one kind of action on a stage."""
        return run

    def end(self) -> None:
        """After a program, also if it raised."""

    def finish(self) -> None:
        """After the first program, if it raised nothing."""
