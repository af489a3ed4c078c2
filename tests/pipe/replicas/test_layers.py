"""What layers of a stage with replicas may do, and what is refused."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy

from syncpipe import Pipe, Selective
from tests.pipe.replicas.dealing import dealt
from tests.support.models import CHECKPOINT_MODES, linear_model
from tests.support.running import Do


def run(pipe: Pipe, driver: str, x: torch.Tensor) -> None:
    """A step of either driver."""
    if driver == "forward":
        pipe(x).sum().backward()
    else:
        pipe.train_batch(x, loss_fn=torch.mean, verify=False)


DRIVERS = ["forward", "train"]


class Counts(nn.Module):
    """Counts in a buffer, in place or not."""

    def __init__(self, inplace: bool) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.inplace = inplace

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.inplace:
            self.count += 1
        else:
            self.count = self.count + 1
        return x


class Decays(nn.Linear):
    """Writes into its weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.mul_(0.5)
        return super().forward(x)


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (lambda: Counts(True), "'count' of a Counts changed in a call, and stage 0 has replicas"),
        (lambda: Counts(False), "'count' of a Counts changed in a call"),
        (lambda: Decays(3, 3), "'weight' of a Decays changed in a call"),
    ],
)
def test_layers_that_change_what_all_replicas_have_are_refused(driver, layer, message):
    layers = nn.Sequential(layer(), nn.Linear(3, 3))
    pipe = dealt(layers, [1, 1], [2, 1], chunks=4, checkpoint="never")
    with pytest.raises(RuntimeError, match=message):
        run(pipe, driver, torch.randn(4, 3))
    assert all(p.grad is None for p in pipe.parameters())


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (lambda: nn.BatchNorm1d(3), r"layer 1 \('1': BatchNorm1d\) has running stat.*deferred"),
        (lambda: torch.jit.script(nn.Linear(3, 3)), "is TorchScript"),
        (lambda: nn.LazyLinear(3), "has parameters without values"),
        (lambda: Pipe(linear_model(), [2, 2]), "has a Pipe in it"),
    ],
)
def test_layers_that_cannot_be_shared_out_are_refused(driver, layer, message):
    layers = nn.Sequential(nn.Linear(3, 3), layer(), nn.Linear(3, 3))
    pipe = dealt(layers, [2, 1], [2, 1], chunks=4)
    with pytest.raises(ValueError, match=message):
        run(pipe, driver, torch.randn(4, 3))


def test_an_embedding_that_keeps_its_rows_short_is_refused():
    layers = nn.Sequential(nn.Embedding(5, 3, max_norm=1.0), nn.Linear(3, 3))
    with pytest.raises(ValueError, match="max_norm"):
        dealt(layers, [1, 1], [2, 1], chunks=2)(torch.arange(4))


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


def test_weights_may_be_tied_within_a_stage_and_between_stages_on_one_device():
    def tied() -> nn.Sequential:
        torch.manual_seed(2)
        model = linear_model(5)
        model[2].weight = model[1].weight
        model[4].weight = model[0].weight
        return model

    x, found = torch.randn(8, 3), []
    for replicas in ([1, 1, 1], [1, 2, 1]):
        pipe = dealt(tied(), [1, 2, 2], replicas, chunks=4)
        found.append([pipe.train_batch(x, loss_fn=torch.mean), pipe(x)])
        found[-1][1].sum().backward()
        found[-1] += [p.grad for p in pipe.parameters()]
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("driver", [*DRIVERS, "no_grad"])
@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("momentum", [0.1, None])
def test_deferred_statistics_are_those_of_one_device(driver, checkpoint, momentum):
    def norm() -> Pipe:
        torch.manual_seed(1)
        norms = [nn.BatchNorm1d(3, momentum=momentum), nn.BatchNorm1d(3)]
        layers = nn.Sequential(nn.Linear(3, 3), norms[0], nn.Linear(3, 3), norms[1])
        options = {"chunks": 5, "checkpoint": checkpoint, "deferred_batch_norm": True}
        return layers, options

    x, found = torch.randn(14, 3), []
    for replicas in ([1, 1], [3, 2]):
        layers, options = norm()
        pipe = dealt(layers, [2, 2], replicas, **options)
        for _ in range(2):
            if driver == "no_grad":
                with torch.no_grad():
                    pipe(x)
            else:
                run(pipe, driver, x)
        found.append(dict(pipe.named_buffers()))
        found[-1]["eval"] = pipe.eval()(x).detach()
    assert list(found[0]) == list(found[1])
    for name, value in found[0].items():
        assert torch.equal(found[1][name], value), name


@pytest.mark.parametrize("driver", DRIVERS)
def test_deferred_statistics_of_a_single_micro_batch(driver):
    x, found = torch.randn(6, 3), []
    for replicas in ([1], [2]):
        layers = nn.Sequential(nn.BatchNorm1d(3))
        pipe = dealt(layers, [1], replicas, chunks=1, deferred_batch_norm=True)
        run(pipe, driver, x)
        found.append(pipe[0].running_var)
    assert torch.equal(*found)


