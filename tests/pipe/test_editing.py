"""Putting another layer in the place of one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from syncpipe import LayerSpec, Pipe, TiedLayerSpec
from tests.support.models import linear_model


def five(**options: Any) -> Pipe:
    return Pipe(linear_model(5), [2, 1, 2], chunks=2, **options)


def test_a_layer_is_replaced_in_its_stage_under_its_name() -> None:
    pipe, plain, x = five(), linear_model(5), torch.randn(4, 3)
    plain.load_state_dict(pipe.state_dict())
    names = list(pipe._modules)
    for index in (2, -1):
        pipe[index] = plain[index] = nn.Linear(3, 3)
    assert (pipe.balance, list(pipe._modules)) == ([2, 1, 2], names)
    torch.testing.assert_close(pipe(x), plain(x))
    pipe.load_state_dict(plain.state_dict())


def test_the_new_layer_goes_to_the_device_of_its_stage() -> None:
    pipe = Pipe(linear_model(2), [1, 1], devices=["cpu", "meta"])
    pipe[1] = nn.Linear(3, 3)
    pipe[0] = LayerSpec(nn.Linear, 3, 3)
    assert [layer.weight.device.type for layer in pipe] == ["cpu", "meta"]


def test_callables_and_specs_may_take_the_place() -> None:
    pipe = five()
    pipe[0], pipe[2], pipe[4] = torch.tanh, LayerSpec(nn.ReLU), LayerSpec(nn.Linear, 3, 2)
    found = [type(layer).__name__ for layer in pipe]
    assert found == ["Function", "Linear", "ReLU", "Linear", "Linear"]
    assert pipe(torch.randn(4, 3)).shape == (4, 2)


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


def test_a_new_layer_shares_what_its_key_says() -> None:
    pipe = Pipe([TiedLayerSpec("a", nn.Linear, 3, 3), nn.ReLU(), nn.ReLU()], [2, 1])
    weight = pipe[0].weight
    pipe[2] = TiedLayerSpec("a", nn.Linear, 3, 3)
    assert pipe[2].weight is weight
    pipe[2].weight = nn.Parameter(torch.ones(3, 3))
    pipe[1] = LayerSpec(nn.ReLU)
    assert pipe[2].weight is not pipe[0].weight  # a tie that was undone stays undone


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        raise KeyError("mine")


REFUSED: dict[str, tuple[Callable[[Pipe], Any], type[Exception], str]] = {
    "class": (lambda p: p.__setitem__(1, nn.ReLU), TypeError, "new layer 1 is the class ReLU"),
    "no layer": (lambda p: p.__setitem__(1, None), TypeError, "new layer 1 is a NoneType"),
    "far": (lambda p: p.__setitem__(5, nn.ReLU()), IndexError, "layer 5 does not exist.*has 5"),
    "slice": (lambda p: p.__setitem__(slice(2), nn.ReLU()), TypeError, "slice"),
    "constructor": (lambda p: p.__setitem__(0, LayerSpec(Failing)), KeyError, "mine"),
    "append": (lambda p: p.append(nn.ReLU()), AttributeError, "another Pipe of the layers"),
    "pop": (lambda p: p.pop(), AttributeError, r"layers = \[\*pipe\]"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused_changes_nothing(what: str) -> None:
    edit, kind, message = REFUSED[what]
    pipe, x = five(checkpoint=["always", "never", "never"]), torch.randn(4, 3)
    before, output = (pipe.balance, pipe.devices, list(pipe), list(pipe._modules)), pipe(x)
    with pytest.raises(kind, match=message):
        edit(pipe)
    assert (pipe.balance, pipe.devices, list(pipe), list(pipe._modules)) == before
    assert torch.equal(pipe(x), output)


def test_hooks_of_partitions_stay() -> None:
    pipe, seen = five(), []
    pipe.partitions[0].register_forward_hook(lambda *_: seen.append(0))
    pipe[0] = nn.ReLU()
    pipe(torch.randn(1, 3))
    assert seen == [0]


def test_a_copy_can_be_edited_by_itself() -> None:
    pipe = five()
    other = copy.deepcopy(pipe)
    other[0] = nn.ReLU()
    assert isinstance(pipe[0], nn.Linear)


def test_deferred_batch_norm_takes_in_new_layers() -> None:
    pipe = Pipe(linear_model(2), [1, 1], chunks=2, deferred_batch_norm=True)
    pipe[1] = LayerSpec(nn.BatchNorm1d, 3)
    pipe(torch.randn(4, 3))
    assert pipe[1].num_batches_tracked == 1
