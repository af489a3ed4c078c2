"""What came out of a check, on a page."""

from __future__ import annotations

from dataclasses import dataclass, field
from textwrap import fill

from syncpipe.compare import Comparison

__all__ = ["COLUMNS", "Finding", "Report", "Run"]

#: What is compared, and how the page calls it.
COLUMNS = {
    "outputs": "outputs",
    "loss": "loss",
    "gradients": "gradients",
    "input_gradients": "of input",
    "buffers": "buffers",
}


@dataclass
class Run:
    """One run, beside the one that it is compared with.

    Attributes:
        name: ``"pipe(x)"``; for ``train_batch`` the schedule; for the plain model
            ``"micro-batches"`` and ``"loss of each micro-batch"``.
        beside: what it is compared with.
        kind: of the ``"plain"`` model, or of the ``"pipe"``.
        outputs, loss, gradients, input_gradients, buffers: how they compare.
        error: what the run raised; empty if it ran.
        not_applicable: why there is nothing to run or to compare; empty if there is.
    """

    name: str
    beside: str
    kind: str
    outputs: Comparison = field(default_factory=Comparison)
    loss: Comparison = field(default_factory=Comparison)
    gradients: Comparison = field(default_factory=Comparison)
    input_gradients: Comparison = field(default_factory=Comparison)
    buffers: Comparison = field(default_factory=Comparison)
    error: str = ""
    not_applicable: str = ""

    @property
    def comparisons(self) -> dict[str, Comparison]:
        """By what was compared."""
        return {column: getattr(self, column) for column in COLUMNS}

    @property
    def different(self) -> list[str]:
        """What is different."""
        return [column for column, found in self.comparisons.items() if not found.same]

    @property
    def exact(self) -> bool:
        """Whether all that was compared is equal to the bit."""
        return self.ok and all(c.status in ("equal", "none") for c in self.comparisons.values())

    @property
    def ok(self) -> bool:
        """Whether it ran, and nothing is different; or whether there was nothing to run."""
        return not self.error and not self.different


@dataclass
class Finding:
    """Something that is different, and why, as far as that can be told.

    Attributes:
        runs: the names of the runs in which it was seen.
        what: what is different.
        where: the first layer that differs; empty if none was found.
        reason: the likely reason, and what to do.
    """

    runs: list[str]
    what: str
    where: str
    reason: str

    def __str__(self) -> str:
        lines = [_filled(f"{', '.join(self.runs)}: {self.what}", "- ")]
        if self.where:
            lines.append(_filled(f"first layer that differs: {self.where}", "  "))
        return "\n".join([*lines, _filled(f"likely reason: {self.reason}", "  ")])


@dataclass
class Report:
    """What :func:`syncpipe.verify` found. Printed, it is a page.

    Attributes:
        header: what was checked.
        runs: of the plain model and of the pipe, each beside what it should equal.
        findings: what is different, the first layer, the likely reason.
        notes: what else there is to know, such as what could not be compared.
    """

    header: str
    runs: list[Run] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing is different: neither in the pipe, nor by cutting the mini-batch."""
        return all(run.ok for run in self.runs)

    @property
    def pipe_ok(self) -> bool:
        """Whether the pipe computes what the plain model computes on the same micro-batches."""
        return bool(self._of_pipe()) and all(run.ok for run in self._of_pipe())

    def __getitem__(self, name: str) -> Run:
        """The run of that name.

        Raises:
            KeyError: there is none.
        """
        named = {run.name: run for run in self.runs}
        if name not in named:
            raise KeyError(f"{name!r}; the runs are {', '.join(map(repr, named))}")
        return named[name]

    def __str__(self) -> str:
        width = max(len(run.name) for run in self.runs) + 4
        head = " " * width + "".join(f"{shown:<11}" for shown in COLUMNS.values())
        lines, beside = [_filled(self.header), "", head.rstrip()], ""
        for run in self.runs:
            if run.not_applicable:
                continue
            if run.beside != beside:
                lines.append(beside := run.beside)
            cells = "".join(f"{c!s:<11}" for c in run.comparisons.values())
            lines.append(f"  {run.name:<{width - 2}}{'FAILED' if run.error else cells}".rstrip())
        refused: dict[str, list[str]] = {}
        for run in self.runs:
            if run.not_applicable:
                reason = run.not_applicable.replace(run.name, "", 1).strip()
                refused.setdefault(reason, []).append(run.name)
        notes = [*self.notes, *(f"not run: {', '.join(n)} ({why})" for why, n in refused.items())]
        lines += ["", *map(str, self.findings), *(_filled(note, "- ") for note in notes)]
        return "\n".join([*lines, "", _filled(self._verdict())])

    def _of_pipe(self) -> list[Run]:
        return [run for run in self.runs if run.kind == "pipe" and not run.not_applicable]

    def _verdict(self) -> str:
        if not self._of_pipe():
            return "NOT OK: the pipe was not run, for the plain model fails on micro-batches."
        if not self.pipe_ok:
            return "NOT OK: the pipe does not compute what the plain model computes."
        far = max(c.distance for run in self._of_pipe() for c in run.comparisons.values())
        bits = f"to rounding ({far:.0e} at most)" if far else "to the bit"
        same = f"the pipe computes what the plain model computes on micro-batches, {bits}"
        if not self.ok:
            return f"NOT OK: {same}; but micro-batches do not give what the mini-batch gives."
        return f"OK: {same}."


def _filled(text: str, first: str = "") -> str:
    return fill(text, 100, initial_indent=first, subsequent_indent="  " if first else "")
