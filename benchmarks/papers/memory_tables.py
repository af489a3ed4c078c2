"""The papers' tables of memory: GPipe's Table 1, torchgpipe's U-Nets and AmoebaNets, counted.

    experiment   schedule      micro-batches        re-materialized
    naive-1      one by one    as for the others    none: gradients are accumulated
    baseline     -             one, all of it       none
    pipeline-n   GPipe         all in flight        all of them, ``checkpoint="always"``

What the papers do not say is assumed, and said in the report.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.common import Part
from benchmarks.models import PaperModel, find
from benchmarks.papers.costs import PaperOptions, bar
from benchmarks.papers.memory import Counted, Family, Setting, counted, largest
from benchmarks.planning.profiles import Table

GB, GiB = 1e9, 2.0**30
_GB = "GB are 10^9 bytes, GiB 2^30."
_LESS = (
    "Counted are tensors, to the byte, on a single-threaded run. What devices need besides "
    "(workspaces of kernels, what the allocator holds and does not use, the runtime) is not in it."
)


_BALANCE = {
    "balance": "of theirs: layers of their model, in which a cell or a block is one; ours is "
    "flatter, and cut so that the largest stage is as small as possible.",
}
_TOTALS = {
    "memory": "of all devices together, in GiB: 8 bytes for each parameter (itself and its "
    "gradient, no optimizer) and the peaks of everything else.",
    "with 12 bytes": "the same with 4 bytes more for each parameter.",
    **_BALANCE,
}


@dataclass(frozen=True)
class Row:
    """One experiment of a table.

    Attributes:
        name: what the paper calls it; "naive" ones are without pipeline and re-materialization.
        model: its name in :mod:`benchmarks.models`.
        n: number of partitions.
        memory: published numbers, by column; None for "out of memory".
        parameters: as published, where it is not what :mod:`benchmarks.models` says.
        balance: as published: layers of the authors' model, which is less flat than ours.
    """

    name: str
    model: str
    n: int
    memory: tuple[float | None, ...]
    parameters: str = ""
    balance: str = ""

    @property
    def naive(self) -> bool:
        return self.name.startswith(("naive", "baseline"))


AMOEBANET = (
    Row("naive-1", "AmoebaNet-D (18, 208)", 1, (1.05, 6.26)),
    Row("pipeline-1", "AmoebaNet-D (18, 416)", 1, (3.8, 3.46)),
    Row("pipeline-2", "AmoebaNet-D (18, 544)", 2, (6.45, 8.11)),
    Row("pipeline-4", "AmoebaNet-D (36, 544)", 4, (12.53, 15.21)),
    Row("pipeline-8", "AmoebaNet-D (72, 512)", 8, (24.62, 26.24)),
)
TRANSFORMER = (
    Row("naive-1", "Transformer-3", 1, (11.7, 3.15)),
    Row("pipeline-1", "Transformer-13", 1, (8.8, 6.4)),
    Row("pipeline-8", "Transformer-103", 8, (59.5, 50.9)),
    Row("pipeline-32", "Transformer-415", 32, (235.1, 199.9)),
    Row("pipeline-128", "Transformer-1663", 128, (937.9, 796.1)),
)
UNET = (
    Row("baseline", "U-Net (6, 72)", 1, (20.3,)),
    Row("pipeline-1", "U-Net (11, 128)", 1, (20.5,), balance="505"),
    Row("pipeline-2", "U-Net (24, 128)", 2, (43.4,), balance="526, 551"),
    Row("pipeline-4", "U-Net (24, 160)", 4, (79.1,), balance="472, 54, 36, 515"),
    Row("pipeline-8", "U-Net (48, 160)", 8, (154.1,), balance="800, 140, 62, 36, 36, 36, 36, 987"),
)
#: The same experiments as GPipe's, by torchgpipe: memory of the model and peak of activations, GiB.
AMOEBANET_AGAIN = (
    Row("naive-1", "AmoebaNet-D (18, 208)", 1, (0.91, None), "81.5 M"),
    Row("pipeline-1", "AmoebaNet-D (18, 416)", 1, (3.57, 0.91), "319.0 M", "24"),
    Row("pipeline-2", "AmoebaNet-D (18, 544)", 2, (6.07, 3.39), "542.7 M", "16, 8"),
    Row("pipeline-4", "AmoebaNet-D (36, 544)", 4, (11.80, 6.91), "1.06 B", "16, 12, 7, 7"),
    Row(
        "pipeline-8", "AmoebaNet-D (72, 512)", 8, (20.62, 10.83), "1.84 B",
        "23, 16, 11, 6, 6, 5, 5, 6",
    ),
)  # fmt: skip


# -- the tables -----------------------------------------------------------------------------------


_DEFINITIONS = {
    "parameters": "their number; memory: 12 bytes for each, as RMSProp or Adam need it.",
    "activations": "all other memory, the sum over the devices of their peaks; counted with what "
    "a layer's backward adds to the gradients that are there, and with the mini-batch.",
    "largest device": "parameter memory and activations of the device that has most.",
    "fits": "whether that is within the limit.",
    "largest L": "of the models of this kind, with as many filters: a formula says which is the "
    "largest that fits on as many devices, and it was counted to fit. (Re-materialized; for naive "
    "rows it was not looked for.)",
}


def _gpipe(rows: Sequence[Row], setting: Setting, part: Table, label: str) -> Part:
    """A half of GPipe's Table 1."""
    limit = f"{setting.limit / GiB:.0f} GiB"
    with bar(2 * len(rows), label) as progress:
        for row in rows:
            entry = find(row.model)
            found = counted(entry, row.n, setting, naive=row.naive)
            memory, activations = row.memory
            line = {
                "experiment": row.name,
                "model": row.model,
                "parameters (published)": entry.published,
                "parameters (counted)": entry.as_published(sum(found.parameters)),
                "their memory, GB (published)": memory,
                "their memory, GB (counted)": sum(found.fixed) / GB,
                "activations, GB (published)": activations,
                "activations, GB (counted)": sum(found.activations) / GB,
                "largest device, GB (counted)": found.largest / GB,
                f"fits {limit} (counted)": "yes" if found.largest <= setting.limit else "no",
            }
            progress.update()
            if not row.naive:
                length = largest(Family.around(entry), found, row.n, setting)
                line["largest L (counted)"] = "none" if length is None else length
            part.rows.append(line)
            progress.update()
    return part


