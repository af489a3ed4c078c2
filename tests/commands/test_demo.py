"""``python -m syncpipe demo``: its arguments, one short run, and what it says without its extra."""

import re
import sys

import pytest
import torch

from syncpipe.__main__ import main
from syncpipe.commands import demo, demo_options
from syncpipe.commands.demo_model import BLOCKS, crossing_skips, even_balance, layer_times, resnext
from tests.support import accelerator as acc

LAYERS = 3 + 5 * len(BLOCKS)


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        ([], "COMMAND"),
        (["dmeo"], "invalid choice: 'dmeo'"),
        (["demo", "--chunks", "0"], "argument --chunks: '0' is not a whole number from 1 to 128"),
        (["demo", "--chunks", "129"], "argument --chunks: '129'"),
        (["demo", "--chunks", "two"], "argument --chunks: 'two'"),
        (["demo", "--checkpoint", "sometimes"], "argument --checkpoint: invalid choice"),
        (["demo", "--epochs", "0"], "argument --epochs: '0'"),
        (["demo", "--seed", "-1"], "argument --seed: '-1'"),
        (["demo", "--seed", str(2**32)], f"argument --seed: '{2**32}'"),
        (["demo", "--devices", ""], "argument --devices: there is no device ''"),
        (["demo", "--devices", "cpu:0,"], "argument --devices: there is no device ''"),
        (["demo", "--devices", "cpu:128"], "argument --devices: there is no device 'cpu:128'"),
        (["demo", "--devices", "cpu:-1"], "argument --devices: there is no device 'cpu:-1'"),
        (["demo", "--devices", "cpu:0,tpu"], "argument --devices: there is no device 'tpu'"),
        (["demo", "--devices", "meta"], "argument --devices: there is no device 'meta'"),
        (["demo", "--devices", "cuda:99"], "argument --devices: there is no device 'cuda:99'"),
        (["demo", "--devices", "0,99"], "argument --devices: there is no device"),
    ],
)
def test_wrong_arguments(argv: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 2
    message = capsys.readouterr().err
    assert message.startswith("usage: python -m syncpipe")
    assert reason in message


@pytest.mark.parametrize("module", ["sklearn", "tqdm"])
def test_missing_extra(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    assert main(["demo"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert 'pip install "syncpipe[demo]"' in err
    assert module in err


@pytest.mark.parametrize(
    ("options", "stages"),
    [
        (["--checkpoint", "always", "--chunks", "3"], 2),
        (["--devices", "cpu:0,cpu:1,cpu:2", "--checkpoint", "never"], 3),
        (["--devices", "cpu", "--seed", "7"], 1),
        (["--devices", ",".join(f"cpu:{k}" for k in range(8)), "--chunks", "2"], len(BLOCKS)),
    ],
)
def test_short_run(
    options: list[str],
    stages: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(demo_options, "accelerators", list)  # the CPU, whatever the machine
    monkeypatch.setattr(demo, "TIMED_ROUNDS", 1)
    threads = torch.get_num_threads()
    assert main(["demo", "--epochs", "1", *options]) == 0
    assert torch.get_num_threads() == threads
    shown = capsys.readouterr().out
    assert "gradients are bitwise equal to the plain model's" in shown
    assert "Test accuracy: " in shown
    assert "plain, same micro-batches" in shown
    assert "plain, whole mini-batch" in shown
    assert f"cpu:{stages - 1}\n" in shown
    assert f"cpu:{stages}" not in shown
    assert re.search(r"Skips:      \d of", shown)  # how many depends on what was measured
    assert ("one per residual block" in shown) == (stages == len(BLOCKS))


@pytest.mark.gpu
def test_short_run_on_accelerators(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "TIMED_ROUNDS", 1)
    assert main(["demo", "--epochs", "1"]) == 0
    shown = capsys.readouterr().out
    devices = [str(acc.device(k)) for k in range(min(acc.count(), len(BLOCKS)))]
    assert f"Devices:    {', '.join(devices)}\n" in shown
    assert "Test accuracy: " in shown


def test_wrong_gradients_are_noticed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    honest = demo._by_pipe
    monkeypatch.setattr(demo_options, "accelerators", list)
    monkeypatch.setattr(demo, "TIMED_ROUNDS", 1)
    monkeypatch.setattr(demo, "_by_pipe", lambda pipe, images: honest(pipe, images) * 1.000001)
    assert main(["demo", "--epochs", "1"]) == 1
    assert "WRONG" in capsys.readouterr().out


@pytest.mark.parametrize("partitions", range(1, len(BLOCKS) + 1))
def test_even_balance(partitions: int) -> None:
    balance = even_balance([1.0] * LAYERS, partitions)
    assert len(balance) == partitions
    assert sum(balance) == LAYERS
    # The best there is, plus one layer where that border would fall between two blocks.
    assert max(balance) <= -(-LAYERS // partitions) + 1
    assert crossing_skips(balance) == partitions - 1


def test_layer_times_leave_the_model_alone() -> None:
    model = resnext()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    times = layer_times(model, torch.rand(4, 1, 8, 8), repeats=1)
    assert len(times) == len(model) == LAYERS
    assert all(0 < seconds < float("inf") for seconds in times)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
