"""P1 and P2 of ``train_batch``: what the plain loop computes, whatever the schedule."""

from __future__ import annotations

import copy
import pickle
import threading
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint as checkpointed
from torch.utils.flop_counter import FlopCounterMode

from syncpipe import NoChunk, Pipe, inline, is_checkpointing, is_recomputing
from syncpipe.schedules import gpipe, one_f_one_b, to_csv
from tests.pipe.test_equivalence import batch, pipes, specs
from tests.support.models import (
    CHECKPOINT_MODES,
    LAYERS,
    LENGTH,
    RANDOM_LAYERS,
    SENDS,
    Spec,
    assert_same_tree,
)
from tests.support.running import Dawdle, Do, assert_same, pipe_of
from tests.support.training import (
    FOUR,
    KINDS,
    ROUND,
    RUNS,
    WHOLE,
    Trained,
    any_schedule,
    assert_same_step,
    device_of,
    orders_of,
    pipe_step,
    plain_step,
    schedule_of,
    weigh,
)

STRUCTURE = ["inplace", "fork", "join", *SENDS, "receive", "receive_unused"]
COUNTS = {"norm", "momentum_none", "counter"}  # layers that see the order of forwards


# Everything at once


@st.composite
def runs(
    draw: st.DrawFn, pipe: Pipe, m: int, *, halves: bool = True, in_order: bool = False
) -> dict[str, Any]:
    """A schedule for a pipe."""
    devices = device_of(pipe)
    p = max(devices) + 1
    kinds = ["naive", "gpipe", "1f1b", "slots", "any", *(["zb_h1"] if halves else [])]
    if len(devices) % p == 0 and all(device == j % p for j, device in enumerate(devices)):
        kinds.append("interleaved_1f1b")
    kind = draw(st.sampled_from(kinds))
    if kind == "slots":
        how = draw(st.sampled_from(["textbook", "overlap", None]))
        if how is None:
            counts = st.lists(st.integers(1, m + 1), min_size=len(devices), max_size=len(devices))
            how = sorted(draw(counts), reverse=True)
        return {"schedule": "1f1b", "slots": how}
    if kind == "any":
        seed = draw(st.integers(0, 2**32))
        kind = any_schedule(m, devices, seed=seed, halves=halves, in_order=in_order)
    return {"schedule": kind}


@settings(max_examples=350)
@given(
    data=st.data(),
    spec=specs(*LAYERS, *STRUCTURE),
    chunks=st.integers(1, 5),
    size=st.integers(1, 7),
    input_grad=st.booleans(),
    leaf=st.booleans(),
    with_target=st.booleans(),
    training=st.booleans(),
    by_hand=st.booleans(),
)
def test_train_batch_equals_the_plain_loop_to_the_last_bit(
    data: st.DataObject,
    spec: Spec,
    chunks: int,
    size: int,
    input_grad: bool,
    leaf: bool,
    with_target: bool,
    training: bool,
    by_hand: bool,
) -> None:
    plain, arguments = spec.build().train(training), data.draw(pipes(spec))
    x = batch(size, input_grad)
    target = {"scale": torch.linspace(1, 2, size), "word": "x", "none": None}
    pipe = Pipe(spec.build().train(training), chunks=chunks, **arguments)
    m = len(x.chunk(chunks))
    for _ in range(2):  # the second call builds on what the first one learned, and on its .grad
        options = data.draw(runs(pipe, m, in_order=bool(COUNTS.intersection(spec.layers))))
        schedule = schedule_of(pipe, m, **options)
        expected = plain_step(
            plain,
            x,
            target if with_target else None,
            loss_fn=weigh,
            chunks=chunks,
            orders=orders_of(schedule),
            balance=pipe.balance,
        )
        if not input_grad and not any(
            expected.parameter_grads[n] is not None for n in expected.parameter_grads
        ):
            return  # nothing to train: refused, see the tests of the loss
        with inline() if by_hand else nullcontext():
            actual = pipe_step(
                pipe, x, target if with_target else None, leaf=leaf, loss_fn=weigh, **options
            )
        assert_same_step(actual, expected, exact=not schedule.splits)
        for p, q in zip(pipe.parameters(), plain.parameters(), strict=True):
            if p.grad is not None and schedule.splits:
                p.grad.copy_(q.grad)  # the next step starts from the same bits


def noisy(output: Any, target: Any = None) -> Tensor:
    """A loss that draws."""
    return weigh(output, target) * torch.rand(())