def test_selective_re_materialization():
    policy = Selective(lambda ctx, op, *args, **kwargs: CheckpointPolicy.PREFER_RECOMPUTE)
    x, found = torch.randn(8, 3), []
    for replicas in ([1, 1], [2, 2]):
        torch.manual_seed(1)
        layers = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Dropout(0.5), nn.Linear(3, 3))
        pipe = dealt(layers, [3, 1], replicas, chunks=4, checkpoint=policy)
        for driver in DRIVERS:
            run(pipe, driver, x)
        found.append([p.grad for p in pipe.parameters()])
    torch.testing.assert_close(*found)


def test_statistics_can_be_used_as_they_are():
    pipe = dealt(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), [2], [2], chunks=4)
    pipe.eval()
    run(pipe, "train", torch.randn(8, 3))
    assert pipe[1].num_batches_tracked == 0


def test_no_two_replicas_run_one_module():
    class Remembers(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.x = x
            y = super().forward(x)
            assert self.x is x
            seen.add(id(self))
            return y

    seen: set[int] = set()
    pipe = dealt(nn.Sequential(Remembers(3, 3)), [1], [3], chunks=6)
    for _ in range(10):
        run(pipe, "train", torch.randn(6, 3))
    assert len(seen) == 3
    assert id(pipe[0]) in seen
    assert len(pipe[0].x) == 1  # of the first replica's last micro-batch


def test_replicas_see_what_becomes_of_the_parameters():
    plain = linear_model()
    pipe = dealt(linear_model(), [2, 2], [2, 2], chunks=4)
    pipe.load_state_dict(plain.state_dict())
    x = torch.randn(4, 3)
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


def test_hooks_of_a_parameter_see_a_gradient_of_each_replica():
    pipe, sums, after = dealt(linear_model(2), [1, 1], [3, 1], chunks=6), [], []
    weight = pipe[0].weight
    weight.register_hook(lambda grad: sums.append(grad.clone()))
    weight.register_post_accumulate_grad_hook(lambda p: after.append(p.grad.clone()))
    x = torch.randn(6, 3)
    pipe.train_batch(x, loss_fn=torch.mean)
    assert len(sums) == 2 + 1 + 1  # its own micro-batches, and two sums
    assert len(after) == 1
    torch.testing.assert_close(sum(sums), weight.grad)
    assert torch.equal(after[-1], weight.grad)
    sums.clear()
    pipe.zero_grad()
    pipe(x).sum().backward()
    assert len(sums) == 1
    assert torch.equal(sums[0], weight.grad)
    found = weight.grad
    pipe.zero_grad()
    linear = nn.Sequential(*pipe)
    linear(x).sum().backward()
    torch.testing.assert_close(weight.grad, found)


def test_hooks_of_layers_run_for_all_micro_batches():
    pipe, seen = dealt(linear_model(2), [1, 1], [3, 1], chunks=6), []
    pipe[0].register_forward_hook(lambda module, args, y: seen.append(type(module)))
    pipe.partitions[0].register_forward_pre_hook(lambda module, args: seen.append(type(module)))
    pipe(torch.randn(6, 3))
    assert len(seen) == 12


def test_gradients_can_be_asked_for_and_differentiated():
    plain = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    pipe = dealt(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)), [2, 1], [2, 2])
    pipe.load_state_dict(plain.state_dict())
    pipe.chunks = 4
    x, found = torch.randn(4, 3), []
    for module in (plain, pipe):
        weight = module[0].weight
        (grad,) = torch.autograd.grad(module(x).square().sum(), weight, create_graph=True)
        (again,) = torch.autograd.grad(grad.square().sum(), weight)
        found.append((grad.detach(), again))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


def test_a_loss_with_parameters_of_its_own_and_of_a_layer():
    torch.manual_seed(4)
    model = linear_model(2)
    scale = nn.Parameter(torch.tensor(2.0))
    x, y = torch.randn(12, 3), torch.randn(12, 3)
    found = []
    for replicas in ([1, 1], [1, 3], [1, 3]):
        pipe = dealt(model, [1, 1], replicas, chunks=6)
        pipe.zero_grad()
        scale.grad = None

        def loss_fn(output, target, pipe=pipe):
            return (output * scale - target).square().mean() + pipe[0].weight.square().sum()

        loss = pipe.train_batch(x, y, loss_fn=loss_fn)
        found.append([loss, scale.grad.clone(), *[p.grad.clone() for p in pipe.parameters()]])
    torch.testing.assert_close(found[0], found[1])
    assert all(map(torch.equal, found[1], found[2]))


