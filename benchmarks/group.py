"""A group of measurements: its options, its command ``python -m benchmarks.NAME``, its report."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.common import Part
from benchmarks.report import QUICK, Job, Report
from syncpipe.commands.demo import threads

__all__ = ["Group", "Options", "missing_extra"]


@dataclass(frozen=True)
class Options:
    """What was asked for on the command line.

    Attributes:
        quick: small sizes, to see that it runs.
        repeats: number of rounds, where it was given.
    """

    quick: bool = False
    repeats: int | None = None

    def rounds(self, full: int) -> int:
        """How many rounds to measure."""
        return self.repeats or (2 if self.quick else full)


@dataclass(frozen=True)
class Group:
    """Parts that are measured one after another.

    Attributes:
        name: of the folder.
        title: stands above the report.
        doc: what the group says about itself, for ``--help``.
        parts: what there is to measure, by name.
        options: from the parsed arguments to the options of the parts.
        rounds: how many there are by default, in words; empty if there are none.
        arguments: adds the group's own ones.
        check: refuses values of these that cannot be.
        remarks: stand below the title.
        versions: libraries whose versions the report names.
        one_thread: whether everything runs on one intra-op thread.
    """

    name: str
    title: str
    doc: str | None
    parts: Mapping[str, Callable[[Any], Part | Sequence[Part]]]
    options: Callable[[argparse.Namespace], Options] = lambda args: Options(
        args.quick, args.repeats
    )
    rounds: str = ""
    arguments: Callable[[argparse.ArgumentParser], None] = lambda parser: None
    check: Callable[[argparse.ArgumentParser, argparse.Namespace], None] = lambda parser, args: None
    remarks: Sequence[str] = ()
    versions: Sequence[str] = ()
    one_thread: bool = True

    def jobs(self, options: Options, only: Iterable[str] | None = None) -> dict[str, Job]:
        """The parts, bound to their options."""
        return {name: partial(self._measured, name, options) for name in only or self.parts}

    def _measured(self, name: str, options: Options) -> Part | Sequence[Part]:
        with threads(1) if self.one_thread else nullcontext():
            return self.parts[name](options)

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Measures, prints the report, writes the files."""
        parser = self._parser()
        args = parser.parse_args(argv)
        self._check(parser, args)
        if missing_extra():
            return 1
        try:
            options = self.options(args)
        except (OSError, ValueError) as error:
            print(f"benchmarks: --profiles: {error}", file=sys.stderr)
            return 1
        report = Report(
            self.title,
            _command(self.name, parser, args),
            [*self.remarks, *[QUICK] * args.quick],
            json_file=args.json,
            markdown=args.markdown,
            versions={library: common.version(library) for library in self.versions},
        )
        with threads(1) if self.one_thread else nullcontext():
            report.run(self.jobs(options, args.only))
        return 0

    def _parser(self) -> argparse.ArgumentParser:
        parser = argparse.ArgumentParser(
            prog=f"python -m benchmarks.{self.name}",
            description=self.doc,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        add = parser.add_argument
        add("--quick", action="store_true", help="small sizes: to see that it runs, not to measure")
        names = ", ".join(self.parts)
        only = list(self.parts)
        add("--only", nargs="+", choices=only, metavar="NAME", help=f"some of {names}")
        if self.rounds:
            text = f"number of rounds, at least 2 ({self.rounds})"
            add("--repeats", type=int, metavar="N", help=text)
        self.arguments(parser)
        add("--json", type=Path, metavar="FILE", help="write everything there as well")
        add("--markdown", type=Path, metavar="FILE", help="write the report there")
        return parser

    def _check(self, parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
        if getattr(args, "repeats", None) is not None and args.repeats < 2:
            parser.error(f"argument --repeats: must be at least 2, not {args.repeats}")
        for name in ("json", "markdown"):
            path = getattr(args, name)
            if path is not None and not path.parent.is_dir():
                parser.error(f"argument --{name}: there is no folder {path.parent}")
        self.check(parser, args)


def missing_extra(*modules: str) -> bool:
    """Whether something is not installed that will be needed; says so, before anything runs."""
    try:
        for module in ("tqdm", *modules):
            __import__(module)
    except ImportError as error:
        print(common.MISSING.format(error), file=sys.stderr)
        return True
    return False


def _command(name: str, parser: argparse.ArgumentParser, args: argparse.Namespace) -> str:
    """The command again, without the files that it writes.

    Of files that it reads it has the names only: where they lie is nobody's business.
    """
    words = [f"python -m benchmarks.{name}"]
    for option, value in vars(args).items():
        if option in ("json", "markdown") or value == parser.get_default(option):
            continue
        words.append(f"--{option.replace('_', '-')}")
        values = value if isinstance(value, list) else [] if value is True else [value]
        words += [each.name if isinstance(each, Path) else str(each) for each in values]
    return " ".join(words)
