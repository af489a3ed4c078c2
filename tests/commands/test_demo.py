"""``python -m syncpipe demo``: its arguments, short runs, and what it says without its extras."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from syncpipe import Pipe
from syncpipe.commands import demo, demo_data, demo_options
from syncpipe.commands.demo_gain import Stored, held
from syncpipe.commands.demo_model import MOST_STAGES, crossing_skips, resnet
from syncpipe.commands.main import main
from tests.support import accelerator as acc

HEADINGS = ("1. The plan", "2. The check", "3. The training", "4. The gain", "5. The timeline")


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Little to measure, and one mini-batch an epoch, and a folder for the picture."""
    whole = demo_data.load_digits()
    size = demo_data.BATCH_SIZE
    few = demo_data.Digits(
        whole.train_images[:size], whole.train_labels[:size],
        whole.test_images[:40], whole.test_labels[:40],
    )  # fmt: skip
    monkeypatch.setattr(demo, "load_digits", lambda: few)
    monkeypatch.setattr(demo, "CPU_BATCH", 128)
    monkeypatch.setattr(demo, "ACCELERATOR_BATCH", 32)
    monkeypatch.setattr(demo, "PLAN_SECONDS", 0.05)
    monkeypatch.setattr(demo, "TIMED_SECONDS", 0.0)
    monkeypatch.setattr(demo, "TRACED_STEPS", 1)
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
        (["--chunks", "0"], "argument --chunks: '0' does not divide a mini-batch of 128 images"),
        (["--chunks", "3"], "argument --chunks: '3'"),
        (["--chunks", "two"], "argument --chunks: 'two'"),
        (["--epochs", "0"], "argument --epochs: '0'"),
        (["--seed", "-1"], "argument --seed: '-1'"),
        (["--seed", str(2**32)], f"argument --seed: '{2**32}'"),
        (["--picture", "step.gif"], "argument --picture: 'step.gif' must end in .png or .svg"),
        (["--picture", "no/such/step.png"], "there is no folder 'no/such'"),
        (["--devices", ""], "argument --devices: there is no device ''"),
        (["--devices", "cpu:0,"], "argument --devices: there is no device ''"),
        (["--devices", "cpu:128"], "argument --devices: there is no device 'cpu:128'"),
        (["--devices", "cpu:-1"], "argument --devices: there is no device 'cpu:-1'"),
        (["--devices", "cpu:0,tpu"], "argument --devices: there is no device 'tpu'"),
        (["--devices", "meta"], "argument --devices: there is no device 'meta'"),
        (["--devices", "cuda:99"], "argument --devices: there is no device 'cuda:99'"),
        (["--devices", "0,99"], "argument --devices: there is no device"),
        (["--devices", "cpu:1,cpu:1"], "argument --devices: cpu:1 is named twice"),
    ],
)
def test_wrong_arguments(argv: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["demo", *argv])
    message = capsys.readouterr().err
    assert message.startswith("usage: python -m syncpipe demo")
    assert reason in message


