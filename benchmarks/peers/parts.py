"""Peers side by side: the plain model, ours, torchgpipe, fairscale, torch.distributed.pipelining.

    python -m benchmarks.peers [--quick] [--only NAME ...] [--no-distributed] [--threads N]
        [--repeats N] [--json FILE] [--markdown FILE]

Four parts on the CPU: ``tiny`` (layers that compute next to nothing: the overhead), ``linear``
(8 x Linear(1024)), ``resnext`` (a small one, with skips) and ``transformer`` (a small one). Four on
one GPU, ``gpu-resnext101``, ``gpu-unet``, ``gpu-amoebanet`` and ``gpu-gpt2``, which are skipped
where there is none. In each part all peers train the very same layers in every round, in an order
that changes from round to round, after they were seen to give the plain loop's gradients. Libraries
that are missing are skipped, and the report says so.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial

from benchmarks import common
from benchmarks.common import Part
from benchmarks.peers import cpu as peers_cpu
from benchmarks.peers import gpu as peers_gpu
from benchmarks.peers.libraries import LIBRARIES
from benchmarks.peers.measure import PeerOptions
from benchmarks.report import QUICK, Report, check, parser_of

PARTS: dict[str, Callable[[PeerOptions], Part]] = {**peers_cpu.PARTS, **peers_gpu.PARTS}


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = parser_of("peers", __doc__, PARTS, "11, on a GPU 7")
    parser.add_argument(
        "--no-distributed",
        action="store_true",
        help="without torch.distributed.pipelining, whose processes are slow to start",
    )
    parser.add_argument(
        "--threads",
        type=int,
        metavar="N",
        help="intra-op threads in total on the CPU, for everybody (2; quick: 1)",
    )
    args = parser.parse_args(argv)
    check(parser, args)
    if args.threads is not None and args.threads < 1:
        parser.error(f"argument --threads: must be at least 1, not {args.threads}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints the report, writes the files."""
    args = parsed(argv)
    try:
        import tqdm  # noqa: F401  # asked for now, needed later
    except ImportError as error:
        print(common.MISSING.format(error), file=sys.stderr)
        return 1
    command = "python -m benchmarks.peers" + " --quick" * args.quick
    command += f" --only {' '.join(args.only)}" if args.only else ""
    command += " --no-distributed" * args.no_distributed
    command += f" --threads {args.threads}" if args.threads else ""
    command += f" --repeats {args.repeats}" if args.repeats else ""
    options = PeerOptions(args.quick, args.repeats, not args.no_distributed, args.threads)
    Report(
        "Peers side by side",
        command,
        [QUICK] * args.quick,
        json_file=args.json,
        markdown=args.markdown,
        versions={library: common.version(library) for library in LIBRARIES},
    ).run({name: partial(PARTS[name], options) for name in args.only or PARTS})
    return 0
