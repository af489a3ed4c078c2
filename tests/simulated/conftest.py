"""These tests are collected where the simulated machine is loaded.

That is in a process that is started with ``SYNCPIPE_SIMULATED=1``: the devices cannot be unloaded,
and other tests expect a machine without accelerators. ``tests/test_simulated.py`` starts such ones.
"""

from __future__ import annotations

from pathlib import Path

from tests import simulated


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    return True if collection_path.name.startswith("test_") and not simulated.loaded() else None
