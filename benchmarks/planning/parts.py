"""Planning: how long it takes, how good cuts and plans are, and whether predictions come true.

Seven parts: ``time`` (of planning, and of cutting), ``quality`` (cuts beside the best ones, plans
beside what else one could do; all predicted), ``sweeps`` (whether more memory, bandwidth, devices
or smaller parameters are ever slower), ``brute`` (plans beside the best of all, in small cases),
``predicted`` (predicted beside measured step times of pipes on CPU workers, and of layers that
sleep), ``memory`` (planned beside counted) and ``large`` (a transformer of 7 billion parameters,
estimated and planned).
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.common import Group
from benchmarks.planning import brute, held, predicted, quality, sweeps, time
from benchmarks.planning.profiles import PlanningOptions


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--profiles",
        nargs="+",
        type=Path,
        metavar="FILE",
        default=[],
        help="profiles to cut and plan, saved by syncpipe or lists (quality, sweeps)",
    )
    parser.add_argument(
        "--profile-samples",
        nargs="+",
        type=int,
        metavar="N",
        help="how many samples the lists were measured with: one number, or one for each file; "
        "without it their numbers are those of the whole mini-batch",
    )


def _options(args: argparse.Namespace) -> PlanningOptions:
    samples = tuple(args.profile_samples or [None])
    if len(samples) not in (1, len(args.profiles)):
        raise ValueError(
            f"argument --profile-samples: {len(samples)} numbers for {len(args.profiles)} "
            "profiles; give one for all of them or one for each"
        )
    if len(samples) == 1:
        samples *= len(args.profiles)
    options = PlanningOptions(args.quick, args.repeats, tuple(args.profiles), samples)
    options.loaded()  # what is no profile is refused before anything is measured
    return options


GROUP = Group(
    "planning",
    "What planning takes, and what plans are worth",
    __doc__,
    {
        "time": time.run,
        "quality": quality.run,
        "sweeps": sweeps.run,
        "brute": brute.run,
        "predicted": predicted.run,
        "memory": held.memory,
        "large": held.large,
    },
    _options,
    arguments=_arguments,
    versions=("torchgpipe",),
)
