"""What layers of a stage with replicas may do, and what is refused."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy

from syncpipe import Pipe, Selective
from tests.pipe.replicas.dealing import copied, dealt
from tests.support.models import CHECKPOINT_MODES, linear_model
from tests.support.running import Do

DRIVERS = ["forward", "train"]
every_driver = pytest.mark.parametrize("driver", DRIVERS)


def run(pipe: Pipe, driver: str, x: torch.Tensor) -> None:
    """A step of either driver, or a forward."""
    if driver == "no_grad":
        with torch.no_grad():
            pipe(x)
    elif driver == "forward":
        pipe(x).sum().backward()
    else:
        pipe.train_batch(x, loss_fn=torch.mean, verify=False)


# --- what is refused -------------------------------------------------------------------------


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


class Noisy(nn.Module):
    """Draws, or does not."""

    on = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x) if self.on else x * 1


@every_driver
@pytest.mark.parametrize(
    ("layer", "error", "message"),
    [
        (lambda: Counts(True), RuntimeError,
         "'count' of a Counts changed in a call, and stage 0 has replicas"),
        (lambda: Counts(False), RuntimeError, "'count' of a Counts changed in a call"),
        (lambda: Decays(3, 3), RuntimeError, "'weight' of a Decays changed in a call"),
        (lambda: nn.BatchNorm1d(3), ValueError,
         r"layer 1 \('1': BatchNorm1d\) has running stat.*deferred"),
        (lambda: torch.jit.script(nn.Linear(3, 3)), ValueError, "is TorchScript"),
        (lambda: nn.LazyLinear(3), ValueError, "has parameters without values"),
        (lambda: Pipe(linear_model(), [2, 2]), ValueError, "has a Pipe in it"),
        (lambda: nn.Sequential(Do(lambda x: (x > 0).long()),
                               nn.Embedding(5, 3, max_norm=1.0), nn.Flatten(1), nn.Linear(9, 3)),
         ValueError, "max_norm"),
    ],
)  # fmt: skip
def test_layers_that_cannot_be_shared_out_are_refused(driver, layer, error, message):
    layers = nn.Sequential(nn.Identity(), layer(), nn.Linear(3, 3))
    pipe = dealt(layers, [2, 1], [2, 1], chunks=4, checkpoint="never")
    with pytest.raises(error, match=message):
        run(pipe, driver, torch.randn(4, 3))
    assert all(p.grad is None for p in pipe[2].parameters())


@every_driver
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
            message = r"layer 1 \('1'.*(drew .* call again|known from the next call)"
            with pytest.raises(RuntimeError, match=message):
                run(pipe, driver, x)
        pipe.zero_grad()
        torch.manual_seed(2)
        found.append(pipe.train_batch(x, loss_fn=lambda y: y.square().mean(), verify=False))
    assert torch.equal(*found)


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


# --- what replicas give is what one device gives ---------------------------------------------


def tied() -> nn.Sequential:
    """Ties within a stage, and between stages on one device."""
    model = linear_model(5)
    model[2].weight, model[4].weight = model[1].weight, model[0].weight
    return model


def drawing() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Dropout(0.5), nn.Linear(3, 3))


def recompute(context, op, *args, **kwargs) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize(
    ("make", "balance", "replicas", "options"),
    [
        (tied, [1, 2, 2], [1, 2, 1], {}),
        (drawing, [3, 1], [2, 2], {"checkpoint": Selective(recompute)}),
        (lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3).eval()), [2], [2], {}),
    ],
)
def test_gradients(make, balance, replicas, options):
    x, found = torch.randn(8, 3), []
    model = make()
    for those in ([1] * len(balance), replicas):
        torch.manual_seed(1)
        pipe = dealt(model, balance, those, chunks=4, **options)
        pipe.zero_grad()
        for driver in DRIVERS:
            run(pipe, driver, x)
        found.append([p.grad.clone() for p in pipe.parameters()])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("driver", [*DRIVERS, "no_grad"])
@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("chunks", [1, 5])
def test_deferred_statistics(driver, checkpoint, momentum, chunks):
    x, found = torch.randn(14, 3), []
    options = {"chunks": chunks, "checkpoint": checkpoint, "deferred_batch_norm": True}
    for replicas in ([1, 1], [3, 2]):
        torch.manual_seed(1)
        norms = [nn.BatchNorm1d(3, momentum=momentum), nn.BatchNorm1d(3)]
        layers = nn.Sequential(nn.Linear(3, 3), norms[0], nn.Linear(3, 3), norms[1])
        pipe = dealt(layers, [2, 2], replicas, **options)
        for _ in range(2):
            run(pipe, driver, x)
        found.append({**dict(pipe.named_buffers()), "eval": pipe.eval()(x).detach()})
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_replicas_see_what_becomes_of_the_parameters():
    pipe = dealt(linear_model(), [2, 2], [2, 2], chunks=4)
    plain, x = copied(pipe), torch.randn(4, 3)
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


# --- losses on a stage with replicas ---------------------------------------------------------


def counted(*metrics: str):
    def loss_fn(output, target):
        count = (target != -1).sum()
        loss = nn.functional.cross_entropy(output, target, ignore_index=-1, reduction="sum")
        return (loss / count.clamp(min=1), count, *[{name: count} for name in metrics])

    return loss_fn


@pytest.mark.parametrize(
    "loss_fn", [nn.CrossEntropyLoss(ignore_index=-1), counted(), counted("count"), None]
)
def test_losses_with_weights_and_with_parameters(loss_fn):
    model, x = linear_model(2), torch.randn(12, 3)
    scale = nn.Parameter(torch.tensor(2.0))
    target = torch.randint(-1, 3, (12,))

    def own(output, target):  # its own parameter, and one of a layer
        first = pipe[0].weight.square().sum()
        return (output * scale - target[:, None]).square().mean() + first

    found = []
    for replicas in ([1, 1], [1, 3], [1, 3]):
        pipe, scale.grad = dealt(model, [1, 1], replicas, chunks=6), None
        pipe.zero_grad()
        result = pipe.train_batch(x, target, loss_fn=own if loss_fn is None else loss_fn)
        grads = [p.grad.clone() for p in (*pipe.parameters(), scale) if p.grad is not None]
        found.append([result, grads])
    torch.testing.assert_close(found[0], found[1])
    torch.testing.assert_close(found[1], found[2], rtol=0, atol=0)


# --- hooks, and what is left -----------------------------------------------------------------


def test_hooks_of_a_parameter_see_a_gradient_of_each_replica():
    pipe, sums, after = dealt(linear_model(2), [1, 1], [3, 1], chunks=6), [], []
    weight = pipe[0].weight
    weight.register_hook(lambda grad: sums.append(grad.clone()))
    weight.register_post_accumulate_grad_hook(lambda p: after.append(p.grad.clone()))
    x = torch.randn(6, 3)
    pipe.train_batch(x, loss_fn=torch.mean)
    assert (len(sums), len(after)) == (2 + 1 + 1, 1)  # its own micro-batches, and two sums
    torch.testing.assert_close(sum(sums), weight.grad)
    assert torch.equal(after[-1], weight.grad)
    sums.clear()
    pipe.zero_grad()
    pipe(x).sum().backward()
    assert len(sums) == 1
    assert torch.equal(sums[0], weight.grad)


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
    layers = nn.Sequential(Either(), nn.Linear(3, 3))
    pipe = dealt(layers, [1, 1], replicas, chunks=2, checkpoint=checkpoint)
    for parameter in pipe.parameters():
        parameter.register_hook(lambda grad: grads.append(grad * 2))
    pipe(torch.randn(4, 3)).sum().backward()
    assert len(grads) == 4
    assert pipe[0].unused.weight.grad is None


def test_each_replica_runs_a_module_of_its_own_with_its_hooks():
    class Remembers(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
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
    replicas = [r.partition for those in pipe._ready().replicas for r in those]
    assert len(replicas) == 3
    for replica in replicas:
        assert all(p.grad is None for p in replica.parameters())
    alive = [weakref.ref(p) for replica in replicas for p in replica.parameters()]
    del replicas, replica
    pipe.replicas = 1
    gc.collect()
    assert not any(reference() is not None for reference in alive)
