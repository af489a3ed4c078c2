"""Layers that are built when their stage is known, some of which share weights."""

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
from syncpipe import LayerSpec, Pipe, TiedLayerSpec, plan
from syncpipe.balance import (
    balance_by_parameters,
    balance_by_size,
    balance_by_time,
    balance_by_type,
    balance_uniform,
    profile,
)
from syncpipe.balance import measure as measuring
from syncpipe.skip import Namespace
from tests.support.models import Receive, Send, assert_same_tree, in_turn, step

WIDTH = 16
TWO = ["cpu:0", "cpu:1"]


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
    for seed in range(2):
        pipe = Pipe(model, [1, 2], seed=seed)
        assert [type(layer) for layer in pipe] == [Block, Block, nn.Linear]
        assert pipe[2] is model[2]
        assert [type(layer) for layer in model[:2]] == [LayerSpec, LayerSpec]
        assert not pipe.training


def test_the_same_spec_stands_for_another_layer_each_time() -> None:
    pipe = Pipe(nn.Sequential(*[LayerSpec(nn.Linear, 3, 3)] * 3), [2, 1])
    assert len(set(map(id, pipe.parameters()))) == 6
    assert not torch.equal(pipe[0].weight, pipe[1].weight)
    pipe = Pipe({"a": nn.Linear(3, 3), "b": nn.ReLU()}, [1, 1])
    pipe.b = LayerSpec(nn.Tanh)  # a layer that is set by name
    pipe(torch.randn(2, 3))
    assert type(pipe.b) is nn.Tanh


def test_a_spec_may_stash_and_pop() -> None:
    space = Namespace()
    send, receive = (lambda kind=kind: kind().isolate(space) for kind in (Send, Receive))
    layers = [LayerSpec(send), torch.tanh, LayerSpec(receive)]
    x = torch.randn(4, 4, 3)
    assert torch.equal(Pipe(layers, [1, 2], chunks=2)(x), x.tanh() + x)
    with pytest.raises(TypeError, match="no later layer pops it"):
        Pipe(layers[:2], [1, 1])


def test_a_spec_shows_what_it_builds() -> None:
    spec = LayerSpec(Block, 8, bias=False, scale=torch.ones(9))
    assert repr(spec) == "LayerSpec(Block, 8, bias=False, scale=Tensor)"
    assert repr(copy.deepcopy(spec)) == repr(pickle.loads(pickle.dumps(spec))) == repr(spec)


# --- memory and measures -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Block, Ignores, OnHost])
def test_the_host_holds_one_layer_at_the_most_where_the_constructor_wants_it(kind: type) -> None:
    with HostBytes() as host:
        kind(WIDTH)
        one, host.most = host.most * (kind is not Block), 0
        pipe = Pipe([LayerSpec(kind, WIDTH)] * 8, "parameters", devices=["meta", "meta"])
        assert (0 < host.most <= one) or host.most == one == 0
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


def test_specs_are_balanced_and_measured_as_layers_would_be() -> None:
    built, x = nn.Sequential(*[spec.build() for spec in specs()]), torch.randn(4, WIDTH)
    for device in ["meta", "cpu"]:
        of_specs = profile(specs(), x, time=False, device=device)
        assert of_specs == profile(built, x, time=False, device=device)
    layers = [*specs(3), nn.ReLU(), LayerSpec(nn.Linear, WIDTH, 40 * WIDTH)]
    for how, balance in (("parameters", [4, 1]), ("uniform", [3, 2]), ("type:^Block$", [2, 3])):
        assert Pipe(layers, how, devices=TWO).balance == balance
    assert sum(balance_by_time(2, layers, x, timeout=0.0)) == 5
    made = plan(layers, x, devices=TWO, batch_size=4, memory="1GB", timeout=0.0)
    assert sum(made.balance) == 5


def test_to_look_at_specs_draws_nothing_from_the_global_generator() -> None:
    layers = [*specs(), LayerSpec(OnHost, WIDTH)]
    torch.manual_seed(5)
    by_hand = weights(Pipe(layers, [2, 3]))
    torch.manual_seed(5)
    balance_by_size(2, layers, torch.ones(4, WIDTH))
    assert_same_tree(weights(Pipe(layers, "parameters", devices=TWO)), by_hand, "weights")


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


# --- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize("balance", [[1, 1], "parameters", "uniform", "type:linear"])
def test_an_exception_of_a_constructor_is_its_own_and_names_the_layer(balance: Any) -> None:
    given = nn.Linear(3, 3)
    before = given.weight
    with pytest.raises(KeyError, match="mine") as caught:
        Pipe([given, LayerSpec(Broken)], balance, devices=["meta", "cpu"])
    assert "raise KeyError" in "".join(traceback.format_tb(caught.value.__traceback__))
    (note,) = caught.value.__notes__
    assert note.startswith("while building layer 1 ('1': LayerSpec(Broken)) of stage ")
    assert given.weight is before
    assert not before.is_meta  # nothing was moved


