"""Scatter and gather, seen through the pipe: trees of all kinds, and what cannot be cut."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from syncpipe import NoChunk, Pipe
from tests.support.models import CHECKPOINT_MODES, assert_same_tree, cut, linear_model
from tests.support.running import Do

Pair = namedtuple("Pair", ["left", "right"])
every_mode = pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)


@dataclass
class Record:
    """A dataclass that PyTorch knows as a tree."""

    x: Any
    note: Any


pytree.register_dataclass(Record)


class Scale(nn.Module):
    """Multiplies every floating point tensor of a tree by a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))

    def forward(self, tree: Any) -> Any:
        def scale(leaf: Any) -> Any:
            floating = isinstance(leaf, Tensor) and leaf.is_floating_point()
            return leaf * self.weight if floating else leaf

        return pytree.tree_map(scale, tree)


def scales(**arguments: Any) -> Pipe:
    return Pipe(nn.Sequential(Scale(), Scale(), Scale()), [1, 1, 1], **arguments)


def recorded(layer: nn.Module) -> list[Any]:
    """A list that fills with the inputs of a layer."""
    seen: list[Any] = []
    layer.register_forward_pre_hook(lambda _module, args: seen.append(args[0]))
    return seen


def shapes(tree: Any) -> Any:
    return pytree.tree_map(lambda v: tuple(v.shape) if isinstance(v, Tensor) else v, tree)


X = torch.arange(12.0).view(6, 2)
N, B = torch.arange(6), torch.tensor([True, False] * 3)
TREES: dict[str, Any] = {
    "tensor": X,
    "1-tuple": (X,),
    "list": [X, [B]],
    "dict": {"b": X, "a": N},
    "ordered dict": OrderedDict(z=X, a=B),
    "named tuple": Pair(X, Pair(N, None)),
    "dataclass": Record(X, (None, "note")),
    "nested": {"k": [Pair((X,), Record(B, 3.5)), ()], "none": None},
    "other values": (X, None, "text", 7, 2.5, True, torch.float16),
    "int only": N,
    "complex": torch.complex(X, X),
}


@every_mode
@pytest.mark.parametrize("name", TREES)
def test_a_tree_goes_in_cut_and_comes_out_with_its_structure(name, checkpoint):
    tree, pipe = TREES[name], scales(chunks=3, checkpoint=checkpoint)
    seen = [recorded(layer) for layer in pipe]
    expected = pytree.tree_map(
        lambda v: v * 2.0**3 if isinstance(v, Tensor) and v.is_floating_point() else v, tree
    )
    assert_same_tree(pipe(tree), expected, "output")
    piece = pytree.tree_map(lambda v: (2, *v.shape[1:]) if isinstance(v, Tensor) else v, tree)
    for inputs in seen:
        assert [shapes(received) for received in inputs[:3]] == [piece] * 3


@every_mode
@pytest.mark.parametrize("position", [0, 1, 2])
def test_tensors_with_and_without_gradient_may_stand_in_any_position(position, checkpoint):
    tree = [torch.arange(6), torch.randn(6, 2), torch.ones(6, dtype=torch.bool)]
    tree.insert(position, torch.randn(6, 2, requires_grad=True))
    pipe = scales(chunks=4, checkpoint=checkpoint)
    output = pipe(tuple(tree))
    assert [leaf.requires_grad for leaf in output] == [leaf.is_floating_point() for leaf in tree]
    output[position].sum().backward()
    assert torch.equal(tree[position].grad, torch.full((6, 2), 2.0**3))
    assert all(parameter.grad is not None for parameter in pipe.parameters())


@every_mode
def test_a_no_chunk_tensor_goes_whole_to_every_micro_batch(checkpoint):
    weight = torch.randn(4, 2, requires_grad=True)

    def product(tree: Any) -> Tensor:
        return tree["x"] @ tree["w"].t() + tree["bias"]

    pipe = Pipe(nn.Sequential(Do(product), nn.Tanh()), [1, 1], chunks=3, checkpoint=checkpoint)
    seen = recorded(pipe[0])
    bias = torch.tensor(0.5)
    output = pipe({"x": X, "w": NoChunk(weight), "bias": NoChunk(bias)})
    loop = [product({"x": piece, "w": weight, "bias": bias}).tanh() for piece in X.chunk(3)]
    assert torch.equal(output, torch.cat(loop))
    assert all(type(tree["w"]) is Tensor and tree["w"].shape == (4, 2) for tree in seen)
    output.sum().backward()
    (expected,) = torch.autograd.grad(torch.cat(loop).sum(), weight)
    assert torch.equal(weight.grad, expected)


def test_a_lone_no_chunk_tensor_goes_through_where_nothing_has_to_be_cut() -> None:
    pipe = scales(chunks=1)
    seen = recorded(pipe[0])
    assert pipe(NoChunk(X)).shape == (6, 2)
    assert shapes(seen) == [(6, 2)]


