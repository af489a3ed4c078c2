"""Tied weights and replicas on accelerators: what is copied to them, how often, and who is late."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from syncpipe import Pipe
from syncpipe.runtime.streams import same_memory
from syncpipe.runtime.worker import Worker
from tests.accelerators import four
from tests.accelerators.four import ROWS, SHAPES, WIDTH, pipe_of
from tests.support import accelerator as acc
from tests.support.running import Do, on_gradient

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("four_devices")]

# --- replicas ------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_results_are_on_the_last_device_and_parameters_on_the_first_of_their_stage(shape):
    plain = four.model()
    pipe = pipe_of(plain, shape)
    x = torch.randn(ROWS, WIDTH, dtype=torch.float64, device=pipe.devices[0])
    with torch.no_grad():
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


def test_what_replicas_give_back_of_their_input_may_be_overwritten_at_once():
    """The copy to the device of the results reads memory of the caller's."""
    devices = [acc.device(0), acc.device(1)]
    pipe = Pipe(nn.Sequential(nn.Identity()), [1], replicas=2, devices=devices, chunks=2)
    x = torch.ones(4, 2, device=devices[0])
    with torch.no_grad():
        output = pipe(x)
        x.zero_()
    assert output.cpu().equal(torch.ones(4, 2))


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


def test_a_copy_is_made_once_a_call_and_is_what_the_weight_is_now():
    embedding, head = nn.Embedding(7, WIDTH), Sees(WIDTH, 7, bias=False)
    head.weight, head.seen = embedding.weight, []
    devices = [acc.device(0), acc.device(1)]
    pipe = Pipe(nn.Sequential(embedding, head), [1, 1], devices=devices, chunks=3)
    x, target = (torch.arange(6, device=device) for device in devices)

    def learn(w: Tensor) -> None:
        pipe.train_batch(x, target, loss_fn=F.cross_entropy)
        assert head.copies() == 1
        w.data -= 0.1 * w.grad  # leaves no trace

    changes = [
        lambda w: w.mul_(2),
        lambda w: setattr(w, "data", w.detach().clone()),
        lambda w: w.data.add_(1),
        torch.enable_grad()(learn),
        torch.enable_grad()(learn),
    ]
    with torch.no_grad():
        for change in changes:
            head.seen.clear()
            change(embedding.weight)
            head.seen.clear()
            output, weight = pipe(x).cpu(), embedding.weight.cpu()
            torch.testing.assert_close(output, weight[:6] @ weight.t())
            assert head.copies() == 1


def test_a_copy_waits_for_the_callers_update_where_workers_have_streams_of_their_own():
    first, last = nn.Linear(4, 4), nn.Linear(4, 4)
    last.weight = first.weight
    workers = [Worker(acc.device(0)), Worker(acc.device(1))]
    pipe = Pipe(nn.Sequential(first, last), [1, 1], devices=workers, chunks=2)
    x = torch.randn(4, 4, device=acc.device(0))
    acc.synchronize()
    for _ in range(2):
        with torch.no_grad():
            first.weight.mul_(0.5)
        pipe.eval_batch(x)


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


def test_a_stream_that_fails_leaves_no_gradient_in_a_copy():
    devices, broken = [acc.device(k) for k in range(2)], False

    def act(grad: Tensor) -> None:
        if broken and grad.device == devices[1]:
            raise ArithmeticError("the last layer of this replica has its gradient")

    layers = nn.Linear(3, 3), Do(lambda x: on_gradient(x, act)), nn.Linear(3, 3)
    pipe = Pipe(nn.Sequential(*layers), [3], replicas=2, devices=devices, chunks=2)
    x, found = torch.randn(2, 3, device=devices[0]), []
    sgd = partial(torch.optim.SGD, lr=0.0)
    for _ in range(2):
        broken = False
        pipe.zero_grad()
        pipe.train_batch(x, loss_fn=torch.mean)
        found.append([p.grad.cpu() for p in pipe.parameters()])
        broken = True
        with pytest.raises(ArithmeticError):
            pipe.train_stream([(x, None)] * 2, loss_fn=torch.mean, optimizer=sgd)
    torch.testing.assert_close(*found, rtol=0, atol=0)
