"""What the owner of a model changes after its conversion counts in the next call, or is refused."""

from __future__ import annotations

import copy
import dataclasses
import gc
import math
import pickle
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from syncpipe import Pipe, sequential, verify
from tests.layers.conversion.models import Pair

X = torch.randn(6, 4)


class Config:
    def __init__(self, **values: Any) -> None:
        vars(self).update(values)


class Block(nn.Module):
    """Reads attributes of its own, of an object, of a list and of a class."""

    rate = 1.0

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config, self.weights, self.skips = config, [1.0, 2.0], True
        self.options, self.depth, self.temperature = SimpleNamespace(power=2), 1, 0.5
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.bias = nn.Parameter(torch.rand(4))
        self.register_buffer("shift", torch.rand(4))
        self.table = torch.rand(4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x) / self.temperature * self.config.scale + self.bias
        y = y * self.rate + self.shift + self.table
        for _ in range(self.depth):
            y = self.two(y) * self.weights[1] ** self.options.power
        if self.config.kind == "tanh":
            y = y.tanh()
        return y + x if self.skips else y


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        config = Config(scale=2.0, kind="tanh", unused=1)
        self.blocks = nn.ModuleList(Block(config) for _ in range(2))
        self.lambda_, self.head = 0.0, nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x) * (1 - self.lambda_)


def converted(model: nn.Module, **options: Any) -> tuple[nn.Module, Pipe]:
    torch.manual_seed(0)
    layers = sequential(model, X[:2])
    return model, Pipe(layers, "uniform", devices=["cpu:0", "cpu:1"], chunks=2, **options)


def follows(model: nn.Module, pipe: Pipe) -> bool:
    """Whether the pipe gives what the model gives, which is something else than before."""
    with torch.no_grad():
        return torch.allclose(pipe(X), model(X), atol=1e-6)


def first(model: Any) -> Any:
    return model.blocks[0]


