"""The tables of the papers, ours beside the published figures.

    python -m benchmarks.papers [--quick] [--only NAME ...]
        [--profiles FILE ... [--profile-samples N]] [--json FILE] [--markdown FILE]

Memory is counted on fake tensors, by running the real stages: ``gpipe_amoebanet`` and
``gpipe_transformer`` (GPipe's Table 1), ``torchgpipe_unet``, ``torchgpipe_amoebanet``.
Speed is simulated on times of layers that are measured here, or come from ``--profiles``:
``gpipe_speed`` (GPipe's Table 2 and torchgpipe's), ``resnet_speed``, ``unet_speed``; and
``pipedream`` computes the configurations of PipeDream's Table 1. Each column says what it is.

A profile is a file that ``Profile.save`` wrote, or a list, named after its model: amoebanetd.json,
resnet101.json, unet.json, vgg16.json, inception_v3.json.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.group import Group
from benchmarks.papers import memory_tables, pipedream, speed
from benchmarks.papers.costs import SUBJECTS, PaperOptions

#: What the columns are.
COLUMNS = (
    "Published: by the papers' authors, on their machines. Counted: on tensors without values, by "
    "running the real stages. Measured: here. Simulated, computed: from what was measured."
)


def _arguments(parser: argparse.ArgumentParser) -> None:
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


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    names = {*SUBJECTS, *pipedream.TABLE_1}
    for path in args.profiles:
        if path.stem not in names:
            parser.error(
                f"argument --profiles: {path.name} is named after none of the models "
                f"{', '.join(sorted(names))}"
            )
    if args.profile_samples is not None and args.profile_samples < 1:
        parser.error(f"argument --profile-samples: must be at least 1, not {args.profile_samples}")


def _options(args: argparse.Namespace) -> PaperOptions:
    profiles = tuple(args.profiles)
    options = PaperOptions(args.quick, profiles=profiles, profile_samples=args.profile_samples)
    options.loaded()  # what is no profile is refused before anything is measured
    return options


GROUP = Group(
    "papers",
    "The tables of the papers",
    __doc__,
    {
        "gpipe_amoebanet": memory_tables.gpipe_amoebanet,
        "gpipe_transformer": memory_tables.gpipe_transformer,
        "torchgpipe_unet": memory_tables.torchgpipe_unet,
        "torchgpipe_amoebanet": memory_tables.torchgpipe_amoebanet,
        "gpipe_speed": speed.table_2,
        "resnet_speed": speed.torchgpipe_resnet,
        "unet_speed": speed.torchgpipe_unet,
        "pipedream": pipedream.run,
    },
    _options,
    arguments=_arguments,
    check=_check,
    remarks=(COLUMNS,),
)
