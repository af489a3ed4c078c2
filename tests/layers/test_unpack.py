"""``unpack=True``: layers with several arguments, as in a ``PipeSequential`` without a pipe."""

from __future__ import annotations

import copy
from collections import namedtuple
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from syncpipe import Pipe, PipeSequential, plan
from syncpipe.balance import balance_by_size, balance_by_time, profile
from syncpipe.skip import pop, skippable, stash
from tests.support.compare import assert_same
from tests.support.models import CHECKPOINT_MODES
from tests.support.running import Do
from tests.support.training import FOUR, weigh

WIDTH = 6


class Block(nn.Module):
    """Two arguments in, two out: the mask and what else there is ride along."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None, step: int = 1) -> Any:
        y = nn.functional.dropout(self.linear(x).tanh() * step, 0.2, self.training)
        return (x + y if mask is None else torch.where(mask, x + y, x)), mask, step


def to_names(x: Tensor, mask: Tensor | None, step: int) -> Any:
    """From positional to keyword arguments."""
    return {"mask": mask, "hidden": x * step, "bias": torch.ones(WIDTH)}


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, *, hidden: Tensor, mask: Tensor | None, bias: Tensor) -> Any:
        y = self.linear(hidden) + bias
        return {"hidden": y if mask is None else y.masked_fill(~mask, 0.0), "mask": mask, "bias": y}


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 2)

    def forward(self, hidden: Tensor, mask: Tensor | None, bias: Tensor) -> Tensor:
        return self.linear(hidden * bias)


@skippable(stash=["early"])
class Send(nn.Module):
    def forward(self, x: Tensor, mask: Tensor | None, step: int) -> Any:
        yield stash("early", x * 2)
        return x, mask, step


@skippable(pop=["early"])
class Receive(nn.Module):
    def forward(self, x: Tensor, mask: Tensor | None, step: int) -> Any:
        early = yield pop("early")
        return x + early, mask, step


def model_of() -> PipeSequential:
    torch.manual_seed(0)
    return PipeSequential(Block(), Send(), Block(), Receive(), Do(to_names), Named(), Head()).eval()


def batch(masked: bool = True) -> tuple[Tensor, Tensor | None, int]:
    torch.manual_seed(1)
    x = torch.randn(8, WIDTH, requires_grad=True)
    return x, torch.rand(8, WIDTH) > 0.3 if masked else None, 2


def written_out(model: nn.Sequential, x: Tensor, mask: Tensor | None, step: int) -> Tensor:
    """The plain loop over the layers, by hand."""
    first, _, second, _, names, named, head = model
    hidden, mask, step = first(x, mask, step)
    early = hidden * 2
    hidden, mask, step = second(hidden, mask, step)
    return head(**named(**names(hidden + early, mask, step)))


def parts_of(values: tuple[Any, ...], m: int) -> list[tuple[Any, ...]]:
    cut = [list(v.chunk(m)) if isinstance(v, Tensor) else [v] * m for v in values]
    return list(zip(*cut, strict=True))


def gradients(model: nn.Module, x: Tensor) -> list[Any]:
    return [x.grad, *(p.grad for p in model.parameters())]


def test_a_pipe_takes_the_arguments_of_the_first_layer():
    model, (x, mask, step) = model_of(), batch()
    pipe = Pipe(model, [4, 3], devices=["cpu"] * 2, chunks=2)
    expected = pipe((x, mask, step))
    assert torch.equal(pipe(x, mask, step), expected)
    assert torch.equal(pipe(step=step, x=x, mask=mask), expected)
    with pytest.raises(TypeError, match="one input"):
        pipe(x, mask=mask, step=step)


@settings(max_examples=25, deadline=None)
@given(
    cuts=st.sets(st.integers(1, 6)),
    chunks=st.integers(1, 4),
    checkpoint=st.sampled_from(CHECKPOINT_MODES),
    masked=st.booleans(),
    by_class=st.booleans(),
    schedule=st.sampled_from([None, "gpipe", "1f1b", "zb_h1"]),
)
def test_as_the_plain_loop_written_out(cuts, chunks, checkpoint, masked, by_class, schedule):
    """In ``pipe(x)``, or by ``train_batch`` and ``eval_batch``."""
    plain = model_of()
    mine = copy.deepcopy(plain)
    balance = [b - a for a, b in pairwise([0, *sorted(cuts), 7])]
    pipe = Pipe(
        mine if by_class else nn.Sequential(*mine),
        balance,
        devices=[f"cpu:{j}" for j in range(len(balance))],
        chunks=chunks,
        checkpoint=checkpoint,
        unpack=not by_class,
    ).eval()
    given, other = batch(masked), batch(masked)
    outputs = [written_out(plain, *part) for part in parts_of(given, chunks)]
    expected = torch.cat(outputs)
    if schedule is None:
        weigh(expected).backward()
        actual = pipe(other)
        weigh(actual).backward()
    else:
        losses = [output.pow(2).sum() for output in outputs]
        for loss in losses[::-1] if schedule == "gpipe" else losses:
            loss.backward()
        options: Any = {"schedule": schedule, "loss_reduction": "sum"}
        loss = pipe.train_batch(other, loss_fn=lambda y: y.pow(2).sum(), **options)
        assert torch.equal(loss, sum(losses[1:], losses[0]).detach())
        actual = pipe.eval_batch(other)
    assert torch.equal(actual, expected)
    rounded = schedule == "zb_h1"
    assert_same(gradients(pipe, other[0]), gradients(plain, given[0]), rounded=rounded)


def test_partitions_and_slices_called_by_hand_do_the_same():
    plain = model_of()
    pipe = Pipe(copy.deepcopy(plain), [1, 3, 3], devices=FOUR[:3], chunks=2)
    value: Any = batch()
    for partition in pipe.partitions:
        value = partition(value)
    assert torch.equal(value, plain(*batch()))
    assert type(pipe[:2]) is PipeSequential
    assert torch.equal(pipe[:](*batch()), plain(*batch()))


@pytest.mark.parametrize("kind", [list, namedtuple("Pair", "a b")._make])
def test_lists_and_named_tuples_stay_one_value(kind):
    seen: list[Any] = []

    def take(pair: Any) -> Tensor:
        seen.append(type(pair))
        return pair[0] + pair[1]

    pipe = Pipe([lambda x: kind([x, x + 1]), take], [1, 1], devices=FOUR[:2], unpack=True)
    pipe(torch.ones(2, 3))
    assert seen == [type(kind([1, 2]))]


def test_profiles_balances_and_plans_take_it_apart_as_well():
    model, sample = model_of(), batch()
    assert len(profile(model, sample, timeout=0.0).layers) == 7
    assert sum(balance_by_time(2, model, sample, timeout=0.0)) == 7
    assert sum(balance_by_size(2, model, sample)) == 7
    assert sum(plan(model, sample, devices=["cpu:0", "cpu:1"], batch_size=8).balance) == 7


class Wrong(nn.Module):
    def forward(self, x: Any) -> Any:
        raise TypeError("mine")


@pytest.mark.parametrize(
    ("layers", "unpack", "value", "notes"),
    [
        ([Block(), Named()], False, batch(),
         ["in layer 0 ('0': Block) of stage 0", "a tuple of 3 as its one arg", "unpack=True"]),
        ([Block(), Named()], True, batch(),
         ["in layer 1 ('1': Named) of stage 1", "unpack=True called it with a tuple of 3"]),
        ([Block(), Named()], True, {"x": torch.ones(2, WIDTH), "masc": None},
         ["unpack=True called it with a dict with 'x', 'masc'"]),
        ([Wrong(), Wrong()], False, torch.ones(2), []),
        ([Wrong(), Wrong()], True, torch.ones(2), []),
    ],
)  # fmt: skip
def test_arguments_that_do_not_fit_are_named(layers, unpack, value, notes):
    pipe = Pipe(nn.Sequential(*layers), [1, 1], devices=FOUR[:2], unpack=unpack)
    with pytest.raises(TypeError) as caught:
        pipe(value)
    found = "\n".join(caught.value.__notes__)
    assert all(note in found for note in notes)
    assert notes or ("unpack" not in found and "argument" not in found)
    if not unpack and notes:
        with pytest.raises(TypeError, match="missing 1 required") as caught:
            profile(nn.Sequential(*layers), value, timeout=0.0)
        assert "PipeSequential" in "\n".join(caught.value.__notes__)
