"""Mappings, dataclasses and the like as inputs, targets, outputs, and between layers."""

from __future__ import annotations

from collections import OrderedDict, UserDict, UserList, defaultdict, namedtuple
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

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


class Plain(dict):
    """The same."""


class Listed(list):
    """The same."""


@dataclass
class Batch:
    """Fields of all kinds."""

    a: Any
    b: Any
    label: str = "batch"


@dataclass(frozen=True)
class Frozen:
    """Fields that cannot be set."""

    a: Any
    b: Any


@dataclass(slots=True)
class Slots:
    """Fields without a dictionary."""

    a: Any
    b: Any


@dataclass(frozen=True, slots=True)
class FrozenSlots:
    """Both."""

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


class Named(NamedTuple):
    """A pytree."""

    a: Any
    b: Any


class Sub(namedtuple("Sub", "a b")):
    """A pytree, too."""

    __slots__ = ()


MAKERS: dict[str, Any] = {
    "UserDict": lambda a, b: UserDict({"a": a, "b": b}),
    "Encoding": lambda a, b: Encoding({"a": a, "b": b}, ["first"]),
    "OrderedDict": lambda a, b: Ordered(a=a, b=b),
    "defaultdict": lambda a, b: Default(int, a=a, b=b),
    "dict": lambda a, b: Plain(a=a, b=b),
    "list": lambda a, b: Listed([a, b]),
    "UserList": lambda a, b: UserList([a, b]),
    "dataclass": Batch,
    "frozen": Frozen,
    "slots": Slots,
    "frozen slots": FrozenSlots,
    "made": made,
    "NamedTuple": Named,
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
def test_input_output_and_what_is_between_are_of_one_type(make, checkpoint):
    layers = nn.Sequential(Through(make), Through(make), Through(make))
    pipe = Pipe(layers, [1, 1, 1], devices=DEVICES, chunks=3, checkpoint=checkpoint)
    x, mask = torch.randn(6, 3), torch.randn(6, 3)
    output = pipe(make(x, mask))
    kind = type(make(x, mask))
    assert type(output) is kind
    assert {seen for layer in layers for seen in layer.seen} == {(kind, (2, 3))}
    ours, other = entries(output)
    assert torch.equal(other, mask)
    weigh(ours).backward()
    grads = [p.grad for p in pipe.parameters()]
    pipe.zero_grad()
    pieces = map(make, x.split(2), mask.split(2))
    theirs = torch.cat([entries(layers(piece))[0] for piece in pieces])
    weigh(theirs).backward()
    assert torch.equal(ours, theirs)
    assert all(torch.equal(p.grad, g) for p, g in zip(pipe.parameters(), grads, strict=True))


@MAKE
@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("source", ["mini-batch", "iterator"])
def test_inputs_and_targets_of_train_batch(make, checkpoint, source):
    layers = nn.Sequential(Through(make), Through(make))
    pipe = Pipe(layers, [1, 1], devices=DEVICES[:2], chunks=3, checkpoint=checkpoint)
    x, mask, goal = torch.randn(7, 3), torch.randn(7, 3), torch.randn(7, 3)

    def loss_fn(output: Any, target: Any) -> Tensor:
        assert type(output) is type(target) is kind
        a, b = entries(target)
        assert len(entries(output)[0]) == len(a)
        return ((entries(output)[0] - a) * b).mean()

    kind = type(make(x, mask))
    given: dict[str, Any] = {"input": make(x, mask), "target": make(goal, mask)}
    cut = list(map(make, x.chunk(3), mask.chunk(3)))
    goals = list(map(make, goal.chunk(3), mask.chunk(3)))
    if source == "iterator":
        given = {"data_iter": zip(cut, goals, strict=True)}
    loss, output = pipe.train_batch(**given, loss_fn=loss_fn, return_outputs=True)
    assert type(output) is kind
    assert torch.equal(entries(output)[1], mask)
    grads = [p.grad for p in pipe.parameters()]
    pipe.zero_grad()
    shares = [
        loss_fn(layers(a), b) * len(entries(b)[0]) / 7 for a, b in zip(cut, goals, strict=True)
    ]
    for share in shares:
        share.backward()
    torch.testing.assert_close(loss, sum(shares).detach())
    for p, grad in zip(pipe.parameters(), grads, strict=True):
        torch.testing.assert_close(p.grad, grad)


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
    with pytest.raises(ValueError, match=r"differ in structure: .* with UserDict.* with Plain"):
        gather([UserDict({"a": torch.ones(2)}), Plain(a=torch.ones(2))])


def test_entries_have_names():
    tree = {"in": UserDict({"k": [1, Batch(2, 3)]})}
    names = ["x['in']['k'][0]", "x['in']['k'][1].a", "x['in']['k'][1].b", "x['in']['k'][1].label"]
    assert leaf_names("x", tree) == names
    with pytest.raises(ValueError, match=r"input\.b: float32\[3\] gives 3 micro-batches"):
        scatter(Batch(torch.ones(4), torch.ones(3)), 4)


class Opaque:
    """Holds tensors where nobody looks."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


HIDDEN = {
    "object": (Opaque, "x"),
    "namespace": (lambda x: SimpleNamespace(nodes=x), "nodes"),
}


@pytest.mark.parametrize("what", HIDDEN)
@pytest.mark.parametrize("at", ["input", "entry", "target"])
def test_tensors_that_are_not_found_are_refused(what, at):
    make, name = HIDDEN[what]
    x = torch.randn(4, 3)
    thing = make(x)
    pipe = Pipe(nn.Sequential(nn.Identity(), nn.Identity()), [1, 1], devices=DEVICES[:2], chunks=2)
    given = {"input": (thing, x), "entry": ([x, thing], x), "target": (x, thing)}[at]
    where = rf"{at.replace('entry', 'input')}.*of type {type(thing).__name__}.*\.{name}\b.*register"
    with pytest.raises(TypeError, match=where):
        pipe.train_batch(*given, loss_fn=lambda y, target: y.sum())
    if at != "target":
        with pytest.raises(TypeError, match=where):
            pipe(given[0])


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
