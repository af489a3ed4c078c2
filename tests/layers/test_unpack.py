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

from syncpipe import NoChunk, Pipe, PipeSequential, plan
from syncpipe.balance import balance_by_size, balance_by_time, profile
from syncpipe.skip import pop, skippable, stash
from tests.support.models import CHECKPOINT_MODES
from tests.support.training import FOUR, weigh

WIDTH = 6


class Block(nn.Module):
    """Two arguments in, two out: the mask and what else there is ride along."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None, step: int = 1) -> Any:
        y = self.linear(x).tanh() * step
        return (x + y if mask is None else torch.where(mask, x + y, x)), mask, step


class ToNames(nn.Module):
    """From positional to keyword arguments."""

    def forward(self, x: Tensor, mask: Tensor | None, step: int) -> Any:
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


class Only(nn.Module):
    """One argument: a value that is no tuple and no dict arrives whole."""

    def forward(self, x: Any) -> Any:
        return x


class Drop(nn.Module):
    def forward(self, x: Tensor, mask: Tensor | None, step: int) -> Any:
        return nn.functional.dropout(x, 0.5, self.training), mask, step


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


def model_of(*middle: nn.Module) -> PipeSequential:
    torch.manual_seed(0)
    return PipeSequential(Block(), *middle, Block(), ToNames(), Named(), Head())


def batch(masked: bool = True) -> tuple[Tensor, Tensor | None, int]:
    torch.manual_seed(1)
    x = torch.randn(8, WIDTH, requires_grad=True)
    return x, torch.rand(8, WIDTH) > 0.3 if masked else None, 2


def written_out(model: nn.Sequential, x: Tensor, mask: Tensor | None, step: int) -> Tensor:
    """The plain loop over the layers, by hand."""
    first, second, names, named, head = model
    hidden, mask, step = second(*first(x, mask, step))
    return head(**named(**names(hidden, mask, step)))


def cut(value: Any, m: int) -> list[Any]:
    return list(value.chunk(m)) if isinstance(value, Tensor) else [value] * m


def results(model: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]


@settings(max_examples=25, deadline=None)
@given(
    cuts=st.sets(st.integers(1, 4)),
    chunks=st.integers(1, 4),
    checkpoint=st.sampled_from(CHECKPOINT_MODES),
    masked=st.booleans(),
    by_class=st.booleans(),
)
def test_as_the_plain_loop_written_out(cuts, chunks, checkpoint, masked, by_class):
    plain = model_of()
    mine = copy.deepcopy(plain)
    edges = [0, *sorted(cuts), 5]
    balance = [b - a for a, b in pairwise(edges)]
    pipe = Pipe(
        mine if by_class else nn.Sequential(*mine),
        balance,
        devices=[f"cpu:{j}" for j in range(len(balance))],
        chunks=chunks,
        checkpoint=checkpoint,
        unpack=not by_class,
    )
    x, mask, step = batch(masked)
    parts = zip(*(cut(value, chunks) for value in (x, mask, step)), strict=True)
    expected = torch.cat([written_out(plain, *part) for part in parts])
    weigh(expected).backward()
    other, *rest = batch(masked)
    actual = pipe((other, *rest))
    weigh(actual).backward()
    for a, b in zip(results(pipe, other, actual), results(plain, x, expected), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
def test_train_batch_and_eval_batch_take_the_same_inputs(schedule, checkpoint):
    plain = model_of()
    pipe = Pipe(copy.deepcopy(plain), [1, 2, 2], devices=FOUR[:3], chunks=4, checkpoint=checkpoint)
    x, mask, step = batch()
    order = range(3, -1, -1) if schedule == "gpipe" else range(4)
    parts = list(zip(*(cut(value, 4) for value in (x, mask, step)), strict=True))
    losses = [plain(*part).pow(2).mean() / 4 for part in parts]
    for i in order:
        losses[i].backward()
    other, *rest = batch()
    square = lambda y: y.pow(2).mean()  # noqa: E731
    loss = pipe.train_batch((other, *rest), loss_fn=square, schedule=schedule)
    assert torch.equal(loss, sum(losses[1:], losses[0]).detach())
    for a, b in zip(pipe.parameters(), plain.parameters(), strict=True):
        close = torch.allclose if schedule == "zb_h1" else torch.equal
        assert close(a.grad, b.grad)
    assert torch.equal(other.grad, x.grad)
    evaluated = pipe.eval_batch((other, *rest))
    assert torch.equal(evaluated, torch.cat([plain(*part) for part in parts]))


def test_the_input_may_be_a_dict_of_keyword_arguments():
    head = PipeSequential(Named(), Head())
    pipe = Pipe(copy.deepcopy(head), [1, 1], devices=FOUR[:2], chunks=2)
    x, mask, _ = batch()
    given = {"mask": mask, "hidden": x, "bias": NoChunk(torch.ones(WIDTH))}
    halves = [
        head(hidden=h, mask=k, bias=torch.ones(WIDTH))
        for h, k in zip(x.chunk(2), mask.chunk(2), strict=True)
    ]
    assert torch.equal(pipe(given), torch.cat(halves))


def test_skips_are_verified_and_go_past_layers_with_several_arguments():
    plain = model_of(Send(), Block(), Receive())
    pipe = Pipe(copy.deepcopy(plain), [2, 1, 2, 3], devices=FOUR, chunks=2)
    x, mask, step = batch()
    parts = zip(x.chunk(2), mask.chunk(2), strict=True)
    assert torch.equal(pipe((x, mask, step)), torch.cat([plain(a, b, step) for a, b in parts]))
    with pytest.raises(TypeError, match="no later layer pops it"):
        Pipe(model_of(Send()), [3, 3], devices=FOUR[:2], unpack=True)


def test_partitions_and_slices_called_by_hand_do_the_same():
    plain = model_of()
    pipe = Pipe(copy.deepcopy(plain), [1, 2, 2], devices=FOUR[:3], chunks=2)
    given = batch()
    value: Any = given
    for partition in pipe.partitions:
        value = partition(value)
    assert torch.equal(value, plain(*given))
    assert type(pipe[:2]) is PipeSequential
    assert torch.equal(pipe[:](*given), plain(*given))
    pipe.balance = [2, 3]
    assert torch.equal(pipe(given), torch.cat([plain(*part) for part in zip(
        given[0].chunk(2), given[1].chunk(2), [2, 2], strict=True)]))  # fmt: skip


@pytest.mark.parametrize("kind", [list, namedtuple("Pair", "a b")._make])
def test_lists_and_named_tuples_stay_one_value(kind):
    seen: list[Any] = []

    class Pair(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return kind([x, x + 1])

    class Take(nn.Module):
        def forward(self, pair: Any) -> Tensor:
            seen.append(type(pair))
            return pair[0] + pair[1]

    pipe = Pipe(nn.Sequential(Pair(), Take()), [1, 1], devices=FOUR[:2], unpack=True)
    pipe(torch.ones(2, 3))
    assert seen == [type(kind([1, 2]))]


def test_without_it_the_rule_of_sequential_holds():
    pipe = Pipe(nn.Sequential(Only(), Only()), [1, 1], devices=FOUR[:2])
    x = torch.ones(2, 3)
    y = pipe((x, {"a": x}))
    assert torch.equal(y[0], x)
    assert torch.equal(y[1]["a"], x)


def test_random_layers_draw_what_they_draw_for_any_balance():
    outputs = []
    for balance, checkpoint in ([[5], "always"], [[1, 2, 2], "never"], [[3, 2], "except_last"]):
        model = PipeSequential(Block(), Drop(), Drop(), ToNames(), Head())
        model.load_state_dict(PipeSequential(*model).state_dict())
        torch.manual_seed(0)
        for parameter in model.parameters():
            nn.init.normal_(parameter)
        pipe = Pipe(model, balance, devices=FOUR[: len(balance)], chunks=4, checkpoint=checkpoint)
        torch.manual_seed(3)
        x, *rest = batch()
        y = pipe((x, *rest))
        y.sum().backward()
        outputs.append((y.detach(), x.grad))
    for y, grad in outputs[1:]:
        assert torch.equal(y, outputs[0][0])
        assert torch.equal(grad, outputs[0][1])


def test_profiles_balances_and_plans_take_it_apart_as_well():
    model = model_of()
    sample = batch()
    measured = profile(model, sample, timeout=0.0)
    assert len(measured.layers) == 5
    assert sum(balance_by_time(2, model, sample, timeout=0.0)) == 5
    assert sum(balance_by_size(2, model, sample)) == 5
    assert sum(plan(model, sample, devices=["cpu:0", "cpu:1"], batch_size=8).balance) == 5


# --- what does not fit ---------------------------------------------------------------------------


def notes(error: BaseException) -> str:
    return "\n".join(error.__notes__)


def test_a_block_of_two_arguments_without_it_says_so():
    pipe = Pipe(nn.Sequential(*model_of()), [2, 3], devices=FOUR[:2])
    with pytest.raises(TypeError, match="missing 1 required positional argument") as caught:
        pipe(batch())
    assert "in layer 0 ('0': Block) of stage 0" in notes(caught.value)
    assert "a tuple of 3 as its one argument" in notes(caught.value)
    assert "unpack=True" in notes(caught.value)
    with pytest.raises(TypeError, match="missing 1 required") as caught:
        profile(nn.Sequential(*model_of()), batch(), timeout=0.0)
    assert "PipeSequential" in notes(caught.value)


def test_arguments_that_do_not_fit_are_named():
    pipe = Pipe(nn.Sequential(Block(), Named()), [1, 1], devices=FOUR[:2], unpack=True)
    with pytest.raises(TypeError) as caught:
        pipe(batch())
    assert "in layer 1 ('1': Named) of stage 1" in notes(caught.value)
    assert "unpack=True called it with a tuple of 3" in notes(caught.value)
    with pytest.raises(TypeError) as caught:
        pipe({"x": torch.ones(2, WIDTH), "masc": None})
    assert "unpack=True called it with a dict with 'x', 'masc'" in notes(caught.value)


def test_a_type_error_of_the_layer_itself_gets_no_such_note():
    class Wrong(nn.Module):
        def forward(self, x: Any) -> Any:
            raise TypeError("mine")

    for unpack in (False, True):
        pipe = Pipe(nn.Sequential(Wrong()), [1], devices=FOUR[:1], unpack=unpack)
        with pytest.raises(TypeError, match="mine") as caught:
            pipe(torch.ones(2))
        assert "unpack" not in notes(caught.value)
        assert "argument" not in notes(caught.value)
