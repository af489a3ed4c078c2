"""Lists of layers: modules, callables, which become layers, and specs, tied ones too.

Specs and models on ``meta`` get memory and values with their stage.
"""

from __future__ import annotations

import copy
import pickle
import re
import traceback
import weakref
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
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
from tests.support.compare import assert_same
from tests.support.models import Receive, Send, in_turn, step
from tests.support.running import Using
from tests.support.training import assert_trains_as

WIDTH = 8
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


class Mask(nn.Module):
    """A buffer that nothing resets."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.mask


class Half(Mask):
    """Resets its weight, and forgets some of its buffers."""

    def __init__(self, sets: Callable[[Any], Any] = lambda half: None, **buffers: Any) -> None:
        super().__init__()
        self.weight, self.sets = nn.Parameter(torch.empty(WIDTH)), sets
        for name, dtype in buffers.items():
            self.register_buffer(name, torch.ones(WIDTH, dtype=dtype))

    def reset_parameters(self) -> None:
        self.weight.data.fill_(2.0)
        self.sets(self)


class Outer(nn.Module):
    """Its reset comes after those of its children, as in its constructor."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.inner.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Raises(nn.Linear):
    """Its reset fails where there is memory."""

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            raise KeyError("mine")


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


#: Blocks, and layers that are hard to initialise.
BLOCKS: list[Callable[[], nn.Module]] = [lambda: Block(WIDTH), lambda: Block(WIDTH, bias=False)] * 2
HARD: list[Callable[[], nn.Module]] = [
    Outer,
    lambda: nn.BatchNorm1d(WIDTH),
    linear,
    lambda: nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True),
    lambda: Using(lambda x, lstm: lstm(x)[0], nn.LSTM(WIDTH, WIDTH, num_layers=2)),
]


def plain(makes: list[Callable[[], nn.Module]]) -> nn.Sequential:
    return nn.Sequential(*[make() for make in makes])


def specs(makes: list[Callable[[], nn.Module]]) -> list[Any]:
    return [LayerSpec(make) for make in makes]


def meta(makes: list[Callable[[], nn.Module]]) -> nn.Sequential:
    with torch.device("meta"):
        return plain(makes)


FORMS: dict[str, Callable[[Any], Any]] = {"specs": specs, "meta": meta}


def weights(pipe: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in pipe.state_dict().items()}


# --- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("balance", [[5], [1, 2, 2], "parameters"])
@pytest.mark.parametrize("form", FORMS)
def test_values_are_those_of_the_model_built_with_values(form: str, balance: Any) -> None:
    torch.manual_seed(4)
    model, x = plain(HARD), torch.randn(4, WIDTH)
    torch.manual_seed(4)
    layers = FORMS[form](HARD)
    pipe = Pipe(layers, balance, devices=["cpu:0", "cpu:1", "cpu:0"], chunks=2)
    assert_same(weights(pipe), weights(model))
    assert_same(step(pipe, pipe, x), step(in_turn(model, 2), model, x))


@settings(max_examples=25)
@given(
    st.integers(0, 2**64 - 1),
    st.lists(st.integers(1, 2), min_size=1, max_size=4),
    st.sampled_from(list(FORMS)),
)
def test_first_weights_depend_on_seed_and_layer_alone(seed, balance, form) -> None:
    torch.manual_seed(7)
    makes = (BLOCKS * 2)[: sum(balance)]
    devices = [f"cpu:{j % 2}" for j in range(len(balance))]
    pipe = Pipe(FORMS[form](makes), balance, devices=devices, seed=seed)
    assert torch.equal(torch.rand(3), torch.manual_seed(7) and torch.rand(3))
    layers = [*specs(makes), nn.ReLU(), *specs(BLOCKS)]
    longer = weights(Pipe(layers, "uniform", devices=["cpu"], seed=seed))
    assert_same({name: longer[name] for name in weights(pipe)}, weights(pipe))


def test_another_seed_and_another_layer_give_other_weights() -> None:
    made = [p for seed in range(3) for p in Pipe([LayerSpec(nn.Linear, 9, 9)] * 3, [3], seed=seed)]
    assert len({p.weight.sum().item() for p in made}) == 9


