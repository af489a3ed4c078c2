"""``python -m syncpipe`` without a command, its version, the console script, and its ``plan``."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import nn

import syncpipe
from syncpipe import LayerSpec
from syncpipe.balance import LayerProfile, Profile
from syncpipe.commands.main import main
from tests.layers.conversion.models import Pair
from tests.support.models import linear_model
from tests.support.running import Do

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("called", "name"), [("__main__.py", "python -m syncpipe"), ("/usr/bin/syncpipe", "syncpipe")]
)
def test_without_a_command_it_says_what_there_is_by_its_own_name(
    called: str, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [called])
    assert main() == 0
    shown, error = capsys.readouterr()
    assert shown.startswith(f"usage: {name} ")
    assert "    demo " in shown
    assert "    plan " in shown
    assert error == ""


def test_setup_names_a_script_that_is_there() -> None:
    """Read as text: whether the package is installed is not this test's business."""
    tree = ast.parse((ROOT / "setup.py").read_text(encoding="utf-8"))
    texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    scripts = [text for text in texts if isinstance(text, str) and text.startswith("syncpipe = ")]
    assert len(scripts) == 1
    module, _, function = scripts[0].removeprefix("syncpipe = ").partition(":")
    assert getattr(import_module(module), function) is main
    assert syncpipe.__version__ in texts


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    shown = capsys.readouterr().out
    assert shown.startswith(f"syncpipe {syncpipe.__version__} ")
    assert f"PyTorch {torch.__version__}".partition("+")[0] in shown


@pytest.mark.parametrize("asked", [["--version"], ["--help"], ["plan", "--help"]])
def test_what_only_says_something_does_not_wait_for_pytorch(asked: list[str]) -> None:
    code = (
        "import sys; from syncpipe.commands.main import main\n"
        f"try: main({asked})\n"
        "except SystemExit: assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["dmeo"], "dmeo"),
        (["--verison"], "--verison"),
        (["demo", "--epochs", "0"], "argument --epochs: '0' is not a whole number from 1 to"),
        (["demo", "--epochs", "two"], "argument --epochs: 'two'"),
        (["plan", "--batchsize", "8"], "argument --batchsize: did you mean --batch-size?"),
        (["demo", "--epoch=3", "--device", "--nothing"], "unrecognized argument --nothing"),
        *(
            (["plan", "model", "--devices=2", "--batch-size=8", option, value], reason)
            for option, value, reason in (
                ("--sample", "8x", "'8x' is not a shape"),
                ("--sample", "0x3", "'0x3' is not a shape"),
                ("--sample", "8x3:float33", "is not a shape; write it like"),
                ("--timeout", "-1", "'-1' is not a number of seconds, 0 or more"),
                ("--timeout", "nan", "'nan' is not a number of seconds"),
                ("--chunks", "0", "'0' is not a whole number from 1"),
                ("--picture", "no/such/step.svg", "is not a file in a folder that exists"),
                ("--picture", "step.gif", "must end in .svg or .png or .json"),
                ("--profile", ".", "'.' is not a file"),
                ("--save", "plan.pdf", "'plan.pdf' must end in .html"),
            )
        ),
    ],
)
def test_what_there_is_not_is_an_error_with_the_usage(
    argv: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(argv)
    message = capsys.readouterr().err
    assert message.startswith("usage: python -m syncpipe")
    assert reason in message


# --- plan -----------------------------------------------------------------------------------------


HERE = __name__
DEVICES = ["--devices", "2 x 1GB, 10GB/s", "--batch-size", "64"]


def factory() -> nn.Sequential:
    return linear_model(4)


def broken() -> nn.Sequential:
    raise ValueError("the model's own error")


def raises(x: torch.Tensor) -> None:
    raise ValueError("the layer's own")


def huge() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(2**15, 2**15) for _ in range(32)))  # 137 GB


pair = Pair(lambda _, x: torch.relu(x))  # no nn.Sequential, but one can be made of it
with_sample = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 2)), torch.zeros(4, 2).long()
ready = linear_model(2)
nothing = 3
listed = [LayerSpec(nn.Linear, 5, 3), torch.relu, LayerSpec(nn.Linear, 3, 2)]
bad_layer = nn.Sequential(nn.Linear(5, 5))
bad_pair = bad_layer, torch.zeros(8, 3)
broken_pair = nn.Sequential(Do(raises)), torch.zeros(8, 3)


@pytest.fixture
def measured(tmp_path: Path) -> str:
    times, sizes = {8: 0.003}, {8: 1000}
    layers = [
        LayerProfile(f"layer{k}", times, times, sizes, sizes, parameter_bytes=1000)
        for k in range(4)
    ]
    path = tmp_path / "profile.json"
    Profile(tuple(layers)).save(path)
    return str(path)


def run(*arguments: str) -> int:
    return main(["plan", *arguments])


@pytest.mark.parametrize(
    ("model", "sample"),
    [
        ("factory", "8x3"),
        ("with_sample", None),
        ("ready", "8x3:float32"),
        ("with_sample", "8x2:int64"),
        ("pair", "8x4"),
        ("listed", "8x5"),
    ],
)
def test_a_model_is_measured_and_planned(
    model: str, sample: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "found.json")
    given = [f"{HERE}:{model}", "--timeout", "0.05"] + ["--sample", str(sample)] * bool(sample)
    assert run(*given, *DEVICES, "--profile", path, "--json") == 0
    first = json.loads(capsys.readouterr().out)
    assert run("--profile", path, *DEVICES, "--json") == 0
    assert json.loads(capsys.readouterr().out) == first


