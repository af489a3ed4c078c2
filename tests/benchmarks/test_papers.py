"""``benchmarks.papers``: memory counted without values is that of real runs; the tables."""

from __future__ import annotations

import json
from itertools import accumulate, chain, combinations, pairwise

import pytest
import torch
from torch import nn

from benchmarks.models import PaperModel, amoebanetd, transformer, unet
from benchmarks.models.resnet import resnet
from benchmarks.papers import memory_tables, speed
from benchmarks.papers.costs import CUTS, WAYS, Measured, PaperOptions, step_time
from benchmarks.papers.fake_memory import Effects, actual_peaks
from benchmarks.papers.memory import Family, Setting, batch_and_loss, counted, largest
from benchmarks.papers.memory import smallest_largest as cut
from benchmarks.papers.parts import GROUP
from syncpipe.balance import Profile
from syncpipe.planner.cuts.heuristics import even_split

SAMPLES, CHUNKS = 2, 4
AGAIN = {"always": CHUNKS, "except_last": CHUNKS - 1, "never": 0}


def pixels(side):
    return lambda samples, device="cpu": torch.rand(samples, 3, side, side, device=device)


def words(samples, device="cpu"):
    return torch.zeros(samples, 8, dtype=torch.long, device=device)


def mlp(layers=3):
    blocks = [[nn.Linear(16, 16), nn.ReLU()] for _ in range(layers)]
    return nn.Sequential(*(layer for block in blocks for layer in block))


def text(layers):
    return transformer(layers, width=16, hidden=32, heads=2, vocabulary=20, length=8)


def entry(build, sample, output, name="small"):
    return PaperModel(name, build, sample, output, "1 M", "", "")


SMALL = {
    "mlp": entry(mlp, lambda n, device="cpu": torch.rand(n, 16, device=device), (16,)),
    "resnet": entry(lambda: resnet((1, 1), channels=8, num_classes=5), pixels(16), (5,)),
    "transformer": entry(lambda: text(2), words, (8, 20)),
    "amoebanet": entry(lambda: amoebanetd(5, 3, 8), pixels(32), (5,)),
    "unet": entry(lambda: unet(2, 1, 4), pixels(16), (1, 16, 16)),
}


@pytest.mark.parametrize(
    ("name", "n", "schedule", "checkpoint"),
    [
        ("mlp", 1, "gpipe", "always"),
        ("mlp", 3, "1f1b", "except_last"),
        ("resnet", 3, "gpipe", "always"),
        ("resnet", 3, "1f1b", "never"),
        ("resnet", 1, "naive", "never"),
        ("transformer", 3, "gpipe", "except_last"),
    ],
)
def test_bytes_without_values_are_those_of_a_real_run(name, n, schedule, checkpoint):
    small = SMALL[name]
    batch, loss = batch_and_loss(small)
    balance = even_split(len(small.on_meta()), n)
    settings = {"samples": SAMPLES, "m": CHUNKS, "schedule": schedule, "checkpoint": checkpoint}
    fake, order = actual_peaks(small.on_meta(), balance, batch, loss, fake=True, **settings)
    real, same = actual_peaks(small.build(), balance, batch, loss, fake=False, **settings)
    effects = Effects(small.on_meta, balance, batch, loss, SAMPLES)
    assert same == order
    assert fake == real == effects.walk(order, AGAIN[checkpoint], new_gradients=True)
    assert all(fake)


def test_smallest_largest_is_exact():
    generator = torch.Generator().manual_seed(0)
    for layers, n in [(1, 1), (5, 1), (6, 3), (7, 4), (4, 4)]:
        memory = torch.rand(layers + 1, layers + 1, dtype=torch.float64, generator=generator)
        memory[torch.ones_like(memory).tril().bool()] = torch.inf

        def worst(ends, memory=memory):
            return max(float(memory[i, j]) for i, j in pairwise(ends))

        borders = combinations(range(1, layers), n - 1)
        best = min(worst([0, *inner, layers]) for inner in borders)
        found = cut(memory, n)
        assert min(found) >= 1
        assert (len(found), sum(found)) == (n, layers)
        assert worst([0, *accumulate(found)]) == best


