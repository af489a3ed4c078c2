"""The processes, started once for the tests of this folder, and ended after them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import distributed

from tests.distributed.processes import ranks


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    there = distributed.is_available() and distributed.is_gloo_available()
    for item in items:
        if not there and here in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="needs gloo"))
        if torch.__version__ < "2.13" and here / "stages" in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="needs PyTorch 2.13"))


def _started(size: int):
    def processes(tmp_path_factory):
        with ranks(size, tmp_path_factory.mktemp("ranks")) as found:
            yield found

    return pytest.fixture(scope="package")(processes)


two, three, four = map(_started, (2, 3, 4))
