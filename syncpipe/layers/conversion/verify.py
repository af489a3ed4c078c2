"""Compares a converted model with the original: a forward and a backward of the sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from syncpipe.layers.conversion.layer import ConvertedLayer
from syncpipe.layers.conversion.recording.nodes import Node, leaves_of
from syncpipe.layers.conversion.signature import equal
from syncpipe.skip.store import use_store
from syncpipe.state import unchanged

#: Makes the arguments of a call, each time anew.
Call = Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]

__all__ = ["evaluated_alike", "first_difference", "verify"]


def verify(model: nn.Module, layers: nn.Module, call: Call) -> str | None:
    """What differs between a model and its layers; None: nothing.

    Outputs, buffers and gradients in training, and outputs in evaluation, with the same random
    numbers.

    Returns:
        ``"training"`` or ``"evaluation"`` where outputs or buffers differ in this mode; or the name
        of a parameter, the last one whose gradient differs.
    """
    for training in (True, False):
        model.train(training)
        layers.train(training)
        expected, wanted = _run(model, call, training)
        actual, gradients = _run(layers, call, training)
        if len(actual) != len(expected) or not all(map(close, actual, expected)):
            return "training" if training else "evaluation"
        differing = [name for name in wanted if not close(wanted[name], gradients.get(name))]
        if differing:
            return differing[-1]
    return None


def evaluated_alike(model: nn.Module, layers: nn.Module, call: Call) -> bool:
    """Whether a model and its layers give the same in evaluation; they may refuse the call."""
    model.eval()
    layers.eval()
    expected, _ = _run(model, call, training=False)
    try:
        actual, _ = _run(layers, call, training=False)
    except ValueError:  # a size that must be the sample's
        return False
    return len(actual) == len(expected) and all(map(close, actual, expected))


def _run(module: nn.Module, call: Call, training: bool) -> tuple[list[Any], dict[str, Any]]:
    """The outputs, with the buffers after them; and gradients by name."""
    args, kwargs = call()

    def run() -> tuple[list[Any], dict[str, Any]]:
        with torch.set_grad_enabled(training):
            outputs = leaves_of(module(*args, **kwargs))
        after = [buffer.detach().clone() for buffer in _saved_buffers(module)]
        gradients = _gradients(module, outputs, (args, kwargs)) if training else {}
        return [*(o.detach() if isinstance(o, Tensor) else o for o in outputs), *after], gradients

    return unchanged(module, run)


def _saved_buffers(module: nn.Module) -> list[Tensor]:
    """The buffers of a module that a checkpoint has, by their names."""
    saved = module.state_dict().keys()
    named = dict(pair for pair in module.named_buffers(remove_duplicate=False) if pair[0] in saved)
    return [named[name] for name in sorted(named)]


def _gradients(module: nn.Module, outputs: list[Any], inputs: Any) -> dict[str, Any]:
    roots = [t for t in outputs if isinstance(t, Tensor) and t.requires_grad]
    leaves: dict[str, Tensor] = {
        name: p for name, p in module.named_parameters() if p.requires_grad
    }
    for k, leaf in enumerate(leaves_of(inputs)):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            leaves[f"input {k}"] = leaf
    if not roots or not leaves:
        return {}
    towards = [_cotangent(root) for root in roots]
    found = torch.autograd.grad(roots, list(leaves.values()), towards, allow_unused=True)
    return dict(zip(leaves, found, strict=True))


def _cotangent(root: Tensor) -> Tensor:
    """A gradient that differs from element to element."""
    steps = torch.arange(root.numel(), device=root.device) % 17 - 8
    return (steps / 8).reshape(root.shape).to(root.dtype)


def close(a: Any, b: Any) -> bool:
    """Whether two values are the same, to rounding."""
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return equal(a, b)
    try:
        torch.testing.assert_close(a, b, equal_nan=True)
    except AssertionError:
        return False
    return True


def first_difference(
    layers: nn.Sequential,
    gives: Sequence[Sequence[Node]],
    recorded: Callable[[tuple[Any, ...]], Any],
    input: Any,
) -> int:
    """The index of the first layer that gives another value than the model.

    Args:
        layers: the layers.
        gives: for each the nodes of what it gives, to the next layer and as skips.
        recorded: the value that a node has in the model, by its key.
        input: what the first layer gets.
    """
    skips: dict[Any, Any] = {}
    for k, (layer, nodes) in enumerate(zip(layers, gives, strict=True)):
        assert isinstance(layer, ConvertedLayer)
        with use_store(skips):
            input = layer(input)
        if layer.gives is None:
            break
        given = [input] if layer.gives == 1 else list(input)
        given += [skips[layer._skip_namespaces[name], name] for name in layer.skips.stash]
        pairs = zip(given, nodes, strict=True)
        if not all(close(value, recorded(node.key)) for value, node in pairs):
            return k
    return len(layers) - 1
