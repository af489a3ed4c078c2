"""A timeline that is recorded while a pipe runs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch

from syncpipe.runtime.recorder import Moment, Record, Recorder
from syncpipe.timeline.timeline import Span, Timeline

__all__ = ["Trace"]


class Trace(Timeline):
    """A timeline of all calls of a pipe inside the ``with`` block, made by ``Pipe.trace()``.

    Reading the times of an accelerator waits for the device, recording them does not. ``attach`` is
    called with the trace when the block begins, and with None when it ends.
    """

    def __init__(
        self, rows: Sequence[str], attach: Callable[[Trace | None], None], title: str = ""
    ) -> None:
        super().__init__([], rows, "s", title)
        self._attach, self._entered = attach, False
        self._records: list[Record] = []
        self._origins: dict[torch.device, Moment] = {}
        self._steps = itertools.count()

    def __enter__(self) -> Trace:
        self._attach(self)
        self._entered = True
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._attach(None)

    def recorder(self) -> Recorder:
        """The recorder of the next call."""
        return Recorder(self._records, self._origins, next(self._steps))

    def table(self) -> str:
        """As :meth:`Timeline.table`; explains an empty trace."""
        if self.spans:
            return super().table()
        return "nothing ran: a trace shows the calls of its own pipe within its block"

    @property
    def spans(self) -> tuple[Span, ...]:
        """All spans so far in the order of their starts; times are in seconds."""
        if not self._entered:
            raise RuntimeError("a trace records inside its block, `with pipe.trace() as trace:`")
        found = [
            (record, record.start.seconds, record.end.seconds)
            for record in list(self._records)
            if record.start is not None and record.end is not None
        ]
        begin = min((start for _, start, _ in found), default=0.0)
        spans = [
            Span(r.kind, r.i, r.j, r.row, start - begin, max(start, end) - begin, r.target, r.step,
                 r.backward, r.host)
            for r, start, end in found
        ]  # fmt: skip
        return tuple(sorted(spans, key=lambda span: span.start))
