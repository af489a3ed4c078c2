"""``python -m syncpipe demo``: its arguments, short runs, and what it says without its extras."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from syncpipe.commands import demo
from syncpipe.commands.main import main
from tests.support import accelerator as acc
from tests.support.running import raising


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
    ("devices", "reason"),
    [
        ("cpu:0,", "'' is not a device"),
        ("cpu:128", "PyTorch supports indices 0 to 127"),
        ("cpu:0,tpu", "'tpu' is not a device"),
        ("cuda:99", "'cuda:99' is"),
        ("99", "99 is"),
    ],
)
@pytest.mark.usefixtures("short")
def test_devices_that_are_not_here(
    devices: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--devices", devices]) == 2
    error = capsys.readouterr().err
    assert error.startswith("demo: ")
    assert reason in error


def test_without_scikit_learn(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without("sklearn", monkeypatch)
    assert main(["demo"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert 'pip install "syncpipe[demo]"' in err


def run(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """What a short run shows."""
    assert main(["demo", "--epochs", "2", *options]) == 0
    return capsys.readouterr().out


@pytest.mark.usefixtures("short")
def test_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    shown = run(capsys, "--devices", "cpu:0,cpu:1")
    parts = re.findall(r"^\d\. The (\w+)", shown, re.M)
    assert parts == ["plan", "check", "training", "gain", "timeline"]
    assert "layers on cpu:0, cpu:1, by " in shown
    assert "OK: the pipe computes what the plain model computes" in " ".join(shown.split())
    assert len(re.findall(r"^   epoch  \d: loss .*, test accuracy .*%$", shown, re.M)) == 2
    ways = re.findall(r"^   (.*\S) +\d+\.\d+ m?s +\d+\.\d\d +(.*)$", shown, re.M)
    m = int(re.findall(r"(\d+) micro-batches", shown)[0])
    assert ways == [
        ("plain model, 1 device", "the mini-batch"),
        ("GPipe, 2 devices", f"{m} of {m}"),
        ("1F1B, 2 devices", f"{min(3, m)} of {m}"),
        (f"plain model, {torch.get_num_threads()} threads", "the mini-batch"),
    ]
    assert re.search(rf"ideal.* {2 * m / (m + 1):.2f}$", shown, re.M)
    assert Path("syncpipe-demo.png").stat().st_size > 1000
    assert max(map(len, shown.splitlines())) <= 100


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("count", [1, 8])
def test_a_run_without_matplotlib_on_one_device_and_on_more_than_layers(
    count: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without("matplotlib", monkeypatch)
    names = [f"cpu:{k}" for k in range(count)]
    shown = run(capsys, "--devices", ",".join(names))
    assert f"layers on {', '.join(names[:7])}, by" in shown
    assert f"GPipe, {min(count, 7)} device{'s' * (count > 1)} " in shown
    assert 'a picture needs matplotlib: pip install "syncpipe[plot]"' in " ".join(shown.split())
    assert re.search(r"^ +busy +idle +host +forward +backward", shown, re.M)
    assert not list(Path().iterdir())


@pytest.mark.gpu
@pytest.mark.usefixtures("short")
def test_a_run_on_accelerators(capsys: pytest.CaptureFixture[str]) -> None:
    devices = [str(acc.device(k)) for k in range(min(acc.count(), len(demo.resnet())))]
    shown = run(capsys)
    expected = devices if len(devices) > 1 else ["cpu:0", "cpu:1"]
    assert f"layers on {', '.join(expected)}, by" in shown
    assert "OK: the pipe computes what the plain model computes" in " ".join(shown.split())


@pytest.mark.usefixtures("short")
def test_a_pipe_that_is_wrong_is_noticed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """BatchNorm sees micro-batches, which is what ``verify`` finds."""
    model = demo.resnet(torch.nn.BatchNorm2d)
    monkeypatch.setattr(demo, "resnet", lambda: model)
    for step in ("train", "measure"):
        monkeypatch.setattr(demo, step, lambda *_: None)
    assert main(["demo", "--devices", "cpu:0,cpu:1"]) == 1
    assert "NOT OK" in capsys.readouterr().out


@pytest.mark.usefixtures("short")
def test_ctrl_c_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "train", raising(KeyboardInterrupt))
    assert main(["demo", "--devices", "cpu"]) == 130
    assert capsys.readouterr().err == "\npython -m syncpipe demo: interrupted\n"


def test_a_reader_that_has_enough_ends_it_quietly() -> None:
    """As ``| head -1`` does."""
    arguments = [sys.executable, "-u", "-m", "syncpipe", "demo", "--devices", "cpu:0"]
    with subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith("syncpipe ")
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141