@pytest.mark.parametrize("value", [None, 5, "text", (), {"a": None}])
def test_an_input_without_tensors_goes_through_where_nothing_has_to_be_cut(value):
    pipe = Pipe(nn.Sequential(nn.Identity(), nn.Identity()), [1, 1])
    assert pipe(value) == value
    layers = [lambda x: None, lambda none: (none, torch.ones(2))]  # None may pass between layers
    assert Pipe(layers, [1, 1], chunks=2)(X)[0] is None


@given(size=st.integers(1, 12), chunks=st.integers(1, 15), trailing=st.integers(0, 2))
def test_tensors_are_cut_like_torch_chunk(size, chunks, trailing):
    x = torch.randn(size, *[2] * trailing)
    pipe = Pipe(nn.Sequential(nn.Identity(), nn.Identity()), [1, 1], chunks=chunks)
    seen = recorded(pipe[0])
    assert torch.equal(pipe({"x": x})["x"], x)
    assert_same_tree(seen, cut({"x": x}, chunks), "micro-batches")


@pytest.mark.parametrize(("checkpoint", "runs"), [("always", 6), ("except_last", 5), ("never", 3)])
def test_a_batch_smaller_than_chunks_gives_fewer_micro_batches(checkpoint, runs):
    pipe = scales(chunks=8, checkpoint=checkpoint)
    seen = [recorded(layer) for layer in pipe]
    pipe(torch.randn(3, 2)).sum().backward()  # the last that there is, is the last
    assert [[len(x) for x in inputs] for inputs in seen] == [[1] * runs] * 3


@every_mode
def test_an_empty_batch_works_if_the_layers_can_take_it(checkpoint):
    pipe = Pipe(linear_model(3), [2, 1], chunks=4, checkpoint=checkpoint)
    x = torch.randn(0, 3, requires_grad=True)
    output = pipe(x)
    output.sum().backward()
    assert output.shape == x.grad.shape == (0, 3)
    assert all(not parameter.grad.any() for parameter in pipe.parameters())


# --- what cannot be cut, or put together -----------------------------------------------------


@pytest.mark.parametrize("value", [None, [X], 3, "text"])
def test_no_chunk_around_anything_but_a_tensor_is_refused_with_its_type(value):
    with pytest.raises(TypeError, match=f"NoChunk takes a tensor, not {type(value).__name__}"):
        NoChunk(value)


NUMBER = torch.tensor(1.0)


@pytest.mark.parametrize(
    ("input", "parts"),
    [
        ((torch.zeros(8, 2), {"n": torch.arange(3)}),
         ["chunks=4", "input[0]: float32[8, 2] gives 4 micro-batches of 2, 2, 2, 2",
          "input[1]['n']: int64[3] gives 3 micro-batches", "NoChunk"]),
        ((torch.zeros(60), torch.arange(3)), ["of 15, 15, 15, 15"]),
        (Pair(X, [NUMBER]), ["input.right[0]: float32[] has no dimension", "NoChunk"]),
        (NUMBER, ["input: float32[] has no dimension"]),
    ],
)  # fmt: skip
def test_tensors_that_cannot_be_cut_are_refused_with_their_path(input, parts):
    pipe = scales(chunks=4)
    with pytest.raises(ValueError, match="cannot be cut") as caught:
        pipe(input)
    assert all(part in str(caught.value) for part in parts)
    assert torch.equal(pipe(X), X * 2.0**3)  # and it works


def test_there_is_exactly_one_argument() -> None:
    for arguments in ((), (X, X)):
        with pytest.raises(TypeError):
            scales()(*arguments)


@pytest.mark.parametrize("wrap", [lambda t: t, lambda t: (X, t), lambda t: (X, NoChunk(t))])
def test_input_on_another_device_is_refused_with_both_devices(wrap):
    with pytest.raises(ValueError, match=r"input is on meta.*first partition.*on cpu:1") as caught:
        scales(devices=["cpu:1", "cpu:0", "cpu:0"])(wrap(torch.empty(6, device="meta")))
    assert ".to(" in str(caught.value)


@pytest.mark.parametrize(
    ("last", "message"),
    [
        (lambda n: n.sum(), r"output .*without dimensions.*3 of them.*reduction='none'"),
        (lambda n: {"loss": n.sum(), "x": n}, r"output\['loss'\].*without dimensions"),
        (lambda n: (n, n.new_zeros(2, int(n[0]))), r"output\[1\] cannot.*2, 0\].*2, 2\].*2, 4\]"),
        (lambda n: (n,) if n[0] == 0 else [n], r"differ in structure.*micro-batch 1"),
        (lambda n: (n, int(n[0])), r"output\[1\].*0 in micro-batch 0, 2 in micro-batch 1"),
        (lambda n: (n, n if n[0] else None), r"output\[1\] is a tensor in some .* NoneType in oth"),
    ],
)
def test_outputs_that_cannot_be_put_together_are_refused_with_what_to_do(last, message):
    with pytest.raises(ValueError, match=message):
        Pipe([nn.Identity(), last], [1, 1], chunks=3)(N)
    Pipe([nn.Identity(), last], [1, 1], chunks=1)(N)  # one micro-batch may return anything
