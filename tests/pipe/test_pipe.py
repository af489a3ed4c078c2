"""``Pipe`` as a module: what it takes, what it shows, what it refuses."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import nn

from syncpipe import Pipe
from tests.support.models import (
    CHECKPOINT_MODES,
    assert_equals_plain,
    assert_same,
    in_turn,
    linear_model,
    named_model,
    step,
)


def made(*args: Any, **arguments: Any) -> Pipe:
    return Pipe(linear_model(4), *args, **arguments)


# --- attributes ------------------------------------------------------------------------------


def test_the_attributes_are_what_was_given() -> None:
    pipe = made((1, 3), devices=["cpu:1", "cpu:0", "cpu:5"], chunks=3, checkpoint="always")
    assert pipe.balance == [1, 3]
    assert pipe.devices == [torch.device("cpu", 1), torch.device("cpu", 0)], "unused one is dropped"
    assert (pipe.chunks, pipe.checkpoint) == (3, "always")


def test_the_defaults_are_one_micro_batch_and_all_but_the_last_rematerialized() -> None:
    pipe = made([4])
    assert (pipe.chunks, pipe.checkpoint) == (1, "except_last")


def test_changing_a_returned_list_does_not_change_the_pipe() -> None:
    pipe = made([2, 2])
    for found in (pipe.balance, pipe.devices, pipe.partitions):
        found.clear()
    assert (pipe.balance, len(pipe.devices), len(pipe.partitions)) == ([2, 2], 2, 2)


def test_partitions_are_sequentials_that_share_the_layers() -> None:
    model = named_model()
    pipe = Pipe(model, [1, 3])
    assert all(isinstance(partition, nn.Sequential) for partition in pipe.partitions)
    assert [list(p._modules) for p in pipe.partitions] == [["stem"], ["act", "norm", "fc"]]
    assert [layer for partition in pipe.partitions for layer in partition] == list(model)


def test_a_partition_can_be_called_by_hand() -> None:
    model, x = linear_model(4), torch.randn(2, 3)
    first, second = Pipe(model, [2, 2]).partitions
    assert torch.equal(second(first(x)), model(x))


def test_len_iteration_indices_and_slices_are_those_of_the_sequential() -> None:
    model = named_model()
    pipe = Pipe(model, [2, 2])
    assert len(pipe) == 4
    assert list(pipe) == list(model)
    assert [pipe[k] for k in range(-4, 4)] == [model[k] for k in range(-4, 4)]
    part = pipe[1:-1]
    assert type(part) is nn.Sequential
    assert dict(part.named_children()) == dict(model[1:-1].named_children())
    assert pipe.fc is model.fc


@pytest.mark.parametrize("index", [4, -5])
def test_an_index_beyond_the_layers_is_an_index_error(index: int) -> None:
    with pytest.raises(IndexError, match=f"layer {index} .*4"):
        made([4])[index]


def test_print_shows_stages_devices_and_layers() -> None:
    shown = repr(Pipe(named_model(), [1, 3], devices=["cpu:0", "cpu:1"], chunks=7))
    for text in ("[1, 3]", "chunks=7", "except_last", "stage 1", "cpu:1", "(norm): BatchNorm1d(3"):
        assert text in shown
    places = [shown.index(text) for text in ("stage 0", "cpu:0", "stem", "stage 1", "cpu:1", "fc")]
    assert places == sorted(places)


# --- setters ---------------------------------------------------------------------------------


def test_setting_the_balance_cuts_anew_and_computes_the_same() -> None:
    pipe, x = made([2, 2], chunks=2), torch.randn(4, 3)
    before = pipe(x)
    pipe.balance = [1, 1, 2]
    assert pipe.balance == [1, 1, 2]
    assert [len(partition) for partition in pipe.partitions] == [1, 1, 2]
    assert len(pipe.devices) == 3
    assert torch.equal(pipe(x), before)


def test_setting_the_devices_computes_the_same() -> None:
    pipe, x = made([2, 2], devices=["cpu:0", "cpu:1"], chunks=2), torch.randn(4, 3)
    before = pipe(x)
    pipe.devices = ["cpu:3", "cpu:3", "cpu:4"]
    assert pipe.devices == [torch.device("cpu:3")] * 2
    assert torch.equal(pipe(x), before)


def test_setting_chunks_and_checkpoint_takes_effect_on_the_next_call() -> None:
    pipe, sizes = made([4]), []
    pipe[0].register_forward_hook(lambda _m, args, _out: sizes.append(len(args[0])))
    x = torch.randn(4, 3)
    pipe.chunks, pipe.checkpoint = 2, "never"
    pipe(x).sum().backward()
    assert sizes == [2, 2]
    pipe.checkpoint = "always"
    pipe(x).sum().backward()
    assert sizes[2:] == [2, 2, 2, 2]


@pytest.mark.parametrize(
    ("attribute", "value", "error"),
    [
        ("balance", [3, 2], ValueError),
        ("balance", [4, 0], ValueError),
        ("balance", [1.0, 3.0], TypeError),
        ("balance", [1, 1, 1, 1], IndexError),  # two devices only
        ("devices", ["cpu:0"], IndexError),
        ("devices", "cpu", TypeError),
        ("chunks", 0, ValueError),
        ("chunks", 1.5, TypeError),
        ("checkpoint", "sometimes", ValueError),
    ],
)
def test_a_refused_setting_leaves_the_pipe_as_it_was(
    attribute: str, value: Any, error: type[Exception]
) -> None:
    pipe, x = made([2, 2], devices=["cpu:0", "cpu:1"], chunks=2), torch.randn(4, 3)
    before, state = pipe(x), repr(pipe)
    with pytest.raises(error, match=attribute):
        setattr(pipe, attribute, value)
    assert repr(pipe) == state
    assert torch.equal(pipe(x), before)


# --- refusals --------------------------------------------------------------------------------


class OwnForward(nn.Sequential):
    def forward(self, input: Any) -> Any:
        return super().forward(input) + 1


class OwnCall(nn.Sequential):
    def __call__(self, input: Any) -> Any:
        return super().__call__(input) + 1


@pytest.mark.parametrize("module", [nn.Linear(2, 2), nn.ModuleDict({"a": nn.ReLU()}), None])
def test_what_is_not_a_sequential_is_refused_with_its_type(module: Any) -> None:
    with pytest.raises(TypeError, match=rf"nn\.Sequential.*not {type(module).__name__}"):
        Pipe(module, [1])


def test_a_sequential_with_its_own_forward_is_refused() -> None:
    with pytest.raises(TypeError, match=r"OwnForward.*forward of its own"):
        Pipe(OwnForward(nn.Linear(2, 2)), [1])
    with pytest.raises(TypeError, match=r"OwnCall.*__call__ of its own"):
        Pipe(OwnCall(nn.Linear(2, 2)), [1])


@pytest.mark.parametrize(
    ("balance", "error", "shown"),
    [
        ([2, 1], ValueError, r"\[2, 1\].*3.*4"),
        ([2, 2, 1], ValueError, r"\[2, 2, 1\].*5.*4"),
        ([], ValueError, r"\[\].*0.*4"),
        ([4, 0], ValueError, r"\[4, 0\].*at least one"),
        ([5, -1], ValueError, r"\[5, -1\].*at least one"),
        ([2, 2.0], TypeError, r"integers.*2\.0"),
        (4, TypeError, r"list.*4"),
        ("22", ValueError, "'22'.*parameters"),
    ],
)
def test_a_balance_that_does_not_fit_is_refused_with_its_value(
    balance: Any, error: type[Exception], shown: str
) -> None:
    with pytest.raises(error, match=f"balance.*{shown}"):
        made(balance)


def test_too_few_devices_are_an_index_error_that_counts_both() -> None:
    with pytest.raises(IndexError, match=r"2 partitions.*1 devices.*cpu:0"):
        made([2, 2], devices=["cpu:0"])


@pytest.mark.parametrize(
    ("devices", "error", "shown"),
    [
        ("cpu", TypeError, "list.*'cpu'"),
        (torch.device("cpu"), TypeError, "list"),
        (["cpu", 1.5], TypeError, r"1\.5"),
        (["cpu", True], TypeError, "True"),
        (["cpu", "gpu:0"], ValueError, "gpu:0"),
        (["cpu", "cuda:99"], ValueError, "cuda:99"),
        (["cpu", -2], ValueError, "-2"),
    ],
)
def test_what_is_no_device_is_refused_with_its_value(
    devices: Any, error: type[Exception], shown: str
) -> None:
    with pytest.raises(error, match=f"devices.*{shown}"):
        made([2, 2], devices=devices)


@pytest.mark.parametrize("chunks", [0, -1, True])
def test_a_number_of_chunks_below_one_is_refused(chunks: Any) -> None:
    with pytest.raises(ValueError, match=f"chunks={chunks}.*at least 1"):
        made([4], chunks=chunks)


@pytest.mark.parametrize("chunks", [1.0, "2", None])
def test_chunks_must_be_an_integer(chunks: Any) -> None:
    with pytest.raises(TypeError, match=f"chunks.*{chunks!r}"):
        made([4], chunks=chunks)


@pytest.mark.parametrize("checkpoint", ["allways", "", None, True, ["nevr"]])
def test_an_unknown_checkpoint_mode_is_refused_with_the_known_ones(checkpoint: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(f"checkpoint={checkpoint!r}")) as caught:
        made([4], checkpoint=checkpoint)
    assert all(repr(mode) in str(caught.value) for mode in CHECKPOINT_MODES)


def tied_model() -> nn.Sequential:
    model = linear_model(3)
    model[2].weight = model[0].weight
    return model


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize(
    ("balance", "devices"),
    [([3], ["cpu:0"]), ([1, 2], ["cpu:0", "cpu:0"])],
)
def test_layers_on_one_device_may_share_parameters(
    balance: list[int], devices: list[str], checkpoint: str
) -> None:
    x = torch.randn(5, 3, requires_grad=True)
    arguments: dict[str, Any] = {"devices": devices, "chunks": 3, "checkpoint": checkpoint}
    assert_equals_plain(tied_model(), x, balance, **arguments)


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
def test_parameters_shared_around_another_device_have_the_same_gradients(checkpoint: str) -> None:
    model, x = tied_model(), torch.randn(5, 3, requires_grad=True)
    plain = copy.deepcopy(model)
    devices = ["cpu:0", "cpu:1", "cpu:0"]
    pipe = Pipe(model, [1, 1, 1], devices=devices, chunks=3, checkpoint=checkpoint)
    expected = step(in_turn(plain, 3), plain, x)
    assert_same(step(pipe, pipe, x), expected)
