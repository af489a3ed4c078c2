"""Nothing but memory shows that cells are computed again, whatever changed since, and in layers.

Which of them are, and how often, is in ``tests/pipe/test_checkpoint.py``.
"""

from __future__ import annotations

import copy
from itertools import accumulate

import pytest
import torch
from torch import nn
from torch.nn.utils import spectral_norm as old_spectral_norm
from torch.nn.utils.parametrizations import spectral_norm

from syncpipe import Pipe, Selective, is_recomputing
from syncpipe.data.trees import tensors_in
from syncpipe.skip import pop, skippable, stash
from tests.support.models import in_turn
from tests.support.running import (
    MODES,
    Do,
    Using,
    assert_same,
    beside,
    pipe_of,
    trained,
    weigh,
)
from tests.support.watched import Memory, Watched, alive, gone

# Memory


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("end", ["backward", "backwards", "dropped"])
def test_activations_of_recomputed_cells_are_dropped_until_backward(end, mode):
    pipe = pipe_of(nn.Sequential(Watched(), Watched()), checkpoint=mode)
    x = torch.randn(8, 3, requires_grad=True)
    references, kept = [Memory(x)], {"never": 4, "except_last": 1, "always": 0}[mode]
    y = pipe(x)
    for layer in pipe:
        assert len(layer.made) == 4
        assert alive(layer.made) == kept
    for _ in range(2 if end == "backwards" else 0):  # a retained graph keeps nothing recomputed
        y.sum().backward(retain_graph=True)
        assert sum(alive(layer.made) for layer in pipe) == 2 * kept
    if end == "backward":
        y.sum().backward()
        assert all(gone(layer.made) for layer in pipe)
    del x, y
    assert gone([*references, *pipe[0].made, *pipe[1].made])


def test_recomputed_activations_are_freed_as_backward_goes_on():
    most = []
    watch = Watched()
    count = Do(lambda x: x.register_hook(lambda _: most.append(alive(watch.made))) and None)
    pipe = pipe_of(nn.Sequential(count, watch, nn.Tanh()), [2, 1], chunks=8, checkpoint="always")
    pipe(torch.randn(16, 3, requires_grad=True)).sum().backward()
    assert most
    assert max(most) <= 2  # the cell that goes back, and the next one that is recomputed early


# Layers that do not keep the rules


@pytest.mark.parametrize(
    ("again", "message"),
    [
        (lambda x: x[:1].exp().sin(), "gave another result"),
        (lambda x: x.double().exp().sin(), "gave another result"),
        (lambda x: x + 1, "gave another result"),
        (lambda x: x.exp().sin() * 1, "stored other tensors"),
    ],
    ids=["another shape", "another dtype", "nothing stored", "more stored"],
)
@pytest.mark.parametrize("j", [0, 1])
def test_a_layer_that_does_something_else_the_second_time_is_an_error(j, again, message):
    layers = [nn.Tanh(), nn.Tanh()]
    layers[j] = Do(lambda x: again(x) if is_recomputing() else x.exp().sin())
    pipe = pipe_of(nn.Sequential(*layers), checkpoint="always")
    y = pipe(torch.randn(8, 3, requires_grad=True))
    with pytest.raises(RuntimeError, match=rf"{j} .*{message}") as caught:
        y.sum().backward()
    assert "is_recomputing()" in str(caught.value)


class Counts(nn.Module):
    """Computes by how often it was called, which it keeps in a place of its own."""

    def __init__(self, give):
        super().__init__()
        self.linear, self.give, self.calls = nn.Linear(3, 3), give, []

    def forward(self, x):
        self.calls.append(len(x))
        return self.give(self.linear(x), 1 / len(self.calls))


@skippable(stash=["far"])
class Stashes(Counts):
    def forward(self, x):
        yield stash("far", super().forward(x))
        return x


@skippable(pop=["far"])
class Pops(nn.Module):
    def forward(self, x):
        return x + (yield pop("far"))


