"""Checkpoints that torchgpipe, fairscale and ``torch.distributed.pipeline.sync`` wrote.

Their layout, copied from their sources: torchgpipe and fairscale keep ``partitions``, an
``nn.ModuleList`` of ``nn.Sequential`` with the layers' own names. In
``torch.distributed.pipeline.sync`` a partition is made of its layers without their names, and a
layer that is an ``nn.Sequential`` itself is replaced by its children (``_assemble_partition``).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from itertools import product
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
WHOLE: dict[str, tuple[Callable[[], nn.Sequential], list[list[int]]]] = {
    "named": (model, [[6], [3, 3], [1, 5], [1, 1, 1, 1, 1, 1]]),
    "numbered": (lambda: nn.Sequential(*model()), [[6], [2, 2, 2], [5, 1]]),
    "deep": (
        lambda: nn.Sequential(*[nn.Linear(2, 2) for _ in range(23)]),
        [[11] + [1] * 12, [10, 13]],
    ),
    "nested": (
        lambda: chain(
            nn.Sequential,
            [
                ("body", nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))),
                ("head", nn.Linear(3, 3)),
            ],
        ),
        [[2], [1, 1]],
    ),
    "skips": (
        lambda: nn.Sequential(OrderedDict(remember=Remember(), act=nn.ReLU(), add=Add())),
        [[3], [1, 1, 1], [2, 1]],
    ),
    "sum": (lambda: nn.Sequential(nn.Linear(3, 3), HasSum()), [[1, 1], [2]]),
}


class HasSum(nn.Module):
    """A layer with a buffer of its own called sum."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("sum", torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.sum


def loaded(module: nn.Module, state: State, expected: nn.Module, **arguments: Any) -> None:
    """Loads a state and compares with the model that wrote it."""
    result = module.load_state_dict(state, **arguments)
    assert not result.missing_keys
    assert not result.unexpected_keys
    assert_same_tree(dict(module.state_dict()), dict(expected.state_dict()), "state")


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("what", WHOLE)
def test_an_old_checkpoint_loads_whatever_the_balances(what: str, writer: str) -> None:
    make, balances = WHOLE[what]
    for theirs, mine in product(balances, balances):
        old, outer = make(), nn.Linear(3, 3)
        state = WRITERS[writer](old, theirs)
        keys = list(state)
        assert all(key.startswith("partitions.") for key in keys)
        loaded(Pipe(make(), mine), state, old)
        assert list(state) == keys, "the caller's dict was changed"
        both = nn.ModuleDict({"net": Pipe(make(), mine), "outer": nn.Linear(3, 3), "other": make()})
        inside = {f"net.{key}": value for key, value in state.items()}
        inside |= {f"outer.{key}": value for key, value in outer.state_dict().items()}
        inside |= {f"other.{key}": value for key, value in old.state_dict().items()}
        loaded(both, inside, nn.ModuleDict({"net": old, "outer": outer, "other": old}))


@pytest.mark.parametrize("writer", WRITERS)
def test_the_prefix_that_torchgpipe_gave_skippable_layers_is_accepted(writer: str) -> None:
    make, balances = WHOLE["skips"]
    for balance in balances:
        old = make()
        state = WRITERS[writer](old, balance)
        parts = {key: key.split(".", 3) for key in state}
        state = {".".join([*p[:3], "module", p[3]]): state[key] for key, p in parts.items()}
        assert any(key.endswith(".module.conv.weight") for key in state)
        loaded(Pipe(make(), [2, 1]), state, old)


@pytest.mark.parametrize("writer", WRITERS)
def test_a_checkpoint_of_part_of_the_layers_loads_what_is_there(writer: str) -> None:
    old = nn.Sequential(*model())
    state = WRITERS[writer](old, [6])
    state = {key: value for key, value in state.items() if ".0.5." not in key}
    pipe = Pipe(nn.Sequential(*model()), [6])
    result = pipe.load_state_dict(state, strict=False)
    assert result.missing_keys == ["5.weight", "5.bias"]
    assert not result.unexpected_keys
    assert torch.equal(pipe[0].weight, old[0].weight)
    assert torch.equal(pipe[2].running_mean, old[2].running_mean)


@pytest.mark.parametrize("deferred", [False, True])
def test_the_accumulators_of_torchgpipes_deferred_batch_norm_are_left_out(deferred: bool) -> None:
    def blocks() -> nn.Sequential:
        return nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), nn.Linear(3, 3))

    for make, norm in ((model, "1.norm"), (blocks, "0.0.1")):
        old = make()
        state = old_gpipe(old, [len(old) // 2 - (len(old) > 2), len(old) // 2 + (len(old) > 2)])
        state[f"partitions.{norm}.sum"] = torch.zeros(3)
        state[f"partitions.{norm}.sum_squares"] = torch.zeros(3)
        half = len(old) // 2
        loaded(Pipe(make(), [half, half], deferred_batch_norm=deferred), state, old)


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


def test_new_keys_and_those_of_a_layer_called_partitions_load_strictly() -> None:
    def odd() -> nn.Sequential:
        inner = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2)))
        return nn.Sequential(OrderedDict(partitions=inner, head=nn.Linear(2, 2)))

    for make in (model, odd):
        old = make()
        loaded(Pipe(make(), "uniform", devices=["cpu:0", "cpu:1"]), dict(old.state_dict()), old)
    with pytest.raises(RuntimeError, match="Missing key"):
        Pipe(model(), [3, 3]).load_state_dict({})


def test_an_old_checkpoint_of_another_model_is_refused() -> None:
    state = old_gpipe(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3)), [1, 1])
    with pytest.raises(RuntimeError, match="size mismatch"):
        Pipe(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), [1, 1]).load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"Missing key|Unexpected key"):
        Pipe(model(), [3, 3]).load_state_dict(state)
