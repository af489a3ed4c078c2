"""Checkpoints that torchgpipe, fairscale and ``torch.distributed.pipeline.sync`` wrote.

Their layout, copied from their sources: torchgpipe and fairscale keep ``partitions``, an
``nn.ModuleList`` of ``nn.Sequential`` with the layers' own names. In
``torch.distributed.pipeline.sync`` a partition is made of its layers without their names, and a
layer that is an ``nn.Sequential`` itself is replaced by its children (``_assemble_partition``).
"""

from __future__ import annotations

import re
from collections import OrderedDict
from itertools import chain, product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from syncpipe import Pipe
from tests.support.compare import assert_same as assert_same_tree
from tests.support.skips import Receive, SendConv
from tests.support.skips import make as make_skippable

State = dict[str, Tensor]


def linear() -> nn.Module:
    return nn.Linear(3, 3)


def named(**layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict(layers))


def model() -> nn.Sequential:
    """Named layers, some without a state, one with a buffer; every value is another one."""
    norm = nn.BatchNorm1d(3)
    nn.init.normal_(norm.running_mean)
    return named(
        stem=linear(), act=nn.ReLU(), norm=norm, block=linear(), act2=nn.Tanh(), head=linear()
    )


def has_sum() -> nn.Sequential:
    """A layer with a buffer of its own called sum."""
    layer = nn.Module()
    layer.register_buffer("sum", torch.randn(3))
    return nn.Sequential(linear(), layer)


def old_state(writer: str, module: nn.Sequential, balance: list[int]) -> State:
    """The ``state_dict`` of an older pipe."""
    layers, partitions = iter(module.named_children()), nn.ModuleList()
    for size in balance:
        own = [next(layers) for _ in range(size)]
        if writer == "torchgpipe":
            partitions.append(nn.Sequential(OrderedDict(own)))
        else:
            flat = [m.children() if isinstance(m, nn.Sequential) else [m] for _, m in own]
            partitions.append(nn.Sequential(*chain.from_iterable(flat)))
    return nn.ModuleDict({"partitions": partitions}).state_dict()


WRITERS = ["torchgpipe", "torch.distributed.pipeline.sync"]
WHOLE: dict[str, tuple[Any, list[list[int]]]] = {
    "named": (model, [[6], [3, 3], [1, 5], [1, 1, 1, 1, 1, 1]]),
    "numbered": (lambda: nn.Sequential(*model()), [[6], [2, 2, 2], [5, 1]]),
    "deep": (lambda: nn.Sequential(*[linear() for _ in range(23)]), [[11] + [1] * 12, [10, 13]]),
    "nested": (
        lambda: named(body=nn.Sequential(linear(), nn.ReLU(), linear()), head=linear()),
        [[2], [1, 1]],
    ),
    "skips": (
        lambda: named(send=SendConv(), act=nn.ReLU(), add=Receive()),
        [[3], [1, 1, 1], [2, 1]],
    ),
    "sum": (has_sum, [[1, 1], [2]]),
}


def loaded(module: nn.Module, state: State, expected: nn.Module) -> None:
    """Loads a state, which stays as it is, and compares with the model that wrote it."""
    keys = list(state)
    result = module.load_state_dict(state)
    assert not [*result.missing_keys, *result.unexpected_keys]
    assert_same_tree(dict(module.state_dict()), dict(expected.state_dict()), "state")
    assert list(state) == keys


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("what", WHOLE)
def test_an_old_checkpoint_loads_whatever_the_balances(what: str, writer: str) -> None:
    make, balances = WHOLE[what]
    for theirs, mine in product(balances, balances):
        old, outer = make(), linear()
        state = old_state(writer, old, theirs)
        assert all(key.startswith("partitions.") for key in state)
        loaded(Pipe(make(), mine), state, old)
        if writer == "torchgpipe":  # also a part of the layers, by name
            part, first = dict(list(state.items())[1:]), next(iter(old.state_dict()))
            result = Pipe(make(), mine).load_state_dict(part, strict=False)
            assert (result.missing_keys, result.unexpected_keys) == ([first], [])
        both = nn.ModuleDict({"net": Pipe(make(), mine), "outer": linear(), "other": make()})
        inside = {f"net.{key}": value for key, value in state.items()}
        inside |= {f"outer.{key}": value for key, value in outer.state_dict().items()}
        inside |= {f"other.{key}": value for key, value in old.state_dict().items()}
        loaded(both, inside, nn.ModuleDict({"net": old, "outer": outer, "other": old}))
        if what == "skips":  # torchgpipe put a wrapper around such layers
            parts = {key: key.split(".", 3) for key in state}
            prefixed = {".".join([*p[:3], "module", p[3]]): state[key] for key, p in parts.items()}
            loaded(Pipe(make(), mine), prefixed, old)


