"""A pipe leaves one true autograd graph behind: all that autograd can do works, in every mode."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import nn

from syncpipe import inline
from tests.support.running import (
    MODES,
    Do,
    assert_same,
    beside,
    in_threads,
    one_by_one,
    pipe_of,
    plain,
    trained,
    weigh,
)

pytestmark = pytest.mark.parametrize("mode", MODES)


def model():
    return nn.Sequential(
        nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)
    )


@pytest.fixture
def x():
    return torch.randn(8, 6)


def test_backward_gives_the_plain_loops_bits(mode, x):
    pipe, reference, copied = beside(mode, model())
    assert_same(trained(pipe, pipe, x), trained(reference, copied, x))


def test_backward_to_chosen_inputs_leaves_the_others_without_gradient(mode, x):
    pipe, reference, copied = beside(mode, model())
    for run, module in ((pipe, pipe), (reference, copied)):
        weigh(run(x)).backward(inputs=[module[2].weight, module[0].bias])
    assert_same([p.grad for p in pipe.parameters()], [p.grad for p in copied.parameters()])
    assert [p.grad is not None for p in pipe.parameters()] == [False, True, True, *[False] * 3]


@pytest.mark.parametrize("of", ["input", "parameters", "both", "the last layer"])
def test_autograd_grad(mode, of, x):
    pipe, reference, copied = beside(mode, model())
    x.requires_grad_()

    def grads(run, module):
        chosen = {
            "input": [x],
            "parameters": list(module.parameters()),
            "both": [x, *module.parameters()],
            "the last layer": list(module[4].parameters()),
        }[of]
        return torch.autograd.grad(weigh(run(x)), chosen)

    assert_same(grads(pipe, pipe), grads(reference, copied))
    assert all(p.grad is None for p in pipe.parameters())


def test_a_retained_graph_can_be_gone_through_again_and_a_freed_one_cannot(mode, x):
    pipe, reference, copied = beside(mode, model())
    for run in (pipe, reference):
        loss = weigh(run(x))
        for retain in (True, True, False):
            loss.backward(retain_graph=retain)
        with pytest.raises(RuntimeError, match="a second time"):
            loss.backward()
    assert_same([p.grad for p in pipe.parameters()], [p.grad for p in copied.parameters()])


@pytest.mark.parametrize("part", [slice(0, 1), slice(3, 5), slice(7, 8)])
def test_backward_of_some_samples(mode, part, x):
    pipe, reference, copied = beside(mode, model())
    ours = trained(lambda x: pipe(x)[part], pipe, x)
    assert_same(ours, trained(lambda x: reference(x)[part], copied, x))


@pytest.mark.parametrize("used", [0, 1])
def test_backward_of_one_of_two_outputs(mode, used, x):
    class Fork(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 3), nn.Linear(8, 3)

        def forward(self, x):
            return self.a(x), self.b(x).tanh()

    layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), Fork())
    pipe, _, copied = beside(mode, layers, [1, 2])
    ours = trained(lambda x: pipe(x)[used], pipe, x)
    theirs = trained(lambda x: torch.cat([copied(c)[used] for c in x.chunk(4)]), copied, x)
    assert_same(ours, theirs)
    assert [p.grad is None for p in pipe[2].parameters()].count(True) == 2


def test_two_forwards_before_one_backward(mode, x):
    pipe, reference, copied = beside(mode, model())

    def twice(run):
        return lambda x: run(x) * 2 + run(x.flip(0)).tanh()

    ours, theirs = trained(twice(pipe), pipe, x), trained(twice(reference), copied, x)
    for a, b in zip(ours, theirs, strict=True):  # which of the two goes back first is open
        torch.testing.assert_close(a, b)


def test_the_output_of_a_pipe_can_go_through_it_again(mode, x):
    layers = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    pipe, reference, copied = beside(mode, layers, [2, 1])
    ours = trained(lambda x: pipe(pipe(x)), pipe, x)
    for a, b in zip(ours, trained(lambda x: reference(reference(x)), copied, x), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("inner_mode", MODES)
def test_a_pipe_inside_a_pipe(mode, inner_mode):
    def make():
        inner = nn.Sequential(nn.Linear(8, 8), nn.Dropout(), nn.BatchNorm1d(8), nn.Tanh())
        outer = nn.Sequential(nn.Linear(6, 8), nn.Identity(), nn.Dropout(), nn.BatchNorm1d(8))
        outer[1] = pipe_of(inner, [2, 2], chunks=2, checkpoint=inner_mode)
        return pipe_of(outer, [2, 2], chunks=3, checkpoint=mode)

    x = torch.randn(12, 6)
    ours = make()
    theirs = copy.deepcopy(ours)
    for _ in range(2):
        torch.manual_seed(1)
        result = trained(ours, ours, x)
        torch.manual_seed(1)
        with inline():
            expected = trained(theirs, theirs, x)
        assert_same(result, expected)
    assert ours[1][2].num_batches_tracked == 2 * 3 * 2


def test_one_pipe_called_from_several_threads(mode, x):
    pipe, reference, copied = beside(mode, model())
    inputs = [torch.randn(8, 6) for _ in range(3)]

    def run(run, module, x):
        return torch.autograd.grad(weigh(run(x)), list(module.parameters()))

    expected = [run(reference, copied, x) for x in inputs]
    results = in_threads(lambda x: [run(pipe, pipe, x) for _ in range(30)], *inputs)
    for found, right in zip(results, expected, strict=True):
        for result in found:
            assert_same(result, right)


def test_create_graph_gives_second_derivatives(mode, x):
    pipe, reference, copied = beside(mode, model())
    x.requires_grad_()

    def hessian_product(run, module):
        parameters = list(module.parameters())
        first = torch.autograd.grad(run(x).square().sum(), [x, *parameters], create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), [x, *parameters])

    for a, b in zip(hessian_product(pipe, pipe), hessian_product(reference, copied), strict=True):
        torch.testing.assert_close(a, b)


def test_a_gradient_penalty_trains_the_parameters(mode, x):
    pipe, reference, copied = beside(mode, model())
    x.requires_grad_()
    for run in (pipe, reference):
        (slope,) = torch.autograd.grad(run(x).sum(), x, create_graph=True)
        (slope.norm(dim=1) - 1).square().mean().backward()
    for p, q in zip(pipe.parameters(), copied.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


# Layers out of the ordinary


class Slope(nn.Module):
    """The gradient of a scalar network: autograd inside of forward, as in energy models."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x):
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_()
            return torch.autograd.grad(self.net(x).sum(), x, create_graph=True)[0]


