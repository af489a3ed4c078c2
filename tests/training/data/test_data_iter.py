"""Micro-batches and mini-batches from iterators and loaders."""

from __future__ import annotations

import gc
import weakref
from collections import UserDict
from collections.abc import Iterator
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

from syncpipe import Pipe, RepeatingLoader
from tests.support.models import linear_model
from tests.support.running import Do, pipe_of
from tests.support.training import KINDS, RUNS
from tests.support.watched import Grads
from tests.training.loss.whole import four, whole


@pytest.mark.parametrize("run", KINDS)
@pytest.mark.parametrize("given", [0, 1, 3])
def test_an_iterator_that_ends_early_leaves_grad_as_it_was(given, run):
    pipe = Pipe(linear_model(), [1, 1, 1, 1], devices=RUNS[run][1], chunks=4)
    before, data = Grads(pipe), iter([(torch.randn(2, 3), None)] * given)
    with pytest.raises(ValueError, match=rf"data_iter ended.*micro-batch {given} of 4") as caught:
        pipe.train_batch(data_iter=data, loss_fn=torch.sum, **RUNS[run][0])
    assert "RepeatingLoader" in str(caught.value)
    assert before.unchanged()


X, Y = torch.randn(7, 3), torch.randn(7, 3)


def only(*entries: Any) -> nn.Module:
    """Takes the first of these entries, if there have to be some, and nothing else is there."""

    def take(given: Any) -> Any:
        found = [...]
        if not isinstance(given, Tensor):
            found = [*given] if isinstance(given, dict | UserDict) else [*range(len(given))]
        assert found == [*(entries or [...])]
        return given[found[0]] if entries else given

    return Do(take)


#: What is given for an input and a target, where the target is, and what is left of it.
ITEMS: dict[str, tuple[Any, Any, tuple[Any, ...]]] = {
    "pair": (lambda x, y: (x, y), None, ()),
    "dict": (lambda x, y: {"x": x, "y": y, "mask": None}, "y", ("x", "mask")),
    "mapping": (lambda x, y: UserDict({"x": x, "y": y}), "y", ("x",)),
    "longer": (lambda x, y: (x, None, y), None, (0, 1)),
    "list": (lambda x, y: [x, None, y], None, (0, 1)),
    "first": (lambda x, y: (y, x, None), 0, (0, 1)),
    "function": (lambda x, y: {"x": x, "y": y / 2}, lambda item: item["y"] * 2, ("x", "y")),
    "numbers": (lambda x, y: {0: x, 1: y}, 1, (0,)),
}


@pytest.mark.parametrize("whole_batch", [False, True], ids=["iterator", "mini-batch"])
@pytest.mark.parametrize("call", ["train_batch", "eval_batch"])
@pytest.mark.parametrize("kind", ITEMS)
def test_data_may_be_what_loaders_give(kind: str, call: str, whole_batch: bool) -> None:
    make, target, entries = ITEMS[kind]
    pipe = pipe_of(nn.Sequential(only(*entries), *linear_model(3)), chunks=3)
    wanted, _ = whole(nn.Sequential(*pipe[1:]), lambda plain: F.mse_loss(plain(X), Y))
    item = make(X, Y)
    given: Any = {"input": item}
    if not whole_batch:
        given = {"data_iter": map(make, X.chunk(3), Y.chunk(3))}
    elif not isinstance(item, dict | UserDict) or target == 1:
        pytest.skip("its target is given beside it")
    loss = getattr(pipe, call)(**given, target=target, loss_fn=F.mse_loss)
    torch.testing.assert_close(loss, wanted)
    assert kind != "dict" or "y" in item  # it is the caller's


class Samples(IterableDataset):
    def __iter__(self) -> Any:
        return zip(X, Y, strict=True)


class Rows:
    """As a ``datasets.Dataset``: samples by index, and one after another."""

    def __getitem__(self, k: int) -> Any:
        return X[k], Y[k]

    def __len__(self) -> int:
        return len(X)

    def __iter__(self) -> Any:
        return iter([self[k] for k in range(len(self))])


DATASETS = [Samples(), Rows(), TensorDataset(X, Y), Subset(TensorDataset(X, Y), [0, 1])]


@pytest.mark.parametrize("data", DATASETS, ids=lambda data: type(data).__name__)
def test_a_dataset_gives_samples_and_is_refused(data: Any) -> None:
    pipe = pipe_of(linear_model(3), chunks=2)
    calls: list[Any] = [
        lambda: pipe.train_batch(data_iter=data, loss_fn=F.mse_loss),
        lambda: pipe.eval_batch(data_iter=data, loss_fn=F.mse_loss),
        lambda: pipe.train_stream(data, optimizer=torch.optim.SGD, loss_fn=F.mse_loss),
        lambda: RepeatingLoader(data),
    ]
    for call in calls:
        with pytest.raises(TypeError, match=f"a {type(data).__name__}, which gives samples.*wrap"):
            call()
    loader = DataLoader(data, batch_size=2)
    assert pipe.train_batch(data_iter=loader, loss_fn=F.mse_loss).isfinite()
    assert next(RepeatingLoader(DataLoader(data, batch_size=None)))[0].shape == (3,)


