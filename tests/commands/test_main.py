"""``python -m syncpipe`` without a command, its version, and the console script."""

from __future__ import annotations

import ast
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

import syncpipe
from syncpipe.commands.main import main

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
    assert torch.__version__ in shown


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["dmeo"], "dmeo"),
        (["--verison"], "--verison"),
        (["demo", "--epochs", "0"], "argument --epochs: '0' is not a whole number from 1 to"),
        (["demo", "--epochs", "two"], "argument --epochs: 'two'"),
        *(
            (["plan", "model", "--devices=2", "--batch-size=8", option, value], reason)
            for option, value, reason in (
                ("--sample", "8x", "'8x' is no shape"),
                ("--sample", "0x3", "'0x3' is no shape"),
                ("--sample", "8x3:float33", "is no shape such as"),
                ("--chunks", "0", "'0' is not a whole number from 1"),
                ("--picture", "no/such/step.svg", "is no file in a folder that is there"),
                ("--picture", "step.gif", "must end in .svg or .png or .json"),
                ("--profile", ".", "'.' is no file"),
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