@settings(max_examples=200)
@given(
    data=st.data(),
    spec=specs("linear", "norm", *RANDOM_LAYERS, *RANDOM_LAYERS, *STRUCTURE),
    chunks=st.integers(1, 4),
    size=st.integers(1, 6),
    seed=st.integers(0, 2**40),
    by_hand=st.booleans(),
    loss_fn=st.sampled_from([weigh, noisy]),
)
def test_random_layers_draw_the_same_whatever_the_schedule(
    data: st.DataObject,
    spec: Spec,
    chunks: int,
    size: int,
    seed: int,
    by_hand: bool,
    loss_fn: Any,
) -> None:
    x = batch(size, True)
    m = len(x.chunk(chunks))
    one = Pipe(spec.build(), [len(spec.layers)], chunks=chunks, checkpoint="never")
    other = Pipe(spec.build(), chunks=chunks, **data.draw(pipes(spec)))
    options = data.draw(runs(other, m, in_order=True))
    halves = bool(schedule_of(other, m, **options).splits)
    order = orders_of(schedule_of(other, m, **options))[0]
    same = all(row == order for row in orders_of(schedule_of(other, m, **options)))
    reference = {"schedule": "gpipe" if order == list(range(m))[::-1] else "naive"}
    results, after = [], []
    for pipe, how, context in (
        (one, reference, nullcontext()),
        (other, options, inline() if by_hand else nullcontext()),
    ):
        torch.manual_seed(seed)
        with context:
            steps = [pipe_step(pipe, x, loss_fn=loss_fn, **how) for _ in range(2)]
        results.append(steps)
        after.append(torch.get_rng_state())
    exact = same and not halves and order in (list(range(m)), list(range(m))[::-1])
    for expected, actual in zip(*results, strict=True):
        assert_same_step(actual, expected, exact=exact)
    assert torch.equal(*after), "the generator stands elsewhere afterwards"
    torch.manual_seed(seed)
    assert not torch.equal(after[0], torch.get_rng_state()), "the generator was rewound"


# The loop written out


def model() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3)
    )


def model_pipe(run: str, module: nn.Sequential | None = None, **options: Any) -> Pipe:
    return Pipe(
        model() if module is None else module,
        [2, 2, 1, 1],
        devices=RUNS[run][1],
        **{"chunks": 5, **options},
    )


def by_hand(
    plain: nn.Sequential, x: Tensor, target: Tensor, run: str, chunks: int = 5
) -> tuple[Tensor, Tensor]:
    """The loop that people write; returns loss and outputs."""
    losses, outputs = [], []
    for c, t in zip(x.chunk(chunks), target.chunk(chunks), strict=True):
        outputs.append(plain(c))
        losses.append(F.mse_loss(outputs[-1], t) * (len(c) / len(x)))
    for loss in losses[::-1] if run == "gpipe" else losses:
        loss.backward()
    return sum(losses[1:], losses[0]).detach(), torch.cat(outputs).detach()


def assert_same_state(ours: nn.Module, theirs: nn.Module, *, exact: bool) -> None:
    assert_same_tree(dict(ours.named_buffers()), dict(theirs.named_buffers()), "buffers")
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        if exact or p.grad is None or q.grad is None:
            assert_same([p.grad], [q.grad])
        else:
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("leaf", [True, False], ids=["leaf", "computed input"])
@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("run", RUNS)
def test_loss_outputs_buffers_and_all_gradients_are_those_of_the_loop(run, checkpoint, leaf):
    plain, pipe = model(), model_pipe(run, checkpoint=checkpoint)
    for _ in range(3):  # gradients accumulate
        x, target = torch.randn(14, 6, requires_grad=True), torch.randn(14, 3)  # 3, 3, 3, 3, 2
        ours = x.detach().clone().requires_grad_()
        given = ours if leaf else ours * 1
        expected = by_hand(plain, x, target, run)
        loss, outputs = pipe.train_batch(
            given, target, loss_fn=F.mse_loss, return_outputs=True, **RUNS[run][0]
        )
        assert_same([loss, outputs, ours.grad], [*expected, x.grad])
        assert_same_state(pipe, plain, exact=run in WHOLE)
        if run not in WHOLE:
            plain.load_state_dict(pipe.state_dict())
            for p, q in zip(pipe.parameters(), plain.parameters(), strict=True):
                q.grad = p.grad.clone()


@pytest.mark.parametrize("form", ["object", "path", "name of a file"])
def test_a_schedule_can_be_an_object_or_a_file(form, tmp_path):
    # A schedule of nobody's: each stage takes micro-batches back in an order of its own.
    schedule = any_schedule(5, (0, 1, 2, 3), seed=3, halves=False, in_order=True)
    orders = orders_of(schedule)
    assert len(set(map(tuple, orders))) > 1
    path = tmp_path / "mine.csv"
    path.write_text(to_csv(schedule))
    given = {"object": schedule, "path": path, "name of a file": str(path)}[form]
    x, plain, pipe = torch.randn(14, 6, requires_grad=True), model(), model_pipe("1f1b")
    expected = plain_step(plain, x, loss_fn=weigh, chunks=5, orders=orders, balance=pipe.balance)
    assert_same_step(pipe_step(pipe, x, loss_fn=weigh, schedule=given), expected)


def test_one_f_one_b_is_what_one_gets():
    alive, most = [0, 0], [0, 0]

    class Back(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, j):
            ctx.j = j
            alive[j] += 1
            most[j] = max(most[j], alive[j])
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            alive[ctx.j] -= 1
            return grad, None

    layers = [nn.Linear(3, 3), Do(lambda x: Back.apply(x, 0)), Do(lambda x: Back.apply(x, 1))]
    pipe = pipe_of(nn.Sequential(*layers), [2, 1], chunks=8, checkpoint="never")
    pipe.train_batch(torch.randn(8, 3), loss_fn=weigh)
    assert most == [3, 1]


