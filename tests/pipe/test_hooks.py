"""Hooks of every kind under both drivers; layers and pipes that others have wrapped."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import partial
from types import MethodType

import pytest
import torch
import torch.nn.functional as F
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from syncpipe import Pipe, is_recomputing
from syncpipe.runtime.weight_gradients import WeightGradients
from tests.support.running import MODES
from tests.support.training import FOUR, KINDS, RUNS

every_mode = pytest.mark.parametrize("mode", [*MODES, [0, 2]])
every_driver = pytest.mark.parametrize("driver", ["pipe(x)", *KINDS])
KIND_OF_HOOKS = ["forward_pre", "forward", "forward_kwargs", "full_backward_pre", "full_backward"]


def model() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh())


def pipe_for(driver: str, **options) -> Pipe:
    devices = FOUR if driver == "pipe(x)" else RUNS[driver][1]
    return Pipe(model(), [1] * 4, devices=devices, chunks=4, **options)


def register(module: nn.Module, kind: str, note) -> None:
    """A hook of a kind that notes what it is given, and changes it."""

    def hook(_, *given):
        given = [(each,) if isinstance(each, torch.Tensor) else each for each in given]
        note([value for values in given if not isinstance(values, dict) for value in values])
        changed = tuple([value * 2 for value in given[0 if "backward" in kind else -1]])
        return changed[0] if kind.startswith("forward") and "pre" not in kind else changed

    options = {"with_kwargs": True, "always_call": True} if "kwargs" in kind else {}
    getattr(module, f"register_{kind.removesuffix('_kwargs')}_hook")(hook, **options)


X, TARGET = torch.arange(32.0).view(8, 4).sin(), torch.arange(40.0).view(8, 5).cos()


def run(driver: str, pipe: Pipe) -> None:
    x = X.clone().requires_grad_()
    if driver == "pipe(x)":
        F.mse_loss(pipe(x), TARGET).backward()
    else:
        pipe.train_batch(x, TARGET, loss_fn=F.mse_loss, **RUNS[driver][0])


def run_plain(module: nn.Module) -> None:
    x = X.clone().requires_grad_()
    for a, b in zip(x.chunk(4), TARGET.chunk(4), strict=True):
        (F.mse_loss(module(a), b) / 4).backward()


@every_driver
@every_mode
@pytest.mark.parametrize("kind", KIND_OF_HOOKS)
@pytest.mark.parametrize("on", ["layers", "partitions"])
def test_hooks_see_what_they_see_in_the_plain_loop(driver, mode, kind, on):
    pipe, plain = pipe_for(driver, checkpoint=mode), model()
    if on == "partitions":
        plain = nn.Sequential(*(nn.Sequential(layer) for layer in plain))
    seen = {(which, k): [] for which in ("ours", "theirs") for k in range(4)}

    def note(key, values):
        if not is_recomputing():
            seen[key].append([value.detach().clone() for value in values])

    parts = {"ours": pipe if on == "layers" else pipe.partitions, "theirs": plain}
    for which, those in parts.items():
        for k, part in enumerate(those):
            register(part, kind, partial(note, (which, k)))
    run(driver, pipe)
    run_plain(plain)
    for k in range(4):
        ours = seen["ours", k]
        if driver in ("pipe(x)", "gpipe") and "backward" in kind:
            ours = ours[::-1]  # last micro-batch first
        torch.testing.assert_close(ours, seen["theirs", k])


@every_mode
def test_hooks_of_parameters_run_once_a_backward(mode):
    pipe, calls = pipe_for("pipe(x)", checkpoint=mode), []
    for name, parameter in pipe.named_parameters():
        parameter.register_hook(lambda g, name=name: calls.append(name))
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: calls.append(name))
    run("pipe(x)", pipe)  # the last layer's first, as in the plain model
    assert calls == [name for name in ("2.bias", "2.weight", "0.bias", "0.weight") for _ in "ab"]


class Makes(nn.Module):
    """Makes a tensor with a hook when it is called first, as a parameter of its own or not."""

    def __init__(self, kind: type) -> None:
        super().__init__()
        self.kind, self.calls = kind, []
        self.register_parameter("weight", None)
        self.hidden: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.hidden:
            self.hidden.append(self.kind(torch.ones(4)).requires_grad_())
            self.hidden[0].register_hook(self.calls.append)
            self.weight = self.hidden[0] if self.kind is nn.Parameter else None
        return x * self.hidden[0]


@pytest.mark.parametrize(
    ("kind", "message"),
    [(nn.Parameter, r"was made in this call.*no_grad\(\)"), (torch.clone, "no param.*Make it one")],
)
def test_a_tensor_with_hooks_that_no_layer_had_before_the_call_is_refused(kind, message):
    pipe = Pipe(nn.Sequential(Makes(kind), nn.Tanh()), [1, 1], devices=FOUR[:2], chunks=4)
    with pytest.raises(RuntimeError, match=message):
        pipe(X)
    with torch.no_grad():
        pipe(X)
    if kind is nn.Parameter:
        pipe(X).sum().backward()
        assert len(pipe[0].calls) == 1


@pytest.mark.parametrize("kind", KIND_OF_HOOKS)
def test_hooks_of_the_pipe_itself_run_once_in_pipe_of_x_and_are_refused_elsewhere(kind):
    pipe, calls = pipe_for("pipe(x)"), []
    register(pipe, kind, calls.append)
    run("pipe(x)", pipe)
    assert len(calls) == 1
    for call in pipe.train_batch, pipe.eval_batch:
        with pytest.raises(RuntimeError, match=r"hooks of the pipe itself .*pipe\(x\)"):
            call(X, TARGET, loss_fn=F.mse_loss)


def test_hooks_of_a_partition_stay_with_a_new_layer_and_refuse_another_balance():
    pipe, calls = Pipe(model(), [2, 2], devices=FOUR, chunks=2), []
    handle = pipe.partitions[1].register_forward_hook(lambda *_: calls.append("after"))
    setattr(pipe, "2", nn.Linear(5, 5))
    pipe(X)
    pipe[3] = nn.ReLU()
    pipe(X)
    assert len(calls) == 4
    with pytest.raises(ValueError, match=r"pipe\.partitions\[1\] has hooks \(_forward_hooks\)"):
        pipe.balance = [1, 3]
    assert pipe.balance == [2, 2]
    handle.remove()
    pipe.balance = [1, 3]
    pipe(X)
    assert len(calls) == 4


# --- hooks on the nodes that add to the gradients of parameters ------------------------------


def node_of(expanded: torch.Tensor):
    """The node of a parameter, as Megatron and Apex get hold of it."""
    return expanded.grad_fn.next_functions[0][0]


@pytest.mark.parametrize("before", [False, True], ids=["register_hook", "register_prehook"])
@pytest.mark.parametrize("hold", ["node", "graph"])
@pytest.mark.parametrize("driver", KINDS)
def test_hooks_on_accumulation_nodes_see_the_gradient_of_each_micro_batch(driver, before, hold):
    pipe = pipe_for(driver, checkpoint="never")
    plain = copy.deepcopy(pipe[:])
    seen, held = {}, []
    for which, module in (("ours", pipe), ("theirs", plain)):
        for name, parameter in module.named_parameters():

            def note(*given, parameter=parameter, key=(which, name)):
                grad = given[0][0] if before else parameter.grad
                seen.setdefault(key, []).append(grad.clone())

            expanded = parameter.expand_as(parameter)
            node = node_of(expanded)
            held.append(node if hold == "node" else expanded)
            (node.register_prehook if before else node.register_hook)(note)
    run(driver, pipe)
    run_plain(plain)
    order = range(3, -1, -1) if driver == "gpipe" else range(4)
    for name, _ in plain.named_parameters():
        ours, theirs = seen["ours", name], seen["theirs", name]
        assert len(ours) == len(theirs) == 4
        if before:
            torch.testing.assert_close(ours, [theirs[i] for i in order])
        else:
            torch.testing.assert_close(ours[-1], theirs[-1])


def test_only_weights_whose_node_has_hooks_go_back_whole():
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    node = node_of(layers[0].weight.expand_as(layers[0].weight))
    handle = node.register_hook(lambda *_: None)
    for expected in (1, 2):
        weights = WeightGradients()
        weights.go_back([layers(torch.randn(3, 4)).sum()], [torch.ones(())])
        assert len(weights.pending) == expected
        handle.remove()


# --- layers and pipes that others have wrapped ---------------------------------------------------


ONES, ZEROS = torch.ones(8, 4), torch.zeros(8, 4)
needs_gloo = pytest.mark.skipif(
    not (distributed.is_available() and distributed.is_gloo_available()), reason="needs gloo"
)


def layers() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))


@pytest.fixture
def one_process(tmp_path):
    distributed.init_process_group("gloo", f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def sharded(layer: nn.Module) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
    return layer


WRAPPERS = {"DistributedDataParallel": nn.parallel.DistributedDataParallel, "FSDP": sharded}


def test_a_pipe_inside_a_layer_keeps_parameters_that_have_hooks():
    layers = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    inner = Pipe(layers, [1, 1], devices=["cpu:0", "cpu:1"], chunks=2)
    layers[0].weight.register_hook(lambda grad: grad * 2)
    pipe = Pipe(nn.Sequential(nn.Linear(3, 3), inner), [2], devices=["cpu:0"], chunks=2)
    before = list(pipe.parameters())
    for _ in range(2):
        pipe(torch.randn(4, 3)).sum().backward()
        assert all(a is b for a, b in zip(pipe.parameters(), before, strict=True))


@needs_gloo
@pytest.mark.parametrize("run", KINDS)
@pytest.mark.parametrize("name", WRAPPERS)
@pytest.mark.parametrize("place", ["layer", "inside", "later"])
def test_layers_that_communicate_in_backward_are_refused(one_process, run, name, place):
    module, wrap = layers(), WRAPPERS[name]
    if place == "layer":
        module[1] = wrap(module[1])
    elif place == "inside":
        module[1] = nn.Sequential(wrap(module[1]))
    pipe = Pipe(module, [1] * 4, devices=RUNS[run][1], chunks=2)
    if place == "later":
        setattr(pipe, "1", wrap(pipe[1]))
    with pytest.raises(RuntimeError, match=rf"wrapped in {name}.*data_parallel\(pipe\)"):
        pipe.train_batch(ONES, ZEROS, loss_fn=F.mse_loss, **RUNS[run][0])
    with pytest.raises(RuntimeError, match=rf"wrapped in {name}.*fully_shard\(pipe\)"):
        pipe(ONES)


@needs_gloo
@pytest.mark.parametrize("balance", [[2, 2], [1, 3], [4]])
def test_tensor_parallel_layers_are_refused_on_several_workers(one_process, balance):
    module, mesh = layers(), init_device_mesh("cpu", (1,))
    linear = [k for k, layer in enumerate(module) if isinstance(layer, nn.Linear)][:2]
    for k in linear:
        parallelize_module(module[k], mesh, ColwiseParallel())
    devices = [f"cpu:{j}" for j in range(len(balance))]
    pipe = Pipe(module, balance, devices=devices, chunks=2, checkpoint="never")
    calls = [
        lambda: pipe(ONES), lambda: pipe.eval_batch(ONES),
        lambda: pipe.train_batch(ONES, ZEROS, loss_fn=F.mse_loss),
    ]  # fmt: skip
    held = len({0 if k < balance[0] else 1 for k in linear}) == 1
    for call in calls:
        with nullcontext() if held else pytest.raises(RuntimeError, match="DTensor parameters"):
            call()


def doubling(method: str):
    """A method that calls that of ``Pipe`` and doubles the result."""
    return lambda self, *args: 2 * getattr(Pipe, method)(self, *args)


@pytest.mark.parametrize(
    ("on", "method"),
    [*[("class", name) for name in ("forward", "__call__", "_call_impl")],
     ("instance", "forward"), ("instance", "_call_impl")],
)  # fmt: skip
def test_a_forward_of_its_own_is_refused_where_it_would_not_run(method, on):
    kind = type("Own", (Pipe,), {method: doubling(method)} if on == "class" else {})
    pipe = kind(layers(), [1] * 4, devices=FOUR)
    if on == "instance":
        setattr(pipe, method, MethodType(doubling(method), pipe))
    for call in pipe.train_batch, pipe.eval_batch:
        with pytest.raises(RuntimeError, match=rf"has a {method} of its own.*pipe\(x\)"):
            call(ONES, ZEROS, loss_fn=F.mse_loss)
    assert torch.equal(pipe(ONES), 2 * pipe[:](ONES))


def test_a_subclass_without_a_forward_of_its_own_trains():
    class Named(Pipe):
        def step(self):
            return self.train_batch(ONES, ZEROS, loss_fn=F.mse_loss)

    assert torch.isfinite(Named(layers(), [1] * 4, devices=FOUR).step())
