"""What ``train_stream`` takes and refuses, the versions that it holds, layers with habits."""

from __future__ import annotations

import gc
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from syncpipe import Pipe
from syncpipe.schedules.stream import VERSIONS
from syncpipe.training import stream
from tests.support.running import Do, assert_same
from tests.support.watched import Memory, alive, gone
from tests.training.stream.models import (
    WORKERS,
    adam,
    assert_as_in_the_papers,
    mini_batches,
    mlp,
    sgd,
)


def pipe_of(**options):
    options = {"devices": WORKERS, "chunks": 4, **options}
    return Pipe(
        options.pop("module", None) or mlp(), options.pop("balance", [2, 2, 2, 1]), **options
    )


def train(pipe, data=None, **options):
    data = mini_batches(5, 8) if data is None else data
    return pipe.train_stream(data, **{"optimizer": sgd, "loss_fn": F.cross_entropy, **options})


def assert_works(pipe):
    assert len(train(pipe).losses) == 5


def test_two_calls_are_one_with_the_optimizers_of_the_first():
    """But for the flush in between; gradients from before have no part."""
    data = mini_batches(6)
    pipe, plain = pipe_of(balance=[7], devices=["cpu"]), pipe_of(balance=[7], devices=["cpu"])
    for parameter in pipe.parameters():
        parameter.grad = torch.ones_like(parameter)
    first = train(pipe, data[:3], optimizer=adam)
    train(pipe, data[3:], optimizer=first.optimizers)
    train(plain, data, optimizer=adam)
    assert_same(pipe.state_dict(), plain.state_dict())


def test_metrics_come_for_each_mini_batch():
    def loss_fn(y, target):
        return F.cross_entropy(y, target), {"right": (y.argmax(1) == target).sum()}

    found = train(pipe_of(), loss_fn=loss_fn)
    assert [set(each) for each in found.metrics] == [{"right"}] * 5
    assert train(pipe_of()).metrics == [None] * 5


@pytest.mark.parametrize("replicas", [[1, 1, 1, 1], [1, 1, 1, 2]])
def test_losses_and_metrics_that_are_put_together_are_in_order(monkeypatch, replicas):
    devices = [f"cpu:{j}" for j in range(sum(replicas))]

    def loss_fn(y, target):
        return F.cross_entropy(y, target), {"target": int(target[0])}

    one_by_one = train(
        pipe_of(chunks=1, devices=devices, replicas=replicas), mini_batches(8), loss_fn=loss_fn
    )
    monkeypatch.setattr(stream, "_BLOCK_SIZE", 3)
    found = train(
        pipe_of(chunks=1, devices=devices, replicas=replicas), mini_batches(8), loss_fn=loss_fn
    )
    assert torch.equal(found.losses, one_by_one.losses)
    assert found.metrics == one_by_one.metrics
    assert len(found.metrics) == 8


def test_masked_targets_count_in_2bw():
    """The loss is the mean over the targets of the mini-batch that count."""
    data = mini_batches(3, 8)
    for _, target in data:
        target[1:4] = -100
    found = train(pipe_of(), data, versions="2bw")
    with torch.no_grad():
        expected = F.cross_entropy(mlp()(data[0][0]), data[0][1])
    torch.testing.assert_close(found.losses[0], expected)


