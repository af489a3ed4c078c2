"""P1 and P2: a pipe computes what the plain model computes, and draws what it drew before."""

from __future__ import annotations

import copy
from contextlib import nullcontext, suppress
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from syncpipe import Pipe, inline
from tests.support.models import (
    CHANNELS,
    CHECKPOINT_MODES,
    LAYERS,
    LENGTH,
    RANDOM_LAYERS,
    SENDS,
    Receive,
    Send,
    Spec,
    assert_close,
    assert_equals_plain,
    assert_same,
    assert_same_tree,
    in_turn,
    step,
)

STRUCTURE = ["inplace", "fork", "join", *SENDS, "receive", "receive_unused"]


def specs(*kinds: str) -> st.SearchStrategy[Spec]:
    chosen = st.lists(st.sampled_from(kinds), min_size=1, max_size=7).map(tuple)
    return st.builds(Spec, chosen, st.integers(0, 3))


@st.composite
def cuts(draw: st.DrawFn, layers: int) -> tuple[list[int], list[str]]:
    """A balance, and a device for each partition: the same one may come again."""
    stages = draw(st.integers(1, min(4, layers)))
    borders = draw(
        st.lists(st.integers(1, layers - 1), min_size=stages - 1, max_size=stages - 1, unique=True)
        if layers > 1
        else st.just([])
    )
    edges = [0, *sorted(borders), layers]
    balance = [b - a for a, b in pairwise(edges)]
    devices = draw(
        st.lists(st.sampled_from(["cpu:0", "cpu:1", "cpu:2"]), min_size=stages, max_size=stages)
    )
    return balance, devices


@st.composite
def pipes(draw: st.DrawFn, spec: Spec) -> dict[str, Any]:
    """All that one can choose about a pipe but the number of micro-batches."""
    balance, devices = draw(cuts(len(spec.layers)))
    modes, layers = st.sampled_from(CHECKPOINT_MODES), len(spec.layers)
    flags = st.lists(st.booleans(), min_size=layers, max_size=layers)
    runs = st.integers(0, layers - 1).map(lambda first: [range(first, layers)])
    return {
        "balance": balance,
        "devices": devices,
        "checkpoint": draw(st.one_of(modes, st.tuples(*[modes] * len(balance)), flags, runs)),
    }


