"""The scripts of docs/examples, in a tiny size: they run, print what their page says, and train as
the plain loop does.
"""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import syncpipe
from syncpipe.training.extensions import BACKWARD
from tests.test_docs import ROOT, blocks_of, new_session

FOLDER = ROOT / "docs" / "examples"
PAGE = FOLDER / "README.md"
#: Of the plan, which depends on the machine.
PLAN = ("fits:", "speed:", "limited by:")


class Plain(nn.Module):
    """Stands for a ``Pipe``, and runs the model micro-batch by micro-batch."""

    def __init__(self, model: nn.Module, *_: Any, chunks: int = 4, **__: Any) -> None:
        super().__init__()
        self.model, self.chunks, self.devices = model, chunks, [torch.device("cpu")]

    @classmethod
    def auto(cls, model: nn.Module, *_: Any, **__: Any) -> Plain:
        return cls(model)

    def __len__(self) -> int:
        return len(self.model)  # type: ignore[arg-type]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        torch.empty((), dtype=torch.int64).random_()  # a pipe draws a seed in each call
        return self.model(*args, **kwargs)

    def train_batch(self, input: Any, target: Tensor, *, loss_fn: Any) -> Any:
        torch.empty((), dtype=torch.int64).random_()
        if not isinstance(input, (Tensor, dict)):  # the mean of equal parts is that of the whole
            loss = loss_fn(self.model(input), target)
            loss.backward()
            return loss.detach()
        total = torch.zeros(())
        inputs = input.values() if isinstance(input, dict) else (input,)
        names = input if isinstance(input, dict) else ()
        for *piece, goal in zip(*(x.chunk(self.chunks) for x in (*inputs, target)), strict=True):
            output = (
                self.model(**dict(zip(names, piece, strict=True))) if names else self.model(*piece)
            )
            loss = loss_fn(output, goal) * len(goal) / len(target)
            loss.backward()
            total += loss.detach()
        return total

    def eval_batch(self, input: Any, target: Any = None, *, loss_fn: Any = None) -> Any:
        self.eval()
        with torch.no_grad():
            output = self(input)
        self.train()
        return output if loss_fn is None else loss_fn(output, target)


def printed(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """What a script prints in its tiny size, without the plan."""
    monkeypatch.setattr(sys, "argv", [name, "--tiny"])
    torch.manual_seed(0)
    capsys.readouterr()
    path = FOLDER / name
    with new_session("__main__") as session:
        exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), session)
    lines = capsys.readouterr().out.splitlines()
    return [line for line in lines if not line.startswith(PLAN)]


NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def without_numbers(lines: list[str]) -> list[str]:
    return [NUMBER.sub("#", line) for line in lines]


def numbers(lines: list[str]) -> list[float]:
    return [float(found) for line in lines for found in NUMBER.findall(line)]


def assert_on_the_page(name: str, lines: list[str]) -> None:
    """The page says that a script prints such lines."""
    text = PAGE.read_text(encoding="utf-8")
    line = text[: text.index(f"]({name})")].count("\n")
    shown = next(b.text for b in blocks_of(PAGE) if b.language == "text" and b.line > line)
    assert set(without_numbers(lines)) <= set(without_numbers(shown.splitlines()))


def check(name: str, capsys: Any, monkeypatch: Any) -> None:
    """A script prints what the page says, and the same losses with the plain model."""
    piped = printed(name, capsys, monkeypatch)
    assert_on_the_page(name, piped)
    monkeypatch.setattr(syncpipe, "Pipe", Plain)
    plain = printed(name, capsys, monkeypatch)
    assert without_numbers(piped) == without_numbers(plain)
    assert numbers(piped) == pytest.approx(numbers(plain), rel=0.02, abs=0.01)


@pytest.mark.parametrize("name", ["classifier.py", "resnext.py", "unet.py", "gan.py"])
def test_an_example_trains_as_the_plain_loop_does(name, capsys, monkeypatch):
    pytest.importorskip("sklearn")
    check(name, capsys, monkeypatch)


def test_an_extension_rounds_the_gradients_that_cross_a_boundary(capsys, monkeypatch):
    (line,) = lines = printed("compression.py", capsys, monkeypatch)
    assert_on_the_page("compression.py", lines)
    assert 1e-4 < numbers([line])[0] < 1e-2
    assert "compressed" not in [each.__name__ for each in BACKWARD]


def test_every_example_is_on_the_page():
    names = {path.name for path in FOLDER.glob("*.py")}
    assert names == set(re.findall(r"\]\((\w+\.py)\)", PAGE.read_text(encoding="utf-8")))
