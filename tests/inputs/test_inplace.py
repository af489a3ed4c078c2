"""Layers that write into their inputs: what others still need stays as it was."""

from __future__ import annotations

import threading
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from syncpipe import Pipe, inline, pop, skippable, stash
from syncpipe.storage import clones, overlap
from tests.support.models import CHECKPOINT_MODES, Receive, Send, assert_equals_plain
from tests.support.running import Do, assert_same
from tests.support.training import FOUR, weigh

every_mode = pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
REFUSED = "whose memory others use"


def pipe_of(*layers: nn.Module, stages: int = 0, **options: Any) -> Pipe:
    """A pipe on CPU workers of its own, with a layer in each stage but the last."""
    n = stages or len(layers)
    balance = [1] * (n - 1) + [len(layers) - n + 1]
    options = {"devices": FOUR[:n], "chunks": 2, **options}
    return Pipe(nn.Sequential(*layers), balance, **options)


def both_drivers(pipe: Pipe, *given: Any) -> list[Any]:
    """The gradients of the parameters after a step of either driver, twice each."""

    def loss_fn(y: Tensor, goal: Any = 1.0) -> Tensor:
        return (y * goal).square().sum()

    found = []
    for k in range(4):
        pipe.zero_grad()
        if k % 2:
            pipe.train_batch(*given, loss_fn=loss_fn, loss_reduction="sum", schedule="gpipe")
        else:
            loss_fn(pipe(given[0]), *given[1:]).backward()
        found.append([p.grad for p in pipe.parameters()])
    return found


def write_first(pair: Any) -> Tensor:
    a, b = pair
    a.mul_(2)
    return a + b


def without_grad(context: Any, driver: Any) -> Any:
    def run(pipe: Pipe, *given: Any) -> Any:
        with context():
            return driver(pipe, *given)

    return run


NO_GRAD = [
    without_grad(context, driver)
    for context in (torch.no_grad, torch.inference_mode)
    for driver in (Pipe.forward, Pipe.eval_batch)
]


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("before", [0, 1])
@every_mode
@pytest.mark.parametrize(
    "driver", [Pipe.forward, partial(Pipe.train_batch, loss_fn=weigh), *NO_GRAD]
)
def test_views_of_one_memory_are_refused_where_one_of_them_is_written_into(
    driver, checkpoint, before, chunks
):
    last = nn.Linear(2, 2), nn.Identity()
    layers = [*(nn.Identity() for _ in range(before)), Do(write_first), *last]
    pipe = pipe_of(*layers, chunks=chunks, checkpoint=checkpoint)
    x = torch.randn(4, 4)
    for pair in ((x[:, :2], x[:, 1:3]), (x[:, :2], x[:, 2:])):  # taken for overlapping
        for _ in range(2):
            with pytest.raises(RuntimeError, match=REFUSED):
                driver(pipe, pair)
        driver(pipe, (pair[0].clone(), pair[1]))
    driver(pipe_of(Do(sum), *last), (x[:, :2], x[:, 1:3]))  # fine where nobody writes


@pytest.mark.parametrize("chunks", [1, 2])
@every_mode
def test_parts_of_one_memory_that_do_not_overlap_may_be_written_into(checkpoint, chunks):
    pipe = pipe_of(Do(write_first), nn.Linear(2, 2), chunks=chunks, checkpoint=checkpoint)
    x = torch.randn(8, 2)
    first, *others = both_drivers(pipe, (x[:4].clone(), x[4:].clone()))
    assert_same([*others, *both_drivers(pipe, (x[:4], x[4:]))], [first] * 7)


@pytest.mark.parametrize("chunks", [1, 2])
@every_mode
@pytest.mark.parametrize("source", ["mini-batch", "iterator"])
@pytest.mark.parametrize("before", [0, 2])
def test_a_target_in_the_memory_of_an_input_that_is_written_into_is_refused(
    before, source, checkpoint, chunks
):
    # The plain model would compare with what the layer left of it.
    layers = [nn.Identity()] * before + [nn.ReLU(inplace=True), nn.Linear(3, 3)]
    pipe = pipe_of(*layers, chunks=chunks, checkpoint=checkpoint)
    x = torch.randn(4, 3)
    for _ in range(2):
        given: dict[str, Any] = {"input": x, "target": x}
        if source == "iterator":
            given = {"data_iter": [(c, c) for c in x.chunk(chunks)]}
        for call in pipe.train_batch, pipe.eval_batch:
            with pytest.raises(RuntimeError, match=REFUSED):
                call(**{k: iter(v) if k == "data_iter" else v for k, v in given.items()},
                     loss_fn=nn.functional.mse_loss)  # fmt: skip


