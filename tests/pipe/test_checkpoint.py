"""``checkpoint=``: a function of the layer, a list of layers, ``Selective(...)``."""

from __future__ import annotations

import copy
import pickle
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from syncpipe import Pipe, Selective, inline, is_checkpointing, is_recomputing
from tests.support.compare import assert_same
from tests.support.training import FOUR, KINDS, RUNS
from tests.support.watched import Memory, alive, gone

ops = torch.ops.aten
PRODUCTS = [ops.mm.default, ops.addmm.default]


class Counted(nn.Module):
    """Counts its runs, and what it was told in each."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.told: list[tuple[bool, bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.told.append((is_checkpointing(), is_recomputing()))
        return self.linear(x).tanh()

    @property
    def again(self) -> int:
        return self.told.count((False, True))


class Other(Counted):
    pass


def pipe_of(checkpoint: Any, balance: tuple[int, ...] = (4, 2), **options: Any) -> Pipe:
    layers = nn.Sequential(*[(Other if k % 2 else Counted)() for k in range(6)])
    options = {"chunks": 2, "devices": FOUR[: len(balance)], **options}
    return Pipe(layers, balance, checkpoint=checkpoint, **options)


def again(pipe: Pipe) -> list[int]:
    return [layer.again for layer in pipe]


def forward(pipe: Pipe, x: Tensor | None = None) -> None:
    pipe(torch.randn(4, 3) if x is None else x).square().sum().backward()


def train(pipe: Pipe, x: Tensor | None = None) -> None:
    x = torch.randn(4, 3) if x is None else x
    pipe.train_batch(x, loss_fn=lambda y: y.square().mean())


def by_function(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    save = op in PRODUCTS
    return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE


every_driver = pytest.mark.parametrize("run", [forward, train])
BY_LAYER = {
    "function": (lambda layer: isinstance(layer, Other), [1, 3, 5]),
    "indices": ([1, 2, -1], [1, 2, 5]),
    "bools": ([False, True, True, False, False, True], [1, 2, 5]),
    "range": (range(2, 6), [2, 3, 4, 5]),
    "groups": ([(0, 1), range(3, 6)], [0, 1, 3, 4, 5]),
    "one stage": (["never", [5]], [5]),
    "the other": ([[1], "always"], [1, 4, 5]),
    "both": ([lambda layer: isinstance(layer, Other), "never"], [1, 3]),
}


# --- what is recomputed, and what is kept ----------------------------------------------------


@every_driver
@pytest.mark.parametrize("way", BY_LAYER)
def test_the_layers_that_are_named_are_recomputed_and_no_others(way, run):
    checkpoint, named = BY_LAYER[way]
    pipe = pipe_of(checkpoint)
    run(pipe)
    for k, layer in enumerate(pipe):
        assert [told for told in layer.told if not told[1]] == [(k in named, False)] * 2
        assert layer.again == (2 if k in named else 0)


class Centered(nn.Module):
    """Moves a buffer in each forward, and hands it on."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(3))
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            self.center.mul_(0.5).add_(x.mean(0))
        return self.linear(x), self.center


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return self.linear(pair[0] + pair[1]), pair[1]


class Product(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0] * pair[1]


@every_driver
@pytest.mark.parametrize("named", [[0, 1, 2, 3], [1, 2, 3], [3], [(1, 2), 3]])
def test_a_buffer_that_a_layer_hands_on_is_the_next_ones_as_it_was(named, run):
    layers = nn.Sequential(Centered(), Shifted(), Shifted(), Product())
    plain = copy.deepcopy(layers)
    pipe = Pipe(layers, [4], devices=FOUR[:1], chunks=4, checkpoint=named)
    x = torch.randn(8, 3)
    run(pipe, x)
    for part in x.chunk(4):
        y = plain(part)
        (y.square().sum() if run is forward else y.square().sum() / 24).backward()
    assert_same(
        [p.grad for p in pipe.parameters()], [p.grad for p in plain.parameters()], rounded=True
    )
    assert torch.equal(pipe[0].center, plain[0].center)


