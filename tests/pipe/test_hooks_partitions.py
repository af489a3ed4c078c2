"""Hooks of every kind, on layers, on partitions and on the pipe, under both drivers."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules import module as registry

from syncpipe import Pipe, is_recomputing
from syncpipe.training.weight_gradients import WeightGradients
from tests.support.training import FOUR, KINDS, RUNS

MODES = ["never", "except_last", "always"]
every_mode = pytest.mark.parametrize("mode", MODES)
DRIVERS = ["pipe(x)", *KINDS]
every_driver = pytest.mark.parametrize("driver", DRIVERS)
KIND_OF_HOOKS = ["forward_pre", "forward", "forward_kwargs", "full_backward_pre", "full_backward"]


def model() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh())


def register(module: nn.Module, kind: str, note) -> None:
    """A hook of a kind that notes what it is given."""
    if kind == "forward_pre":
        module.register_forward_pre_hook(lambda _, args: note(args))
    elif kind == "forward":
        module.register_forward_hook(lambda _, args, y: note((*args, y)))
    elif kind == "forward_kwargs":
        module.register_forward_hook(
            lambda _, args, kwargs, y: note((*args, y)), with_kwargs=True, always_call=True
        )
    elif kind == "full_backward_pre":
        module.register_full_backward_pre_hook(lambda _, gy: note(gy))
    else:
        module.register_full_backward_hook(lambda _, gx, gy: note((*gx, *gy)))


def run(driver: str, pipe: Pipe, x: torch.Tensor, target: torch.Tensor) -> None:
    x = x.clone().requires_grad_()
    if driver == "pipe(x)":
        F.mse_loss(pipe(x), target).backward()
    else:
        pipe.train_batch(x, target, loss_fn=F.mse_loss, **RUNS[driver][0])


def devices_of(driver: str) -> list[str]:
    return FOUR if driver == "pipe(x)" else RUNS[driver][1]


def of_plain(kind: str, x: torch.Tensor, target: torch.Tensor, parts) -> list[list]:
    """What hooks on parts of the plain model see, micro-batch by micro-batch."""
    plain, seen = model(), [[], [], [], []]
    wrapped = nn.Sequential(*(nn.Sequential(layer) for layer in plain)) if parts else plain
    for k, part in enumerate(wrapped):
        register(part, kind, lambda values, k=k: seen[k].append([v.detach() for v in values]))
    x = x.clone().requires_grad_()
    for a, b in zip(x.chunk(4), target.chunk(4), strict=True):
        (F.mse_loss(wrapped(a), b) / 4).backward()
    return seen


@every_driver
@every_mode
@pytest.mark.parametrize("kind", KIND_OF_HOOKS)
@pytest.mark.parametrize("on", ["layers", "partitions"])
def test_hooks_see_what_they_see_in_the_plain_loop(driver, mode, kind, on):
    x, target = torch.randn(8, 4), torch.randn(8, 5)
    pipe = Pipe(model(), [1] * 4, devices=devices_of(driver), chunks=4, checkpoint=mode)
    seen = [[], [], [], []]

    def note(k, values):
        if not is_recomputing():
            seen[k].append([value.detach().clone() for value in values])

    for k, part in enumerate(pipe if on == "layers" else pipe.partitions):
        register(part, kind, partial(note, k))
    run(driver, pipe, x, target)
    for ours, theirs in zip(seen, of_plain(kind, x, target, on == "partitions"), strict=True):
        assert len(ours) == len(theirs)
        if driver in ("pipe(x)", "gpipe") and "backward" in kind:
            ours = ours[::-1]  # last micro-batch first
        for a, b in zip(ours, theirs, strict=True):
            for actual, expected in zip(a, b, strict=True):
                torch.testing.assert_close(actual, expected)


@every_driver
@every_mode
def test_a_full_backward_hook_of_a_partition_may_change_the_gradient(driver, mode):
    x, target = torch.randn(8, 4), torch.randn(8, 5)
    grads = []
    for factor in (1, 2):
        pipe = Pipe(model(), [1] * 4, devices=devices_of(driver), chunks=4, checkpoint=mode)
        pipe.partitions[1].register_full_backward_hook(
            lambda _, gx, gy, factor=factor: (gx[0] * factor,)
        )
        run(driver, pipe, x, target)
        grads.append(pipe[0].weight.grad)
    assert torch.equal(grads[1], 2 * grads[0])


@pytest.mark.parametrize("call", ["train_batch", "eval_batch"])
@pytest.mark.parametrize("kind", KIND_OF_HOOKS)
def test_hooks_of_the_pipe_itself_are_refused_where_they_would_not_run(call, kind):
    pipe = Pipe(model(), [1] * 4, devices=FOUR)
    register(pipe, kind, lambda _: None)
    options = {"loss_fn": F.mse_loss}
    with pytest.raises(RuntimeError, match=r"hooks of the pipe itself .*pipe\(x\)"):
        getattr(pipe, call)(torch.randn(8, 4), torch.randn(8, 5), **options)


@pytest.mark.parametrize("kind", KIND_OF_HOOKS)
def test_hooks_of_the_pipe_itself_run_once_in_pipe_of_x(kind):
    pipe, calls = Pipe(model(), [1] * 4, devices=FOUR, chunks=4), []
    register(pipe, kind, calls.append)
    run("pipe(x)", pipe, torch.randn(8, 4), torch.randn(8, 5))
    assert len(calls) == 1


@every_driver
def test_global_hooks_see_the_layers(driver):
    calls = []
    handles = [
        registry.register_module_forward_pre_hook(lambda m, _: calls.append(("pre", type(m)))),
        registry.register_module_forward_hook(lambda m, _, y: calls.append(("after", type(m)))),
        registry.register_module_full_backward_hook(
            lambda m, gx, gy: calls.append(("backward", type(m)))
        ),
    ]
    try:
        pipe = Pipe(model(), [1] * 4, devices=devices_of(driver), chunks=4, checkpoint="never")
        run(driver, pipe, torch.randn(8, 4), torch.randn(8, 5))
    finally:
        for handle in handles:
            handle.remove()
    for when in ("pre", "after", "backward"):
        for kind in (nn.Linear, nn.Tanh):
            assert calls.count((when, kind)) == 8


def test_state_dict_hooks_of_layers_run():
    pipe, calls = Pipe(model(), [1] * 4, devices=FOUR), []
    pipe[0].register_state_dict_pre_hook(lambda *_: calls.append("save"))
    pipe[0].register_load_state_dict_pre_hook(lambda *_: calls.append("load"))
    pipe[0].register_load_state_dict_post_hook(lambda *_: calls.append("loaded"))
    pipe.load_state_dict(pipe.state_dict())
    assert calls == ["save", "load", "loaded"]


def test_hooks_of_a_partition_stay_when_a_layer_is_replaced():
    pipe, calls = Pipe(model(), [2, 2], devices=FOUR, chunks=2), []
    handle = pipe.partitions[1].register_forward_hook(lambda *_: calls.append("after"))
    setattr(pipe, "2", nn.Linear(5, 5))
    pipe(torch.randn(8, 4))
    assert len(calls) == 2
    handle.remove()
    pipe(torch.randn(8, 4))
    assert len(calls) == 2


def test_another_balance_is_refused_while_partitions_have_hooks():
    pipe = Pipe(model(), [2, 2], devices=FOUR)
    handle = pipe.partitions[1].register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match=r"pipe\.partitions\[1\] has hooks \(_forward_hooks\)"):
        pipe.balance = [1, 3]
    assert pipe.balance == [2, 2]
    handle.remove()
    pipe.balance = [1, 3]
    assert pipe.balance == [1, 3]


# -- hooks on the nodes that add to the gradients of parameters


def node_of(parameter: torch.Tensor):
    """The node of a parameter, as Megatron and Apex get hold of it."""
    return parameter.expand_as(parameter).grad_fn.next_functions[0][0]


@pytest.mark.parametrize("before", [False, True], ids=["register_hook", "register_prehook"])
@pytest.mark.parametrize("hold", ["node", "graph"])
@pytest.mark.parametrize("run", KINDS)
def test_hooks_on_accumulation_nodes_see_the_gradient_of_each_micro_batch(run, before, hold):
    pipe = Pipe(model(), [1] * 4, devices=RUNS[run][1], chunks=4, checkpoint="never")
    plain = copy.deepcopy(pipe[:])
    seen, held = {}, []

    def watch(module, which):
        for name, parameter in module.named_parameters():

            def note(*given, parameter=parameter, name=name):
                grad = given[0][0] if before else parameter.grad
                seen.setdefault((which, name), []).append(grad.clone())

            if hold == "node":
                held.append(node_of(parameter))
                (held[-1].register_prehook if before else held[-1].register_hook)(note)
            else:
                held.append(parameter.expand_as(parameter))
                node = held[-1].grad_fn.next_functions[0][0]
                (node.register_prehook if before else node.register_hook)(note)

    watch(pipe, "ours")
    watch(plain, "theirs")
    x, target = torch.randn(8, 4), torch.randn(8, 5)
    pipe.train_batch(x, target, loss_fn=F.mse_loss, **RUNS[run][0])
    for a, b in zip(x.chunk(4), target.chunk(4), strict=True):
        (F.mse_loss(plain(a), b) / 4).backward()
    assert len(seen) == 2 * len(list(plain.parameters()))
    names = [name for which, name in seen if which == "theirs"]
    order = range(4) if run != "gpipe" else range(3, -1, -1)
    for name in names:
        ours, theirs = seen["ours", name], seen["theirs", name]
        assert len(ours) == len(theirs) == 4
        if before:
            theirs = [theirs[i] for i in order]
            torch.testing.assert_close(ours, theirs)
        else:
            torch.testing.assert_close(ours[-1], theirs[-1])


def test_only_weights_whose_node_has_hooks_go_back_whole():
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    node = node_of(layers[0].weight)
    handle = node.register_hook(lambda *_: None)
    for expected in (1, 2):
        weights = WeightGradients()
        weights.go_back([layers(torch.randn(3, 4)).sum()], [torch.ones(())])
        assert len(weights.halves) == expected
        handle.remove()
