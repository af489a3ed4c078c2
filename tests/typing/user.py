"""A user's script, for ``mypy --strict``: what a type checker knows of a pipe."""

from functools import partial
from typing import Any, assert_type

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import syncpipe
from syncpipe import LayerSpec, Pipe, data_parallel, pop, skippable, stash

layers = [nn.Linear(4, 4), torch.relu, LayerSpec(nn.Linear, 4, 3), lambda x: x * 2]
pipe = Pipe(layers, balance=[2, 2], devices=["cpu:0", "cpu:1"], chunks=2)
x, y = torch.randn(8, 4), torch.randint(3, (8,))


def weighted(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return F.cross_entropy(output, target), target.sum()


def with_metrics(output: Tensor, target: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return F.cross_entropy(output, target), {"largest": output.max()}


def with_both(output: Tensor, target: Tensor) -> tuple[Tensor, int, dict[str, float]]:
    return F.cross_entropy(output, target), 1, {"one": 1.0}


def unknown(loss_fn: Any, outputs: bool) -> None:
    assert_type(pipe.train_batch(x, y, loss_fn=F.cross_entropy, return_outputs=outputs), Any)
    assert_type(pipe.train_batch(x, y, loss_fn=loss_fn), Any)


Metrics = dict[str, Any]
ignoring = partial(F.cross_entropy, ignore_index=0)
assert_type(pipe.train_batch(x, y, loss_fn=F.cross_entropy, schedule="gpipe"), Tensor)
assert_type(pipe.train_batch(x, y, loss_fn=nn.CrossEntropyLoss()), Tensor)
assert_type(pipe.train_batch(x, y, loss_fn=ignoring), Tensor)
assert_type(pipe.train_batch(x, y, loss_fn=lambda o, t: F.cross_entropy(o + 1, t)), Tensor)
assert_type(pipe.train_batch(x, y, loss_fn=weighted), Tensor)
assert_type(pipe.train_batch(x, y, loss_fn=with_metrics), tuple[Tensor, Metrics])
assert_type(pipe.train_batch(x, y, loss_fn=with_both), tuple[Tensor, Metrics])
outputs = pipe.train_batch(x, y, loss_fn=F.cross_entropy, return_outputs=True)
assert_type(outputs, tuple[Tensor, Any])
all_three = pipe.train_batch(x, y, loss_fn=with_both, return_outputs=True)
assert_type(all_three, tuple[Tensor, Any, Metrics])
assert_type(pipe.train_batch(data_iter=iter([(x, y)]), loss_fn=F.cross_entropy), Tensor)
assert_type(pipe.eval_batch(x, y, loss_fn=F.cross_entropy), Tensor)
assert_type(pipe.eval_batch(x, y, loss_fn=with_metrics), tuple[Tensor, Metrics])
assert_type(pipe.eval_batch(x), Any)
assert_type(pipe[0], nn.Module)
assert_type(pipe[1:], nn.Sequential)
assert_type(data_parallel(pipe), Pipe)
assert_type(syncpipe.plan(layers, x, devices="2 x 1GB, 1GB/s", batch_size=8), syncpipe.Plan)
assert_type(syncpipe.balance.balance_by_time(2, layers, x), list[int])
Pipe(layers, chunk=2)  # type: ignore[call-arg]
pipe.train_batch(x, y, F.cross_entropy)  # type: ignore[call-overload]
pipe.train_batch(x, y, loss_fn=F.cross_entropy, criterion=1)  # type: ignore[call-overload]
print(skippable, stash("a", x), pop("a"))
