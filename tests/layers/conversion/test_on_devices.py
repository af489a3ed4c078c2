"""Devices that a model's forward names are those of its stages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from syncpipe import Pipe, sequential
from tests.layers.conversion.models import Does
from tests.support import accelerator as acc

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("four_devices")]


def named(m: Any, x: Tensor) -> Tensor:
    first = str(m.one.weight.device) if m.home is None else m.home
    x = m.two(m.one(x) + torch.ones(4, device=first)).relu()
    return m.three(x + torch.arange(4).to(first))


def split(m: Any, x: Tensor) -> Tensor:
    return m.three(m.two(m.one(x.to(m.first)).to(m.second)))


@pytest.mark.parametrize("kind", ["named", "split"])
def test_names_of_devices_and_a_split_by_hand_are_followed(kind):
    first, second = acc.device(0), acc.device(1)
    model = Does(named if kind == "named" else split, three=nn.Linear(4, 3))
    model.one, model.two, model.home = nn.Linear(4, 4), nn.Linear(4, 4), str(first)
    model.first, model.second = first, second
    model.to(first)
    if kind == "split":
        model.two.to(second)
        model.three.to(second)
    x = torch.randn(8, 4, device=first)
    expected = model(x).cpu()
    pipe = Pipe(sequential(model, x[:2]), "uniform", devices=[second, first], chunks=4)
    found = pipe(x.to(second))
    assert torch.allclose(found.cpu(), expected, atol=1e-6)
    found.sum().backward()
    assert all(pipe.get_parameter(f"{name}.weight").grad is not None for name in ("one", "three"))