@every_mode
def test_a_target_in_the_memory_of_an_input_is_fine_where_nobody_writes(checkpoint):
    layers = nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 3)
    x = torch.randn(4, 3)
    first, *others = both_drivers(pipe_of(*layers, stages=2, checkpoint=checkpoint), x, x)
    assert_same(others, [first] * 3)


# --- copies --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x,
        lambda x: x[3:],
        lambda x: x[:, 1:],
        lambda x: x.t(),
        lambda x: x[:, :1].expand(-1, 4),
        lambda x: x.view(-1).unfold(0, 3, 1),
        lambda x: x[:0],
        lambda x: x[2, 3],
        lambda x: x.to(torch.complex64).conj(),
    ],
)
def test_a_copy_has_strides_and_alignment_of_the_original(view):
    original = view(torch.randn(5, 6, requires_grad=True))
    (copied,) = clones([original])
    assert torch.equal(copied, original)
    assert copied.stride() == original.stride()
    assert original.is_conj() or (copied.data_ptr() - original.data_ptr()) % 64 == 0
    assert not original.numel() or copied.untyped_storage() is not original.untyped_storage()
    (grad,) = torch.autograd.grad(copied, original, ones := torch.ones_like(original))
    assert torch.equal(grad, ones)


def test_overlap_goes_by_storage_and_extent():
    x = torch.zeros(4, 6)
    assert overlap(x, x)
    assert overlap(x[:, :3], x[:, 2:])
    assert overlap(x[:, :3], x[:, 3:])  # not told apart
    assert not overlap(x[:2], x[2:])
    assert overlap(x[1].expand(3, 6), x[:2])
    assert overlap(x.view(torch.int32)[:3], x[2:])
    assert not overlap(x.view(torch.int16)[:2], x[2:])
    assert not overlap(x, torch.zeros(4, 6))
    assert not overlap(x[:0], x)


@pytest.mark.parametrize("hook", ["register_forward_pre_hook", "register_forward_hook"])
@pytest.mark.parametrize("on", ["layer", "partition", "all modules"])
def test_a_hook_that_writes_into_the_input(on, hook):
    pipe = pipe_of(nn.Linear(3, 3), nn.ReLU(), chunks=1)
    first = pipe.partitions[0]
    pipe(torch.randn(4, 3))
    target = {"layer": first[0], "partition": first, "all modules": nn.modules.module}[on]
    hook = hook if on != "all modules" else hook.replace("_forward", "_module_forward")

    def write(module: nn.Module, args: Any, *_: Any) -> None:
        if module is first or module is first[0]:
            args[0].mul_(2)

    handle = getattr(target, hook)(write)
    x = torch.randn(4, 3)
    given = x.clone()
    try:
        pipe(given)
    finally:
        handle.remove()
    assert torch.equal(given, x)


@pytest.mark.parametrize(
    "layers",
    [[lambda x: x.mul_(2), nn.Linear(3, 3)], [nn.Identity(), nn.Threshold(2.0, 3.0, inplace=True)]],
)
def test_a_function_that_writes_into_the_input_or_a_stage_to_which_it_was_handed_on(layers):
    x = torch.ones(4, 3)
    Pipe(layers, [1, 1], devices=FOUR[:2], chunks=2)(x)
    assert torch.equal(x, torch.ones(4, 3))


@every_mode
@pytest.mark.parametrize("balance", [[2, 3], [1, 2, 2], [2, 1, 1, 1]])
@pytest.mark.parametrize("devices", [["cpu:0"] * 4, FOUR])
def test_a_stashed_tensor_that_is_changed_is_right_or_refused(balance, checkpoint, devices):
    # The plain model pops what the ReLU left of the tensor.
    layers = [nn.Linear(3, 3), Send(), nn.ReLU(inplace=True), nn.Tanhshrink(), Receive()]
    options: dict[str, Any] = {"checkpoint": checkpoint, "devices": devices, "chunks": 3}
    x = torch.randn(6, 3, requires_grad=True)
    with suppress(RuntimeError, ValueError):
        assert_equals_plain(nn.Sequential(*layers), x, balance, steps=2, **options)


# --- what a layer keeps, changes and hands on ------------------------------------------------