@pytest.mark.parametrize("weights", ["returned", "known", "metrics"])
def test_losses_with_weights_on_a_stage_with_replicas(weights):
    model, x = linear_model(2), torch.randn(12, 3)
    target = torch.randint(-1, 3, (12,))
    options = {"loss_fn": nn.CrossEntropyLoss(ignore_index=-1)}
    if weights != "known":

        def loss_fn(output, target):
            count = (target != -1).sum()
            loss = nn.functional.cross_entropy(output, target, ignore_index=-1, reduction="sum")
            extra = [{"count": count}] if weights == "metrics" else []
            return (loss / count.clamp(min=1), count, *extra)

        options = {"loss_fn": loss_fn}
    found = []
    for replicas in ([1, 1], [1, 3]):
        pipe = dealt(model, [1, 1], replicas, chunks=6)
        pipe.zero_grad()
        result = pipe.train_batch(x, target, **options)
        found.append([result, *[p.grad.clone() for p in pipe.parameters()]])
    torch.testing.assert_close(*found)


def test_nothing_is_left_of_a_pipe_or_of_its_copies():
    pipe = dealt(linear_model(), [2, 2], [3, 2], chunks=6)
    x = torch.randn(6, 3)
    run(pipe, "train", x)
    run(pipe, "forward", x)
    replicas = [r.partition for those in pipe._ready().replicas for r in those]
    assert len(replicas) == 3
    for replica in replicas:
        assert all(p.grad is None for p in replica.parameters())
    alive = [weakref.ref(p) for replica in replicas for p in replica.parameters()]
    del replicas, replica
    pipe.replicas = 1
    gc.collect()
    assert not any(reference() is not None for reference in alive)


def test_a_failed_step_leaves_gradients_as_they_were():
    def fail(x: torch.Tensor) -> None:
        if broken and len(x) == 1:
            raise ValueError("here")

    layers = nn.Sequential(nn.Linear(3, 3), Do(fail), nn.Linear(3, 3))
    pipe, broken = dealt(layers, [2, 1], [2, 2], chunks=4), False
    run(pipe, "train", torch.randn(8, 3))
    before = [p.grad.clone() for p in pipe.parameters()]
    broken = True
    with pytest.raises(ValueError, match="here"):
        run(pipe, "train", torch.randn(7, 3))
    assert all(map(torch.equal, before, [p.grad for p in pipe.parameters()]))
    broken = False
    pipe.zero_grad()
    run(pipe, "train", torch.randn(8, 3))
    for those in pipe._ready().replicas:
        assert all(p.grad is None for r in those for p in r.partition.parameters())


class Noisy(nn.Module):
    """Draws, or does not."""

    on = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x) if self.on else x * 1


@pytest.mark.parametrize("driver", DRIVERS)
def test_a_layer_that_begins_to_draw_is_noticed(driver):
    layers = nn.Sequential(nn.Linear(3, 3), Noisy(), nn.Linear(3, 3))
    x, found = torch.randn(8, 3), []
    for replicas in ([1, 1], [2, 1]):
        torch.manual_seed(1)
        pipe = dealt(layers, [2, 1], replicas, chunks=4)
        layers[1].on = False
        run(pipe, driver, x)
        layers[1].on = True
        if replicas != [1, 1]:
            with pytest.raises(
                RuntimeError, match=r"layer 1 \('1'.*(drew .* call again|known from the next call)"
            ):
                run(pipe, driver, x)
        pipe.zero_grad()
        torch.manual_seed(2)
        found.append(pipe.train_batch(x, loss_fn=lambda y: y.square().mean(), verify=False))
    assert torch.equal(*found)


def test_dropout_may_begin_later():
    model, x, found = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.0)), torch.randn(8, 3), []
    for replicas in ([1], [2]):
        pipe = dealt(model, [2], replicas, chunks=4)
        for p in (0.0, 0.5):
            torch.manual_seed(1)
            pipe[1].p = p
            found.append(pipe.train_batch(x, loss_fn=torch.mean))
    assert torch.equal(found[1], found[3])


@pytest.mark.parametrize("replicas", [[1, 1], [2, 1]])
@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_hooks_of_a_parameter_that_nobody_used_do_not_run(checkpoint, replicas):
    """As on the plain model, where backward does not come there."""

    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.used if x.dim() else self.unused)(x)

    grads: list[torch.Tensor] = []
    pipe = Pipe(
        nn.Sequential(Either(), nn.Linear(3, 3)), [1, 1], replicas=replicas, chunks=2,
        devices=[f"cpu:{k}" for k in range(sum(replicas))], checkpoint=checkpoint,
    )  # fmt: skip
    for parameter in pipe.parameters():
        parameter.register_hook(lambda grad: grads.append(grad * 2))
    pipe(torch.randn(4, 3)).sum().backward()
    assert len(grads) == 4
    assert pipe[0].unused.weight.grad is None
