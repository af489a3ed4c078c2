"""Weights that several stages share: ``pipe(x)``, and what the rest of PyTorch sees of them."""

from __future__ import annotations

import copy
import functools
import io
import threading
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from syncpipe import Pipe, inline
from tests.support.models import CHECKPOINT_MODES, assert_close, assert_same, in_turn, step
from tests.support.running import in_threads
from tests.support.ties import WIDTH, Block, language_model, modes, words
from tests.training.train_batch.test_ties import loss_of, specs

DEVICES = [f"cpu:{k}" for k in range(5)]


def tied_pipe(model: nn.Sequential | None = None, **options: Any) -> Pipe:
    """A pipe with a stage for each layer."""
    model = language_model() if model is None else model
    options = {"chunks": 2, "devices": DEVICES[: len(model)], **options}
    return Pipe(model, [1] * len(model), **options)


def linears(count: int = 3) -> nn.Sequential:
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(count)])
    model[-1].weight = model[0].weight
    return model


@settings(max_examples=150)
@given(
    spec=specs,
    chunks=st.integers(1, 4),
    size=st.integers(1, 6),
    cuts=st.sets(st.integers(1, 7), max_size=3),
    several=st.booleans(),
    by_hand=st.booleans(),
    checkpoint=modes(8),
)
def test_pipe_equals_the_plain_model(spec, chunks, size, cuts, several, by_hand, checkpoint):
    count = len(spec.kinds) + 2
    edges = sorted({0, count} | {cut for cut in cuts if cut < count})
    balance = [b - a for a, b in pairwise(edges)]
    devices = DEVICES[: len(balance)] if several else ["cpu"] * len(balance)
    if isinstance(checkpoint, list):
        checkpoint = checkpoint[:count]
    pipe = Pipe(spec.build(), balance, devices=devices, chunks=chunks, checkpoint=checkpoint)
    plain, x = spec.build(), words(size)
    for _ in range(2):
        if by_hand:
            with inline():
                actual = step(pipe, pipe, x)
        else:
            actual = step(pipe, pipe, x)
        expected = step(in_turn(plain, chunks), plain, x)
        # What a cell uses twice it adds up by itself.
        often = several and (spec.ties or "twice" in spec.kinds)
        (assert_close if often else assert_same)(actual, expected)
        for module in (pipe, plain):
            module.zero_grad()


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
def test_a_tied_head_is_exact_in_pipe_of_x_whoever_is_late(checkpoint):
    plain, pipe = language_model(), tied_pipe(chunks=4, checkpoint=checkpoint)
    x = words(8)
    expected = step(in_turn(plain, 4), plain, x)
    for _ in range(20):
        pipe.zero_grad()
        assert_same(step(pipe, pipe, x), expected)


def test_there_is_one_parameter():
    pipe, plain = tied_pipe(), language_model()
    assert list(pipe.state_dict()) == list(plain.state_dict())
    assert dict(pipe.named_parameters()).keys() == dict(plain.named_parameters()).keys()
    pipe(words(4)).sum().backward()
    assert pipe[0].weight is pipe[4].weight
    norm = nn.utils.clip_grad_norm_(pipe.parameters(), 1.0)
    in_turn(plain, 2)(words(4)).sum().backward()
    assert torch.equal(norm, nn.utils.clip_grad_norm_(plain.parameters(), 1.0))


