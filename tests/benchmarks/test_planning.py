"""``benchmarks.planning``: each part runs in its quick form, and says what it should."""

import json
import sys
from types import ModuleType

import pytest
import torch

from benchmarks.common import Part
from benchmarks.planning import parts as planning
from benchmarks.planning.predicted import both_busy, spearman, tell
from benchmarks.planning.profiles import PlanningOptions, quantiles, random_profile
from benchmarks.planning.quality import torchgpipe
from benchmarks.planning.ways import ALONE, AT_ONCE, asleep, loop_of, other_ways
from syncpipe import Pipe, plan
from syncpipe.planner.costs.machine import Machine
from syncpipe.schedules import gpipe
from syncpipe.schedules.simulation import Costs, simulate

TITLES = {
    "time": ["Time to plan", "Time to cut"],
    "quality": ["Cuts", "Plans for the profiles given", "Plans for random profiles"],
    "predicted": [
        "Predicted and measured: pipes on two CPU workers",
        "Predicted and measured: layers that sleep",
        "Is the predicted best the best?",
    ],
}


@pytest.fixture
def profile_file(tmp_path):
    entry = {"forward_ms": 1.0, "activation_bytes": 8, "parameter_bytes": 4, "stored_bytes": 8}
    entries = [{**entry, "name": str(k), "backward_ms": 1.0 + k} for k in range(6)]
    path = tmp_path / "six.json"
    path.write_text(json.dumps(entries), encoding="utf-8")
    return path


@pytest.mark.parametrize("name", planning.PARTS)
def test_quick_form_of_each_part(name, profile_file, tmp_path, capsys):
    threads = torch.get_num_threads()
    files = {"--json": tmp_path / "report.json", "--markdown": tmp_path / "report.md"}
    argv = ["--quick", "--only", name, "--profiles", str(profile_file), "--profile-samples", "4"]
    assert planning.main([*argv, *(str(part) for item in files.items() for part in item)]) == 0
    assert torch.get_num_threads() == threads
    assert "These numbers say nothing" in capsys.readouterr().out

    content = json.loads(files["--json"].read_text(encoding="utf-8"))
    assert content["about"]["torch"] == torch.__version__
    assert str(tmp_path) not in content["about"]["command"]
    tables = content["parts"][name]["tables"]
    assert [table["title"] for table in tables] == TITLES[name]
    assert all(table["rows"] for table in tables)
    text = files["--markdown"].read_text(encoding="utf-8")
    assert all(f"## {title}\n" in text for title in TITLES[name])
    words = {"time": ["measured"], "quality": ["computed", "predicted"]}
    assert all(f": {word}" in text for word in words.get(name, ["measured", "predicted"]))


def test_without_profiles_there_are_random_ones_only(capsys):
    assert planning.main(["--quick", "--only", "quality"]) == 0
    assert "No --profiles were given" in capsys.readouterr().out


def test_each_way_to_run_is_another_and_can_be_built():
    problem, profile = asleep(quick=True)
    best = plan(profile, devices=Machine.even(4), batch_size=4, chunks=4)
    ways = other_ways(best, ["cpu:0", "cpu:1", "cpu:2", "cpu:3"], (4,))
    assert ways["the plan"].balance == best.balance
    assert len(ways) > 3
    told = [json.dumps({**way.options(), "slots": way.slots}) for way in ways.values()]
    assert len(set(told)) == len(told)
    for way in ways.values():
        assert Pipe(problem.model, **way.options(), devices=way.devices).balance == way.balance


def test_busy_at_once():
    # Filling and draining a pipeline of two, one works alone: 2 of 5 units, forth and back.
    simulation = simulate(gpipe(4, 2), Costs.even(2, 1.0, 1.0, 0.0))
    assert simulation.makespan == 10
    assert both_busy(simulation) == 6
    assert both_busy(simulate(gpipe(4, 1), Costs.even(1, 1.0, 1.0, 0.0))) == 0