FOLLOWED: dict[str, Any] = {
    "a number": lambda m: setattr(first(m), "temperature", 0.1),
    "one of the model": lambda m: setattr(m, "lambda_", 0.7),
    "to an integer": lambda m: setattr(first(m), "temperature", 2),
    "a number of a config": lambda m: setattr(first(m).config, "scale", 0.1),
    "a number of the class": lambda m: setattr(first(m), "rate", 3.0),
    "what is not read": lambda m: setattr(first(m).config, "unused", 2),
    "an equal value": lambda m: setattr(first(m), "depth", 1),
    "a parameter": lambda m: setattr(first(m), "bias", nn.Parameter(torch.rand(4))),
    "a buffer": lambda m: setattr(first(m), "shift", torch.rand(4)),
    "all of a state": lambda m: m.load_state_dict(
        {k: torch.rand_like(v) for k, v in m.state_dict().items()}, assign=True
    ),
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_is_followed(name):
    model, pipe = converted(Net())
    FOLLOWED[name](model)
    assert follows(model, pipe)
    loss = pipe.train_batch(X, loss_fn=lambda y: y.square().mean())
    assert torch.allclose(loss, model(X).square().mean().detach())
    assert torch.allclose(pipe.eval_batch(X), model(X), atol=1e-6)


@dataclasses.dataclass(slots=True)
class Slots:
    power: int = 2


def only(held: Any) -> Any:
    """The config in containers with one entry."""
    while isinstance(held, (list, tuple, dict)):
        (held,) = held.values() if isinstance(held, dict) else held
    return held


@pytest.mark.parametrize("held", [lambda c: c, lambda c: [c], lambda c: {"a": (c,)}])
@pytest.mark.parametrize("config", [Slots, partial(Config, power=2)])
def test_a_config_with_slots_or_in_a_container_is_not_changed_in_silence(config, held):
    config = config()

    def between(m: Any, x: Tensor) -> Tensor:
        return x ** only(m.held).power

    _, pipe = converted(doing(between, held=held(config)))
    config.power = 3
    with pytest.raises(ValueError, match=r"power was 2 and is 3"):
        pipe(X)


def test_a_list_in_itself_is_compared_like_others():
    held: list[Any] = [2.0]
    held.append(held)
    _, pipe = converted(doing(lambda m, x: x * m.held[0], held=held))
    pipe(X)
    held[0] = 3.0
    with pytest.raises(ValueError, match=r"held was"):
        pipe(X)


@pytest.mark.parametrize("change", ["up", "down"])
def test_numbers_of_which_only_the_ratio_counts_are_refused(change):
    model = doing(lambda m, x: x * math.log(m.up / m.down), up=3.0, down=2.0)
    model, pipe = converted(model)
    setattr(model, change, 5.0)
    with pytest.raises(ValueError, match=f"{change} was .* and is 5"):
        pipe(X)


REFUSED: dict[str, tuple[Any, str]] = {
    "a number that decides": (
        lambda m: setattr(first(m), "depth", 2), r"blocks\.0\.depth was 1 and is 2"),
    "a flag": (lambda m: setattr(first(m), "skips", False), r"0\.skips was True and is False"),
    "an entry of a list": (
        lambda m: first(m).weights.append(1), r"weights was .*1: 2\.0\} and is .*, 2: 1\}"),
    "a config": (
        lambda m: setattr(first(m).config, "kind", "gelu"), r"kind was 'tanh' and is 'gelu'"),
    "an attribute of a namespace": (
        lambda m: setattr(first(m).options, "power", 3), r"options was .*power.*power"),
    "a tensor": (lambda m: setattr(first(m), "table", torch.zeros(4)), r"0\.table was tensor"),
    "no number any more": (
        lambda m: setattr(first(m), "temperature", None), r"temperature was 0\.5 and is None"),
    "a child": (lambda m: setattr(m, "head", nn.Linear(4, 2)), r"of the model were replaced"),
    "another block": (lambda m: m.blocks.append(nn.Linear(4, 4)), r"of blocks were replaced"),
    "a hook": (
        lambda m: first(m).register_forward_hook(lambda *_: None), r"blocks\.0 has hooks now"),
    "a forward": (lambda m: setattr(m, "forward", lambda x: x), r"of the model was replaced"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused_and_works_again_when_undone(name):
    change, message = REFUSED[name]
    model, pipe = converted(Net())
    before = {id(m): (dict(vars(m)), dict(m._modules)) for m in model.modules()}
    expected = pipe(X)
    change(model)
    for call in (pipe, lambda x: pipe.train_batch(x, loss_fn=torch.mean)):
        with pytest.raises(ValueError, match=message) as caught:
            call(X)
        assert "convert the model again" in str(caught.value)
    for module in model.modules():
        if id(module) in before:
            own, children = before[id(module)]
            vars(module).clear()
            vars(module).update(own)
            module._modules.clear()
            module._modules.update(children)
            module._forward_hooks.clear()
    first(model).config.kind, first(model).options.power = "tanh", 2
    first(model).weights[:] = [1.0, 2.0]
    assert torch.equal(pipe(X), expected)


def test_a_recomputation_computes_with_the_numbers_of_its_forward():
    model, pipe = converted(Net(), checkpoint="always")
    plain = copy.deepcopy(model)
    output = pipe(X)
    first(model).temperature = 0.1
    pipe(X)  # which takes the new one
    output.square().sum().backward()
    plain(X).square().sum().backward()
    for mine, theirs in zip(pipe.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(mine.grad, theirs.grad, rtol=1e-4, atol=1e-5)


def test_copies_are_on_their_own_and_numbers_of_a_model_that_is_gone_stay():
    model, pipe = converted(Net())
    first(model).temperature = 0.3
    copied = copy.deepcopy(pipe), pickle.loads(pickle.dumps(pipe))
    expected = pipe(X)
    first(model).temperature, first(model).depth = 0.2, 3
    model.eval()
    for each in copied:
        assert torch.equal(each(X), expected)
        assert each.training
        assert all(layer.training for layer in each)
    first(model).depth = 1
    del model
    gc.collect()
    assert not torch.equal(pipe(X), expected)


# --- modes ----------------------------------------------------------------------------------------


class Backbone(nn.Module):
    """Has dropout by a function, BatchNorm by a module."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm, self.two = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(F.dropout(self.norm(self.one(x)).relu(), 0.5, self.training))


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = Backbone(), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))


def in_evaluation(model: nn.Module, pipe: Pipe) -> bool:
    """Whether both are: then they give the same, and leave statistics alone."""
    before = copy.deepcopy(pipe.state_dict())
    same = torch.allclose(pipe(X), copy.deepcopy(model)(X), atol=1e-6)
    return same and all(torch.equal(a, before[k]) for k, a in pipe.state_dict().items())


@pytest.mark.parametrize("inside", ["", "backbone"])
@pytest.mark.parametrize("early", [True, False])
def test_modes_of_the_model_and_of_what_is_inlined_are_followed(inside, early):
    model = Classifier()
    if early:
        model.get_submodule(inside).eval()
    layers = sequential(model, X[:2])
    assert [m.training for m in model.backbone.modules()] == [not early] * 4
    pipe = Pipe(layers, "uniform", devices=["cpu:0", "cpu:1"], chunks=2)
    assert in_evaluation(model, pipe) == early
    model.get_submodule(inside).eval()
    assert in_evaluation(model, pipe)
    assert verify(pipe, X, loss_fn=lambda y: y.square().mean()).ok
    model.train()
    assert not in_evaluation(model, pipe)
    pipe.eval()
    assert in_evaluation(model, pipe)
    assert not model.backbone.training
    pipe.train()
    assert model.backbone.training
    copied = copy.deepcopy(pipe)
    for each in (pipe, copied):
        each.get_submodule(inside).eval()
    assert in_evaluation(model, pipe)
    assert torch.equal(copied(X), pipe(X))


class Both(Classifier):
    """Does something of its own in training in the middle of what the backbone does."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.backbone.one(x)
        x = F.dropout(x, 0.5, self.training) + F.dropout(x, 0.5, self.backbone.training)
        return self.head(x)


def test_modes_that_were_never_traced_together_are_refused_with_their_modules():
    model, pipe = converted(Both())
    model.backbone.eval()
    with pytest.raises(RuntimeError, match=r"the model cannot train while backbone evaluates"):
        pipe(X)
    model.eval()
    assert in_evaluation(model, pipe)


def test_a_layer_that_hands_on_more_in_training_has_the_mode_of_all():
    def between(m: Any, x: Tensor) -> Tensor:
        return m.last(x) + x.sum(1, keepdim=True) if m.training else m.last(x)

    model = Pair(between)
    model.last = Backbone()
    model, pipe = converted(model)
    model.last.eval()
    with pytest.raises(RuntimeError, match=r"the model cannot train while last evaluates"):
        pipe(X)


# --- what a forward sets --------------------------------------------------------------------------


class Cell(nn.Module):
    def __init__(self, *, whole: bool) -> None:
        super().__init__()
        self.i, self.h, self.state = nn.Linear(4, 4), nn.Linear(4, 4), None
        if whole:
            self.register_forward_hook(lambda *_: None)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.tanh(self.i(x) + (0 if self.state is None else self.h(self.state)))
        self.state = out
        return out


class Recurrent(nn.Module):
    def __init__(self, *, whole: bool, resets: bool) -> None:
        super().__init__()
        self.stem, self.head, self.resets = nn.Linear(4, 4), nn.Linear(4, 2), resets
        self.cell = Cell(whole=whole)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        if self.resets:
            self.cell.state = None
        for _ in range(3):
            h = self.cell(x)
        return self.head(h)


def test_state_that_begins_anew_in_each_call_is_followed():
    model, pipe = converted(Recurrent(whole=False, resets=True))
    assert len(pipe) > 3
    for x in (X, X + 1, X[:4]):
        assert torch.allclose(pipe(x), model(x), atol=1e-6)
        loss = pipe.train_batch(x, loss_fn=lambda y: y.square().mean())
        assert torch.allclose(loss, model(x).square().mean().detach())


class Levels:
    """An object that keeps what a forward builds and looks up."""

    levels: list[Tensor]

    def build(self, x: Tensor) -> None:
        self.levels = [x, x / 2]

    def look_up(self, x: Tensor) -> Tensor:
        return x * self.levels[0] + self.levels[1]


class Pyramid(Levels, nn.Module):
    """As that of RAFT: the model calls its methods, never the module itself."""


class Flow(nn.Module):
    def __init__(self, kept: Any) -> None:
        super().__init__()
        self.first, self.last, self.kept = nn.Linear(4, 4), nn.Linear(4, 2), kept

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        self.kept.build(x)
        return self.last(self.kept.look_up(x))


@pytest.mark.parametrize("kept", [Levels, Pyramid])
def test_state_that_a_child_or_an_object_has_within_a_call_is_followed(kept):
    model, pipe = converted(Flow(kept()))
    assert len(pipe) == 2
    for x in (X, X + 1, X[:4]):
        assert torch.allclose(pipe(x), model(x), atol=1e-6)


class LooksUp(nn.Module):
    """Reads what the model has set, also as it decides by a size (``asks``)."""

    def __init__(self, levels: Levels, asks: bool) -> None:
        super().__init__()
        self.levels, self.asks = [levels], asks
        if asks:
            self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if self.asks:
            x = self.inner(x) if x.shape[0] > 1 else -self.inner(x)
        return self.levels[0].look_up(x)


def looks_up(asks: bool) -> nn.Module:
    def between(m: Any, x: Tensor) -> Tensor:
        m.kept.build(x)
        return m.part(m.kept.look_up(x))

    return doing(between, kept=(kept := Levels()), part=LooksUp(kept, asks))


def remembers(m: Any, x: Tensor) -> Tensor:
    m.last = x.mean()
    return x


def grows(m: Any, x: Tensor) -> Tensor:
    x = x + m.offset
    m.offset = m.offset + x.mean().detach()
    return x


def freezes(m: Any, x: Tensor) -> Tensor:
    m.b.eval()
    return x


def doing(forward: Any, **attributes: Any) -> nn.Module:
    model = Pair(forward)
    for name, value in attributes.items():
        setattr(model, name, value)
    return model


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Recurrent(whole=True, resets=True), r"sets cell\.state, of .*\n .*cell\.state = None"),
        (Recurrent(whole=True, resets=False), r"calls cell several times, which keeps state"),
        (Recurrent(whole=False, resets=False), r"calls cell several times, which keeps state"),
        (doing(remembers), r"sets the attribute last:\n .*m\.last = x\.mean"),
        (doing(grows, offset=torch.zeros(())), r"sets the attribute offset:\n"),
        (looks_up(asks=False), r"sets the attribute kept\.levels:\n"),
        (looks_up(asks=True), r"sets the attribute kept\.levels:\n"),
        (doing(freezes), r"sets b\.training, of a module .*\n .*m\.b\.eval"),
    ],
)
def test_state_from_call_to_call_and_what_is_left_for_others_are_refused(model, message):
    with pytest.raises(ValueError, match=message):
        sequential(model, X[:2])


def test_what_is_set_to_what_it_was_is_no_change():
    def between(m: Any, x: Tensor) -> Tensor:
        m.mean = m.mean.to(x)
        m.size = x.shape[1]
        return x - m.mean + m.size

    model, pipe = converted(doing(between, mean=torch.full((1, 4), 0.1)))
    assert len(pipe) == 2
    assert torch.equal(model.mean, torch.full((1, 4), 0.1))
    assert torch.allclose(pipe(X), model(X), atol=1e-5)
    model.double()
    assert len(sequential(doing(between, mean=torch.full((1, 4), 0.1)).double(), X.double())) == 2


@pytest.mark.parametrize("inner", [nn.ReLU(), nn.Dropout(0.0), nn.Sequential(nn.ReLU())])
def test_a_module_at_several_places_is_no_reason_to_leave_what_is_around_it_whole(inner):
    model = nn.Sequential(nn.Linear(4, 4), inner, nn.Sequential(nn.Linear(4, 4), inner), inner)
    layers = sequential(nn.Sequential(model, nn.Linear(4, 2)), X)
    assert not layers.whole
    assert torch.equal(layers(X), layers.origin.modules[""](X))


# --- verify ---------------------------------------------------------------------------------------

FACTOR = {0: 1.0}


def scaled(_: Any, x: Tensor) -> Tensor:
    return F.dropout(x, 0.5) * FACTOR[0]


def test_verify_compares_with_the_model_itself(monkeypatch):
    model, pipe = converted(Pair(scaled))
    report = verify(pipe, X, loss_fn=torch.mean)
    assert report["the model"].comparisons["outputs"].same
    monkeypatch.setitem(FACTOR, 0, 2.0)
    report = verify(pipe, X, loss_fn=torch.mean)
    assert not report.ok
    assert report["the model"].different
    assert "convert it again" in str(report)
    assert report.pipe_ok
    alone = pickle.loads(pickle.dumps(pipe))  # which has no model
    assert "the model" not in [run.name for run in verify(alone, X, loss_fn=torch.mean).runs]
    del model


def test_verify_runs_the_model_with_the_tensors_of_the_layers():
    model, pipe = converted(Net())
    pipe.load_state_dict({k: v + 1 for k, v in model.state_dict().items()}, assign=True)
    assert verify(pipe, X, loss_fn=torch.mean).ok
    assert first(model).bias is pipe.get_parameter("blocks.0.bias")
    assert torch.allclose(pipe(X), model(X), atol=1e-6)
