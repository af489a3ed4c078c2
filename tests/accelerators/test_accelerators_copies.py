"""Tied weights and replicas on accelerators: what is copied to them, how often, and who is late."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from syncpipe import Pipe
from syncpipe.runtime.streams import same_memory
from syncpipe.runtime.worker import Worker
from tests.accelerators import four
from tests.accelerators.four import CHUNKS, LAYOUTS, ROWS, WIDTH
from tests.support import accelerator as acc

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("four_devices")]

WORDS = 7
HELD: list[Any] = []
HOWS = ["pipe(x)", "gpipe", "1f1b", "zb_h1"]


class Add(nn.Module):
    """Adds a weight, whose gradients are summed over micro-batches only."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x + self.weight)


def tied() -> nn.Sequential:
    """Embedding and head are tied, and what is added in between three times; one layer is twice."""
    added, layer = nn.Parameter(torch.randn(WIDTH)), nn.Linear(WIDTH, WIDTH)
    layers = nn.Sequential(
        nn.Embedding(WORDS, WIDTH), Add(added), layer, Add(added), layer, Add(added),
        nn.Linear(WIDTH, WORDS, bias=False),
    ).double()  # fmt: skip
    layers[6].weight = layers[0].weight
    return layers


#: Balance, replicas, devices.
SHAPES: dict[str, tuple[list[int], list[int], list[int]]] = {
    "last": ([3, 2, 2], [1, 1, 2], [0, 1, 2, 3]),
    "hybrid": ([4, 3], [2, 2], [0, 1, 2, 3]),
    "data parallel": ([7], [4], [0, 1, 2, 3]),
    "in rounds": ([2, 2, 2, 1], [2, 2, 2, 2], [0, 1, 2, 3, 0, 1, 2, 3]),
    "three and one": ([4, 3], [3, 1], [3, 1, 0, 2]),
    "workers": ([4, 3], [2, 2], [0, 1, 1, 1]),
}


def pipe_of(shape: str, module: nn.Sequential, **options: Any) -> Pipe:
    """A pipe with replicas; or, for a layout of four devices, with tied weights."""
    options = {"chunks": CHUNKS, **options}
    if shape in LAYOUTS and shape not in SHAPES:
        return Pipe(copy.deepcopy(module), [2, 2, 2, 1], devices=LAYOUTS[shape](), **options)
    balance, replicas, devices = SHAPES[shape]
    worker = Worker if shape == "workers" else torch.device  # with streams of their own
    options["devices"] = [worker(acc.device(k)) for k in devices]
    return Pipe(copy.deepcopy(module), balance, replicas=replicas, **options)


def case(of: str) -> tuple[nn.Sequential, tuple[Tensor, Tensor], Any]:
    """A plain model, input and target, and a loss."""
    if of == "tied":
        x, target = torch.randint(WORDS, (2, ROWS))
        return tied(), (x, target), F.cross_entropy
    return four.model(), four.data(), F.mse_loss


def stepped(module: nn.Module, how: str, given: tuple[Tensor, Tensor], loss_fn: Any) -> Any:
    """A step of SGD; loss and gradients, on the host."""
    x, target = given
    if isinstance(module, Pipe):
        x, target = x.to(module.devices[0]), target.to(module.devices[-1])
    if isinstance(module, Pipe) and how != "pipe(x)":
        loss = module.train_batch(x, target, loss_fn=loss_fn, schedule=how, verify=False)
    else:
        loss = loss_fn(module(x), target)
        loss.backward()
    found = [loss.detach(), *(p.grad for p in module.parameters())]
    found = [tensor.to("cpu", copy=True) for tensor in found]
    acc.synchronize()
    # Autograd made them on streams of its own: they are there until they are read no more.
    HELD[:] = [p.grad for p in module.parameters()]
    with torch.no_grad():
        for p in module.parameters():
            p -= 0.1 * p.grad  # which is late for the next step
    module.zero_grad()
    return found


@pytest.mark.parametrize(
    ("of", "shape", "checkpoint", "how"),
    [
        (of, shape, *way)
        for of, shapes in [("tied", ["four", "interleaved", "in turns"]), ("replicas", [*SHAPES])]
        for k, shape in enumerate(shapes)
        for way in four.WAYS[k % 2 :: 2]
    ],
)
def test_training_equals_itself_to_the_bit_and_the_plain_model_whoever_is_late(
    of, shape, checkpoint, how
):
    plain, given, loss_fn = case(of)
    pipes = [pipe_of(shape, plain, checkpoint=checkpoint) for _ in range(2)]
    for _ in range(3):
        wanted = stepped(plain, how, given, loss_fn)
        ours = []
        for k, pipe in enumerate(pipes):
            with acc.late(seed=k):
                ours.append(stepped(pipe, how, given, loss_fn))
        for a, b, right in zip(*ours, wanted, strict=True):
            assert torch.equal(a, b)
            torch.testing.assert_close(a, right)
    if of == "tied":
        assert pipes[0][6].weight is pipes[0][0].weight


# --- replicas ------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_results_are_on_the_last_device_and_parameters_on_the_first_of_their_stage(shape):
    plain = four.model()
    pipe = pipe_of(shape, plain)
    x = torch.randn(ROWS, WIDTH, dtype=torch.float64, device=pipe.devices[0])
    with acc.late(), torch.no_grad():
        output = pipe(x)
        evaluated, loss = pipe.eval_batch(x), pipe.eval_batch(x, x.cpu(), loss_fn=four.weighted)
    assert output.device == evaluated.device == loss.device == pipe.devices[-1]
    assert torch.equal(output, evaluated)
    torch.testing.assert_close(output.cpu(), plain(x.cpu()).detach())
    first = 0
    for partition, count in zip(pipe.partitions, pipe.replicas, strict=True):
        for p in partition.parameters():
            assert same_memory(p.device, pipe.devices[first])
        first += count


