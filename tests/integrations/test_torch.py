"""What PyTorch has for training loops: averages, schedulers, scalers, checkpoints."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from syncpipe import Pipe
from tests.integrations.loops import batches, pipe_and_model, plain_loop


def steps(pipe: Pipe, optimizer: Any, scheduler: Any = None, count: int = 4) -> None:
    for x, y in batches(count):
        optimizer.zero_grad()
        pipe.train_batch(x, y, loss_fn=F.cross_entropy)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def assert_same(pipe: nn.Module, model: nn.Module) -> None:
    for actual, expected in zip(pipe.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(actual, expected)


SCHEDULERS: dict[str, Any] = {
    "StepLR": lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=8),
    "LambdaLR": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda k: 1 / (k + 1)),
}


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_learning_rate_schedulers(kind: str) -> None:
    pipe, model = pipe_and_model()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (pipe, model)]
    steps(pipe, optimizers[0], SCHEDULERS[kind](optimizers[0]))
    plain_loop(model, optimizers[1], SCHEDULERS[kind](optimizers[1]))
    assert_same(pipe, model)


def test_a_moving_average_of_the_weights() -> None:
    pipe, model = pipe_and_model()
    averages = [AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(0.9)) for m in (pipe, model)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (pipe, model)]
    for _ in range(3):
        steps(pipe, optimizers[0], count=1)
        plain_loop(model, optimizers[1], count=1)
        for average, trained in zip(averages, (pipe, model), strict=True):
            average.update_parameters(trained)
    assert_same(*averages)
    x, _ = batches()[0]
    torch.testing.assert_close(averages[0](x), averages[1](x))


def test_a_scaler_with_clipping() -> None:
    pipe, model = pipe_and_model()
    found = []
    for module in (pipe, model):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for x, y in batches():
            optimizer.zero_grad()
            if isinstance(module, Pipe):
                module.train_batch(x, y, loss_fn=F.cross_entropy, grad_scaler=scaler)
            else:
                scaler.scale(F.cross_entropy(module(x), y)).backward()
            scaler.unscale_(optimizer)
            found.append(nn.utils.clip_grad_norm_(module.parameters(), 0.5))
            scaler.step(optimizer)
            scaler.update()
    torch.testing.assert_close(found[:4], found[4:])
    assert_same(pipe, model)


def test_metrics_that_are_kept_beside_the_loss() -> None:
    """As ``torchmetrics`` does: state that each micro-batch updates, and one result."""
    pipe, model = pipe_and_model()
    right = total = 0

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        nonlocal right, total
        right += int((output.argmax(1) == target).sum())
        total += len(target)
        return F.cross_entropy(output, target)

    data = batches()
    for x, y in data:
        pipe.train_batch(x, y, loss_fn=loss_fn, verify=False)
    expected = sum(int((model(x).argmax(1) == y).sum()) for x, y in data)
    assert (right, total) == (expected, sum(len(y) for _, y in data))


def test_a_run_is_resumed_under_another_balance(tmp_path: Any) -> None:
    whole, model = pipe_and_model()
    adam = torch.optim.AdamW(whole.parameters(), lr=0.01)
    steps(whole, adam, count=4)

    first, _ = pipe_and_model([1, 2, 2])
    optimizer = torch.optim.AdamW(first.parameters(), lr=0.01)
    for x, y in batches()[:2]:
        optimizer.zero_grad()
        first.train_batch(x, y, loss_fn=F.cross_entropy)
        optimizer.step()
    file = tmp_path / "run.pt"
    torch.save({"model": first.state_dict(), "optimizer": optimizer.state_dict()}, file)

    second, _ = pipe_and_model([4, 1])
    with torch.no_grad():
        for p in second.parameters():
            p.zero_()
    resumed = torch.optim.AdamW(second.parameters(), lr=0.01)
    saved = torch.load(file, weights_only=True)
    second.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    for x, y in batches()[2:]:
        resumed.zero_grad()
        second.train_batch(x, y, loss_fn=F.cross_entropy)
        resumed.step()
    for actual, expected in zip(second.parameters(), whole.parameters(), strict=True):
        assert torch.equal(actual, expected)
    model.load_state_dict(second.state_dict())


@pytest.mark.filterwarnings("ignore")
def test_distributed_checkpoints_have_the_names_of_the_model(tmp_path: Any) -> None:
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    pipe, _ = pipe_and_model([2, 3])
    adam = torch.optim.AdamW(pipe.parameters(), lr=0.01)
    steps(pipe, adam, count=2)
    model_state, optimizer_state = get_state_dict(pipe, adam)
    checkpoint.save(
        {"model": model_state, "optimizer": optimizer_state}, checkpoint_id=tmp_path, no_dist=True
    )
    other, plain = pipe_and_model([1, 1, 3])
    for module in (other, plain):
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        model_state, optimizer_state = get_state_dict(module, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state}
        checkpoint.load(state, checkpoint_id=tmp_path, no_dist=True)
        set_state_dict(
            module, optimizer, model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )  # fmt: skip
        for actual, expected in zip(module.parameters(), pipe.parameters(), strict=True):
            assert torch.equal(actual, expected)
            assert torch.equal(optimizer.state[actual]["exp_avg"], adam.state[expected]["exp_avg"])