def gpipe_amoebanet(options: PaperOptions) -> Part:
    """AmoebaNet-D on GPUs of 8 GB."""
    setting = Setting(samples=128, m=32, bytes=12, limit=8 * GiB)
    part = Table(
        "GPipe, Table 1: AmoebaNet-D on GPUs of 8 GB",
        "Huang et al. 2019. 224x224 pixels, mini-batches of 128; counted with 32 micro-batches of "
        "4, GPipe's schedule, all of them re-materialized.",
        _DEFINITIONS,
        over=_GB,
        notes=[
            "The paper does not say into how many micro-batches it cut a mini-batch. naive-1 is "
            "counted with micro-batches of the same size, one after another, without "
            "re-materialization.",
            "Published sizes are the largest that did fit; all of them fit by definition. By the "
            "published sums, a device of pipeline-8 had 6.4 GB on average.",
            _LESS,
            "1.8 B parameters of 12 bytes are 21.6 GB, not the 24.62 GB that were published; the "
            "other rows are near 12 bytes.",
        ],
    )
    return _gpipe(AMOEBANET[: 2 if options.quick else None], setting, part, "GPipe, AmoebaNet-D")


def gpipe_transformer(options: PaperOptions) -> Part:
    """Transformer-L on TPUs of 16 GB."""
    setting = Setting(samples=32, m=32, bytes=12, limit=16 * GiB)
    part = Table(
        "GPipe, Table 1: Transformer-L on TPUs of 16 GB",
        "Huang et al. 2019. 1024 tokens, mini-batches of 32; counted with 32 micro-batches of one "
        "sequence, GPipe's schedule, all of them re-materialized, in 32 bits.",
        _DEFINITIONS,
        over=_GB,
        notes=[
            "The 11.7 and 3.15 GB of naive-1 are as published, and probably swapped there: 282.2 M "
            "parameters of 12 bytes are 3.39 GB, 3.15 GiB. The other published numbers of this "
            "table are GiB by their parameters as well: 9.437 GB are 8.79 GiB.",
            _LESS,
            "Attention stores its scores here, 32 heads * 1024 * 1024 * 4 bytes, several times in "
            "each layer. How the paper's did, and in which precision, it does not say.",
        ],
    )
    return _gpipe(TRANSFORMER[: 2 if options.quick else None], setting, part, "GPipe, Transformer")