@pytest.mark.parametrize(
    ("schedule", "slots", "message"),
    [
        ("1f2b", None, "did you mean '1f1b'"),
        (gpipe(3, 4), None, "made for m=3, but here m=5"),
        (one_f_one_b(5, 2), None, r"made for device_of=\(0, 1\)"),
        ("gpipe", "textbook", "has no option slots='textbook'"),
        ("1f1b", [1, 2, 2, 2], "wait for ever"),
        ("interleaved_1f1b", "textbook", "slots"),
        (any_schedule(5, (0, 1, 0, 1), seed=0, halves=True, in_order=True), None, "device_of"),
    ],
)
def test_a_schedule_that_does_not_fit_is_refused(schedule, slots, message):
    pipe = model_pipe("1f1b")
    with pytest.raises(ValueError, match=message):
        pipe.train_batch(torch.randn(10, 6), loss_fn=weigh, schedule=schedule, slots=slots)
    assert all(p.grad is None for p in pipe.parameters())


def test_a_schedule_is_a_name_an_object_or_a_path():
    with pytest.raises(TypeError, match="must be a name, a Schedule or the path"):
        model_pipe("1f1b").train_batch(torch.randn(10, 6), loss_fn=weigh, schedule=3)


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("run", ["gpipe", "1f1b"])
def test_every_way_to_cut_five_layers_gives_the_same_result(run, checkpoint):
    spec = Spec(("linear", "send", "norm", "inplace", "receive"))
    x = batch(6, True)
    for bits in range(16):
        edges = [0, *[k + 1 for k in range(4) if bits >> k & 1], 5]
        balance = [b - a for a, b in pairwise(edges)]
        pipe, plain = Pipe(spec.build(), balance, chunks=3, checkpoint=checkpoint), spec.build()
        orders = [[2, 1, 0] if run == "gpipe" else [0, 1, 2]] * len(balance)
        for _ in range(2):
            expected = plain_step(plain, x, loss_fn=weigh, chunks=3, orders=orders, balance=balance)
            assert_same_step(pipe_step(pipe, x, loss_fn=weigh, schedule=run), expected)


# Inputs, layers, parameters


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("run", ["naive", "gpipe", "1f1b", "zb_h1"])
def test_layers_at_the_start_of_a_partition_may_work_in_place(run, checkpoint):
    def build() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.ReLU(inplace=True), nn.Linear(LENGTH, LENGTH), nn.ReLU(inplace=True), nn.Tanh()
        )

    pipe = Pipe(build(), [1, 1, 2], chunks=3, checkpoint=checkpoint)
    plain = build()
    x = torch.randn(6, LENGTH)
    before = x.clone()
    orders = [[2, 1, 0] if run == "gpipe" else [0, 1, 2]] * 3
    for _ in range(3):
        expected = plain_step(plain, x, loss_fn=weigh, chunks=3, orders=orders, balance=[1, 1, 2])
        assert_same_step(
            pipe_step(pipe, x, loss_fn=weigh, schedule=run), expected, exact=run != "zb_h1"
        )
    assert torch.equal(x, before)


