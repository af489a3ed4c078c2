"""Tests on the simulated machine run in a process of their own.

The devices cannot be unloaded, and other tests expect a machine without accelerators. So these
tests run when pytest is asked for nothing else (``pytest tests/simulated``), and are passed over
when it is asked for more; ``tests/test_simulated.py`` then starts such a process.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests import simulated

_HERE = Path(__file__).parent


def _only_these(config: pytest.Config) -> bool:
    paths = [Path(str(argument).split("::")[0]).resolve() for argument in config.args]
    inside = [path == _HERE or _HERE in path.parents for path in paths]
    if any(inside) and not all(inside):
        raise pytest.UsageError(f"run {_HERE} alone: its devices are there for all tests of a run")
    return all(inside)


def pytest_configure(config: pytest.Config) -> None:
    if _only_these(config) and simulated.unavailable() is None:
        simulated.load()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return True if collection_path.name.startswith("test_") and not _only_these(config) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = simulated.unavailable()
    for item in items:
        if reason is not None and _HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def at_rest() -> Iterator[None]:
    """Each test starts and ends on device 0 and its default stream, with nothing under way."""
    yield
    for device in simulated.devices():
        torch.accelerator.synchronize(device)
        assert torch.accelerator.current_stream(device).stream_id == 0
    assert torch.accelerator.current_device_index() == 0