def test_the_loss_sees_the_parameter_while_a_cell_runs():
    """A penalty on all parameters counts each once, though another stage is inside of a cell."""
    inside, looked = threading.Event(), threading.Event()

    class Waits(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if len(seen) == 0 and x[0, 0] == 1:
                inside.set()
                assert looked.wait(60)
            return super().forward(x)

    def loss(y: Tensor) -> Tensor:
        if not seen:
            assert inside.wait(60)
        seen.append(list(pipe.parameters()))
        looked.set()
        return y.sum()

    seen: list[list[Tensor]] = []
    model = nn.Sequential(nn.Identity(), nn.Linear(3, 3), Waits(3, 3), nn.ReLU())
    model[2].weight = model[1].weight
    pipe = Pipe(model, [2, 1, 1], devices=["cpu:0", "cpu:1", "cpu:2"], chunks=2, checkpoint="never")
    x = torch.zeros(2, 3)
    with torch.no_grad():
        model[1].weight.zero_()
        model[1].bias.zero_()
    model[1].register_forward_hook(lambda _, given, y: y + given[0])
    x[1] = 1
    pipe.train_batch(x, loss_fn=loss, schedule="gpipe", verify=False)
    for parameters in seen:
        assert list(map(id, parameters)) == list(map(id, model.parameters()))


def test_the_gradient_of_a_tied_weight_can_be_asked_for_and_differentiated():
    plain, pipe = linears(), None
    plain.insert(1, nn.Tanh())
    pipe = tied_pipe(copy.deepcopy(plain), checkpoint="never")
    x = torch.randn(4, WIDTH)
    found = []
    for module, call in ((pipe, pipe), (plain, plain)):
        weight = module[0].weight
        (grad,) = torch.autograd.grad(call(x).square().sum(), weight, create_graph=True)
        (again,) = torch.autograd.grad(grad.square().sum(), weight)
        found.append((grad.detach(), again))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


def test_hooks_of_a_tied_weight_run_once_on_the_whole_gradient():
    pipe, plain, sums = linears(), linears(), []
    plain.load_state_dict(pipe.state_dict())
    for module in (pipe, plain):
        module[0].weight.register_hook(lambda grad: sums.append(grad.clone()) or grad * 2)
    pipe, x = tied_pipe(pipe), torch.randn(4, WIDTH)
    pipe(x).sum().backward()
    plain(x).sum().backward()
    assert len(sums) == 2
    torch.testing.assert_close(*sums)
    torch.testing.assert_close(pipe[0].weight.grad, plain[0].weight.grad)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_computes_with_the_weight(mode):
    pipe, plain, x = tied_pipe().eval(), language_model().eval(), words(4)
    for _ in range(2):
        with mode():
            assert torch.equal(pipe(x), in_turn(plain, 2)(x))
        for module in (pipe, plain):
            with torch.no_grad():
                module[0].weight.mul_(1.5)
    loss = pipe.eval_batch(x, words(4, 1), loss_fn=loss_of)
    torch.testing.assert_close(loss, loss_of(plain(x), words(4, 1)))


def test_copies_and_pickles_stay_tied():
    pipe = tied_pipe()
    pipe(words(4)).sum().backward()
    buffer = io.BytesIO()
    torch.save(pipe, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(pipe), torch.load(buffer, weights_only=False)):
        assert other[4].weight is other[0].weight is not pipe[0].weight
        assert torch.equal(other(words(4)), pipe(words(4)))


def test_several_threads_may_call_one_pipe():
    pipe, x = tied_pipe(), words(6)
    expected = step(in_turn(language_model(), 2), language_model(), x)

    def call(_: int) -> None:
        for _ in range(10):
            assert torch.equal(pipe(x), expected.output)
            with inline(), torch.no_grad():
                assert torch.equal(pipe(x), expected.output)

    in_threads(call, *range(4))


def test_gradients_come_by_functional_call_too():
    pipe, plain, x = tied_pipe(linears()), linears(), torch.randn(4, WIDTH)
    plain.load_state_dict(pipe.state_dict())
    found = []
    for module in (pipe, plain):
        given = {n: p.detach().clone().requires_grad_() for n, p in module.named_parameters()}
        result = torch.func.functional_call(module, given, (x,))
        found.append(torch.autograd.grad(result.square().sum(), list(given.values())))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


# -- ties that come and go


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
def test_a_tie_made_or_undone_later_is_noticed_at_the_next_call(checkpoint):
    plain = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)])
    pipe = tied_pipe(copy.deepcopy(plain), checkpoint=checkpoint)
    x = torch.randn(4, WIDTH)

    def tied(module: nn.Module) -> None:
        module[2].weight = module[0].weight

    def untied(module: nn.Module) -> None:
        module[2].weight = nn.Parameter(module[2].weight.detach() * 2)

    for change in (tied, untied, tied):
        for module in (pipe, plain):
            change(module)
            module.zero_grad()
        assert_same(step(pipe, pipe, x), step(in_turn(plain, 2), plain, x))
        for module in (pipe, plain):
            module.zero_grad()
        pipe.train_batch(x, loss_fn=lambda y: y.square().mean())
        for piece in x.chunk(2):
            (plain(piece).square().mean() / 2).backward()
        for p, q in zip(pipe.parameters(), plain.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)


def test_another_balance_and_one_partition_keep_the_tie():
    pipe, plain, x = tied_pipe(), language_model(), words(4)
    for balance in ([3, 2], [5], [1, 1, 1, 2]):
        pipe.balance = balance
        pipe.zero_grad()
        plain.zero_grad()
        assert_same(step(pipe, pipe, x), step(in_turn(plain, 2), plain, x))


# -- modules


def test_one_module_at_two_places_runs_there_as_itself():
    block = Block()
    plain = nn.Sequential(block, nn.Tanh(), block, nn.ReLU(), block)
    pipe, x = tied_pipe(copy.deepcopy(plain)), torch.randn(4, WIDTH)
    assert [layer is pipe[0] for layer in pipe] == [True, False, True, False, True]
    assert list(pipe.state_dict()) == list(plain.state_dict())
    assert_close(step(pipe, pipe, x), step(in_turn(plain, 2), plain, x))
    pipe.eval()
    assert not pipe[2].training


