"""All benchmarks by one door.

    python -m benchmarks [NAME ...] [--quick] [--repeats N] [--folder DIR] [--list]

A name is a group (``overhead``, ``memory``, ``schedules``, ``planning``, ``peers``,
``data_parallel``, ``one_call``, ``converted``, ``gpu``) or one part of it (``schedules.ideal``);
without one all are run. What there is nothing for here, such as a GPU, says so.
Each group has a page, Markdown, and beside it all samples as JSON. ``--quick`` takes small sizes
and few rounds, some minutes on two cores: to see that everything runs; the numbers say nothing.
``picture`` draws the pictures of the documentation.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path

from benchmarks import (
    converted,
    data_parallel,
    gpu,
    memory,
    one_call,
    overhead,
    peers,
    planning,
    schedules,
)
from benchmarks.common import Group, Options, Part, report
from syncpipe.commands.demo import threads
from syncpipe.commands.plan import whole_number
from syncpipe.schedules import Costs, Schedule, gpipe, naive, one_f_one_b, simulate
from syncpipe.timeline import Timeline, compare

MODULES = (
    overhead, memory, schedules, planning, peers, data_parallel, one_call, converted, gpu,
)  # fmt: skip
GROUPS: dict[str, Group] = {module.GROUP.name: module.GROUP for module in MODULES}
PICTURES = Path(__file__).parents[1] / "docs" / "pictures"


def selected(names: Sequence[str]) -> dict[str, list[str]]:
    """For each group that was asked for, its parts.

    Raises:
        ValueError: a name that is none.
    """
    chosen: dict[str, list[str]] = {}
    for name in names or GROUPS:
        group, _, part = name.partition(".")
        if group not in GROUPS or (part and part not in GROUPS[group].parts):
            raise ValueError(f"there is no benchmark {name!r}; --list shows what there is")
        parts = [part] if part else list(GROUPS[group].parts)
        chosen[group] = [*dict.fromkeys([*chosen.get(group, []), *parts])]
    return chosen


def pictures() -> dict[str, dict[str, Timeline]]:
    """The pictures of the documentation, by file name: simulated steps on four devices.

    A forward takes one unit of time, a backward two, and transfers none.
    """
    drawn: dict[str, dict[str, Schedule]] = {
        "pipe.svg": {
            "Not a pipe: one device works, three wait": naive(4, 4),
            "A pipe: each device begins with its first micro-batch": gpipe(4, 4),
        },
        "schedules.svg": {
            "GPipe: all forwards first, so all 16 micro-batches are in memory": gpipe(16, 4),
            "1F1B, the default: the same time, and at most 7 in memory": one_f_one_b(16, 4),
        },
    }
    costs = Costs.even(4)
    return {
        name: {title: Timeline.of(simulate(each, costs)) for title, each in schedules.items()}
        for name, schedules in drawn.items()
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measures what was asked for, and writes the pages."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", help="what to measure (all)")
    add("--quick", action="store_true", help="small sizes and few rounds")
    add("--repeats", type=whole_number(2), metavar="N", help="number of rounds")
    words = "for the pages (%(default)s)"
    add("--folder", type=Path, default=Path("benchmark-report"), metavar="DIR", help=words)
    add("--list", action="store_true", help="print the names, and measure nothing")
    args = parser.parse_args(argv)
    if args.names == ["picture"]:
        for name, timelines in pictures().items():
            compare(timelines).savefig(PICTURES / name, metadata={"Date": None})
        return 0
    try:
        chosen = selected(args.names)
    except ValueError as error:
        parser.error(str(error))
    if args.list:
        print("\n".join(f"{name}.{part}" for name, parts in chosen.items() for part in parts))
        return 0
    try:
        import tqdm  # noqa: F401
    except ImportError as error:
        print(
            f'benchmarks: {error}; they need tqdm: pip install "syncpipe[bench]"', file=sys.stderr
        )
        return 1
    args.folder.mkdir(parents=True, exist_ok=True)
    command = ["python -m benchmarks", *args.names, *["--quick"] * args.quick]
    command += [f"--repeats {args.repeats}"] if args.repeats else []
    options = Options(args.quick, args.repeats)
    if os.environ.get("SYNCPIPE_SIMULATED"):
        from tests import simulated

        simulated.load()
    for name, parts in chosen.items():
        group = GROUPS[name]
        jobs = {part: partial(_measured, group, part, options) for part in parts}
        page = args.folder / f"{name}.md"
        report(group.title, " ".join(command), options, jobs, page, group.versions)
    return 0


def _measured(group: Group, part: str, options: Options) -> Part | Sequence[Part]:
    with threads(1) if group.one_thread else nullcontext():
        return group.parts[part](options)


if __name__ == "__main__":  # processes of their own import this, too
    sys.exit(main())