def made_of(*arguments: Any, **options: Any) -> Callable[[], Any]:
    return lambda: Pipe([LayerSpec(*arguments)], [1], **options)


WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "module": (made_of(nn.Linear(3, 3)), TypeError, r"LayerSpec\(Linear\): the first"),
    "number": (made_of(3, 3), TypeError, r"LayerSpec\(3\): the first argument"),
    "dict": (made_of(dict), TypeError, r"LayerSpec\(dict\) built a dict, no nn\.Module"),
    "spec": (made_of(LayerSpec, nn.ReLU), TypeError, "built a LayerSpec"),
    "called": (lambda: LayerSpec(nn.ReLU)(3), TypeError, r"LayerSpec\(ReLU\) is not built yet"),
    "no balance": (lambda: Pipe(specs()), ValueError, "balance is missing"),
    "init_fn": (made_of(nn.ReLU, init_fn="normal"), TypeError, "init_fn='normal': must be a func"),
    "nothing to initialise": (
        lambda: Pipe([nn.ReLU()], [1], init_fn=print),
        ValueError,
        "init_fn=.*nothing to initialise.*meta.*LayerSpec",
    ),
    "nothing to seed": (lambda: Pipe([nn.ReLU()], [1], seed=1), ValueError, "seed=1: there is"),
    "seed of words": (made_of(nn.ReLU, seed="a"), TypeError, "seed='a': must be an int"),
    "seed of truth": (made_of(nn.ReLU, seed=True), TypeError, "seed=True: must be an"),
    "seed below": (made_of(nn.ReLU, seed=-1), ValueError, "seed=-1: must be at least 0"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_cannot_be_is_refused(what: str) -> None:
    make, kind, message = WRONG[what]
    with pytest.raises(kind, match=message):
        make()


# --- shared weights ------------------------------------------------------------------------------


class Embedding(nn.Module):
    """Words and places, and the words' weight under a name of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(11, WIDTH), nn.Parameter(torch.randn(5, WIDTH))

    @property
    def word_weight(self) -> nn.Parameter:
        return self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.words(tokens) + self.places


def to_logits(module: Any, x: Tensor) -> Tensor:
    return F.linear(x, module.word_weight)


class Head(Embedding):
    def forward(self, x: Tensor) -> Tensor:
        return to_logits(self, x)


def gpt(attribute: Any = "word_weight") -> list[Any]:
    """A GPT as DeepSpeed's examples write it."""
    return [
        TiedLayerSpec("embed", Embedding, tied_weight_attr=attribute),
        *[LayerSpec(nn.Linear, WIDTH, WIDTH) for _ in range(3)],
        torch.tanh,
        LayerSpec(nn.LayerNorm, WIDTH),
        TiedLayerSpec("embed", Embedding, forward_fn=to_logits, tied_weight_attr=attribute),
    ]


def plain_gpt() -> nn.Sequential:
    blocks = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
    model = nn.Sequential(Embedding(), *blocks, nn.Tanh(), nn.LayerNorm(WIDTH), Head())
    model[6].words.weight = model[0].words.weight
    return model


TOKENS = torch.arange(30).view(6, 5) % 11


@pytest.mark.parametrize("balance", [[7], [3, 4], [1, 4, 2]])
def test_deepspeeds_gpt_computes_and_trains_as_the_plain_one(balance: list[int]) -> None:
    pipe, plain = Pipe(gpt(), balance, seed=0, chunks=3, checkpoint="always"), plain_gpt()
    assert list(pipe.state_dict()) == list(plain.state_dict())
    names = [name for name, _ in pipe.named_parameters()]
    assert "0.words.weight" in names
    assert "6.words.weight" not in names
    plain.load_state_dict(pipe.state_dict())
    found = step(pipe, pipe, TOKENS)
    assert_same_tree(vars(found), vars(step(in_turn(plain, 3), plain, TOKENS)), "step")
    pipe.zero_grad()
    plain.zero_grad()

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), target.flatten())

    loss = pipe.train_batch(TOKENS, TOKENS, loss_fn=loss_fn)
    expected = sum(loss_fn(plain(x), x) / 3 for x in TOKENS.chunk(3))
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    for own, other in zip(pipe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad)


@pytest.mark.parametrize(
    "attribute", ["words.weight", ["words.weight"], ["words.weight", "places"]]
)
def test_attributes_may_be_of_submodules_and_several(attribute: Any) -> None:
    pipe = Pipe(gpt(attribute), [7])
    assert pipe[6].words.weight is pipe[0].words.weight
    assert (pipe[6].places is pipe[0].places) == ("places" in attribute)


