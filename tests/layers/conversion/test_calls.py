"""A pipe of a converted model is called as the model is."""

from __future__ import annotations

import linecache
import re
from collections import OrderedDict, UserDict
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

from syncpipe import NoChunk, Pipe, sequential
from tests.layers.conversion.models import Does, Pair, Transformer, tokens


class Two(Pair):
    """Takes all that a function can take."""

    def forward(self, x, /, y=None, *rest, scale=1.0, **more):
        h = self.a(x)
        for other in [y, *rest, *more.values()]:
            if other is not None:
                h = h + other
        return self.b(h) * scale


def two(*args: Any, **kwargs: Any) -> tuple[nn.Module, Pipe]:
    model = Two()
    layers = sequential(model, *args, **kwargs)
    return model, Pipe(layers, [1, 1], devices=["cpu:0", "cpu:1"], chunks=2)


def transformer() -> Pipe:
    layers = sequential(Transformer(), *tokens())
    return Pipe(layers, "uniform", devices=["cpu:0", "cpu:1"], chunks=2)


def test_positional_keyword_and_variable_arguments():
    def given(n: int) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        return (torch.rand(n, 4), torch.rand(n, 1), torch.rand(n, 4)), {"z": torch.rand(n, 4)}

    args, kwargs = given(3)
    model, pipe = two(*args, **kwargs)
    args, kwargs = given(6)
    assert_close(pipe(*args, **kwargs), model(*args, **kwargs))


def test_an_argument_may_be_a_container_that_only_pytree_knows():
    def given(n: int) -> Any:
        return torch.rand(n, 4, 5).max(2)

    model = Does(lambda m, found: m.b(m.a(found.values)) + found.indices)
    layers, found = sequential(model, given(3)), given(5)
    assert torch.equal(layers(found), model(found))


@pytest.mark.parametrize("form", [tuple, dict, OrderedDict, UserDict, MappingProxyType])
def test_train_batch_takes_tuples_as_arguments_and_mappings_by_name(form):
    (ids, mask), pipe = tokens(), transformer()
    given = (ids, mask) if form is tuple else form({"mask": mask, "ids": ids})
    loss, output = pipe.train_batch(
        given, loss_fn=lambda output: output.logits.mean(), return_outputs=True
    )
    assert torch.equal(output.logits, pipe(ids, mask).logits)
    assert torch.allclose(loss, output.logits.mean())
    assert torch.equal(pipe.eval_batch(given).logits, pipe(ids, mask=mask).logits)
    of_many = pipe.train_batch(
        data_iter=iter([(given, None)] * 2), loss_fn=lambda o: o.logits.mean()
    )
    assert_close(of_many, loss)


def test_the_target_is_taken_out_of_a_mapping():
    def loss_fn(output: Any, labels: Tensor) -> Tensor:
        return F.cross_entropy(output.logits.flatten(0, 1), labels.flatten())

    (ids, mask), pipe = tokens(), transformer()
    batch = UserDict({"ids": ids, "mask": mask, "labels": ids})
    loss = pipe.train_batch(batch, target="labels", loss_fn=loss_fn)
    assert_close(loss, loss_fn(pipe(ids, mask), ids).detach())
    assert sorted(batch) == ["ids", "labels", "mask"]
    assert_close(pipe.eval_batch(batch, target="labels", loss_fn=loss_fn), loss)


def test_tensors_without_the_batch_go_whole():
    model, pipe = two(torch.rand(3, 4), torch.rand(4))
    x, y = torch.rand(6, 4), torch.rand(4)
    assert_close(pipe(x, y), model(x, y))
    pipe.train_batch((x, y), loss_fn=torch.mean)
    square = torch.rand(4, 4)  # where NoChunk says by hand what goes whole
    model, pipe = two(torch.rand(4, 4), NoChunk(square[:1]))
    assert_close(pipe(square, square[:1]), model(square, square[:1]))
    assert_close(pipe(square, NoChunk(square[:1])), model(square, square[:1]))
    with pytest.raises(ValueError, match=r"batch size of the sample, 4, .* another dimension"):
        sequential(Two(), torch.rand(4, 4), torch.rand(4))


@pytest.mark.parametrize(
    ("args", "kwargs", "error", "message"),
    [
        ((), {}, TypeError, "missing a required argument: 'x'"),
        ((torch.rand(4, 4),), {}, ValueError, "y is a tensor, and here it is None"),
        ((torch.rand(4, 4),) * 3, {}, ValueError, r"rest\[0\] is not there, and here it is a te"),
        ((torch.rand(4, 4),) * 2, {"scale": 2.0}, ValueError, "scale is 1.0, and here it is 2.0"),
        ((torch.rand(4, 4),) * 2, {"more": 1}, ValueError, r"more\S* is not there, .* is 1,"),
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


class Steps(Pair):
    """Goes through a dimension in a loop, which is written out."""

    def __init__(self, dim: int, only_in: bool | None) -> None:
        super().__init__()
        self.dim, self.only_in = dim, only_in

    def forward(self, x: Tensor) -> Tensor:
        if self.only_in not in (None, self.training):
            return self.b(self.a(x))
        steps = [self.a(x.select(self.dim, k)) for k in range(x.shape[self.dim])]
        return self.b(torch.stack(steps, self.dim))


@pytest.mark.parametrize("only_in", [None, True, False])
def test_a_size_that_the_model_decides_by_must_be_the_samples(only_in):
    model = Steps(1, only_in)
    layers = sequential(model, torch.rand(2, 3, 4))
    x = torch.rand(5, 3, 4)
    assert torch.equal(layers(x), model(x))
    with pytest.raises(ValueError, match=r"x is float32\[5, 2, 4\].* float\[any, 3, 4\]"):
        layers(x[:, :2])
    with pytest.warns(UserWarning, match=r"batches of 3 only.*\n.*for k in range") as caught:
        layers = sequential(Steps(0, only_in), torch.rand(3, 4))  # which is said at conversion
    assert len(caught) == 1
    with pytest.raises(ValueError, match=r"x is float32\[2, 4\]"):
        layers(torch.rand(2, 4))
    pipe = Pipe(layers, [len(layers)], devices=["cpu:0"], chunks=2)  # as the warning says
    assert pipe(torch.rand(6, 4)).shape == (6, 4)


BESIDE = Path(torch.__file__).parent.with_name("torchvision") / "models.py"
CUTS = "def between(_, x):\n    if x.shape[1] > 100:\n        x = x[:, :100]\n    return x\n"


def test_a_decision_by_a_size_is_checked_in_every_call_and_named_in_packages_too(monkeypatch):
    """The name of torchvision's folder begins with that of PyTorch's, whose lines are not named."""
    scope: dict[str, Any] = {}
    exec(compile(CUTS, str(BESIDE), "exec"), scope)
    monkeypatch.setitem(linecache.cache, str(BESIDE), (len(CUTS), None, CUTS.splitlines(), ""))
    layers = sequential(Pair(scope["between"]), torch.rand(2, 9, 4))
    assert layers(torch.rand(2, 50, 4)).shape == (2, 50, 4)
    line = rf"\n  {re.escape(str(BESIDE))}:2, in between: if x\.shape\[1\] > 100"
    with pytest.raises(ValueError, match=f"would do something else:{line}"):
        layers(torch.rand(2, 101, 4))
