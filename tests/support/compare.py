"""The one comparison of what a pipe computes with what it should."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


def assert_same(
    actual: Any,
    expected: Any,
    what: str = "",
    *,
    rounded: Collection[str] | bool = (),
    rtol: float = 1e-4,
    atol: float = 1e-5,
) -> None:
    """Same structure, and each leaf the same to the last bit: values, shape and dtype.

    Args:
        actual: any tree; dataclasses are compared field by field.
        expected: the same.
        what: they are, for the message.
        rounded: the fields, or keys, that are equal to rounding only; True for all.
        rtol, atol: of these.
    """
    actual, expected = _plain(actual), _plain(expected)
    ours, spec = pytree.tree_flatten(actual)
    theirs, other_spec = pytree.tree_flatten(expected)
    assert spec == other_spec, f"{what}: {spec} instead of {other_spec}"
    paths = [path for path, _ in pytree.tree_leaves_with_path(expected)]
    for path, a, b in zip(paths, ours, theirs, strict=True):
        name = f"{what}{pytree.keystr(path)}"
        if not isinstance(a, Tensor) or not isinstance(b, Tensor):
            assert a is b or a == b, f"{name}: {a} instead of {b}"
            continue
        assert a.dtype == b.dtype, f"{name}: {a.dtype} instead of {b.dtype}"
        assert a.shape == b.shape, f"{name}: {a.shape} instead of {b.shape}"
        if rounded is True or (rounded and path and _key(path[0]) in rounded):
            same = torch.allclose(a, b, rtol=rtol, atol=atol, equal_nan=True)
        else:
            same = bool(((a == b) | ((a != a) & (b != b))).all())
        assert same, f"{name} differs by {(a - b).abs().max()}: {a}\ninstead of\n{b}"


def _plain(tree: Any) -> Any:
    if is_dataclass(tree) and not isinstance(tree, type):
        return {field.name: getattr(tree, field.name) for field in fields(tree)}
    return tree


def _key(entry: Any) -> Any:
    return getattr(entry, "key", getattr(entry, "idx", entry))