def test_init_fn_comes_after_reset_parameters_children_first_where_nothing_has_values() -> None:
    seen: list[str] = []

    def init(module: nn.Module) -> None:
        seen.append(type(module).__name__)
        if isinstance(module, nn.Linear):
            assert not module.weight.isnan().any()
            nn.init.constant_(module.bias, 7.0)
        if isinstance(module, Mask):
            module.mask = torch.full((WIDTH,), 3.0)  # another tensor

    given, norm = linear(), nn.BatchNorm1d(WIDTH)
    norm.running_mean.fill_(5.0)
    before = given.weight.clone()
    half = nn.Sequential(norm, *meta([linear]))
    pipe = Pipe([given, *meta([Outer, Mask]), LayerSpec(Block, WIDTH), half], [2, 3], init_fn=init)
    assert seen == ["Linear", "Outer", "Mask", "BatchNorm1d", "Linear", "Block", "Linear"]
    assert torch.equal(pipe[0].weight, before)
    assert (pipe[1].inner.bias == 7).all()
    assert (pipe[2].mask == 3).all()
    assert (pipe[3].linear.bias == 7).all()
    assert (pipe[4][0].running_mean == 5).all()
    assert (pipe[4][1].bias == 7).all()


# --- layers --------------------------------------------------------------------------------------


def test_specs_in_a_sequential_are_built_likewise_and_it_stays_as_it_is() -> None:
    model = nn.Sequential(*specs(BLOCKS[:2]), nn.Linear(WIDTH, 1)).eval()
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


def test_the_layers_keep_their_identity_and_their_parameters_what_they_say() -> None:
    model = meta(HARD)
    model[2].weight.requires_grad_(False)
    model[2].weight.mine = "yes"
    first = list(model)
    pipe = Pipe(model, [2, 3])
    assert list(pipe) == first
    assert isinstance(pipe[2].weight, nn.Parameter)
    assert not pipe[2].weight.requires_grad
    assert pipe[2].weight.mine == "yes"


# --- memory and measures -------------------------------------------------------------------------


def test_on_a_stage_on_meta_nothing_is_materialised_before_it_has_a_device() -> None:
    with HostBytes() as host:
        pipe = Pipe(meta(HARD), [2, 3], devices=["meta", "meta"])
        assert host.most == 0
    assert all(p.is_meta for p in pipe.parameters())
    assert pipe(torch.randn(4, WIDTH, device="meta")).shape == (4, WIDTH)
    pipe.devices = ["cpu:0", "cpu:1"]
    assert pipe(torch.randn(4, WIDTH)).isfinite().all()


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
        drawn = torch.get_rng_state()
        assert balance([LayerSpec(OnHost, WIDTH)] * 8) == [4, 4]
        assert torch.equal(torch.get_rng_state(), drawn)
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


def test_they_are_balanced_and_measured_as_layers_would_be() -> None:
    built, x = plain(BLOCKS), torch.randn(4, WIDTH)
    for device in ["meta", "cpu"]:
        of_specs = profile(specs(BLOCKS), x, time=False, device=device)
        assert of_specs == profile(built, x, time=False, device=device)
    layers = [*specs(BLOCKS[:3]), nn.ReLU(), LayerSpec(nn.Linear, WIDTH, 40 * WIDTH)]
    for how, balance in (("parameters", [4, 1]), ("uniform", [3, 2]), ("type:^<lambda>$", [2, 3])):
        assert Pipe(layers, how, devices=TWO).balance == balance
    on_meta = meta([*HARD, Mask])
    for model in (layers, on_meta):
        assert sum(balance_by_time(2, model, x, timeout=0.0, device="cpu")) == len(model)
        made = plan(model, x, devices=TWO, batch_size=4, memory="1GB", timeout=0.0)
        assert sum(made.balance) == len(model)
    assert all(p.is_meta for p in on_meta.parameters())


