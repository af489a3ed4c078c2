"""Mini-batches as loaders give them: dicts, tuples, and loaders themselves."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from syncpipe import Pipe, RepeatingLoader
from tests.support.training import RUNS
from tests.training.loss.whole import assert_trains_like, four, whole

X, Y = torch.randn(7, 3), torch.randn(7, 3)


class Only(nn.Module):
    """Takes one entry of a dict or a tuple; there has to be nothing else."""

    def __init__(self, *entries: Any) -> None:
        super().__init__()
        self.entries = entries

    def forward(self, given: Any) -> Tensor:
        found = list(given) if isinstance(given, dict | UserDict) else list(range(len(given)))
        assert found == list(self.entries)
        chosen: Tensor = given[self.entries[0]]
        return chosen


def pipe_for(*entries: Any, **options: Any) -> Pipe:
    torch.manual_seed(1)
    layers = [Only(*entries), nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)]
    return Pipe(nn.Sequential(*layers), [1, 1, 1, 1], devices=RUNS["1f1b"][1], chunks=3, **options)


def expected(pipe: Pipe) -> Any:
    return whole(nn.Sequential(*list(pipe)[1:]), lambda plain: F.mse_loss(plain(X), Y))


@pytest.mark.parametrize("kind", [dict, UserDict])
@pytest.mark.parametrize("call", ["train_batch", "eval_batch"])
def test_target_may_be_a_key(call: str, kind: Any) -> None:
    pipe, batch = pipe_for("x", "mask"), kind({"x": X, "labels": Y, "mask": None})
    loss = getattr(pipe, call)(batch, target="labels", loss_fn=F.mse_loss)
    torch.testing.assert_close(loss, expected(pipe)[0])
    assert "labels" in batch  # it is the caller's


def test_target_may_be_a_function_of_the_mini_batch() -> None:
    pipe, batch = pipe_for("x", "labels"), {"x": X, "labels": Y / 2}
    loss = pipe.train_batch(batch, target=lambda b: b["labels"] * 2, loss_fn=F.mse_loss)
    torch.testing.assert_close(loss, expected(pipe)[0])


ITEMS: dict[str, tuple[Any, Any, tuple[Any, ...]]] = {
    "pair": (lambda x, y: (x, y), None, ()),
    "dict": (lambda x, y: {"x": x, "y": y}, "y", ("x",)),
    "longer": (lambda x, y: (x, None, y), None, (0, 1)),
    "list": (lambda x, y: [x, None, y], None, (0, 1)),
    "first": (lambda x, y: (y, x, None), 0, (0, 1)),
    "function": (lambda x, y: {"x": x, "y": y}, lambda item: item["y"], ("x", "y")),
}


@pytest.mark.parametrize("kind", ITEMS)
def test_an_iterator_may_give_what_loaders_give(kind: str) -> None:
    make, target, entries = ITEMS[kind]
    pipe = pipe_for(*entries) if entries else four(chunks=3)
    layers = nn.Sequential(*list(pipe)[1:]) if entries else nn.Sequential(*pipe)
    wanted = whole(layers, lambda plain: F.mse_loss(plain(X), Y))
    data = (make(x, y) for x, y in zip(X.chunk(3), Y.chunk(3), strict=True))
    loss = pipe.train_batch(data_iter=data, target=target, loss_fn=F.mse_loss)
    torch.testing.assert_close(loss, wanted[0])


def test_a_dict_may_have_no_target() -> None:
    pipe = pipe_for("x")
    data = ({"x": x} for x in X.chunk(3))
    loss = pipe.train_batch(data_iter=data, loss_fn=lambda y: y.mean())
    torch.testing.assert_close(loss, pipe.eval_batch({"x": X}, loss_fn=lambda y: y.mean()))


REFUSED: dict[str, tuple[Any, Any, type[Exception], str]] = {
    "key": ({"x": X}, "y", ValueError, "target='y', but data_iter gave a dict with 'x' for micro"),
    "index": ((X, Y), 2, ValueError, "target=2, but data_iter gave tuple of 2 for micro-batch 0"),
    "word": ((X, Y), "y", ValueError, "target='y', but data_iter gave tuple of 2"),
    "tensor": ((X, Y), Y, ValueError, "a key, an index or a function .* and is Tensor"),
    "alone": (X, None, TypeError, "data_iter gave Tensor for micro-batch 0"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_not_there_is_named(kind: str) -> None:
    item, target, error, message = REFUSED[kind]
    with pytest.raises(error, match=message):
        four().train_batch(data_iter=iter([item] * 4), target=target, loss_fn=F.mse_loss)


def test_a_key_that_is_none_goes_whole() -> None:
    seen: list[Any] = []
    pipe_for("x").train_batch(
        {"x": X}, "y", loss_fn=lambda out, t: seen.append(t) or out.mean(), verify=False
    )
    assert set(seen) == {"y"}


# --- loaders -------------------------------------------------------------------------------------


def test_a_loader_is_asked_for_one_mini_batch_in_each_step() -> None:
    loader = DataLoader(TensorDataset(torch.arange(10.0).reshape(10, 1), torch.arange(10)), 4)
    pipe, seen = Pipe(nn.Sequential(nn.Linear(1, 1)), [1], devices=["cpu"], chunks=2), []

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        seen.append(target.tolist())
        return output.mean()

    for _ in range(2):  # epochs
        for _ in range(len(loader)):
            pipe.train_batch(data_iter=loader, loss_fn=loss_fn, verify=False)
    epoch = [[0, 1], [2, 3], [4, 5], [6, 7], [8], [9]]
    assert seen == epoch * 2


def test_a_loader_may_give_dicts() -> None:
    rows = [{"x": x, "labels": y} for x, y in zip(X, Y, strict=True)]
    pipe = pipe_for("x")
    loss = pipe.eval_batch(
        data_iter=DataLoader(rows, batch_size=7),  # type: ignore[arg-type]
        target="labels", loss_fn=F.mse_loss,
    )  # fmt: skip
    torch.testing.assert_close(loss, expected(pipe)[0])


def test_an_empty_loader_is_refused() -> None:
    with pytest.raises(ValueError, match=r"there is nothing in <torch\.utils\.data"):
        four().train_batch(data_iter=DataLoader([]), loss_fn=F.mse_loss)


def test_a_repeating_loader_gives_micro_batches() -> None:
    pipe = four(chunks=3)
    wanted = whole(pipe, lambda plain: F.mse_loss(plain(X[:6]), Y[:6]))
    data = RepeatingLoader(DataLoader(TensorDataset(X[:6], Y[:6]), batch_size=2))
    assert_trains_like(pipe, pipe.train_batch(data_iter=data, loss_fn=F.mse_loss), wanted)


# --- what was meant ------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [iter([(X, Y)]), DataLoader([(X, Y)])])
def test_an_iterator_in_the_place_of_the_input_is_noticed(data: Any) -> None:
    with pytest.raises(TypeError, match=r"did you mean data_iter="):
        four().train_batch(data, loss_fn=F.mse_loss)


def test_a_loss_function_by_position_is_noticed() -> None:
    with pytest.raises(TypeError, match=r"write train_batch\(input, target, loss_fn=\.\.\.\)"):
        four().train_batch(X, Y, F.mse_loss)


def test_a_missing_loss_function_is_named() -> None:
    with pytest.raises(TypeError, match="loss_fn is missing"):
        four().train_batch(X, Y)
