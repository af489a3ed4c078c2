"""Weights that several stages share: ``pipe(x)``, and what the rest of PyTorch sees of them."""

from __future__ import annotations

import copy
import functools
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from syncpipe import Pipe
from tests.support.models import CHECKPOINT_MODES, assert_same, in_turn, step
from tests.support.running import NormBlock, Using

WIDTH = 6
DEVICES = [f"cpu:{k}" for k in range(5)]
every_mode = pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)


def tied_pipe(model: nn.Sequential, **options: Any) -> Pipe:
    """A pipe with a stage for each layer."""
    options = {"chunks": 2, "devices": DEVICES[: len(model)], **options}
    return Pipe(model, [1] * len(model), **options)


def linears(count: int = 3) -> nn.Sequential:
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(count)])
    model[-1].weight = model[0].weight
    return model


def assert_trains_alike(pipe: Pipe, plain: nn.Sequential, x: Tensor, *, exact: bool) -> None:
    """Under both drivers; what a cell uses twice it adds up by itself."""
    assert_same(step(pipe, pipe, x), step(in_turn(plain, 2), plain, x), rounded=True)
    for module in (pipe, plain):
        module.zero_grad()
    pipe.train_batch(x, loss_fn=lambda y: y.square().mean())
    for piece in x.chunk(2):
        (plain(piece).square().mean() / 2).backward()
    limits = {"rtol": 0, "atol": 0} if exact else {}
    grads = [[p.grad for p in module.parameters()] for module in (pipe, plain)]
    torch.testing.assert_close(*grads, **limits)


def test_there_is_one_parameter_also_for_copies_another_balance_and_clipping():
    plain, x = linears(5), torch.randn(4, WIDTH)
    pipe = tied_pipe(copy.deepcopy(plain))
    assert list(pipe.state_dict()) == list(plain.state_dict())
    assert dict(pipe.named_parameters()).keys() == dict(plain.named_parameters()).keys()
    other = copy.deepcopy(pipe)
    assert other[4].weight is other[0].weight is not pipe[0].weight
    for balance in ([1] * 5, [3, 2], [5], [1, 1, 1, 2]):
        pipe.balance = balance
        assert_same(step(pipe, pipe, x), step(in_turn(plain, 2), plain, x), rounded=True)
        assert pipe[0].weight is pipe[4].weight
    assert torch.equal(other(x), pipe(x))
    norms = [nn.utils.clip_grad_norm_(m.parameters(), 1.0) for m in (pipe, plain)]
    assert torch.equal(*norms)


def test_the_loss_sees_the_parameter_while_a_cell_runs():
    """A penalty on all parameters counts each once, though another stage is inside of a cell."""
    inside, looked, cells, seen = threading.Event(), threading.Event(), [], []

    class Waits(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            cells.append(None)
            if len(cells) == 2:
                inside.set()
                assert looked.wait(60)
            return super().forward(x)

    def loss(y: Tensor) -> Tensor:
        assert inside.wait(60)
        seen.append(list(map(id, pipe.parameters())))
        looked.set()
        return y.sum()

    model = nn.Sequential(nn.Linear(3, 3), Waits(3, 3), nn.ReLU())
    model[1].weight = model[0].weight
    pipe = tied_pipe(model, checkpoint="never")
    pipe.train_batch(torch.randn(2, 3), loss_fn=loss, schedule="gpipe", verify=False)
    assert seen == [list(map(id, model.parameters()))] * 2


@every_mode
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
        assert_trains_alike(pipe, plain, x, exact=True)


# --- modules ---------------------------------------------------------------------------------


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


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
def test_a_module_at_two_places_may_have_a_pipe_in_it(checkpoint):
    inside = Pipe(nn.Sequential(nn.Tanh(), nn.Sigmoid()), [1, 1], devices=["cpu:0", "cpu:1"])
    layer = nn.Sequential(nn.Linear(WIDTH, WIDTH), inside)
    plain, x = nn.Sequential(layer, nn.Tanh(), layer), torch.randn(8, WIDTH)
    expected = step(in_turn(plain, 2), plain, x)
    pipe = Pipe(plain, [2, 1], devices=["cpu:0", "cpu:1"], chunks=2, checkpoint=checkpoint)
    for _ in range(2):
        pipe.zero_grad()
        assert_same(step(pipe, pipe, x), expected, rounded=True)


def _lstm() -> nn.Sequential:
    """Which has its weights in a plain list, too."""
    lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
    layer = Using(lambda x, lstm: lstm(x[:, None])[0][:, 0], lstm)
    return nn.Sequential(layer, nn.Tanh(), layer)


def _compiled(how: str) -> nn.Sequential:
    model = nn.Sequential(NormBlock(), NormBlock(), NormBlock())
    model[2].linear.weight = model[0].linear.weight
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


KINDS = {
    "lstm": _lstm,
    **{f"compiled {how}": functools.partial(_compiled, how)
       for how in ("forward", "module", "wrapped")},
    "forward by hand": _wrapped,
}  # fmt: skip


@every_mode
@pytest.mark.parametrize("kind", KINDS)
def test_modules_of_all_kinds_can_be_tied(kind, checkpoint):
    torch._dynamo.reset()
    plain, pipe = KINDS[kind](), tied_pipe(KINDS[kind](), checkpoint=checkpoint)
    plain.load_state_dict(pipe.state_dict())
    assert_trains_alike(pipe, plain, torch.randn(4, WIDTH), exact=False)
    assert all(isinstance(p, nn.Parameter) for p in pipe.parameters())
    copy.deepcopy(pipe)


def test_a_compiled_tied_layer_is_compiled_once_for_all_micro_batches():
    torch._dynamo.reset()
    graphs: list[Any] = []

    def backend(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model = nn.Sequential(NormBlock(), NormBlock())
    model[1].linear.weight = model[0].linear.weight
    model[1].compile(backend=backend)
    pipe = tied_pipe(model, chunks=4, checkpoint="never")
    for _ in range(3):
        pipe.train_batch(torch.randn(8, WIDTH), loss_fn=torch.mean)
    assert len(graphs) == 1
