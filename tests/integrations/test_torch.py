"""What PyTorch has for training loops: averages, schedulers, scalers, checkpoints."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from syncpipe import Pipe
from tests.integrations.loops import assert_trained_alike, batches, pipe_and_model


def steps(pipe: Pipe, optimizer: Any, pairs: Any) -> None:
    for x, y in pairs:
        optimizer.zero_grad()
        pipe.train_batch(x, y, loss_fn=F.cross_entropy)
        optimizer.step()


SCHEDULERS: dict[str, Any] = {
    "StepLR": lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=8),
    "LambdaLR": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda k: 1 / (k + 1)),
}


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_schedulers_scalers_clipping_and_a_moving_average(kind: str) -> None:
    pipe, model = pipe_and_model()
    norms, averages = [], []
    for module in (pipe, model):
        average = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6)
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        scheduler = SCHEDULERS[kind](optimizer)
        for x, y in batches():
            optimizer.zero_grad()
            if isinstance(module, Pipe):
                module.train_batch(x, y, loss_fn=F.cross_entropy, grad_scaler=scaler)
            else:
                scaler.scale(F.cross_entropy(module(x), y)).backward()
            scaler.unscale_(optimizer)
            norms.append(nn.utils.clip_grad_norm_(module.parameters(), 0.5))
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            average.update_parameters(module)
        averages.append(average)
    torch.testing.assert_close(norms[:4], norms[4:])
    assert_trained_alike(pipe, model)
    assert_trained_alike(*averages)
    torch.testing.assert_close(averages[0](x), averages[1](x))


def test_a_run_is_resumed_under_another_balance(tmp_path: Any) -> None:
    pipes = [pipe_and_model(balance)[0] for balance in ([2, 3], [1, 2, 2], [4, 1])]
    optimizers = [torch.optim.AdamW(pipe.parameters(), lr=0.01) for pipe in pipes]
    whole, first, second = zip(pipes, optimizers, strict=True)
    steps(*whole, batches())
    steps(*first, batches()[:2])
    torch.save([each.state_dict() for each in first], tmp_path / "run.pt")
    nn.init.zeros_(second[0][0].weight)
    for each, state in zip(second, torch.load(tmp_path / "run.pt"), strict=True):
        each.load_state_dict(state)
    steps(*second, batches()[2:])
    for actual, expected in zip(second[0].parameters(), whole[0].parameters(), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.filterwarnings("ignore")
def test_distributed_checkpoints_have_the_names_of_the_model(tmp_path: Any) -> None:
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    pipe, _ = pipe_and_model([2, 3])
    adam = torch.optim.AdamW(pipe.parameters(), lr=0.01)
    steps(pipe, adam, batches(2))
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