class Tree(nn.Module):
    """From a tree of everything to a tree of everything."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, tree):
        whole = tree.get("whole", torch.ones(3))
        x = self.linear(tree["x"]) * tree["scale"] + tree["ids"][:, None] + whole
        pair = (tree["pair"][0] * 2, tree["pair"][1])
        return {**tree, "x": x, "pair": pair, "mask": x.detach() > 0}


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("run", ["gpipe", "1f1b", "zb_h1"])
def test_trees_with_numbers_none_and_several_tensors(run, checkpoint):
    layers = nn.Sequential(Tree(), Tree(), Tree())
    plain = copy.deepcopy(layers)
    x = {
        "x": torch.randn(5, 3, requires_grad=True),
        "scale": 3,
        "ids": torch.arange(5),
        "pair": (torch.randn(5, 2, requires_grad=True), None),
        "unused": torch.randn(5, 1, requires_grad=True),
    }
    pipe = pipe_of(layers, chunks=2, checkpoint=checkpoint)
    orders = [[1, 0] if run == "gpipe" else [0, 1]] * 3
    expected = plain_step(plain, x, loss_fn=weigh, chunks=2, orders=orders, balance=[1, 1, 1])
    assert expected.input_grads[-1] is not None
    actual = pipe_step(pipe, x, loss_fn=weigh, schedule=run)
    assert_same_step(actual, expected, exact=run != "zb_h1")


def test_a_tensor_that_every_micro_batch_needs_whole():
    whole = torch.randn(3, requires_grad=True)
    layers = nn.Sequential(Tree(), Tree())
    x = {"x": torch.randn(5, 3), "scale": 2, "ids": torch.arange(5), "pair": (torch.ones(5), None)}
    pipe = pipe_of(layers, chunks=2)

    def loss_fn(tree):
        return tree["x"].pow(2).mean()

    expected = loss_fn(layers({**x, "whole": whole}))
    grads = torch.autograd.grad(expected, [whole, *layers.parameters()])
    loss = pipe.train_batch({"whole": NoChunk(whole), **x}, loss_fn=loss_fn)  # first in the tree
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close([whole.grad, *(p.grad for p in layers.parameters())], list(grads))


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("run", KINDS)
def test_a_frozen_first_stage_is_never_gone_back_through(run, checkpoint):
    layers = model()
    layers[0].requires_grad_(False)
    layers[1].requires_grad_(False)
    backwards = []
    layers[0].register_full_backward_hook(lambda *_: backwards.append(1))
    plain = copy.deepcopy(layers)
    pipe = model_pipe(run, layers, checkpoint=checkpoint)
    x, target = torch.randn(10, 6), torch.randn(10, 3)
    expected = by_hand(plain, x, target, run)
    loss = pipe.train_batch(x, target, loss_fn=F.mse_loss, **RUNS[run][0])
    assert_same([loss], expected[:1])
    assert_same_state(pipe, plain, exact=run in WHOLE)
    assert backwards == []


def test_a_parameter_that_stages_share_gets_both_gradients():
    class Times(nn.Module):
        def __init__(self, weight):
            super().__init__()
            self.weight = weight

        def forward(self, x):
            return (x @ self.weight).tanh()

    weight = nn.Parameter(torch.randn(6, 6))
    layers = nn.Sequential(Times(weight), nn.Linear(6, 6), Times(weight))
    pipe = Pipe(layers, [1, 1, 1], devices=["cpu:0", "cpu:1", "cpu:0"], chunks=4)
    x, seen = torch.randn(8, 6), []
    for _ in range(10):
        pipe.zero_grad()
        pipe.train_batch(x, loss_fn=weigh)
        seen.append(weight.grad)
    pipe.zero_grad()
    for chunk in x.chunk(4):
        (weigh(layers(chunk)) / 4).backward()
    torch.testing.assert_close(seen[0], weight.grad)  # added up in another order
    assert all(torch.equal(grad, seen[0]) for grad in seen)


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("run", ["gpipe", "1f1b"])
def test_an_entry_that_goes_through_a_stage_may_be_changed_in_place_in_the_next(run, checkpoint):
    class First(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, tree):
            return {"x": self.linear(tree["x"]), "m": tree["m"]}

    class Second(nn.Module):
        def forward(self, tree):
            tree["m"].add_(1)
            return tree["x"] * tree["m"]

    layers = nn.Sequential(First(), Second())
    plain = copy.deepcopy(layers)
    pipe = pipe_of(layers, chunks=3, checkpoint=checkpoint)
    x = {"x": torch.randn(6, 3), "m": torch.randn(6, 3)}
    orders = [[2, 1, 0] if run == "gpipe" else [0, 1, 2]] * 2
    expected = plain_step(plain, x, loss_fn=weigh, chunks=3, orders=orders, balance=[1, 1])
    assert_same_step(pipe_step(pipe, x, loss_fn=weigh, schedule=run), expected)


# Buffers


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("run", KINDS)
def test_batch_norm_counts_each_micro_batch_once(run, checkpoint):
    pipe = model_pipe(run, checkpoint=checkpoint)
    for _ in range(2):
        pipe.train_batch(torch.randn(10, 6), loss_fn=weigh, **RUNS[run][0])
    assert pipe[1].num_batches_tracked == 10


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("run", KINDS)
def test_deferred_batch_norm_counts_the_mini_batch_once(run, checkpoint):
    pipe = model_pipe(run, checkpoint=checkpoint, deferred_batch_norm=True)
    x = torch.randn(10, 6)
    with torch.no_grad():
        whole = model()
        whole(x)
    pipe.train_batch(x, loss_fn=weigh, **RUNS[run][0])
    assert pipe[1].num_batches_tracked == 1
    torch.testing.assert_close(dict(pipe.named_buffers()), dict(whole.named_buffers()))


# Re-materialization


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("run", KINDS)
def test_the_mode_says_which_micro_batches_are_recomputed_and_each_is_once(
    run, checkpoint, training
):
    forwards, again = [], []

    def note(x):
        i = int(x.detach()[0, 0])
        assert not (is_checkpointing() and is_recomputing())
        if is_recomputing():
            again.append(i)
        else:
            forwards.append((i, is_checkpointing()))

    layers = nn.Sequential(*[nn.Sequential(Do(note), Scale()) for _ in range(4)])
    pipe = Pipe(layers, [1] * 4, devices=RUNS[run][1], chunks=3, checkpoint=checkpoint)
    pipe.train(training)
    x = torch.arange(3.0).repeat_interleave(2)[:, None].repeat(1, 3)
    pipe.train_batch(x, loss_fn=weigh, **RUNS[run][0])
    dropped = {"always": [0, 1, 2], "except_last": [0, 1], "never": []}[checkpoint]
    dropped = dropped if training else []
    assert sorted(forwards) == sorted([(i, i in dropped) for i in range(3)] * 4)
    assert sorted(again) == sorted(dropped * 4)


class Scale(nn.Module):
    """Leaves the first column as it is, which says which micro-batch this is."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x):
        return torch.cat([x[:, :1], x[:, 1:] * self.weight], 1)