class Keeps(nn.Module):
    """Hands on a mean that it keeps, and moves in place with each micro-batch."""

    def __init__(self, way: Any) -> None:
        super().__init__()
        self.linear, self.way, self.forwards = nn.Linear(4, 4), way, 0
        self.register_buffer("mean", torch.zeros(4))
        self.state = {"queue": [torch.zeros(4)]}
        self.through = threading.Event()

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            for kept in (self.mean, self.state["queue"][0]):
                kept.mul_(0.5).add_(x.mean(0))
        self.forwards += 1
        if self.forwards == 4:
            self.through.set()
        return {"x": self.linear(x), "mean": self.way(self)}


class Uses(nn.Module):
    """Goes on when the layer before is through with all micro-batches."""

    def __init__(self, through: threading.Event) -> None:
        super().__init__()
        self.through = through

    def forward(self, tree: Any) -> Tensor:
        assert self.through.wait(60)
        return tree["x"] - tree["mean"]

    def __deepcopy__(self, memo: Any) -> Uses:
        self.through.set()
        return self


WAYS = {
    "a buffer": lambda m: m.mean,
    "a view": lambda m: m.mean[None],
    "without a graph": lambda m: m.mean.detach(),
    "past versions": lambda m: m.mean.data.view(4),
    "a state": lambda m: m.state["queue"][0],
    "a view of a state": lambda m: m.state["queue"][0].expand(2, 4),
}
DRIVERS = [Pipe.forward, partial(Pipe.train_batch, loss_fn=weigh, schedule="gpipe"), *NO_GRAD]


@every_mode
@pytest.mark.parametrize("run", DRIVERS)
@pytest.mark.parametrize("way", WAYS)
def test_what_a_layer_keeps_and_changes_is_handed_on_as_it_was(way, run, checkpoint):
    keeps = Keeps(WAYS[way])
    found: list[Tensor] = []
    pipe = pipe_of(keeps, Uses(keeps.through), Do(found.append), chunks=4, stages=2,
                   checkpoint=checkpoint)  # fmt: skip
    x = torch.randn(8, 4)
    refused = checkpoint != "never" and run is DRIVERS[1] and "state" in way  # it is no buffer
    with pytest.raises(RuntimeError, match="another result") if refused else nullcontext():
        run(pipe, x)
    keeps.state["queue"][0].zero_()
    keeps.mean.zero_()
    for piece, given in zip(x.chunk(4), found[:4], strict=not refused):
        tree = keeps(piece)
        assert torch.equal(given, tree["x"] - tree["mean"])


def test_what_a_layer_keeps_may_not_be_written_into_elsewhere():
    pipe = pipe_of(Keeps(WAYS["a buffer"]), Do(lambda tree: tree["x"] + tree["mean"].add_(1)))
    with pytest.raises(RuntimeError, match=REFUSED):
        pipe(torch.randn(4, 4))


@pytest.mark.parametrize("context", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_what_nothing_keeps_is_sent_as_it_is(context):
    sent: list[int] = []

    def address(x: Any) -> None:
        sent.append(x.data_ptr())

    made = [lambda x: x * 2, lambda x: (x * 2).view(-1, 2), lambda x: (x * 2)[1:].t().detach()]
    layers = [Do(lambda x, make=make: (y := make(x), address(y))[0]) for make in made]
    used = [Do(address) for _ in made]
    with context():
        pipe_of(*[each for pair in zip(layers, used, strict=True) for each in pair],
                devices=[*FOUR, "cpu:4", "cpu:5"], chunks=1)(torch.randn(4, 2))  # fmt: skip
    assert sent[::2] == sent[1::2]


def test_a_plain_graph_leaves_the_input_as_it_was():
    pipe = Pipe(
        nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4)), [2], devices=["cpu"], chunks=2
    )
    x = -torch.ones(4, 4)
    with inline(graph=True):
        pipe(x)
    assert torch.equal(x, -torch.ones(4, 4))


@skippable(stash=["shared"])
class Share(nn.Module):
    def forward(self, x):
        yield stash("shared", x)
        return x


@skippable(pop=["shared"])
class Add(nn.Module):
    def forward(self, x):
        shared = yield pop("shared")
        return x + shared


@pytest.mark.parametrize("grad", [False, True])
def test_a_stage_that_passes_a_shared_tensor_on_does_not_make_it_the_next_ones(grad):
    layers = nn.Sequential(
        nn.Linear(4, 4), Share(), nn.Identity(), nn.Hardtanh(inplace=True), Add()
    )
    pipe = Pipe(layers, [2, 1, 1, 1], devices=["cpu"] * 4, chunks=2, checkpoint="never")
    with torch.set_grad_enabled(grad), pytest.raises(RuntimeError, match="modified in place"):
        pipe(torch.randn(4, 4))
