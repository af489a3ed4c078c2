"""All benchmarks by one door.

    python -m benchmarks [NAME ...] [--quick] [--folder DIR] [--json FILE] [--list]

A name is a group (``overhead``, ``memory``, ``schedules``, ``planning``, ``peers``,
``data_parallel``) or one part of it (``schedules.ideal``); without one all are run.
The report, Markdown with tables and pictures, is written to a folder. ``--quick`` takes small sizes
and few rounds, some minutes on two cores: to see that everything runs; the numbers say nothing.
Each group can be run by itself with more options, ``python -m benchmarks.schedules --help``.
What a machine with GPUs is for is ``python -m benchmarks gpu``, which has options of its own.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks import common, gpu
from benchmarks.common import Part
from benchmarks.data_parallel.parts import GROUP as DATA_PARALLEL
from benchmarks.group import Group, Options, missing_extra
from benchmarks.memory.parts import GROUP as MEMORY
from benchmarks.overhead import GROUP as OVERHEAD
from benchmarks.peers.measure import PeerOptions
from benchmarks.peers.parts import GROUP as PEERS
from benchmarks.planning.parts import GROUP as PLANNING
from benchmarks.planning.profiles import PlanningOptions
from benchmarks.report import QUICK, Job, Report
from benchmarks.schedules.parts import GROUP as SCHEDULES

GROUPS: tuple[tuple[Group, type[Options]], ...] = (
    (OVERHEAD, Options),
    (MEMORY, Options),
    (SCHEDULES, Options),
    (PLANNING, PlanningOptions),
    (PEERS, PeerOptions),
    (DATA_PARALLEL, Options),
)


def every(quick: bool) -> dict[str, Job]:
    """What there is to measure, by name."""
    return {
        name if name == group.name else f"{group.name}.{name}": job
        for group, options in GROUPS
        for name, job in group.jobs(options(quick)).items()
    }


def selected(names: Sequence[str], jobs: Mapping[str, Job]) -> dict[str, Job]:
    """The jobs of these names, groups included, in the order of all.

    Raises:
        ValueError: a name that is none.
    """
    groups = {name.split(".")[0] for name in jobs}
    unknown = [name for name in names if name not in jobs and name not in groups]
    if unknown:
        raise ValueError(f"there is no benchmark {unknown[0]!r}; --list shows what there is")
    if not names:
        return dict(jobs)
    return {k: job for k, job in jobs.items() if k in names or k.split(".")[0] in names}


def main(argv: Sequence[str] | None = None) -> int:
    """Measures what was asked for, and writes the report."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] == ["gpu"]:
        return gpu.main(argv[1:])
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="what to measure (all)")
    parser.add_argument("--quick", action="store_true", help="small sizes and few rounds")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("benchmark-report"),
        metavar="DIR",
        help="for the report and its pictures (%(default)s)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there as well")
    parser.add_argument("--list", action="store_true", help="print the names, and measure nothing")
    args = parser.parse_args(argv)
    jobs = every(args.quick)
    if args.list:
        print("\n".join(jobs))
        return 0
    try:
        chosen = selected(args.names, jobs)
    except ValueError as error:
        parser.error(str(error))
    if missing_extra("matplotlib"):
        return 1
    from tqdm import tqdm

    if args.json is not None and not args.json.parent.is_dir():
        parser.error(f"argument --json: there is no folder {args.json.parent}")
    args.folder.mkdir(parents=True, exist_ok=True)
    command = " ".join(["python -m benchmarks", *args.names, *["--quick"] * args.quick])
    report = Report(
        "Benchmarks",
        command,
        [QUICK] * args.quick,
        json_file=args.json,
        markdown=args.folder / "report.md",
        pictures=args.folder,
        versions={name: common.version(name) for name in ("torchgpipe", "fairscale")},
    )
    with tqdm(total=len(chosen), desc="benchmarks", disable=None, position=1) as bar:
        report.run({name: _counted(job, bar.update) for name, job in chosen.items()})
    print(f"The report is in {args.folder / 'report.md'}")
    return 0


def _counted(job: Job, update: Callable[[], object]) -> Job:
    def counted() -> Part | Sequence[Part]:
        made = job()
        update()
        return made

    return counted


if __name__ == "__main__":
    sys.exit(main())
