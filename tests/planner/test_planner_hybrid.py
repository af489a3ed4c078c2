"""Plans with replicas that a pipe runs: options, chunks, memory."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import syncpipe
from syncpipe import Pipe
from syncpipe.balance.profile import LayerProfile, Profile
from syncpipe.options import consecutive
from syncpipe.planner.chain import Chain, costs_of
from syncpipe.planner.machine import Machine
from syncpipe.planner.replicas import replicated, runnable
from syncpipe.schedules import build, simulate
from tests.planner.test_planner_replicas import profile


def test_a_pipe_runs_what_is_planned():
    layers = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
    costs = profile([4.0, 4.0, 4.0], [1.0, 1.0, 1.0], [10, 1000, 1000])
    plan = syncpipe.plan(costs, devices="4 x 1GB, 1kB/s", batch_size=8, replicas=True)
    assert max(plan.replicas) > 1
    assert sum(plan.replicas) == 4
    devices = [f"cpu:{k}" for k in range(4)]
    pipe = Pipe(layers, **plan.options(), devices=devices)
    assert (pipe.balance, pipe.replicas, pipe.chunks) == (plan.balance, plan.replicas, plan.chunks)
    with pipe.trace() as trace:
        pipe.train_batch(torch.randn(8, 8), loss_fn=torch.mean)
    assert trace.rows == tuple(devices)
    assert plan.as_dict()["options"] == plan.options()
    assert f"{plan.chunks} micro-batches" in str(plan)


def test_the_step_is_that_of_the_simulation_and_gradients_exchanged():
    costs = profile([6.0, 3.0], [0.0, 0.0], [8, 8])
    machine = Machine.even(3, bandwidth=4.0)
    plan = runnable(replicated(costs, 3, 4.0, samples=1), costs, machine, 12, 4.0)
    assert (plan.balance, plan.replicas) == ([1, 1], [2, 1])
    steps = {}
    for chunks in (2, 3, 4, 6, 12):
        chain = Chain.of(costs.of(12), 12 / chunks, 4.0)
        schedule = build("1f1b", chunks, consecutive(plan.replicas))
        step = simulate(schedule, costs_of(chain, machine, plan.balance)).makespan
        steps[chunks] = step + 2 * 8 / 4.0
    assert plan.step == pytest.approx(min(steps.values()))
    assert steps[plan.chunks] == pytest.approx(plan.step)


def test_memory_is_that_of_each_device():
    costs = profile([6.0, 3.0], [0.0, 0.0], [8, 8])
    machine = Machine.even(3, bandwidth=4.0)
    plan = runnable(replicated(costs, 3, 4.0, samples=1), costs, machine, 12, 4.0)
    # Parameters, gradients, Adam's state, and gradients that arrive; a copy, and its gradients.
    assert plan.memory == pytest.approx((4 * 8 + 8, 2 * 8, 4 * 8))


def test_what_does_not_fit_has_smaller_micro_batches():
    layers = [LayerProfile(f"{k}", {1: 1.0}, {1: 2.0}, {1: 0}, {1: 10}) for k in range(2)]
    costs = Profile(tuple(layers))
    plan = replicated(costs, 4, math.inf, samples=1)
    free, limited = (
        runnable(plan, costs, Machine.even(4, limit), 12, 4.0) for limit in (math.inf, 30.0)
    )
    assert max(free.memory) > 30
    assert max(limited.memory) <= 30
    assert limited.chunks > free.chunks
