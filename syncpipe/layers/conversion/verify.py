"""Compares a converted model with the original: a forward and a backward of the sample."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from syncpipe.layers.conversion.nodes import Node, leaves_of
from syncpipe.layers.conversion.state import same_random_numbers

__all__ = ["verify"]


def verify(
    model: nn.Module,
    layers: nn.Sequential,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> str | None:
    """What differs between a model and its layers, in words; None: nothing.

    Outputs and gradients in training, and outputs in evaluation, with the same random numbers.
    Buffers end as two forwards leave them.
    """
    for training in (True, False):
        model.train(training)
        layers.train(training)
        expected = _run(model, args, kwargs, training)
        actual = _run(layers, args, kwargs, training)
        mode = "training" if training else "evaluation"
        for what, left, right in zip(("output", "gradient"), actual, expected, strict=True):
            if len(left) != len(right):
                return f"in {mode} there are {len(left)} {what}s, not {len(right)}"
            for k, (a, b) in enumerate(zip(left, right, strict=True)):
                if not close(a, b):
                    return f"{what} {k} in {mode} differs"
    return None


def _run(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], training: bool
) -> tuple[list[Any], list[Any]]:
    """The outputs, with the buffers after them; the gradients of parameters, by name, and inputs."""
    before = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    with same_random_numbers(module), torch.set_grad_enabled(training):
        outputs = leaves_of(module(*args, **kwargs))
        after = [buffer.detach().clone() for _, buffer in sorted_buffers(module)]
        grads = _gradients(module, outputs, (args, kwargs)) if training else []
    with torch.no_grad():
        for buffer, value in before:
            if not torch.equal(buffer, value):
                buffer.copy_(value)
    return [*(o.detach() if isinstance(o, Tensor) else o for o in outputs), *after], grads


def _gradients(module: nn.Module, outputs: list[Any], inputs: Any) -> list[Any]:
    roots = [t for t in outputs if isinstance(t, Tensor) and t.requires_grad]
    named = sorted(module.named_parameters(), key=lambda pair: pair[0])
    leaves = [p for _, p in named if p.requires_grad]
    leaves += [t for t in leaves_of(inputs) if isinstance(t, Tensor) and t.requires_grad]
    if not roots or not leaves:
        return []
    towards = [_cotangent(root) for root in roots]
    return list(torch.autograd.grad(roots, leaves, towards, allow_unused=True))


def sorted_buffers(module: nn.Module) -> list[tuple[str, Tensor]]:
    """The buffers of a module that a checkpoint has, by name."""
    saved = module.state_dict().keys()
    return sorted(((n, b) for n, b in module.named_buffers() if n in saved), key=lambda p: p[0])


def _cotangent(root: Tensor) -> Tensor:
    """A gradient that is different for every element."""
    steps = torch.arange(1, root.numel() + 1, device=root.device) % 17 - 8
    return (steps / 8).reshape(root.shape).to(root.dtype)


def close(a: Any, b: Any) -> bool:
    """Whether two values are the same, to rounding."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        try:
            torch.testing.assert_close(a, b, equal_nan=True)
        except AssertionError:
            return False
        return True
    return a is b or (type(a) is type(b) and bool(a == b))


def first_difference(pieces: list[Any], again: list[dict[Node, Any]]) -> str:
    """Not used."""
    raise NotImplementedError
