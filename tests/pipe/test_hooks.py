"""Hooks on parameters and layers run as often, and see the same, as in the plain loop."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from syncpipe import is_recomputing
from tests.support.running import MODES, assert_same, beside, weigh

pytestmark = pytest.mark.parametrize("mode", MODES)


def model():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


@pytest.fixture
def x():
    return torch.randn(8, 6)


def test_parameter_hooks_run_once_a_backward(mode, x):
    pipe, _, _ = beside(mode, model())
    calls = []
    for name, parameter in pipe.named_parameters():
        parameter.register_hook(lambda g, name=name: calls.append(name))
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: calls.append(name))
    weigh(pipe(x)).backward()
    assert sorted(calls) == sorted(2 * [name for name, _ in pipe.named_parameters()])


def test_hooks_on_layers_run_once_a_micro_batch(mode, x):
    pipe, _, _ = beside(mode, model())
    calls = []
    for k, layer in enumerate(pipe):
        layer.register_forward_pre_hook(
            lambda *_, k=k: None if is_recomputing() else calls.append(("before", k))
        )
        layer.register_forward_hook(
            lambda *_, k=k: None if is_recomputing() else calls.append(("after", k))
        )
    weigh(pipe(x)).backward()
    assert sorted(calls) == sorted(
        [(what, k) for what in ("before", "after") for k in range(5)] * 4
    )


def test_full_backward_hooks_get_the_plain_gradients(mode, x):
    layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    pipe, reference, copied = beside(mode, layers)

    def noted(run, module):
        seen = {k: [] for k in range(5)}
        for k in range(5):
            module[k].register_full_backward_hook(
                lambda _, gi, go, k=k: seen[k].append((gi[0], go[0]))
            )
        weigh(run(x.clone().requires_grad_())).backward()
        return seen

    ours, theirs = noted(pipe, pipe), noted(reference, copied)
    for k in range(5):
        assert len(ours[k]) == 4
        for a, b in zip(ours[k], theirs[k], strict=True):
            assert_same(a, b)