@pytest.mark.parametrize("run", ["naive", "gpipe", "1f1b", "zb_h1"])
def test_a_recomputation_starts_before_the_gradient_arrives(run):
    started = [threading.Event() for _ in range(4)]
    in_time = []

    class Wait(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.i = int(x[0, 0])
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            in_time.append(started[ctx.i].wait(timeout=30))
            return grad

    def note(x):
        if is_recomputing():
            started[int(x.detach()[0, 0])].set()

    layers = [nn.Sequential(Do(note), Scale()), nn.Sequential(Scale(), Do(Wait.apply))]
    pipe = pipe_of(nn.Sequential(*layers), checkpoint="always")
    x = torch.arange(4.0).repeat_interleave(2)[:, None].repeat(1, 3)
    pipe.train_batch(x, loss_fn=weigh, schedule=run)
    assert in_time == [True] * 4


# Random numbers


def test_train_batch_draws_what_the_forward_draws():
    torch.manual_seed(5)
    layers = nn.Sequential(nn.Linear(6, 6), nn.Dropout(), nn.RReLU(), nn.Dropout())
    pipe, x = pipe_of(layers), torch.randn(8, 6)
    torch.manual_seed(1)
    expected = pipe(x).detach()
    after = torch.get_rng_state()
    for run in ("naive", "gpipe", "1f1b", "zb_h1"):
        torch.manual_seed(1)
        _, output = pipe.train_batch(x, loss_fn=weigh, schedule=run, return_outputs=True)
        assert torch.equal(output, expected)
        assert torch.equal(torch.get_rng_state(), after)


def test_a_loss_may_draw_numbers_of_its_own():
    drawn, by_layers = [], []

    def loss_fn(y):
        drawn.append(torch.rand(3).tolist())
        return weigh(y)

    def draw(x):
        by_layers.append(torch.rand(3).tolist())

    layers = nn.Sequential(Do(draw), nn.Linear(3, 3), nn.Dropout(), Dawdle(), Do(draw))
    pipe = pipe_of(layers, checkpoint="never")
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        pipe.train_batch(torch.ones(8, 3), loss_fn=loss_fn)
    first, again, other = drawn[:4], drawn[4:8], drawn[8:]
    assert first == again
    # For each of two seeds 4 micro-batches in the loss and in each of two layers.
    assert len({tuple(numbers) for numbers in first + other + by_layers}) == 2 * 4 * 3


def stress_model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(
        *[nn.Sequential(nn.Linear(6, 6), Dawdle(k), nn.Dropout(0.3), nn.Tanh()) for k in range(4)],
        nn.Sequential(nn.BatchNorm1d(6), Dawdle(9), nn.Linear(6, 6)),
    )


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("run", KINDS)
def test_many_steps_on_four_workers_give_what_the_inline_run_gives(run, checkpoint):
    options, devices = RUNS[run]
    ours = Pipe(stress_model(), [1, 1, 2, 1], devices=devices, chunks=6, checkpoint=checkpoint)
    theirs = Pipe(stress_model(), [1, 1, 2, 1], devices=devices, chunks=6, checkpoint="never")
    x = torch.randn(12, 6)
    for _ in range(50):
        results = []
        for pipe, context in ((ours, nullcontext()), (theirs, inline())):
            torch.manual_seed(4)
            with context:
                results.append(pipe_step(pipe, x.requires_grad_(), loss_fn=noisy, **options))
            pipe.zero_grad()
        assert_same_step(*results)  # split or not: both do the same


# What belongs to the caller


class Look(torch.autograd.Function):
    """Notes whether autocast is on in backward."""

    @staticmethod
    def forward(ctx, x, seen):
        ctx.seen = seen
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.seen.append(torch.is_autocast_enabled("cpu"))
        return grad, None


@pytest.mark.parametrize("by_hand", [False, True], ids=["workers", "inline"])
@pytest.mark.parametrize("run", ["gpipe", "zb_h1"])
def test_autocast_is_off_in_backward_and_as_it_was_afterwards(run, by_hand):
    seen = []
    layers = nn.Sequential(nn.Linear(3, 3), Do(lambda x: Look.apply(x, seen)), nn.Linear(3, 3))
    pipe = pipe_of(layers)
    with torch.autocast("cpu", dtype=torch.bfloat16), inline() if by_hand else nullcontext():
        pipe.train_batch(
            torch.randn(8, 3), loss_fn=lambda y: Look.apply(y, seen).float().sum(), schedule=run
        )
        assert torch.is_autocast_enabled("cpu")
    assert seen == [False] * 8


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("run", ["gpipe", "1f1b", "zb_h1"])
def test_autocast_holds_for_forward_and_loss_and_not_for_backward(run, checkpoint, cache):
    def loss_fn(y, t):
        assert torch.is_autocast_enabled("cpu")
        assert y.dtype == torch.bfloat16
        return F.mse_loss(y.float() @ torch.eye(3), t)

    autocast = {"dtype": torch.bfloat16, "cache_enabled": cache}
    layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3))
    plain = copy.deepcopy(layers)
    pipe = Pipe(layers, [2, 2, 1], devices=FOUR, chunks=4, checkpoint=checkpoint)
    x, target = torch.randn(8, 6), torch.randn(8, 3)
    for _ in range(2):
        losses = []
        for c, t in zip(x.chunk(4), target.chunk(4), strict=True):
            with torch.autocast("cpu", **autocast):
                losses.append(loss_fn(plain(c), t) * 0.25)
        for loss in losses[::-1] if run == "gpipe" else losses:
            loss.backward()
        with torch.autocast("cpu", **autocast):
            ours = pipe.train_batch(x, target, loss_fn=loss_fn, schedule=run)
        assert torch.equal(ours, sum(losses[1:], losses[0]))
        for p, q in zip(pipe.parameters(), plain.parameters(), strict=True):
            assert p.grad.dtype == torch.float32
            if run == "zb_h1":  # products in bfloat16, added in another order
                torch.testing.assert_close(p.grad, q.grad, rtol=2e-2, atol=1e-2)
            else:
                assert torch.equal(p.grad, q.grad)
        for module in (pipe, plain):
            torch.optim.SGD(module.parameters(), lr=0.5).step()
            module.zero_grad()
        plain.load_state_dict(pipe.state_dict())


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)

    def forward(self, x):
        return torch.relu(self.norm(self.linear(x)) + x)


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("run", ["gpipe", "1f1b", "zb_h1"])
def test_compiled_layers(run, checkpoint):
    torch._dynamo.reset()
    try:
        layers = nn.Sequential(Block(), nn.Tanh(), Block(), nn.Linear(6, 3))
        plain = copy.deepcopy(layers)
        for k in (0, 2):
            layers[k].compile(backend="eager")
        pipe = pipe_of(layers, [2, 2], checkpoint=checkpoint)
        x = torch.randn(12, 6)
        orders = [[3, 2, 1, 0] if run == "gpipe" else [0, 1, 2, 3]] * 2
        for _ in range(2):
            expected = plain_step(plain, x, loss_fn=weigh, chunks=4, orders=orders, balance=[2, 2])
            actual = pipe_step(pipe, x, loss_fn=weigh, schedule=run)
            assert_same_step(actual, expected, exact=run != "zb_h1")
            pipe.zero_grad()
            plain.zero_grad()
    finally:
        torch._dynamo.reset()


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("run", KINDS)
def test_parameter_hooks_run_once_a_micro_batch(run, checkpoint):
    pipe, calls = model_pipe(run, checkpoint=checkpoint), []
    for name, parameter in pipe.named_parameters():
        parameter.register_hook(lambda g, name=name: calls.append((name, g.clone())))
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: calls.append((name, 0)))
    pipe.train_batch(torch.randn(10, 6), loss_fn=weigh, **RUNS[run][0])
    names = [name for name, _ in calls]
    assert sorted(names) == sorted(10 * [name for name, _ in pipe.named_parameters()])
    for name, parameter in pipe.named_parameters():
        parts = [grad for other, grad in calls if other == name and isinstance(grad, Tensor)]
        torch.testing.assert_close(sum(parts), parameter.grad)


