"""Mappings, dataclasses and the like as inputs, targets, outputs, and between layers."""

from __future__ import annotations

from collections import OrderedDict, UserDict, UserList, defaultdict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from syncpipe import NoChunk, Pipe
from syncpipe.data import gather, leaf_names, scatter
from tests.support.models import CHECKPOINT_MODES
from tests.support.training import weigh

DEVICES = ["cpu:0", "cpu:1", "cpu:2"]


class Encoding(UserDict):
    """Like what a tokenizer returns: attributes are entries, and some are not."""

    def __init__(self, data: Any = None, encodings: Any = None) -> None:
        super().__init__(data)
        self._encodings = encodings

    def __getitem__(self, item: Any) -> Any:
        return self.data[item] if isinstance(item, str) else self._encodings[item]

    def __getattr__(self, item: str) -> Any:
        try:
            return self.data[item]
        except KeyError:
            raise AttributeError(item) from None


class Ordered(OrderedDict):
    """No pytree, as all subclasses."""


class Default(defaultdict):
    """The same."""


class Listed(list):
    """The same."""


@dataclass
class Batch:
    """Fields of all kinds."""

    a: Any
    b: Any
    label: str = "batch"


@dataclass(frozen=True, slots=True)
class Frozen:
    """Fields that cannot be set, without a dictionary."""

    a: Any
    b: Any


@dataclass
class Made:
    """A field that its maker does not take."""

    a: Any
    b: Any = field(init=False)


def made(a: Any, b: Any) -> Made:
    """One with both fields."""
    result = Made(a)
    result.b = b
    return result


class Sub(namedtuple("Sub", "a b")):
    """A pytree, too."""

    __slots__ = ()


MAKERS: dict[str, Any] = {
    "UserDict": lambda a, b: UserDict({"a": a, "b": b}),
    "Encoding": lambda a, b: Encoding({"a": a, "b": b}, ["first"]),
    "OrderedDict": lambda a, b: Ordered(a=a, b=b),
    "defaultdict": lambda a, b: Default(int, a=a, b=b),
    "list": lambda a, b: Listed([a, b]),
    "UserList": lambda a, b: UserList([a, b]),
    "dataclass": Batch,
    "frozen": Frozen,
    "made": made,
    "namedtuple": Sub,
}
MAKE = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def entries(value: Any) -> tuple[Any, Any]:
    """The two values that a maker was given."""
    if hasattr(value, "keys"):
        return value["a"], value["b"]
    return (value.a, value.b) if hasattr(value, "a") else (value[0], value[1])


class Through(nn.Linear):
    """Takes what ``make`` makes, and returns another one."""

    def __init__(self, make: Any) -> None:
        super().__init__(3, 3)
        self.make, self.seen = make, []

    def forward(self, value: Any) -> Any:
        a, b = entries(value)
        self.seen.append((type(value), tuple(a.shape)))
        return self.make(super().forward(a), b)


@MAKE
@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("driver", ["pipe(x)", "mini-batch", "iterator"])
def test_inputs_targets_outputs_and_what_is_between_are_of_one_type(make, checkpoint, driver):
    layers = nn.Sequential(Through(make), Through(make), Through(make))
    pipe = Pipe(layers, [1, 1, 1], devices=DEVICES, chunks=3, checkpoint=checkpoint)
    x, mask, goal = torch.randn(6, 3), torch.randn(6, 3), torch.randn(6, 3)
    kind = type(make(x, mask))

    def loss_fn(output: Any, target: Any) -> Tensor:
        assert type(output) is type(target) is kind
        a, b = entries(target)
        return ((entries(output)[0] - a) * b).sum()

    inputs = list(map(make, x.split(2), mask.split(2)))
    targets = list(map(make, goal.split(2), mask.split(2)))
    if driver == "pipe(x)":
        output = pipe(make(x, mask))
        loss_fn(output, make(goal, mask)).backward()
    else:
        given: Any = {"input": make(x, mask), "target": make(goal, mask)}
        if driver == "iterator":
            given = {"data_iter": zip(inputs, targets, strict=True)}
        _, output = pipe.train_batch(
            **given, loss_fn=loss_fn, loss_reduction="sum", return_outputs=True, schedule="gpipe"
        )
    assert {seen for layer in layers for seen in layer.seen} == {(kind, (2, 3))}
    assert type(output) is kind
    assert torch.equal(entries(output)[1], mask)
    grads = [p.grad for p in pipe.parameters()]
    pipe.zero_grad()
    outputs = [layers(piece) for piece in inputs]
    assert torch.equal(entries(output)[0], torch.cat([entries(y)[0] for y in outputs]))
    for y, target in reversed(list(zip(outputs, targets, strict=True))):
        loss_fn(y, target).backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(pipe.parameters(), grads, strict=True))


