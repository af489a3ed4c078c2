"""Specs that share weights, as in DeepSpeed's lists of layers."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from syncpipe import LayerSpec, Pipe, TiedLayerSpec
from syncpipe.balance import balance_by_parameters, profile
from tests.support.models import assert_same_tree, in_turn, step

VOCABULARY, WIDTH, LENGTH = 11, 8, 5


class Embedding(nn.Module):
    """Words and places, and the words' weight under a name of its own."""

    def __init__(self, vocabulary: int, width: int, length: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.places = nn.Parameter(torch.randn(length, width))

    @property
    def word_weight(self) -> nn.Parameter:
        return self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.words(tokens) + self.places


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.linear(self.norm(x)))


def to_logits(module: Any, x: Tensor) -> Tensor:
    return F.linear(x, module.word_weight)


def gpt(attribute: Any = "word_weight") -> list[Any]:
    """A GPT as DeepSpeed's examples write it."""
    sizes = (VOCABULARY, WIDTH, LENGTH)
    return [
        TiedLayerSpec("embed", Embedding, *sizes, tied_weight_attr=attribute),
        *[LayerSpec(Block, WIDTH) for _ in range(3)],
        lambda x: x.float(),
        LayerSpec(nn.LayerNorm, WIDTH),
        TiedLayerSpec("embed", Embedding, *sizes, forward_fn=to_logits, tied_weight_attr=attribute),
    ]


class Head(Embedding):
    def forward(self, x: Tensor) -> Tensor:
        return to_logits(self, x)


class Float(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.float()


def plain_gpt() -> nn.Sequential:
    """The same with the weights of ``gpt()`` under the same seed."""
    sizes = (VOCABULARY, WIDTH, LENGTH)
    blocks = [Block(WIDTH) for _ in range(3)]
    model = nn.Sequential(Embedding(*sizes), *blocks, Float(), nn.LayerNorm(WIDTH), Head(*sizes))
    model[6].words.weight = model[0].words.weight
    return model


BALANCES = [[7], [3, 4], [1, 4, 2]]
tokens = torch.arange(6 * LENGTH).view(6, LENGTH) % VOCABULARY


def pair(balance: list[int], **options: Any) -> tuple[Pipe, nn.Sequential]:
    pipe = Pipe(gpt(), balance, seed=0, **options)
    plain = plain_gpt()
    plain.load_state_dict(pipe.state_dict())
    return pipe, plain


@pytest.mark.parametrize("balance", BALANCES)
def test_deepspeeds_gpt_goes_forward_and_back_as_the_plain_one(balance: list[int]) -> None:
    pipe, plain = pair(balance, chunks=3, checkpoint="always")
    assert_same_tree(
        vars(step(pipe, pipe, tokens)), vars(step(in_turn(plain, 3), plain, tokens)), "step"
    )


@pytest.mark.parametrize("balance", BALANCES)
def test_deepspeeds_gpt_trains(balance: list[int]) -> None:
    pipe, plain = pair(balance, chunks=3)
    adam = [torch.optim.Adam(model.parameters()) for model in (pipe, plain)]

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), target.flatten())

    for _ in range(2):
        for optimizer in adam:
            optimizer.zero_grad()
        loss = pipe.train_batch(tokens, tokens, loss_fn=loss_fn)
        parts = zip(tokens.chunk(3), tokens.chunk(3), strict=True)
        expected = sum(_back(loss_fn(plain(x), t) / 3) for x, t in parts)
        torch.testing.assert_close(loss, expected)
        for optimizer in adam:
            optimizer.step()
    for own, other in zip(pipe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own, other)


def _back(loss: Tensor) -> Tensor:
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("balance", BALANCES)
def test_one_parameter_has_both_keys(balance: list[int]) -> None:
    pipe = Pipe(gpt(), balance)
    assert pipe[6].words.weight is pipe[0].words.weight
    assert list(pipe.state_dict()) == list(plain_gpt().state_dict())
    names = [name for name, _ in pipe.named_parameters()]
    assert "0.words.weight" in names
    assert "6.words.weight" not in names


@pytest.mark.parametrize(
    "attribute", ["words.weight", ["words.weight"], ["words.weight", "places"]]
)
def test_attributes_may_be_of_submodules_and_several(attribute: Any) -> None:
    pipe = Pipe(gpt(attribute), [7])
    assert pipe[6].words.weight is pipe[0].words.weight
    assert (pipe[6].places is pipe[0].places) == ("places" in attribute)


def test_a_buffer_may_be_tied() -> None:
    spec = TiedLayerSpec("norm", nn.BatchNorm1d, 3, tied_weight_attr=["weight", "running_mean"])
    pipe = Pipe([spec, spec], [2])
    assert pipe[1].running_mean is pipe[0].running_mean
    assert pipe[1].running_var is not pipe[0].running_var


def test_each_key_has_an_owner_of_its_own() -> None:
    layers = [TiedLayerSpec(key, nn.Linear, 3, 3) for key in ("a", 2, "a", 2, "a")]
    pipe = Pipe(layers, [5])
    assert pipe[0].weight is pipe[2].weight is pipe[4].weight
    assert pipe[1].weight is pipe[3].weight
    assert pipe[0].weight is not pipe[1].weight
    assert pipe[0].bias is not pipe[2].bias


