"""What ``train_stream`` takes, and what it refuses with the way out."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from syncpipe import NoChunk, Pipe
from tests.support.skips import Receive, Send
from tests.training.stream.models import WORKERS, adam, mini_batches, mlp, sgd
from tests.training.stream.reference import reference

BALANCE = [2, 2, 2, 1]


def pipe_of(**options):
    options = {"devices": WORKERS, "chunks": 4, **options}
    return Pipe(options.pop("module", None) or mlp(), options.pop("balance", BALANCE), **options)


def train(pipe, data=None, **options):
    data = mini_batches(5, 8) if data is None else data
    return pipe.train_stream(data, **{"optimizer": sgd, "loss_fn": F.cross_entropy, **options})


def assert_works(pipe):
    assert len(train(pipe).losses) == 5


def test_steps_takes_no_more_from_an_iterator():
    data = iter(mini_batches(9))
    pipe = pipe_of()
    assert len(train(pipe, data, steps=4).losses) == 4
    assert len(list(data)) == 5


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("devices", [WORKERS, ["cpu"] * 4])
@pytest.mark.parametrize(("before", "last", "m"), [(3, 6, 3), (2, 1, 1), (0, 3, 3), (1, 2, 2)])
def test_a_ragged_last_mini_batch_of_2bw(before, last, m, devices, checkpoint):
    data = [*mini_batches(before, 8), *mini_batches(1, last)]
    for steps in (None, before + 1):
        pipe, model = pipe_of(devices=devices, checkpoint=checkpoint), mlp()
        more = iter(data if steps is None else [*data, *mini_batches(1)])
        found = train(pipe, more, versions="2bw", steps=steps)
        losses = reference(model, BALANCE, data, sgd, F.cross_entropy, versions="2bw", chunks=4)
        assert torch.equal(found.losses, torch.stack(losses))
        assert len(found.versions) == 4 * before + m
        assert len(list(more)) == (steps is not None)
        for a, b in zip(pipe.parameters(), model.parameters(), strict=True):
            assert torch.equal(a, b)


def test_data_may_end_before_steps():
    assert len(train(pipe_of(), mini_batches(3), steps=10).losses) == 3


def test_a_loader_is_an_epoch():
    loader = DataLoader(TensorDataset(*mini_batches(1, 20)[0]), batch_size=6)
    pipe = pipe_of()
    assert len(train(pipe, loader).losses) == 4
    assert len(train(pipe, loader).losses) == 4


def test_two_calls_are_one_with_the_optimizers_of_the_first():
    """But for the flush in between."""
    data = mini_batches(6)
    pipe, plain = pipe_of(balance=[7], devices=["cpu"]), pipe_of(balance=[7], devices=["cpu"])
    first = train(pipe, data[:3], optimizer=adam)
    train(pipe, data[3:], optimizer=first.optimizers)
    train(plain, data, optimizer=adam)
    for a, b in zip(pipe.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, b)


def test_dicts_and_where_the_target_is():
    data = mini_batches(4)
    dicts = [{"x": x, "label": label} for x, label in data]

    class First(nn.Linear):
        def forward(self, batch):
            return super().forward(batch["x"])

    torch.manual_seed(0)
    model = mlp()
    first = First(8, 16)
    first.load_state_dict(model[0].state_dict())
    other = nn.Sequential(first, *list(model)[1:])
    a, b = pipe_of(), pipe_of(module=other)
    found = train(b, dicts, target="label")
    assert torch.equal(train(a, data).losses, found.losses)


def test_metrics_come_for_each_mini_batch():
    def loss_fn(y, target):
        return F.cross_entropy(y, target), {"right": (y.argmax(1) == target).sum()}

    found = train(pipe_of(), loss_fn=loss_fn)
    assert [set(each) for each in found.metrics] == [{"right"}] * 5
    assert train(pipe_of()).metrics == [None] * 5


def test_masked_targets_count_in_2bw():
    """The loss is the mean over the targets of the mini-batch that count."""
    data = mini_batches(3, 8)
    for _, target in data:
        target[1:4] = -100
    found = train(pipe_of(), data, versions="2bw")
    with torch.no_grad():
        expected = F.cross_entropy(mlp()(data[0][0]), data[0][1])
    torch.testing.assert_close(found.losses[0], expected)


def test_a_tensor_for_all_micro_batches():
    class Add(nn.Module):
        def forward(self, pair):
            return pair[0] + pair[1]

    model = nn.Sequential(Add(), *mlp())
    data = [((x, NoChunk(torch.ones(8))), target) for x, target in mini_batches(3, 8)]
    assert len(train(pipe_of(module=model, balance=[2, 2, 2, 2]), data, versions="2bw").losses) == 3


def test_hooks_of_parameters_see_the_gradient_of_each_update():
    pipe, seen = pipe_of(), []
    pipe[0].weight.register_hook(lambda grad: seen.append(grad.clone()))
    train(pipe, versions="2bw")
    assert len(seen) == 5


def test_skips_across_stages_and_running_statistics():
    middle = [nn.Linear(8, 8), nn.BatchNorm1d(8)]
    model = nn.Sequential(nn.Linear(8, 8), Send(), *middle, Receive(), nn.Linear(8, 4))
    many = pipe_of(module=model, balance=[2, 2, 2], devices=WORKERS[:3])
    found = train(many)
    assert many[3].num_batches_tracked == 5
    assert len(found.losses) == 5


REFUSED = [
    ({"optimizer": lambda ps: None}, TypeError, "optimizer of stage 0.*is NoneType"),
    ({"optimizer": [None]}, ValueError, "1 optimizers, but there are 4 stages"),
    ({"optimizer": 0.1}, TypeError, "optimizer=float.*lambda parameters"),
    ({"steps": 0}, ValueError, "steps=0"),
    ({"steps": True}, ValueError, "steps=True"),
    ({"steps": 1.5}, ValueError, "steps=1.5"),
    ({"versions": "gpipe"}, ValueError, "versions='gpipe'.*'stashing', 'vertical_sync', '2bw'"),
    ({"data": []}, ValueError, "gave no mini-batch"),
    ({"data": torch.randn(4, 8)}, TypeError, "data_iter=Tensor"),
    ({"data": 7}, TypeError, "data_iter=int"),
    ({"data": [torch.randn(4, 8)]}, TypeError, "gave Tensor for mini-batch 0"),
    ({"data": mini_batches(1, 8) + mini_batches(1, 3) + mini_batches(1, 8), "versions": "2bw"},
     ValueError, "mini-batch 1 gave 3 micro-batches, and is not the last one.*chunks=4"),
    ({"optimizer": torch.optim.LBFGS}, ValueError, "stage 0 is an LBFGS"),
    ({"loss_fn": "mse"}, TypeError, "loss_fn must be callable"),
    ({"loss_fn": lambda y, t: (F.cross_entropy(y, t), 2.0), "versions": "2bw"}, ValueError,
     "give train_stream weight="),
    ({"data": [(torch.randn(4, 8, requires_grad=True), torch.zeros(4).long())]}, ValueError,
     "requires grad"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "kind", "message"), REFUSED)
def test_bad_arguments_are_refused_and_the_pipe_works(options, kind, message):
    pipe = pipe_of()
    with pytest.raises(kind, match=f"(?s){message}"):
        train(pipe, **options)
    assert_works(pipe)


def test_one_optimizer_for_the_whole_model_is_refused():
    pipe = pipe_of()
    with pytest.raises(TypeError, match="each stage updates its weights by itself"):
        train(pipe, optimizer=torch.optim.SGD(pipe.parameters(), lr=0.1))


def test_optimizers_of_another_balance_are_refused():
    pipe = pipe_of()
    optimizers = train(pipe).optimizers
    pipe.balance = [3, 1, 2, 1]
    with pytest.raises(ValueError, match=r"stage 0 is not for the 4 parameters.*: 2 are"):
        train(pipe, optimizer=optimizers)
    assert_works(pipe)


def tied():
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 4))
    model[2].weight = model[0].weight
    return model


def overlapping():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4))
    model[1].weight = nn.Parameter(model[0].weight.data)
    return model


def watched(kind):
    """A weight that a frozen parameter or a buffer of another stage or of the same one looks at."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4))
    memory, where = model[0].weight.detach(), model[kind == "elsewhere"]
    if kind == "buffer":
        where.register_buffer("watched", memory)
    else:
        where.watched = nn.Parameter(memory, requires_grad=False)
    return Pipe(model, [1, 1, 1], devices=WORKERS[:3])


