"""``python -m benchmarks gpu`` runs on simulated devices, so that it works on real ones."""

from __future__ import annotations

import pytest
import torch

from benchmarks import __main__ as door
from benchmarks.gpu import PARTS
from tests import simulated


@pytest.mark.simulated
@pytest.mark.skipif(
    torch.accelerator.is_available() or simulated.unavailable() is not None,
    reason="there are no simulated devices",
)
@pytest.mark.parametrize("name", ["tests2", "overhead", "memory", "plan", "peers-gpt2"])
def test_a_part_runs_on_simulated_devices_and_writes_its_page(name, tmp_path):
    assert door.main(["gpu", name, "--quick", "--simulated", "--folder", str(tmp_path)]) == 0
    text = (tmp_path / f"gpu-{name}.md").read_text(encoding="utf-8")
    assert f"`python -m benchmarks gpu {name} --quick --simulated`" in text
    assert ("Skipped: PyTorch finds no CUDA GPU" in text) == name.startswith("peers")


def test_what_is_no_part_is_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        door.main(["gpu", "speed"])
    assert "no part 'speed': tests1" in capsys.readouterr().err
    assert door.main(["gpu", "--list"]) == 0
    assert capsys.readouterr().out.split() == list(PARTS)
