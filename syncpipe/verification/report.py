"""What came out of a check, on a page."""

from __future__ import annotations

from dataclasses import dataclass, field
from textwrap import fill
from typing import Literal

from syncpipe.compare import Comparison

__all__ = ["COLUMNS", "Finding", "Report", "Run"]

#: What is compared.
COLUMNS = ("outputs", "loss", "gradients", "input_gradients", "buffers")
_WIDTH = 100


@dataclass
class Run:
    """One run, beside the one that it is compared with.

    Attributes:
        name: ``"pipe(x)"``; for ``train_batch`` the schedule; for the plain model
            ``"micro-batches"`` and ``"loss of each micro-batch"``.
        kind: of the ``"plain"`` model, or of the ``"pipe"``.
        beside: what it is compared with.
        outputs, loss, gradients, input_gradients, buffers: how they compare.
        error: what the run raised; empty if it ran.
        not_applicable: why there is nothing to run or to compare; empty if there is.
    """

    name: str
    kind: Literal["plain", "pipe"]
    beside: str
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
        return [column for column, c in self.comparisons.items() if c.status == "different"]

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
        where = f"first layer that differs: {self.where}" if self.where else ""
        lines = [where, f"likely reason: {self.reason}"]
        return "\n".join(
            [
                _filled(f"{', '.join(self.runs)}: {self.what}", "- "),
                *(_filled(line, "  ") for line in lines if line),
            ]
        )


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
        pipe = [run for run in self.runs if run.kind == "pipe" and not run.not_applicable]
        return bool(pipe) and all(run.ok for run in pipe)

    def __getitem__(self, name: str) -> Run:
        """The run of that name.

        Raises:
            KeyError: there is none.
        """
        for run in self.runs:
            if run.name == name:
                return run
        raise KeyError(f"{name!r}; the runs are {', '.join(repr(run.name) for run in self.runs)}")

    def __str__(self) -> str:
        names = max(len(run.name) for run in self.runs) + 4
        head = ["outputs", "loss", "gradients", "of input", "buffers"]
        lines = [_filled(self.header), "", " " * names + "".join(f"{h:<11}" for h in head).rstrip()]
        beside = ""
        for run in self.runs:
            if run.not_applicable:
                continue
            if run.beside != beside:
                lines.append(run.beside)
                beside = run.beside
            cells = [f"{c!s:<11}" for c in run.comparisons.values()]
            shown = "FAILED" if run.error else "".join(cells).rstrip()
            lines.append(f"  {run.name:<{names - 2}}{shown}")
        lines += ["", *(str(finding) for finding in self.findings)]
        lines += [_filled(note, "- ") for note in [*self.notes, *self._refused()]]
        return "\n".join([*lines, "", _filled(self._verdict())])

    def _refused(self) -> list[str]:
        """The runs that there were not, by reason."""
        names: dict[str, list[str]] = {}
        for run in self.runs:
            if run.not_applicable:
                reason = run.not_applicable.replace(run.name, "", 1).strip()
                names.setdefault(reason, []).append(run.name)
        return [f"not run: {', '.join(who)} ({reason})" for reason, who in names.items()]

    def _verdict(self) -> str:
        pipe = [run for run in self.runs if run.kind == "pipe"]
        if not any(not run.not_applicable for run in pipe):
            return "NOT OK: the pipe was not run, for the plain model fails on micro-batches."
        if not self.pipe_ok:
            return "NOT OK: the pipe does not compute what the plain model computes."
        far = max(c.distance for run in pipe for c in run.comparisons.values())
        bits = f"to rounding ({far:.0e} at most)" if far else "to the bit"
        same = f"the pipe computes what the plain model computes on micro-batches, {bits}"
        if not self.ok:
            return f"NOT OK: {same}; but micro-batches do not give what the mini-batch gives."
        return f"OK: {same}."


def _filled(text: str, first: str = "") -> str:
    return fill(text, _WIDTH, initial_indent=first, subsequent_indent="  " if first else "")