def test_a_parameter_hook_changes_the_gradient():
    pipe, plain = model_pipe("zb_h1"), model()
    for module in (pipe, plain):
        module[3].weight.register_hook(lambda g: g * 2)
    x, target = torch.randn(10, 6), torch.randn(10, 3)
    by_hand(plain, x, target, "zb_h1")
    pipe.train_batch(x, target, loss_fn=F.mse_loss, schedule="zb_h1")
    assert_same_state(pipe, plain, exact=False)


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("run", KINDS)
def test_hooks_on_layers_see_what_they_see_in_the_loop(run, checkpoint):
    def listen(module):
        calls, grads = [], {}
        for k in range(6):
            module[k].register_forward_pre_hook(
                lambda *_, k=k: None if is_recomputing() else calls.append((k, "before"))
            )
            module[k].register_forward_hook(
                lambda *_, k=k: None if is_recomputing() else calls.append((k, "after"))
            )
            module[k].register_full_backward_hook(
                lambda _, gi, go, k=k: grads.setdefault(k, []).extend([gi[0], go[0]])
            )
        return calls, grads

    plain, pipe = model(), model_pipe(run, checkpoint=checkpoint)
    ours, theirs = listen(pipe), listen(plain)
    x, target = torch.randn(10, 6, requires_grad=True), torch.randn(10, 3)
    by_hand(plain, x, target, run)
    pipe.train_batch(x, target, loss_fn=F.mse_loss, **RUNS[run][0])
    assert sorted(ours[0]) == sorted(theirs[0])
    for k in range(6):
        assert_same(ours[1][k], theirs[1][k])


def test_hooks_on_a_partition_run():
    pipe, calls = model_pipe("1f1b"), []
    for partition in pipe.partitions:
        partition.register_forward_hook(lambda *_: calls.append(1))
    pipe.train_batch(torch.randn(10, 6), loss_fn=weigh)
    assert len(calls) == 4 * 5 + 4 * 4  # and once more where it is recomputed


class BadBackward(nn.Module):
    def forward(self, x):
        return torch.sqrt(x - 100)  # the line to find


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
def test_anomaly_mode_shows_the_line_of_the_layer_that_gave_nan(checkpoint):
    pipe = pipe_of(nn.Sequential(nn.Linear(2, 2), BadBackward()), checkpoint=checkpoint)
    with (
        pytest.warns(UserWarning, match="the line to find"),
        pytest.raises(RuntimeError, match="returned nan"),
        torch.autograd.detect_anomaly(),
    ):
        pipe.train_batch(torch.randn(8, 2), loss_fn=weigh)


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("run", ["gpipe", "1f1b", "zb_h1"])
def test_a_pipe_inside_a_layer(run, checkpoint):
    def build(inner):
        torch.manual_seed(2)
        core = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 6))
        if inner:
            core = Pipe(core, [2, 2], chunks=1, checkpoint="always")
        return nn.Sequential(nn.Linear(6, 6), nn.Sequential(core), nn.Linear(6, 3))

    plain, pipe = build(False), pipe_of(build(True), checkpoint=checkpoint)
    x = torch.randn(8, 6)
    orders = [[3, 2, 1, 0] if run == "gpipe" else [0, 1, 2, 3]] * 3
    expected = plain_step(plain, x, loss_fn=weigh, chunks=4, orders=orders, balance=[1, 1, 1])
    actual = pipe_step(pipe, x, loss_fn=weigh, schedule=run)
    assert_same_step(actual, expected, exact=run != "zb_h1")


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("run", ["gpipe", "1f1b", "zb_h1"])
def test_saved_tensor_hooks_of_the_caller(run, checkpoint):
    plain, pipe, packed = model(), model_pipe(run, checkpoint=checkpoint), []
    x, target = torch.randn(10, 6), torch.randn(10, 3)
    by_hand(plain, x, target, run)
    with saved_tensors_hooks(lambda t: packed.append(t) or len(packed) - 1, packed.__getitem__):
        pipe.train_batch(x, target, loss_fn=F.mse_loss, schedule=run)
    assert packed
    assert_same_state(pipe, plain, exact=run in WHOLE)