@pytest.mark.parametrize("balance", [[1, 1, 1], [2, 1], [1, 2]])
def test_a_layer_that_calls_autograd_inside_of_forward(mode, balance, x):
    layers = nn.Sequential(nn.Linear(6, 8), Slope(), nn.Linear(8, 3))
    pipe, reference, copied = beside(mode, layers, balance)
    assert_same(trained(pipe, pipe, x), trained(reference, copied, x))


@pytest.mark.parametrize("frozen", [[0], [2], [4], [0, 2, 4]])
def test_frozen_layers(mode, frozen, x):
    layers = model()
    for k in frozen:
        layers[k].requires_grad_(False)
    pipe, reference, copied = beside(mode, layers, [1, 2, 2])
    assert_same(trained(pipe, pipe, x), trained(reference, copied, x))
    if len(frozen) < 3:  # and with an input that needs none, so that the first stage stores nothing
        weigh(pipe(x)).backward()
        weigh(reference(x)).backward()
        assert_same([p.grad for p in pipe.parameters()], [p.grad for p in copied.parameters()])


def test_a_stage_that_cuts_the_graph(mode, x):
    layers = nn.Sequential(nn.Linear(6, 8), Do(torch.Tensor.detach), nn.Linear(8, 3))
    pipe, _, copied = beside(mode, layers, [1, 1, 1])
    weigh(pipe(x)).backward()
    weigh(plain(copied, x)).backward()
    assert_same([p.grad for p in pipe.parameters()], [p.grad for p in copied.parameters()])
    assert pipe[0].weight.grad is None


def test_integer_and_boolean_tensors_travel_along(mode, x):
    class Mark(nn.Module):
        def forward(self, x):
            return x, x.argmax(1), x > 0, None

    class Use(nn.Module):
        def forward(self, input):
            x, best, positive, nothing = input
            assert nothing is None
            return x * positive + best[:, None], best

    layers = nn.Sequential(nn.Linear(6, 8), Mark(), Use())
    pipe, _, copied = beside(mode, layers, [1, 1, 1])
    expected = [copied(chunk) for chunk in x.chunk(4)]
    y, best = pipe(x)
    assert torch.equal(best, torch.cat([e[1] for e in expected]))
    weigh(y).backward()
    weigh(torch.cat([e[0] for e in expected])).backward()
    assert_same([p.grad for p in pipe.parameters()], [p.grad for p in copied.parameters()])


