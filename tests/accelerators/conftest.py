from __future__ import annotations

import pytest

from syncpipe.stages import offload


@pytest.fixture
def offloads_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of any size are offloaded."""
    monkeypatch.setattr(offload, "SMALL", 1)