def test_what_a_forward_sets_on_a_tied_module_is_there_afterwards():
    class Counts(nn.Linear):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.last = x.detach().sum()
            if not hasattr(self, "bonus"):
                self.register_buffer("bonus", torch.ones(WIDTH))
            return super().forward(x) + self.bonus

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(Counts(WIDTH, WIDTH)))
    model[1][0].weight = model[0].weight
    pipe = tied_pipe(model)
    pipe(torch.randn(4, WIDTH))
    pipe.train_batch(torch.randn(4, WIDTH), loss_fn=torch.mean)
    counts = pipe[1][0]
    assert counts.calls == 2 + 2 + 1  # the first micro-batch is recomputed
    assert counts.bonus.tolist() == [1] * WIDTH
    assert counts.last.dim() == 0
    assert counts.weight is pipe[0].weight


class Recurrent(nn.Module):
    """An LSTM, which has its weights in a plain list, too."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x[:, None])[0][:, 0]


def _twice(layer: nn.Module) -> nn.Sequential:
    return nn.Sequential(layer, nn.Tanh(), layer)


def _parametrized() -> nn.Sequential:
    model = linears()
    for layer in model:
        nn.utils.parametrizations.weight_norm(layer)
    first, last = (model[k].parametrizations.weight for k in (0, 2))
    last.original1 = first.original1
    return model


def _compiled(how: str) -> nn.Sequential:
    model = nn.Sequential(Block(), Block(), Block())
    model[2].out.weight = model[0].out.weight
    if how == "forward":
        model[2].forward = torch.compile(model[2].forward, backend="eager")
    elif how == "module":
        model[2].compile(backend="eager")
    else:
        model[2] = torch.compile(model[2], backend="eager")
    return model


def _wrapped() -> nn.Sequential:
    model = linears()
    own = model[2].forward

    def doubled(module: nn.Module, x: Tensor) -> Tensor:
        return own(x) * 2 + module.bias

    model[2].forward = functools.partial(doubled, model[2])
    return model


def _hooked() -> nn.Sequential:
    model = linears()
    model[2].register_forward_pre_hook(lambda module, given: (given[0] * module.weight.sum(),))
    model[2].register_forward_hook(lambda module, given, output: output * 1.5)
    model[2].register_full_backward_hook(lambda module, gx, gy: (gx[0] * 2,))
    return model


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize(
    "make",
    [
        lambda: _twice(Recurrent()),
        lambda: _twice(nn.TransformerEncoderLayer(WIDTH, 2, 8, 0.0, batch_first=True)),
        _parametrized,
        *[functools.partial(_compiled, how) for how in ("forward", "module", "wrapped")],
        _wrapped,
        _hooked,
    ],
    ids=[
        "lstm", "transformer", "parametrized", "compiled_forward", "compiled_module",
        "wrapped_by_compile", "forward_by_hand", "hooks",
    ],
)  # fmt: skip
def test_modules_of_all_kinds_can_be_tied(make, checkpoint):
    torch._dynamo.reset()
    plain, pipe = make(), tied_pipe(make(), checkpoint=checkpoint)
    plain.load_state_dict(pipe.state_dict())
    x = torch.randn(4, WIDTH)
    expected = step(in_turn(plain, 2), plain, x)
    assert_close(step(pipe, pipe, x), expected)
    leaked = [name for name, p in pipe.named_parameters() if not isinstance(p, nn.Parameter)]
    assert not leaked
    pipe.zero_grad()
    plain.zero_grad()
    pipe.train_batch(x, loss_fn=lambda y: y.square().mean())
    for piece in x.chunk(2):
        (plain(piece).square().mean() / 2).backward()
    for p, q in zip(pipe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    copy.deepcopy(pipe)


def test_a_compiled_tied_layer_is_compiled_once_for_all_micro_batches():
    torch._dynamo.reset()
    graphs: list[Any] = []

    def backend(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model = nn.Sequential(Block(), Block())
    model[1].out.weight = model[0].out.weight
    model[1].compile(backend=backend)
    pipe = tied_pipe(model, chunks=4, checkpoint="never")
    for _ in range(3):
        pipe.train_batch(torch.randn(8, WIDTH), loss_fn=torch.mean)
    assert len(graphs) == 1


def test_a_model_of_all_ties_under_distributed_data_parallel(tmp_path):
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        pipe, plain, x = tied_pipe(), language_model(), words(4)
        parallel = nn.parallel.DistributedDataParallel(pipe)
        for _ in range(2):
            parallel(x).sum().backward()
            in_turn(plain, 2)(x).sum().backward()
            for p, q in zip(pipe.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(p.grad, q.grad)
    finally:
        torch.distributed.destroy_process_group()
