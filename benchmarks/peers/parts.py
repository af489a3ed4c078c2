"""Peers side by side: the plain model, ours, torchgpipe, fairscale, torch.distributed.pipelining.

    python -m benchmarks.peers [--quick] [--only NAME ...] [--no-distributed] [--threads N]
        [--repeats N] [--json FILE] [--markdown FILE]

Four parts on the CPU: ``tiny`` (layers that compute next to nothing: the overhead), ``linear``
(8 x Linear(1024)), ``resnext`` (a small one, with skips) and ``transformer`` (a small one). Three
on one GPU, ``gpu-resnext101``, ``gpu-unet`` and ``gpu-gpt2``, which are skipped where there is
none. In each part all peers train the very same layers in every round, in an order that changes
from round to round, after they were seen to give the plain loop's gradients. Libraries that are
missing are skipped, and the report says so.
"""

from __future__ import annotations

import argparse

from benchmarks.group import Group
from benchmarks.peers import cpu, gpu
from benchmarks.peers.libraries import LIBRARIES
from benchmarks.peers.measure import PeerOptions


def _arguments(parser: argparse.ArgumentParser) -> None:
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


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    if args.threads is not None and args.threads < 1:
        parser.error(f"argument --threads: must be at least 1, not {args.threads}")


GROUP = Group(
    "peers",
    "Peers side by side",
    __doc__,
    {**cpu.PARTS, **gpu.PARTS},
    lambda args: PeerOptions(args.quick, args.repeats, not args.no_distributed, args.threads),
    rounds="11, on a GPU 7",
    arguments=_arguments,
    check=_check,
    versions=tuple(LIBRARIES),
    one_thread=False,
)