@MAKE
def test_trees_of_such_containers_are_cut_and_gathered(make):
    x, mask, whole = torch.randn(6, 3), torch.randn(6), torch.randn(2)
    tree = {"outer": [make((x, "text"), make(NoChunk(whole), None)), mask]}
    pieces = scatter(tree, 3)
    assert len(pieces) == 3
    for piece, rows in zip(pieces, x.split(2), strict=True):
        (found, word), inner = entries(piece["outer"][0])
        assert torch.equal(found, rows)
        assert word == "text"
        assert torch.equal(entries(inner)[0], whole)
    for piece in pieces:
        piece["outer"][0] = make(entries(piece["outer"][0])[0], make(None, 5))
    (found, _), inner = entries(gather(pieces)["outer"][0])
    assert torch.equal(found, x)
    assert entries(inner)[1] == 5


def test_what_is_no_entry_comes_along():
    (first, _) = scatter(Encoding({"a": torch.randn(4, 3)}, ["first"]), 2)
    assert first[0] == "first"
    assert first.a.shape == (2, 3)
    assert scatter(Default(list, a=torch.randn(4)), 2)[1].default_factory is list


def test_the_callers_container_is_left_alone():
    given = UserDict({"x": torch.randn(4, 3)})

    class Takes(nn.Linear):
        def forward(self, value: Any) -> Tensor:
            return super().forward(value.pop("x"))

    for chunks in (1, 2):
        for checkpoint in CHECKPOINT_MODES:
            layers = nn.Sequential(Takes(3, 3), nn.Tanh())
            pipe = Pipe(layers, [1, 1], devices=DEVICES[:2], chunks=chunks, checkpoint=checkpoint)
            weigh(pipe(given)).backward()
            pipe.train_batch(given, loss_fn=weigh)
            assert set(given) == {"x"}


def test_gather_tells_types_apart():
    with pytest.raises(ValueError, match=r"differ in structure: .* UserDict.* Ordered"):
        gather([UserDict({"a": torch.ones(2)}), Ordered(a=torch.ones(2))])


def test_entries_have_names():
    tree = {"in": UserDict({"k": [1, Batch(2, 3)]})}
    names = ["x['in']['k'][0]", "x['in']['k'][1].a", "x['in']['k'][1].b", "x['in']['k'][1].label"]
    assert leaf_names("x", tree) == names
    with pytest.raises(ValueError, match=r"input\.b: float32\[3\] gives 3 micro-batches"):
        scatter(Batch(torch.ones(4), torch.ones(3)), 4)


@pytest.mark.parametrize("value", [None, 5, (), {"a": "text"}, NoChunk(torch.ones(4))])
def test_an_input_that_cannot_be_cut_is_refused(value):
    pipe = Pipe(nn.Sequential(nn.Identity(), nn.Identity()), [1, 1], devices=DEVICES[:2], chunks=2)
    with pytest.raises(TypeError, match=r"holds no tensor to cut.*chunks=1"):
        pipe(value)
    if value is not None:
        with pytest.raises(TypeError, match=r"holds no tensor to cut.*chunks=1"):
            pipe.train_batch(value, torch.ones(4), loss_fn=lambda y, target: target.sum())


def test_a_container_that_cannot_be_made_anew_is_refused():
    class Once(UserDict):
        def __copy__(self) -> Any:
            raise RuntimeError("only one of me")

    with pytest.raises(TypeError, match="Once cannot be made anew"):
        scatter(Once({"x": torch.ones(4)}), 2)
