"""A pipe leaves one true autograd graph behind: all that autograd can do works, in every mode."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from syncpipe import inline
from tests.support.models import in_turn
from tests.support.running import (
    MODES,
    Do,
    Using,
    assert_same,
    beside,
    in_threads,
    pipe_of,
    trained,
    weigh,
)

pytestmark = pytest.mark.parametrize("mode", [*MODES, [0, 1]], ids=str)


def model():
    return nn.Sequential(
        nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)
    )


@pytest.fixture
def x():
    return torch.randn(8, 6)


def grads(module):
    return [p.grad for p in module.parameters()]


def tied():
    layers = model()
    layers[0] = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8))
    layers[0][1].weight = layers[2].weight
    return layers


@pytest.mark.parametrize(("make", "replicas"), [(model, 1), (model, 2), (tied, 1)])
def test_one_pipe_called_from_several_threads(mode, make, replicas):
    devices = [f"cpu:{k}" for k in range(2 * replicas)]
    pipe, reference, copied = beside(mode, make(), replicas=replicas, devices=devices)
    inputs = [torch.randn(8, 6) for _ in range(3)]

    def gradients(run, module, x):
        leaf = x.clone().requires_grad_()
        return torch.autograd.grad(weigh(run(leaf)), [leaf, *module.parameters()])

    def several(x):
        found = []
        for k in range(24):
            with inline() if k % 4 == 3 else nullcontext():
                found.append(gradients(pipe, pipe, x))
        return found

    expected = [gradients(reference, copied, x) for x in inputs]
    for found, right in zip(in_threads(several, *inputs), expected, strict=True):
        for result in found:
            assert_same(result, right, rounded=replicas > 1 or make is tied)


# --- what gradients are used for -------------------------------------------------------------


def chosen_inputs(run, module, x):
    chosen = [module[2].weight, module[4].bias]
    weigh(run(x)).backward(inputs=chosen)
    for parameter in module.parameters():
        assert (parameter.grad is not None) == any(parameter is each for each in chosen)
    return [parameter.grad for parameter in chosen]


def asked_for(run, module, x):
    last = list(module[4].parameters())
    found = [
        torch.autograd.grad(weigh(run(x)), those)
        for those in ([x], [*module.parameters()], [x, *module.parameters()], last)
    ]
    assert not any(grad is not None for grad in grads(module))
    return sum(found, ())


def retained_graph(run, module, x):
    loss = weigh(run(x))
    for retain in (True, True, False):
        loss.backward(retain_graph=retain)
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()
    return grads(module)


def some_samples(run, module, x):
    for part in slice(0, 1), slice(3, 5), slice(7, 8):
        weigh(run(x)[part]).backward()
    return [x.grad, *grads(module)]


def scaled_steps(run, module, x):
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for factor in (1, float("inf"), 1):  # the second step overflows and is left out
        optimizer.zero_grad()
        scaler.scale(weigh(run(x)) * factor).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
    return list(module.parameters())


def two_forwards(run, module, x):  # which of the two goes back first is open
    weigh(run(x) * 2 + run(x.flip(0)).tanh()).backward()
    return [x.grad, *grads(module)]


def one_after_another(run, module, x):
    weigh(run(torch.cat([run(x)] * 2, 1))).backward()
    return [x.grad, *grads(module)]


def second_derivatives(run, module, x):
    wanted = [x, *module.parameters()]
    first = torch.autograd.grad(run(x).square().sum(), wanted, create_graph=True)
    return torch.autograd.grad(sum(g.square().sum() for g in first), wanted)


def several_gradients(run, module, x):
    """``is_grads_batched`` gives tensors that have no memory of their own to the workers."""
    several = torch.linspace(-1, 1, 5 * 8 * 3).view(5, 8, 3)
    return torch.autograd.grad(run(x), [x, *module.parameters()], several, is_grads_batched=True)


def by_functional_call(run, module, x):
    """In its backward, too, a recomputation computes with these parameters."""
    before = dict(module.named_parameters())
    given = {name: (p.detach() * 2 + 1).requires_grad_() for name, p in before.items()}
    pieces = [x] if run is module else x.chunk(4)
    y = torch.cat([torch.func.functional_call(module, given, (piece,)) for piece in pieces])
    assert all(before[name] is p for name, p in module.named_parameters())
    return torch.autograd.grad(weigh(y), [*given.values()])


EXACT = [chosen_inputs, asked_for, retained_graph, some_samples, scaled_steps, by_functional_call]
TO_ROUNDING = [two_forwards, one_after_another, second_derivatives]


@pytest.mark.parametrize("make", [model, tied])
@pytest.mark.parametrize("use", [*EXACT, *TO_ROUNDING, several_gradients])
def test_uses_of_gradients(mode, use, make, x):
    pipe, reference, copied = beside(mode, make())
    ours = use(pipe, pipe, x.clone().requires_grad_())
    theirs = use(reference, copied, x.clone().requires_grad_())
    if use in EXACT and make is model:
        assert_same(ours, theirs)
    else:
        torch.testing.assert_close(ours, theirs)


def jit(run, x):
    return torch.jit.trace(run, x) if isinstance(run, nn.Module) else run


TRANSFORMS = {
    "grad": lambda run, x: torch.func.grad(lambda x: weigh(run(x)))(x),
    "vmap": lambda run, x: torch.func.vmap(run)(torch.stack([x, x.flip(0)])),
    "jacfwd": lambda run, x: torch.func.jacfwd(run)(x),
    "jit.trace": lambda run, x: jit(run, x)(x.sin()),
}


@pytest.mark.filterwarnings("ignore")  # of torch.jit
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_of_functions(mode, transform, x):
    pipe, reference, _ = beside(mode, model())
    torch.testing.assert_close(*[TRANSFORMS[transform](run, x) for run in (pipe, reference)])


class Kept(torch.Tensor):
    """What is made of it is of its class, and ``backward()`` runs without that."""


@pytest.mark.parametrize("devices", [["cpu", "cpu"], ["cpu:0", "cpu:1"]])
def test_a_subclass_of_tensor(mode, devices, x):
    pipe, reference, copied = beside(mode, model(), devices=devices)
    x = x.as_subclass(Kept)
    assert type(pipe(x)) is Kept
    assert_same(trained(pipe, pipe, x), trained(reference, copied, x))


# --- layers out of the ordinary --------------------------------------------------------------


class Again(nn.Module):
    """Uses a weight that it does not register behind its layer."""

    def __init__(self, layer, weight):
        super().__init__()
        self.layer, self.hidden = layer, [weight]

    def forward(self, x):
        return self.layer(x) @ self.hidden[0]


def test_a_tied_weight_used_once_more_behind_its_layer(mode, x):
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    second.weight = first.weight
    layers = [nn.Linear(6, 8), first, nn.Tanh(), Again(second, first.weight), nn.Linear(8, 3)]
    pipe, reference, copied = beside(mode, nn.Sequential(*layers), [3, 2])
    weigh(pipe(x)).backward()
    weigh(reference(x)).backward()
    assert_same(grads(pipe), grads(copied), rounded=True)


def test_one_thread_at_a_time_runs_a_stage_with_buffers(mode, x):
    inside, never = [], threading.Event()

    def alone(x):
        assert not inside
        inside.append(None)
        never.wait(0.02)
        inside.pop()

    layers = nn.Sequential(nn.BatchNorm1d(6), Do(alone), nn.Linear(6, 3))
    in_threads(pipe_of(layers, [3], chunks=2, checkpoint=mode), x, x)


def test_what_a_hook_kept_is_used_outside_with_the_plain_graph_only(mode, x):
    layers, kept = nn.Sequential(nn.Linear(6, 8), nn.Tanh()), []
    layers[1].register_forward_hook(lambda _, args, y: kept.append(y))
    pipe = pipe_of(layers, chunks=1, checkpoint=mode)
    pipe(x)
    with pytest.raises(RuntimeError, match=r"inline\(graph=True\)"):
        kept[-1].sum().backward()
    with inline(graph=True):
        pipe(x)
    kept[-1].sum().backward()
    assert layers[0].weight.grad is not None


def test_a_leaf_of_three_stages_is_added_up_as_in_one_backward(mode):
    leaf, x = torch.randn(100, requires_grad=True), torch.randn(1, 100)
    layers = nn.Sequential(*(Do(lambda x: (x * leaf).sin() + x) for _ in range(3)))
    found = []
    for model in (pipe_of(layers, chunks=1, checkpoint=mode), layers):
        leaf.grad = None
        weigh(model(x)).backward()
        found.append(leaf.grad)
    assert_same(*found)


@pytest.mark.parametrize("what", [0, 2, 4, "input"])
def test_changes_between_forward_and_backward_are_errors(mode, what, x):
    pipe, _, _ = beside(mode, model())
    loss = weigh(pipe(x if what == "input" else x.requires_grad_()))
    with torch.no_grad():
        (x if what == "input" else pipe[what].weight).add_(1)
    with pytest.raises(RuntimeError, match="modified"):
        loss.backward()


class Rows(nn.Module):
    """Adds rows of a table, with a dense gradient or a sparse one, as ``sparse(x)`` tells."""

    def __init__(self, table, sparse) -> None:
        super().__init__()
        self.table, self.sparse = table, sparse

    def forward(self, x):
        rows = torch.zeros(len(x), dtype=torch.long)
        return x + nn.functional.embedding(rows, self.table(), sparse=self.sparse(x))


@pytest.mark.parametrize("first", [False, True])
def test_sparse_and_dense_gradients_of_one_parameter(mode, first, x):
    """What comes from some micro-batches is sparse, or what comes from one of two stages."""
    weight, leaf = nn.Parameter(torch.randn(3, 8)), torch.randn(3, 8, requires_grad=True)
    x[::4], x[2::4] = x[::4].abs(), -x[2::4].abs()
    by_batch = Rows(lambda: weight, lambda x: bool(x[0, 0] > 0) is first)
    by_batch.weight = weight
    layers = [
        Do(lambda x: torch.cat([x, x[:, :2]], 1)), by_batch,
        Rows(lambda: leaf, lambda x: first), Rows(lambda: leaf, lambda x: not first),
    ]  # fmt: skip
    found = []
    for run in (pipe_of(nn.Sequential(*layers)), in_turn(nn.Sequential(*layers), 4)):
        weight.grad = leaf.grad = None
        weigh(run(x)).backward()
        found.append([weight.grad.to_dense(), leaf.grad.to_dense()])
    torch.testing.assert_close(*found)


class Centered(nn.Module):
    """Moves a buffer, which may be large, in each forward."""

    def __init__(self, move, size=6):
        super().__init__()
        self.linear, self.move = nn.Linear(6, 6), move
        self.register_buffer("center", torch.zeros(size))

    def forward(self, x):
        with torch.no_grad():
            self.move(self, x.mean())
        return (self.linear(x) - self.center[:6].clone()).tanh()


def in_place(layer, mean):
    layer.center.mul_(0.5).add_(mean)


def past_its_version(layer, mean):
    layer.center.data.mul_(0.5).add_(mean)


def times_rows(x, rows):
    return x * rows(torch.arange(6)).sum(0)


def by_another(layer, mean):
    layer.center = layer.center * 0.5 + mean


@pytest.mark.parametrize(
    "make",
    [
        lambda: spectral_norm(nn.Linear(6, 6)),
        lambda: nn.Sequential(nn.BatchNorm1d(6), nn.Tanh()),
        lambda: Using(times_rows, nn.Embedding(6, 6, max_norm=0.5)),
        *[partial(Centered, move) for move in (in_place, past_its_version, by_another)],
        *[partial(Centered, move, 1 << 16) for move in (in_place, by_another)],
    ],
)
def test_a_gradient_penalty_is_of_buffers_as_they_were_before_the_forward(mode, make, x):
    pipe, plain, layers = beside(mode, nn.Sequential(make(), nn.Tanh(), make()), [1, 2])
    found = []
    for run, module in ((plain, layers), (pipe, pipe)):
        given = x.clone().requires_grad_()
        y = run(given)
        refused = (
            run is pipe and len(getattr(layers[0], "center", ())) > 6 and make.args[0] is in_place
        )
        with pytest.raises(RuntimeError, match=r"graph=True") if refused else nullcontext():
            (grad,) = torch.autograd.grad(y.sum(), given, create_graph=True)
            (grad.square().sum() + y.sum()).backward()
            found.append([given.grad, *grads(module), *[b.clone() for b in module.buffers()]])
    assert_same(found, found[:1] * len(found), rounded=True)


@pytest.mark.parametrize(
    ("cast", "change"),
    [(False, nn.Module.eval), (False, lambda m: m.requires_grad_(False)), (True, lambda m: None)],
    ids=["eval", "frozen", "autocast"],
)
def test_a_gradient_penalty_is_of_what_the_forward_computed(mode, cast, change, x):
    layers = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6))
    pipe, plain, layers = beside(mode, layers, [1, 2])
    found = []
    for run, module in ((plain, layers), (pipe, pipe)):
        given = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            y = run(given).square().sum()
        change(module)
        found.append(torch.autograd.grad(y, given, create_graph=True))
    assert_same(found, found[:1] * len(found), rounded=True)
