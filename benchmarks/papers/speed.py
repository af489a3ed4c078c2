"""Speed of the papers' models: published figures beside simulations on layers measured here.

GPipe's Table 2 and its repetition by torchgpipe (AmoebaNet-D), and torchgpipe's speed-ups of
ResNet-101 and U-Net. Nothing here runs a pipeline: it is what the schedules would have made of the
times of the layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.common import Part
from benchmarks.papers.costs import (
    CUTS,
    DEFINITIONS,
    NOTES,
    SUBJECTS,
    WAYS,
    PaperOptions,
    bar,
    measured,
    throughputs,
)
from benchmarks.planning.profiles import Table

#: By (n, m): GPipe's Table 2 and what torchgpipe's paper gives for the same.
TABLE_2 = {
    (2, 1): (1.0, 1.0),
    (4, 1): (1.13, 1.004),
    (8, 1): (1.38, 0.932),
    (2, 4): (1.07, 1.539),
    (4, 4): (1.26, 1.666),
    (8, 4): (1.72, 2.621),
    (2, 32): (1.21, 1.773),
    (4, 32): (1.84, 2.709),
    (8, 32): (3.48, 4.953),
}


_OVER = "No pipeline was run for this table: the simulated columns are simulated."


class Speedup(NamedTuple):
    """One line of torchgpipe's tables.

    Attributes:
        n: number of partitions.
        m: number of micro-batches of the experiment.
        published: throughput over that of one device without pipeline and re-materialization.
        gpipe: the same by GPipe, where torchgpipe's table quotes it.
    """

    n: int
    m: int
    published: float
    gpipe: float | None = None


RESNET = (
    Speedup(1, 2, 0.853, 0.80),
    Speedup(2, 1667, 1.414, 1.42),
    Speedup(4, 256, 2.774, 2.18),
    Speedup(8, 150, 4.294, 2.89),
)
UNET = (
    Speedup(1, 2, 0.858),
    Speedup(2, 32, 1.246),
    Speedup(4, 16, 2.352),
    Speedup(8, 40, 3.105),
)


def table_2(options: PaperOptions) -> Part:
    """GPipe's Table 2."""
    part = Table(
        "GPipe, Table 2: speed of AmoebaNet-D (18, 256)",
        "Huang et al. 2019, and Kim et al. 2020 (torchgpipe) who repeated it. Throughput over that "
        "of n = 2, m = 1.",
        {
            "GPipe's, torchgpipe's (published)": "each over its own n = 2, m = 1.",
            "simulated": "over GPipe's schedule with the same cut, n = 2, m = 1, where there is "
            "nothing to compute again.",
            **DEFINITIONS,
        },
        over=_OVER,
        notes=[
            *NOTES,
            "With m = 1 no two devices work at the same time, so the simulated columns are 1 for "
            "all n (but for zero bubble, where a weight half is computed while the next stage "
            "works). GPipe's grows there, which these costs do not explain.",
            "torchgpipe's mini-batches, for m = 1, 4 and 32: 96, 256 and 1,280 samples with n = 2; "
            "160, 360 and 1,152 with n = 4; 196, 480 and 1,280 with n = 8.",
        ],
    )
    with bar(len(CUTS) * len(TABLE_2) + 1, "AmoebaNet-D (18, 256)") as progress:
        costs = measured("amoebanetd", options)
        part.setting += f" {costs.source}."
        progress.update()
        for cut in CUTS:
            base = throughputs(costs, cut, 2, 1)["GPipe, re-materialized"]
            for (n, m), (theirs, again) in TABLE_2.items():
                found = throughputs(costs, cut, n, m)
                part.rows.append(
                    {
                        "cut": cut,
                        "n": n,
                        "m": m,
                        "GPipe's (published)": theirs,
                        "torchgpipe's (published)": again,
                        **{f"{name} (simulated)": found[name] / base for name in WAYS},
                    }
                )
                progress.update()
    return part


def torchgpipe_resnet(options: PaperOptions) -> Part:
    """torchgpipe's speed-ups of ResNet-101."""
    batches = "118 (one device), 220, 25,000, 5,632 and 5,400"
    return _speedups("resnet101", RESNET, batches, options)


def torchgpipe_unet(options: PaperOptions) -> Part:
    """torchgpipe's speed-ups of U-Net (5, 64)."""
    batches = "40 (one device), 80, 512, 512 and 640"
    return _speedups("unet", UNET, batches, options)


def _speedups(key: str, lines: Sequence[Speedup], batches: str, options: PaperOptions) -> Part:
    name = SUBJECTS[key].name
    part = Table(
        f"torchgpipe: speed of {name}",
        "Kim et al. 2020. Throughput over that of one device, which takes mini-batches whole.",
        {
            "n, m": "partitions and micro-batches.",
            "published": "measured by the authors, on GPUs; GPipe's by Huang et al. (version 4, "
            "figure 3b), as torchgpipe's documentation quotes it.",
            "simulated": "over forward and backward of all layers.",
            **DEFINITIONS,
        },
        over=_OVER,
        notes=[
            *NOTES,
            f"The numbers of micro-batches, and mini-batches of {batches} samples, are those of "
            "torchgpipe's documentation.",
        ],
    )
    with bar(len(CUTS) * len(lines) + 1, name) as progress:
        costs = measured(key, options)
        part.setting += f" {costs.source}."
        progress.update()
        alone = 1 / (sum(costs.forward) + sum(costs.backward))
        for cut in CUTS:
            for n, m, published, gpipe in lines:
                found = throughputs(costs, cut, n, m)
                part.rows.append(
                    {
                        "cut": cut,
                        "n": n,
                        "m": m,
                        "torchgpipe's (published)": published,
                        **({"GPipe's (published)": gpipe} if gpipe is not None else {}),
                        **{f"{name} (simulated)": found[name] / alone for name in WAYS},
                    }
                )
                progress.update()
    return part