#: Of stages with these modes how often the layers are computed again, by what is run.
OWN_MODES = ("except_last", "never", "always", "never")
SOME, NONE = (3, 0, 4, 0, 0, 0), (0,) * 6
AGAIN = {
    **dict.fromkeys(["pipe(x)", "inline", *KINDS], SOME),
    **dict.fromkeys(["eval", "no_grad", "inference_mode", "no backward"], NONE),
    "two samples": (1, 0, 2, 0, 0, 0),
}
CONTEXTS = {"inline": inline, "no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


@pytest.mark.parametrize("run", AGAIN)
def test_each_stage_recomputes_as_its_own_mode_says(run):
    options, devices = RUNS.get(run, ({}, FOUR))
    pipe = pipe_of("never", (1, 1, 1, 3), devices=devices, chunks=4)
    pipe.checkpoint = list(OWN_MODES)
    assert pipe.checkpoint == OWN_MODES
    x = torch.randn(2 if run == "two samples" else 8, 3)
    with CONTEXTS.get(run, torch.enable_grad)():
        if run in KINDS:
            pipe.train_batch(x, loss_fn=torch.mean, **options)
        elif (y := pipe.train(run != "eval")(x)).requires_grad and run != "no backward":
            y.sum().backward()
    assert tuple(again(pipe)) == AGAIN[run]
    dropped = tuple(layer.told.count((True, False)) for layer in pipe)
    assert dropped == (SOME if run == "no backward" else AGAIN[run])
    assert (is_checkpointing(), is_recomputing()) == (False, False)


@every_driver
@pytest.mark.parametrize(
    ("checkpoint", "stored"), [("never", 6), ([1, 2, 3], 3), ([(1, 2, 3)], 1), ([1, (2, 3)], 2)]
)
def test_a_layer_keeps_its_input_and_a_group_that_of_its_first_layer(checkpoint, stored, run):
    made: list[Memory] = []
    counts: list[int] = []

    class Make(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            inner = x.sin()
            outer = inner.sin()  # what the next layer starts from
            if not is_recomputing():
                made.extend((Memory(inner), Memory(outer)))
            return outer

    class Count(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            counts.append(alive(made))
            return x.clone()

    layers = nn.Sequential(nn.Linear(3, 3), Make(), Make(), Make(), Count())
    pipe = Pipe(layers, [1, 4], devices=FOUR[:2], chunks=1, checkpoint=["never", checkpoint])
    for _ in range(2):  # in its first call a pipe makes copies of inputs
        made.clear()
        run(pipe)
    assert counts[-1] == stored
    assert gone(made)


class Products(nn.Module):
    """A product and a tanh, which remembers what it made when."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3))
        self.products: list[Memory] = []
        self.others: list[Memory] = []
        self.addresses: list[int] = []
        self.told: list[tuple[bool, bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.told.append((is_checkpointing(), is_recomputing()))
        y = x.mm(self.weight)
        z = y.tanh()
        self.addresses.append(y.data_ptr())
        if not is_recomputing():
            self.products.append(Memory(y))
            self.others.append(Memory(z))
        return z.exp()


@every_driver
def test_what_a_policy_saves_is_kept_and_comes_back_and_nothing_else(run):
    layer, look = Products(), []

    class Look(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            look.append((alive(layer.products), alive(layer.others)))
            return x.clone()

    layers = nn.Sequential(layer, nn.Linear(3, 3), Look())
    modes = [Selective([ops.mm.default]), "never"]
    pipe = Pipe(layers, [2, 1], devices=FOUR[:2], chunks=1, checkpoint=modes)
    for _ in range(2):
        layer.products.clear()
        layer.others.clear()
        run(pipe, torch.randn(4, 3, requires_grad=True))
    if run is forward:  # else stage 0 may be computing again already
        assert look[-1] == (1, 0)
    assert layer.told[-2:] == [(True, False), (False, True)]
    assert layer.addresses[-2] == layer.addresses[-1]  # the very tensor
    assert gone(layer.products)


class Draws(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)
        return (y * torch.rand_like(y)).sin() * torch.randn_like(y)


@every_driver
def test_what_is_drawn_after_something_that_a_policy_saves_is_the_same(run):
    found = []
    for mode in ("never", Selective([ops.rand_like.default])):
        torch.manual_seed(0)
        pipe = Pipe(nn.Sequential(Draws(3, 3)), [1], chunks=2, checkpoint=mode)
        run(pipe, torch.ones(4, 3))
        found.append([p.grad for p in pipe.parameters()])
    assert_same(*found)


# --- what users do with it -------------------------------------------------------------------


def test_it_can_be_set_and_the_balance_cuts_what_is_named():
    pipe = pipe_of("never")
    pipe.checkpoint = [(2, 3, 4)]
    assert pipe.checkpoint == ((2, 3, 4),)
    for balance in ([4, 2], [3, 3]):
        pipe.balance = balance
        for layer in pipe:
            layer.told.clear()
        forward(pipe)
        assert again(pipe) == [0, 0, 2, 2, 2, 0]
    pipe.eval()
    forward(pipe)
    assert again(pipe) == [0, 0, 2, 2, 2, 0]


@pytest.mark.parametrize("checkpoint", [[1, (2, 3)], Selective(by_function)])
def test_copies_and_pickles_keep_it(checkpoint):
    pipe = pipe_of(checkpoint)
    for copied in (copy.deepcopy(pipe), pickle.loads(pickle.dumps(pipe))):
        assert repr(copied.checkpoint) == repr(pipe.checkpoint)
        forward(copied)
        assert again(copied) == (
            [2] * 6 if isinstance(checkpoint, Selective) else [0, 2, 2, 2, 0, 0]
        )


def test_a_policy_is_printed_and_refused():
    assert repr(Selective([ops.mm.default])) == f"Selective([{ops.mm.default!r}])"
    context_fn = partial(create_selective_checkpoint_contexts, PRODUCTS)
    assert isinstance(pipe_of(context_fn).checkpoint, Selective)
    with pytest.raises(TypeError, match="must be a list of operations"):
        Selective(3)
    with pytest.raises(ValueError, match="OpOverload"):
        Selective([torch.mm])


class Last(nn.Module):
    """What a recurrent layer gave, whose kernels work in place."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.recurrent = kind(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.recurrent(x[None])[0][0]
        return y + x.mm(x.t()).sum()


#: What PyTorch itself refuses when it is recomputed, and what it does not see.
REFUSED = {
    (nn.GRU, "addmm"): "through a view without versions",
    (nn.GRU, "add"): "has been mutated",
    (nn.RNN, "addmm"): "has been mutated",
}


@every_driver
@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN])
@pytest.mark.parametrize("saved", ["mm", "addmm", "tanh", "add"])
def test_what_a_kernel_writes_into_unseen_is_not_saved(saved, kind, run):
    operation = getattr(getattr(ops, saved), "Tensor" if saved == "add" else "default")
    found = []
    for mode in ("never", Selective([operation])):
        torch.manual_seed(0)
        pipe = Pipe([nn.Linear(3, 3), Last(kind)], [1, 1], chunks=2, checkpoint=mode)
        message = None if mode == "never" else REFUSED.get((kind, saved))
        with pytest.raises(RuntimeError, match=message) if message else nullcontext():
            run(pipe, torch.ones(4, 3))
        found.append([p.grad for p in pipe.parameters()])
    if not message:
        assert_same(*found)


def test_functions_of_torch_func_name_the_mode_that_can_recompute_them():
    class Slope(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return torch.func.grad(lambda x: F.linear(x, self.weight).square().sum())(x)

    layers = nn.Sequential(nn.Linear(3, 3), Slope(3, 3))
    with pytest.raises(RuntimeError) as caught:
        forward(Pipe(layers, [2], chunks=2, checkpoint=[1]))
    assert any("checkpoint='always'" in note for note in caught.value.__notes__)
    forward(Pipe(layers, [2], chunks=2, checkpoint="always"))