# --- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layer", "balances", "note"),
    [
        (LayerSpec(Broken), [[1, 1], "parameters", "uniform", "type:linear"],
         "while building layer 1 ('1': LayerSpec(Broken)) on "),
        (meta([lambda: Raises(3, 3)])[0], [[1, 1]],
         "while initialising layer 1 ('1': Raises) on cpu"),
    ],
    ids=["constructor", "reset"],
)  # fmt: skip
def test_an_exception_is_its_own_and_names_the_layer(layer, balances, note) -> None:
    given = nn.Linear(3, 3)
    before = given.weight
    for balance in balances:
        with pytest.raises(KeyError, match="mine") as caught:
            Pipe([given, layer], balance, devices=["meta", "cpu"])
        assert "raise KeyError" in "".join(traceback.format_tb(caught.value.__traceback__))
        assert caught.value.__notes__[0].startswith(note)
        assert given.weight is before
        assert not before.is_meta  # nothing was moved
        assert isinstance(layer, LayerSpec) or layer.weight.is_meta


def made_of(*arguments: Any, **options: Any) -> Callable[[], Any]:
    return lambda: Pipe([LayerSpec(*arguments)], [1], **options)


WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "module": (made_of(nn.Linear(3, 3)), TypeError, r"LayerSpec\(Linear\): the first"),
    "number": (made_of(3, 3), TypeError, r"LayerSpec\(3\): the first argument"),
    "dict": (made_of(dict), TypeError, r"LayerSpec\(dict\) built a dict, no nn\.Module"),
    "spec": (made_of(LayerSpec, nn.ReLU), TypeError, "built a LayerSpec"),
    "called": (lambda: LayerSpec(nn.ReLU)(3), TypeError, r"LayerSpec\(ReLU\) is not built yet"),
    "no balance": (lambda: Pipe(specs(BLOCKS)), ValueError, "balance is missing"),
    "init_fn": (made_of(nn.ReLU, init_fn="normal"), TypeError, "init_fn='normal': must be a func"),
    "nothing to initialise": (
        lambda: Pipe([nn.ReLU()], [1], init_fn=print),
        ValueError,
        "init_fn=.*nothing to initialise.*meta.*LayerSpec",
    ),
    "nothing to seed": (lambda: Pipe([nn.ReLU()], [1], seed=1), ValueError, "seed=1: there is"),
    "seed of truth": (made_of(nn.ReLU, seed=True), TypeError, "seed=True: must be an"),
    "seed below": (made_of(nn.ReLU, seed=-1), ValueError, "seed=-1: must be at least 0"),
    "seed of words": (made_of(nn.ReLU, seed="a"), TypeError, "seed='a': must be an int"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_cannot_be_is_refused(what: str) -> None:
    make, kind, message = WRONG[what]
    with pytest.raises(kind, match=message):
        make()


def partly(half: Any) -> None:
    half.mask[1:] = 1.0


def given_in_part() -> nn.Module:
    linear = nn.Linear(WIDTH, WIDTH)
    linear.bias = nn.Parameter(torch.ones(WIDTH, device="cpu"))
    return linear


CANNOT: dict[str, tuple[Callable[[], nn.Module], Any, str]] = {
    "no reset": (Mask, None, r"Mask has 'mask' on meta, without values, and nothing sets"),
    "inside": (lambda: nn.Sequential(nn.ReLU(), Mask()), None, r"Mask at '1' has 'mask' on meta"),
    "half": (Half, None, r"Half has 'mask' .*nothing sets all of it"),
    "partly": (lambda: Half(partly), None, r"Half has 'mask' .*nothing sets all of it"),
    "numbers": (lambda: Half(lambda half: half.mask.fill_(1.0), table=torch.int64), None,
                r"Half has 'table'"),
    "flags": (lambda: Half(lambda half: half.mask.fill_(1.0), table=torch.bool), None,
              r"Half has 'table'"),
    "init_fn": (Mask, lambda module: None, r"Mask has 'mask' on meta.*nothing sets"),
    "given in part": (given_in_part, None, r"Linear has 'weight' on meta.*where all of them are"),
}  # fmt: skip


@pytest.mark.parametrize("what", CANNOT)
def test_what_gets_no_value_is_named_and_the_model_is_as_it_was(what: str) -> None:
    make, init_fn, message = CANNOT[what]
    model = meta([linear, make, linear])
    before = dict(model.state_dict(keep_vars=True))
    with pytest.raises(ValueError, match=message) as caught:
        Pipe(model, [2, 1], init_fn=init_fn)
    assert "init_fn=" in str(caught.value)
    assert "layer 1 (" in "".join(caught.value.__notes__)
    after = model.state_dict(keep_vars=True)
    assert all(after[name] is value for name, value in before.items())


def test_what_is_refused_after_layers_got_values_leaves_them_on_meta() -> None:
    model = meta([linear, lambda: nn.SyncBatchNorm(WIDTH)])
    with pytest.raises(TypeError, match="SyncBatchNorm"):
        Pipe(model, [1, 1], deferred_batch_norm=True)
    assert all(tensor.is_meta for tensor in model.state_dict().values())


class Outputs(nn.LSTM):
    def forward(self, input: Tensor) -> Any:
        return super().forward(input)[0]


@pytest.mark.parametrize("fails_first", [False, True])
def test_an_optimizer_and_hooks_of_a_model_on_meta_are_those_of_the_pipe(fails_first: bool) -> None:
    model = meta([lambda: nn.BatchNorm1d(WIDTH), linear, lambda: Outputs(WIDTH, WIDTH), linear])
    model[3].weight = model[1].weight
    model[1].bias.scale = 3
    hooked: list[str] = []
    model[3].bias.register_hook(lambda grad: hooked.append("gradient"))
    model[1].bias.register_post_accumulate_grad_hook(lambda p: hooked.append("accumulated"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = list(model.state_dict(keep_vars=True).values())
    if fails_first:
        with pytest.raises(IndexError):
            Pipe(model, [2, 2], devices=["cpu"])
        with pytest.raises(TypeError, match="cannot convert"):
            Pipe(nn.Sequential(*model, nn.SyncBatchNorm(3)), [5], deferred_batch_norm=True)
    after = list(model.state_dict(keep_vars=True).values())
    assert all(old is new and old.is_meta for old, new in zip(before, after, strict=True))
    pipe = Pipe(model, [2, 2], chunks=2)
    after = list(pipe.state_dict(keep_vars=True).values())
    assert all(old is new and not old.is_meta for old, new in zip(before, after, strict=True))
    assert (type(pipe[1].weight), pipe[1].bias.scale) == (nn.Parameter, 3)
    values = [p.detach().clone() for p in pipe.parameters()]
    pipe.train_batch(torch.randn(4, WIDTH), loss_fn=lambda output: output.square().mean())
    optimizer.step()
    assert not any(torch.equal(p, q) for p, q in zip(pipe.parameters(), values, strict=True))
    assert sorted(set(hooked)) == ["accumulated", "gradient"]


def test_a_parameter_that_cannot_keep_its_identity_is_warned_of() -> None:
    model = meta([linear])
    held = weakref.ref(model[0].weight)
    with pytest.warns(UserWarning, match="weight was on meta.*optimizer.*would not train it"):
        pipe = Pipe(model, [1])
    assert held() is not pipe[0].weight
    assert not pipe[0].weight.is_meta


# --- shared weights ------------------------------------------------------------------------------


def tied() -> nn.Sequential:
    model = nn.Sequential(linear(), nn.Tanh(), linear())
    model[2].weight = model[0].weight
    return model


@pytest.mark.parametrize("balance", [[3], [1, 2]])
def test_a_tied_weight_on_meta_stays_one_with_the_values_of_the_first(balance: Any) -> None:
    with torch.device("meta"):
        model = tied()
    nested = Pipe(nn.Sequential(copy.deepcopy(model)), [1])[0]
    pipe = Pipe(model, balance, seed=1)
    assert torch.equal(pipe[0].weight, Pipe(meta([linear]), [1], seed=1)[0].weight)
    for layers in (pipe, nested):
        assert layers[2].weight is layers[0].weight
        assert not layers[0].weight.is_meta


@pytest.mark.parametrize("second", ["cpu", "meta"])
@pytest.mark.parametrize("spec", [False, True])
def test_a_tie_holds_where_the_other_layer_is_on_meta_as_yet(spec: bool, second: str) -> None:
    tie = TiedLayerSpec("a", nn.Linear, WIDTH, WIDTH)
    with torch.device("meta"):
        layers = [tie if spec else tie.build(), tie.build()]
    if not spec:
        layers[1].weight = layers[0].weight
    pipe = Pipe(layers, [1, 1], devices=["cpu", second])
    assert pipe[0].weight is pipe[1].weight
    assert not pipe[0].weight.is_meta


def test_what_a_layer_shares_with_a_pipe_inside_stays_shared() -> None:
    layer = nn.Module()
    layer.own = linear()
    layer.pipe = Pipe(nn.Sequential(layer.own), [1], devices=["cpu"])
    pipe = Pipe([layer], [1], devices=["cpu"])
    pipe.devices = ["meta"]
    assert layer.pipe[0].weight is layer.own.weight


def to_logits(module: Any, x: Tensor) -> Tensor:
    return F.linear(x, module.weight)


def gpt() -> list[Any]:
    """A GPT as DeepSpeed's examples write it."""
    blocks = [LayerSpec(nn.Linear, WIDTH, WIDTH) for _ in range(3)]
    first, last = (
        TiedLayerSpec("embed", nn.Embedding, 11, WIDTH, **options)
        for options in ({}, {"forward_fn": to_logits})
    )
    return [first, *blocks, torch.tanh, LayerSpec(nn.LayerNorm, WIDTH), last]


def plain_gpt() -> nn.Sequential:
    blocks = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
    head = nn.Linear(WIDTH, 11, bias=False)
    model = nn.Sequential(nn.Embedding(11, WIDTH), *blocks, nn.Tanh(), nn.LayerNorm(WIDTH), head)
    head.weight = model[0].weight
    return model


TOKENS = torch.arange(30).view(6, 5) % 11


@pytest.mark.parametrize("balance", [[7], [3, 4], [1, 4, 2]])
def test_deepspeeds_gpt_computes_and_trains_as_the_plain_one(balance: list[int]) -> None:
    pipe, plain = Pipe(gpt(), balance, seed=0, chunks=3, checkpoint="always"), plain_gpt()
    assert list(pipe.state_dict()) == list(plain.state_dict())
    assert [n for n, _ in pipe.named_parameters()] == [n for n, _ in plain.named_parameters()]
    plain.load_state_dict(pipe.state_dict())
    expected = step(in_turn(plain, 3), plain, TOKENS)
    assert_same(step(pipe, pipe, TOKENS), expected, rounded=["parameter_grads"])
    for model in (pipe, plain):
        model.zero_grad()

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), target.flatten())

    assert_trains_as(pipe, plain, TOKENS, TOKENS, loss_fn=loss_fn)


def test_any_tensors_may_be_tied_and_each_key_has_an_owner_of_its_own() -> None:
    spec = TiedLayerSpec("deep", Block, WIDTH, tied_weight_attr=["linear.weight", "norm.bias"])
    pipe = Pipe([spec, spec], [2])
    assert pipe[1].linear.weight is pipe[0].linear.weight
    assert pipe[1].norm.bias is pipe[0].norm.bias
    assert pipe[1].norm.weight is not pipe[0].norm.weight
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
    there, pipe[0] = pipe[2].weight, layers[0]  # a new layer in the place of the first one
    assert pipe[0].weight is there is pipe[2].weight


@pytest.mark.parametrize("again", [copy.deepcopy, lambda pipe: pickle.loads(pickle.dumps(pipe))])
def test_a_copy_is_tied_and_has_its_own_forward_fn(again: Any) -> None:
    pipe = Pipe(gpt(), [7])
    other = again(pipe)
    assert other[6].weight is other[0].weight
    with torch.no_grad():
        other[0].weight.zero_()
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


# --- callables ------------------------------------------------------------------------------------


def double(x: Tensor) -> Tensor:
    return x * 2


class Power:
    def __init__(self, exponent: int) -> None:
        self.exponent = exponent

    def __call__(self, x: Tensor) -> Tensor:
        return x**self.exponent


@pytest.mark.parametrize("kind", [list, tuple, iter, nn.ModuleList, dict, OrderedDict])
def test_what_yields_layers_is_a_list_and_a_mapping_names_them(kind: Any) -> None:
    layers = {"stem": nn.Linear(3, 3), "act": nn.ReLU(), "head": nn.Linear(3, 1, bias=False)}
    mapped = issubclass(kind, dict) if isinstance(kind, type) else False
    pipe = Pipe(kind(layers if mapped else layers.values()), [2, 1])
    assert list(pipe) == list(layers.values())
    names = ["stem", "stem", "head"] if mapped else ["0", "0", "2"]
    assert [key.partition(".")[0] for key in pipe.state_dict()] == names


def test_the_repr_shows_the_name_and_the_source_line_and_errors_name_the_layer() -> None:
    line = double.__code__.co_firstlineno
    shown = repr(Pipe([double, lambda x: x, partial(double), torch.relu], [4]))
    assert f"(0): Function(double, test_listing.py:{line})" in shown
    assert re.search(r"\(1\): Function\(<lambda>, test_listing.py:\d+\)", shown)
    assert f"(2): Function(double, test_listing.py:{line})" in shown
    assert "(3): Function(relu)" in shown
    with pytest.raises(ZeroDivisionError) as caught:
        Pipe([nn.ReLU(), lambda x: 1 // 0], [1, 1])(torch.randn(2, 3))
    assert any("layer 1 ('1': Function)" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda pipe: pickle.loads(pickle.dumps(pipe))])
def test_a_pipe_of_callables_is_copied_and_pickled(again: Any) -> None:
    layer, gelu = nn.Linear(3, 3), partial(F.gelu, approximate="tanh")
    pipe = Pipe([layer, double, gelu, nn.Tanh().forward, torch.relu, Power(3)], [2, 4])
    x = torch.randn(4, 3)
    assert torch.equal(pipe(x), gelu(layer(x) * 2).tanh().relu() ** 3)
    assert torch.equal(again(pipe)(x), pipe(x))


def test_callables_are_compiled_traced_measured_and_planned() -> None:
    compiled = torch.compile(double, backend="eager")
    layers = [nn.Linear(3, 3), compiled, nn.Linear(3, 3), lambda x: F.dropout(x, 0.1)]
    x = torch.randn(4, 3)
    pipe = Pipe(layers, [2, 2], chunks=2)
    assert "Function(double, test_listing.py" in repr(pipe)
    with pipe.trace() as trace:
        pipe.train_batch(x, loss_fn=lambda y: y.mean())
    assert trace.table()
    found = profile(layers, x, timeout=0.0)
    assert [layer.parameter_bytes for layer in found.layers] == [48, 0, 48, 0]
    sizes = profile(layers, x, device="meta")
    assert [layer.output_bytes[4] for layer in sizes.layers] == [48] * 4
    made = plan(layers, x, devices=["cpu:0", "cpu:1"], batch_size=4, memory="1GB", timeout=0.0)
    assert sum(made.balance) == 4
    layers = [nn.Linear(3, 3), double, double, nn.Linear(3, 3), double, double]
    assert balance_by_type(2, layers, "^double$") == [4, 2]


class Holds:
    def __init__(self, inner: nn.Module) -> None:
        self.inner = inner

    def __call__(self, x: Tensor) -> Tensor:
        return self.inner(x)


def closure(layer: Any) -> Any:
    return lambda x: layer(x)


HELD = nn.Linear(3, 3)
HOLD: list[Any] = [closure(HELD), closure(HELD.weight), lambda x, layer=HELD: layer(x), Holds(HELD)]
HOLD += [HELD.forward, partial(F.linear, weight=HELD.weight), partial(HELD)]
HOLD += [partial(closure(HELD)), closure(HELD.forward), closure(partial(HELD))]
NO_LAYERS: list[tuple[Any, str]] = [
    ([nn.ReLU(), nn.Linear], r"layer 1 is the class Linear.*Linear\(\.\.\.\).*LayerSpec\("),
    ([[nn.ReLU()]], r"layer 0 is a list: unpack it.*nn\.Sequential\(\*layers\)"),
    ([nn.ReLU(), None], r"layer 1 is a NoneType.*a module, a callable or a LayerSpec"),
    ([3], r"layer 0 is a int \(3\)"),
    ([lambda x: (yield x)], r"layer 0: <lambda>.*generator.*@skippable"),
    ({nn.ReLU()}, "not set"),
    ("relu", "not str"),
    (torch.ones(2), "not Tensor"),
    (Pipe([nn.ReLU()], [1]), "not Pipe"),
    *(([nn.ReLU(), function], r"layer 1: .* uses a .*TiedLayerSpec") for function in HOLD),
]


@pytest.mark.parametrize(("layers", "message"), NO_LAYERS)
def test_what_is_no_layer_or_hides_parameters_is_refused(layers: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        Pipe(layers, [1])
