"""Inputs, targets, outputs: trees of all kinds, what cannot be cut, and what no tree opens."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributions import Independent, Normal
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, TensorDataset

from syncpipe import NoChunk, Pipe, inline
from syncpipe.data.batches import gather, scatter
from syncpipe.data.trees import leaf_names
from tests.support.models import CHECKPOINT_MODES, linear_model
from tests.support.running import Do, pipe_of
from tests.support.training import assert_trains_as, weigh

DEVICES = ["cpu:0", "cpu:1", "cpu:2"]
every_mode = pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)


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


@dataclass
class Record:
    """A dataclass that PyTorch knows as a tree."""

    a: Any
    b: Any


pytree.register_dataclass(Record)


EMPTY: Any = ()
#: By type: what makes a container of two values.
MAKERS: dict[type, Callable[[Any, Any], Any]] = {
    tuple: lambda a, b: (a, b),
    list: lambda a, b: [a, b],
    dict: lambda a, b: {"b": b, "a": a},
    OrderedDict: lambda a, b: OrderedDict(b=b, a=a),
    Encoding: lambda a, b: Encoding({"a": a, "b": b}, ["first"]),
    Default: lambda a, b: Default(int, a=a, b=b),
    Listed: lambda a, b: Listed([a, b]),
    Batch: Batch,
    Frozen: Frozen,
    Made: made,
    Sub: Sub,
    Record: Record,
}


def entries(value: Any) -> tuple[Any, Any]:
    """The two values of which a container was made."""
    if hasattr(value, "keys"):
        return value["a"], value["b"]
    return (value.a, value.b) if hasattr(value, "a") else (value[0], value[1])


def over(act: Callable[[Any], Any], tree: Any) -> Any:
    """A tree of other leaves."""
    make = MAKERS.get(type(tree)) if tree is not EMPTY else None
    return act(tree) if make is None else make(*[over(act, each) for each in entries(tree)])


def flat(tree: Any) -> list[Any]:
    """The types and the leaves of a tree, with tensors as lists."""
    if type(tree) in MAKERS and tree is not EMPTY:
        return [type(tree), *[part for each in entries(tree) for part in flat(each)]]
    return [(tree.dtype, tree.tolist()) if isinstance(tree, Tensor) else tree]


def floating(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


class Scale(nn.Module):
    """Multiplies every floating point tensor of a tree by a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))

    def forward(self, tree: Any) -> Any:
        return over(lambda leaf: leaf * self.weight if floating(leaf) else leaf, tree)


def scales(**arguments: Any) -> Pipe:
    return Pipe(nn.Sequential(Scale(), Scale(), Scale()), [1, 1, 1], **arguments)


def recorded(layer: nn.Module) -> list[Any]:
    """A list that fills with the inputs of a layer."""
    seen: list[Any] = []
    layer.register_forward_pre_hook(lambda _module, args: seen.append(args[0]))
    return seen


X = torch.arange(12.0).view(6, 2)
N, B = torch.arange(6), torch.tensor([True, False] * 3)
LEAVES = [X, X.tanh(), N, B, torch.complex(X, X), None, "text", 7, 2.5, torch.float16, EMPTY]
TREES = st.recursive(
    st.sampled_from(LEAVES),
    lambda inner: st.builds(
        lambda make, a, b: make(a, b), st.sampled_from([*MAKERS.values()]), inner, inner
    ),
    max_leaves=6,
)