def test_deferred_statistics_are_those_of_one_device():
    norm = nn.BatchNorm1d(WIDTH)
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), norm, nn.Linear(WIDTH, WIDTH)).double()
    x, found = four.data()[0], []
    for replicas in (1, 4):
        devices = [acc.device(k) for k in range(replicas)]
        pipe = Pipe(
            copy.deepcopy(plain), [3], replicas=replicas, devices=devices, chunks=4,
            deferred_batch_norm=True,
        )  # fmt: skip
        for how in HOWS:
            with acc.late():
                stepped(pipe, how, (x, x), F.mse_loss)
        found.append([buffer.cpu() for buffer in pipe.buffers()])
    torch.testing.assert_close(*found)


def test_copies_are_freed_with_the_replicas():
    _, given, loss_fn = case("replicas")
    pipe = pipe_of("hybrid", four.model())
    stepped(pipe, "1f1b", given, loss_fn)
    HELD.clear()
    assert acc.allocated(acc.device(3)) > 0
    pipe.replicas = 1
    gc.collect()
    assert acc.allocated(acc.device(2), acc.device(3)) <= 2 * sum(t.nbytes for t in given)


def test_activations_go_to_the_host_from_each_replica():
    plain, given, loss_fn = case("replicas")
    for how in ("pipe(x)", "1f1b"):
        found = []
        for checkpoint in ("never", "offload"):
            pipe = pipe_of("hybrid", plain, checkpoint=checkpoint)
            with acc.late():
                found.append(stepped(pipe, how, given, loss_fn))
        assert all(map(torch.equal, *found))


# --- tied weights --------------------------------------------------------------------------------


class Sees(nn.Linear):
    """Notes the memory of its weight, and keeps it from being used again."""

    seen: list[Any]

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(self.weight.untyped_storage())
        return super().forward(x)

    def copies(self) -> int:
        """How many there were."""
        return len({storage.data_ptr() for storage in self.seen})


def head_that_sees() -> tuple[Pipe, Sees]:
    embedding, head = nn.Embedding(WORDS, WIDTH), Sees(WIDTH, WORDS, bias=False)
    head.weight, head.seen = embedding.weight, []
    devices = [acc.device(0), acc.device(1)]
    return Pipe(nn.Sequential(embedding, head), [1, 1], devices=devices, chunks=3), head


def test_a_copy_is_made_once_a_call_and_not_for_each_micro_batch():
    pipe, head = head_that_sees()
    x = torch.arange(6, device=acc.device(0))
    changes = [
        lambda w: w.mul_(2),
        lambda w: setattr(w, "data", w.detach().clone()),
        lambda w: w.data.add_(1),  # leaves no trace
    ]
    with torch.no_grad():
        for change in changes:
            change(pipe[0].weight)
            head.seen.clear()
            assert torch.equal(pipe(x).cpu(), nn.Sequential(*pipe)[0](x).cpu() @ weight_of(pipe))
            assert head.copies() == 1
    head.seen.clear()
    pipe.train_batch(x, torch.arange(6, device=acc.device(1)), loss_fn=F.cross_entropy)
    assert head.copies() == 1


def weight_of(pipe: Pipe) -> Tensor:
    return pipe[0].weight.detach().cpu().t()


def test_what_is_written_into_the_data_after_a_step_is_seen():
    pipe, _ = head_that_sees()
    x, target = (torch.arange(6, device=acc.device(k)) for k in range(2))
    for _ in range(3):
        pipe.train_batch(x, target, loss_fn=F.cross_entropy)
        pipe[0].weight.data -= 0.1 * pipe[0].weight.grad  # leaves no trace
        with torch.no_grad():
            output = pipe(x).cpu()
        torch.testing.assert_close(output, pipe[0](x).detach().cpu() @ weight_of(pipe))


def test_what_is_tied_or_untied_later_moves_to_its_device():
    devices = [acc.device(k) for k in range(2)]
    pipe = Pipe(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), [1, 1], devices=devices)
    x = torch.randn(4, 3)
    pipe[0].weight = pipe[1].weight  # the owner's place is the first
    for change in (True, False):
        if not change:
            pipe[1].weight = nn.Parameter(pipe[0].weight.detach() * 2)
        plain = copy.deepcopy(nn.Sequential(*pipe)).to("cpu")
        plain[1].weight = nn.Parameter(pipe[1].weight.detach().cpu())
        torch.testing.assert_close(pipe(x.to(devices[0])).cpu(), plain(x))
        assert same_memory(pipe[0].weight.device, devices[0])
        assert (pipe[0].weight is pipe[1].weight) == change
        assert same_memory(pipe[1].weight.device, devices[not change])


def test_buffers_of_a_module_at_two_places_are_copied_too():
    class Scale(nn.Module):
        scale: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    layer, devices = Scale(), [acc.device(k) for k in range(2)]
    pipe = Pipe(nn.Sequential(layer, layer), [1, 1], devices=devices, chunks=2)
    x = torch.ones(2, 3, device=devices[0])
    for factor in (1, 2, 3):
        pipe[0].scale.fill_(factor)
        assert pipe(x).cpu().unique().tolist() == [factor**2]
    assert same_memory(pipe[0].scale.device, devices[0])