def test_predictions_are_slowed_where_both_compute_and_by_the_error_of_the_profile():
    _, profile = asleep(quick=True)
    best = plan(profile, devices=Machine.even(2), batch_size=4, chunks=4)
    taken, busy = best.step_time, both_busy(best.simulation)
    whole = 4 * sum(layer.forward[1] + layer.backward[1] for layer in profile.layers)
    samples = {
        "the plan": [taken] * 2,
        loop_of(4): [2 * whole] * 2,
        ALONE: [1.0] * 2,
        AT_ONCE: [1.5] * 2,
    }
    part = Part("Title", "Setting.")
    tell(part, "model", {"the plan": best}, samples, contended=True)
    loop, row = part.rows
    assert loop["measured / predicted"].median == pytest.approx(2)
    assert loop["machine"].median == 1.5
    assert row["measured / predicted"].median == pytest.approx(1)
    limit = taken / (taken + busy / 2)
    assert 0.5 < limit < 0.9
    assert row["over the machine's limit"].median == pytest.approx(limit)
    assert row["over limit and profile"].median == pytest.approx(limit / 2)


def test_rank_correlation():
    assert spearman([1, 2, 3, 4], [10, 20, 30, 50]) == pytest.approx(1)
    assert spearman([1, 2, 3, 4], [9, 7, 5, 3]) == pytest.approx(-1)
    assert spearman([1, 1, 2, 3], [5, 6, 7, 8]) == pytest.approx(0.9 / 0.9**0.5)  # shared ranks
    assert spearman([1, 1], [1, 2]) is None


def test_quantiles():
    assert quantiles(range(100, 0, -1)) == {"mean": 50.5, "p95": 95, "worst": 100}


def test_random_profiles_can_be_drawn_again():
    assert random_profile(5, "a", skips=2) == random_profile(5, "a", skips=2)
    assert random_profile(5, "a") != random_profile(5, "b")


def test_torchgpipe_that_does_not_end_is_stopped(monkeypatch):
    def solve(costs, n):
        while min(costs) < max(costs):
            pass
        return [costs, []] if costs[0] else [costs[:1], costs[1:]]

    module = ModuleType("torchgpipe.balance.blockpartition")
    # A function finds `min` where it was defined: there it has to count.
    solve = type(solve)(solve.__code__, module.__dict__)
    module.solve = solve
    for name in ("torchgpipe", "torchgpipe.balance"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    cut = torchgpipe()
    assert cut([1, 2], 2) is None  # for ever
    assert cut([3, 3], 2) is None  # a stage without layers
    assert cut([0, 0], 2) == [1, 1]
    assert not hasattr(module, "min")


def test_without_torchgpipe_its_rewriting_is_left(monkeypatch):
    for name in ("torchgpipe", "torchgpipe.balance", "torchgpipe.balance.blockpartition"):
        monkeypatch.setitem(sys.modules, name, None)
    assert torchgpipe() is None
    cuts, *_ = planning.PARTS["quality"](PlanningOptions(quick=True))
    assert "torchgpipe is not installed here" in " ".join(cuts.notes)
    assert {row["what"] for row in cuts.rows} == {
        "block partitions, as syncpipe has them",
        "equal numbers of layers",
    }


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["--only", "speed"], "argument --only: invalid choice: 'speed'"),
        (["--repeats", "1"], "argument --repeats: must be at least 2, not 1"),
        (["--json", "/nowhere/at/all.json"], "there is no folder /nowhere/at"),
        (["--profiles", "a", "--profile-samples", "1", "2"], "2 numbers for 1 profiles"),
    ],
)
def test_wrong_arguments(argv, reason, capsys):
    with pytest.raises(SystemExit) as stop:
        planning.main(argv)
    assert stop.value.code == 2
    assert reason in capsys.readouterr().err


def test_profiles_that_are_none_are_told_before_anything_is_measured(tmp_path, capsys):
    file = tmp_path / "none.json"
    file.write_text("{}", encoding="utf-8")
    assert planning.main(["--quick", "--profiles", str(file)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "is not a profile" in err
