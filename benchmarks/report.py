"""Runs the parts of a benchmark one after another, and tells what they measured."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.common import Part

__all__ = ["QUICK", "Job", "Report"]

#: A remark for what was measured with too little of everything.
QUICK = "Quick: small sizes and few rounds. These numbers say nothing."

#: What measures something, when it is called.
Job = Callable[[], Part | Sequence[Part]]


@dataclass
class Report:
    """A report on its way to the terminal and into files.

    Attributes:
        title: stands above it.
        command: what wrote it.
        remarks: stand below the title.
        json_file: gets everything, samples included.
        markdown: gets the report.
        pictures: a folder that gets a picture of each table with ratios, shown in the report.
        versions: of other libraries, by name; None for what is not installed.
    """

    title: str
    command: str
    remarks: Sequence[str] = ()
    json_file: Path | None = None
    markdown: Path | None = None
    pictures: Path | None = None
    versions: Mapping[str, str | None] | None = None

    def run(self, jobs: Mapping[str, Job]) -> None:
        """Measures one part after another; writes the files after each, so that nothing is lost."""
        versions = dict(self.versions or {})
        about = {**common.machine(), "command": self.command, **versions}
        head = common.head(about)
        head += "".join(
            f", {name} {version or 'not installed'}" for name, version in versions.items()
        )
        first = f"# {self.title}\n\nWritten by `{self.command}`.\n\n```text\n{head}\n```\n"
        first += "".join(f"\n{remark}\n" for remark in self.remarks)
        print(first, flush=True)
        sections, parts = [first], {}
        for name, job in jobs.items():
            start = time.monotonic()
            made = job()
            seconds = round(time.monotonic() - start, 1)
            tables = [made] if isinstance(made, Part) else list(made)
            whole: dict[str, Any] = {"tables": [table.as_json() for table in tables]}
            parts[name] = {
                **(made.as_json() if isinstance(made, Part) else whole),
                "seconds": seconds,
            }
            texts = [self._section(name, k, table) for k, table in enumerate(tables)]
            sections += texts
            print("\n".join([*texts, f"({name} took {seconds:.0f} s)\n"]), flush=True)
            if self.json_file is not None:
                text = json.dumps({"about": about, "parts": parts}, indent=2)
                self.json_file.write_text(text + "\n", encoding="utf-8")
            if self.markdown is not None:
                self.markdown.write_text("\n".join(sections), encoding="utf-8")

    def _section(self, name: str, k: int, table: Part) -> str:
        text = table.as_markdown()
        if self.pictures is None:
            return text
        from benchmarks import pictures

        file = pictures.save(table, self.pictures, name if k == 0 else f"{name}-{k + 1}")
        return text if file is None else f"{text}\n![{table.title}]({file})\n"