def renormed():
    return nn.Sequential(nn.Embedding(9, 8, max_norm=0.1), nn.Linear(8, 4))


PIPES = [
    (lambda: Pipe(tied(), [1, 3], devices=WORKERS[:2]), ValueError, "are one tensor"),
    (lambda: Pipe(overlapping(), [2, 1], devices=WORKERS[:2]), ValueError, "memory in common"),
    *((partial(watched, kind), ValueError, r"'0\.w.*in stage 0.*'[01]\.watched'.*in common")
      for kind in ("buffer", "frozen", "elsewhere")),
    (lambda: Pipe(mlp(), [2, 2, 3], devices=["cpu:0", "cpu:1", "cpu:0"]), ValueError,
     r"3 stages with replicas=\[1, 1, 1\] on 2 devices"),
    (lambda: Pipe(mlp(), [3, 4], replicas=2, devices=["cpu:0", "cpu:1", "cpu:1", "cpu:2"]),
     ValueError, r"2 stages with replicas=\[2, 2\] on 3 devices"),
    (lambda: Pipe(mlp(True), [3, 4], replicas=[2, 1], devices=WORKERS[:3]), ValueError,
     "running statistics in its BatchNorm1d"),
    (lambda: Pipe(mlp(True), [3, 4], devices=WORKERS[:2], deferred_batch_norm=True), ValueError,
     "deferred_batch_norm"),
    (lambda: Pipe(mlp(), [3, 4], devices=WORKERS[:2], checkpoint="offload"), ValueError, "offload"),
    (lambda: Pipe(nn.Sequential(torch.jit.script(nn.Linear(8, 8)), nn.Linear(8, 4)), [1, 1],
                  devices=WORKERS[:2]), ValueError, "TorchScript"),
    (lambda: Pipe(nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 4)), [1, 1], devices=WORKERS[:2]),
     ValueError, "parameters without values"),
    (lambda: Pipe(mlp().requires_grad_(False), [3, 4]), ValueError, "all parameters .* frozen"),
]  # fmt: skip


