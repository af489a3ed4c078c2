"""PipeDream's Table 1: which stages on how many machines, beside what its formula gives here."""

from __future__ import annotations

from benchmarks.common import Part
from benchmarks.papers.costs import PaperOptions, bar, measured
from benchmarks.planning.profiles import Table
from syncpipe.balance import Profile
from syncpipe.planner import replicated

#: By the name of a profile's file: the model, and by the number of machines what was published.
TABLE_1 = {
    "vgg16": ("VGG-16", {4: "2-1-1", 8: "7-1", 16: "9-5-1-1"}),
    "inception_v3": ("Inception-v3", {8: "8"}),
}
#: Bytes per second of a machine's network, 25 and 10 Gbit/s.
BANDWIDTHS = {"25 Gbit/s": 25e9 / 8, "10 Gbit/s": 10e9 / 8}
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
            "published": "chosen by PipeDream, with profiles of its own from GPUs of 2018.",
            "k times": "by PipeDream's formula (syncpipe.planner.replicated) on our profile, for "
            "machines k times faster than the one that was measured; over its time in data "
            "parallelism, where there is a pipeline.",
        },
        over="Nothing here was run: all but the published column is computed.",
        notes=[
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
            "Inception-v3 (8 machines, published: 8, data parallelism) is not measured here; give "
            "--profiles inception_v3.json."
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


def _rows(part: Part, model: str, published: dict[int, str], profile: Profile) -> None:
    samples = None if profile.whole else SAMPLES
    for machines, theirs in published.items():
        for words, bandwidth in BANDWIDTHS.items():
            row = {
                "model": model,
                "machines": machines,
                "network": words,
                "PipeDream's (published)": theirs,
            }
            for times in FASTER:
                found = replicated(profile, machines, bandwidth / times, samples=samples)
                cell = found.configuration
                if len(found.stages) > 1:
                    cell += f" ({found.speedup:.2f}x)"
                row[f"{times} times (computed)"] = cell
            part.rows.append(row)
