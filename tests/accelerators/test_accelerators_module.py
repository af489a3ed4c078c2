"""A pipe on four accelerators, real or simulated, is a module like any other."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from syncpipe import Pipe
from tests.accelerators.four import (
    CHUNKS,
    LAYOUTS,
    assert_close,
    data,
    expected,
    model,
    pipe_of,
    trained,
    weighted,
)
from tests.support import accelerator as acc
from tests.training.failures.failing import Grads

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("four_devices")]


def saved(state: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return file


@pytest.mark.parametrize("place", ["cpu", "first", "turned", None])
def test_a_state_dict_goes_to_other_devices(place):
    """``map_location`` in all its forms; the weights end up where the pipe has its stages."""
    pipe = pipe_of(model(), "four")
    kind = acc.kind()
    where: Any = {
        "cpu": "cpu",
        "first": acc.device(),
        "turned": {f"{kind}:{k}": f"{kind}:{(k + 1) % 4}" for k in range(4)},
        None: None,
    }[place]
    state = torch.load(saved(pipe.state_dict()), map_location=where)
    devices = {str(tensor.device) for tensor in state.values()}
    assert devices == {"cpu": {"cpu"}, "first": {f"{kind}:0"}}.get(
        place, {f"{kind}:{(k + (place == 'turned')) % 4}" for k in range(4)} & devices
    )
    other, plain = pipe_of(model(), "backwards"), model()
    homes = [p.device for p in other.parameters()]
    other.load_state_dict(state)
    plain.load_state_dict(state)
    assert [p.device for p in other.parameters()] == homes
    for module in (other, plain):
        for key, value in module.state_dict().items():
            assert torch.equal(value.cpu(), pipe.state_dict()[key].cpu())
    x, target = data()
    assert_close(trained(other, x, target, weighted), expected(plain, x, target, weighted))


COPIES: dict[str, Any] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda pipe: pickle.loads(pickle.dumps(pipe)),
    "torch.save": lambda pipe: torch.load(saved(pipe), weights_only=False),
}


@pytest.mark.parametrize("layout", ["four", "workers", "in turns"])
@pytest.mark.parametrize("how", COPIES)
def test_copies(how, layout):
    """They are where the first one is, and trained apart from it."""
    plain = model()
    pipe = pipe_of(plain, layout)
    x, target = data()
    trained(pipe, x, target, weighted)  # its threads and streams are made
    twin = COPIES[how](pipe)
    assert twin.devices == pipe.devices
    before = Grads(pipe)
    assert_close(trained(twin, x, target, weighted), expected(plain, x, target, weighted))
    assert before.unchanged()


def test_hooks_and_grad(four_devices):
    """``autograd.grad`` and hooks on parameters, on the stream and device of their stage."""
    plain = model()
    pipe = pipe_of(plain, "four", checkpoint="always")
    x, target = data()
    right = expected(plain, x, target, F.mse_loss)
    seen = []
    for p in pipe.parameters():
        p.register_hook(lambda grad: seen.append(grad.device))
    loss = F.mse_loss(pipe(x.to(four_devices[0])), target.to(four_devices[3]))
    assert_close([*torch.autograd.grad(loss, [*pipe.parameters()])], right[2:])
    assert {*seen} == {p.device for p in pipe.parameters()}


def test_the_default_is_all_accelerators(four_devices):
    pipe = Pipe(model(), [2, 2, 2, 1], chunks=CHUNKS)
    assert pipe.devices == four_devices
    numbers = Pipe(model(), [2, 2, 2, 1], devices=[3, 0, 1, 0], chunks=CHUNKS)
    assert numbers.devices == [four_devices[k] for k in (3, 0, 1, 0)]


@pytest.mark.parametrize("layout", ["four", "in turns"])
def test_a_pipe_of_layers_that_are_there_already(layout):
    """As in ``torch.distributed.pipeline.sync``: no balance, devices are where the layers are."""
    places = [
        worker if isinstance(worker, torch.device) else torch.device("cpu")
        for worker in LAYOUTS[layout]()
    ]
    plain = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))).double()
    layers = copy.deepcopy(plain)
    for layer, place in zip(layers, places, strict=True):
        layer.to(place)
    pipe = Pipe(layers, chunks=CHUNKS)
    assert [device.type for device in pipe.devices] == [place.type for place in places]
    x, target = data()
    assert_close(trained(pipe, x, target, weighted), expected(plain, x, target, weighted))


def test_moving_a_pipe_is_refused(four_devices):
    pipe = pipe_of(model(), "four")
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        pipe.to(four_devices[1])
    assert [p.device for p in pipe[1].parameters()] == [four_devices[0]] * 2
    assert isinstance(pipe.half(), Pipe)