def test_options_reach_the_plan(measured: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--chunks", "4", "--stages", "2", "--schedule", "gpipe", "--memory", "3GB",
               "--bandwidth", "1GB/s", "--param-scale", "2"]  # fmt: skip
    assert run("--profile", measured, *DEVICES, *options, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["chunks"], len(found["balance"]), found["schedule"]) == (4, 2, "gpipe")
    assert found["stages"][0]["limit"] == 3e9
    assert found["stages"][0]["send"] == pytest.approx(2000 / 1e9)
    assert found["stages"][0]["memory"] == 2 * 2000 + 4 * 2 * 2000


def test_a_plan_of_any_kind_is_printed_saved_and_drawn(
    measured: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def shown(*options: str) -> str:
        assert run("--profile", measured, "--batch-size", "8", *options) == 0
        return capsys.readouterr().out

    page, step = tmp_path / "plan.HTML", tmp_path / "step.json"
    saved = shown(*DEVICES, "--save", str(page), "--picture", str(step))
    assert "on 2 devices" in saved
    assert "verdict" in page.read_text()
    assert json.loads(step.read_text())["traceEvents"]
    found = json.loads(shown(*DEVICES, "--schedule", "zbv", "--json"))
    assert (found["schedule"], found["device_of"]) == ("zbv", [0, 1, 1, 0])
    assert "cpu:1" in shown("--devices", "cpu:0,cpu:1")
    assert "on 1 device\n" in shown("--devices", "1")
    assert shown(*DEVICES, "--replicas")
    assert json.loads(shown(*DEVICES, "--replicas", "--json"))
    assert run("--profile", measured, *DEVICES, "--memory", "1kB") == 1
    assert "no plan fits into memory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "arguments", "message"),
    [
        (None, [], "give a model"),
        (None, ["--profile", "no_such_file.json"], "no_such_file.json"),
        ("missing", [], "no attribute 'missing'"),
        ("nothing", [], "is not a package.module:factory of a model: it returns a int"),
        *((name, [], f"{name!r} is not a package.module:factory")
          for name in (":nothing", ".tests:factory", "no.such.module:factory")),
        ("broken_pair", [],
         "own (in layer '0' (Do), profiled with a micro-batch of 2 samples; sizes=[2, 4, 8] are"),
        ("factory", [], "--sample is missing"),
        *(("factory", ["--sample", "8x3", option, value], message)
          for option, value, message in (
            ("--memory", "much", "much"),
            ("--on", "abacus", "on='abacus' is unknown"),
            ("--efficiency", "0.3", "give --on"),
            ("--param-scale", "0", "param_scale=0.0: must be"),
        )),
        ("factory", ["--sample", "8x3", "--on", "H100", "--efficiency", "nan"], "nan"),
        ("ready", ["--sample", "8x3", "--schedule", "zbv"], "two stages on each device"),
        *(("bad_layer", ["--sample", sample], "in layer '0' (Linear)")
          for sample in ("8x3", "8", "8x5x0001x5:int64", "8x5:complex64")),
        *(("ready", ["--sample", "8x3", f"--devices={devices}"], "devices")
          for devices in ("", "-1", "1e400 x 16GB", "99999", "cuda:99", "cpu:0,four", "\u00b2")),
        *(("bad_layer", ["--sample", sample], "cannot be measured with this sample")
          for sample in ("9999999999x9999999999", "8x5:float8_e4m3fn")),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_said_on_one_line(
    model: str | None, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    named = [] if model is None else [model if ":" in model else f"{HERE}:{model}"]
    assert run(*named, *DEVICES, *arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("python -m syncpipe plan: ")
    assert message in error
    assert error.count("\n") == 1


def test_errors_of_the_model_come_with_their_traceback() -> None:
    with pytest.raises(ValueError, match="the model's own"):
        run(f"{HERE}:broken", "--sample", "8x3", *DEVICES)
    with pytest.raises(RuntimeError, match="shapes cannot"):
        run(f"{HERE}:bad_pair", *DEVICES)


def test_a_model_that_is_too_large_is_estimated(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--on", "A100-80GB", "--devices", "16 x 80GB, 300GB/s", "--batch-size", "64"]
    assert run(f"{HERE}:huge", "--sample", "8x32768", *options) == 0
    page = capsys.readouterr().out
    assert "times estimated for A100-80GB, 50 % of its peak" in page
    assert "measured on" not in page


def test_devices_of_this_machine_are_measured_with_their_share_of_threads() -> None:
    threads: list[int] = []
    look = Do(lambda x: threads.append(torch.get_num_threads()))
    globals()["looking"] = nn.Sequential(look, nn.Linear(3, 3))
    options = ["--devices", "cpu:0,cpu:1", "--batch-size", "8", "--timeout", "0.01"]
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        assert run(f"{HERE}:looking", "--sample", "8x3", *options) == 0
    finally:
        torch.set_num_threads(before)
    assert set(threads) == {2}
