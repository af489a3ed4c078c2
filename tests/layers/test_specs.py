"""Layers that are built when their stage is known."""

from __future__ import annotations

import copy
import pickle
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.counted import HostBytes
from syncpipe import LayerSpec, Pipe, plan
from syncpipe.balance import (
    balance_by_parameters,
    balance_by_size,
    balance_by_time,
    balance_by_type,
    balance_uniform,
    profile,
)
from syncpipe.balance import run as measuring
from syncpipe.skip import Namespace
from tests.support.models import Receive, Send, assert_same_tree

WIDTH = 16


class Block(nn.Module):
    def __init__(self, width: int, *, bias: bool = True) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.linear = nn.Linear(width, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.linear(self.norm(x)))


class Ignores(nn.Module):
    """Does not mind the default device, and draws on the host."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn((width, width), device="cpu"))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class OnHost(Ignores):
    """Needs values to be built, too."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.rate = torch.linspace(0, 1, 3)[1].item()


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        raise KeyError("mine")


def specs(n: int = 4) -> list[Any]:
    return [LayerSpec(Block, WIDTH, bias=bool(k % 2)) for k in range(n)]


def weights(pipe: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in pipe.state_dict().items()}


# --- building ------------------------------------------------------------------------------------


def test_specs_build_what_the_plain_model_would_be() -> None:
    torch.manual_seed(7)
    plain = nn.Sequential(*[Block(WIDTH, bias=bool(k % 2)) for k in range(4)])
    torch.manual_seed(7)
    pipe = Pipe(specs(), [1, 3], chunks=2)
    assert_same_tree(weights(pipe), weights(plain), "weights")
    x = torch.randn(6, WIDTH)
    assert torch.equal(pipe(x), torch.cat([plain(part) for part in x.chunk(2)]))


def test_a_spec_is_built_under_the_device_of_its_stage() -> None:
    seen: list[torch.device] = []

    def make() -> nn.Module:
        seen.append(torch.empty(()).device)
        return nn.ReLU()

    Pipe([LayerSpec(make), nn.ReLU(), LayerSpec(make)], [2, 1], devices=["cpu:1", "meta"])
    assert [device.type for device in seen] == ["cpu", "meta"]


def test_specs_in_a_sequential_are_built_likewise_and_it_stays_as_it_is() -> None:
    model = nn.Sequential(*specs(2), nn.Linear(WIDTH, 1)).eval()
    pipe = Pipe(model, [1, 2])
    assert [type(layer) for layer in pipe] == [Block, Block, nn.Linear]
    assert pipe[2] is model[2]
    assert [type(layer) for layer in model[:2]] == [LayerSpec, LayerSpec]
    assert not pipe.training


def test_the_same_spec_stands_for_another_layer_each_time() -> None:
    pipe = Pipe(nn.Sequential(*[LayerSpec(nn.Linear, 3, 3)] * 3), [2, 1])
    assert len(set(map(id, pipe.parameters()))) == 6
    assert not torch.equal(pipe[0].weight, pipe[1].weight)


def test_the_given_list_can_be_used_again() -> None:
    layers = specs(2)
    assert_same_tree(
        weights(Pipe(layers, [2], seed=1)), weights(Pipe(layers, [1, 1], seed=1)), "weights"
    )


def test_a_spec_may_stash_and_pop() -> None:
    space = Namespace()
    layers = [
        LayerSpec(lambda: Send().isolate(space)),
        torch.tanh,
        LayerSpec(lambda: Receive().isolate(space)),
    ]
    x = torch.randn(4, 4, 3)
    assert torch.equal(Pipe(layers, [1, 2], chunks=2)(x), x.tanh() + x)
    with pytest.raises(TypeError, match="no later layer pops it"):
        Pipe(layers[:2], [1, 1])


def test_a_spec_shows_what_it_builds() -> None:
    spec = LayerSpec(Block, 8, bias=False, scale=torch.ones(9))
    assert repr(spec) == "LayerSpec(Block, 8, bias=False, scale=Tensor)"
    assert repr(copy.deepcopy(spec)) == repr(pickle.loads(pickle.dumps(spec))) == repr(spec)


def test_a_layer_that_is_set_by_name_may_be_a_spec() -> None:
    pipe = Pipe({"a": nn.Linear(3, 3), "b": nn.ReLU()}, [1, 1])
    pipe.b = LayerSpec(nn.Tanh)
    pipe(torch.randn(2, 3))
    assert type(pipe.b) is nn.Tanh


