"""``benchmarks.papers.parts``: memory counted without values is that of real runs; the tables."""

import json
import sys
from itertools import accumulate, chain, combinations, pairwise

import pytest
import torch
from torch import nn

from benchmarks.common import number
from benchmarks.models import PaperModel, amoebanetd, transformer, unet
from benchmarks.models.resnet import resnet
from benchmarks.papers import costs as paper_costs
from benchmarks.papers import fake_storages
from benchmarks.papers import parts as paper_tables
from benchmarks.papers import speed as paper_speed
from benchmarks.papers.costs import CUTS, WAYS, Measured, PaperOptions, Subject, step_time
from benchmarks.papers.fake_memory import Effects, actual_peaks
from benchmarks.papers.memory import Family, Setting, batch_and_loss, counted, largest
from benchmarks.papers.memory import smallest_largest as cut
from syncpipe.balance import Profile
from syncpipe.planner.cuts.heuristics import even_split
from syncpipe.runtime.worker import Worker

SAMPLES, CHUNKS = 2, 4
AGAIN = {"always": CHUNKS, "except_last": CHUNKS - 1, "never": 0}


def pixels(side):
    return lambda samples, device="cpu": torch.rand(samples, 3, side, side, device=device)


def words(samples, device="cpu"):
    return torch.zeros(samples, 8, dtype=torch.long, device=device)


def mlp(layers=3):
    blocks = [[nn.Linear(16, 16), nn.ReLU()] for _ in range(layers)]
    return nn.Sequential(*(layer for block in blocks for layer in block))


def entry(build, sample, output):
    return PaperModel("small", build, sample, output, "1 M", "", "")


SMALL = {
    "mlp": entry(mlp, lambda n, device="cpu": torch.rand(n, 16, device=device), (16,)),
    "resnet": entry(lambda: resnet((1, 1), channels=8, num_classes=5), pixels(32), (5,)),
    "transformer": entry(
        lambda: transformer(2, width=16, hidden=32, heads=2, vocabulary=20, length=8),
        words,
        (8, 20),
    ),
    "amoebanet": entry(lambda: amoebanetd(5, 3, 8), pixels(64), (5,)),
    "unet": entry(lambda: unet(2, 1, 4), pixels(32), (1, 32, 32)),
}


def peaks(name, n, schedule, checkpoint):
    """Of a whole step on fake tensors and on real ones, and by adding up effects."""
    small = SMALL[name]
    batch, loss = batch_and_loss(small)
    balance = even_split(len(small.on_meta()), n)
    settings = {"samples": SAMPLES, "m": CHUNKS, "schedule": schedule, "checkpoint": checkpoint}
    fake, order = actual_peaks(small.on_meta(), balance, batch, loss, fake=True, **settings)
    real, same = actual_peaks(small.build(), balance, batch, loss, fake=False, **settings)
    assert same == order
    effects = Effects(small.on_meta, balance, batch, loss, SAMPLES)
    return fake, real, effects.walk(order, AGAIN[checkpoint], new_gradients=True)


@pytest.mark.parametrize(
    ("name", "n", "schedule", "checkpoint"),
    [
        ("mlp", 1, "gpipe", "always"),
        ("mlp", 3, "1f1b", "except_last"),
        ("resnet", 3, "gpipe", "always"),
        ("resnet", 3, "1f1b", "never"),
        ("resnet", 1, "naive", "never"),
        ("transformer", 3, "gpipe", "except_last"),
        ("amoebanet", 3, "gpipe", "always"),
    ],
)
def test_bytes_without_values_are_those_of_a_real_run(name, n, schedule, checkpoint):
    fake, real, added_up = peaks(name, n, schedule, checkpoint)
    assert fake == real == added_up
    assert all(fake)


def test_in_place_on_a_view_is_the_known_exception():
    fake, real, added_up = peaks("unet", 3, "gpipe", "always")
    assert added_up == fake != real
    assert real == pytest.approx(fake, rel=0.05)
    assert all(a <= b for a, b in zip(fake, real, strict=True))


def test_fake_devices_refuse_what_was_not_sent(monkeypatch):
    monkeypatch.setattr(fake_storages.CountedWorker, "lane", Worker.lane)  # which shares memory
    with pytest.raises(Exception, match="same device"):
        peaks("mlp", 3, "gpipe", "always")


def test_peaks_follow_the_schedule_and_the_mode():
    small = SMALL["resnet"]
    batch, loss = batch_and_loss(small)
    effects = Effects(small.on_meta, even_split(len(small.on_meta()), 3), batch, loss, SAMPLES)
    never = {m: effects.activations("gpipe", m, "never") for m in (2, 8)}
    assert never[8][0] > 3 * never[2][0]
    flat = {m: effects.activations("1f1b", m, "never", slots="textbook") for m in (4, 8)}
    image = 3 * 32 * 32 * 4 * SAMPLES  # of the mini-batch, which is on the first device
    assert flat[8][0] - flat[4][0] == 4 * image
    assert flat[8][1] == flat[4][1] < never[8][1]
    assert effects.activations("gpipe", 8, "always")[0] < never[8][0] / 2


