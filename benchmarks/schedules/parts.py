"""What schedules reach: wall time beside the ideal, the simulation, and others.

    python -m benchmarks.schedules [--quick] [--only NAME ...] [--json FILE] [--markdown FILE]

Five parts: ``ideal`` (gpipe and 1f1b beside the ideal of two workers), ``zero_bubble`` (zb_h1
beside 1f1b), ``emulated`` (layers that sleep, wall time beside the simulated makespan),
``overhead`` (microseconds per micro-batch and stage of tiny layers) and ``distributed``
(torch.distributed.pipelining beside ours). In each of them everything is measured in every round,
in an order that changes from round to round, after it was seen to give the plain loop's gradients.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial

from benchmarks import common
from benchmarks.common import Part
from benchmarks.report import QUICK, Report, check, parser_of
from benchmarks.schedules import distributed, emulated, ideal, overhead, zero_bubble
from benchmarks.schedules.model import Options

PARTS: dict[str, Callable[[Options], Part]] = {
    "ideal": ideal.run,
    "zero_bubble": zero_bubble.run,
    "emulated": emulated.run,
    "overhead": overhead.run,
    "distributed": distributed.run,
}


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = parser_of("schedules", __doc__, PARTS, "9 or 21")
    args = parser.parse_args(argv)
    check(parser, args)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints the report, writes the files."""
    args = parsed(argv)
    try:
        import tqdm  # noqa: F401  # asked for now, needed later
    except ImportError as error:
        print(common.MISSING.format(error), file=sys.stderr)
        return 1
    command = "python -m benchmarks.schedules" + " --quick" * args.quick
    command += f" --repeats {args.repeats}" if args.repeats else ""
    options = Options(args.quick, args.repeats)
    jobs = {name: partial(PARTS[name], options) for name in args.only or PARTS}
    with common.one_thread():
        Report(
            "What schedules reach",
            command,
            [QUICK] * args.quick,
            json_file=args.json,
            markdown=args.markdown,
        ).run(jobs)
    return 0