@pytest.mark.parametrize("module", ["sklearn", "tqdm"])
def test_missing_extra(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without(module, monkeypatch)
    assert main(["demo"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert 'pip install "syncpipe[demo]"' in err
    assert module in err


def run(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """What a short run shows."""
    assert main(["demo", "--epochs", "2", *options]) == 0
    return capsys.readouterr().out


@pytest.mark.usefixtures("short")
def test_a_run_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    shown = run(capsys, "--picture", "step.svg")
    assert [line for line in HEADINGS if f"\n{line}" not in shown] == []
    assert "devices    cpu:0, cpu:1 (no accelerator here" in shown
    assert "gradients are equal to the plain model's, bit for bit" in shown
    assert len(re.findall(r"^   epoch  \d: loss .*, test accuracy .*%$", shown, re.M)) == 2
    assert re.findall(r"^   (plain model|GPipe|1F1B), .* \d+\.\d\d +\d.* MB$", shown, re.M) == [
        "plain model", "GPipe", "1F1B",
    ]  # fmt: skip
    m = int(re.findall(r"(\d+) micro-batches of", shown)[0])
    assert f"{2 * m / (m + 1):.2f}   for n = 2 stages, m = {m} micro-batches" in shown
    assert "threads of this CPU the plain model takes" in shown
    assert "<svg" in Path("step.svg").read_text()
    assert "measured above simulated: step.svg\n" in shown
    assert shown.splitlines()[-1].endswith("reads the picture.")
    assert "\r" not in shown
    lines = shown.splitlines()
    assert len(lines) <= 32  # and ten epochs more on one screen
    assert max(map(len, lines)) <= 100


@pytest.mark.usefixtures("short")
def test_a_run_without_matplotlib_on_one_device(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without("matplotlib", monkeypatch)
    shown = run(capsys, "--devices", "cpu", "--chunks", "4", "--seed", "7")
    assert "schedule   " in shown
    assert "4 micro-batches of 32 images" in shown
    assert 'a picture needs matplotlib: pip install "syncpipe[plot]"' in shown
    assert re.search(r"^ +busy +idle +host +forward +backward$", shown, re.M)
    assert not list(Path().iterdir())
    assert "bit for bit" in shown


@pytest.mark.usefixtures("short")
def test_a_terminal_gets_a_bar(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without("matplotlib", monkeypatch)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    many = ",".join(f"cpu:{k}" for k in range(MOST_STAGES + 1))
    shown = run(capsys, "--devices", many, "--chunks", "8")
    assert "epoch  2: loss" in shown.split("\r")[-1]
    assert "| 2/2 [" in shown.split("\r")[-1]
    assert f"cpu:{MOST_STAGES - 1} (the first {MOST_STAGES} of {MOST_STAGES + 1}" in shown
    assert "bit for bit" in shown


@pytest.mark.gpu
@pytest.mark.usefixtures("short")
def test_a_run_on_accelerators(capsys: pytest.CaptureFixture[str]) -> None:
    devices = [str(acc.device(k)) for k in range(min(acc.count(), MOST_STAGES))]
    shown = run(capsys, "--devices", ",".join(devices), "--chunks", "4")
    assert f"devices    {', '.join(devices)}\n" in shown
    assert "WRONG" not in shown
    assert "stored activations" not in shown
    assert "4. The gain: forward and backward of 32 images" in shown
    assert "threads of this CPU" not in shown


@pytest.mark.gpu
def test_all_accelerators_are_taken_and_cpu_workers_beside_a_lone_one() -> None:
    found = [str(device) for device in demo_options.default_devices()]
    several = [str(acc.device(k)) for k in range(acc.count())]
    assert found == (several if acc.count() > 1 else ["cpu:0", "cpu:1"])


@pytest.mark.gpu
def test_devices_of_two_kinds_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["demo", "--devices", f"cpu:0,{acc.device(0)}"])
    assert "of two kinds" in capsys.readouterr().err


@pytest.mark.usefixtures("short")
def test_a_wrong_first_step_is_noticed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    honest = demo.plain_step

    def slightly_off(model: Any, *args: Any) -> torch.Tensor:
        loss = honest(model, *args)
        next(model.parameters()).grad.view(-1)[0] *= 1.00001
        return loss

    monkeypatch.setattr(demo, "plain_step", slightly_off)
    for step in ("train", "_draw", "_close"):
        monkeypatch.setattr(demo, step, lambda *_: None)
    monkeypatch.setattr(demo, "_gain", lambda *_: 1.0)
    assert main(["demo"]) == 1
    assert "WRONG" in capsys.readouterr().out


@pytest.mark.usefixtures("short")
def test_ctrl_c_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "train", interrupted)
    assert main(["demo", "--devices", "cpu"]) == 130
    assert capsys.readouterr().err == "\npython -m syncpipe demo: interrupted\n"


@pytest.mark.parametrize(
    ("speed_up", "devices", "says"),
    [(1.5, 2, ""), (0.9, 2, "2 workers have 1 core between them"), (1.0, 1, "nothing to share")],
)
def test_the_last_line_says_whether_the_pipe_wins(
    speed_up: float, devices: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    nothing: Any = None
    cpu = [torch.device("cpu", j) for j in range(devices)]
    demo._close(demo.Demo(nothing, cpu, nothing, nothing, nothing, all_threads=1), speed_up)
    shown = capsys.readouterr().out
    assert says in shown
    assert ("does not win" in shown) == (speed_up <= 1)
    assert "docs/guide.md" in shown


def test_what_is_stored_is_counted_to_the_byte() -> None:
    """Of each sample the second layer stores 8 numbers, and so does the third."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2))
    x = torch.rand(6, 4)
    mini_batch, parameters = 6 * 4 * 4, (5 * 8 + 9 * 8 + 9 * 2) * 4
    plain = held(lambda: model(x).sum().backward(), [model], [torch.device("cpu")])
    assert plain == 2 * parameters + mini_batch + 2 * 6 * 32

    pipe = Pipe(model, [2, 1], devices=["cpu:0", "cpu:1"], chunks=6, checkpoint="never")
    for schedule, in_flight in (("gpipe", [6, 6]), ("1f1b", [2, 1])):
        step = partial(pipe.train_batch, x, loss_fn=torch.sum, loss_reduction="sum")
        step()  # in its first forward a pipe learns what layers do
        with Stored(pipe.partitions) as stored:
            step(schedule=schedule, slots="textbook" if schedule == "1f1b" else None)
        assert stored.most == {0: mini_batch + in_flight[0] * 32, 1: in_flight[1] * 32}


@pytest.mark.parametrize(("balance", "crossing"), [([19], 0), ([3, 16], 1), ([3, 5, 11], 2)])
def test_crossing_skips(balance: list[int], crossing: int) -> None:
    assert len(resnet()) == sum(balance)
    assert crossing_skips(balance) == crossing
