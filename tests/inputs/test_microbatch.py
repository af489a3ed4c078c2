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


X, N, B = torch.randn(6, 2), torch.arange(6), torch.tensor([True, False] * 3)
TREES: dict[str, Any] = {
    "tensor": X,
    "1-tuple": (X,),
    "tuple": (X, N),
    "list": [X, [B]],
    "dict": {"b": X, "a": N},
    "ordered dict": OrderedDict(z=X, a=B),
    "named tuple": Pair(X, Pair(N, None)),
    "dataclass": Record(X, (None, "note")),
    "nested": {"k": [Pair((X,), Record(B, 3.5)), ()], "none": None},
    "other values": (X, None, "text", 7, 2.5, True, torch.float16),
    "int only": N,
    "bool only": (B,),
    "complex": torch.randn(6, dtype=torch.complex64),
}


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("name", TREES)
def test_a_tree_goes_in_cut_and_comes_out_with_its_structure(name: str, checkpoint: str) -> None:
    tree = TREES[name]
    pipe = scales(chunks=3, checkpoint=checkpoint)
    seen = [recorded(layer) for layer in pipe]
    output = pipe(tree)
    expected = pytree.tree_map(
        lambda v: v * 2.0**3 if isinstance(v, Tensor) and v.is_floating_point() else v, tree
    )
    assert_same_tree(output, expected, "output")
    piece = pytree.tree_map(lambda v: (2, *v.shape[1:]) if isinstance(v, Tensor) else v, tree)
    for inputs in seen:
        assert [shapes(received) for received in inputs[:3]] == [piece] * 3


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("position", [0, 1, 2])
def test_tensors_with_and_without_gradient_may_stand_in_any_position(
    position: int, checkpoint: str
) -> None:
    tree = [torch.arange(6), torch.randn(6, 2), torch.ones(6, dtype=torch.bool)]
    tree.insert(position, torch.randn(6, 2, requires_grad=True))
    pipe = scales(chunks=4, checkpoint=checkpoint)
    output = pipe(tuple(tree))
    assert [leaf.requires_grad for leaf in output] == [leaf.is_floating_point() for leaf in tree]
    output[position].sum().backward()
    assert torch.equal(tree[position].grad, torch.full((6, 2), 2.0**3))
    assert all(parameter.grad is not None for parameter in pipe.parameters())


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
def test_a_no_chunk_tensor_goes_whole_to_every_micro_batch(checkpoint: str) -> None:
    weight = torch.randn(4, 2, requires_grad=True)

    def product(tree: Any) -> Tensor:
        return tree["x"] @ tree["w"].t() + tree["bias"]

    first = Do(product)
    pipe = Pipe(nn.Sequential(first, nn.Tanh()), [1, 1], chunks=3, checkpoint=checkpoint)
    seen = recorded(first)
    x, bias = torch.randn(6, 2), torch.tensor(0.5)
    output = pipe({"x": x, "w": NoChunk(weight), "bias": NoChunk(bias)})
    loop = [product({"x": piece, "w": weight, "bias": bias}).tanh() for piece in x.chunk(3)]
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


@pytest.mark.parametrize("value", [None, [X], 3, "text"])
def test_no_chunk_around_anything_but_a_tensor_is_refused_with_its_type(value: Any) -> None:
    with pytest.raises(TypeError, match=f"NoChunk takes a tensor, not {type(value).__name__}"):
        NoChunk(value)


@pytest.mark.parametrize("value", [None, 5, "text", (), {"a": None}])
def test_an_input_without_tensors_goes_through_where_nothing_has_to_be_cut(value: Any) -> None:
    pipe = Pipe(nn.Sequential(nn.Identity(), nn.Identity()), [1, 1])
    assert pipe(value) == value


def test_none_may_pass_between_layers() -> None:
    layers = [lambda x: None, lambda none: (none, torch.ones(2))]
    assert Pipe(layers, [1, 1], chunks=2)(X)[0] is None


@given(size=st.integers(1, 12), chunks=st.integers(1, 15), trailing=st.integers(0, 2))
def test_tensors_are_cut_like_torch_chunk(size: int, chunks: int, trailing: int) -> None:
    x = torch.randn(size, *[2] * trailing)
    pipe = Pipe(nn.Sequential(nn.Identity(), nn.Identity()), [1, 1], chunks=chunks)
    seen = recorded(pipe[0])
    assert torch.equal(pipe({"x": x})["x"], x)
    assert_same_tree(seen, cut({"x": x}, chunks), "micro-batches")