@pytest.mark.parametrize("run", ["gpipe", "1f1b", "zb_h1"])
def test_the_flop_counter_counts_what_it_counts_for_the_loop(run):
    x, target, flops = torch.randn(10, 6), torch.randn(10, 3), []
    for checkpoint in ("never", "always", None):
        with FlopCounterMode(display=False) as counter:
            if checkpoint is None:
                by_hand(model(), x, target, run)
            else:
                pipe = model_pipe(run, checkpoint=checkpoint)
                pipe.train_batch(x, target, loss_fn=F.mse_loss, schedule=run)
        flops.append(counter.get_total_flops())
    with FlopCounterMode(display=False) as counter:
        model()(x)
    assert flops[0] == flops[2]
    assert flops[1] == flops[2] + counter.get_total_flops()


@pytest.mark.parametrize("run", ["gpipe", "1f1b", "zb_h1"])
def test_fake_tensors_are_trained(run):
    with FakeTensorMode():
        pipe = model_pipe(run)
        loss = pipe.train_batch(
            torch.randn(10, 6), torch.randn(10, 3), loss_fn=F.mse_loss, schedule=run
        )
        assert loss.shape == ()
        assert all(p.grad.shape == p.shape for p in pipe.parameters())


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("run", ["gpipe", "1f1b", "interleaved"])
def test_a_whole_training_gives_the_parameters_of_the_loop(run, checkpoint):
    plain, pipe = model(), model_pipe(run, checkpoint=checkpoint)
    optimizers = [torch.optim.AdamW(module.parameters(), lr=0.1) for module in (plain, pipe)]
    for _ in range(10):
        x, target = torch.randn(10, 6), torch.randn(10, 3)
        by_hand(plain, x, target, run)
        pipe.train_batch(x, target, loss_fn=F.mse_loss, **RUNS[run][0])
        for module, optimizer in zip((plain, pipe), optimizers, strict=True):
            nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    assert_same_tree(dict(pipe.state_dict()), dict(plain.state_dict()), "state")


class Layer(nn.Module):
    """A function of its input and of layers."""

    def __init__(self, function, *layers):
        super().__init__()
        self.function, self.layers = function, nn.ModuleList(layers)

    def forward(self, x):
        return self.function(x, *self.layers)


def penalty(x: Tensor, layer: nn.Module) -> Tensor:
    """Runs a backward of its own, and is differentiated twice."""
    leaf = x.detach().requires_grad_()
    (grad,) = torch.autograd.grad(layer(leaf).pow(2).sum(), leaf, create_graph=True)
    return layer(x) + grad


