"""P3: a ``Pipe`` is a module like any other."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from syncpipe import Pipe
from tests.support.models import (
    CHECKPOINT_MODES,
    assert_equals_plain,
    assert_same,
    linear_model,
    named_model,
    step,
)


def test_an_empty_pipe_is_the_identity() -> None:
    pipe, x = Pipe(nn.Sequential(), [], chunks=3), torch.randn(2, 3, requires_grad=True)
    assert (len(pipe), pipe.balance, pipe.partitions, list(pipe)) == (0, [], [], [])
    tree = (x, {"a": None})
    assert pipe(tree) == tree
    pipe(x).sum().backward()
    assert torch.equal(x.grad, torch.ones(2, 3))


@pytest.mark.parametrize("balance", [[4], [1, 3], [2, 1, 1]])
def test_the_state_dict_is_that_of_the_wrapped_module_whatever_the_balance(
    balance: list[int],
) -> None:
    model = named_model()
    pipe = Pipe(model, balance)
    assert list(pipe.state_dict()) == list(model.state_dict())
    other = Pipe(named_model(), [2, 2])
    other.load_state_dict(pipe.state_dict())
    for mine, theirs in zip(other.state_dict().values(), model.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)


def test_children_parameters_and_modules_have_the_names_of_the_wrapped_module() -> None:
    model = named_model()
    pipe = Pipe(model, [2, 2])
    assert dict(pipe.named_children()) == dict(model.named_children())
    assert dict(pipe.named_parameters()).keys() == dict(model.named_parameters()).keys()
    assert [name for name, _ in pipe.named_modules()] == [name for name, _ in model.named_modules()]


def test_layers_named_like_attributes_of_a_pipe_keep_their_names() -> None:
    names = ["balance", "devices", "chunks", "partitions", "forward"]
    model = nn.Sequential()
    model._modules.update({name: nn.Linear(3, 3) for name in names})
    pipe = assert_equals_plain(model, torch.randn(2, 3), [2, 3])
    assert [name for name, _ in pipe.named_children()] == names


@pytest.mark.parametrize("how", ["by name", "by setattr of a submodule"])
def test_a_replaced_layer_is_the_one_that_runs(how: str) -> None:
    pipe, x = Pipe(named_model(), [2, 2], chunks=2), torch.randn(4, 3)
    pipe(x)
    new = nn.Linear(3, 5)
    if how == "by name":
        pipe.fc = new
    else:
        pipe.set_submodule("fc", new)
    assert pipe(x).shape == (4, 5)
    assert pipe.partitions[1].fc is new


def test_hooks_on_the_pipe_and_on_its_layers_run() -> None:
    pipe, seen = Pipe(linear_model(4), [2, 2], chunks=2), []
    pipe.register_forward_pre_hook(lambda _m, args: seen.append(("before", len(args[0]))))
    pipe.register_forward_hook(lambda _m, _args, out: seen.append(("after", len(out))))
    pipe[3].register_forward_hook(lambda _m, _args, out: seen.append(("layer", len(out))))
    pipe.register_full_backward_hook(lambda _m, _gi, go: seen.append(("backward", len(go[0]))))
    pipe.checkpoint = "never"
    pipe(torch.randn(4, 3, requires_grad=True)).sum().backward()
    assert seen == [("before", 4), ("layer", 2), ("layer", 2), ("after", 4), ("backward", 4)]


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
def test_an_optimizer_and_clipping_do_what_they_do_on_the_plain_model(
    optimizer: Any, checkpoint: str
) -> None:
    plain, x = linear_model(4), torch.randn(6, 3)
    pipe = Pipe(copy.deepcopy(plain), [1, 3], chunks=3, checkpoint=checkpoint)
    for call, module in (
        (lambda t: torch.cat([plain(c) for c in t.chunk(3)]), plain),
        (pipe, pipe),
    ):
        optim = optimizer(module.parameters(), lr=0.1)
        for _ in range(3):
            optim.zero_grad()
            call(x).square().sum().backward()
            nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            optim.step()
    for mine, theirs in zip(pipe.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def _pickled(pipe: Pipe) -> Pipe:
    return pickle.loads(pickle.dumps(pipe))


def _saved(pipe: Pipe) -> Pipe:
    file = io.BytesIO()
    torch.save(pipe, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("way", [copy.deepcopy, _pickled, _saved])
@pytest.mark.parametrize("used", [False, True])
def test_a_copy_is_independent_and_computes_the_same(way: Any, used: bool) -> None:
    pipe = Pipe(named_model(), [2, 2], chunks=2, checkpoint="always", devices=["cpu:1", "cpu:0"])
    x = torch.randn(4, 3, requires_grad=True)
    if used:
        pipe(x)  # has threads now
    twin = way(pipe)
    assert repr(twin) == repr(pipe)
    assert_same(step(twin, twin, x), step(pipe, pipe, x))
    with torch.no_grad():
        twin.fc.weight.zero_()
    assert pipe.fc.weight.any()
    assert [p.fc for p in twin.partitions[1:]] == [twin.fc]