def batch(size: int, requires_grad: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(size, CHANNELS, LENGTH, generator=generator)
    return x.requires_grad_(requires_grad)


@settings(max_examples=500)
@given(
    data=st.data(),
    spec=specs(*LAYERS, *STRUCTURE),
    chunks=st.integers(1, 5),
    size=st.integers(1, 7),
    input_grad=st.booleans(),
    training=st.booleans(),
    by_hand=st.booleans(),
)
def test_a_pipe_equals_the_plain_model_to_the_last_bit(
    data, spec, chunks, size, input_grad, training, by_hand
):
    plain, arguments = spec.build().train(training), data.draw(pipes(spec))
    x = batch(size, input_grad)
    pipe = Pipe(spec.build().train(training), chunks=chunks, **arguments)
    reference = in_turn(plain, chunks)
    with inline() if by_hand else nullcontext():
        for _ in range(2):  # the second call builds on what the first one learned
            assert_same(step(pipe, pipe, x), step(reference, plain, x))


@settings(max_examples=250)
@given(
    data=st.data(),
    spec=specs("linear", "norm", *RANDOM_LAYERS, *RANDOM_LAYERS, *STRUCTURE),
    chunks=st.integers(1, 4),
    size=st.integers(1, 6),
    seed=st.integers(0, 2**40),
    by_hand=st.booleans(),
)
def test_random_layers_draw_the_same_whatever_the_cut_the_devices_and_the_checkpoint_mode(
    data, spec, chunks, size, seed, by_hand
):
    x = batch(size, True)
    one = Pipe(spec.build(), [len(spec.layers)], chunks=chunks, checkpoint="never")
    other = Pipe(spec.build(), chunks=chunks, **data.draw(pipes(spec)))
    states, results = [], []
    for pipe, context in ((one, nullcontext()), (other, inline() if by_hand else nullcontext())):
        torch.manual_seed(seed)
        states.append(torch.get_rng_state())
        with context:
            results.append([step(pipe, pipe, x) for _ in range(2)])
        states.append(torch.get_rng_state())
    for first, second in zip(*results, strict=True):
        assert_same(second, first)
    assert torch.equal(states[1], states[3]), "the generator stands elsewhere afterwards"
    assert not torch.equal(states[0], states[1]), "the generator was rewound"


@settings(max_examples=40)
@given(data=st.data(), chunks=st.integers(1, 4), size=st.integers(1, 6))
def test_without_grad_the_outputs_and_the_buffers_are_those_of_the_plain_model(data, chunks, size):
    spec = data.draw(specs(*LAYERS, "fork", "join", *SENDS, "receive"))
    plain, pipe = spec.build(), Pipe(spec.build(), chunks=chunks, **data.draw(pipes(spec)))
    x = batch(size, False)
    with data.draw(st.sampled_from([torch.no_grad, torch.inference_mode]))():
        assert_same_tree(pipe(x), in_turn(plain, chunks)(x), "output")
    assert_same_tree(dict(pipe.named_buffers()), dict(plain.named_buffers()), "buffers")


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("balance", [[2, 3], [1, 2, 2], [2, 1, 1, 1]])
@pytest.mark.parametrize("devices", [["cpu:0"] * 4, ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]])
def test_a_stashed_tensor_that_is_changed_in_place_is_right_or_refused(
    balance, checkpoint, devices
):
    # The plain model pops what the ReLU left of the tensor.
    torch.manual_seed(0)
    layers = [nn.Linear(LENGTH, LENGTH), Send(), nn.ReLU(inplace=True), nn.Tanhshrink(), Receive()]
    arguments: dict[str, Any] = {"checkpoint": checkpoint, "devices": devices, "chunks": 3}
    with suppress(RuntimeError, ValueError):
        assert_equals_plain(nn.Sequential(*layers), batch(6, True), balance, steps=2, **arguments)


class SumOfThree(nn.Module):
    """Uses its input twice."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.tanh() + x.sigmoid()


@pytest.mark.parametrize("balance", [[2, 2], [2, 1, 1], [1, 1, 1, 1]])
def test_a_stashed_tensor_with_more_uses_has_the_gradients_of_the_plain_model_to_rounding(balance):
    # (skip + one use) + other use there, skip + (one use + other use) here: what is used beyond
    # a border is summed there, and only the sum comes back.
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(LENGTH, LENGTH), Send(), SumOfThree(), Receive())
    x, plain = batch(64, True), copy.deepcopy(layers)
    pipe = Pipe(layers, balance, chunks=2)
    expected = step(lambda t: torch.cat([plain(c) for c in t.chunk(2)]), plain, x)
    assert_close(step(pipe, pipe, x), expected)


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
def test_rrelu_stores_the_noise_that_it_drew(checkpoint):
    # Autograd stores the tensor for the noise before the operation fills it.
    x, grads = batch(6, True), []
    for mode in ("never", checkpoint):
        pipe = Pipe(nn.Sequential(nn.RReLU(), nn.Identity()), [1, 1], chunks=2, checkpoint=mode)
        torch.manual_seed(3)
        grads.append(step(pipe, pipe, x))
    assert_same(grads[1], grads[0])


def test_calls_layers_and_micro_batches_draw_different_numbers():
    pipe = Pipe(nn.Sequential(nn.Dropout(0.5), nn.Identity()), [1, 1], chunks=2)
    x = torch.ones(64, 3)
    assert not torch.equal(pipe(x), pipe(x))
    assert not torch.equal(*pipe(x).chunk(2))
    twice = Pipe(nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5)), [1, 1])
    kept = twice(x) != 0
    assert 0 < kept.float().mean() < 0.45, "both layers drew the same mask"