def watched(kind):
    """A weight that is, or whose memory has, a parameter or buffer of another or the same stage."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4))
    memory, where = model[0].weight.detach(), model[kind in ("elsewhere", "tied", "weight")]
    if kind == "buffer":
        where.register_buffer("watched", memory)
    elif kind in ("tied", "weight"):
        where.weight = model[0].weight if kind == "tied" else nn.Parameter(memory)
    else:
        where.watched = nn.Parameter(memory, requires_grad=False)
    return Pipe(model, [1, 1, 1], devices=WORKERS[:3])


def two(first, **options):
    """Two stages on two workers."""
    return Pipe(nn.Sequential(first, nn.Linear(8, 4)), [1, 1], devices=WORKERS[:2], **options)


def three_and_four(module=None, **options):
    return Pipe(module or mlp(), [3, 4], **{"devices": WORKERS[:2], **options})


class Clamps(nn.Linear):
    """As BinaryConnect does."""

    def forward(self, x):
        self.weight.data = self.weight.data.clamp(-0.1, 0.1)
        return super().forward(x)


def words():
    return [(torch.randint(0, 9, (4,)), torch.randint(0, 4, (4,))) for _ in range(3)]


SCALE = nn.Parameter(torch.ones(()))
replicated = partial(three_and_four, replicas=[2, 1], devices=WORKERS[:3])
#: Arguments of a pipe that has no fault.
ARGUMENTS = [
    ({"optimizer": lambda ps: None}, TypeError, "optimizer of stage 0.*is NoneType"),
    ({"optimizer": [None]}, ValueError, "1 optimizers, but there are 4 stages"),
    ({"optimizer": torch.optim.LBFGS}, TypeError, r"optimizer of stage 0 is LBFGS, .*\(closure\)"),
    ({"optimizer": 0.1}, TypeError, "optimizer=float.*lambda parameters"),
    ({"steps": 0}, ValueError, "steps=0"),
    ({"steps": True}, TypeError, "steps=True"),
    ({"steps": 1.5}, TypeError, "steps=1.5"),
    ({"versions": "gpipe"}, ValueError, "versions='gpipe'.*'stashing', 'vertical_sync', '2bw'"),
    ({"data": []}, ValueError, "gave no mini-batch"),
    ({"data": torch.randn(4, 8)}, TypeError, "data_iter=Tensor"),
    ({"data": 7}, TypeError, "data_iter=int"),
    ({"data": [torch.randn(4, 8)]}, TypeError, "gave Tensor for mini-batch 0"),
    ({"data": mini_batches(1, 8) + mini_batches(1, 3) + mini_batches(1, 8), "versions": "2bw"},
     ValueError, "mini-batch 1 gave 3 micro-batches, and is not the last one.*chunks=4"),
    ({"loss_fn": "mse"}, TypeError, "loss_fn must be callable"),
    ({"loss_fn": lambda y, t: (F.cross_entropy(y, t), 2.0), "versions": "2bw"}, ValueError,
     "give train_stream weight="),
    ({"data": [(torch.randn(4, 8, requires_grad=True), torch.zeros(4).long())]}, ValueError,
     "requires grad"),
    ({"loss_fn": lambda y, t: F.cross_entropy(y * SCALE, t)}, RuntimeError,
     "no optimizer of train_stream would update it"),
    ({"loss_fn": lambda y, t: F.cross_entropy(y.detach(), t)}, RuntimeError,
     "the loss does not require grad"),
]  # fmt: skip
#: Pipes that have no meaning without a flush, and layers that versions would get wrong.
PIPES = [
    (partial(watched, "tied"), {}, ValueError, "are one tensor"),
    (partial(watched, "weight"), {}, ValueError, "share memory"),
    *((partial(watched, kind), {}, ValueError, r"'0\.w.*\(stage 0\).*'[01]\.watched'.*share memory")
      for kind in ("buffer", "frozen", "elsewhere")),
    (lambda: Pipe(mlp(), [2, 2, 3], devices=["cpu:0", "cpu:1", "cpu:0"]), {}, ValueError,
     r"3 stages with replicas=\[1, 1, 1\] on 2 devices"),
    (partial(three_and_four, replicas=2, devices=["cpu:0", "cpu:1", "cpu:1", "cpu:2"]), {},
     ValueError, r"2 stages with replicas=\[2, 2\] on 3 devices"),
    (partial(replicated, mlp(True)), {}, ValueError, "running statistics in its BatchNorm1d"),
    *((partial(replicated, chunks=2), {"versions": versions}, ValueError,
       rf"'{versions}' of a pipe with replicas=\[2, 1\]") for versions in ("vertical_sync", "2bw")),
    (partial(three_and_four, mlp(True), deferred_batch_norm=True), {}, ValueError,
     "deferred_batch_norm"),
    (partial(three_and_four, checkpoint="offload"), {}, ValueError, "offload"),
    (lambda: two(torch.jit.script(nn.Linear(8, 8))), {}, ValueError, "TorchScript"),
    (lambda: two(nn.LazyLinear(8)), {}, ValueError, "has lazy parameters"),
    (lambda: three_and_four(mlp().requires_grad_(False)), {}, ValueError,
     "all parameters .* frozen"),
    (lambda: pipe_of(chunks=3), {"versions": "2bw"}, ValueError, "chunks=3 and 4 stages"),
    (lambda: two(Clamps(8, 8)), {}, RuntimeError, "through .data"),
    (lambda: two(nn.Embedding(9, 8, max_norm=0.1), checkpoint="never"), {"data": words()},
     RuntimeError, "a layer modified a parameter"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("make", "options", "kind", "message"), [*((pipe_of, *row) for row in ARGUMENTS), *PIPES]
)
def test_what_would_be_wrong_is_refused_or_noticed(make, options, kind, message):
    pipe = make()
    with pytest.raises(kind, match=f"(?s){message}"):
        train(pipe, **options)
    assert SCALE.grad is None
    assert all(p.grad is None for p in pipe.parameters())
    if make is pipe_of:
        assert_works(pipe)


def test_optimizers_of_another_balance_are_refused():
    pipe = pipe_of()
    optimizers = train(pipe).optimizers
    pipe.balance = [3, 1, 2, 1]
    with pytest.raises(ValueError, match=r"stage 0 is not for the 4 parameters.*: 2 are"):
        train(pipe, optimizer=optimizers)
    assert_works(pipe)


def test_a_loss_with_a_weight_of_the_last_stage_is_the_plain_loop_there():
    pipe, plain = pipe_of(balance=[7], devices=["cpu"]), mlp()
    optimizer, data = sgd(list(plain.parameters())), mini_batches(4)

    def with_decay(pipe):
        return lambda y, t: F.cross_entropy(y, t) + pipe[6].weight.square().sum()

    train(pipe, data, loss_fn=with_decay(pipe))
    for x, target in data:
        optimizer.zero_grad()
        with_decay(plain)(plain(x), target).backward()
        optimizer.step()
    assert_same(pipe.state_dict(), plain.state_dict())


def test_casts_of_weights_are_not_older_than_the_weights():
    """A cache of autocast lives until the outermost context ends."""
    with torch.autocast("cpu", torch.bfloat16):
        assert_as_in_the_papers(pipe_of(balance=[7], devices=["cpu"]), mini_batches(5))
    assert torch.is_autocast_cache_enabled()


def test_updates_are_in_the_trace():
    pipe = pipe_of()
    with pipe.trace() as trace:
        train(pipe)
    spans = sorted((span.j, span.i) for span in trace.spans if span.kind == "update")
    assert spans == [(j, b) for j in range(4) for b in range(5)]
    assert "update" in trace.table()


class Weighed(nn.Linear):
    """Remembers the memory of the weights that it computed with."""

    def __init__(self) -> None:
        super().__init__(4, 4, bias=False)
        self.seen: list[Memory] = []
        self.counts: list[int] = []

    def forward(self, x):
        memory = self.weight.untyped_storage().data_ptr()
        if all(memory != known for known, _ in self.seen):
            self.seen.append((memory, Memory(self.weight)))
        self.counts.append(alive([each for _, each in self.seen]))
        return super().forward(x)


@pytest.mark.parametrize("versions", VERSIONS)
def test_no_more_memory_is_taken_than_for_the_versions_that_are_held(versions):
    layers = [Weighed() for _ in range(4)]
    pipe = Pipe(nn.Sequential(*layers), [1] * 4, devices=WORKERS, chunks=4, checkpoint="never")
    data = [(torch.randn(8, 4), torch.randint(0, 4, (8,))) for _ in range(20)]
    found = train(pipe, data, versions=versions)
    for layer, kept in zip(pipe, found.kept, strict=True):
        assert len(layer.seen) == kept  # the memory of versions that are over is used again
        assert max(layer.counts) <= kept
    gc.collect()
    for layer in pipe:
        newest = layer.weight.untyped_storage().data_ptr()
        assert gone([memory for where, memory in layer.seen if where != newest])


def test_frozen_layers_have_one_version():
    model = mlp()
    model[0].requires_grad_(False)
    pipe = pipe_of(module=model)
    before, found = pipe[0].weight.clone(), train(pipe)
    assert found.optimizers[0] is None
    assert found.kept[0] == 1
    assert torch.equal(pipe[0].weight, before)


def test_memory_does_not_grow_with_the_number_of_mini_batches():
    """What a call keeps of each mini-batch is its loss, and numbers."""
    alive_at = []

    def data(steps):
        for b in range(steps):
            if b in (50, steps - 1):
                gc.collect()
                alive_at.append(sum(1 for o in gc.get_objects() if isinstance(o, torch.Tensor)))
            yield torch.randn(2, 8), torch.randint(0, 4, (2,))

    train(three_and_four(devices=["cpu"] * 2, checkpoint="never"), data(400))
    early, late = alive_at
    assert late - early <= 350 + 10  # the losses


@pytest.mark.parametrize("versions", ["stashing", "2bw"])
def test_except_last_recomputes_nothing_on_the_last_stage(versions):
    """There each micro-batch goes back at once."""
    forwards: list[int] = []
    counting = [Do(lambda x, j=j: forwards.append(j)) for j in range(2)]
    model = nn.Sequential(counting[0], nn.Linear(8, 8), counting[1], nn.Linear(8, 4))
    pipe = Pipe(model, [2, 2], devices=WORKERS[:2], chunks=2, checkpoint="except_last")
    train(pipe, mini_batches(3), versions=versions)
    micro_batches = 6 if versions == "2bw" else 3
    assert [forwards.count(j) for j in range(2)] == [2 * micro_batches, micro_batches]


def test_parameters_of_a_version_have_the_attributes_of_theirs():
    class Scaled(nn.Linear):
        def forward(self, x):
            assert isinstance(self.weight, nn.Parameter)
            return super().forward(x) * self.weight.scale

    pipe = two(Scaled(8, 8))
    pipe[0].weight.scale = 2.0
    assert_works(pipe)


def test_hooks_of_several_parameters_run_once_for_each_update():
    pipe, seen = pipe_of(), []
    parameters = list(pipe[0].parameters())
    torch.autograd.graph.register_multi_grad_hook(parameters, lambda grads: seen.append(len(grads)))
    train(pipe)
    assert seen == [2] * 5
