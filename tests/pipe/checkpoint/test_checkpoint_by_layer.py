"""``checkpoint=`` as a function of the layer, or a list of layers."""

from __future__ import annotations

import copy
import pickle
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from syncpipe import Pipe, inline, is_checkpointing, is_recomputing
from syncpipe.skip import pop, skippable, stash
from tests.support.models import assert_equals_plain, in_turn, linear_model
from tests.support.running import assert_same, beside, trained
from tests.support.training import FOUR, KINDS, RUNS
from tests.support.watched import Memory, alive, gone

SIX = 6


class Counted(nn.Module):
    """Counts its runs, and what it was told in each."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.told: list[tuple[bool, bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.told.append((is_checkpointing(), is_recomputing()))
        return self.linear(x).tanh()

    @property
    def again(self) -> int:
        return self.told.count((False, True))


class Other(Counted):
    pass


def pipe_of(checkpoint: Any, balance: tuple[int, ...] = (4, 2), **options: Any) -> Pipe:
    layers = nn.Sequential(*[(Other if k % 2 else Counted)() for k in range(SIX)])
    options.setdefault("chunks", 2)
    devices = FOUR[: len(balance)]
    return Pipe(layers, balance, devices=devices, checkpoint=checkpoint, **options)


def forward(pipe: Pipe) -> None:
    pipe(torch.randn(4, 3)).sum().backward()


def train(pipe: Pipe) -> None:
    pipe.train_batch(torch.randn(4, 3), loss_fn=torch.sum)


WAYS = {
    "function": (lambda layer: isinstance(layer, Other), [1, 3, 5]),
    "indices": ([1, 2, -1], [1, 2, 5]),
    "bools": ([False, True, True, False, False, True], [1, 2, 5]),
    "range": (range(2, 6), [2, 3, 4, 5]),
    "groups": ([(0, 1), range(3, 6)], [0, 1, 3, 4, 5]),
    "one stage": (["never", [5]], [5]),
    "the other": ([[1], "always"], [1, 4, 5]),
    "both": ([lambda layer: isinstance(layer, Other), "never"], [1, 3]),
}


@pytest.mark.parametrize("run", [forward, train])
@pytest.mark.parametrize("way", WAYS)
def test_the_layers_that_are_named_are_recomputed_and_no_others(way, run):
    checkpoint, again = WAYS[way]
    pipe = pipe_of(checkpoint)
    run(pipe)
    assert [k for k, layer in enumerate(pipe) if layer.again] == again
    for k, layer in enumerate(pipe):
        whole = [(k in again, False)] * 2
        assert [told for told in layer.told if not told[1]] == whole
        assert layer.again == (2 if k in again else 0)


@pytest.mark.parametrize("run", [forward, train])
@pytest.mark.parametrize(
    ("checkpoint", "stored"), [("never", 6), ([0, 1, 2], 3), ([(0, 1, 2)], 1), ([0, (1, 2)], 2)]
)
def test_a_layer_keeps_its_input_and_a_group_that_of_its_first_layer(checkpoint, stored, run):
    made: list[Memory] = []
    counts: list[int] = []

    class Make(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            inner = x.sin()
            outer = inner.sin()  # what the next layer starts from
            if not is_recomputing():
                made.extend((Memory(inner), Memory(outer)))
            return outer

    class Count(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            counts.append(alive(made))
            return x.clone()

    layers = nn.Sequential(Make(), Make(), Make(), Count())
    pipe = Pipe(nn.Sequential(nn.Linear(3, 3), *layers), [1, 4], devices=FOUR[:2], chunks=1,
                checkpoint=["never", moved(checkpoint)])  # fmt: skip
    for _ in range(2):  # in its first call a pipe makes copies of inputs
        made.clear()
        run(pipe)
    assert counts[-1] == stored
    assert gone(made)


def moved(checkpoint: Any) -> Any:
    """The same layers behind one more."""
    if isinstance(checkpoint, str):
        return checkpoint
    return [k + 1 if isinstance(k, int) else tuple(i + 1 for i in k) for k in checkpoint]


@settings(max_examples=30, deadline=None)
@given(flags=st.lists(st.booleans(), min_size=4, max_size=4), cut=st.integers(1, 3))
def test_the_result_is_that_of_the_plain_model(flags, cut):
    x = torch.randn(8, 3, requires_grad=True)
    assert_equals_plain(linear_model(), x, [cut, 4 - cut], devices=FOUR[:2], chunks=4,
                        checkpoint=flags)  # fmt: skip


@pytest.mark.parametrize("run", KINDS)
@pytest.mark.parametrize("by_hand", [False, True])
def test_layers_draw_what_they_drew_under_every_schedule(run, by_hand):
    options, devices = RUNS[run]
    results = []
    for checkpoint in ("never", [0, 1, (3, 4), 7], "always"):
        torch.manual_seed(0)
        layers = nn.Sequential(
            *[nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)) for _ in range(7)], nn.Dropout(0.3)
        )
        pipe = Pipe(layers, [2, 2, 2, 2], devices=devices, chunks=3, checkpoint=checkpoint)
        for _ in range(2):
            torch.manual_seed(1)
            x = torch.randn(6, 3, requires_grad=True)
            with inline() if by_hand else nullcontext():
                loss = pipe.train_batch(x, loss_fn=lambda y: y.square().mean(), **options)
        results.append([loss, x.grad, *(p.grad for p in pipe.parameters())])
    for result in results[1:]:
        if run in ("zb_h1",):
            assert all(torch.allclose(a, b) for a, b in zip(result, results[0], strict=True))
        else:
            assert_same(result, results[0])


def test_buffers_change_once_for_each_micro_batch():
    layers = nn.Sequential(nn.Conv1d(2, 2, 1), nn.BatchNorm1d(2), nn.ReLU(inplace=True),
                           nn.BatchNorm1d(2), nn.Flatten())  # fmt: skip
    pipe, run, plain = beside([1, (2, 3)], layers, (4, 1))
    x = torch.randn(8, 2, 3)
    for _ in range(2):
        assert_same(trained(pipe, pipe, x), trained(run, plain, x))


@pytest.mark.parametrize("deferred", [False, True])
def test_deferred_batch_norm_counts_each_micro_batch_once(deferred):
    results = []
    for checkpoint in ("never", [0, 1]):
        torch.manual_seed(0)
        layers = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3), nn.Linear(3, 3))
        pipe = Pipe(layers, [2, 1], devices=FOUR[:2], chunks=4, checkpoint=checkpoint,
                    deferred_batch_norm=deferred)  # fmt: skip
        results.append(trained(pipe, pipe, torch.randn(8, 3)))
    assert_same(*results)


@skippable(stash=["a"])
class Send(nn.Module):
    def forward(self, x: Tensor) -> Any:
        yield stash("a", x.tanh())
        return x


@skippable(pop=["a"])
class Receive(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x * (yield pop("a"))


@pytest.mark.parametrize("balance", [(5,), (2, 3), (3, 2)])
@pytest.mark.parametrize(
    "checkpoint", [[0], [2], [4], [0, 2, 4], [(0, 1)], [(1, 2, 3)], [(0, 1, 2, 3, 4)]]
)
def test_skips_go_from_unit_to_unit_and_from_stage_to_stage(checkpoint, balance):
    layers = nn.Sequential(nn.Linear(3, 3), Send(), nn.Linear(3, 3), Receive(), nn.Linear(3, 3))
    pipe, run, plain = beside(checkpoint, layers, balance)
    x = torch.randn(8, 3)
    assert_same(trained(pipe, pipe, x), trained(run, plain, x))


def test_hooks_of_partitions_run_around_all_of_it():
    pipe, run, plain = beside([0, 1], nn.Sequential(*[Counted() for _ in range(4)]), (2, 2))
    shapes: list[Any] = []
    pipe.partitions[0].register_forward_hook(lambda m, args, y: shapes.append(y.shape))
    x = torch.randn(8, 3)
    assert_same(trained(pipe, pipe, x), trained(run, plain, x))
    assert shapes == [(2, 3)] * 4


@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_autocast_of_the_forward_is_that_of_the_recomputation(dtype):
    torch.manual_seed(0)
    layers = nn.Sequential(*[nn.Linear(3, 3) for _ in range(4)])
    pipe, _, plain = beside([0, 2], layers, (2, 2))
    run = in_turn(plain, pipe.chunks)
    x = torch.randn(8, 3)
    results = []
    for module, call in ((pipe, pipe), (plain, run)):
        module.zero_grad()
        with torch.autocast("cpu", dtype):
            y = call(x)
        y.float().sum().backward()
        results.append([y, *(p.grad for p in module.parameters())])
    assert_same(*results)


def test_an_exception_while_recomputing_names_the_layer_and_the_pipe_goes_on():
    class Fails(nn.Module):
        fail = True

        def forward(self, x: Tensor) -> Tensor:
            if self.fail and is_recomputing():
                raise ValueError("bad")
            return x.exp()

    fails = Fails()
    pipe = Pipe(nn.Sequential(nn.Linear(3, 3), fails), [2], devices=["cpu:0"], checkpoint=[1])
    for run in (forward, train):
        with pytest.raises(ValueError, match="bad") as caught:
            run(pipe)
        assert "in layer 1 ('1': Fails)" in "\n".join(caught.value.__notes__)
    fails.fail = False
    forward(pipe)
    train(pipe)


def test_it_can_be_set_and_the_balance_cuts_what_is_named():
    pipe = pipe_of("never")
    pipe.checkpoint = [(2, 3, 4)]
    assert pipe.checkpoint == ((2, 3, 4),)
    for balance in ([4, 2], [3, 3]):
        pipe.balance = balance
        for layer in pipe:
            layer.told.clear()
        forward(pipe)
        assert [layer.again for layer in pipe] == [0, 0, 2, 2, 2, 0]
    pipe.eval()
    forward(pipe)
    assert [layer.again for layer in pipe] == [0, 0, 2, 2, 2, 0]


def test_copies_and_pickles_keep_it():
    pipe = pipe_of([1, (2, 3)])
    for copied in (copy.deepcopy(pipe), pickle.loads(pickle.dumps(pipe))):
        assert copied.checkpoint == pipe.checkpoint
        forward(copied)
        assert [layer.again for layer in copied] == [0, 2, 2, 2, 0, 0]


def test_two_backwards_through_one_graph_recompute_twice():
    pipe = pipe_of([1])
    loss = pipe(torch.randn(4, 3)).sum()
    loss.backward(retain_graph=True)
    grads = [p.grad.clone() for p in pipe.parameters()]
    pipe.zero_grad()
    loss.backward()
    assert_same([p.grad for p in pipe.parameters()], grads)
    assert pipe[1].again == 4


def test_a_trace_shows_no_recomputation_of_its_own():
    pipe = pipe_of([1])
    with pipe.trace() as trace:
        train(pipe)
        forward(pipe)
    assert {span.kind for span in trace.spans} >= {"forward", "backward"}
    assert "recompute" not in {span.kind for span in trace.spans}


@pytest.mark.parametrize(
    ("checkpoint", "message"),
    [
        ([0, 6], "6 is no layer; there are 6, from 0"),
        ([0, -7], "-7 is no layer"),
        ([1, 1], "a layer is in it twice"),
        ([(0, 1), 1], "a layer is in it twice"),
        ([(0, 2)], r"\(0, 2\) are no layers one after another"),
        ([True, False], "one bool for each of the 6 layers"),
        ([True, 1, 2], "one bool for each of the 6 layers"),
        ([1, True], "True is no layer"),
        (["never", [0]], "stage 1 has the layers 4 to 5"),
        (["never", ["never", [0]]], "is not one mode"),
        ([[0], "never", "never"], "has 3 modes, but there are 2 stages"),
        (lambda layer: isinstance(layer, nn.Conv2d), "no layer of the model fulfils it"),
        (["never", lambda layer: False], "no layer of stage 1 fulfils it"),
        (nn.Linear, "a function"),
        ([1.5], "a list of layers"),
        ([()], "a list of layers"),
        (3, "a list of layers"),
    ],
)
def test_what_makes_no_sense_is_refused(checkpoint, message):
    with pytest.raises(ValueError, match=message):
        pipe_of(checkpoint)
    pipe = pipe_of("never")
    with pytest.raises(ValueError, match="checkpoint="):
        pipe.checkpoint = checkpoint
    assert pipe.checkpoint == "never"