# -- cuts and lengths -----------------------------------------------------------------------------


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


@pytest.mark.parametrize("n", [1, 2])
def test_largest_fits_and_one_more_does_not(n):
    family = Family(SMALL["mlp"], 3, 1, mlp)
    setting = Setting(samples=8, m=4, bytes=12, limit=25_000)
    found = counted(family.entry, n, setting)
    length = largest(family, found, n, setting)
    assert length is not None
    assert length > 3
    assert counted(family.member(length), n, setting).largest <= setting.limit
    assert counted(family.member(length + n), n, setting).largest > setting.limit
    assert largest(family, found, n, Setting(8, 4, 12, limit=2000)) is None


# -- speed ----------------------------------------------------------------------------------------


def even(layers, backward_ms=2.0):
    entries = [
        {
            "name": str(k),
            "forward_ms": 1.0,
            "backward_ms": backward_ms,
            "activation_bytes": 8,
            "parameter_bytes": 4,
            "stored_bytes": 8,
        }
        for k in range(layers)
    ]
    return entries


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


def test_layers_are_measured_where_there_is_no_profile(monkeypatch):
    build = SMALL["resnet"].build
    monkeypatch.setitem(paper_costs.SUBJECTS, "unet", Subject("Small", build, 64, 4, 32))
    found = paper_costs.measured("unet", PaperOptions(quick=True))
    assert found.size == 2
    assert all(time > 0 for time in found.forward + found.backward)
    assert "measured on one thread of this CPU with micro-batches of 2, 32x32" in found.source


# -- the door -------------------------------------------------------------------------------------

SPEED = ["gpipe_speed", "resnet_speed", "unet_speed", "pipedream"]


def test_tables_of_profiles(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(paper_speed, "RESNET", paper_speed.RESNET[:1] + paper_speed.RESNET[-1:])
    names = ["amoebanetd", "resnet101", "unet", "vgg16", "inception_v3"]
    files = [tmp_path / f"{name}.json" for name in names]
    for path in files:
        path.write_text(json.dumps(even(20)), encoding="utf-8")
    outputs = {"--json": tmp_path / "report.json", "--markdown": tmp_path / "report.md"}
    argv = ["--quick", "--only", *SPEED, "--profiles", *map(str, files)]
    assert paper_tables.main([*argv, *(str(x) for item in outputs.items() for x in item)]) == 0
    capsys.readouterr()

    content = json.loads(outputs["--json"].read_text(encoding="utf-8"))
    assert str(tmp_path) not in content["about"]["command"]
    rows = {name: part["rows"] for name, part in content["parts"].items()}
    assert {name: len(rows[name]) for name in SPEED} == dict(zip(SPEED, (18, 4, 8, 8), strict=True))
    for row in chain.from_iterable(rows.values()):
        plain = {"cut", "n", "m", "model", "machines", "network"}
        told = [column for column in row if column not in plain]
        assert all(c.endswith(("(published)", "(simulated)", "(computed)")) for c in told)
    first = rows["gpipe_speed"][0]
    assert first["GPipe's (published)"] == first["GPipe, re-materialized (simulated)"] == 1
    assert rows["resnet_speed"][0]["GPipe, re-materialized (simulated)"] == pytest.approx(6 / 7)
    assert rows["pipedream"][0]["PipeDream's (published)"] == "2-1-1"
    assert "## GPipe, Table 2" in outputs["--markdown"].read_text(encoding="utf-8")


def test_tables_of_memory(capsys):
    found = paper_tables.PARTS["gpipe_transformer"](PaperOptions(quick=True))
    capsys.readouterr()
    naive, pipeline = found.rows
    for row in (naive, pipeline):
        assert row["parameters (counted)"] == row["parameters (published)"]
        assert row["fits 16 GiB (counted)"] == "yes"
    assert "largest L (counted)" not in naive
    assert pipeline["largest L (counted)"] >= 13
    assert number(pipeline["their memory, GB (counted)"]) == "9.437"


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["--only", "gpipe"], "argument --only: invalid choice: 'gpipe'"),
        (["--profiles", "vgg.json"], "vgg.json is named after none of the models amoebanetd, "),
        (["--profile-samples", "0"], "--profile-samples: must be at least 1, not 0"),
        (["--json", "/nowhere/at/all.json"], "there is no folder /nowhere/at"),
    ],
)
def test_wrong_arguments(argv, reason, capsys):
    with pytest.raises(SystemExit) as stop:
        paper_tables.main(argv)
    assert stop.value.code == 2
    assert reason in capsys.readouterr().err


def test_missing_profile_and_missing_extra(monkeypatch, capsys):
    assert paper_tables.main(["--quick", "--profiles", "/nowhere/vgg16.json"]) == 1
    assert "--profiles" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert paper_tables.main(["--quick"]) == 1
    assert 'pip install "syncpipe[bench]"' in capsys.readouterr().err