def test_largest_fits_and_one_more_does_not():
    n, family = 2, Family(SMALL["mlp"], 3, 1, mlp)
    setting = Setting(samples=8, m=4, bytes=12, limit=25_000)
    found = counted(family.entry, n, setting)
    length = largest(family, found, n, setting)
    assert length is not None
    assert length > 3
    assert counted(family.member(length), n, setting).largest <= setting.limit
    assert counted(family.member(length + n), n, setting).largest > setting.limit
    assert largest(family, found, n, Setting(8, 4, 12, limit=2000)) is None


# -- the tables -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "name", "published"),
    [
        ("gpipe_amoebanet", "resnet", {"their memory, GB": 1.05, "activations, GB": 6.26}),
        ("gpipe_transformer", "transformer", {"their memory, GB": 11.7, "activations, GB": 3.15}),
        ("torchgpipe_unet", "unet", {"memory, GiB": 20.3}),
        (
            "torchgpipe_amoebanet", "resnet",
            {"model, GiB": 0.91, "activations, GiB": "out of memory", "parameters": "81.5 M"},
        ),
    ],
)  # fmt: skip
def test_tables_of_memory(table, name, published, monkeypatch):
    """With small models in place of the papers'."""
    small, family = SMALL[name], Family(SMALL[name], 2, 1, text)
    monkeypatch.setattr(memory_tables, "find", lambda _: small)
    monkeypatch.setattr(memory_tables, "largest", lambda *_: 1)
    monkeypatch.setattr(memory_tables.Family, "around", lambda _: family)
    part = GROUP.parts[table](PaperOptions(quick=True))
    for column, value in published.items():
        assert part.rows[0][f"{column} (published)"] == value
        assert f"{column} (counted)" in part.rows[0]


def even(layers, backward_ms=2.0):
    sizes = {"activation_bytes": 8, "parameter_bytes": 4, "stored_bytes": 8}
    times = {"forward_ms": 1.0, "backward_ms": backward_ms}
    return [{"name": str(k), **times, **sizes} for k in range(layers)]


@pytest.mark.parametrize("name", CUTS)
def test_simulated_steps_of_even_layers(name):
    costs = Measured(Profile.from_list(even(8)), "even")
    n, m, stage = 4, 6, 2e-3  # forward of a stage; backward is twice that
    times = {way: step_time(costs, name, WAYS[way], n, m) for way in WAYS}
    assert times["GPipe"] == pytest.approx((m + n - 1) * 3 * stage)
    assert times["1F1B"] == pytest.approx((m + n - 1) * 3 * stage)
    assert times["GPipe, re-materialized"] == pytest.approx(times["GPipe"] + (m - 1) * stage)
    assert times["interleaved 1F1B"] < times["1F1B"]
    assert times["zero bubble"] == pytest.approx((m + (n - 1) / 3) * 3 * stage)


def test_tables_of_profiles(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(speed, "RESNET", speed.RESNET[:1] + speed.RESNET[-1:])
    parts = ["gpipe_speed", "resnet_speed", "unet_speed", "pipedream"]
    names = ["amoebanetd", "resnet101", "unet", "vgg16", "inception_v3"]
    files = [tmp_path / f"{name}.json" for name in names]
    for path in files:
        path.write_text(json.dumps(even(20)), encoding="utf-8")
    report = tmp_path / "report.json"
    argv = ["--quick", "--only", *parts, "--profiles", *map(str, files), "--json", str(report)]
    assert GROUP.main(argv) == 0
    assert "## GPipe, Table 2" in capsys.readouterr().out

    content = json.loads(report.read_text(encoding="utf-8"))
    assert str(tmp_path) not in content["about"]["command"]
    rows = {name: part["rows"] for name, part in content["parts"].items()}
    assert [len(rows[name]) for name in parts] == [18, 4, 8, 6]
    for row in chain.from_iterable(rows.values()):
        plain = {"cut", "n", "m", "model", "machines", "network"}
        told = [column for column in row if column not in plain]
        assert all(c.endswith(("(published)", "(simulated)", "(computed)")) for c in told)
    first = rows["gpipe_speed"][0]
    assert first["GPipe's (published)"] == first["GPipe, re-materialized (simulated)"] == 1
    assert rows["resnet_speed"][0]["GPipe, re-materialized (simulated)"] == pytest.approx(6 / 7)
    assert rows["pipedream"][0]["PipeDream's (published)"] == "2-1-1 (2.13x)"