ARCHITECTURES: dict[str, Any] = {
    "attention": lambda: [
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True) for _ in range(3)
    ],
    "recurrent": lambda: [
        Layer(lambda x, inner: inner(x)[0], nn.LSTM(8, 8, batch_first=True)),
        nn.Linear(8, 8),
        Layer(lambda x, inner: inner(x)[0], nn.GRU(8, 8, batch_first=True)),
    ],
    "convolution": lambda: [nn.Conv1d(5, 5, 3, padding=1), nn.GroupNorm(5, 5), nn.BatchNorm1d(5)],
    "embedding": lambda: [nn.Embedding(9, 8, max_norm=2.0), nn.Linear(8, 8), nn.LayerNorm(8)],
    "views in place": lambda: [
        nn.Linear(8, 8), Layer(lambda x: x[:, :3]), nn.ReLU(inplace=True), nn.Linear(8, 8)
    ],
    "spectral norm": lambda: [spectral_norm(nn.Linear(8, 8)), nn.Tanh(), nn.Linear(8, 8)],
    "weight norm": lambda: [weight_norm(nn.Linear(8, 8)), nn.Tanh(), nn.Linear(8, 8)],
    "used twice": lambda: [Layer(lambda x, f: f(f(x).tanh()), nn.Linear(8, 8)), nn.Linear(8, 8)],
    "a parameter comes out": lambda: [
        nn.Linear(8, 8), Layer(lambda x, f: (x, f.weight), nn.Linear(8, 8)),
        Layer(lambda t: t[0] @ t[1]),
    ],
    "expanded": lambda: [nn.Linear(8, 1), Layer(lambda x: x.expand(-1, -1, 8)), nn.Linear(8, 8)],
    "gradient penalty": lambda: [nn.Linear(8, 8), Layer(penalty, nn.Linear(8, 8)), nn.Linear(8, 8)],
    "checkpointed": lambda: [
        nn.Linear(8, 8),
        Layer(lambda x, f: checkpointed(f, x, use_reentrant=False), nn.Linear(8, 8)),
        nn.Tanh(),
    ],
    "cut off": lambda: [nn.Linear(8, 8), Layer(lambda x: x.detach()), nn.Linear(8, 8)],
    "frozen between": lambda: [
        nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8)
    ],
    "complex": lambda: [
        nn.Linear(8, 8), Layer(lambda x: torch.complex(x, x * 2)), Layer(lambda x: x.abs())
    ],
    "double": lambda: [nn.Linear(8, 8).double(), nn.Tanh(), nn.Linear(8, 8).double()],
}  # fmt: skip


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("run", ["gpipe", "1f1b", "zb_h1"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architectures(name, run, checkpoint):
    torch.manual_seed(0)
    layers = nn.Sequential(*ARCHITECTURES[name]())
    plain, n = copy.deepcopy(layers), len(layers)
    if name == "embedding":
        x = torch.randint(9, (7, 5))
    else:
        x = torch.randn(7, 5, 8, dtype=next(layers.parameters()).dtype, requires_grad=True)
    pipe = Pipe(layers, [1] * n, chunks=3, checkpoint=checkpoint)
    orders = [[2, 1, 0] if run == "gpipe" else [0, 1, 2]] * n
    for _ in range(2):
        expected = plain_step(plain, x, loss_fn=weigh, chunks=3, orders=orders, balance=[1] * n)
        actual = pipe_step(pipe, x, loss_fn=weigh, schedule=run)
        assert_same_step(actual, expected, exact=run != "zb_h1")
        plain.zero_grad()
        pipe.zero_grad()


def test_lazy_layers_get_their_parameters_in_the_first_call():
    pipe = pipe_of(nn.Sequential(nn.LazyLinear(4), nn.Tanh(), nn.LazyLinear(3)))
    pipe.train_batch(torch.randn(8, 6), loss_fn=weigh)
    assert pipe[0].weight.grad.shape == (4, 6)
    assert pipe[2].weight.grad.shape == (3, 4)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))])
def test_a_copy_of_a_pipe_that_was_trained_trains(copied):
    pipe, x = model_pipe("1f1b"), torch.randn(10, 6)
    pipe.train_batch(x, loss_fn=weigh)
    other = copied(pipe)
    for module in (pipe, other):
        module.zero_grad()
        module.train_batch(x, loss_fn=weigh)
    assert_same_state(other, pipe, exact=True)


# Several at once


def in_threads(function: Any, count: int) -> None:
    start, errors = threading.Barrier(count), []

    def work(k):
        start.wait()
        try:
            function(k)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_two_threads_train_one_pipe():
    pipe, plain = model_pipe("1f1b").eval(), model().eval()  # nothing but .grad changes
    x, target = torch.randn(10, 6), torch.randn(10, 3)
    losses = []
    in_threads(
        lambda _: losses.extend(pipe.train_batch(x, target, loss_fn=F.mse_loss) for _ in range(25)),
        2,
    )
    for _ in range(50):
        expected, _ = by_hand(plain, x, target, "1f1b")
    assert_same(losses, [expected] * 50)
    assert_same_state(pipe, plain, exact=True)


def test_pipes_train_at_the_same_time():
    results: list[Any] = [None] * 4
    x = [torch.randn(10, 6, requires_grad=True) for _ in range(4)]

    pipes = [[model_pipe(WHOLE[k]) for k in range(4)] for _ in range(2)]  # they draw: one thread

    def train(k: int, again: int = 0) -> Trained:
        pipe = pipes[again][k]
        steps = [pipe_step(pipe, x[k], loss_fn=weigh, **RUNS[WHOLE[k]][0]) for _ in range(20)]
        results[k] = steps[-1]
        return steps[-1]

    in_threads(train, 4)
    together = list(results)
    for k in range(4):
        assert_same_step(together[k], train(k, 1))


def test_train_batch_and_the_drop_in_take_turns():
    pipe, plain = pipe_of(nn.Sequential(nn.Linear(6, 6), nn.Tanh())), nn.Linear(6, 6)
    plain.load_state_dict(pipe[0].state_dict())
    x = torch.randn(8, 6)
    for _ in range(2):
        weigh(pipe(x)).backward()
        weigh(torch.cat([plain(c).tanh() for c in x.chunk(4)])).backward()
        pipe.train_batch(x, loss_fn=lambda y: y.pow(2).mean())
        for c in x.chunk(4):
            (plain(c).tanh().pow(2).mean() * 0.25).backward()
    torch.testing.assert_close(pipe[0].weight.grad, plain.weight.grad)


def test_interleaved_stages_need_their_devices():
    pipe = Pipe(model(), [2, 2, 1, 1], devices=FOUR, chunks=4)
    pipe.train_batch(torch.randn(8, 6), loss_fn=weigh, schedule="interleaved_1f1b")
    pipe.devices = ["cpu:0", "cpu:0", "cpu:1", "cpu:1"]
    with pytest.raises(ValueError, match="go round the devices"):
        pipe.train_batch(torch.randn(8, 6), loss_fn=weigh, schedule="interleaved_1f1b")
    pipe.devices = ROUND
    pipe.train_batch(torch.randn(8, 6), loss_fn=weigh, schedule="interleaved_1f1b")
