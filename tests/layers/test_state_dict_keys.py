"""Checkpoints that torchgpipe, fairscale and ``torch.distributed.pipeline.sync`` wrote.

Their layout, copied from their sources: torchgpipe and fairscale keep ``partitions``, an
``nn.ModuleList`` of ``nn.Sequential`` with the layers' own names. In
``torch.distributed.pipeline.sync`` a partition is made of its layers without their names, and a
layer that is an ``nn.Sequential`` itself is replaced by its children (``_assemble_partition``).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from syncpipe import Pipe
from syncpipe.skip import pop, skippable, stash
from tests.support.models import assert_same_tree

State = dict[str, Tensor]


@skippable(stash=["skip"])
class Remember(nn.Module):
    """A skippable layer with parameters, one of them in a submodule called ``module``."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Any:
        yield stash("skip", x)
        return self.conv(x)


@skippable(pop=["skip"])
class Add(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Any:
        return x + self.scale * (yield pop("skip"))


def model() -> nn.Sequential:
    """Named layers, some without a state, one with a buffer; every value is another one."""
    layers = OrderedDict(
        stem=nn.Linear(3, 3),
        act=nn.ReLU(),
        norm=nn.BatchNorm1d(3),
        block=nn.Linear(3, 3),
        act2=nn.Tanh(),
        head=nn.Linear(3, 3),
    )
    built = nn.Sequential(layers)
    nn.init.normal_(built.norm.running_mean)
    return built


def numbered() -> nn.Sequential:
    return nn.Sequential(*model())


def chain(kind: type[nn.Sequential], layers: list[tuple[str, nn.Module]]) -> nn.Sequential:
    return kind(OrderedDict(layers))


def old_gpipe(module: nn.Sequential, balance: list[int]) -> State:
    """``state_dict`` of torchgpipe's GPipe and fairscale's Pipe."""
    layers = list(module.named_children())
    partitions, first = nn.ModuleList(), 0
    for size in balance:
        partitions.append(chain(nn.Sequential, layers[first : first + size]))
        first += size
    return nn.ModuleDict({"partitions": partitions}).state_dict()


def old_sync(module: nn.Sequential, balance: list[int]) -> State:
    """``state_dict`` of torch.distributed.pipeline.sync.Pipe."""
    layers = list(module)
    partitions, first = nn.ModuleList(), 0
    for size in balance:
        flat: list[nn.Module] = []
        for layer in layers[first : first + size]:
            flat.extend(layer.children() if isinstance(layer, nn.Sequential) else [layer])
        partitions.append(nn.Sequential(*flat))
        first += size
    return nn.ModuleDict({"partitions": partitions}).state_dict()


WRITERS: dict[str, Callable[[nn.Sequential, list[int]], State]] = {
    "torchgpipe": old_gpipe,
    "torch.distributed.pipeline.sync": old_sync,
}
BALANCES = [[6], [3, 3], [1, 5], [2, 2, 2], [1, 1, 1, 1, 1, 1]]


def loaded(pipe: Pipe, state: State, expected: nn.Sequential, **arguments: Any) -> None:
    """Loads a state and compares with the model that wrote it."""
    result = pipe.load_state_dict(state, **arguments)
    assert not result.missing_keys
    assert not result.unexpected_keys
    assert_same_tree(dict(pipe.state_dict()), dict(expected.state_dict()), "state")


@pytest.mark.parametrize("make", [model, numbered])
@pytest.mark.parametrize("mine", BALANCES)
@pytest.mark.parametrize("theirs", BALANCES)
@pytest.mark.parametrize("writer", WRITERS)
def test_an_old_checkpoint_loads_whatever_the_balances(
    writer: str, theirs: list[int], mine: list[int], make: Callable[[], nn.Sequential]
) -> None:
    old = make()
    state = WRITERS[writer](old, theirs)
    keys = list(state)
    assert all(key.startswith("partitions.") for key in keys)
    loaded(Pipe(make(), mine), state, old)
    assert list(state) == keys, "the caller's dict was changed"


@pytest.mark.parametrize("writer", WRITERS)
def test_more_than_ten_layers_and_partitions_keep_their_order(writer: str) -> None:
    def deep() -> nn.Sequential:
        return nn.Sequential(*[nn.Linear(2, 2) for _ in range(23)])

    old = deep()
    state = WRITERS[writer](old, [11] + [1] * 12)
    loaded(Pipe(deep(), [10, 13]), state, old)


def nested() -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(
            body=nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3)),
            head=nn.Linear(3, 3),
        )
    )


@pytest.mark.parametrize("balance", [[2], [1, 1]])
@pytest.mark.parametrize("writer", WRITERS)
def test_layers_that_are_sequentials_themselves_load(writer: str, balance: list[int]) -> None:
    old = nested()
    loaded(Pipe(nested(), [1, 1]), WRITERS[writer](old, balance), old)


@pytest.mark.parametrize("writer", WRITERS)
def test_a_checkpoint_of_part_of_the_layers_loads_what_is_there(writer: str) -> None:
    old = numbered()
    state = WRITERS[writer](old, [6])
    state = {key: value for key, value in state.items() if ".0.5." not in key}
    pipe = Pipe(numbered(), [6])
    result = pipe.load_state_dict(state, strict=False)
    assert result.missing_keys == ["5.weight", "5.bias"]
    assert not result.unexpected_keys
    assert torch.equal(pipe[0].weight, old[0].weight)
    assert torch.equal(pipe[2].running_mean, old[2].running_mean)