def torchgpipe_unet(options: PaperOptions) -> Part:
    """torchgpipe's table of U-Nets."""
    setting = Setting(samples=32, m=32, bytes=8)
    part = Table(
        "torchgpipe: memory of U-Net (B, C)",
        "Kim et al. 2020 and torchgpipe's documentation. Counted with 192x192 pixels, mini-batches "
        "of 32 in 32 micro-batches, GPipe's schedule, all of them re-materialized; 8 bytes for "
        "each parameter.",
        _TOTALS,
        over=_GB,
        notes=[
            "What was published fixes the 8 bytes: with 12, the parameters of pipeline-8 alone "
            "would be 177 GiB. The mini-batch and its number of micro-batches are assumed.",
            _LESS,
            "A baseline has its mini-batch whole, without re-materialization.",
        ],
    )
    rows = UNET[: 2 if options.quick else None]
    with bar(len(rows), "torchgpipe, U-Net") as progress:
        for row in rows:
            entry, found = _counted(row, setting)
            total, count = sum(found.fixed) + sum(found.activations), sum(found.parameters)
            part.rows.append(
                {
                    "experiment": row.name,
                    "model": row.model,
                    "parameters (published)": entry.published,
                    "parameters (counted)": entry.as_published(count),
                    "memory, GiB (published)": row.memory[0],
                    "memory, GiB (counted)": total / GiB,
                    "activations, GiB (counted)": sum(found.activations) / GiB,
                    "with 12 bytes, GiB (counted)": (total + 4 * count) / GiB,
                    "largest device, GiB (counted)": found.largest / GiB,
                    "balance (published)": row.balance,
                }
            )
            progress.update()
    return part


def torchgpipe_amoebanet(options: PaperOptions) -> Part:
    """torchgpipe's table of AmoebaNets."""
    setting = Setting(samples=128, m=32, bytes=12)
    part = Table(
        "torchgpipe: memory of AmoebaNet-D (L, D)",
        "torchgpipe's documentation, on Tesla P40s. Counted with 224x224 pixels, mini-batches of "
        "128 in 32 micro-batches, GPipe's schedule, all of them re-materialized; 12 bytes for each "
        "parameter.",
        {
            "model, GiB": "parameters, gradients and state of the optimizer on all devices "
            "together: 12 bytes for each parameter, as what was published is, and the buffers.",
            "activations": "all other memory, the sum over the devices of their peaks.",
            **_BALANCE,
        },
        over=_GB,
        notes=[
            "The mini-batch and its number of micro-batches are assumed.",
            "naive-1 has its mini-batch whole, without re-materialization; theirs was out of "
            "memory with it.",
            _LESS,
        ],
    )
    rows = AMOEBANET_AGAIN[: 1 if options.quick else None]
    with bar(len(rows), "torchgpipe, AmoebaNet-D") as progress:
        for row in rows:
            entry, found = _counted(row, setting)
            model, activations = row.memory
            part.rows.append(
                {
                    "experiment": row.name,
                    "model": row.model,
                    "parameters (published)": row.parameters,
                    "parameters (counted)": entry.as_published(sum(found.parameters)),
                    "model, GiB (published)": model,
                    "model, GiB (counted)": sum(found.fixed) / GiB,
                    "activations, GiB (published)": activations or "out of memory",
                    "activations, GiB (counted)": sum(found.activations) / GiB,
                    "largest device, GiB (counted)": found.largest / GiB,
                    "balance (published)": row.balance,
                }
            )
            progress.update()
    return part


def _counted(row: Row, setting: Setting) -> tuple[PaperModel, Counted]:
    """What one of torchgpipe's experiments takes: without a pipeline the mini-batch is whole."""
    entry = find(row.model)
    if row.parameters:
        entry = replace(entry, published=row.parameters)
    chosen = replace(setting, m=1) if row.naive else setting
    return entry, counted(entry, row.n, chosen, naive=row.naive)
