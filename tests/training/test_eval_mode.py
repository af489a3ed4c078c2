"""``eval_batch`` goes into ``eval()`` mode, and back, by the modules' own ``train()``."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from syncpipe import Pipe, inline
from tests.support.training import FOUR


class Merging(nn.Linear):
    """Adds a low-rank part in training; in evaluation it is merged into the weight (LoRA)."""

    def __init__(self, width: int = 4) -> None:
        self.merged = False
        super().__init__(width, width)
        self.down, self.up = (nn.Parameter(torch.ones(s)) for s in ((1, width), (width, 1)))
        self.error: BaseException | None = None

    def train(self, mode: bool = True) -> Merging:
        if mode and self.error is not None:
            error, self.error = self.error, None
            raise error
        super().train(mode)
        if self.merged == mode:
            with torch.no_grad():
                self.weight += (self.up @ self.down) * (-1 if mode else 1)
            self.merged = not mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        assert self.merged != self.training
        y = super().forward(x)
        return y + 1000 if self.training else y  # so that one can tell


class Listed(nn.Module):
    """Holds a module in a plain list, and passes the mode on."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = [inner]

    def train(self, mode: bool = True) -> Listed:
        super().train(mode)
        self.inner[0].train(mode)
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.inner[0](x)


def layers() -> nn.Sequential:
    return nn.Sequential(
        Merging(), Listed(nn.Dropout(0.9)), nn.Sequential(nn.BatchNorm1d(4), Merging()), nn.Tanh()
    )


def pipe_of(module: nn.Sequential, devices: list[str] = FOUR) -> Pipe:
    return Pipe(module, [1] * 4, devices=devices, chunks=2)


def modes_of(pipe: Pipe) -> list[bool]:
    inside = [m.inner[0] for m in pipe.modules() if isinstance(m, Listed)]
    return [m.training for m in [*pipe.modules(), *pipe.partitions, *inside]]


@pytest.mark.parametrize("by_hand", [False, True], ids=["threads", "inline"])
def test_layers_evaluate_as_after_eval(by_hand):
    module = layers()
    plain = copy.deepcopy(module).eval()
    pipe, x = pipe_of(module), torch.randn(6, 4)
    with inline() if by_hand else torch.enable_grad():
        actual = pipe.eval_batch(x)
    assert torch.equal(actual, torch.cat([plain(half) for half in x.chunk(2)]).detach())


def test_weights_and_modes_are_back_afterwards():
    pipe = pipe_of(layers())
    weight, modes = pipe[0].weight.detach().clone(), modes_of(pipe)
    pipe.eval_batch(torch.randn(6, 4))
    assert not pipe[0].merged
    assert not pipe[2][1].merged
    torch.testing.assert_close(pipe[0].weight.detach(), weight)
    assert modes_of(pipe) == modes
    assert all(modes)


def test_a_layer_that_evaluates_while_others_train_stays_so():
    pipe = pipe_of(layers())
    pipe[2].eval()  # frozen statistics, and merged weights
    modes = modes_of(pipe)
    pipe.eval_batch(torch.randn(6, 4))
    assert modes_of(pipe) == modes
    assert pipe[2][1].merged
    assert not pipe[0].merged


def test_a_layer_that_trains_in_a_pipe_that_evaluates_evaluates_and_trains_on():
    pipe = pipe_of(layers()).eval()
    pipe[0].train()
    modes = modes_of(pipe)
    pipe.eval_batch(torch.randn(6, 4))
    assert modes_of(pipe) == modes
    assert not pipe[0].merged


def test_a_pipe_that_evaluates_already_is_left_alone():
    pipe = pipe_of(layers()).eval()
    pipe[0].error = AssertionError("train() was called")
    pipe[0].train = lambda mode=True: pytest.fail("train() was called")
    pipe.eval_batch(torch.randn(6, 4))


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["loss", "back"])
def test_modes_and_weights_are_back_after_an_error(error, where):
    pipe = pipe_of(layers())
    modes = modes_of(pipe)

    def loss_fn(output: Tensor) -> Tensor:
        if where == "loss":
            raise error
        return output.sum()

    if where == "back":
        pipe[2][1].error = error()
    with pytest.raises(error):
        pipe.eval_batch(torch.randn(6, 4), loss_fn=loss_fn)
    assert modes_of(pipe) == modes
    assert not pipe[0].merged
    assert not pipe[2][1].merged


def test_an_error_on_the_way_into_eval_mode_undoes_it():
    class Stubborn(nn.Identity):
        def train(self, mode: bool = True) -> Stubborn:
            if not mode:
                raise OSError("never")
            return super().train(mode)

    pipe = pipe_of(nn.Sequential(Merging(), Stubborn(), nn.Tanh(), Merging()))
    modes = modes_of(pipe)
    with pytest.raises(OSError, match="never"):
        pipe.eval_batch(torch.randn(6, 4))
    assert modes_of(pipe) == modes
    assert not pipe[0].merged