def test_weights_depend_on_seed_and_layer_alone() -> None:
    alone = Pipe([TiedLayerSpec("a", nn.Linear, 3, 3)], [1], seed=4)
    pipe = Pipe(
        [TiedLayerSpec("a", nn.Linear, 3, 3), TiedLayerSpec("a", nn.Linear, 3, 3)], [2], seed=4
    )
    assert torch.equal(pipe[1].weight, alone[0].weight)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda pipe: pickle.loads(pickle.dumps(pipe))])
def test_a_copy_is_tied_and_has_its_own_forward_fn(again: Any) -> None:
    layers = gpt()
    layers[4] = Float()
    pipe = Pipe(layers, [7])
    other = again(pipe)
    assert other[6].words.weight is other[0].words.weight
    with torch.no_grad():
        other[0].words.weight.zero_()
    assert (other(tokens) == 0).all()
    assert not (pipe(tokens) == 0).any()


def test_forward_fn_may_call_the_module_itself() -> None:
    def twice(module: nn.Module, x: Tensor) -> Tensor:
        return module(x) + module.forward(x)

    pipe = Pipe([TiedLayerSpec("a", nn.Linear, 3, 3, forward_fn=twice)], [1])
    x = torch.randn(2, 3)
    plain = F.linear(x, pipe[0].weight, pipe[0].bias)
    assert torch.equal(pipe(x), plain + plain)


def test_dropout_of_a_tied_layer_follows_eval() -> None:
    def drop(module: nn.Module, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5, module.training)

    pipe = Pipe([TiedLayerSpec("a", nn.Linear, 3, 3, forward_fn=drop)], [1])
    x = torch.ones(20, 3)
    assert not torch.equal(pipe(x), x)
    assert torch.equal(pipe.eval()(x), x)


def test_a_tied_weight_is_counted_where_it_comes_first() -> None:
    first = TiedLayerSpec("a", nn.Embedding, 100, 4)
    last = TiedLayerSpec("a", nn.Embedding, 100, 4, forward_fn=lambda m, x: x @ m.weight.mT)
    layers = [first, nn.Linear(4, 60), nn.Linear(60, 4), last]
    assert balance_by_parameters(2, layers) == [1, 3]
    found = profile(layers, torch.arange(4), timeout=0.0)
    assert [layer.parameter_bytes for layer in found.layers] == [1600, 1200, 976, 0]


WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "shape": (
        lambda: TiedLayerSpec("a", nn.Linear, 3, 4),
        ValueError,
        r"'weight' of this Linear is a parameter torch.float32 \[4, 3\].*key 'a' is .*\[3, 3\]",
    ),
    "dtype": (
        lambda: TiedLayerSpec("a", nn.Linear, 3, 3, dtype=torch.float64),
        ValueError,
        r"torch.float64 \[3, 3\].*torch.float32 \[3, 3\]",
    ),
    "kind": (
        lambda: TiedLayerSpec("a", nn.BatchNorm1d, 3, tied_weight_attr="running_mean"),
        (ValueError, AttributeError),
        "running_mean",
    ),
    "missing": (
        lambda: TiedLayerSpec("a", nn.Linear, 3, 3, tied_weight_attr="kernel"),
        AttributeError,
        "tied_weight_attr='kernel': Linear has no parameter",
    ),
    "no tensor": (
        lambda: TiedLayerSpec("a", nn.Linear, 3, 3, tied_weight_attr="in_features"),
        AttributeError,
        r"tied_weight_attr='in_features': .*no parameter",
    ),
    "name": (
        lambda: TiedLayerSpec("a", nn.Linear, 3, 3, tied_weight_attr=3),
        TypeError,
        "tied_weight_attr=3",
    ),
    "names": (
        lambda: TiedLayerSpec("a", nn.Linear, 3, 3, tied_weight_attr=[]),
        TypeError,
        r"tied_weight_attr=\[\]",
    ),
    "forward_fn": (
        lambda: TiedLayerSpec("a", nn.Linear, 3, 3, forward_fn="linear"),
        TypeError,
        "forward_fn='linear': must be a function",
    ),
}  # fmt: skip


@pytest.mark.parametrize("balance", [[2], "parameters"])
@pytest.mark.parametrize("what", WRONG)
def test_ties_that_cannot_be_are_refused(what: str, balance: Any) -> None:
    make, kind, message = WRONG[what]
    with pytest.raises(kind, match=message):
        Pipe([TiedLayerSpec("a", nn.Linear, 3, 3), make()], balance, devices=["cpu"])


def test_an_attribute_that_nobody_has_is_refused_where_nothing_is_tied_yet() -> None:
    with pytest.raises(AttributeError, match="tied_weight_attr='kernel'") as caught:
        Pipe([TiedLayerSpec("a", nn.Linear, 3, 3, tied_weight_attr="kernel")], [1])
    assert "layer 0 ('0': TiedLayerSpec('a', Linear, 3, 3))" in caught.value.__notes__[0]