@pytest.mark.parametrize("versions", ["vertical_sync", "2bw"])
def test_replicas_have_no_version_of_the_whole_model(versions):
    pipe = Pipe(mlp(), [3, 4], replicas=[2, 1], devices=WORKERS[:3], chunks=2)
    with pytest.raises(
        ValueError, match=rf"versions='{versions}' of a pipe with replicas=\[2, 1\]"
    ):
        train(pipe, versions=versions)


@pytest.mark.parametrize(("make", "kind", "message"), PIPES)
def test_pipes_that_have_no_meaning_without_a_flush_are_refused(make, kind, message):
    with pytest.raises(kind, match=message):
        train(make())


def test_2bw_needs_as_many_micro_batches_as_stages():
    with pytest.raises(ValueError, match="chunks=3 and 4 stages"):
        train(pipe_of(chunks=3), versions="2bw")


def test_a_loss_with_a_parameter_that_no_stage_updates_is_refused():
    pipe, scale = pipe_of(), nn.Parameter(torch.ones(()))
    with pytest.raises(RuntimeError, match="no optimizer of train_stream would update it"):
        train(pipe, loss_fn=lambda y, t: F.cross_entropy(y * scale, t))
    assert scale.grad is None
    assert_works(pipe)


def test_a_loss_with_the_weights_of_another_stage_is_refused():
    pipe = pipe_of()
    weight = pipe[0].weight
    with pytest.raises(RuntimeError, match="no optimizer of train_stream would update it"):
        train(pipe, loss_fn=lambda y, t: F.cross_entropy(y, t) + weight.square().sum())
    assert weight.grad is None


def test_a_loss_with_a_weight_of_the_last_stage_is_the_plain_loop_there():
    pipe, model = pipe_of(balance=[7], devices=["cpu"]), mlp()

    def with_decay(weight):
        return lambda y, t: F.cross_entropy(y, t) + weight.square().sum()

    data = mini_batches(4)
    train(pipe, data, loss_fn=with_decay(pipe[6].weight))
    optimizer = sgd(list(model.parameters()))
    for x, target in data:
        optimizer.zero_grad()
        with_decay(model[6].weight)(model(x), target).backward()
        optimizer.step()
    for a, b in zip(pipe.parameters(), model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_without_grad_mode_it_is_refused():
    pipe = pipe_of()
    with torch.no_grad(), pytest.raises(RuntimeError, match="train_stream needs gradients"):
        train(pipe)


def test_gradients_from_before_have_no_part():
    a, b = pipe_of(), pipe_of()
    for parameter in a.parameters():
        parameter.grad = torch.ones_like(parameter)
    assert torch.equal(train(a).losses, train(b).losses)


def test_casts_of_weights_are_not_older_than_the_weights():
    """A cache of autocast lives until the outermost context ends."""
    pipe, model = pipe_of(balance=[7], devices=["cpu"]), mlp()
    data = mini_batches(5)
    with torch.autocast("cpu", torch.bfloat16):
        found = train(pipe, data)
    optimizer, losses = sgd(list(model.parameters())), []
    for x, target in data:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(x), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    assert torch.equal(found.losses, torch.stack(losses))
    assert torch.is_autocast_cache_enabled()


def test_casts_are_fresh_on_several_workers_too():
    def losses(devices):
        with torch.autocast("cpu", torch.bfloat16):
            return train(pipe_of(devices=devices), mini_batches(6)).losses

    assert torch.equal(losses(WORKERS), losses(["cpu"] * 4))


class Twice(nn.Linear):
    """Uses its weight twice: with one cast of it there is one sum of gradients in low precision."""

    def forward(self, x):
        return super().forward(super().forward(x))


def test_a_weight_that_is_cast_twice_is_so_on_all_devices():
    def losses(devices):
        torch.manual_seed(0)
        model = nn.Sequential(Twice(8, 8), Twice(8, 8), Twice(8, 8), nn.Linear(8, 4))
        pipe = Pipe(model, [1] * 4, devices=devices)
        with torch.autocast("cpu", torch.bfloat16):
            return train(pipe, mini_batches(12)).losses

    assert torch.equal(losses(WORKERS), losses(["cpu"] * 4))


def test_updates_are_in_the_trace():
    pipe = pipe_of()
    with pipe.trace() as trace:
        train(pipe)
    spans = sorted((span.j, span.i) for span in trace.spans if span.kind == "update")
    assert spans == [(j, b) for j in range(4) for b in range(5)]
    assert "update" in trace.table()
