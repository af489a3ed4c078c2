"""The report of ``verify``."""

from __future__ import annotations

from dataclasses import dataclass, field
from textwrap import fill

from syncpipe.compare import Comparison

__all__ = ["COLUMNS", "Report", "Run"]

COLUMNS = ("outputs", "loss", "gradients", "input_gradients", "buffers")


@dataclass
class Run:
    """One run, compared with another.

    Attributes:
        name: ``"pipe(x)"``, the schedule of ``train_batch``, or for the plain model
            ``"micro-batches"`` or ``"loss of each micro-batch"``.
        beside: the two runs that are compared, for the page.
        error: the exception that it raised.
        not_applicable: why it did not run or was not compared.
        what: the difference, if any; ``where``: the first layer that differs; ``reason``: the
            likely reason.
    """

    name: str
    beside: str
    of_pipe: bool
    comparisons: dict[str, Comparison] = field(
        default_factory=lambda: dict.fromkeys(COLUMNS, Comparison())
    )
    error: str = ""
    not_applicable: str = ""
    what: str = ""
    where: str = ""
    reason: str = ""

    @property
    def different(self) -> list[str]:
        return [column for column, found in self.comparisons.items() if not found.same]

    @property
    def ok(self) -> bool:
        """Whether it raised nothing and nothing differs."""
        return not self.error and not self.different


@dataclass
class Report:
    """The result of :func:`syncpipe.verify`; ``print`` shows it as a page.

    Attributes:
        header: what was checked.
        runs: the runs of the plain model and of the pipe, with their comparisons.
        notes: other facts.
        uncompared: layers that were not compared on the mini-batch and on its micro-batches, for
            they draw random numbers.
    """

    header: str
    runs: list[Run] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    uncompared: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether neither the pipe nor cutting the mini-batch changes any result."""
        return all(run.ok for run in self.runs)

    @property
    def pipe_ok(self) -> bool:
        """Whether the pipe computes what the plain model computes on the same micro-batches."""
        return bool(self._pipe_runs()) and all(run.ok for run in self._pipe_runs())

    def __getitem__(self, name: str) -> Run:
        return {run.name: run for run in self.runs}[name]

    def __str__(self) -> str:
        width = max(len(run.name) for run in self.runs) + 4
        shown = [column.replace("input_gradients", "of input") for column in COLUMNS]
        head = " " * width + "".join(f"{column:<11}" for column in shown)
        lines, beside = [_filled(self.header), "", head.rstrip()], ""
        for run in [run for run in self.runs if not run.not_applicable]:
            if run.beside != beside:
                lines.append(beside := run.beside)
            cells = "".join(f"{c!s:<11}" for c in run.comparisons.values())
            lines.append(f"  {run.name:<{width - 2}}{'FAILED' if run.error else cells}".rstrip())
        alike: dict[tuple[str, ...], list[Run]] = {}
        for run in [run for run in self.runs if run.what]:
            key = "" if run.of_pipe else run.name, run.where, run.reason, run.error
            alike.setdefault(key, []).append(run)
        refused: dict[str, list[str]] = {}
        for run in [run for run in self.runs if run.not_applicable]:
            reason = run.not_applicable.replace(run.name, "", 1).strip()
            refused.setdefault(reason, []).append(run.name)
        notes = [*self.notes, *(f"not run: {', '.join(n)} ({why})" for why, n in refused.items())]
        lines += ["", *map(_finding, alike.values()), *(_filled(note, "- ") for note in notes)]
        return "\n".join([*lines, "", _filled(self._verdict())])

    def _pipe_runs(self) -> list[Run]:
        return [run for run in self.runs if run.of_pipe and not run.not_applicable]

    def _verdict(self) -> str:
        if not self._pipe_runs():
            return "NOT OK: the pipe was not run, for the plain model fails on micro-batches."
        if not self.pipe_ok:
            return "NOT OK: the pipe does not compute what the plain model computes."
        far = max(c.distance for run in self._pipe_runs() for c in run.comparisons.values())
        bits = f"to rounding ({far:.0e} at most)" if far else "to the bit"
        same = f"the pipe computes what the plain model computes on micro-batches, {bits}"
        if not self.ok:
            return f"NOT OK: {same}; but micro-batches do not give what the mini-batch gives."
        if self.uncompared:
            layers = ", ".join(self.uncompared)
            return (
                f"OK: {same}. Not known: whether micro-batches give what the mini-batch gives in "
                f"{layers}, which draws random numbers: run verify again where it draws none."
            )
        return f"OK: {same}."


def _finding(runs: list[Run]) -> str:
    """The lines for runs with the same difference."""
    names, first = ", ".join(run.name for run in runs), runs[0]
    lines = [_filled(f"{names}: {first.what}", "- ")]
    if first.where:
        lines.append(_filled(f"first layer that differs: {first.where}", "  "))
    return "\n".join([*lines, _filled(f"likely reason: {first.reason}", "  ")])


def _filled(text: str, first: str = "") -> str:
    rest = "  " if first else ""
    return fill(text, 100, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)
