"""Changing the layers of a pipe as in a list."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from syncpipe import LayerSpec, Pipe
from tests.support.models import linear_model


def named(pipe: Pipe) -> list[str]:
    return list(pipe._modules)


def five(**options: Any) -> Pipe:
    return Pipe(linear_model(5), [2, 1, 2], chunks=2, **options)


EDITS: dict[str, tuple[Callable[[Any, Any], Any], list[int]]] = {
    "set": (lambda p, new: p.__setitem__(2, new), [2, 1, 2]),
    "set last": (lambda p, new: p.__setitem__(-1, new), [2, 1, 2]),
    "append": (lambda p, new: p.append(new), [2, 1, 3]),
    "extend": (lambda p, new: p.extend([new, nn.ReLU()]), [2, 1, 4]),
    "insert first": (lambda p, new: p.insert(0, new), [3, 1, 2]),
    "insert at a border": (lambda p, new: p.insert(2, new), [2, 2, 2]),
    "insert after it": (lambda p, new: p.insert(3, new), [2, 1, 3]),
    "insert before the last": (lambda p, new: p.insert(-1, new), [2, 1, 3]),
    "insert at the end": (lambda p, new: p.insert(5, new), [2, 1, 3]),
    "pop": (lambda p, new: p.pop(0), [1, 1, 2]),
    "pop last": (lambda p, new: p.pop(-1), [2, 1, 1]),
    "del": (lambda p, new: p.__delitem__(1), [1, 1, 2]),
    "del several": (lambda p, new: p.__delitem__(slice(0, None, 4)), [1, 1, 1]),
}


@pytest.mark.parametrize("what", EDITS)
def test_an_edit_does_what_it_does_to_a_sequential(what: str) -> None:
    edit, balance = EDITS[what]
    pipe, plain, x = five(), linear_model(5), torch.randn(4, 3)
    pipe(x)  # it has run before
    plain.load_state_dict(pipe.state_dict())
    new = nn.Linear(3, 3)
    edit(pipe, new)
    edit(plain, new)
    assert pipe.balance == balance
    assert named(pipe) == list(plain._modules)
    assert [type(layer) for layer in pipe] == [type(layer) for layer in plain]
    assert torch.equal(pipe(x), torch.cat([plain(part) for part in x.chunk(2)]))
    pipe.train_batch(x, loss_fn=lambda y: y.mean())
    assert all(p.grad is not None for p in pipe.parameters())


def edit(layers: Any, what: str, k: int, new: nn.Module) -> None:
    """The same change of a pipe and of an ``nn.Sequential``."""
    if what == "set":
        layers[k] = new
    elif what == "append":
        layers.append(new)
    elif what == "insert":
        layers.insert(k, new)
    elif what == "pop":
        layers.pop(k)
    else:
        del layers[k]


@settings(max_examples=40)
@given(st.data())
def test_any_edits_leave_the_layers_of_a_list_in_a_balance_that_fits(data: st.DataObject) -> None:
    pipe, plain = Pipe(linear_model(4), [2, 1, 1]), linear_model(4)
    for _ in range(data.draw(st.integers(1, 6))):
        what = data.draw(st.sampled_from(["set", "append", "insert", "pop", "del"]))
        k = data.draw(st.integers(-len(plain), len(plain) - 1))
        new = nn.Linear(3, 3)
        stage = [j for j, size in enumerate(pipe.balance) for _ in range(size)][k]
        if what in ("pop", "del") and pipe.balance[stage] == 1 and len(plain) > 1:
            before = pipe.balance, list(pipe), named(pipe)
            with pytest.raises(ValueError, match=f"stage {stage} would have no layers"):
                edit(pipe, what, k, new)
            assert (pipe.balance, list(pipe), named(pipe)) == before
            continue
        edit(pipe, what, k, new)
        edit(plain, what, k, new)
        assert named(pipe) == list(plain._modules)
        assert [len(part) for part in pipe.partitions] == pipe.balance
    x = torch.randn(2, 3)
    plain.load_state_dict(pipe.state_dict())
    assert torch.equal(pipe(x), plain(x))


def test_new_layers_go_to_the_device_of_their_stage() -> None:
    pipe = Pipe(linear_model(2), [1, 1], devices=["cpu", "meta"])
    pipe.append(nn.Linear(3, 3))
    pipe.insert(0, LayerSpec(nn.Linear, 3, 3))
    pipe[2] = nn.Linear(3, 3)
    assert [layer.weight.device.type for layer in pipe] == ["cpu", "cpu", "meta", "meta"]


def test_callables_and_specs_may_be_added() -> None:
    pipe = five().append(torch.tanh).insert(1, LayerSpec(nn.ReLU))
    pipe[2] = lambda x: x * 2
    assert [type(layer).__name__ for layer in pipe] == [
        "Linear", "ReLU", "Function", "Linear", "Linear", "Linear", "Function",
    ]  # fmt: skip
    pipe.extend([LayerSpec(nn.Linear, 3, 3)] * 2)
    assert pipe[-1].weight is not pipe[-2].weight
    assert pipe(torch.randn(4, 3)).shape == (4, 3)


def test_layers_that_stay_keep_their_parameters_and_so_does_the_optimizer() -> None:
    pipe, x = five(), torch.randn(4, 3)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    head = nn.Linear(3, 1)
    pipe[-1] = head
    optimizer.add_param_group({"params": head.parameters()})
    before = [p.clone() for p in pipe.parameters()]
    pipe.train_batch(x, loss_fn=lambda y: y.mean())
    optimizer.step()
    assert not any(torch.equal(p, q) for p, q in zip(pipe.parameters(), before, strict=True))


def test_pop_returns_the_layer_as_it_is() -> None:
    pipe = five()
    layer, weight = pipe[3], pipe[3].weight
    assert pipe.pop(3) is layer
    assert layer.weight is weight
    assert [type(x) for x in pipe.pop(slice(0, 1))] == [nn.Linear]


def test_a_stage_without_layers_is_refused_with_the_way_out() -> None:
    pipe = five()
    layers = list(pipe)
    with pytest.raises(
        ValueError, match=r"without layer 2 stage 1 .*pipe\.pop\(2, balance=\[2, 2\]"
    ):
        del pipe[2]
    with pytest.raises(ValueError, match="stage 0 would have no layers"):
        del pipe[:2]
    assert list(pipe) == layers
    pipe.pop(2, balance=[2, 2])
    assert pipe.balance == [2, 2]
    assert len(pipe.devices) == 2


@pytest.mark.parametrize("balance", [[1, 5], "uniform"])
def test_another_balance_may_come_with_the_layer(balance: Any) -> None:
    pipe = Pipe(linear_model(5), [2, 3], devices=["cpu:0", "cpu:1"])
    pipe.append(nn.ReLU(), balance=balance)
    assert pipe.balance == ([3, 3] if balance == "uniform" else balance)
    pipe.insert(0, nn.ReLU(), balance=[4, 3])
    assert pipe.balance == [4, 3]


def test_a_pipe_may_become_empty_and_be_filled() -> None:
    pipe = Pipe(linear_model(1), [1])
    layer = pipe.pop()
    assert (len(pipe), pipe.balance) == (0, [])
    pipe.append(layer)
    assert (len(pipe), pipe.balance) == (1, [1])
    x = torch.randn(2, 3)
    assert torch.equal(pipe(x), layer(x))


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        raise KeyError("mine")


REFUSED: dict[str, tuple[Callable[[Pipe], Any], type[Exception], str]] = {
    "class": (lambda p: p.append(nn.Linear), TypeError, "new layer 5 is the class Linear"),
    "no layer": (lambda p: p.__setitem__(1, None), TypeError, "new layer 1 is a NoneType"),
    "far": (lambda p: p.__setitem__(5, nn.ReLU()), IndexError, "layer 5 does not exist.*has 5"),
    "far insert": (lambda p: p.insert(6, nn.ReLU()), IndexError, r"insert\(6, .*5 layers"),
    "slice": (lambda p: p.__setitem__(slice(2), nn.ReLU()), TypeError, "slice"),
    "far pop": (lambda p: p.pop(-6), IndexError, "layer -6 does not exist"),
    "balance": (lambda p: p.append(nn.ReLU(), balance=[5]), ValueError, "adds up to 5.*has 6"),
    "constructor": (lambda p: p.insert(0, LayerSpec(Failing)), KeyError, "mine"),
    "modes": (lambda p: p.pop(2, balance=[2, 2]), ValueError, "checkpoint=.* has 3 modes"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused_changes_nothing(what: str) -> None:
    edit, kind, message = REFUSED[what]
    pipe, x = five(checkpoint=["always", "never", "never"]), torch.randn(4, 3)
    before, output = (pipe.balance, pipe.devices, list(pipe), named(pipe)), pipe(x)
    with pytest.raises(kind, match=message):
        edit(pipe)
    assert (pipe.balance, pipe.devices, list(pipe), named(pipe)) == before
    assert torch.equal(pipe(x), output)


def test_names_stand_in_the_way_of_numbers() -> None:
    pipe = Pipe(OrderedDict(a=nn.ReLU(), b=nn.ReLU()), [1, 1])
    with pytest.raises(ValueError, match=r"insert\(0.*names \(a, b\)"):
        pipe.insert(0, nn.ReLU())
    pipe.append(nn.Tanh())
    assert named(pipe) == ["a", "b", "2"]
    pipe = Pipe({"1": nn.ReLU()}, [1])
    with pytest.raises(ValueError, match="named '1', and there is one of that name already"):
        pipe.append(nn.Tanh())


def test_hooks_of_partitions_stay_where_the_balance_stays() -> None:
    pipe, seen = five(), []
    pipe.partitions[0].register_forward_hook(lambda *_: seen.append(0))
    pipe[0] = nn.ReLU()
    pipe(torch.randn(1, 3))
    assert seen == [0]
    with pytest.raises(ValueError, match=r"partitions\[0\] has hooks"):
        pipe.append(nn.ReLU())
    assert len(pipe) == 5


def test_a_copy_can_be_edited_by_itself() -> None:
    pipe = five()
    other = copy.deepcopy(pipe)
    other.append(nn.ReLU())
    assert (len(pipe), len(other)) == (5, 6)


def test_deferred_batch_norm_takes_in_new_layers() -> None:
    pipe = Pipe(linear_model(2), [1, 1], chunks=2, deferred_batch_norm=True)
    pipe.append(LayerSpec(nn.BatchNorm1d, 3))
    pipe(torch.randn(4, 3))
    assert pipe[2].num_batches_tracked == 1
