"""The scripts of docs/examples that need other libraries, in a tiny size."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from syncpipe.integrations import transformers
from tests.test_examples import assert_on_the_page, check, numbers, printed


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def plain(trainer: Any) -> Any:
    """Stands for ``pipelined``, on one device."""

    class Plain(trainer):  # type: ignore[misc]
        def __init__(self, *args: Any, pipe_kwargs: Any = None, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.pipe = SimpleNamespace(devices=[torch.device("cpu")])

    return Plain


@pytest.mark.filterwarnings("ignore")
def test_trl_trains_adapters(capsys, monkeypatch):
    for name in ("trl", "peft", "datasets"):
        pytest.importorskip(name)

    def losses() -> list[str]:
        lines = printed("sft_lora.py", capsys, monkeypatch)
        return [line for line in lines if line.startswith("step")]

    piped = losses()
    assert len(piped) == 2
    assert_on_the_page("sft_lora.py", piped)
    monkeypatch.setattr(transformers, "pipelined", plain)
    assert numbers(piped) == pytest.approx(numbers(losses()), abs=0.01)


def test_diffusers_train_adapters(capsys, monkeypatch):
    for name in ("diffusers", "peft", "sklearn"):
        pytest.importorskip(name)
    check("diffusion_lora.py", capsys, monkeypatch)


@pytest.mark.filterwarnings("ignore")
def test_graphs_are_cut(capsys, monkeypatch):
    for name in ("torch_geometric", "sklearn"):
        pytest.importorskip(name)
    check("graphs.py", capsys, monkeypatch)
