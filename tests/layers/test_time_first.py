"""Modules that take time in dimension 0 are noticed in the first micro-batch."""

from __future__ import annotations

import copy
import pickle
import warnings
from operator import itemgetter

import pytest
import torch
from torch import Tensor, nn

from syncpipe import Pipe
from tests.support.running import Do, Using

FIRST = Do(itemgetter(0))


def transposed(x: Tensor, rnn: nn.Module) -> Tensor:
    return rnn(x.transpose(0, 1))[0].transpose(0, 1)


def pipe_of(*layers: nn.Module) -> Pipe:
    balance = [1, len(layers) - 1]
    return Pipe(nn.Sequential(*layers), balance, devices=["cpu:0", "cpu:1"], chunks=2)


def mean(y: Tensor) -> Tensor:
    return y.square().mean()


RUNS = {
    "forward": lambda pipe, x: pipe(x),
    "train": lambda pipe, x: pipe.train_batch(x, loss_fn=mean),
    "eval": lambda pipe, x: pipe.eval_batch(x),
    "iterator": lambda pipe, x: pipe.train_batch(
        data_iter=iter([(piece, None) for piece in x.chunk(2)]), loss_fn=mean
    ),
}


@pytest.mark.parametrize("how", RUNS)
@pytest.mark.parametrize(
    ("layers", "name"),
    [
        ((nn.Linear(4, 4), nn.TransformerEncoderLayer(4, 2, 8)), r"1\.self_attn"),
        ((nn.LSTM(4, 4), FIRST), "0"),
        ((nn.Linear(4, 4), nn.GRU(4, 4), FIRST), "1"),
    ],
)
def test_a_pipe_that_would_cut_time_says_so_once(layers, name, how):
    pipe, x = pipe_of(*copy.deepcopy(layers)), torch.rand(10, 6, 4)
    words = rf"{name} is an nn\..*\[5, 6, 4\].*batch_first=True"
    with pytest.warns(UserWarning, match=words) as found:
        RUNS[how](pipe, x)
    assert found[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        RUNS[how](pipe, x)
        assert not any(module._forward_pre_hooks for module in pipe.modules())
    if name == "0":  # a batch as large as the micro-batches hides nothing
        with pytest.warns(UserWarning, match=r"is given \[5, 5, 4\]"):
            pipe_of(*layers)(torch.rand(10, 5, 4))


@pytest.mark.parametrize(
    "layers",
    [
        (nn.Linear(4, 4), Using(transposed, nn.LSTM(4, 4))),
        (nn.Linear(4, 4), nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)),
        (nn.LSTM(4, 4, batch_first=True), FIRST),
    ],
)
def test_models_that_are_right_hear_nothing(layers):
    pipe = pipe_of(*layers)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipe(torch.rand(10, 6, 4))
        pickle.loads(pickle.dumps(pipe)).train_batch(torch.rand(12, 6, 4), loss_fn=mean)
        pipe_of(*layers)(torch.rand(10, 5, 4))
