"""Mappings, dataclasses and the like; tensors in objects that no tree opens are refused."""

from __future__ import annotations

from collections import UserDict, defaultdict, deque, namedtuple
from dataclasses import dataclass, field
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Independent, Normal
from torch.utils.data import DataLoader, TensorDataset

from syncpipe import NoChunk, Pipe, inline
from syncpipe.data import gather, leaf_names, scatter
from tests.support.models import CHECKPOINT_MODES
from tests.support.running import pipe_of
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


class Default(defaultdict):
    """No pytree, as all subclasses."""


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
    "Encoding": lambda a, b: Encoding({"a": a, "b": b}, ["first"]),
    "defaultdict": lambda a, b: Default(int, a=a, b=b),
    "list": lambda a, b: Listed([a, b]),
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
    with pytest.raises(ValueError, match=r"differ in structure: .* UserDict.* Default"):
        gather([UserDict({"a": torch.ones(2)}), Default(None, a=torch.ones(2))])


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


# --- tensors in objects that no tree opens -------------------------------------------------------


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
