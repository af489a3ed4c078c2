"""Equal to the bit, equal to rounding, or different."""

from __future__ import annotations

import math

import pytest
import torch

from syncpipe.compare import compare
from syncpipe.verification.plain import by_name

A = torch.tensor([1.0, -2.0, 0.5])
SMALL = torch.float8_e4m3fn  # for which PyTorch has few operations


@pytest.mark.parametrize(
    ("actual", "expected", "status"),
    [
        (A, A.clone(), "equal"),
        (torch.tensor([0.0, math.nan]), torch.tensor([-0.0, math.nan]), "equal"),
        (A, A * (1 + 1e-6), "rounding"),
        (A, A * 1.01, "different"),
        (A.double(), A.double() * (1 + 1e-6), "different"),
        (A.bfloat16(), (A * 1.01).bfloat16(), "rounding"),
        (A, A.double(), "different"),
        (A, A[:2], "different"),
        (A, None, "different"),
        (torch.tensor([1.0, math.nan]), torch.tensor([1.0, 2.0]), "different"),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), "different"),
        (None, None, "equal"),
        (3, 4, "different"),
        (math.nan, float("nan"), "equal"),
        (A.to(SMALL), A.to(SMALL), "equal"),
        (A.to(SMALL), (2 * A).to(SMALL), "different"),
        ("a", "a", "equal"),
    ],
)
def test_of_one_value(actual, expected, status):
    assert compare({"x": actual}, {"x": expected}).status == status


def test_of_many():
    expected = {"a": A, "b": A, "c": A}
    found = compare({"a": A, "b": A * 1.5, "c": A * 1.1}, expected)
    assert (found.names, found.at) == (("b", "c"), "b")
    assert found.distance == pytest.approx(0.5)
    assert compare({}, {}).status == "none"
    assert compare({"a": A}, expected).names == ("b", "c")
    # What cancels out is rounded as what it cancelled.
    noise = {"bias": torch.tensor([3e-8]), "weight": torch.tensor([1.0])}
    assert compare(noise, {**noise, "bias": torch.tensor([-1e-8])}).status == "rounding"


def test_a_tree_by_name():
    tree = {"x": [A.clone().requires_grad_(), 3], "s": A.to_sparse()}
    values = by_name("output", tree)
    assert list(values) == ["output['x'][0]", "output['x'][1]", "output['s']"]
    assert compare(values, {**values, "output['s']": A}).status == "equal"
