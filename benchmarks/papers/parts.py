"""The tables of the papers, ours beside the published figures.

    python -m benchmarks.papers [--quick] [--only NAME ...]
        [--profiles FILE ... [--profile-samples N]] [--json FILE] [--markdown FILE]

Memory is counted on fake tensors, by running the real stages: ``gpipe_amoebanet`` and
``gpipe_transformer`` (GPipe's Table 1), ``torchgpipe_unet``,
``torchgpipe_amoebanet``.
Speed is simulated on times of layers that are measured here, or come from ``--profiles``:
``gpipe_speed`` (GPipe's Table 2 and torchgpipe's), ``resnet_speed``, ``unet_speed``; and
``pipedream`` computes the configurations of PipeDream's Table 1. Each column says what it is.

A profile is a file that ``Profile.save`` wrote, or a list, named after its model: amoebanetd.json,
resnet101.json, unet.json, vgg16.json, inception_v3.json.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from benchmarks import common
from benchmarks.common import Part
from benchmarks.papers import memory_tables as paper_memory_tables
from benchmarks.papers import pipedream as paper_pipedream
from benchmarks.papers import speed as paper_speed
from benchmarks.papers.costs import SUBJECTS, PaperOptions
from benchmarks.report import Report, check, parser_of

#: What the columns are.
COLUMNS = (
    "Published: by the papers' authors, on their machines. Counted: on tensors without values, by "
    "running the real stages. Measured: here. Simulated, computed: from what was measured."
)

PARTS: dict[str, Callable[[PaperOptions], Part]] = {
    "gpipe_amoebanet": paper_memory_tables.gpipe_amoebanet,
    "gpipe_transformer": paper_memory_tables.gpipe_transformer,
    "torchgpipe_unet": paper_memory_tables.torchgpipe_unet,
    "torchgpipe_amoebanet": paper_memory_tables.torchgpipe_amoebanet,
    "gpipe_speed": paper_speed.table_2,
    "resnet_speed": paper_speed.torchgpipe_resnet,
    "unet_speed": paper_speed.torchgpipe_unet,
    "pipedream": paper_pipedream.run,
}


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = parser_of("paper_tables", __doc__, PARTS, "")
    parser.add_argument(
        "--profiles",
        nargs="+",
        type=Path,
        metavar="FILE",
        default=[],
        help="profiles named after their models, in place of measuring",
    )
    parser.add_argument(
        "--profile-samples",
        type=int,
        metavar="N",
        help="how many samples the lists among them were measured with, if known",
    )
    args = parser.parse_args(argv)
    check(parser, args)
    names = {*SUBJECTS, *paper_pipedream.TABLE_1}
    for path in args.profiles:
        if path.stem not in names:
            parser.error(
                f"argument --profiles: {path.name} is named after none of the models "
                f"{', '.join(sorted(names))}"
            )
    if args.profile_samples is not None and args.profile_samples < 1:
        parser.error(f"argument --profile-samples: must be at least 1, not {args.profile_samples}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Makes the tables, prints the report, writes the files."""
    args = parsed(argv)
    try:
        import tqdm  # noqa: F401  # asked for now, needed later
    except ImportError as error:
        print(common.MISSING.format(error), file=sys.stderr)
        return 1
    options = PaperOptions(
        args.quick, profiles=tuple(args.profiles), profile_samples=args.profile_samples
    )
    try:
        options.loaded()
    except (OSError, ValueError) as error:
        print(f"benchmarks: --profiles: {error}", file=sys.stderr)
        return 1
    command = "python -m benchmarks.papers" + " --quick" * args.quick
    command += f" --only {' '.join(args.only)}" if args.only else ""
    if args.profiles:
        # Names only: where the files lie is nobody's business.
        command += f" --profiles {' '.join(path.name for path in args.profiles)}"
        command += f" --profile-samples {args.profile_samples}" if args.profile_samples else ""
    quick = ["Quick: small images, and the small models only. Speeds say nothing."] * args.quick
    report = Report(
        "The tables of the papers",
        command,
        [COLUMNS, *quick],
        json_file=args.json,
        markdown=args.markdown,
    )
    with common.one_thread():
        report.run({name: partial(PARTS[name], options) for name in args.only or PARTS})
    return 0
