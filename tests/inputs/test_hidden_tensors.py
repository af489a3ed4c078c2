"""Tensors in objects that no tree opens: refused where they would go whole to each micro-batch."""

from __future__ import annotations

from collections import UserDict, deque
from dataclasses import dataclass
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Independent, Normal
from torch.utils.data import DataLoader, TensorDataset

from syncpipe import Pipe, inline
from syncpipe.data import scatter
from tests.support.running import pipe_of


class Holds:
    """An object with attributes."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


class Slotted:
    """An object without a dictionary."""

    __slots__ = ("inner",)

    def __init__(self, inner: Any) -> None:
        self.inner = inner


def cyclic(x: Tensor) -> Holds:
    """Objects that hold each other."""
    outer = Holds(inner=Holds())
    outer.inner.outer = outer
    outer.inner.x = x
    return outer


@dataclass
class Counted:
    """A dataclass that computes something of its field once."""

    x: Tensor

    @cached_property
    def signs(self) -> Tensor:
        """Of the whole mini-batch, if it was asked for there."""
        return self.x.sign()


def asked(x: Tensor) -> Counted:
    """One that was asked."""
    made = Counted(x)
    assert len(made.signs) == len(x)
    return made


def with_attribute(x: Tensor) -> UserDict:
    """An entry that was set as an attribute by mistake."""
    made = UserDict({"a": torch.zeros(len(x))})
    made.labels = x
    return made


HIDDEN: dict[str, tuple[Any, str]] = {
    "object": (lambda x: Holds(x=x), ".x"),
    "dict in an object": (lambda x: Holds(inner={"a": x}), ".inner['a']"),
    "three levels": (lambda x: Holds(b=[SimpleNamespace(c=(5, x))]), ".b[0].c[1]"),
    "slots in slots": (lambda x: Slotted(Slotted(x)), ".inner.inner"),
    "deque": (lambda x: Holds(last=deque([x])), ".last[0]"),
    "cycle": (cyclic, ".inner.x"),
    "distribution": (lambda x: Independent(Normal(x, 1.0), 1), ".base_dist.loc"),
    "cached property": (asked, ".signs"),
    "attribute of a mapping": (with_attribute, ".labels"),
}


@pytest.mark.parametrize("what", HIDDEN)
@pytest.mark.parametrize("at", ["input", "target"])
def test_it_is_refused_and_named(what, at):
    make, where = HIDDEN[what]
    x = torch.randn(4, 3)
    thing = make(x)
    pipe = pipe_of(nn.Sequential(nn.Identity(), nn.Identity()), chunks=2)
    given = ((x, thing), x) if at == "input" else (x, thing)
    with pytest.raises(TypeError, match=f"^{at}") as caught:
        pipe.train_batch(*given, loss_fn=lambda y, target: y.sum())
    for part in (f"type {type(thing).__name__}", f"at {where} ", "dict", "NoChunk", "chunks=2"):
        assert part in str(caught.value)


def harmless() -> dict[str, Any]:
    """Objects with tensors that are no part of a mini-batch."""
    layer = nn.Linear(3, 3)
    loader = DataLoader(TensorDataset(torch.randn(8, 3)), batch_size=2, shuffle=True)
    return {
        "model": layer,
        "parameters": list(layer.parameters()),
        "dataset": loader.dataset,
        "loader": loader,
        "batches": iter(loader),
        "optimizer": torch.optim.Adam(layer.parameters()),
        "function": lambda x: x + layer.weight,
        "method": layer.forward,
        "generator": torch.Generator(),
        "number": torch.tensor(3.0),
        "module": torch,
    }


@pytest.mark.parametrize("what", harmless())
def test_what_an_object_works_with_is_no_part_of_a_mini_batch(what):
    thing = Holds(this=Holds(that=harmless()[what]), note="text")
    x = torch.randn(4, 3)
    pieces = scatter((x, thing), 2)
    assert [piece[1] for piece in pieces] == [thing, thing]


def test_entries_of_a_container_are_not_hidden():
    class Encoding(UserDict):
        pass

    given = Encoding({"a": torch.ones(4), "b": {"c": [torch.ones(4)]}})
    given.text = ["one", "two"]
    assert scatter(given, 2)[1]["b"]["c"][0].shape == (2,)


# --- between stages ----------------------------------------------------------------------------


class Wraps(nn.Linear):
    """Returns its result in an object, or takes it out of one."""

    def forward(self, value: Any) -> Any:
        if isinstance(value, Holds):
            return super().forward(value.inner.x)
        return Holds(inner=Holds(x=super().forward(value)))


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("chunks", [1, 2])
def test_an_object_with_a_graph_between_workers_is_refused_for_what_it_is(checkpoint, chunks):
    layers = nn.Sequential(Wraps(3, 3), Wraps(3, 3))
    x = torch.randn(4, 3)
    pipe = pipe_of(layers, checkpoint=checkpoint, chunks=chunks)
    for call in pipe, partial(pipe.train_batch, loss_fn=torch.sum):
        with pytest.raises(TypeError, match=r"Holds.* from stage 0 to stage 1.*\.inner\.x.*tuple"):
            call(x)
    assert all(p.grad is None for p in pipe.parameters())
    with inline(graph=True):
        pipe(x).sum().backward()
    theirs = [p.grad for p in pipe.parameters()]
    pipe = Pipe(layers, [1, 1], devices=["cpu:0"] * 2, checkpoint=checkpoint, chunks=chunks)
    pipe.zero_grad()
    pipe.train_batch(x, loss_fn=lambda y: y.sum(), loss_reduction="sum")
    torch.testing.assert_close([p.grad for p in pipe.parameters()], theirs)


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_an_object_with_tensors_that_need_no_gradient_goes_from_stage_to_stage(checkpoint):
    class Masks(nn.Linear):
        def forward(self, value: Any) -> Any:
            x, thing = value
            return super().forward(x) * thing.inner.x, thing

    pipe = pipe_of(nn.Sequential(Masks(3, 3), Masks(3, 3)), checkpoint=checkpoint, chunks=1)
    thing = Holds(inner=Holds(x=torch.randn(3), unused=nn.Parameter(torch.ones(3))))
    loss = pipe.train_batch((torch.randn(4, 3), thing), loss_fn=lambda y: y[0].sum())
    assert loss.isfinite()
