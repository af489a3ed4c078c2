"""``python -m syncpipe demo``: its arguments, short runs, and what it says without its extras."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from syncpipe.commands import demo
from syncpipe.commands.main import main
from tests.support import accelerator as acc

HEADINGS = ("1. The plan", "2. The check", "3. The training", "4. The gain", "5. The timeline")


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Little to measure, and one mini-batch an epoch, and a folder for the picture."""
    whole, size = demo.load_digits(), demo.BATCH_SIZE
    few = demo.Digits(
        whole.train_images[:size], whole.train_labels[:size],
        whole.test_images[:40], whole.test_labels[:40],
    )  # fmt: skip
    monkeypatch.setattr(demo, "load_digits", lambda: few)
    monkeypatch.setattr(demo, "CPU_BATCH", 128)
    monkeypatch.setattr(demo, "ACCELERATOR_BATCH", 32)
    monkeypatch.setattr(demo, "PLAN_SECONDS", 0.05)
    monkeypatch.setattr(demo, "TIMED_SECONDS", 0.0)
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    yield
    assert torch.get_num_threads() == threads


def without(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a module were not installed."""
    for name in [name for name in sys.modules if name.split(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["--chunks", "0"], "argument --chunks: '0' is not a whole number from 1 to 128"),
        (["--chunks", "two"], "argument --chunks: 'two'"),
        (["--epochs", "0"], "argument --epochs: '0'"),
        (["--seed", "-1"], "argument --seed: '-1'"),
        (["--seed", str(2**32)], f"argument --seed: '{2**32}'"),
        (["--picture", "step.gif"], "argument --picture: 'step.gif' must end in .png or .svg"),
        (["--picture", "no/such/step.png"], "there is no folder 'no/such'"),
        (["--devices", ""], "argument --devices: devices: '' is not a device"),
        (["--devices", "cpu:0,"], "argument --devices: devices: '' is not a device"),
        (["--devices", "cpu:128"], "PyTorch knows the numbers 0 to 127"),
        (["--devices", "cpu:0,tpu"], "argument --devices: devices: 'tpu' is not a device"),
        (["--devices", "cuda:99"], "argument --devices: devices: 'cuda:99' is"),
        (["--devices", "99"], "argument --devices: devices: 99 is"),
        (["--devices", "cpu:1,cpu:1"], "name each of them once"),
    ],
)
def test_wrong_arguments(argv: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["demo", *argv])
    message = capsys.readouterr().err
    assert message.startswith("usage: python -m syncpipe demo")
    assert reason in message


def test_without_scikit_learn(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without("sklearn", monkeypatch)
    assert main(["demo"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert 'pip install "syncpipe[demo]"' in err
    assert "sklearn" in err


def run(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """What a short run shows."""
    assert main(["demo", "--epochs", "2", *options]) == 0
    return capsys.readouterr().out


@pytest.mark.usefixtures("short")
def test_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    shown = run(capsys, "--picture", "step.svg")
    assert [line for line in HEADINGS if f"\n{line}" not in shown] == []
    assert "layers on cpu:0, cpu:1, by " in shown
    assert "OK: the pipe computes what the plain model computes" in shown
    assert len(re.findall(r"^   epoch  \d: loss .*, test accuracy .*%$", shown, re.M)) == 2
    ways = re.findall(r"^   (.*\S) +\d+\.\d+ m?s +\d+\.\d\d +(.*)$", shown, re.M)
    m = int(re.findall(r"(\d+) micro-batches of", shown)[0])
    assert [way for way, _ in ways] == [
        "plain model, 1 device", "GPipe, 2 devices", "1F1B, 2 devices",
        f"plain model, {torch.get_num_threads()} threads",
    ]  # fmt: skip
    assert [held for _, held in ways][1:3] == [f"{m} of {m}", f"{min(3, m)} of {m}"]
    assert re.search(rf"ideal.* {2 * m / (m + 1):.2f}$", shown, re.M)
    assert "<svg" in Path("step.svg").read_text()
    lines = shown.splitlines()
    assert lines[-1].endswith("reads the picture.")
    assert len(lines) <= 38  # and ten epochs more on one screen
    assert max(map(len, lines)) <= 80


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("count", [1, 8])
def test_a_run_without_matplotlib_on_one_device_and_on_more_than_layers(
    count: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without("matplotlib", monkeypatch)
    names = [f"cpu:{k}" for k in range(count)]
    shown = run(capsys, "--devices", ",".join(names), "--chunks", "8", "--seed", "7")
    assert "8 micro-batches of 16 images" in shown
    assert f"layers on {', '.join(names[:7])}, by" in " ".join(shown.split())
    assert 'a picture needs matplotlib: pip install "syncpipe[plot]"' in " ".join(shown.split())
    assert re.search(r"^ +busy +idle +host +forward +backward", shown, re.M)
    assert not list(Path().iterdir())


@pytest.mark.gpu
@pytest.mark.usefixtures("short")
def test_a_run_on_accelerators(capsys: pytest.CaptureFixture[str]) -> None:
    devices = [str(acc.device(k)) for k in range(min(acc.count(), len(demo.resnet())))]
    shown = run(capsys, "--devices", ",".join(devices), "--chunks", "4")
    assert f"layers on {', '.join(devices)}, by" in " ".join(shown.split())
    assert "OK: the pipe computes what the plain model computes" in shown
    assert "4. The gain: a step of 32 images" in shown
    assert "all cores of a CPU" not in shown


@pytest.mark.gpu
def test_all_accelerators_are_taken_and_two_kinds_are_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = [str(device) for device in demo.default_devices()]
    several = [str(acc.device(k)) for k in range(acc.count())]
    assert found == (several if acc.count() > 1 else ["cpu:0", "cpu:1"])
    with pytest.raises(SystemExit, match="2"):
        main(["demo", "--devices", f"cpu:0,{acc.device(0)}"])
    assert "devices of one kind" in capsys.readouterr().err


@pytest.mark.usefixtures("short")
def test_a_pipe_that_is_wrong_is_noticed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """BatchNorm sees micro-batches, which is what ``verify`` finds."""
    model = demo.resnet(torch.nn.BatchNorm2d)
    monkeypatch.setattr(demo, "resnet", lambda: model)
    for step in ("train", "draw"):
        monkeypatch.setattr(demo, step, lambda *_: None)
    monkeypatch.setattr(demo, "measure", lambda *_: 2.0)
    assert main(["demo"]) == 1
    shown = capsys.readouterr().out
    assert "NOT OK" in shown
    assert "does not win" not in shown


@pytest.mark.usefixtures("short")
def test_ctrl_c_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "train", interrupted)
    assert main(["demo", "--devices", "cpu"]) == 130
    assert capsys.readouterr().err == "\npython -m syncpipe demo: interrupted\n"


def test_a_reader_that_has_enough_ends_it_quietly() -> None:
    """As ``| head -1`` does."""
    arguments = [sys.executable, "-m", "syncpipe", "demo", "--epochs", "1", "--devices", "cpu:0"]
    with subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith("syncpipe ")
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141
