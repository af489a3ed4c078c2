"""These tests are about the simulated machine itself; they are collected where it is loaded.

That is in a process that is started with ``SYNCPIPE_SIMULATED=1``: the devices cannot be unloaded,
and other tests expect a machine without accelerators. ``tests/test_simulated.py`` starts such ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests import simulated

_HERE = Path(__file__).parent


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    return True if collection_path.name.startswith("test_") and not simulated.loaded() else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(autouse=True)
def at_rest() -> Iterator[None]:
    """Each test starts and ends on device 0 and its default stream, with nothing under way."""
    yield
    for device in simulated.devices():
        torch.accelerator.synchronize(device)
        assert torch.accelerator.current_stream(device).stream_id == 0
    assert torch.accelerator.current_device_index() == 0