@pytest.mark.parametrize("balance", [[1, 4], [3, 2], [1, 1, 1, 1, 1]])
def test_in_place_layers_at_the_start_of_a_stage(mode, balance, x):
    cosine = Do(torch.Tensor.cos_)
    layers = nn.Sequential(
        nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), cosine, nn.Linear(8, 3)
    )
    pipe, reference, copied = beside(mode, layers, balance)
    assert_same(trained(pipe, pipe, x), trained(reference, copied, x))


def test_an_in_place_layer_on_the_input_of_the_pipe(mode, x):
    layers = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 3), nn.Tanh())
    pipe, _, copied = beside(mode, layers, [1, 2])

    def reference(x):  # micro-batches that do not share their memory
        return torch.cat([copied(chunk.clone()) for chunk in x.chunk(4)])

    for run in (pipe, reference):
        weigh(run(x.clone())).backward()
    assert_same([p.grad for p in pipe.parameters()], [p.grad for p in copied.parameters()])
    ours = trained(lambda x: pipe(x * 2), pipe, x)
    assert_same(ours, trained(lambda x: reference(x * 2), copied, x))


@pytest.mark.parametrize("layer", [0, 2, 4])
def test_changing_a_weight_between_forward_and_backward_is_an_error(mode, layer, x):
    pipe, _, _ = beside(mode, model())
    loss = weigh(pipe(x.requires_grad_()))
    with torch.no_grad():
        pipe[layer].weight.add_(1)
    with pytest.raises(RuntimeError, match="modified"):
        loss.backward()


def test_changing_the_input_between_forward_and_backward_is_an_error(mode, x):
    pipe, _, _ = beside(mode, model())
    loss = weigh(pipe(x))
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified"):
        loss.backward()


def test_loss_scaling_gives_the_plain_models_steps(mode, x):
    pipe, reference, copied = beside(mode, model())
    for run, module in ((pipe, pipe), (reference, copied)):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for factor in (1, float("inf"), 1):  # the second step overflows and is left out
            optimizer.zero_grad()
            scaler.scale(weigh(run(x)) * factor).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
    assert_same(list(pipe.parameters()), list(copied.parameters()))


class Told(torch.autograd.Function):
    """The identity, which calls a function in backward."""

    @staticmethod
    def forward(ctx, x, tell):
        ctx.tell = tell
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.tell()
        return grad.clone(), None


class Plus(nn.Module):
    """The gradient of ``x`` is that of ``p``, in the same memory."""

    def __init__(self, *, view: bool) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.randn(16 if view else (2, 8)))

    def forward(self, x):
        return x + (self.p.view(2, 8) if self.p.dim() == 1 else self.p)


@pytest.mark.parametrize("view", [False, True])
def test_a_gradient_that_another_stage_still_reads(mode, view, x):
    """The first stage begins its backward when the second is at its third micro-batch."""
    begun, third = [], threading.Event()

    def tell():
        begun.append(0)
        if len(begun) == 3:
            third.set()

    layers = [
        nn.Linear(6, 8), Do(lambda x: Told.apply(x, lambda: third.wait(10))),
        Plus(view=view), Do(lambda x: Told.apply(x, tell)), nn.Linear(8, 3),
    ]  # fmt: skip
    plain_layers = nn.Sequential(*(copy.deepcopy(layers[k]) for k in (0, 2, 4)))
    pipe = pipe_of(nn.Sequential(*layers), [2, 3], checkpoint=mode)
    assert_same(
        trained(pipe, pipe, x), trained(lambda x: one_by_one(plain_layers, x), plain_layers, x)
    )


class Rows(nn.Module):
    """Adds rows of a table: with a dense gradient from every second micro-batch, or a sparse one.

    Args:
        table: the table.
        sparse: tells for a micro-batch which of the two.
    """

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
    for run in (pipe_of(nn.Sequential(*layers)), lambda x: one_by_one(nn.Sequential(*layers), x)):
        weight.grad = leaf.grad = None
        weigh(run(x)).backward()
        found.append([weight.grad.to_dense(), leaf.grad.to_dense()])
    torch.testing.assert_close(*found)


def test_several_gradients_at_once(mode, x):
    """``is_grads_batched`` gives tensors that have no memory of their own to the workers."""
    pipe, reference, copied = beside(mode, model())
    several, found = torch.randn(5, 8, 3), []
    x.requires_grad_()
    for run, module in ((pipe, pipe), (reference, copied)):
        wanted = [x, *module.parameters()]
        found.append(torch.autograd.grad(run(x), wanted, several, is_grads_batched=True))
    torch.testing.assert_close(*found)
