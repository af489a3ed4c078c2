"""Planning: how long it takes, how good cuts and plans are, and whether predictions come true.

    python -m benchmarks.planning [--quick] [--only NAME ...] [--repeats N]
        [--profiles FILE ... [--profile-samples N ...]] [--json FILE] [--markdown FILE]

Three parts: ``time`` (of planning, and of cutting), ``quality`` (cuts beside the best ones, plans
beside what else one could do; all predicted) and ``predicted`` (predicted beside measured step
times of pipes on CPU workers, and of layers that sleep).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from benchmarks import common
from benchmarks.common import Part
from benchmarks.planning import predicted as planning_predicted
from benchmarks.planning import quality as planning_quality
from benchmarks.planning import time as planning_time
from benchmarks.planning.profiles import PlanningOptions
from benchmarks.report import QUICK, Report, check, parser_of

PARTS: dict[str, Callable[[PlanningOptions], list[Part]]] = {
    "time": planning_time.run,
    "quality": planning_quality.run,
    "predicted": planning_predicted.run,
}


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = parser_of("planning", __doc__, PARTS, "5 or 9")
    parser.add_argument(
        "--profiles",
        nargs="+",
        type=Path,
        metavar="FILE",
        default=[],
        help="profiles to cut and plan, saved by syncpipe or lists (quality)",
    )
    parser.add_argument(
        "--profile-samples",
        nargs="+",
        type=int,
        metavar="N",
        help="how many samples the lists were measured with: one number, or one for each file; "
        "without it their numbers are those of the whole mini-batch",
    )
    args = parser.parse_args(argv)
    check(parser, args)
    samples = args.profile_samples or [None]
    files = len(args.profiles)
    if len(samples) not in (1, files):
        parser.error(
            f"argument --profile-samples: {len(samples)} numbers for {files} profiles; give one "
            "for all of them or one for each"
        )
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints the report, writes the files."""
    args = parsed(argv)
    try:
        import tqdm  # noqa: F401  # asked for now, needed later
    except ImportError as error:
        print(common.MISSING.format(error), file=sys.stderr)
        return 1
    samples = tuple(args.profile_samples or [None])
    if len(samples) == 1:
        samples *= len(args.profiles)
    options = PlanningOptions(args.quick, args.repeats, tuple(args.profiles), samples)
    try:
        options.loaded()
    except (OSError, ValueError) as error:
        print(f"benchmarks: --profiles: {error}", file=sys.stderr)
        return 1
    jobs = {name: partial(PARTS[name], options) for name in args.only or PARTS}
    with common.one_thread():
        Report(
            "What planning takes, and what plans are worth",
            _command(args),
            [QUICK] * args.quick,
            json_file=args.json,
            markdown=args.markdown,
            versions={"torchgpipe": common.version("torchgpipe")},
        ).run(jobs)
    return 0


def _command(args: argparse.Namespace) -> str:
    command = "python -m benchmarks.planning" + " --quick" * args.quick
    command += f" --only {' '.join(args.only)}" if args.only else ""
    command += f" --repeats {args.repeats}" if args.repeats else ""
    if args.profiles:
        # Names only: where the files lie is nobody's business.
        command += f" --profiles {' '.join(path.name for path in args.profiles)}"
        if args.profile_samples:
            command += f" --profile-samples {' '.join(map(str, args.profile_samples))}"
    return command
