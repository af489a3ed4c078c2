"""PipeDream's Table 1: which stages on how many machines, beside what its formula gives here."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.common import Part
from benchmarks.papers.costs import PaperOptions, bar, measured
from benchmarks.planning.profiles import Table
from syncpipe.balance import Profile
from syncpipe.planner import replicated

#: By the name of a profile's file: the model; by cluster and number of machines the configuration
#: that was published, and how many times faster than data parallelism it was.
TABLE_1 = {
    "vgg16": (
        "VGG-16",
        {
            ("A", 4): ("2-1-1", 2.13),
            ("A", 8): ("7-1", 2.99),
            ("A", 16): ("9-5-1-1", 3.00),
            ("B", 8): ("7-1", 5.12),
        },
    ),
    "inception_v3": ("Inception-v3", {("A", 8): ("8", 1.00), ("B", 8): ("7-1", 1.45)}),
}
#: By the paper's cluster: bits per second of a machine's network.
NETWORKS = {"A": 25e9, "B": 10e9}
#: How many times faster than the machine of the profile.
FASTER = (1, 10, 30, 100, 300)
#: Samples in the mini-batch of one machine.
SAMPLES = 64


def run(options: PaperOptions) -> Part:
    """PipeDream's configurations."""
    part = Table(
        "PipeDream, Table 1: stages and their replicas",
        "Harlap et al. 2018. '2-1-1' are three stages, the first on two machines; '8' alone is "
        f"data parallelism. Mini-batches of {SAMPLES} samples for each machine (for a profile that "
        "does not say how many were measured: those).",
        {
            "machines": "and the cluster of the paper, A or B.",
            "published": "chosen by PipeDream, with profiles of its own from GPUs of 2018; over "
            "its time in data parallelism (BSP).",
            "k times": "by PipeDream's formula (syncpipe.planner.replicated) on our profile, for "
            "machines k times faster than the one that was measured; over its time in data "
            "parallelism, where there is a pipeline.",
        },
        over="Nothing here was run: all but the published column is computed.",
        notes=[
            "S2VT, the third model of the table (4 machines of cluster A: 2-1-1, 3.01x), is not "
            "among the models here.",
            "Only the product of a machine's speed and its network's slowness matters, so several "
            "speeds stand side by side. Which of them PipeDream's machines had is not known here.",
            "PipeDream did not publish its profiles. Where a configuration of ours differs, it "
            "is the faster one by the same formula on our profile.",
        ],
    )
    files = options.loaded()
    keys = [key for key in TABLE_1 if key in files or key == "vgg16"]
    if "inception_v3" not in files:
        part.notes.append(
            "Inception-v3 (8 machines; published: 8, data parallelism, in cluster A and 7-1 in "
            "cluster B) is not measured here; give --profiles inception_v3.json."
        )
    with bar(len(keys), "PipeDream") as progress:
        for key in keys:
            model, published = TABLE_1[key]
            if key in files:
                profile, source = files[key], f"{model}: {key}.json"
            else:
                found = measured(key, options)
                profile, source = found.profile, found.source
            part.notes.append(f"{source}.")
            _rows(part, model, published, profile)
            progress.update()
    return part


def _rows(
    part: Part,
    model: str,
    published: Mapping[tuple[str, int], tuple[str, float]],
    profile: Profile,
) -> None:
    samples = None if profile.whole else SAMPLES
    for (cluster, machines), (theirs, faster) in published.items():
        bits = NETWORKS[cluster]
        row = {
            "model": model,
            "machines": f"{machines} ({cluster})",
            "network": f"{bits / 1e9:.0f} Gbit/s",
            "PipeDream's (published)": theirs if faster == 1 else f"{theirs} ({faster:.2f}x)",
        }
        for times in FASTER:
            found = replicated(profile, machines, bits / 8 / times, samples=samples)
            cell = found.configuration
            if len(found.stages) > 1:
                cell += f" ({found.speedup:.2f}x)"
            row[f"{times} times (computed)"] = cell
        part.rows.append(row)