@pytest.mark.parametrize("deferred", [False, True])
def test_the_accumulators_of_torchgpipes_deferred_batch_norm_are_left_out(deferred: bool) -> None:
    def blocks() -> nn.Sequential:
        return nn.Sequential(nn.Sequential(linear(), nn.BatchNorm1d(3)), linear())

    for make, balance, norm in ((model, [2, 4], "1.norm"), (blocks, [1, 1], "0.0.1")):
        old = make()
        state = old_state("torchgpipe", old, balance)
        for name in ("sum", "sum_squares"):
            state[f"partitions.{norm}.{name}"] = torch.zeros(3)
        loaded(Pipe(make(), balance, deferred_batch_norm=deferred), state, old)


@pytest.mark.parametrize("writer", [*WRITERS, "plain"])
def test_assign_takes_the_tensors_and_keeps_the_devices(writer: str) -> None:
    old = model()
    state = old_state(writer, old, [2, 4]) if writer in WRITERS else dict(old.state_dict())
    pipe = Pipe(model(), [3, 3], devices=["cpu", "meta"])
    pipe.load_state_dict(state, assign=True)
    assert [t.device.type for t in pipe.state_dict().values()] == ["cpu"] * 7 + ["meta"] * 4
    assert pipe.stem.weight.data_ptr() == old.stem.weight.data_ptr()


def test_keys_of_today_load_strictly_also_those_of_layers_with_the_old_names() -> None:
    def odd() -> nn.Sequential:
        inner = nn.Sequential(nn.Sequential(linear()), nn.Sequential(linear()))
        return named(partitions=inner, head=linear())

    def member() -> nn.Sequential:
        send = SendConv()
        send.module = nn.Linear(2, 2)
        return nn.Sequential(send, Receive())

    for make in (model, odd, member):
        old = make()
        loaded(Pipe(make(), "uniform", devices=["cpu:0", "cpu:1"]), dict(old.state_dict()), old)
    with pytest.raises(RuntimeError, match="Missing key"):
        Pipe(model(), [3, 3]).load_state_dict({})


def test_wrappers_inside_of_wrappers_go_and_what_is_there_already_is_not_replaced() -> None:
    outer = make_skippable(popped=["skip"])
    outer.inner = SendConv()
    pipe = Pipe(nn.Sequential(outer, SendConv(), Receive()), [3])
    old = dict(pipe.state_dict())
    for prefix in ("0.inner.", "0.", "1."):
        old = {re.sub(f"^{prefix}", f"{prefix}module.", key): old[key] for key in old}
    assert "0.module.inner.module.conv.weight" in old
    loaded(pipe, old, plain := nn.Sequential(*pipe))
    state = dict(pipe.state_dict())
    loaded(pipe, state, plain)
    for extra in ("1.module.conv.extra", "1.module.conv.bias"):
        with pytest.raises(RuntimeError, match="Unexpected key"):
            pipe.load_state_dict({**state, extra: torch.ones(2)})


def test_names_count_before_the_order() -> None:
    old = named(a=linear(), b=linear())
    state = old_state("torchgpipe", old, [1, 1])
    turned = {key: state[key] for key in sorted(state, key=lambda key: ".a." in key)}
    assert list(turned) != list(state)
    loaded(Pipe(named(a=linear(), b=linear()), [2]), turned, old)