@pytest.mark.parametrize(
    ("checkpoint", "runs"), [("always", [1] * 6), ("except_last", [1] * 5), ("never", [1] * 3)]
)
def test_a_batch_smaller_than_chunks_gives_fewer_micro_batches_and_the_last_there_is_is_the_last(
    checkpoint: str, runs: list[int]
) -> None:
    pipe = scales(chunks=8, checkpoint=checkpoint)
    seen = [recorded(layer) for layer in pipe]
    pipe(torch.randn(3, 2)).sum().backward()
    assert [[len(x) for x in inputs] for inputs in seen] == [runs] * 3


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
def test_an_empty_batch_works_if_the_layers_can_take_it(checkpoint: str) -> None:
    pipe = Pipe(linear_model(3), [2, 1], chunks=4, checkpoint=checkpoint)
    x = torch.randn(0, 3, requires_grad=True)
    output = pipe(x)
    assert output.shape == (0, 3)
    output.sum().backward()
    assert x.grad.shape == (0, 3)
    assert all(not parameter.grad.any() for parameter in pipe.parameters())


def test_there_is_exactly_one_argument() -> None:
    pipe = scales()
    for arguments in ((), (X, X)):
        with pytest.raises(TypeError):
            pipe(*arguments)


# --- what cannot be cut ------------------------------------------------------------------------


def test_tensors_cut_into_different_numbers_of_pieces_are_refused() -> None:
    with pytest.raises(ValueError, match=r"chunks=4") as caught:
        scales(chunks=4)((torch.randn(8, 2), {"n": torch.arange(3)}))
    message = str(caught.value)
    assert "input[0]: float32[8, 2] gives 4 micro-batches" in message
    assert "input[1]['n']: int64[3] gives 3 micro-batches" in message
    assert "NoChunk" in message


def test_tensors_without_dimensions_are_refused_with_their_path() -> None:
    with pytest.raises(ValueError, match="cannot be cut") as caught:
        scales(chunks=2)(Pair(X, [torch.tensor(1.0)]))
    message = str(caught.value)
    assert "input.right[0]: float32[] has no dimension" in message
    assert "NoChunk" in message


def test_a_lone_tensor_without_dimensions_is_refused() -> None:
    with pytest.raises(ValueError, match=r"input: float32\[\] has no dimension"):
        scales(chunks=2)(torch.tensor(1.0))


@pytest.mark.parametrize("wrap", [lambda t: t, lambda t: (X, t), lambda t: (X, NoChunk(t))])
def test_input_on_another_device_is_refused_with_both_devices(wrap: Any) -> None:
    with pytest.raises(ValueError, match=r"input is on meta.*first partition.*on cpu:1") as caught:
        scales(devices=["cpu:1", "cpu:0", "cpu:0"])(wrap(torch.empty(6, device="meta")))
    assert ".to(" in str(caught.value)


# --- what cannot be put together ---------------------------------------------------------------


def ending_in(function: Any, chunks: int = 3) -> Pipe:
    return Pipe([nn.Identity(), function], [1, 1], chunks=chunks)


def test_a_loss_from_inside_the_pipe_is_refused_with_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"output.*without dimensions.*3 of them") as caught:
        ending_in(lambda x: x.sum())(X)
    assert "reduction='none'" in str(caught.value)


def test_a_loss_in_a_tree_is_refused_with_its_path() -> None:
    with pytest.raises(ValueError, match=r"output\['loss'\]"):
        ending_in(lambda x: {"loss": x.sum(), "x": x})(X)


def test_one_micro_batch_may_return_anything() -> None:
    assert ending_in(lambda x: x.sum(), chunks=1)(X).shape == ()


def test_outputs_of_different_shapes_are_refused_with_the_shapes() -> None:
    with pytest.raises(ValueError, match=r"output\[1\] cannot") as caught:
        ending_in(lambda x: (x, x.new_zeros(2, int(x[0, 0]))))(
            torch.arange(6.0).repeat(2, 1).t().contiguous()
        )
    assert all(text in str(caught.value) for text in ("[2, 0]", "[2, 2]", "[2, 4]"))


def test_outputs_of_different_structure_are_refused() -> None:
    with pytest.raises(ValueError, match=r"differ in structure.*micro-batch 1"):
        ending_in(lambda n: (n,) if n[0] == 0 else [n])(N)


def test_other_values_that_differ_between_micro_batches_are_refused_with_both() -> None:
    with pytest.raises(ValueError, match=r"output\[1\].*0 in micro-batch 0, 2 in micro-batch 1"):
        ending_in(lambda n: (n, int(n[0])))(N)


def test_a_tensor_here_and_none_there_is_refused_with_its_path() -> None:
    with pytest.raises(ValueError, match=r"output\[1\] is a tensor in some .* NoneType in others"):
        ending_in(lambda n: (n, n if n[0] else None))(N)


def test_after_a_refusal_the_pipe_works() -> None:
    pipe = scales(chunks=4)
    with pytest.raises(ValueError, match="cannot be cut"):
        pipe((X, torch.tensor(1.0)))
    assert torch.equal(pipe(X), X * 2.0**3)
