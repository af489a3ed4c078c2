"""Tied weights on accelerators, real or simulated: where they are copied to, and how often."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from syncpipe import Pipe
from syncpipe.runtime.streams import same_memory
from tests.accelerators.four import CHUNKS, LAYOUTS, WAYS
from tests.support import accelerator as acc

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("four_devices")]

WORDS, WIDTH = 7, 4
HOWS = ["pipe(x)", "gpipe", "1f1b", "zb_h1"]


class Add(nn.Module):
    """Adds a weight, whose gradients are summed over micro-batches only."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x + self.weight)


def model() -> nn.Sequential:
    """Embedding and head are tied, and what is added in between three times; one layer is twice."""
    added, layer = nn.Parameter(torch.randn(WIDTH)), nn.Linear(WIDTH, WIDTH)
    layers = nn.Sequential(
        nn.Embedding(WORDS, WIDTH), Add(added), layer, Add(added), layer, Add(added),
        nn.Linear(WIDTH, WORDS, bias=False),
    ).double()  # fmt: skip
    layers[6].weight = layers[0].weight
    return layers


def pipe_of(module: nn.Sequential, layout: str, **options: Any) -> Pipe:
    options = {"chunks": CHUNKS, "devices": LAYOUTS[layout](), **options}
    return Pipe(copy.deepcopy(module), [2, 2, 2, 1], **options)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)


def stepped(module: nn.Module, how: str, x: Tensor, target: Tensor) -> list[Tensor]:
    """One step of SGD; loss and gradients."""
    if isinstance(module, Pipe) and how != "pipe(x)":
        loss = module.train_batch(x, target, loss_fn=loss_of, schedule=how)
    else:
        loss = loss_of(module(x), target)
        loss.backward()
    found = [loss.detach().cpu(), *(p.grad.cpu() for p in module.parameters())]
    with torch.no_grad():
        for p in module.parameters():
            p -= 0.5 * p.grad
    acc.synchronize()  # what autograd made on streams of its own is read no more
    module.zero_grad()
    return found


@pytest.mark.parametrize(
    ("layout", "checkpoint", "how"),
    [(layout, *way) for k, layout in enumerate(LAYOUTS) for way in WAYS[k % 2 :: 2]],
)
def test_training_equals_the_plain_model_and_itself(layout, checkpoint, how):
    plain = model()
    pipes = [pipe_of(plain, layout, checkpoint=checkpoint) for _ in range(2)]
    x, target = torch.randint(WORDS, (2, 12))
    there, answer = x.to(pipes[0].devices[0]), target.to(pipes[0].devices[-1])
    for _ in range(3):
        expected = stepped(plain, how, x, target)
        ours = []
        for k, pipe in enumerate(pipes):
            with acc.late(seed=k):
                ours.append(stepped(pipe, how, there, answer))
        for a, b, wanted in zip(*ours, expected, strict=True):
            assert torch.equal(a, b)  # whoever was late
            torch.testing.assert_close(a, wanted)
    assert pipes[0][6].weight is pipes[0][0].weight
    assert same_memory(pipes[0][0].weight.device, pipes[0].devices[0])


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
    pipe.train_batch(x, torch.arange(6, device=acc.device(1)), loss_fn=loss_of)
    assert head.copies() == 1


def weight_of(pipe: Pipe) -> Tensor:
    return pipe[0].weight.detach().cpu().t()


def test_what_is_written_into_the_data_after_a_step_is_seen():
    pipe, _ = head_that_sees()
    x, target = (torch.arange(6, device=acc.device(k)) for k in range(2))
    for _ in range(3):
        pipe.train_batch(x, target, loss_fn=loss_of)
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


def test_nothing_stays_of_a_step():
    plain = model()
    pipe = pipe_of(plain, "four", checkpoint="except_last")
    x, target = (torch.randint(WORDS, (12,), device=pipe.devices[k]) for k in (0, -1))
    for how in HOWS:
        for _ in range(3):
            stepped(pipe, how, x, target)
        before = acc.allocated()
        for _ in range(10):
            stepped(pipe, how, x, target)
        assert acc.allocated() == before