@settings(max_examples=80)
@given(
    driver=st.sampled_from(["pipe(x)", "mini-batch", "iterator"]),
    checkpoint=st.sampled_from(CHECKPOINT_MODES),
    make=st.sampled_from([*MAKERS.values()]),
    rest=TREES,
    swap=st.booleans(),
)
def test_trees_go_in_cut_and_come_out_as_they_were(driver, checkpoint, make, rest, swap):
    def anew(leaf: Any) -> Any:
        return leaf.clone().requires_grad_(floating(leaf)) if isinstance(leaf, Tensor) else leaf

    tree = over(anew, make(rest, X) if swap else make(X, rest))
    leaves: list[Tensor] = []
    over(lambda leaf: leaves.append(leaf) if floating(leaf) else None, tree)
    pipe = scales(chunks=3, checkpoint=checkpoint)
    seen = [recorded(layer) for layer in pipe]
    pieces = [
        over(lambda leaf, i=i: leaf[i : i + 2] if isinstance(leaf, Tensor) else leaf, tree)
        for i in (0, 2, 4)
    ]

    def loss_fn(output: Any, target: Any) -> Tensor:
        assert flat(over(type, output)) == flat(over(type, target))
        total = torch.zeros(())

        def add(leaf: Any) -> None:
            nonlocal total
            total = total + leaf.square().sum() if floating(leaf) else total

        over(add, output)
        return total

    if driver == "pipe(x)":
        loss_fn(output := pipe(tree), tree).backward()
    else:
        given: Any = {"input": tree, "target": tree}
        if driver == "iterator":
            given = {"data_iter": iter([(piece, piece) for piece in pieces])}
        _, output = pipe.train_batch(
            **given, loss_fn=loss_fn, loss_reduction="sum", return_outputs=True, schedule="gpipe"
        )
    assert flat(output) == flat(over(lambda v: v * 8 if floating(v) else v, tree))
    for k, inputs in enumerate(seen):
        scaled = [over(lambda v, k=k: v * 2**k if floating(v) else v, piece) for piece in pieces]
        assert list(map(flat, inputs[:3])) == list(map(flat, scaled))
    for leaf in leaves:
        torch.testing.assert_close(leaf.grad, 128 * leaf.detach())
    whole = sum(float(leaf.detach().square().sum()) for leaf in leaves)
    for parameter in pipe.parameters():
        torch.testing.assert_close(float(parameter.grad), 64.0 * whole)


def test_a_lone_no_chunk_tensor_goes_through_where_nothing_has_to_be_cut() -> None:
    pipe = scales(chunks=1)
    seen = recorded(pipe[0])
    assert pipe(NoChunk(X)).shape == (6, 2)
    assert [tuple(x.shape) for x in seen] == [(6, 2)]


@pytest.mark.parametrize("value", [None, 5, "text", (), {"a": None}])
def test_an_input_without_tensors_goes_through_where_nothing_has_to_be_cut(value):
    pipe = Pipe(nn.Sequential(nn.Identity(), nn.Identity()), [1, 1])
    assert pipe(value) == value
    layers = [lambda x: None, lambda none: (none, torch.ones(2))]  # None may pass between layers
    assert Pipe(layers, [1, 1], chunks=2)(X)[0] is None


@every_mode
def test_an_empty_batch_works_if_the_layers_can_take_it(checkpoint):
    pipe = Pipe(linear_model(3), [2, 1], chunks=4, checkpoint=checkpoint)
    x = torch.randn(0, 3, requires_grad=True)
    output = pipe(x)
    output.sum().backward()
    assert output.shape == x.grad.shape == (0, 3)
    assert all(not parameter.grad.any() for parameter in pipe.parameters())


# --- what cannot be cut, or put together -----------------------------------------------------


class Once(UserDict):
    """A container of which there is one."""

    def __copy__(self) -> Any:
        raise RuntimeError("only one of me")


def two(last: Any = None, chunks: int = 3, **options: Any) -> Pipe:
    return Pipe([nn.Identity(), last or nn.Identity()], [1, 1], chunks=chunks, **options)


def trained(value: Any) -> Any:
    return lambda: two().train_batch(value, torch.ones(4), loss_fn=lambda y, target: target.sum())


