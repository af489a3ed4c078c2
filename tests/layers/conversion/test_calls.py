"""A pipe of a converted model is called as the model is."""

from __future__ import annotations

import sys
from collections import OrderedDict, UserDict
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from syncpipe import NoChunk, Pipe, sequential
from tests.layers.conversion.models import Output, ResNet, Transformer, tokens


class Two(nn.Module):
    """Takes all that a function can take."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, /, y=None, *rest, scale=1.0, **more):
        h = self.a(x)
        for other in [y, *rest, *more.values()]:
            if other is not None:
                h = h + other
        return self.b(h) * scale


def two(*args: Any, chunks: int = 2, **kwargs: Any) -> tuple[nn.Module, Pipe]:
    model = Two()
    layers = sequential(model, *args, **kwargs)
    return model, Pipe(layers, [1, 1], devices=["cpu:0", "cpu:1"], chunks=chunks)


def test_positional_keyword_and_variable_arguments():
    def given(n: int) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        return (torch.rand(n, 4), torch.rand(n, 1), torch.rand(n, 4)), {"z": torch.rand(n, 4)}

    args, kwargs = given(3)
    model, pipe = two(*args, **kwargs)
    args, kwargs = given(6)
    assert_close(pipe(*args, **kwargs), model(*args, **kwargs))


def test_outputs_are_of_the_models_type():
    layers = sequential(Transformer(), *tokens(), hidden=True)
    pipe = Pipe(layers, [5, len(layers) - 5], devices=["cpu:0", "cpu:1"])
    output = pipe(*tokens(), hidden=True)
    assert type(output) is Output
    assert [state.shape for state in output.hidden] == [(5, 7, 8)] * 3


@pytest.mark.parametrize("form", [tuple, dict])
def test_train_batch_takes_tuples_as_arguments_and_dicts_by_name(form):
    ids, mask = tokens()
    layers = sequential(Transformer(), ids, mask=mask)
    pipe = Pipe(layers, [5, len(layers) - 5], devices=["cpu:0", "cpu:1"], chunks=2)
    given = (ids, mask) if form is tuple else {"mask": mask, "ids": ids}
    loss, output = pipe.train_batch(
        given, loss_fn=lambda output: output.logits.mean(), return_outputs=True
    )
    assert torch.equal(output.logits, pipe(ids, mask).logits)
    assert torch.allclose(loss, output.logits.mean())
    assert torch.equal(pipe.eval_batch(given).logits, pipe(ids, mask=mask).logits)


def test_micro_batches_of_an_iterator():
    layers = sequential(Transformer(), *tokens())
    pipe = Pipe(layers, [5, len(layers) - 5], devices=["cpu:0", "cpu:1"], chunks=2)
    items = iter([(tokens(2), None), ({"ids": tokens(1)[0], "mask": tokens(1)[1]}, None)])
    pipe.train_batch(data_iter=items, loss_fn=lambda output: output.logits.mean())


def test_tensors_without_the_batch_go_whole():
    model, pipe = two(torch.rand(3, 4), torch.rand(4))
    x, y = torch.rand(6, 4), torch.rand(4)
    assert_close(pipe(x, y), model(x, y))
    pipe.train_batch((x, y), loss_fn=torch.mean)


def test_no_chunk_says_by_hand_what_goes_whole():
    square = torch.rand(4, 4)
    model, pipe = two(torch.rand(4, 4), NoChunk(square[:1]))
    assert_close(pipe(square, square[:1]), model(square, square[:1]))
    assert_close(pipe(square, NoChunk(square[:1])), model(square, square[:1]))


def test_a_sample_that_does_not_show_what_is_cut_is_refused():
    with pytest.raises(ValueError, match=r"batch size of the sample, 4, .* another dimension"):
        sequential(Two(), torch.rand(4, 4), torch.rand(4))


@pytest.mark.parametrize(
    ("args", "kwargs", "error", "message"),
    [
        ((), {}, TypeError, "missing a required argument: 'x'"),
        ((torch.rand(4, 4),), {}, ValueError, "y is none"),
        (
            (torch.rand(4, 4), torch.rand(4, 4), torch.rand(4, 4)),
            {},
            ValueError,
            r"rest\S* is a te",
        ),
        ((torch.rand(4, 4), torch.rand(4, 4)), {"scale": 2.0}, ValueError, "scale=1.0, not 2.0"),
        ((torch.rand(4, 4), torch.rand(3, 4)), {}, ValueError, r"differ in dimension 0:"),
        ((torch.rand(4, 5), torch.rand(4, 4)), {}, ValueError, r"x is float32\[4, 5\]"),
        ((torch.rand(4, 4), torch.ones(4, 4).bool()), {}, ValueError, r"y is bool\[4, 4\]"),
    ],
)
def test_calls_unlike_the_sample_are_refused(args, kwargs, error, message):
    _, pipe = two(torch.rand(3, 4), torch.rand(3, 4))
    with pytest.raises(error, match=message):
        pipe(*args, **kwargs)
    if not kwargs:
        with pytest.raises(error, match=message):
            pipe.train_batch(args, loss_fn=torch.mean)


def test_ordinary_pipes_take_exactly_one_input():
    pipe = Pipe(nn.Sequential(nn.Linear(4, 4)), [1], devices=["cpu:0"])
    x = torch.rand(2, 4)
    assert torch.equal(pipe(input=x), pipe(x))
    for args in ((), (x, x)):
        with pytest.raises(TypeError, match="positional argument"):
            pipe(*args)


def test_a_size_that_the_model_decides_by_must_be_the_samples():
    class Steps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.stack([self.a(x[:, k]) for k in range(x.shape[1])], 1))

    model = Steps()
    layers = sequential(model, torch.rand(2, 3, 4))
    x = torch.rand(5, 3, 4)
    assert torch.equal(layers(x), model(x))
    with pytest.raises(ValueError, match=r"x is float32\[5, 2, 4\].* float\[any, 3, 4\]"):
        layers(x[:, :2])


def test_a_module_that_decides_by_a_size_is_left_whole():
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) if x.shape[0] > 2 else self.b(x)

    model = nn.Sequential(ResNet(4), nn.Linear(2, 4), Halves(), nn.Linear(4, 4))
    model.eval()
    layers = sequential(model, torch.rand(3, 4))
    for n in (1, 2, 3, 7):
        x = torch.rand(n, 4)
        assert torch.equal(layers(x), model(x))


def test_a_decision_by_a_size_is_checked_in_every_call():
    class Short(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            if x.shape[1] > 100:
                x = x[:, :100]
            return self.b(x)

    layers = sequential(Short(), torch.rand(2, 9, 4))
    assert layers(torch.rand(2, 50, 4)).shape == (2, 50, 4)
    with pytest.raises(ValueError, match=r"would do something else:\n .*if x\.shape\[1\] > 100"):
        layers(torch.rand(2, 101, 4))


def test_a_decision_that_makes_no_difference_keeps_nobody_away():
    class Expands(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            where = torch.arange(4.0)[None]
            if x.shape[0] != where.shape[0]:
                where = where.expand(x.shape[0], -1)
            return self.b(self.a(x) + where)

    model = Expands()
    layers = sequential(model, torch.rand(3, 4))
    for n in (1, 2, 5):
        x = torch.rand(n, 4)
        assert torch.equal(layers(x), model(x))


def test_len_of_a_tensor_is_a_size_like_any_other():
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.start, self.a, self.b = (
                nn.Parameter(torch.rand(1, 4)),
                nn.Linear(4, 4),
                nn.Linear(4, 4),
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x) + self.start.expand(len(x), -1))

    model = Tokens()
    layers = sequential(model, torch.rand(3, 4))
    pipe = Pipe(layers, [1, len(layers) - 1], devices=["cpu:0", "cpu:1"], chunks=2)
    for n in (2, 5, 8):
        x = torch.rand(n, 4)
        assert_close(pipe(x), model(x))


def test_what_pins_the_batch_is_said_at_conversion():
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.stack([self.a(x[k]) for k in range(x.shape[0])]))

    with pytest.warns(UserWarning, match=r"batches of 3 only.*\n.*for k in range") as caught:
        layers = sequential(Loop(), torch.rand(3, 4))
    assert len(caught) == 1
    with pytest.raises(ValueError, match=r"x is float32\[2, 4\]"):
        layers(torch.rand(2, 4))


@pytest.mark.parametrize("kind", [OrderedDict, UserDict, MappingProxyType])
def test_any_mapping_is_arguments_by_name(kind):
    ids, mask = tokens()
    layers = sequential(Transformer(), ids, mask=mask)
    pipe = Pipe(layers, [5, len(layers) - 5], devices=["cpu:0", "cpu:1"], chunks=2)
    given = kind({"mask": mask, "ids": ids})
    loss = pipe.train_batch(given, loss_fn=lambda output: output.logits.mean())
    assert_close(loss, pipe(ids, mask).logits.mean().detach())
    assert_close(pipe.eval_batch(given).logits, pipe(ids, mask).logits)


def test_the_target_is_taken_out_of_a_mapping():
    ids, mask = tokens()
    layers = sequential(Transformer(), ids, mask=mask)
    pipe = Pipe(layers, [5, len(layers) - 5], devices=["cpu:0", "cpu:1"], chunks=2)
    batch = UserDict({"ids": ids, "mask": mask, "labels": ids})

    def loss_fn(output: Any, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output.logits.flatten(0, 1), labels.flatten())

    loss = pipe.train_batch(batch, target="labels", loss_fn=loss_fn)
    assert_close(loss, loss_fn(pipe(ids, mask), ids).detach())
    assert sorted(batch) == ["ids", "labels", "mask"]
    assert_close(pipe.eval_batch(batch, target="labels", loss_fn=loss_fn), loss)


def test_dimensions_of_other_sizes_are_found_in_few_runs():
    runs = []

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.b(self.a(x))
            if x.shape[0] > 2 and x.shape[1] > 3:
                x = x + 1
            return x * 2 if self.training else x

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Odd() for _ in range(100))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            runs.append(1)
            for block in self.blocks:
                x = block(x)
            return x + y

    layers = sequential(Deep(), torch.rand(3, 5, 4), torch.rand(3, 5, 4))
    assert len(layers) == 100
    assert len(runs) <= 20
    x = torch.rand(2, 7, 4)
    layers(x, x)


def test_what_takes_long_is_shown(monkeypatch, capfd):
    seconds = iter(range(1000))
    monkeypatch.setattr("syncpipe.layers.conversion.leaves.time.monotonic", lambda: next(seconds))
    monkeypatch.setitem(sys.modules, "tqdm", None)
    sequential(ResNet(), torch.rand(3, 6))
    assert capfd.readouterr().err.count("sequential(ResNet) runs the model") == 1