COUNTERS = {
    "a number": lambda: Counts(lambda x, number: x * number),
    "rows": lambda: Counts(lambda x, number: x.roll(int(1 / number), 0)),
    "a dict": lambda: nn.Sequential(Counts(lambda x, number: {"x": x, "more": [x * number]})),
    "complex": lambda: Counts(lambda x, number: torch.complex(x, x * number).conj()),
    "a skip": lambda: Stashes(lambda x, number: x * number),
}


def step_of(pipe, driver, x):
    if driver == "pipe(x)":
        pipe(x).sum().backward()
    else:
        pipe.train_batch(x, loss_fn=torch.sum, verify=False)


@pytest.mark.parametrize("driver", ["pipe(x)", "train_batch"])
@pytest.mark.parametrize("mode", ["always", "except_last", [0, 1]])
@pytest.mark.parametrize("kind", COUNTERS)
def test_what_counts_its_calls_is_refused(kind, mode, driver):
    last = Pops() if kind == "a skip" else Do(lambda y: tensors_in(y)[-1].abs())
    layers = nn.Sequential(nn.Linear(3, 3), COUNTERS[kind](), last)
    pipe = pipe_of(layers, [2, 1], checkpoint=mode, chunks=3)
    with pytest.raises(RuntimeError, match="gave another result when it was recomputed"):
        step_of(pipe, driver, torch.randn(21, 3, requires_grad=True))


@pytest.mark.parametrize("driver", ["pipe(x)", "train_batch"])
def test_a_hook_of_a_partition_that_counts_is_refused(driver):
    pipe = pipe_of(nn.Sequential(nn.Linear(3, 3), nn.Tanh()), checkpoint="always")
    calls: list[None] = []
    pipe.partitions[0].register_forward_hook(
        lambda *given: (calls.append(None), given[-1] * len(calls))[1]
    )
    with pytest.raises(
        RuntimeError, match=r"stage 0 .* gave another result when it was recomputed"
    ):
        step_of(pipe, driver, torch.randn(21, 3, requires_grad=True))


def jagged(x):
    return torch.nested.as_nested_tensor(list(x), layout=torch.jagged)


VIEWS = {
    "conjugated when read": (lambda x: torch.complex(x, x * 0.5).conj(), lambda z: z.real + z.imag),
    "negated when read": (lambda x: torch.complex(x, x * 0.5).conj().imag, lambda z: z * 2),
    "several": (lambda x: (torch.complex(x, x).conj(), x), lambda pair: (pair[0] * pair[1]).real),
    "jagged": (jagged, lambda z: z.to_padded_tensor(0.0)),
    "jagged in a dict": (
        lambda x: {"x": x, "y": jagged(x)},
        lambda tree: tree["y"].sin().to_padded_tensor(0.0) + tree["x"],
    ),
}


@pytest.mark.parametrize("mode", [*MODES, [1], [1, 2]])
@pytest.mark.parametrize("kind", VIEWS)
def test_what_is_no_plain_memory_crosses_to_stages_that_are_recomputed(kind, mode):
    layers = nn.Sequential(nn.Linear(3, 3), *map(Do, VIEWS[kind]), nn.Linear(3, 3))
    pipe, x = pipe_of(copy.deepcopy(layers), [2, 2], checkpoint=mode, chunks=2), torch.randn(4, 3)
    assert_same(trained(pipe, pipe, x), trained(in_turn(layers, 2), layers, x))


# TorchScript. Since Python 3.13 torch.jit.script keeps the frames that call it, with what their
# variables are later: a pipe among them would never die.


@pytest.fixture
def scripted():
    return torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))


@pytest.mark.parametrize("chunks", [1, 2])
def test_torch_script_may_be_recomputed_from_its_first_run_on(scripted, chunks):
    layers = nn.Sequential(nn.Linear(4, 4), scripted, nn.Linear(4, 4))
    pipe = pipe_of(layers, [1, 2], chunks=chunks, checkpoint="always")
    for size in (6, 6, 6, 4):
        x = torch.randn(size, 4)
        ours = trained(pipe, pipe, x)
        # Not to the last bit: TorchScript compiles itself meanwhile.
        assert_same(trained(in_turn(layers, 4), layers, x), ours, rounded=True)