NUMBER, WHOLE = torch.tensor(1.0), NoChunk(torch.ones(4))
#: What the last layer makes of numbers.
OUTPUTS = [
    (lambda n: n.sum(), r"output .*without dimensions.*3 of them.*reduction='none'"),
    (lambda n: {"loss": n.sum(), "x": n}, r"output\['loss'\].*without dimensions"),
    (lambda n: (n, n.new_zeros(2, int(n[0]))), r"output\[1\] cannot.*2, 0\].*2, 2\].*2, 4\]"),
    (lambda n: (n,) if n[0] == 0 else [n], r"differ in structure.*micro-batch 1"),
    (lambda n: (n, int(n[0])), r"output\[1\].*0 in micro-batch 0, 2 in micro-batch 1"),
    (lambda n: (n, n if n[0] else None), r"output\[1\] is a tensor in some .* NoneType in oth"),
]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        *[(partial(NoChunk, value), TypeError, f"takes a tensor, not {type(value).__name__}")
          for value in (None, [X], 3, "text")],
        *[(lambda no=no: two()(*no), TypeError, None) for no in ((), (X, X))],
        *[(lambda value=value: two()(value), ValueError, rf"(?s)cannot be cut.*{shown}")
          for value, shown in (
            ((torch.zeros(9, 2), {"n": torch.arange(2)}),
             r"chunks=3.*input\[0\]: float32\[9, 2\] gives 3 micro-batches of 3, 3, 3.*"
             r"input\[1\]\['n'\]: int64\[2\] gives 2 micro-batches.*NoChunk"),
            (Sub(X, [NUMBER]), r"input\.b\[0\]: float32\[\] has no dimension.*NoChunk"),
            (NUMBER, r"input: float32\[\] has no dimension"),
            (Batch(torch.ones(4), torch.ones(3)), r"input\.b: float32\[3\] gives 3 micro-batches"),
        )],
        (lambda: two(chunks=2)((torch.zeros(3), torch.zeros(4))), ValueError,  # as many pieces
         r"(?s)input\[0\].* 2 micro-batches of 2, 1.*input\[1\].* of 2, 2.*the same batch size"),
        *[(lambda value=value: two()(value), TypeError, "holds no tensor to cut.*chunks=1")
          for value in (None, 5, (), {"a": "text"}, WHOLE)],
        *[(trained(value), TypeError, "holds no tensor to cut.*chunks=1") for value in (5, WHOLE)],
        *[(lambda wrap=wrap: two(devices=["cpu:1", "cpu:0"])(wrap(torch.empty(6, device="meta"))),
           ValueError, r"(?s)input is on meta.*first partition.*on cpu:1.*\.to\(")
          for wrap in (lambda t: t, lambda t: (X, t), lambda t: (X, NoChunk(t)))],
        *[(lambda last=last: two(last)(N), ValueError, message) for last, message in OUTPUTS],
        (lambda: gather([UserDict({"a": torch.ones(2)}), Default(None, a=torch.ones(2))]),
         ValueError, r"differ in structure: .* UserDict.* Default"),
        (lambda: two()(Once({"x": X})), TypeError, "Once cannot be copied with"),
    ],
)  # fmt: skip
def test_what_cannot_be_cut_or_put_together_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_one_micro_batch_may_return_anything():
    for last, _ in OUTPUTS:
        two(last, chunks=1)(N)


# --- containers ----------------------------------------------------------------------------------


def test_what_is_no_entry_comes_along():
    (first, _) = scatter(Encoding({"a": torch.randn(4, 3)}, ["first"]), 2)
    assert first[0] == "first"
    assert first.a.shape == (2, 3)
    assert scatter(Default(list, a=torch.randn(4)), 2)[1].default_factory is list


class Shallow(UserDict):
    """One whose copy would share its entries."""

    __copy__ = None


@pytest.mark.parametrize("kind", [UserDict, Shallow])
def test_the_callers_container_is_left_alone(kind):
    x = torch.randn(4, 3)
    given = kind({"x": x})

    class Takes(nn.Linear):
        def forward(self, value: Any) -> Tensor:
            return super().forward(value.pop("x"))

    for chunks in (1, 2):
        for checkpoint in CHECKPOINT_MODES:
            layers = nn.Sequential(Takes(3, 3), nn.Tanh())
            pipe = Pipe(layers, [1, 1], devices=DEVICES[:2], chunks=chunks, checkpoint=checkpoint)
            weigh(pipe(given)).backward()
            pipe.train_batch(given, loss_fn=weigh)
            assert dict(given) == {"x": x}


def test_entries_have_names():
    tree = {"in": UserDict({"k": [1, Batch(2, 3)]})}
    names = ["x['in']['k'][0]", "x['in']['k'][1].a", "x['in']['k'][1].b", "x['in']['k'][1].label"]
    assert leaf_names("x", tree) == names


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
        with pytest.raises(TypeError, match=r"Holds.* for stage 1.*\.inner\.x.*tuple"):
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


# --- one tensor in several places -----------------------------------------------------------------


