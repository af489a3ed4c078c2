"""``Pipe.auto`` on CPU workers: it fits and trains as the model does, or says what is missing."""

from __future__ import annotations

import copy
import inspect
import pickle
from operator import ge
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import syncpipe
from syncpipe import NoChunk, Pipe
from tests.auto.models import BATCH, WRITTEN, Residual, assert_trains, made
from tests.layers.conversion.models import Transformer, tokens
from tests.support.running import Using
from tests.support.untouched import snapshot

QUICK = {"timeout": 0.0}
TWO = ["cpu:0", "cpu:1"]


def bytes_of(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


@pytest.mark.parametrize("unequal", [False, True], ids=["four workers", "two of unequal size"])
@pytest.mark.parametrize("name", WRITTEN)
def test_it_fits_and_trains(name: str, unequal: bool, capsys: pytest.CaptureFixture[str]) -> None:
    model, args, kwargs = made(WRITTEN[name])
    plain = copy.deepcopy(model)
    devices: dict[str, Any] = {"devices": 4}
    if unequal:  # with Adam neither holds four times the parameters, and all else
        size = 4 * bytes_of(model)
        devices = {"devices": TWO, "memory": [0.55 * size + 2e6, 0.95 * size + 2.4e6]}
    pipe = Pipe.auto(model, *args, batch_size=BATCH, **devices, **QUICK, **kwargs)
    if unequal:  # the largest device comes first
        assert [device.index for device in pipe.devices] == [1, 0][: len(pipe.balance)]
        assert all(map(ge, devices["memory"][::-1], [4 * bytes_of(p) for p in pipe.partitions]))
    assert_trains(pipe, plain, args, kwargs)
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["fits", "speed", "limited by"]
    assert "left" in lines[0]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Of each plan: the profile, memory, and numbers of micro-batches."""
    found: list[Any] = []
    plan = syncpipe.planner.auto.plan

    def noted(profile: syncpipe.balance.Profile, **options: Any) -> Any:
        found.append((profile, options["memory"], options["chunks"]))
        return plan(profile, **options)

    monkeypatch.setattr("syncpipe.planner.auto.plan", noted)
    return found


def test_nothing_of_the_model_is_changed(asked: list[Any]) -> None:
    """Parameters, buffers, gradients, hooks that step, modes and generators, bit for bit."""
    model = nn.Sequential(
        nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 8), nn.ReLU()
    )
    model[2].eval()
    first = model[0].weight
    first.grad = torch.full_like(first, 3.0)
    steps: list[Tensor] = []
    handle = model[3].weight.register_post_accumulate_grad_hook(lambda p: p.data.add_(p.grad))
    model[3].weight.register_post_accumulate_grad_hook(steps.append)
    x = torch.randn(4, 8)
    before = snapshot(model, x)
    pipe = Pipe.auto(model, x, batch_size=8, devices=TWO, **QUICK)
    assert [chunks for *_, chunks in asked] == [[1, 2, 4]]  # BatchNorm needs two samples
    assert snapshot(model, x) == before
    assert pipe.training
    assert all(mine is theirs for mine, theirs in zip(pipe, model, strict=True))
    assert steps == []
    handle.remove()
    pipe.train_batch(torch.randn(8, 8), loss_fn=torch.mean)
    assert len(steps) > 0  # the hook is there again


def test_it_takes_the_next_plan_where_a_step_does_not_fit(
    asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the layers are measured once."""
    train, fitting = Pipe.train_batch, [3]

    def fails(self: Pipe, *args: Any, **kwargs: Any) -> Any:
        if len(asked) not in fitting:
            raise torch.OutOfMemoryError("tried to take 7 bytes")
        return train(self, *args, **kwargs)

    monkeypatch.setattr(Pipe, "train_batch", fails)
    call: Any = {"batch_size": 8, "devices": TWO, "memory": "1MB", **QUICK}
    with torch.device("meta"):
        model = Residual(32, 3)
    held = list(model.parameters())  # by an optimizer
    pipe = Pipe.auto(model, torch.randn(2, 24), **call)
    assert all(p is q and not p.is_meta for p, q in zip(held, pipe.parameters(), strict=True))
    assert len(asked) == 3
    assert len({id(profile) for profile, _, _ in asked}) == 1
    memory = [memory[0] / 1e6 for _, memory, _ in asked]
    assert memory == pytest.approx([1, 0.95, 0.95**2])
    chunks = [chunks for *_, chunks in asked]
    assert chunks[0] is None
    assert min(chunks[1]) < min(chunks[2]) or chunks[2] == [8]
    assert pipe.chunks in chunks[2]
    del asked[:], fitting[:]
    with pytest.raises(ValueError, match=r"no plan fits, even for 70% .*to take 7 bytes"):
        Pipe.auto(Residual(32, 3), torch.randn(2, 24), **call)
    assert len(asked) == 8


def test_the_loss_and_its_target_are_tried() -> None:
    seen: list[Any] = []

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        seen.append((output.shape, target.shape))
        return nn.functional.cross_entropy(output, target)

    model, target = Residual(16, 2), torch.randint(10, (2,))
    pipe = Pipe.auto(
        model, torch.randn(2, 24), batch_size=6, devices=TWO, loss_fn=loss_fn, target=target,
        verbose=False, **QUICK,
    )  # fmt: skip
    assert sum(shape[0] for shape, _ in seen) == 6
    assert all(output[0] == target[0] for output, target in seen)
    assert pipe.chunks == len(seen)


def test_what_is_not_cut_goes_whole_to_each_micro_batch() -> None:
    biased = Using(lambda x, bias, a, b: b(a(x) + bias), nn.Linear(4, 4), nn.Linear(4, 4))
    pipe = Pipe.auto(
        biased, torch.randn(2, 4), NoChunk(torch.ones(4)), batch_size=8, devices=TWO, **QUICK
    )
    assert len(pipe(torch.randn(8, 4), NoChunk(torch.ones(4)))) == 8


def test_beside_one_tensor_there_may_be_what_is_not_its_default() -> None:
    ids = tokens(4)[0]
    pipe = Pipe.auto(Transformer(), ids, batch_size=8, devices=TWO, hidden=True, **QUICK)
    assert len(pipe(ids, hidden=True).hidden) == 3


class Whole(nn.Module):
    """Python that cannot be followed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def linear() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def small() -> nn.Module:
    return Residual(8, 1)


X, Y = torch.ones(2, 24), torch.ones(2, 4)
BAD: dict[str, tuple[Any, Any, dict[str, Any], type[Exception], str]] = {
    "no sample": (small, (), {}, TypeError, r"needs a sample.*Pipe.auto\(model, input"),
    "no batch": (linear, (torch.tensor(1.0),), {}, ValueError, "no dimension"),
    "no batch, converted": (small, (torch.tensor(1.0),), {}, ValueError, "batch in dimension 0"),
    "no model": (lambda: [nn.ReLU()], (Y,), {}, TypeError, "takes an nn.Module, not list"),
    "a pipe": (lambda: Pipe(linear(), [2]), (Y,), {}, TypeError, "a Pipe already"),
    "cannot be cut": (Whole, (Y,), {}, ValueError, "Whole cannot be cut, because it is one layer"),
    "no loss for a target": (small, (X,), {"target": Y}, ValueError, "give loss_fn="),
    "a layer larger than any device": (
        lambda: Residual(400, 2), (X,), {"memory": "1MB"}, ValueError,
        r"needs [\d.]+ MB, [\d.]+ MB more than the 1.0+ MB",
    ),
    "a batch of none": (small, (X,), {"batch_size": 0}, ValueError, "batch_size=0"),
    "two inputs for a Sequential": (linear, (Y, 1), {}, TypeError, "takes one input"),
    "a batch that is text": (small, (X,), {"batch_size": "8"}, TypeError, "must be an integer"),
    "a batch of halves": (small, (X,), {"batch_size": 2.5}, TypeError, "batch_size=2.5: the "),
    "what it chooses": (small, (X,), {"chunks": 2}, TypeError, "chunks= is chosen by Pipe.auto"),
    "weights": (small, (X,), {"weights": "a"}, ValueError, "weights='a' needs a model on meta"),
    "a sample on meta": (small, (X.to("meta"),), {}, ValueError, "the sample is on meta"),
    "an empty sample": (small, (X[:0],), {}, ValueError, "holds no tensor with a batch"),
    "a sample that does not fit": (small, (Y,), {}, ValueError, "shapes cannot be multiplied"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_done_is_said(name: str) -> None:
    model, args, options, error, match = BAD[name]
    with pytest.raises(error, match=match):
        Pipe.auto(model(), *args, **{"batch_size": 8, "devices": TWO, **QUICK, **options})


class Gate(nn.Module):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x if mask.all() else x * mask[:, None]


class Masked(nn.Module):
    """Looks at values, which there are none of on ``meta``; one weight is tied, one is its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.last.weight = self.first.weight
        self.gate = Gate()
        self.shift = nn.Parameter(torch.empty(4))
        self.register_buffer("scale", torch.empty(4), persistent=False)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.first(x) + self.shift
        return self.last(torch.relu(self.gate(x, mask))) * self.scale


def test_a_model_on_meta_is_converted_with_values_and_filled_when_it_is_cut() -> None:
    with torch.device("meta"):
        model = Masked()

    def init(module: nn.Module) -> None:
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            nn.init.constant_(tensor, 0.5)

    x, mask = torch.randn(2, 4), torch.tensor([1.0, 0.0])
    layers = syncpipe.sequential(model, x, mask, verify=False)
    assert all(t.is_meta for part in (model, layers) for t in (*part.parameters(), *part.buffers()))
    pipe = Pipe.auto(
        model, x, mask, batch_size=4, devices=TWO, init_fn=init, verbose=False, **QUICK
    )
    plain = Masked()
    plain.apply(init)
    assert torch.equal(pipe(x, mask), plain(x, mask))
    assert model.first.weight is model.last.weight
    assert not model.first.weight.is_meta


def test_an_error_in_the_step_leaves_the_layers_where_they_were() -> None:
    def loss_fn(output: Tensor) -> Tensor:
        raise KeyError("as it was told")

    model = Residual(8, 2)
    with pytest.raises(KeyError, match="as it was told"):
        Pipe.auto(model, torch.ones(2, 24), batch_size=4, devices=TWO, loss_fn=loss_fn, **QUICK)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model(torch.ones(2, 24)).shape == (2, 10)


def test_a_converted_pipe_has_the_signature_of_the_model() -> None:
    """For trainers, which take from a data set what the model names."""

    def names(pipe: Pipe) -> list[str]:
        return list(inspect.signature(pipe.forward).parameters)

    pipe = Pipe(syncpipe.sequential(Transformer(), *tokens()), "uniform", devices=TWO)
    ids, mask = tokens()
    for one in (pipe, copy.deepcopy(pipe), pickle.loads(pickle.dumps(pipe))):
        assert names(one) == ["ids", "mask", "hidden", "more"]
        assert one.forward(mask=mask, ids=ids).logits.shape == (5, 7, 20)
    assert names(Pipe(nn.Sequential(nn.ReLU()), [1])) == ["args", "kwargs"]