@pytest.mark.parametrize("call", ["train_batch", "eval_batch"])
@pytest.mark.parametrize(
    ("input", "message"),
    [
        ({"x": X, "labels": Y}, "target='label', but the input is a dict with 'x', 'labels'"),
        (UserDict({"x": X, "labels": Y}), "target='label', but .* 'x', 'labels'"),
        ((X, Y), "target='label' is a key, and the input is a tuple"),
    ],
)
def test_a_key_that_is_not_there_is_answered_by_those_that_are(
    call: str, input: Any, message: str
) -> None:
    pipe = pipe_of(linear_model(3), chunks=2)
    with pytest.raises((TypeError, ValueError), match=message):
        getattr(pipe, call)(input, target="label", loss_fn=F.mse_loss)


def test_a_mapping_that_cannot_be_changed_has_its_target_by_key() -> None:
    pipe = pipe_of(nn.Sequential(only("x"), *linear_model(3)), chunks=3)
    given = MappingProxyType({"x": X, "y": Y})
    loss = pipe.eval_batch(given, target="y", loss_fn=F.mse_loss)
    torch.testing.assert_close(loss, F.mse_loss(nn.Sequential(*pipe[1:])(X), Y))


REFUSED: list[tuple[Any, Any, type[Exception], str]] = [
    ({"x": X}, "y", ValueError, "target='y', but data_iter gave a dict with 'x' for micro"),
    ((X, Y), 2, ValueError, "target=2, but data_iter gave tuple of 2 for micro-batch 0"),
    ((X, Y), "y", ValueError, "target='y', but data_iter gave tuple of 2"),
    ((X, Y), Y, ValueError, "their key or index .* not Tensor"),
    (X, None, TypeError, "data_iter gave Tensor for micro-batch 0"),
    ((X,), None, TypeError, "data_iter gave tuple of 1"),
    (None, None, TypeError, "data_iter gave NoneType"),
]
ELSEWHERE: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    ((), {"data_iter": DataLoader([])}, ValueError, r"nothing in <torch\.utils\.data"),
    ((iter([(X, Y)]),), {}, TypeError, "did you mean data_iter="),
    ((DataLoader([(X, Y)]),), {}, TypeError, "did you mean data_iter="),
]
ITEMS_REFUSED = [
    ((), {"data_iter": iter([item] * 4), "target": target}, *error)
    for item, target, *error in REFUSED
]


@pytest.mark.parametrize(("given", "options", "error", "message"), [*ELSEWHERE, *ITEMS_REFUSED])
def test_what_is_not_there_or_in_the_wrong_place_is_named(
    given: Any, options: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        four().train_batch(*given, loss_fn=F.mse_loss, **options)


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


@dataclass
class Items:
    """A loader that is equal to others, and has no hash."""

    size: int

    def __iter__(self) -> Iterator[tuple[Tensor, None]]:
        return iter([(torch.full((4, 3), float(k)), None) for k in range(self.size)])


def test_loaders_that_are_equal_give_their_own_mini_batches() -> None:
    first, second = Items(2), Items(2)
    pipe = pipe_of(nn.Sequential(nn.Identity(), nn.Linear(3, 3)), chunks=1)
    seen: list[float] = []
    pipe[0].register_forward_hook(lambda _, args, __: seen.append(float(args[0][0, 0])))
    for loader in (first, second, first):
        pipe.train_batch(data_iter=loader, loss_fn=torch.sum, verify=False)
    assert seen == [0, 0, 1]


class Generated(Items):
    """A loader whose iterator holds it."""

    def __iter__(self) -> Iterator[tuple[Tensor, None]]:
        yield from super().__iter__()


def test_a_pass_through_a_loader_belongs_to_one_pipe_and_ends_with_it() -> None:
    loader, seen = Generated(3), []
    for _ in range(2):
        pipe = pipe_of(nn.Sequential(nn.Identity(), nn.Linear(3, 3)), chunks=1)
        pipe[0].register_forward_hook(lambda _, args, __: seen.append(float(args[0][0, 0])))
        for _ in range(2):
            pipe.train_batch(data_iter=loader, loss_fn=torch.sum, verify=False)
    assert seen == [0, 1, 0, 1]
    gone = weakref.ref(loader)
    del loader, pipe
    gc.collect()
    assert gone() is None


def test_a_repeating_loader_begins_again_also_after_an_empty_pass_or_one_that_fails():
    items, fails = [1, 2], []

    class Flaky:
        def __iter__(self):
            for item in items:
                yield item
                for error in fails:
                    raise error

    data = RepeatingLoader(Flaky())
    assert iter(data) is data
    assert [next(data) for _ in range(5)] == [1, 2, 1, 2, 1]
    fails.append(OSError("disk"))
    with pytest.raises(OSError, match="disk"):
        next(data)
    fails.clear()
    assert [next(data) for _ in range(4)] == [1, 2, 1, 2]
    items.clear()
    with pytest.raises(ValueError, match="nothing in"):
        next(data)
    items.append(4)
    assert next(data) == 4


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ((x for x in [1]), TypeError, "cannot restart generator"),
        (3, TypeError, "iterable, not int"),
        *[(empty, ValueError, "nothing in") for empty in ([], {}, DataLoader([]))],
    ],
)
def test_a_repeating_loader_refuses_what_it_cannot_repeat(given, error, message):
    with pytest.raises(error, match=message):
        next(RepeatingLoader(given))
