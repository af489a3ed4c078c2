"""What PyTorch does with any accelerator: random numbers, autocast, forks and the end."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests import simulated

A, B = simulated.devices(2)


def draws(device):
    return [
        torch.rand(4, device=device),
        torch.randn(4, device=device),
        torch.randint(9, (4,), device=device),
        torch.randperm(9, device=device),
        torch.ones(9, device=device).bernoulli_(0.5),
        F.dropout(torch.ones(9, device=device)),
        torch.multinomial(torch.ones(9, device=device), 4),
    ]


def same(first, second):
    return all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(first, second, strict=True))


def test_each_device_has_a_generator():
    before = torch.get_rng_state()
    states = [torch.sim.get_rng_state(device) for device in simulated.devices()]
    draws(B)
    torch.accelerator.synchronize(B)
    changed = [
        not torch.equal(state, torch.sim.get_rng_state(device))
        for state, device in zip(states, simulated.devices(), strict=True)
    ]
    assert changed == [False, True, False, False]
    assert torch.equal(before, torch.get_rng_state())


def seeded():
    return lambda: torch.manual_seed(3)


def with_state():
    state = torch.sim.get_rng_state(B)
    return lambda: torch.sim.set_rng_state(state, B)


@pytest.mark.parametrize("start", [seeded, with_state])
def test_the_same_seed_or_state_draws_the_same(start):
    again = start()
    again()
    first = draws(B)
    assert not same(first, draws(B))
    again()
    with simulated.delays(1, 0.5):
        assert same(first, draws(B))


def test_numbers_are_drawn_when_the_kernel_is_launched():
    """As on CUDA: what happens to the generator while it waits does not matter."""
    torch.manual_seed(3)
    first = torch.rand(4, device=A)
    torch.manual_seed(3)
    with simulated.held(torch.accelerator.current_stream(A)):
        second = torch.rand(4, device=A)
        torch.manual_seed(4)
    assert same([first], [second])


def test_a_generator_of_ones_own():
    generator = torch.Generator(B).manual_seed(3)
    first = torch.rand(4, device=B, generator=generator)
    second = torch.rand(4, device=B, generator=generator)
    generator.manual_seed(3)
    assert same([first], [torch.rand(4, device=B, generator=generator)])
    assert not same([first], [second])
    with pytest.raises(RuntimeError, match="generator"):
        torch.rand(4, device=B, generator=torch.Generator())


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputation_draws_the_same(reentrant):
    layer = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4)).to(B)
    found = []
    for run in (layer, lambda x: checkpoint(layer, x, use_reentrant=reentrant)):
        x = torch.ones(3, 4, device=B, requires_grad=True)
        torch.manual_seed(1)
        run(x).sum().backward()
        found.append(x.grad)
    assert same(found[:1], found[1:])


def test_autocast():
    layer = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 4))
    there = copy.deepcopy(layer).to(B)
    x, goal = torch.randn(5, 3, 8, 8), torch.arange(5) % 4
    with torch.autocast("cpu", torch.bfloat16):
        expected = layer(x)
    with torch.autocast("sim", torch.bfloat16):
        found = there(x.to(B))
        loss = F.cross_entropy(found, goal.to(B))
        assert found.exp().dtype == torch.float32
        assert torch.cat([found, found.float()]).dtype == torch.float32  # the widest
        assert found.sum(0).dtype == torch.float32
    assert (found.dtype, loss.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(found.cpu(), expected)
    loss.backward()
    assert there[0].weight.grad.dtype == torch.float32


def run_python(code):
    """Runs a program that has simulated devices; returns what it prints."""
    root = Path(simulated.__file__).parents[2]
    program = "import torch\nfrom tests import simulated\nsimulated.load()\n" + textwrap.dedent(
        code
    )
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_process_ends_with_work_under_way():
    run = run_python(
        """
        streams = [torch.Stream(device=d) for d in simulated.devices()]
        stuck = simulated.held(streams[0])
        stuck.__enter__()
        streams[1].wait_event(streams[0].record_event())
        kept = [torch.ones(1000, device=d) for d in simulated.devices()]
        for device in simulated.devices():
            simulated.sleep(20, device)
        print("end")
        """
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "end\n", "")


def test_a_forked_child_is_refused_and_ends():
    run = run_python(
        """
        import os
        x = torch.ones(3, device="sim:1")
        child = os.fork()
        if child == 0:
            del x
            assert not torch.sim.is_available()
            try:
                torch.ones(3, device="sim:1")
            except RuntimeError as error:
                print("forked" in str(error), flush=True)
            os._exit(0)
        print(os.waitpid(child, 0)[1], x.sum().item())
        """
    )
    assert (run.returncode, run.stdout) == (0, "True\n0 3.0\n"), run.stderr
