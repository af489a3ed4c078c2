"""The processes, started once for the tests of this folder, and ended after them."""

from __future__ import annotations

import pytest
from torch import distributed

from tests.distributed.processes import ranks


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    there = distributed.is_available() and distributed.is_gloo_available()
    for item in items:
        if item.path.parent.name == "distributed" and not there:
            item.add_marker(pytest.mark.skip(reason="needs gloo"))


@pytest.fixture(scope="package")
def two(tmp_path_factory):
    """Two processes."""
    with ranks(2, tmp_path_factory.mktemp("two")) as found:
        yield found


@pytest.fixture(scope="package")
def three(tmp_path_factory):
    """Three processes."""
    with ranks(3, tmp_path_factory.mktemp("three")) as found:
        yield found
