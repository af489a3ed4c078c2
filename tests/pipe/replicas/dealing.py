"""What the tests of replicas share: pipes with replicas, and what they have to equal."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call

from syncpipe import Pipe
from syncpipe.schedules import build
from tests.support.models import Result, concatenate, cut, loss_of
from tests.support.training import add_grad, fresh, orders_of, plain_step

#: Layers that can have replicas.
KINDS = ["linear", "conv", "layer_norm", "tanh", "frozen", "inplace", "fork", "join", "send"]
KINDS += ["send_int", "send_none", "receive", "receive_unused"]


def dealt(
    model: nn.Sequential, balance: Sequence[int], replicas: Sequence[int], **options: Any
) -> Pipe:
    """A pipe on CPU workers, one for each replica."""
    devices = [f"cpu:{k}" for k in range(sum(replicas))]
    return Pipe(model, balance, replicas=replicas, devices=devices, **options)


@st.composite
def shapes(draw: st.DrawFn, layers: int) -> tuple[list[int], list[int]]:
    """A balance, and replicas for it."""
    cuts = draw(st.sets(st.integers(1, max(1, layers - 1)), max_size=2)) - {layers}
    balance = [b - a for a, b in pairwise([0, *sorted(cuts), layers])]
    counts = st.lists(st.integers(1, 3), min_size=len(balance), max_size=len(balance))
    return balance, draw(counts)


def copied(pipe: Pipe) -> nn.Sequential:
    """A plain copy of its layers."""
    return copy.deepcopy(pipe[:])


def plain_train(pipe: Pipe, plain: nn.Sequential, x: Any, target: Any, **options: Any) -> Any:
    """What ``train_batch`` has to leave behind: gradients added up by replica, then over these."""
    m = len(cut(x, pipe.chunks))
    schedule = build(options.pop("schedule", "1f1b"), m, pipe._ready().placement)
    how = {"chunks": pipe.chunks, "orders": orders_of(schedule), "balance": pipe.balance}
    return plain_step(plain, x, target, **how, replicas=pipe.replicas, **options)


def plain_forward(pipe: Pipe, plain: nn.Sequential, x: Tensor) -> Result:
    """The same of ``pipe(x)`` and one backward, where the last micro-batch goes back first."""
    x = fresh(x)
    plain.zero_grad()
    named = dict(plain.named_parameters())
    leaves = [
        {name: p.detach().requires_grad_(p.requires_grad) for name, p in named.items()}
        for _ in cut(x, pipe.chunks)
    ]
    pieces = zip(leaves, cut(x, pipe.chunks), strict=True)
    output = concatenate([functional_call(plain, own, (piece,)) for own, piece in pieces])
    loss = loss_of(output)
    if loss is not None:
        loss.backward()
    replicas = [r for r, size in zip(pipe.replicas, pipe.balance, strict=True) for _ in range(size)]
    for name, parameter in named.items():
        r = replicas[int(name.split(".")[0])]
        whole = torch.empty_like(parameter, requires_grad=True)
        for k in range(r):
            total = torch.empty_like(parameter, requires_grad=True)
            for own in leaves[k::r][::-1]:
                add_grad(total, own[name].grad)
            add_grad(whole, total.grad)
        add_grad(parameter, whole.grad)
    grads = {n: None if p.grad is None else p.grad.clone() for n, p in named.items()}
    return Result(output.detach(), [x.grad], grads, {})
