"""Converted models compute what the models compute, in pipes of any shape, bit for bit."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections import OrderedDict, UserDict
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from syncpipe import Pipe, sequential
from tests.layers.conversion.models import Dense, ResNet, Transformer, tokens
from tests.support.models import assert_same_tree


def case(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(3)
    if name == "transformer":
        ids, mask = tokens(8)
        return Transformer(), {"ids": ids, "mask": mask}
    kind = {"resnet": ResNet, "dense": Dense}[name]
    return kind(), {"x": torch.randn(8, 6)}


def first(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.logits


def loss_fn(output: Any, target: Tensor) -> Tensor:
    return F.mse_loss(first(output).float().mean(-1).reshape(len(target), -1)[:, 0], target)


def cut(inputs: dict[str, Tensor], chunks: int) -> list[dict[str, Tensor]]:
    pieces = {name: tensor.chunk(chunks) for name, tensor in inputs.items()}
    count = len(next(iter(pieces.values())))
    return [{name: cut[i] for name, cut in pieces.items()} for i in range(count)]


def converted(name: str, sizes: list[int] | None = None, **options: Any) -> Any:
    """The model, its pipe, and inputs of another batch size than that of the sample."""
    model, inputs = case(name)
    plain = copy.deepcopy(model)
    layers = sequential(model, **{key: value[:3] for key, value in inputs.items()})
    sizes = sizes or [len(layers) // 2, len(layers) - len(layers) // 2]
    devices = [f"cpu:{j % 2}" for j in range(len(sizes))]
    return plain, Pipe(layers, sizes, devices=devices, **options), inputs


@st.composite
def balances(draw: Any, layers: int) -> list[int]:
    cuts = sorted(draw(st.sets(st.integers(1, layers - 1), max_size=4)))
    return [b - a for a, b in zip([0, *cuts], [*cuts, layers], strict=True)]


LAYERS = {name: len(sequential(case(name)[0], **case(name)[1])) for name in ("resnet", "dense")}


@pytest.mark.parametrize("name", ["resnet", "dense", "transformer"])
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_forward_and_backward(name, checkpoint):
    plain, pipe, inputs = converted(name, chunks=3, checkpoint=checkpoint)
    output = pipe(**inputs)
    expected = [plain(**piece) for piece in cut(inputs, 3)]
    assert torch.equal(first(output), torch.cat([first(o) for o in expected]))
    assert type(output) is type(expected[0])
    first(output).sum().backward()
    torch.cat([first(o) for o in expected]).sum().backward()
    assert_same_gradients(pipe, plain)
    expected_state = plain.state_dict()
    assert_same_tree(
        {k: pipe.state_dict()[k] for k in expected_state}, dict(expected_state), "state"
    )


@pytest.mark.parametrize("name", ["resnet", "dense", "transformer"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
def test_train_batch(name, schedule):
    plain, pipe, inputs = converted(name, chunks=3)
    target = torch.rand(8)
    loss = pipe.train_batch(inputs, target, loss_fn=loss_fn, schedule=schedule)
    pieces, targets = cut(inputs, 3), target.chunk(3)
    losses = [
        loss_fn(plain(**piece), t) * (len(t) / 8) for piece, t in zip(pieces, targets, strict=True)
    ]
    for part in losses[::-1] if schedule == "gpipe" else losses:
        part.backward()
    torch.testing.assert_close(loss, sum(losses).detach())
    assert_same_gradients(pipe, plain, exact=schedule != "zb_h1")


@settings(max_examples=15)
@given(data=st.data(), chunks=st.integers(1, 4), name=st.sampled_from(["resnet", "dense"]))
def test_any_balance(data, chunks, name):
    plain, pipe, inputs = converted(name, data.draw(balances(LAYERS[name])), chunks=chunks)
    output = pipe(**inputs)
    expected = torch.cat([plain(**piece) for piece in cut(inputs, chunks)])
    assert torch.equal(output, expected)
    output.sum().backward()
    expected.sum().backward()
    assert_same_gradients(pipe, plain)


def assert_same_gradients(pipe: Pipe, plain: nn.Module, *, exact: bool = True) -> None:
    theirs = dict(plain.named_parameters())
    for name, parameter in pipe.named_parameters():
        expected = theirs.pop(name).grad
        if exact or expected is None:
            assert_same_tree(parameter.grad, expected, name)
        else:
            torch.testing.assert_close(parameter.grad, expected)
    assert not theirs


def test_other_lengths_than_the_samples():
    plain, pipe, _ = converted("transformer", chunks=2)
    ids, mask = tokens(4, 11)
    assert torch.equal(
        pipe(ids, mask).logits,
        torch.cat([plain(a, b).logits for a, b in zip(ids.chunk(2), mask.chunk(2), strict=True)]),
    )


def test_a_micro_batch_of_one():
    plain, pipe, _ = converted("transformer", chunks=2)
    ids, mask = tokens(3)
    expected = [plain(ids[:2], mask[:2]).logits, plain(ids[2:], mask[2:]).logits]
    assert torch.equal(pipe(ids, mask).logits, torch.cat(expected))


@pytest.mark.parametrize("training", [True, False])
def test_dropout_obeys_the_mode_whatever_the_mode_was(training):
    ids, mask = tokens(8)
    model = Transformer(p=0.5).train(training)
    layers = sequential(model, ids, mask)
    assert layers.training is training
    draws = [layers.train()(ids, mask).logits for _ in range(2)]
    assert not torch.equal(*draws)
    still = [layers.eval()(ids, mask).logits for _ in range(2)]
    assert torch.equal(*still)
    assert torch.equal(still[0], model(ids, mask).logits)


def test_dropout_written_into_the_model_itself_obeys_the_mode():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(F.dropout(self.a(x), 0.5, training=self.training))

    layers = sequential(Net(), x := torch.randn(3, 4))
    assert not torch.equal(layers(x), layers(x))
    layers.eval()
    assert torch.equal(layers(x), layers(x))


def test_same_random_numbers_whatever_the_balance():
    outputs = []
    for sizes in ([30], [5, 20, 5]):
        torch.manual_seed(3)
        layers = sequential(Transformer(p=0.3), *tokens(4))
        sizes = [len(layers)] if len(sizes) == 1 else [5, len(layers) - 10, 5]
        pipe = Pipe(layers, sizes, devices=["cpu:0", "cpu:1", "cpu:0"][: len(sizes)], chunks=2)
        torch.manual_seed(5)
        outputs.append(pipe(*tokens(4)).logits)
    assert torch.equal(*outputs)


def test_copies_and_pickles():
    _, pipe, inputs = converted("transformer", chunks=2)
    for copied in (copy.deepcopy(pipe), pickle.loads(pickle.dumps(pipe))):
        assert torch.equal(copied(**inputs).logits, pipe(**inputs).logits)
        assert repr(copied) == repr(pipe)


def test_layers_can_be_compiled():
    _, pipe, inputs = converted("transformer", chunks=2)
    expected = pipe(**inputs).logits
    for layer in pipe:
        layer.forward = torch.compile(layer.forward, backend="eager")
    assert torch.equal(pipe(**inputs).logits, expected)


def test_custom_functions_keep_their_backward():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * 7

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(Twice.apply(self.a(x)))

    model, x = Net(), torch.randn(3, 4)
    model(x).sum().backward()
    expected = model.a.weight.grad.clone()
    model.zero_grad()
    sequential(model, x)(x).sum().backward()
    assert torch.equal(model.a.weight.grad, expected)


def test_inputs_that_are_written_into():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x += 1
            x[:, 0] = 2.0
            return self.b(self.a(x.type(torch.float32)) * x)

    model, x = Net(), torch.randn(3, 4)
    before = x.clone()
    layers = sequential(model, x)
    assert torch.equal(x, before)
    assert torch.equal(layers(x.clone()), model(x))


def test_what_runs_without_gradients_still_does():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            with torch.no_grad():
                scale = y.abs().amax(-1, keepdim=True) + 1
            return self.b(y / scale)

    model, x = Net(), torch.randn(3, 4)
    layers = sequential(model, x)
    for module in (model, layers):
        module.zero_grad()
        module(x).sum().backward()
    assert "set_grad_enabled(False)" in repr(layers)


def test_memory_that_is_written_under_another_name_stays_in_one_layer():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            whole = self.a(x)
            half = whole[:, :2]
            y = self.b(x)
            half += y[:, :2]
            return self.c(whole)

    torch.manual_seed(0)
    model, x = Net(), torch.randn(4, 4)
    plain = copy.deepcopy(model)
    layers = sequential(model, x)
    pipe = Pipe(layers, [1] * len(layers), devices=[f"cpu:{k}" for k in range(len(layers))])
    assert torch.equal(pipe(x), plain(x))


@pytest.mark.parametrize("kind", [dict, OrderedDict, UserDict])
def test_mappings_as_outputs(kind):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Any:
            result = kind()
            result["out"] = self.b(self.a(x))
            result["aux"] = result["out"] + 1
            return result

    model, x = Net(), torch.randn(4, 4)
    pipe = Pipe(sequential(model, x[:2]), [1, 1], devices=["cpu:0", "cpu:1"], chunks=2)
    ours, theirs = pipe(x), model(x)
    assert type(ours) is kind
    assert list(ours) == ["out", "aux"]
    torch.testing.assert_close(dict(ours), dict(theirs))


def test_values_are_dropped_after_their_last_use():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            for k in range(20):
                x = x * k + 1
            return x

    class Alive(TorchDispatchMode):
        held: list[weakref.ref[Tensor]] = []  # noqa: RUF012
        most = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            self.held.append(weakref.ref(result))
            self.most = max(self.most, sum(ref() is not None for ref in self.held))
            return result

    layers = sequential(Net(), x := torch.randn(3, 4))
    with torch.no_grad(), Alive() as alive:
        layers(x)
    assert len(alive.held) > 40
    assert alive.most <= 4


def test_no_layer_begins_between_a_view_and_a_write_into_it():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            whole = x * 2
            half = whole[:, :2]
            y = self.b(self.a(x))
            half += y[:, :2]
            return self.c(whole)

    model, x = Net(), torch.randn(3, 4)
    layers = sequential(model, x)
    assert len(layers) == 2  # a copy on another device would not see the write
    assert torch.equal(layers(x), model(x))


def test_gradients_are_on_again_after_an_error():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            with torch.no_grad():
                other = self.b(x)
            return x + other

    layers = sequential(Net(), x := torch.randn(3, 4))
    dict(layers.named_modules())["b"].weight.data = torch.zeros(4, 5)
    with pytest.raises(RuntimeError):
        layers(x)
    assert torch.is_grad_enabled()