# --- memory --------------------------------------------------------------------------------------


def test_nothing_passes_through_the_host() -> None:
    with HostBytes() as host:
        Pipe(specs(8), [4, 4], devices=["meta", "meta"])
        assert host.most == 0


@pytest.mark.parametrize("kind", [Ignores, OnHost])
def test_the_host_holds_one_layer_at_the_most_where_the_constructor_wants_it(kind: type) -> None:
    with HostBytes() as host:
        kind(WIDTH)
        one, host.most = host.most, 0
        pipe = Pipe([LayerSpec(kind, WIDTH)] * 8, "parameters", devices=["meta", "meta"])
        assert 0 < host.most <= one
        assert host.alive == 0
    assert pipe.balance == [4, 4]
    assert {p.device.type for p in pipe.parameters()} == {"meta"}


@pytest.mark.parametrize(
    "balance",
    [
        lambda layers: balance_by_parameters(2, layers),
        lambda layers: balance_uniform(2, layers),
        lambda layers: balance_by_type(2, layers, "onhost"),
        lambda layers: balance_by_size(2, layers, torch.ones(4, WIDTH, device="meta")),
    ],
)
def test_a_balance_is_found_without_building_all(balance: Callable[[Any], list[int]]) -> None:
    with HostBytes() as host:
        OnHost(WIDTH)
        one, host.most = host.most, 0
        assert balance([LayerSpec(OnHost, WIDTH)] * 8) == [4, 4]
        assert host.most <= 2 * one  # profile: and its copy


def test_time_is_measured_window_by_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "WINDOW", 1)  # bytes: each layer is one
    with HostBytes() as host:
        layer, x = OnHost(64), torch.randn(2, 64)
        layer(x).sum().backward()
        del layer
        one, host.most = host.most, 0
        found = profile([LayerSpec(OnHost, 64)] * 8, x, timeout=0.0, device="cpu")
        assert host.most < 4 * one
    assert all(layer.forward[2] > 0 for layer in found.layers)


# --- balance -------------------------------------------------------------------------------------


def test_a_spec_is_measured_as_the_layer_would_be() -> None:
    built, x = nn.Sequential(*[spec.build() for spec in specs()]), torch.randn(4, WIDTH)
    for device in ["meta", "cpu"]:
        of_specs = profile(specs(), x, time=False, device=device)
        assert of_specs == profile(built, x, time=False, device=device)


def test_specs_are_balanced_by_name_and_by_measure() -> None:
    layers = [*specs(3), nn.ReLU(), LayerSpec(nn.Linear, WIDTH, 40 * WIDTH)]
    assert Pipe(layers, "parameters", devices=["cpu:0", "cpu:1"]).balance == [4, 1]
    assert Pipe(layers, "uniform", devices=["cpu:0", "cpu:1"]).balance == [3, 2]
    assert Pipe(layers, "type:^Block$", devices=["cpu:0", "cpu:1"]).balance == [2, 3]
    x = torch.randn(4, WIDTH)
    assert sum(balance_by_time(2, layers, x, timeout=0.0)) == 5
    made = plan(layers, x, devices=["cpu:0", "cpu:1"], batch_size=4, memory="1GB", timeout=0.0)
    assert sum(made.balance) == 5


def test_to_look_at_specs_draws_nothing_from_the_global_generator() -> None:
    layers = [*specs(), LayerSpec(OnHost, WIDTH)]
    torch.manual_seed(5)
    by_hand = weights(Pipe(layers, [2, 3]))
    torch.manual_seed(5)
    balance_by_size(2, layers, torch.ones(4, WIDTH))
    found = weights(Pipe(layers, "parameters", devices=["cpu:0", "cpu:1"]))
    assert_same_tree(found, by_hand, "weights")


# --- seed ----------------------------------------------------------------------------------------


@settings(max_examples=25)
@given(
    st.integers(0, 2**64 - 1),
    st.lists(st.integers(1, 3), min_size=1, max_size=4),
    st.integers(0, 9),
)
def test_first_weights_depend_on_seed_and_layer_alone(seed, balance, other) -> None:
    torch.manual_seed(other)
    n = sum(balance)
    pipe = Pipe(specs(n), balance, devices=[f"cpu:{j % 2}" for j in range(len(balance))], seed=seed)
    assert torch.equal(torch.rand(3), torch.manual_seed(other) and torch.rand(3))
    assert_same_tree(weights(pipe), weights(Pipe(specs(n), [n], seed=seed)), "weights")
    longer = weights(Pipe([*specs(n), nn.ReLU(), *specs(1)], "uniform", devices=["cpu"], seed=seed))
    assert_same_tree({k: longer[k] for k in weights(pipe)}, weights(pipe), "weights")