# What a recomputation starts from: what changed since the forward is put back, or refused.

X = torch.randn(12, 6, generator=torch.Generator().manual_seed(7))


class Block(nn.Module):
    """What it gives depends on its mode and on a buffer."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.Identity()
        self.register_buffer("shift", torch.ones(()))

    def forward(self, x):
        x = self.norm(self.linear(x)) + self.shift
        return x.tanh() if self.training else x.sigmoid()


# Between forward and backward

CHANGES = {
    "eval()": lambda m: m.eval(),
    "eval() of a layer": lambda m: m[0].eval(),
    "frozen": lambda m: m.requires_grad_(False),
    "a parameter replaced": lambda m: setattr(m[0].linear, "bias", nn.Parameter(torch.ones(6))),
    "a buffer modified": lambda m: m[0].shift.fill_(3),
    "a buffer replaced": lambda m: setattr(m[0], "shift", torch.tensor(3.0)),
}


@pytest.mark.parametrize("mode", ["except_last", "always"])
@pytest.mark.parametrize("kind", CHANGES)
def test_what_changed_since_the_forward_is_as_it_was(kind, mode):
    layers, found, modes = blocks(), [], []
    ours = pipe_of(copy.deepcopy(layers), checkpoint=mode)
    trained(ours, ours, X)  # not new any more
    ours.zero_grad()
    for module, run in ((layers, in_turn(layers, 4)), (ours, ours)):
        loss, parameters = weigh(run(X.clone().requires_grad_())), list(module.parameters())
        CHANGES[kind](module)
        loss.backward()
        found.append([p.grad for p in parameters])
        modes.append([m.training for m in module.modules()])
    assert_same(*found)
    assert_same(modes[1][-len(modes[0]) + 1 :], modes[0][1:])  # what was set meanwhile stays


class Times(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, x):
        return x * self.weight


def frozen():
    return nn.Sequential(Times().requires_grad_(False), nn.Linear(6, 6))


def blocks():
    return nn.Sequential(Block(), Block())


def triple(layer):
    with torch.no_grad():
        layer.weight.mul_(3)


def put_norm(block):
    block.norm = nn.BatchNorm1d(6)


MODIFIED = r"a parameter \(float32.* modified in place between forward and backward"


@pytest.mark.parametrize(
    ("layers", "x", "change", "message"),
    [
        (frozen, X, triple, MODIFIED),
        (blocks, X, put_norm, r"modules of stage 0.*new: BatchNorm1d; gone: Identity"),
    ],
    ids=["frozen parameter", "another module"],
)
def test_what_cannot_be_as_it_was_is_refused(layers, x, change, message):
    pipe = pipe_of(layers(), checkpoint="always")
    loss = weigh(pipe(x.clone().requires_grad_() if x.is_floating_point() else x))
    change(pipe[0])
    with pytest.raises(RuntimeError, match=message):
        loss.backward()


# Between calls, and in them


class MakesItself(nn.Module):
    """Makes its parameter when it sees its first input."""

    def forward(self, x):
        if not hasattr(self, "weight"):
            self.weight = nn.Parameter(torch.full(x.shape[1:], 0.5))
        return (x * self.weight).tanh()


def squares(y):
    return y.square().sum()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("driver", ["pipe(x)", "train_batch"])
@pytest.mark.parametrize(
    "make", [MakesItself, lambda: nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d())]
)
def test_layers_may_make_their_parameters_in_the_first_call(make, driver, mode):
    pipe = pipe_of(nn.Sequential(make(), make()), checkpoint=mode)
    if driver == "pipe(x)":
        squares(pipe(X)).backward()
    else:
        pipe.train_batch(X, loss_fn=squares, loss_reduction="sum", schedule="gpipe")
    ours = [p.grad.clone() for p in pipe.parameters()]
    assert all(count == 4 for name, count in pipe.named_buffers() if "tracked" in name)
    pipe.zero_grad()
    squares(in_turn(nn.Sequential(*pipe), 4)(X)).backward()
    assert_same(ours, [p.grad for p in pipe.parameters()])


LATER = {
    "a value": lambda block: block.shift.fill_(2),
    "a batch norm": put_norm,
    "a parametrization": lambda block: spectral_norm(block.linear),
    "a hook with buffers": lambda block: old_spectral_norm(block.linear),
}


@pytest.mark.parametrize("kind", LATER)
def test_buffers_that_come_into_a_layer_between_calls_are_known(kind):
    layers = blocks()
    other = copy.deepcopy(layers)
    pipe = pipe_of(layers, checkpoint="always")
    weigh(pipe(X)).backward()
    for module in (layers, other):
        torch.manual_seed(1)
        LATER[kind](module[0])
    for _ in range(2):
        ours = trained(pipe, pipe, X)
        assert_same(ours, trained(in_turn(other, 4), other, X), rounded=["parameter_grads"])


# Inputs


class Box:
    def __init__(self, x):
        self.x = x


class Slim:
    __slots__ = ("x",)

    def __init__(self, x):
        self.x = x


@pytest.mark.parametrize("made", [Box, Slim])
@pytest.mark.parametrize("what", ["nothing", "sets", "modifies"])
def test_an_object_that_a_layer_changes_is_refused(what, made):
    changes = {
        "nothing": lambda box: None,
        "sets": lambda box: setattr(box, "x", box.x.tanh()),
        "modifies": lambda box: setattr(box, "x", box.x.add_(1)),
    }
    layers = nn.Sequential(Do(made), Do(changes[what]), Do(lambda box: box.x))
    balance = [3] if what == "nothing" else [1, 1, 1]  # a graph goes to no other stage in it
    pipe = Pipe(layers, balance, devices=["cpu:0"] * len(balance), chunks=4, checkpoint="always")
    x = X.clone().requires_grad_()
    if what == "nothing":
        pipe(x * 1).sum().backward()
        assert torch.equal(x.grad, torch.ones_like(x))
        return
    with pytest.raises(RuntimeError, match=rf"stage 1 .*attribute 'x' of the {made.__name__}"):
        pipe(x * 1)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("chunks", [1, 2])
def test_an_input_that_is_given_twice_is_one_tensor(chunks, mode):
    add = Do(lambda pair: pair[0].relu_() + pair[1])
    pipe = pipe_of(nn.Sequential(add, nn.Linear(6, 6)), chunks=chunks, checkpoint=mode)
    x = X.clone()
    assert torch.equal(pipe((x, x)), pipe[1](X.relu() * 2))


# Buffers: what they cost, and what is done to them without a trace

SIZE = 1 << 20


class Table(nn.Module):
    """Reads a large buffer, and does something to it in forwards of samples that are negative."""

    def __init__(self, act, size=SIZE):
        super().__init__()
        self.linear, self.act = nn.Linear(4, 4), act
        self.register_buffer("table", torch.ones(size // 4))

    def forward(self, x):
        if x[0, 0] < 0:
            with torch.no_grad():
                ACTS[self.act](self)
        return self.linear(x) * self.table[:4].clone()


ACTS = {
    "replaces": lambda m: setattr(m, "table", m.table * 1.25),
    "in place": lambda m: m.table.mul_(1.25),
    "untraced": lambda m: m.table.data.mul_(1.25),
}


def most_bytes(pipe, x):
    """How many bytes more than before a call has at most."""
    with torch.profiler.profile(profile_memory=True) as profiler:
        pipe.train_batch(x, loss_fn=lambda y: y.mean(), schedule="gpipe")
    events = profiler.profiler.kineto_results.events()
    memory = sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns())
    return max(accumulate((e.nbytes() for e in memory), initial=0))


@pytest.mark.parametrize("mode", ["always", "except_last", [0], Selective([])])
@pytest.mark.parametrize("act", ["replaces", "in place"])
def test_recomputation_takes_no_memory_for_buffers_that_stay_as_they_are(act, mode):
    x, counts = torch.ones(16, 4), []
    for checkpoint in ("never", mode):
        fresh, pipe = (
            Pipe(nn.Sequential(Table(act)), [1], chunks=8, checkpoint=checkpoint) for _ in range(2)
        )
        pipe.train_batch(-x, loss_fn=torch.mean)  # all change it
        counts.append([most_bytes(each, x) for each in (fresh, fresh, pipe, pipe)])
    more = [round((b - a) / SIZE) for a, b in zip(*counts, strict=True)]
    # All that is new to a layer is copied once; what the last call changed, once for each version.
    assert more == [mode == [0], 0, act == "in place", 0]


@pytest.mark.parametrize("mode", ["always", "except_last", [0], Selective([])])
@pytest.mark.parametrize("acts", [[0, 1, 2, 3], [0], [3], [0, 2], [7], [0, 9, 13]])
@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("size", [32, SIZE])
def test_buffers_that_some_forwards_change_are_right_or_refused(size, act, acts, mode):
    if act == "untraced" and size == SIZE and acts[0] % 4:
        pytest.skip("not noticed: see docs/limits.md")
    layers = nn.Sequential(Table(act, size), nn.Linear(4, 4))
    plain, refused = copy.deepcopy(layers), 0
    pipe = Pipe(layers, [1, 1], devices=["cpu:0", "cpu:1"], chunks=4, checkpoint=mode)
    for step in range(min(6, acts[-1] // 4 + 4)):
        x = torch.rand(8, 4)
        for i in acts:
            if i // 4 in (step, step - 2):
                x[2 * (i % 4)] *= -1
        before = copy.deepcopy(layers.state_dict())
        try:
            ours = trained(pipe, pipe, x)
        except RuntimeError as error:
            refused += "the buffer 'table'" in str(error)
            layers.load_state_dict(before)
            ours = trained(pipe, pipe, x)
        assert_same(trained(in_turn(plain, 4), plain, x), ours)
    assert refused <= (size == SIZE and act != "replaces" and (mode == [0] or acts[0] % 4 > 0))


@pytest.mark.parametrize("mode", ["always", "except_last", [0], Selective([])])
@pytest.mark.parametrize("make", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("wrap", [lambda layer: layer, lambda layer: Using(call, layer)])
def test_rows_that_are_shortened_once_more_by_their_last_bit(wrap, make, mode):
    rows = wrap(make(7, 5, max_norm=0.7))
    pipe, run, plain = beside(mode, nn.Sequential(rows, nn.Tanh(), nn.Linear(5, 3)), [2, 1])
    x = torch.randint(0, 7, (16, 2))
    for each in (pipe, run):
        each(x).square().sum().backward()
    tensors = [[*m.parameters(), *[p.grad for p in m.parameters()]] for m in (pipe, plain)]
    assert_same(*tensors)


@pytest.mark.parametrize("mode", ["always", [0], [0, 1]])
def test_an_embedding_may_begin_to_shorten_rows_between_calls(mode):
    layers = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8))
    x, results = torch.arange(8), []
    for max_norms in (None, 0.5), (0.5,):
        pipe = Pipe(copy.deepcopy(layers), [2], devices=["cpu:0"], chunks=4, checkpoint=mode)
        for pipe[0].max_norm in max_norms:
            loss = pipe.train_batch(x, loss_fn=lambda y: y.square().mean(), schedule="gpipe")
        results.append(loss)
    assert torch.equal(*results)


@pytest.mark.parametrize("mode", ["always", "except_last", "never", [1], [0, 1], Selective([])])
def test_rows_that_are_shortened_after_another_layer_read_them_are_refused(mode):
    layers = nn.Sequential(nn.Embedding(8, 4, max_norm=0.5), nn.Linear(4, 8, bias=False))
    layers[1].weight = layers[0].weight
    pipe = Pipe(layers, [2], devices=["cpu:0"], chunks=4, checkpoint=mode)
    with pytest.raises(RuntimeError, match=r"modified (in place|by an inplace operation)"):
        pipe.train_batch(torch.arange(8), loss_fn=lambda y: y.square().mean(), schedule="gpipe")


def call(x, layer):
    return layer(x)
