"""Stages that are served by several devices, where ``tests.fuzz`` and the failures do not go."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import syncpipe
from syncpipe import NoChunk, Pipe
from syncpipe.runtime.weight_gradients import WeightGradients
from syncpipe.schedules import gpipe
from tests.support.models import CHECKPOINT_MODES, linear_model
from tests.support.models import Counter as Counting
from tests.support.running import Do, Noise, Using, assert_same, on_gradient
from tests.support.training import assert_trains_as, weigh

SIX = [f"cpu:{k}" for k in range(6)]
DRIVERS = ["forward", "train"]
every_driver = pytest.mark.parametrize("driver", DRIVERS)


def dealt(
    model: nn.Sequential, balance: Sequence[int], replicas: Sequence[int], **options: Any
) -> Pipe:
    """A pipe on CPU workers, one for each replica."""
    return Pipe(model, balance, replicas=replicas, devices=SIX[: sum(replicas)], **options)


def run(pipe: Pipe, driver: str, x: Tensor) -> Any:
    """A step of either driver, or a forward."""
    if driver == "no_grad":
        with torch.no_grad():
            return pipe(x)
    if driver == "forward":
        return pipe(x).sum().backward()
    return pipe.train_batch(x, loss_fn=lambda y: (y.mean(), {"most": y.max()}), verify=False)


def test_stages_may_have_some_of_their_devices_in_common():
    """That they have all of them in common is drawn by the fuzz."""
    devices = [f"cpu:{k}" for k in (0, 1, 0, 2, 3, 4, 0, 4)]
    pipe = Pipe(linear_model(), [1] * 4, replicas=2, devices=devices, chunks=8)
    plain, x = copy.deepcopy(pipe[:]), torch.randn(16, 3)
    assert_trains_as(pipe, plain, x, loss_fn=weigh, verify=False)


# --- arguments, traces, verify -------------------------------------------------------------------


def test_devices_are_listed_stage_by_stage_and_there_are_workers_by_default():
    for devices in SIX[:3], None:
        pipe = Pipe(linear_model(), [3, 1], replicas=[2, 1], devices=devices)
        assert list(map(str, pipe.devices)) == SIX[:3]
    assert "replicas=[2, 1]" in repr(pipe)
    assert "stage 0 on cpu:0, cpu:1:" in repr(pipe)
    assert "replicas" not in repr(Pipe(linear_model(), [3, 1]))
    pipe = Pipe(linear_model(), "parameters", replicas=2, devices=SIX)
    assert (len(pipe.balance), pipe.replicas) == (3, [2, 2, 2])


def test_they_can_be_set_copied_and_saved():
    model, x = linear_model(), torch.randn(4, 3)
    expected = model(x)
    pipe = dealt(model, [2, 2], [2, 1], chunks=4)
    pipe.balance = [1, 3]
    with pytest.raises(ValueError, match=r"2 numbers, but balance has 3.*pipe.replicas = 1"):
        pipe.balance = [1, 1, 2]
    assert (pipe.balance, pipe.replicas) == ([1, 3], [2, 1])
    torch.testing.assert_close(pipe(x), expected)
    pipe.replicas = 1
    pipe.balance = [1, 1, 2]
    assert pipe.replicas == [1, 1, 1]
    pipe.devices = SIX[:4]
    pipe.replicas = [1, 2, 1]
    with pytest.raises(ValueError, match="need 4 devices"):
        pipe.devices = SIX[:3]
    assert list(map(str, pipe.devices)) == SIX[:4]
    assert list(pipe.state_dict()) == list(model.state_dict())
    for other in (pipe, copy.deepcopy(pipe), pickle.loads(pickle.dumps(pipe))):
        assert other.replicas == [1, 2, 1]
        torch.testing.assert_close(other(x), expected)
    pipe[-1] = nn.Linear(3, 3)
    assert pipe.replicas == [1, 2, 1]


def test_slots_and_schedules_are_for_each_device():
    with pytest.raises(ValueError, match=r"slots=\(1, 3\).*no more than for the previous stage"):
        dealt(linear_model(), [2, 2], [2, 1], slots=[1, 3])
    pipe = dealt(linear_model(), [2, 2], [2, 1], slots=[1, 2], chunks=4)
    pipe.train_batch(torch.randn(4, 3), loss_fn=torch.mean)
    with pytest.raises(ValueError, match=r"made for device_of=\(0, 1, 2\), not .*\(0, 1\)"):
        pipe.train_batch(torch.randn(4, 3), loss_fn=torch.mean, schedule=gpipe(4, 3))


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_a_trace_has_a_row_for_each_device(checkpoint):
    replicas, rows = [2, 1, 3], [[0, 1], [2], [3, 4, 5]]
    pipe = dealt(linear_model(3), [1] * 3, replicas, chunks=6, checkpoint=checkpoint)
    with pipe.trace() as trace:
        for driver in DRIVERS:
            run(pipe, driver, torch.randn(6, 3))
    assert trace.rows == tuple(map(str, pipe.devices))
    counts = Counter((span.kind, span.j, span.row) for span in trace.spans)
    kinds = ["forward", "backward"] + ["recompute"] * (checkpoint == "always")
    for j, r in enumerate(replicas):
        for row in rows[j]:
            assert {counts[kind, j, row] for kind in kinds} == {2 * 6 // r}
            assert counts["reduce", j, row] == 2 * (j != 1)
    for span in trace.spans:
        if span.kind != "transfer":
            assert span.row == rows[span.j][span.i % replicas[span.j]]
    assert "reduce" in str(trace.table())


def otherwise(x: Tensor, linear: nn.Module) -> Tensor:
    return linear(x) * (1.1 if threading.current_thread().name.endswith("cpu:1") else 1)


@pytest.mark.parametrize("ok", [True, False])
def test_verify_compares_them_with_the_plain_model(ok):
    first = nn.Linear(3, 8) if ok else Using(otherwise, nn.Linear(3, 8))
    tied, norm = [nn.Linear(8, 8), nn.Linear(8, 8)], nn.BatchNorm1d(8).eval()
    tied[1].weight = tied[0].weight
    layers = nn.Sequential(first, *tied, norm, nn.Dropout(0.2), nn.Linear(8, 3))
    pipe = dealt(layers, [5, 1], [2, 3], chunks=6)
    x, target = torch.randn(12, 3), torch.randint(3, (12,))
    before = [p.detach().clone() for p in pipe.parameters()]
    report = syncpipe.verify(pipe, x, target, loss_fn=nn.functional.cross_entropy)
    assert report.ok is ok, str(report)
    assert "replicas=[2, 3]" in str(report)
    assert all(map(torch.equal, before, pipe.parameters()))


# --- layers: what is refused, and what is as on one device ---------------------------------------


class Counts(nn.BatchNorm1d):
    """Puts another buffer into the place of one."""

    def __init__(self) -> None:
        super().__init__(3)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        self.num_batches_tracked = self.num_batches_tracked + 1
        return x


def decays(x: Tensor, linear: nn.Module) -> Tensor:
    linear.weight.detach().mul_(0.5)
    return linear(x)


def compiled(layer: nn.Module) -> nn.Module:
    layer.compile(backend="eager")
    return layer


@every_driver
@pytest.mark.parametrize(
    ("layer", "error", "message"),
    [
        (Counting, RuntimeError, "'scale' of a Counter changed in a call, and stage 0 has replic"),
        (Counts, RuntimeError, "'num_batches_tracked' of a Counts changed in a call"),
        (lambda: Using(decays, nn.Linear(3, 3)), RuntimeError,
         "'weight' of a Linear changed in a call"),
        (lambda: nn.BatchNorm1d(3), ValueError,
         r"layer 1 \('1': BatchNorm1d\) has running stat.*deferred"),
        (lambda: torch.jit.script(nn.Linear(3, 3)), ValueError, "is TorchScript"),
        (lambda: nn.LazyLinear(3), ValueError, "has parameters without values"),
        (lambda: Pipe(linear_model(), [2, 2]), ValueError, "contains a Pipe"),
        (lambda: Using(lambda x, table: x + table((x > 0).long()).sum(-1),
                       nn.Embedding(2, 3, max_norm=1.0)), ValueError, "max_norm"),
        (lambda: compiled(nn.Linear(3, 3)), ValueError, "a Linear has replicas.*bound to this one"),
    ],
)  # fmt: skip
def test_layers_that_cannot_be_shared_out_are_refused(driver, layer, error, message):
    layers = nn.Sequential(nn.Identity(), layer(), nn.Linear(3, 3))
    pipe = dealt(layers, [2, 1], [2, 1], chunks=4, checkpoint="never")
    with pytest.raises(error, match=message):
        run(pipe, driver, torch.randn(4, 3))
    assert all(p.grad is None for p in pipe[2].parameters())


def test_weights_that_are_tied_to_other_stages_are_refused():
    model = linear_model(3)
    model[2].weight = model[0].weight
    message = r"'0.weight' \(stage 0\) and '2.weight' \(stage 1\) are one tensor, and stage 1 has 2"
    with pytest.raises(ValueError, match=message):
        dealt(model, [2, 1], [1, 2])
    pipe = dealt(linear_model(3), [2, 1], [1, 2])
    pipe[2].weight = pipe[0].weight
    with pytest.raises(ValueError, match=message):
        pipe(torch.randn(2, 3))


@every_driver
def test_a_layer_that_begins_to_draw_is_noticed(driver):
    draws: list[bool] = []
    noisy = Do(lambda x: x + torch.rand_like(x) if draws else x * 1)
    layers = nn.Sequential(nn.Linear(3, 3), noisy, nn.Linear(3, 3))
    x, found = torch.randn(8, 3), []
    for replicas in ([1, 1], [2, 1]):
        torch.manual_seed(1)
        pipe = dealt(layers, [2, 1], replicas, chunks=4)
        draws.clear()
        run(pipe, driver, x)
        draws.append(True)
        if replicas != [1, 1]:
            message = r"layer 1 \('1'.*the next call expects it"
            with pytest.raises(RuntimeError, match=message):
                run(pipe, driver, x)
        pipe.zero_grad()
        torch.manual_seed(2)
        found.append(pipe.train_batch(x, loss_fn=lambda y: y.square().mean(), verify=False))
    assert torch.equal(*found)


def test_what_a_call_in_the_middle_or_a_loss_draws_is_known_to_all():
    layers = nn.Sequential(nn.Linear(3, 3), nn.Dropout(), nn.Linear(3, 3), Do(torch.sin))
    pipe, x = dealt(layers, [2, 2], [2, 2], chunks=4, checkpoint=[(1,), "never"]), torch.ones(8, 3)

    def within() -> Any:
        run(pipe, "no_grad", x)  # where the dropout is not recomputed by itself, and seen to draw
        yield from [(x[:2], None)] * 4

    def loss_fn(y: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            return y.mean()

    pipe.train_batch(x, loss_fn=torch.mean)
    pipe.train_batch(data_iter=within(), loss_fn=torch.mean)
    for samples in (1, 8):  # of one some replicas get none
        pipe.train_batch(x[:samples], loss_fn=loss_fn)


@pytest.mark.parametrize("other", [nn.Dropout, Noise])
def test_a_module_that_draws_may_be_replaced(other):
    """What was learned of draws is of the modules that were there."""
    layers = nn.Sequential(*[nn.Sequential(nn.Linear(3, 3), nn.Dropout()) for _ in range(2)])
    pipe, x = dealt(layers, [1, 1], [2, 2], chunks=4, checkpoint="always"), torch.randn(16, 3)
    for _ in range(3):
        run(pipe, "train", x)
    layers[0][1], layers[1][1] = other(), other()
    losses = []
    for _ in range(10):  # threads draw beside each other
        torch.manual_seed(1)
        losses.append(run(pipe, "train", x)[0])
    assert all(map(losses[0].equal, losses))


def test_layers_that_a_failed_call_did_not_reach_may_draw_in_the_next():
    pipe, results = dealt(nn.Sequential(nn.Linear(3, 3), Noise()), [2], [2], chunks=4), []
    with pytest.raises(RuntimeError, match="shapes"):
        pipe(torch.ones(4, 2))
    for _ in range(2):
        torch.manual_seed(3)
        results.append(pipe(torch.ones(4, 3)))
    assert torch.equal(*results)


@pytest.mark.parametrize("driver", [*DRIVERS, "no_grad"])
@pytest.mark.parametrize("checkpoint", [*CHECKPOINT_MODES, [0, 1]])
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("chunks", [1, 5])
def test_deferred_statistics(driver, checkpoint, momentum, chunks):
    x, found = torch.randn(14, 3), []
    for replicas in ([1, 1], [3, 2]):
        torch.manual_seed(1)
        norms = [nn.BatchNorm1d(3, momentum=momentum), nn.BatchNorm1d(3)]
        layers = nn.Sequential(nn.Linear(3, 3), norms[0], nn.Linear(3, 3), norms[1])
        options = {"checkpoint": checkpoint, "deferred_batch_norm": True}
        pipe = dealt(layers, [2, 2], replicas, chunks=chunks, **options)
        results = [run(pipe, driver, x) for _ in range(2)]  # the loss and metrics, or outputs
        found.append([results, dict(pipe.named_buffers()), pipe.eval()(x).detach()])
    assert_same(*found)


def test_of_several_failures_that_of_the_earliest_stage_is_raised():
    both, begun = threading.Barrier(2), []

    def fail(message: str, i: int) -> Any:
        def function(x: Tensor) -> None:
            if begun and int(x[0, 0]) == i:
                both.wait(60)
                raise ValueError(message)

        return Do(function)

    layers = nn.Sequential(fail("early", 1), fail("late", 0))
    pipe = dealt(layers, [1, 1], [2, 1], chunks=2, checkpoint="never")
    x = torch.arange(2.0)[:, None]
    pipe(x)
    begun.append(True)
    with pytest.raises(ValueError, match="early"):
        pipe(x)


def test_each_replica_runs_its_backwards_in_the_halves_of_the_schedule(monkeypatch):
    halves, whole = [], WeightGradients.accumulate

    def accumulate(weights):
        halves.append(len(weights.pending))
        whole(weights)

    monkeypatch.setattr(WeightGradients, "accumulate", accumulate)
    pipe = dealt(linear_model(2), [1, 1], [2, 1], chunks=4)
    pipe.train_batch(torch.randn(8, 3), loss_fn=torch.sum, schedule="zb_h1")
    assert halves == [1] * 8  # one for each cell


def test_which_replica_is_first_changes_no_bit():
    x, whole, found = torch.randn(16, 5), torch.randn(5, requires_grad=True), []
    for late in range(2):
        seen: Counter[str] = Counter()
        done = threading.Event()

        def wait(_: Tensor, late: int = late, seen: Any = seen, done: Any = done) -> None:
            name = threading.current_thread().name
            seen[name] += 1
            if seen[name] == 2:  # in the first of a call it would hold the random numbers
                assert done.wait(30) if name.endswith(f"cpu:{late}") else not done.set()

        layers = nn.Sequential(Do(lambda given, wait=wait: on_gradient(given[0] * given[1], wait)))
        pipe = dealt(layers, [1], [2], chunks=4)
        pipe.train_batch((x, NoChunk(whole)), loss_fn=lambda y: y.tanh().mean(), verify=False)
        found.append(whole.grad)
        whole.grad = None
    assert torch.equal(*found)


def test_from_the_second_call_on_nobody_waits_for_the_first_backward_of_another_replica():
    through, forwards = threading.Event(), 0

    def here(k: int) -> bool:
        return threading.current_thread().name.endswith(f"cpu:{k}")

    def go_back(_: Tensor) -> None:
        assert not here(0) or through.wait(30)

    def go_forward(x: Tensor) -> Tensor:
        nonlocal forwards
        forwards += here(1)
        if forwards == 4:
            through.set()
        return on_gradient(x, go_back)

    pipe = dealt(nn.Sequential(Do(go_forward)), [1], [2], chunks=4)
    through.set()
    for _ in range(2):
        x = torch.randn(8, 3, requires_grad=True)
        pipe.train_batch(x, torch.zeros(8, 3), loss_fn=nn.functional.mse_loss)
        through.clear()


def test_replicas_see_what_becomes_of_the_parameters():
    pipe = dealt(linear_model(), [2, 2], [2, 2], chunks=4)
    plain, x = copy.deepcopy(pipe[:]), torch.randn(4, 3)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (pipe, plain)]
    for k in range(6):
        for module, optimizer in zip((pipe, plain), optimizers, strict=True):
            optimizer.zero_grad()
            module(x).square().sum().backward()
            optimizer.step()
            with torch.no_grad():
                module[0].weight.data.mul_(0.9)
                if k == 2:
                    module[1].weight = nn.Parameter(module[1].weight + 1)
                if k == 3:
                    module[2].requires_grad_(False)
                if k == 4:
                    module[3].weight.data = torch.ones(3, 3)
        torch.testing.assert_close(pipe(x), plain(x))
    assert pipe.double()(x.double()).dtype == torch.double


# --- hooks, and what is left ---------------------------------------------------------------------


def test_hooks_of_a_parameter_see_a_gradient_of_each_replica():
    pipe, sums, after = dealt(linear_model(2), [1, 1], [3, 1], chunks=6), [], []
    weight = pipe[0].weight
    weight.register_hook(lambda grad: sums.append(grad.clone()))
    weight.register_post_accumulate_grad_hook(lambda p: after.append(p.grad.clone()))
    x = torch.randn(6, 3)
    run(pipe, "train", x)
    assert (len(sums), len(after)) == (2 + 1 + 1, 1)  # its own micro-batches, and two sums
    torch.testing.assert_close(sum(sums), weight.grad)
    assert torch.equal(after[-1], weight.grad)
    sums.clear()
    pipe.zero_grad()
    run(pipe, "forward", x)
    assert len(sums) == 1
    assert torch.equal(sums[0], weight.grad)


@pytest.mark.parametrize("replicas", [[1, 1], [2, 1]])
@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_hooks_of_a_parameter_that_nobody_used_do_not_run(checkpoint, replicas):
    """As on the plain model, where backward does not come there."""
    either = Using(lambda x, used, unused: (used if x.dim() else unused)(x), *linear_model(2))
    pipe = dealt(nn.Sequential(either, nn.Linear(3, 3)), [1, 1], replicas, chunks=2,
                 checkpoint=checkpoint)  # fmt: skip
    grads: list[Tensor] = []
    for parameter in pipe.parameters():
        parameter.register_hook(lambda grad: grads.append(grad * 2))
    run(pipe, "forward", torch.randn(4, 3))
    assert len(grads) == 4
    assert pipe[0].layers[1].weight.grad is None


def test_each_replica_runs_a_module_of_its_own_with_its_hooks():
    class Remembers(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.x = x
            y = super().forward(x)
            assert self.x is x
            seen.append(id(self))
            return y

    seen: list[int] = []
    hooks: list[type] = []
    pipe = dealt(nn.Sequential(Remembers(3, 3)), [1], [3], chunks=6)
    pipe[0].register_forward_hook(lambda module, args, y: hooks.append(type(module)))
    pipe.partitions[0].register_forward_pre_hook(lambda module, args: hooks.append(type(module)))
    for _ in range(10):
        run(pipe, "no_grad", torch.randn(6, 3))
    assert len(hooks) == 10 * 12
    assert len(set(seen)) == 3
    assert id(pipe[0]) in seen
    assert len(pipe[0].x) == 1  # of the first replica's last micro-batch


def test_nothing_is_left_of_a_pipe_or_of_its_copies():
    pipe = dealt(linear_model(), [2, 2], [3, 2], chunks=6)
    for driver in DRIVERS:
        run(pipe, driver, torch.randn(6, 3))
    replicas = [r.partition for those in pipe._build().replicas for r in those]
    assert len(replicas) == 3
    for replica in replicas:
        assert all(p.grad is None for p in replica.parameters())
    alive = [weakref.ref(p) for replica in replicas for p in replica.parameters()]
    del replicas, replica
    pipe.replicas = 1
    gc.collect()
    assert not any(reference() is not None for reference in alive)