def test_another_seed_and_another_layer_give_other_weights() -> None:
    made = [p for seed in range(3) for p in Pipe([LayerSpec(nn.Linear, 9, 9)] * 3, [3], seed=seed)]
    assert len({p.weight.sum().item() for p in made}) == 9


# --- errors --------------------------------------------------------------------------------------


def test_an_exception_of_a_constructor_is_its_own_and_names_the_layer() -> None:
    given = nn.Linear(3, 3)
    before = given.weight
    with pytest.raises(KeyError, match="mine") as caught:
        Pipe([given, LayerSpec(Broken)], [1, 1], devices=["meta", "cpu"])
    assert "raise KeyError" in "".join(traceback.format_tb(caught.value.__traceback__))
    (note,) = caught.value.__notes__
    assert note == "while building layer 1 ('1': LayerSpec(Broken)) of stage 1 on cpu"
    assert given.weight is before
    assert not before.is_meta  # nothing was moved


@pytest.mark.parametrize("balance", ["parameters", "uniform", "type:linear"])
def test_a_constructor_that_raises_on_any_way_to_a_balance(balance: str) -> None:
    with pytest.raises(KeyError, match="mine") as caught:
        Pipe([LayerSpec(nn.Linear, 3, 3), LayerSpec(Broken)], balance, devices=["cpu:0", "cpu:1"])
    assert any("layer 1 ('1': LayerSpec(Broken))" in note for note in caught.value.__notes__)


WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "a module": (lambda: LayerSpec(nn.Linear(3, 3)), TypeError, r"LayerSpec\(Linear\): the first"),
    "a number": (lambda: LayerSpec(3, 3), TypeError, r"LayerSpec\(3\): the first argument"),
    "no module": (
        lambda: Pipe([LayerSpec(dict, a=1)], [1]),
        TypeError,
        r"LayerSpec\(dict, a=1\) built a dict, no nn\.Module",
    ),
    "a spec": (lambda: Pipe([LayerSpec(LayerSpec, nn.ReLU)], [1]), TypeError, "built a LayerSpec"),
    "called": (lambda: LayerSpec(nn.ReLU)(3), TypeError, r"LayerSpec\(ReLU\) is not built yet"),
    "no balance": (lambda: Pipe(specs()), ValueError, "balance is missing"),
    "init_fn": (
        lambda: Pipe([LayerSpec(nn.ReLU)], [1], init_fn="normal"),
        TypeError,
        "init_fn='normal': must be a function",
    ),
    "nothing to initialise": (
        lambda: Pipe([nn.ReLU()], [1], init_fn=print),
        ValueError,
        "init_fn=.*nothing to initialise.*meta.*LayerSpec",
    ),
    "nothing to seed": (lambda: Pipe([nn.ReLU()], [1], seed=1), ValueError, "seed=1: there is"),
    "seed of words": (lambda: Pipe(specs(1), [1], seed="a"), TypeError, "seed='a': must be an int"),
    "seed of truth": (lambda: Pipe(specs(1), [1], seed=True), TypeError, "seed=True: must be an"),
    "seed below": (lambda: Pipe(specs(1), [1], seed=-1), ValueError, "seed=-1: must be at least 0"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_cannot_be_is_refused(what: str) -> None:
    make, kind, message = WRONG[what]
    with pytest.raises(kind, match=message):
        make()


# --- init_fn -------------------------------------------------------------------------------------


def test_init_fn_initialises_what_is_built_and_nothing_else() -> None:
    seen: list[type] = []

    def init(module: nn.Module) -> None:
        seen.append(type(module))
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 0.5)

    given = nn.Linear(WIDTH, WIDTH)
    before = given.weight.clone()
    pipe = Pipe([given, LayerSpec(Block, WIDTH)], [1, 1], init_fn=init)
    assert seen == [nn.BatchNorm1d, nn.Linear, Block]
    assert torch.equal(pipe[0].weight, before)
    assert (pipe[1].linear.weight == 0.5).all()