def test_a_buffer_may_be_tied_and_each_key_has_an_owner_of_its_own() -> None:
    spec = TiedLayerSpec("norm", nn.BatchNorm1d, 3, tied_weight_attr=["weight", "running_mean"])
    pipe = Pipe([spec, spec], [2])
    assert pipe[1].running_mean is pipe[0].running_mean
    assert pipe[1].running_var is not pipe[0].running_var
    layers = [TiedLayerSpec(key, nn.Linear, 3, 3) for key in ("a", 2, "a", 2, "a")]
    pipe = Pipe(layers, [5], seed=4)
    assert pipe[0].weight is pipe[2].weight is pipe[4].weight
    assert pipe[1].weight is pipe[3].weight
    assert pipe[0].weight is not pipe[1].weight
    assert pipe[0].bias is not pipe[2].bias
    assert torch.equal(pipe[2].weight, Pipe(layers[:1], [1], seed=4)[0].weight)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda pipe: pickle.loads(pickle.dumps(pipe))])
def test_a_copy_is_tied_and_has_its_own_forward_fn(again: Any) -> None:
    pipe = Pipe(gpt(), [7])
    other = again(pipe)
    assert other[6].words.weight is other[0].words.weight
    with torch.no_grad():
        other[0].words.weight.zero_()
    assert (other(TOKENS) == 0).all()
    assert not (pipe(TOKENS) == 0).any()


def test_forward_fn_may_call_the_module_itself_and_follows_eval() -> None:
    def twice(module: nn.Module, x: Tensor) -> Tensor:
        return F.dropout(module(x) + module.forward(x), 0.5, module.training)

    pipe = Pipe([TiedLayerSpec("a", nn.Linear, 3, 3, forward_fn=twice)], [1])
    x = torch.randn(20, 3)
    plain = F.linear(x, pipe[0].weight, pipe[0].bias)
    assert not torch.equal(pipe(x), plain + plain)
    assert torch.equal(pipe.eval()(x), plain + plain)


def test_a_tied_weight_is_counted_where_it_comes_first() -> None:
    first = TiedLayerSpec("a", nn.Embedding, 100, 4)
    last = TiedLayerSpec("a", nn.Embedding, 100, 4, forward_fn=lambda m, x: x @ m.weight.mT)
    layers = [first, nn.Linear(4, 60), nn.Linear(60, 4), last]
    assert balance_by_parameters(2, layers) == [1, 3]
    found = profile(layers, torch.arange(4), timeout=0.0)
    assert [layer.parameter_bytes for layer in found.layers] == [1600, 1200, 976, 0]


LINEAR, NORM = (nn.Linear, 3, 3), (nn.BatchNorm1d, 3)
WRONG_TIES: list[tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = [
    ((nn.Linear, 3, 4), {}, ValueError,
     r"'weight' of this Linear is a parameter torch.float32 \[4, 3\].*key 'a' is .*\[3, 3\]"),
    (LINEAR, {"dtype": torch.float64}, ValueError, r"torch.float64 \[3, 3\].*torch.float32"),
    (NORM, {"tied_weight_attr": "running_mean"}, AttributeError, "running_mean"),
    (LINEAR, {"tied_weight_attr": "kernel"}, AttributeError, "'kernel': Linear has no parameter"),
    (LINEAR, {"tied_weight_attr": "in_features"}, AttributeError, "'in_features': .*no parameter"),
    (LINEAR, {"tied_weight_attr": 3}, TypeError, "tied_weight_attr=3"),
    (LINEAR, {"tied_weight_attr": []}, TypeError, r"tied_weight_attr=\[\]"),
    (LINEAR, {"forward_fn": "linear"}, TypeError, "forward_fn='linear': must be a function"),
]  # fmt: skip


@pytest.mark.parametrize("balance", [[2], "parameters"])
@pytest.mark.parametrize(("built", "options", "kind", "message"), WRONG_TIES)
def test_ties_that_cannot_be_are_refused(built, options, kind, message, balance) -> None:
    with pytest.raises(kind, match=message):
        Pipe(
            [TiedLayerSpec("a", *LINEAR), TiedLayerSpec("a", *built, **options)],
            balance,
            devices=["cpu"],
        )
    if kind is AttributeError and built is LINEAR:  # also where nothing is tied yet
        with pytest.raises(kind, match=message) as caught:
            Pipe([TiedLayerSpec("a", *built, **options)], [1])
        assert "layer 0 ('0': TiedLayerSpec('a', Linear, 3, 3))" in caught.value.__notes__[0]