def skip_model() -> nn.Sequential:
    return nn.Sequential(OrderedDict(remember=Remember(), act=nn.ReLU(), add=Add()))


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("balance", [[3], [1, 1, 1]])
def test_the_prefix_that_torchgpipe_gave_skippable_layers_is_accepted(
    writer: str, balance: list[int]
) -> None:
    old = skip_model()
    state = WRITERS[writer](old, balance)
    parts = {key: key.split(".", 3) for key in state}
    state = {".".join([*p[:3], "module", p[3]]): state[key] for key, p in parts.items()}
    assert any(key.endswith(".module.conv.weight") for key in state)
    loaded(Pipe(skip_model(), [2, 1]), state, old)


def test_skippable_layers_load_without_the_prefix_too() -> None:
    old = skip_model()
    loaded(Pipe(skip_model(), [2, 1]), old_gpipe(old, [1, 2]), old)


@pytest.mark.parametrize("deferred", [False, True])
def test_the_accumulators_of_torchgpipes_deferred_batch_norm_are_left_out(deferred: bool) -> None:
    old = model()
    state = old_gpipe(old, [2, 4])
    state["partitions.1.norm.sum"] = torch.zeros(3)
    state["partitions.1.norm.sum_squares"] = torch.zeros(3)
    loaded(Pipe(model(), [3, 3], deferred_batch_norm=deferred), state, old)


def test_the_accumulators_inside_of_a_layer_are_left_out() -> None:
    def blocks() -> nn.Sequential:
        return nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), nn.Linear(3, 3))

    old = blocks()
    state = old_gpipe(old, [1, 1])
    state["partitions.0.0.1.sum"] = torch.zeros(3)
    state["partitions.0.0.1.sum_squares"] = torch.zeros(3)
    loaded(Pipe(blocks(), [1, 1]), state, old)


class HasSum(nn.Module):
    """A layer with a buffer of its own called sum."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("sum", torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.sum


def test_a_buffer_that_is_only_called_sum_is_loaded() -> None:
    old = nn.Sequential(nn.Linear(3, 3), HasSum())
    loaded(Pipe(nn.Sequential(nn.Linear(3, 3), HasSum()), [1, 1]), old_gpipe(old, [1, 1]), old)


@pytest.mark.parametrize("writer", [*WRITERS, "plain"])
def test_assign_takes_the_tensors_and_keeps_the_devices(writer: str) -> None:
    old = model()
    state = WRITERS[writer](old, [2, 4]) if writer in WRITERS else dict(old.state_dict())
    pipe = Pipe(model(), [3, 3], devices=["cpu", "meta"])
    pipe.load_state_dict(state, assign=True)
    assert [t.device.type for t in pipe[:3].state_dict().values()] == ["cpu"] * 7
    assert [t.device.type for t in pipe[3:].state_dict().values()] == ["meta"] * 4
    assert torch.equal(pipe.stem.weight, old.stem.weight)
    assert pipe.stem.weight.data_ptr() == old.stem.weight.data_ptr()


@pytest.mark.parametrize("writer", WRITERS)
def test_a_pipe_inside_of_a_parent_loads_with_the_parents_prefix(writer: str) -> None:
    old = model()
    outer = nn.Linear(3, 3)
    state = {f"net.{key}": value for key, value in WRITERS[writer](old, [1, 5]).items()}
    state |= {f"outer.{key}": value for key, value in outer.state_dict().items()}
    parent = nn.ModuleDict({"outer": nn.Linear(3, 3), "net": Pipe(model(), [4, 2])})
    result = parent.load_state_dict(state)
    assert not result.missing_keys
    assert not result.unexpected_keys
    assert_same_tree(dict(parent["net"].state_dict()), dict(old.state_dict()), "state")
    assert torch.equal(parent["outer"].weight, outer.weight)


def test_two_pipes_in_one_parent_do_not_take_each_others_keys() -> None:
    a, b = model(), model()
    state = {f"a.{key}": value for key, value in old_gpipe(a, [6]).items()}
    state |= {f"b.{key}": value for key, value in old_gpipe(b, [2, 4]).items()}
    parent = nn.ModuleDict({"a": Pipe(model(), [3, 3]), "b": Pipe(model(), [5, 1])})
    parent.load_state_dict(state)
    for name, old in (("a", a), ("b", b)):
        assert_same_tree(dict(parent[name].state_dict()), dict(old.state_dict()), name)


def test_new_keys_load_strictly() -> None:
    old = model()
    loaded(Pipe(model(), [3, 3]), dict(old.state_dict()), old)
    with pytest.raises(RuntimeError, match="Missing key"):
        Pipe(model(), [3, 3]).load_state_dict({})


def test_a_layer_called_partitions_keeps_its_keys() -> None:
    def odd() -> nn.Sequential:
        inner = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2)))
        return nn.Sequential(OrderedDict(partitions=inner, head=nn.Linear(2, 2)))

    old = odd()
    loaded(Pipe(odd(), [1, 1]), dict(old.state_dict()), old)


def test_an_old_checkpoint_of_another_model_is_refused() -> None:
    state = old_gpipe(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3)), [1, 1])
    with pytest.raises(RuntimeError, match="size mismatch"):
        Pipe(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), [1, 1]).load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"Missing key|Unexpected key"):
        Pipe(model(), [3, 3]).load_state_dict(state)