def meet(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Uses each in turn and several times, so that the order of additions shows."""
    return (q * 0.3 + k.exp()).tanh() * 1.7 - v * 0.7 + q.sin() * 0.11 + (k * v).cos() * 0.013


def spread_out(x: Tensor) -> dict[str, Any]:
    return {"q": x, "rest": (x, [x])}


def gathered_again(tree: dict[str, Any]) -> Tensor:
    return meet(tree["q"], tree["rest"][0], tree["rest"][1][0])


@every_mode
@pytest.mark.parametrize("balance", [[3, 2], [3, 1, 1], [5]])
def test_one_tensor_that_crosses_as_several_entries_gets_the_gradient_of_the_plain_model(
    balance: list[int], checkpoint: Any
) -> None:
    for seed in range(10):
        torch.manual_seed(seed)
        first = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
        middle = Do(lambda tree: {"q": tree["q"], "rest": tree["rest"]})
        layers = [first, nn.Linear(3, 3), Do(spread_out), middle, Do(gathered_again)]
        plain = nn.Sequential(*layers)
        pipe = Pipe(copy.deepcopy(plain), balance, chunks=3, checkpoint=checkpoint, devices=DEVICES)
        x, weight = torch.randn(6, 3), torch.randn(2, 3)
        assert_trains_as(pipe, plain, x, loss_fn=lambda y: (y * weight).tanh().mean())  # noqa: B023
        for module in (plain, pipe):
            module.zero_grad()
        pipe(x).backward(torch.cat([weight] * 3))
        for piece in reversed(x.chunk(3)):
            plain(piece).backward(weight)
        for a, b in zip(pipe.parameters(), plain.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)


def test_one_tensor_that_is_several_outputs_gets_the_gradient_of_the_plain_model() -> None:
    for seed in range(10):
        torch.manual_seed(seed)
        layers = nn.Sequential(nn.Linear(3, 3), Do(spread_out))
        pipe, x = pipe_of(copy.deepcopy(layers), [1, 1], chunks=1), torch.randn(6, 3)
        for module in (pipe, layers):
            gathered_again(module(x)).sum().backward()
        for a, b in zip(pipe.parameters(), layers.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)


# --- samples in another dimension ------------------------------------------------------------

MINI_BATCH = torch.randn(8, 6, 4)
SHOWN = {
    "pipe(x)": lambda pipe: pipe(MINI_BATCH),
    "eval_batch": lambda pipe: pipe.eval_batch(MINI_BATCH),
    "return_outputs": lambda pipe: pipe.train_batch(
        MINI_BATCH, loss_fn=lambda y: pytree.tree_leaves(y)[0].mean(), return_outputs=True
    ),
}


def last(function: Any) -> Pipe:
    return Pipe([nn.Linear(4, 4), function], [1, 1], chunks=4)


@pytest.mark.parametrize("run", SHOWN)
@pytest.mark.parametrize(
    ("function", "named"),
    [
        (
            lambda x: x.transpose(0, 1),
            r"output is float32\[6, 2, 4\] for 2 samples, so dimension 1",
        ),
        (lambda x: {"a": x, "b": x.permute(1, 2, 0)}, r"output\['b'\] is .* dimension 2"),
        (lambda x: x.transpose(0, 1)[::2].repeat(1, 1, 2), r"float32\[3, 2, 8\].*dimension 1"),
        (lambda x: x.sum(-1).t(), r"float32\[6, 2\].*dimension 1"),
    ],
)
def test_samples_that_are_not_in_dimension_0_of_an_output_are_warned_of_once(run, function, named):
    pipe = last(function)
    with pytest.warns(UserWarning, match=named + r".*put together along dimension 0.*transpose"):
        SHOWN[run](pipe)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SHOWN[run](pipe)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.flatten(0, 1),
        lambda x: x.flatten(0, 1)[:, :2],  # as many classes as samples in a micro-batch
        lambda x: x.flatten(0, 1).unsqueeze(1).expand(-1, 2, -1),
        lambda x: x[:, :2],
        lambda x: (x, x.flatten(), {"mean": x.mean((1, 2))}),
    ],
)
@pytest.mark.parametrize("run", ["pipe(x)", "eval_batch"])
def test_rows_of_samples_may_be_of_any_number(run, function):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SHOWN[run](last(function))
